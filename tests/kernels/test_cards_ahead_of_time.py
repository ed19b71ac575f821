"""Every kernel is compiled for cards that are not there, and must fit them.

Shapes here are the largest; ``benchmarks/gpu/cards.py`` compiles all head sizes and tiles.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import specplug

SCRIPT = Path(__file__).parents[2] / "benchmarks/gpu/cards.py"
FOLDER = Path(specplug.__file__).parent / "kernels"
HOPPERS = {"copy_context"}
"""Kernels that are launched on those cards alone."""


def compiled(folder: Path, *options: str) -> list[dict[str, Any]]:
    """Compile in a process of its own: the kernels of this one are the interpreter's."""
    file = folder / "found.json"
    command = [sys.executable, SCRIPT, "--extremes", "--json", file, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return found


def launched() -> set[str]:
    """Return the names of all kernels that are launched: ``name[grid](…)``."""
    names: set[str] = set()
    for file in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(func=ast.Subscript(value=ast.Name(id=name))):
                    names.add(name)
    return names


def test_every_kernel_fits_a_card_of_99_kib(tmp_path: Path) -> None:
    found = compiled(tmp_path, "--cards", "sm89")
    assert all(each["shared"] <= each["limit"] == 101_376 for each in found)
    missing = launched() - HOPPERS - {each["kernel"] for each in found}
    assert not missing, f"{missing}: expected a case of each in benchmarks/gpu/cards.py"


def test_prompts_of_large_heads_fit_all_cards(tmp_path: Path) -> None:
    cards = "sm80", "sm90", "sm100", "sm120", "gfx942"
    found = compiled(tmp_path, "--kernels", "prompts", "--cards", *cards)
    assert list(dict.fromkeys(each["card"] for each in found)) == list(cards)
    assert all(each["shared"] <= each["limit"] for each in found)
    hopper = [each for each in found if each["card"] == "sm90"]
    assert {each["kernel"] for each in hopper} >= HOPPERS
    tiles = [each for each in hopper if each["kernel"] == "causal_tiles"]
    assert len(tiles) == 2
    assert all(each["wgmma"] > 0 for each in tiles)
    assert all(each["mma"] == 0 for each in tiles), "all products take Hopper's tensor cores"
