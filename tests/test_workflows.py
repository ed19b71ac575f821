"""The workflows: what they run is there, on the Pythons that the distributions name."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest
import yaml

from specplug.cli import COMMANDS

ROOT = Path(__file__).parents[1]
WORKFLOWS = sorted(ROOT.glob(".github/workflows/*.yml"))
MAKEFILES = "".join(
    path.read_text(encoding="utf-8") for path in (ROOT / "Makefile", *ROOT.glob("hosts/*/test*.mk"))
)


def workflow(path):
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def steps(path):
    return [step for job in workflow(path)["jobs"].values() for step in job["steps"]]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_runs_what_is_there(path):
    lines = [line for step in steps(path) for line in step.get("run", "").splitlines()]
    assert lines
    for line in lines:
        program, what = line.split()[:2]
        if program == "make":
            assert re.search(rf"^{what}:", MAKEFILES, re.MULTILINE), line
        elif program == "specplug":
            assert what in COMMANDS, line
        else:
            assert (program, what) == ("pip", "install"), line


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_puts_no_given_text_into_a_shell(path):
    """It goes through the environment, where nobody's name is a command."""
    assert not [step["run"] for step in steps(path) if "${{" in step.get("run", "")]
    assert workflow(path)["permissions"] == {"contents": "read"}


def test_suite_runs_on_each_python_that_is_named():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [each.split()[-1] for each in project["classifiers"] if re.search(r"3\.\d+$", each)]
    matrix = workflow(ROOT / ".github/workflows/ci.yml")["jobs"]["test"]["strategy"]["matrix"]
    assert matrix["python"] == named


def test_kit_runs_for_the_packages_of_others():
    text = (ROOT / ".github/workflows/plugin.yml").read_text(encoding="utf-8")
    asked = workflow(ROOT / ".github/workflows/plugin.yml")[True]["workflow_call"]["inputs"]
    assert set(re.findall(r"inputs\.(\w+)", text)) == set(asked)
    assert '"./core[disagg,grammar]"' in text  # else the kit leaves out what needs them
    found = re.search(r"\|\| '(\[\"early_exit.*?\])'", text)
    assert found is not None
    for example in json.loads(found[1]):
        project = tomllib.loads((ROOT / "examples" / example / "pyproject.toml").read_text("utf-8"))
        assert list(project["project"]["entry-points"]["specplug.algorithms"]) == [example.upper()]


def test_every_target_of_make_is_told():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    assert phony is not None
    told = re.findall(r"^([a-z-]+):.*##", makefile, re.MULTILINE)
    assert sorted(told) == sorted(phony[1].split())
