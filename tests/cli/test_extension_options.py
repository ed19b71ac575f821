"""Options that extensions add to ``specplug generate``: each brings an object into the run."""

from __future__ import annotations

import json
import re

CODE = '''
import click

from specplug import UsageError, hookimpl


class Count:
    """Counts steps, and says at the end of a request how many."""

    def __init__(self, word):
        self.word, self.steps = word, 0

    @hookimpl
    def on_step(self, report):
        self.steps += 1

    @hookimpl
    def on_request_finished(self, report):
        open(self.word, "w").write(str(self.steps))


def made(ctx, option, value):
    if value == "refused":
        raise UsageError("--NAME=refused: expected another file")
    return None if value is None else Count(value)


class Extension:
    @hookimpl
    def register_options(self, command):
        assert command.name == "generate"
        click.option("--NAME", callback=made, metavar="FILE", help="Count steps.")(command)


algorithm = Extension()
'''
GROUP = "specplug.extensions"
RUN = ("generate", "--max-new-tokens", "3", "--ignore-eos", "def")


def test_object_of_a_typed_option_takes_part(plugin_folder):
    plugin_folder.write("count", code=CODE, group=GROUP)
    counted = plugin_folder.path / "steps"
    done = plugin_folder.specplug(*RUN, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    named = [each["name"] for each in json.loads(done.stdout)["config"]["extensions"]]
    assert named[-1] == "count"
    assert not counted.exists()
    done = plugin_folder.specplug(*RUN, "--json", "--count", "steps")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)["config"]["extensions"]
    assert (found[-1]["name"], found[-1]["state"]) == ("Count", "on")
    assert int(counted.read_text()) == 2  # of three steps the last is told after the request's end
    shown = plugin_folder.specplug("generate", "--help").stdout
    assert re.search(r"^Extensions:\n(?:  .*\n)*  --count FILE +Count steps\.", shown, re.M)


def test_option_of_a_disabled_extension_is_unknown(plugin_folder):
    plugin_folder.write("count", code=CODE, group=GROUP)
    for disabled in (["--disable-extension", "COUNT"], ["--disable-extension=count"]):
        done = plugin_folder.specplug(*RUN, *disabled, "--count", "steps")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: No such option '--count'")


def test_what_a_callback_refuses_is_bad_usage(plugin_folder):
    plugin_folder.write("count", code=CODE, group=GROUP)
    done = plugin_folder.specplug(*RUN, "--count", "refused")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "error: --count=refused: expected another file\n"


def test_value_that_is_no_object_is_refused(plugin_folder):
    plugin_folder.write("count", ("Count(value)", "value"), code=CODE, group=GROUP)
    done = plugin_folder.specplug(*RUN, "--count", "steps")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: extensions=('steps',): expected a list of plugin object")
    assert done.stderr.count("\n") == 1


def test_options_that_clash_or_fail_are_left_out(plugin_folder):
    plugin_folder.write("seed", code=CODE, group=GROUP)
    plugin_folder.write(
        "raising",
        ("        click.option(", "        raise OSError('no')\n        click.option("),
        code=CODE,
        group=GROUP,
    )
    done = plugin_folder.specplug(*RUN)
    assert done.returncode == 0
    raising, clash, _ = done.stderr.splitlines()
    assert raising.startswith("warning: extension raising (specplug-raising 1.0, ")
    assert raising.endswith("register_options raised OSError: no")
    assert clash.startswith("warning: extension seed (specplug-seed 1.0, ")
    assert clash.endswith("--seed is left out: there is such an option")


def test_doctor_reports_options(plugin_folder):
    plugin_folder.write("count", code=CODE, group=GROUP)
    code = CODE.replace("click.option(", "raise SystemExit(0)\n        click.option(")
    plugin_folder.write("quits", code=code, group=GROUP)
    done = plugin_folder.specplug("doctor", "--json")
    assert done.returncode == 1
    found = {entry["name"]: entry for entry in json.loads(done.stdout)["extensions"]}
    assert (found["count"]["status"], found["count"]["options"]) == ("ok", ["--count"])
    assert found["quits"]["status"] == "broken: register_options raised SystemExit: 0"
    shown = plugin_folder.specplug("doctor").stdout
    assert "options of count for generate: --count\n" in shown
