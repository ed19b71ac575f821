"""``specplug list``, and what all commands share: exit codes, one-line errors, quiet pipes."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys

import pytest
from terminal import read_terminal

HEAVY = {"torch", "transformers", "triton", "numpy"}
EXTENSION = '''
import click

from specplug import hookimpl

open(__file__ + ".imported", "w")


class Extension:
    @hookimpl
    def register_commands(self, cli):
        @cli.command()
        def NAME():
            """Say hello."""
            click.echo("hello")


algorithm = Extension()
'''


def names(folder, **variables):
    done = folder.specplug("list", "--json", **variables)
    assert (done.returncode, done.stderr) == (0, "")
    return [entry["name"] for entry in json.loads(done.stdout)["algorithms"]]


def test_no_plugin_is_imported_unless_checked(plugin_folder):
    marker = plugin_folder.path / "imported"
    plugin_folder.write("MARKING", ("from", f"open({str(marker)!r}, 'w')\nfrom"))
    for arguments in (["list"], ["list", "--json"]):
        done = plugin_folder.specplug(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "MARKING" in done.stdout
        assert not marker.exists()
    plugin_folder.specplug("list", "--check")
    assert marker.exists()


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"]])
def test_nothing_heavy_is_imported(arguments, plugin_folder):
    plugin_folder.write("HEAVY", ("from", "import torch\nfrom"))
    command = [sys.executable, "-X", "importtime", "-m", "specplug", *arguments]
    done = subprocess.run(
        command, env=plugin_folder.environment(), capture_output=True, text=True, check=True
    )
    assert "HEAVY" in done.stdout
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "specplug.registry" in imported
    assert not imported & (HEAVY | {"rich", "specplug_heavy"})


def test_one_less_each_time_one_is_uninstalled(plugin_folder):
    ours = ["A", "B", "C"]
    for name in ours:
        plugin_folder.write(name)
    before = names(plugin_folder)
    assert set(ours) < set(before)
    assert before == sorted(before)
    for count, name in enumerate(ours, 1):
        plugin_folder.remove(f"specplug-{name.lower()}")
        assert names(plugin_folder) == [n for n in before if n not in ours[:count]]


def test_json(plugin_folder):
    plugin_folder.write("SOUND")
    plugin_folder.write("BAD", value="no way")
    done = plugin_folder.specplug("list", "--json")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert listed["SOUND"] == {
        "name": "SOUND",
        "status": "installed",
        "version": "1.0",
        "distribution": "specplug-sound",
        "summary": "Own words of SOUND",
        "value": "specplug_sound:algorithm",
        "problems": [],
    }
    assert listed["BAD"]["status"] == "broken: malformed entry point BAD = 'no way'"
    (problem,) = listed["BAD"]["problems"]
    assert problem.startswith("algorithm BAD (specplug-bad 1.0, no way): malformed entry point")


def test_check_fills_the_status(plugin_folder):
    plugin_folder.write("BAD", ("from", "import nothing_there\nfrom"))
    plugin_folder.write("OFF", ("from", "raise AssertionError\nfrom"))
    plugin_folder.write("SOUND")
    done = plugin_folder.specplug("list", "--check", "--json", SPECPLUG_DISABLE="off")
    listed = {entry["name"]: entry for entry in json.loads(done.stdout)["algorithms"]}
    assert listed["BAD"]["status"] == (
        "broken: import failed: ModuleNotFoundError: No module named 'nothing_there'"
    )
    assert listed["OFF"]["status"] == "disabled"
    assert listed["SOUND"]["status"] == "ok"
    assert listed["SOUND"]["summary"] == "Own words of SOUND"
    assert done.returncode == 0


def test_in_a_pipe_every_row_is_one_whole_line(plugin_folder):
    summary = "A long summary, " * 20 + "to its end"
    plugin_folder.write("LONG", ("Own words of NAME", summary))
    done = plugin_folder.specplug("list", COLUMNS="40")
    (row,) = (line for line in done.stdout.splitlines() if line.startswith("LONG"))
    assert re.split("  +", row) == ["LONG", "installed", "1.0", "specplug-long", summary]
    assert "\x1b" not in done.stdout


def test_on_a_terminal_long_cells_wrap(plugin_folder):
    words = [f"word{n}" for n in range(30)]
    summary = f"{' '.join(words)} {'§' * 80} [bold]"
    plugin_folder.write("LONG", ("Own words of NAME", summary))
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "specplug", "list"]
    environment = plugin_folder.environment(COLUMNS="70", TERM="xterm")
    process = subprocess.Popen(command, env=environment, stdout=its, stdin=its)
    os.close(its)
    said = read_terminal(ours)
    assert process.wait() == 0
    plain = re.sub(r"\x1b\[[0-9;]*m", "", said)
    assert "\x1b[1" in said
    assert "…" not in plain
    assert plain.count("§") == 80
    assert {*words, "[bold]"} < set(plain.split())
    assert max(map(len, plain.splitlines())) <= 70


def test_empty_installation_says_what_to_do(monkeypatch, capsys):
    from specplug.cli.list import list_algorithms

    monkeypatch.setattr("specplug.cli.list.Registry", lambda: type("R", (), {"entries": list}))
    list_algorithms([], standalone_mode=False)
    assert "no algorithm is installed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["info", "SUND"], 2, "error: unknown algorithm 'SUND': did you mean SOUND? installed are"),
        (["info", "BAD"], 1, "error: algorithm BAD (specplug-bad 1.0, specplug_bad:algorithm): im"),
        (["info", "OFF"], 1, "error: algorithm OFF (specplug-off 1.0, specplug_off:algorithm): it"),
        (["info"], 2, "error: Missing argument 'NAME'. (specplug info --help)"),
        (["list", "--jsn"], 2, "error: No such option '--jsn'."),
        (["lst"], 2, "error: No such command 'lst'."),
    ],
)
def test_errors_are_one_line(arguments, code, message, plugin_folder):
    plugin_folder.write("SOUND")
    plugin_folder.write("OFF")
    plugin_folder.write("BAD", ("from", "raise ValueError('two\\nlines')\nfrom"))
    done = plugin_folder.specplug(*arguments, SPECPLUG_DISABLE="OFF")
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith(message)


def test_debug_shows_the_traceback(plugin_folder):
    done = plugin_folder.specplug("info", "nothing", SPECPLUG_DEBUG="1")
    assert done.returncode == 1
    assert done.stderr.startswith("Traceback")


WHERE = " (this should not happen; SPECPLUG_DEBUG=1 shows where)"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        ("KeyError('slot')", 1, f"KeyError: 'slot'{WHERE}"),
        ("specplug.PluginError('two\\nlines')", 1, "two lines"),
        ("specplug.UsageError('such a value')", 2, "such a value"),
        ("EOFError()", 1, "EOFError: a file or stream ended early"),
    ],
)
def test_whatever_is_raised_becomes_one_line(error, code, message, plugin_folder):
    script = (
        "import specplug.cli.list as command, specplug.cli\n"
        f"def registry(): raise {error}\n"
        "command.Registry = registry\nspecplug.cli.main(['list'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=plugin_folder.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == f"error: {message}\n"


@pytest.mark.parametrize("arguments", [["list"], ["list", "--json"], ["--help"], ["doctor"]])
def test_broken_pipe_is_quiet(arguments, plugin_folder):
    plugin_folder.write("SOUND")
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "specplug", *arguments]
    done = subprocess.run(
        command,
        env=plugin_folder.environment(),
        stdout=writing,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


def test_interrupt_is_130(plugin_folder):
    plugin_folder.write(
        "STUCK", ("from", "import signal\nsignal.raise_signal(signal.SIGINT)\nfrom")
    )
    done = plugin_folder.specplug("info", "STUCK")
    assert done.returncode == 130
    assert done.stderr.strip() == ""


def test_version_and_help(plugin_folder):
    assert re.fullmatch(r"specplug \d+\.\d+\.\d+\n", plugin_folder.specplug("--version").stdout)
    done = plugin_folder.specplug()
    assert done.returncode == 0
    assert done.stdout == plugin_folder.specplug("--help").stdout
    assert {"list", "info", "doctor"} <= set(re.findall(r"^  (\w+) ", done.stdout, re.M))


def test_commands_of_extensions(plugin_folder):
    group = "specplug.extensions"
    marker = plugin_folder.write("hello", code=EXTENSION, group=group).with_name(
        "__init__.py.imported"
    )
    plugin_folder.write("bad", code="import nothing_there", group=group)
    plugin_folder.write("list", code=EXTENSION.replace(".imported", ".x"), group=group)
    code = EXTENSION.replace("@cli.command()", "raise OSError('no')")
    plugin_folder.write("raising", code=code, group=group)
    assert "SAY" not in plugin_folder.specplug("list").stdout
    assert not marker.exists()  # the core's own commands load no extension
    done = plugin_folder.specplug("hello")
    assert (done.returncode, done.stdout) == (0, "hello\n")
    left_out, raising = done.stderr.splitlines()
    assert left_out.startswith("warning: left out: extension bad (specplug-bad 1.0, specplug_bad:")
    assert raising.startswith("warning: extension raising (specplug-raising 1.0, ")
    assert raising.endswith("register_commands raised OSError: no")
    shown = plugin_folder.specplug("--help").stdout
    assert re.search("^  hello +Say hello", shown, re.M)
    assert re.search("^  list +List the installed", shown, re.M)  # the core's commands stay
