"""``specplug train``: what it refuses before anything is loaded."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from specplug import UsageError
from specplug.cli.train import train


def refusal(*arguments: str) -> str:
    """The message with which a command line is refused."""
    result = CliRunner().invoke(train, arguments)
    assert isinstance(result.exception, UsageError), result.output
    return str(result.exception)


def test_help_imports_no_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from specplug.cli.train import train; "
        "print(CliRunner().invoke(train, ['--help']).output); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "--export-hidden-states" in done.stdout


def test_training_without_an_algorithm_is_refused(tmp_path: Path) -> None:
    assert "expected an algorithm" in refusal("--out", str(tmp_path))


def test_resume_takes_its_settings_from_where_it_began(tmp_path: Path) -> None:
    told = refusal("--out", str(tmp_path), "--resume", "--steps", "5")
    assert told.startswith("--resume with steps: expected --out alone")


@pytest.mark.parametrize("given", ["draft_vocab_size", "=3"])
def test_option_without_a_value_is_refused(tmp_path: Path, given: str) -> None:
    told = refusal("EAGLE3", "--out", str(tmp_path), "--data", str(tmp_path), "--set", given)
    assert "expected NAME=VALUE" in told
