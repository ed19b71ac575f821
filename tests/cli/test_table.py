"""Tables in a pipe; ``test_list.py`` has one on a terminal."""

from __future__ import annotations

from specplug.cli.standard_output import print_table


def test_numbers_stand_to_the_right(capsys):
    print_table(("name", "n", "why"), [("x", "1", "-"), ("long", "100", "so")], right=("n",))
    assert capsys.readouterr().out == (
        "NAME    N  WHY\n"
        "x       1  -\n"
        "long  100  so\n"
    )  # fmt: skip
