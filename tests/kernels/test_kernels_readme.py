"""``specplug/kernels/README.md`` has a word on every kernel."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import specplug

FOLDER = Path(specplug.__file__).parent / "kernels"
README = (FOLDER / "README.md").read_text(encoding="utf-8")


def functions_of(file: Path) -> set[str]:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_readme_of_kernels_names_each_file_of_them() -> None:
    """By the file's name, as a link or as a heading has it, or by that of a function in it."""
    named = set(re.findall(r"`(\w+)(?:\.py)?`", README))
    files = [file for file in FOLDER.glob("*.py") if "@triton.jit" in file.read_text("utf-8")]
    assert len(files) > 10
    missing = [file.name for file in files if not named & {file.stem, *functions_of(file)}]
    assert not missing, f"{missing}: expected a word on each in specplug/kernels/README.md"


def test_readme_of_kernels_names_no_file_that_is_gone() -> None:
    names = {file.stem for file in FOLDER.glob("*.py")}
    for file in FOLDER.glob("*.py"):
        names |= functions_of(file)
    headings = re.findall(r"^## (.+)$", README, flags=re.MULTILINE)
    named = {name for heading in headings for name in re.findall(r"`(\w+)`", heading)}
    assert named <= names, sorted(named - names)
