"""The commands of README.md run as they stand there, with the default model as their target."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hosted_engines import MODEL

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```(python|bash)\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
COMMANDS = [line for kind, text in BLOCKS if kind == "bash" for line in text.splitlines()]


def run(command: list[str], folder: Path) -> str:
    done = subprocess.run(
        command, cwd=folder, env=os.environ, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if c.startswith("specplug ") and " serve " not in c]
)
def test_command_runs(command: str, tmp_path: Path) -> None:
    name, *words = shlex.split(command.replace("TARGET", str(MODEL)))
    told = run([str(Path(sys.executable).with_name(name)), *words], tmp_path)
    assert "EAGLE3" in told or "vllm" in told


def test_python_runs(tmp_path: Path) -> None:
    (text,) = (text for kind, text in BLOCKS if kind == "python")
    script = text.replace("TARGET", str(MODEL))
    script += 'print(len(llm.generate(["def f("], use_tqdm=False)[0].outputs[0].token_ids))\n'
    assert run([sys.executable, "-c", script], tmp_path).splitlines()[-1] == "16"
