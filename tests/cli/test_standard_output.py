"""Standard output is the command's own: what plugins print goes to standard error."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest
from warm_process import run_command

NOISE = """
import atexit, ctypes, os, subprocess, sys

def noise(where):
    print("python", where)
    print("kept", where, file=sys.__stdout__)
    os.write(1, f"descriptor {where}\\n".encode())
    subprocess.run(["echo", "child", where], check=True)
    ctypes.CDLL(None).puts(f"library {where}".encode())

noise("import")
atexit.register(noise, "end")
"""
ALGORITHM = (
    NOISE
    + """
from specplug import AlgorithmInfo, DraftInput, Draft, hookimpl


class Algorithm:
    @hookimpl
    def describe(self):
        noise("describe")
        return AlgorithmInfo(name="NAME", summary="Loud", api_version=1)

    @hookimpl
    def create_worker(self, runtime):
        noise("create_worker")
        return self

    @hookimpl
    def build_draft_input(self, runtime, batch, target_output):
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime, batch, draft_input):
        noise("propose")
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


algorithm = Algorithm()
"""
)
EXTENSION = (
    NOISE
    + """
from specplug import hookimpl


class Extension:
    @hookimpl
    def on_step(self, runtime, report):
        noise("on_step")


algorithm = Extension()
"""
)
SOURCES = ("python", "kept", "descriptor", "child", "library")


@pytest.fixture
def loud(plugin_folder):
    plugin_folder.write("LOUD", code=ALGORITHM)
    plugin_folder.write("chatty", code=EXTENSION, group="specplug.extensions")
    return plugin_folder


@pytest.mark.parametrize(
    ("arguments", "places"),
    [
        (["list", "--check"], ["import", "describe", "end"]),
        (["info", "LOUD"], ["import", "describe", "end"]),
        (["doctor"], ["import", "describe", "end"]),
    ],
    ids=["list", "info", "doctor"],
)
def test_json_is_all_on_standard_output(arguments, places, loud):
    done = loud.specplug(*arguments, "--json")
    assert json.loads(done.stdout)
    for place in places:
        for source in SOURCES:
            assert f"{source} {place}\n" in done.stderr
    _, shown, _ = run_command(arguments, loud.environment())
    assert shown
    assert not any(f"{source} {place}" in shown for source in SOURCES for place in places)


def test_generate_prints_its_text_alone(loud):
    arguments = ("generate", "--speculative-algorithm", "LOUD", "--max-new-tokens", "4", "x =")
    done = loud.specplug(*arguments, "--json")
    shown = json.loads(done.stdout)
    for place in ("import", "describe", "create_worker", "propose", "on_step", "end"):
        for source in SOURCES:
            assert f"{source} {place}\n" in done.stderr
    _, text, _ = run_command(arguments, loud.environment())
    assert text.rstrip("\n") == shown["results"][0]["text"].rstrip("\n")


def test_bench_prints_its_report_alone(loud):
    arguments = (
        *("bench", "--json", "--speculative-algorithms", "LOUD", "--batch-sizes", "1"),
        *("--rounds", "1", "--num-prompts", "1", "--max-new-tokens", "2"),
    )
    _, shown, said = run_command(arguments, loud.environment())
    assert json.loads(shown)
    for source in SOURCES:
        assert f"{source} on_step\n" in said


def test_plugin_that_closes_standard_output_is_listed(plugin_folder):
    plugin_folder.write("CLOSING", ("from", "import sys\nsys.__stdout__.close()\nfrom"))
    done = plugin_folder.specplug("list", "--check", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert "CLOSING" in [entry["name"] for entry in json.loads(done.stdout)["algorithms"]]


def test_help_lists_commands_of_loud_extensions(loud):
    done = loud.specplug("--help")
    assert (done.returncode, "descriptor import" in done.stdout) == (0, False)
    assert "descriptor import" in done.stderr


def test_standard_output_is_given_back_after_a_call(loud):
    script = (
        "import specplug.cli\n"
        "specplug.cli.main(['info', 'LOUD', '--json'], standalone_mode=False)\n"
        "print('after')"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=loud.environment(),
        capture_output=True,
        text=True,
        check=True,
    )
    assert "\nafter\n" in done.stdout
    assert "python describe" not in done.stdout


COMMANDS = (["list", "--json"], ["info", "NGRAM"], ["--help"])


def shell(arguments, redirected):
    """The ``specplug`` command as a shell starts it."""
    line = shlex.join([sys.executable, "-m", "specplug", *arguments])
    kept = {k: v for k, v in os.environ.items() if not k.startswith("SPECPLUG_")}
    return subprocess.run(
        ["bash", "-c", f"{line} {redirected}"],
        env=kept,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_full_standard_output_is_told_in_one_line(arguments):
    done = shell(arguments, ">/dev/full")
    assert done.returncode == 1
    assert done.stderr.startswith("error: standard output cannot be written: No space left")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("arguments", [["list"], ["--help"], ["generate", "x"]], ids=" ".join)
def test_closed_standard_output_is_told_in_one_line(arguments):
    done = shell(arguments, ">&-")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: standard output is closed; expected ")


@pytest.mark.parametrize("redirected", ["2>&-", "<&-", "<&- 2>&-", "2>/dev/full"])
def test_other_closed_streams_do_no_harm(redirected):
    done = shell(["list", "--json"], redirected)
    assert done.returncode == 0
    assert json.loads(done.stdout)


def in_a_gone_folder(tmp_path, arguments):
    gone = tmp_path / "gone"
    gone.mkdir()
    line = shlex.join([sys.executable, "-m", "specplug", *arguments])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("SPECPLUG_")}
    return subprocess.run(
        ["bash", "-c", f"cd {shlex.quote(str(gone))} && rmdir ../gone && {line}"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("arguments", [["generate", "x"], ["bench"], ["serve"]], ids=" ".join)
def test_working_directory_that_is_gone_is_told(tmp_path, arguments):
    done = in_a_gone_folder(tmp_path, arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("error: the working directory cannot be found: ")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["list", "--check"], "NONE "),
        (["info", "NONE"], "core defaults"),
        (["doctor"], "all plugins are sound"),
        (["--version"], "specplug "),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_plugins_are_told_in_a_folder_that_is_gone(tmp_path, arguments, said):
    done = in_a_gone_folder(tmp_path, arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert said in done.stdout
