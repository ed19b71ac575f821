"""Absurd numbers on the command line: told at once, with exit code 2, or taken."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from specplug.bounds import MAX_SECONDS, bound_of
from specplug.cli import main
from specplug.cli.bench import bench
from specplug.cli.generate import generate
from specplug.cli.serve import serve

ABSURD = ["0", "-1", "2147483648", "1" + "0" * 12, "1" + "0" * 30, "9" * 5000, "nan", "inf", "-inf"]
NUMBERS = [
    pytest.param(command, option, id=f"{command.name}{option.opts[0]}")
    for command in (generate, bench, serve)
    for option in command.params
    if isinstance(option.type, click.types.IntParamType | click.types.FloatParamType)
]


@pytest.mark.parametrize(("command", "option"), NUMBERS)
def test_absurd_number_is_told_or_taken(command: click.Command, option: click.Option) -> None:
    for value in ABSURD:
        taken: object = None
        said = ""
        try:
            taken = command.make_context(command.name, [option.opts[0], value]).params[option.name]
        except click.BadParameter as error:
            said = error.format_message()
        assert isinstance(taken, int | float | None) or not said
        assert not said or option.opts[0] in said


@pytest.mark.parametrize(
    ("option", "bound"),
    [
        ("--num-threads", "num_threads"),
        ("--speculative-num-steps", "num_steps"),
        ("--speculative-eagle-topk", "topk"),
        ("--speculative-num-draft-tokens", "num_draft_tokens"),
        ("--page-size", "page_size"),
        ("--max-running-requests", "max_running_requests"),
    ],
)
def test_bound_is_told_before_torch_loads(
    option: str, bound: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    monkeypatch.setitem(__import__("sys").modules, "specplug.llm", None)
    limit = bound_of(bound)
    assert limit is not None
    done = CliRunner().invoke(main, ["generate", option, "99999999999", "x"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert f"99999999999: expected at most {limit.most}, {limit.why}." in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("generate", "--max-total-tokens", "1000000000000", "x"),
            "max_total_tokens=1000000000000",
        ),
        (("bench", "--rounds", "1000000000000"), "expected at most 1000000 in all"),
        (("bench", "--batch-sizes", "1000000000000"), "expected at most 16384"),
        (("bench", "--speculative-algorithms", "NGRAM:steps=" + "9" * 5000), "expected an integer"),
        (
            ("bench", "--speculative-algorithms", "NGRAM:steps=99999"),
            "num_steps=99999: expected at most 1023",
        ),
        (("serve", "--dp-size", "1000000000000"), "for each of this machine's"),
        (("serve", "--request-timeout", "nan"), "'nan' is not a number of seconds"),
        (("serve", "--disaggregation-timeout", "inf"), f"<={MAX_SECONDS}"),
    ],
)
def test_absurd_numbers_end_commands_quickly(
    arguments: tuple[str, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    done = CliRunner().invoke(main, arguments)
    assert (done.exit_code, done.stdout, message in done.stderr) == (2, "", True), done.stderr
