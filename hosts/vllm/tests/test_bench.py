"""``specplug bench --engine vllm``: vLLM's engines, with the tables and plots of our own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hosted_engines import MODEL

USUAL = "VLLM_ENABLE_V1_MULTIPROCESSING", "SPECPLUG_DEBUG"
"""What users do not set."""
ENVIRONMENT = {name: value for name, value in os.environ.items() if name not in USUAL}


def bench(*typed: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("specplug"), "bench", "--engine", "vllm"]
    command += ["--model", str(MODEL), "--dtype", "float32", "--max-new-tokens", "8"]
    command += ["--batch-sizes", "2", "--rounds", "1", *typed]
    return subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=280)


def test_two_engines_beside_one_another_are_measured(tmp_path: Path) -> None:
    own = ["--", "--max-model-len", "1024", "--enforce-eager"]
    done = bench("--speculative-algorithms", "EAGLE3", "--output", str(tmp_path), *own)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "in vLLM 0.32.0" in done.stdout
    report = json.loads((tmp_path / "bench.json").read_text())
    plain, drafted = report["results"]
    assert plain["drafted_by_position"] == []
    assert drafted["identical"]
    assert drafted["mean_accept_length"] > 1
    assert drafted["drafted_by_position"][0] >= drafted["accepted_by_position"][0] > 0
    assert sorted(file.name for file in tmp_path.glob("*.png")) == ["acceptance.png", "speedup.png"]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (["--colour", "red"], "vLLM's arguments: unknown --colour red; see vllm serve --help"),
        (["--max-model-len", "many"], "vLLM's arguments --max-model-len many: "),
    ],
)
def test_a_wrong_argument_of_vllm_is_named(typed: list[str], message: str) -> None:
    done = bench("--speculative-algorithms", "NGRAM", "--", *typed)
    assert done.returncode == 2
    assert message in done.stderr.splitlines()[-1]
