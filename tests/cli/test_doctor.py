"""``specplug doctor``: every problem of every plugin, with its fix."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from specplug import contract
from specplug.cli import main
from specplug.registry import Registry


@pytest.fixture
def others():
    """The plugins that happen to be installed here: these tests are not about them."""
    return ",".join(name for name in Registry().names() if name != "NONE")


def doctor(folder, *arguments, code, **variables):
    done = folder.specplug("doctor", *arguments, **variables)
    assert (done.returncode, done.stderr) == (code, "")
    return done.stdout


def test_all_sound(plugin_folder, others):
    plugin_folder.write("SOUND")
    said = doctor(plugin_folder, code=0, SPECPLUG_DISABLE=others)
    assert said.endswith("\nall plugins are sound\n")
    report = json.loads(doctor(plugin_folder, "--json", code=0, SPECPLUG_DISABLE=others))
    assert report["versions"]["python"] == sys.version.split()[0]
    assert {"specplug", "torch", "transformers", "triton"} <= set(report["versions"])
    assert {each["name"]: each["status"] for each in report["algorithms"]}["SOUND"] == "ok"


def test_every_problem_of_every_plugin(plugin_folder, others):
    plugin_folder.write("A_FAILING", ("from", "def load():\n    1 / 0\n\n\nload()\nfrom"))
    plugin_folder.write(
        "B_WRONG", ("def propose(", "def propse("), ("(self, runtime)", "(self, x)")
    )
    plugin_folder.write("C_OFF", ("from", "raise AssertionError('imported')\nfrom"))
    plugin_folder.write("D_SOUND")
    extension = "import nothing_there"
    plugin_folder.write("tracer", code=extension, group="specplug.extensions")
    disabled = ",".join(filter(None, (others, "C_OFF", "GHOST")))
    report = json.loads(doctor(plugin_folder, "--json", code=1, SPECPLUG_DISABLE=disabled))
    found = {plugin["name"]: plugin for plugin in report["algorithms"]}
    (failure,) = found["A_FAILING"]["problems"]
    assert failure["what"] == "import failed: ZeroDivisionError: division by zero"
    first, *_, last = failure["traceback"].splitlines()
    assert first == "Traceback (most recent call last):"
    assert last == "ZeroDivisionError: division by zero"
    assert "in load" in failure["traceback"]
    assert "importlib" not in failure["traceback"]
    assert "registry.py" not in failure["traceback"]
    assert [p["fix"] for p in found["B_WRONG"]["problems"]] == [
        "rename it to propose",
        "take it away",
    ]
    assert (found["C_OFF"]["status"], found["C_OFF"]["problems"]) == ("disabled", [])
    assert found["D_SOUND"]["status"] == "ok"
    assert [e["status"] for e in report["extensions"] if e["name"] != "VIEWS"] == [
        "broken: import failed: ModuleNotFoundError: No module named 'nothing_there'"
    ]
    assert report["notes"] == ["SPECPLUG_DISABLE names GHOST, which is not installed"]

    said = doctor(plugin_folder, code=1, SPECPLUG_DISABLE=disabled)
    for plugin in [*report["algorithms"], *report["extensions"]]:
        for problem in plugin["problems"]:
            assert all(problem[part] in said for part in ("what", "expected", "fix"))
    assert "    ZeroDivisionError: division by zero\n" in said
    assert "note: SPECPLUG_DISABLE names GHOST" in said
    assert "3 of " in said.splitlines()[-1]


def test_plugin_of_an_older_api_is_noted(plugin_folder, others, monkeypatch, capfd):
    plugin_folder.write("OLD")
    monkeypatch.setattr(contract, "API_VERSION", 2)
    monkeypatch.setenv("SPECPLUG_DISABLE", f"{others},NONE")
    with pytest.raises(SystemExit) as ended:
        main(["doctor"])
    said = " ".join(capfd.readouterr().out.split())
    assert ended.value.code == 0
    assert (
        "algorithm OLD (specplug-old 1.0, specplug_old:algorithm) was built for API version 1"
        in said
    )


def test_disabled_plugins_are_not_broken(plugin_folder, others):
    plugin_folder.write("BAD", value="no way")
    disabled = ",".join(filter(None, (others, "BAD")))
    said = doctor(plugin_folder, code=0, SPECPLUG_DISABLE=disabled)
    assert "malformed entry point BAD = 'no way'" in said


def test_versions_are_read_without_importing(plugin_folder, others):
    environment = plugin_folder.environment(SPECPLUG_DISABLE=f"{others},NONE")
    command = [sys.executable, "-X", "importtime", "-m", "specplug", "doctor"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert not imported & {"torch", "transformers", "triton"}
    assert "torch" in done.stdout


def test_doctor_says_which_kernels_run_and_why(plugin_folder, others):
    variables = {"SPECPLUG_DISABLE": others, "SPECPLUG_KERNELS": "torch"}
    said = doctor(plugin_folder, code=0, **variables)
    assert ", SPECPLUG_KERNELS=torch\nOPERATION" in said
    kernels = json.loads(doctor(plugin_folder, "--json", code=0, **variables))["kernels"]
    assert kernels["mode"] == "torch"
    reasons = {(by, why) for _, _, by, why in kernels["table"]}
    assert reasons == {("torch", "SPECPLUG_KERNELS=torch")}
    assert all(operations in said for operations, *_ in kernels["table"])
    variables["SPECPLUG_KERNELS"] = "cuda"
    said = doctor(plugin_folder, code=0, **variables)
    assert "note: which kernels run is not known: " in said
    assert "SPECPLUG_KERNELS='cuda'; expected one of torch, triton, auto" in said
