"""``specplug info``: what an algorithm declares."""

from __future__ import annotations

import json
import re

import pytest

FULL = """
from pathlib import Path

import attrs

from specplug import AlgorithmInfo, Capabilities, Defaults, hookimpl
from specplug.settings import Integer, setting

FOLDER = Path(__file__).parent


@attrs.frozen
class Settings:
    full_depth: int = setting(1, Integer(), "Depth.", group="FULL")


class Algorithm:
    @hookimpl
    def describe(self):
        return AlgorithmInfo(
            name="NAME",
            summary="Has all there is",
            api_version=1,
            paper="arXiv 2503.01840",
            capabilities=Capabilities(
                branching=True, draft_model=True, captures={"layer_inputs"}
            ),
            defaults=Defaults(num_steps=3, topk=2),
            settings=Settings,
            speed_ups={"tiny-code": 1.5},
            weights={"tiny-code": FOLDER / "tiny", "other": FOLDER / "gone"},
        )

    @hookimpl
    def propose(self, batch):
        raise NotImplementedError

    @hookimpl
    def create_worker(self, runtime):
        raise NotImplementedError

    @hookimpl
    def build_draft_input(self, batch):
        raise NotImplementedError

    @hookimpl
    def verify(self, draft):
        raise NotImplementedError


algorithm = Algorithm()
"""


@pytest.fixture
def full(plugin_folder):
    source = plugin_folder.write("FULL", code=FULL)
    (source.parent / "tiny" / "deeper").mkdir(parents=True)
    (source.parent / "tiny" / "config.json").write_bytes(b"12")
    (source.parent / "tiny" / "deeper" / "model.safetensors").write_bytes(b"345")
    return plugin_folder


def test_json(full):
    done = full.specplug("info", "full", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    folder = full.path / "specplug_full"
    assert json.loads(done.stdout) == {
        "name": "FULL",
        "summary": "Has all there is",
        "paper": "arXiv 2503.01840",
        "distribution": "specplug-full",
        "version": "1.0",
        "value": "specplug_full:algorithm",
        "api_version": 1,
        "conformance": {
            "status": "unknown",
            "grade": None,
            "changed": [],
            "missed": {},
            "left_out": [],
            "versions": {},
            "settings": {},
        },
        "capabilities": {
            "branching": True,
            "draft_model": True,
            "overlap": True,
            "prefix_cache": True,
            "parts": False,
            "target_drafts": False,
            "late_feed": False,
            "captures": ["layer_inputs"],
        },
        "defaults": {"num_steps": 3, "topk": 2, "num_draft_tokens": None},
        "draft_lookahead": None,
        "accept_lengths": {},
        "speed_ups": {"tiny-code": 1.5},
        "settings": {"full_depth": {"option": "--full-depth", "help": "Depth."}},
        "hooks": {
            "implemented": [
                "describe",
                "create_worker",
                "build_draft_input",
                "propose",
                "verify",
            ],
            "core_defaults": [
                "validate_config",
                "create_future_map",
                "build_disagg_draft_input",
                "foresee_drafts",
                "plan_drafts",
                "grow_draft",
                "fixup_idle",
                "supports_target_verify_for_draft",
                "export_draft_state",
                "create_trainer",
            ],
        },
        "weights": {
            "tiny-code": {"path": str(folder / "tiny"), "exists": True, "bytes": 5},
            "other": {"path": str(folder / "gone"), "exists": False, "bytes": 0},
        },
        "default_model": "tiny-code",
    }


def rows(done):
    assert (done.returncode, done.stderr) == (0, "")
    return dict(re.split("  +", line, maxsplit=1) for line in done.stdout.splitlines())


def test_for_people(full):
    shown = rows(full.specplug("info", "FULL"))
    folder = full.path / "specplug_full"
    assert shown["ALGORITHM"] == "FULL"
    assert shown["paper"] == "arXiv 2503.01840"
    assert shown["distribution"] == "specplug-full 1.0"
    able = (
        "branching=yes, draft_model=yes, overlap=yes, prefix_cache=yes, parts=no, "
        "target_drafts=no, late_feed=no"
    )
    assert shown["capabilities"] == able
    assert shown["settings"] == "--full-depth"
    assert shown["reads"] == "the hidden states before layers (capture_layer_inputs)"
    assert shown["defaults"] == "num_steps=3, topk=2, num_draft_tokens=from depth and width"
    assert shown["own hooks"] == "describe, create_worker, build_draft_input, propose, verify"
    assert shown["core defaults"].startswith("validate_config, create_future_map, ")
    assert shown["weights for tiny-code"] == f"{folder / 'tiny'} (0.0 MiB)"
    assert shown["weights for other"] == f"missing: {folder / 'gone'} is not there or empty"


def test_weights_that_are_not_needed_or_not_shipped(plugin_folder):
    assert rows(plugin_folder.specplug("info", "NONE"))["weights"] == "needs none"
    shipped = 'weights={"tiny-code": FOLDER / "tiny", "other": FOLDER / "gone"},'
    plugin_folder.write("FULL", (shipped, ""), code=FULL)
    shown = rows(plugin_folder.specplug("info", "FULL"))
    assert shown["weights for tiny-code"] == "none shipped"


def test_auto_says_which_algorithms_these_are(plugin_folder):
    found = json.loads(plugin_folder.specplug("info", "auto", "--json").stdout)
    assert found["name"] == "auto"
    assert found["chosen"][0] == "NGRAM"
    *_, drafter = found["chosen"]  # whose plugin declares most
    slower = [name for name, why in found["left_out"].items() if why.startswith("its speed-up of ")]
    assert {"DSPARK", "EAGLE3"} <= {drafter, *slower}
    shown = rows(plugin_folder.specplug("info", "auto", "--model", "some/model"))
    assert shown["NGRAM"] == "takes part"
    assert shown["DSPARK"] == "left out: no draft weights for some/model"


def test_model_without_auto_is_refused(plugin_folder):
    done = plugin_folder.specplug("info", "NONE", "--model", "some/model")
    assert done.returncode == 2
    assert "--model 'some/model': expected auto with it" in done.stderr


def test_only_the_named_plugin_is_imported(plugin_folder):
    plugin_folder.write("SOUND")
    plugin_folder.write("BROKEN", ("from", "raise AssertionError('imported')\nfrom"))
    assert plugin_folder.specplug("info", "SOUND").returncode == 0
    done = plugin_folder.specplug("info", "BROKEN")
    assert done.returncode == 1
    assert "import failed: AssertionError: imported" in done.stderr
