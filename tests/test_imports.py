"""Imports run one way: from what users touch down to what knows nothing of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specplug

ROOT = Path(specplug.__file__).parent
LAYERS = (
    {"__main__"},
    {"cli"},
    {"serve", "bench", "testing"},
    {"llm"},
    {"run"},
    {"disagg"},
    {"engine"},
    {"model"},
    {"grammar", "kv", "distributed"},
    {"speculative"},
    {"kernels"},
    {"registry", "sources"},
    {"entries"},
    {"contract"},
    {"hookspecs"},
    {"host"},
    {"config", "sampling_params", "outputs"},
    {"algorithm", "settings"},
    {"bounds", "text_file"},
    {"errors", "debug", "startup"},
    {"printable"},
)
"""From above to below. A module imports from its own package, or from layers below it."""

LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _imports(file: Path) -> Iterator[str]:
    """Every module that a file imports, wherever in it, for types too: but ``hookspecs``, the
    contract, names the types of all hooks and imports none of them."""
    tree = ast.parse(file.read_text())
    if file.name == "hookspecs.py":
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "specplug":
            yield from (f"specplug.{name.name}" for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (name.name for name in node.names)


def _package(module: str) -> str:
    """The part of specplug that a module belongs to: ``specplug.kv.tensors`` -> ``kv``."""
    return module.split(".")[1]


FILES = [file for file in sorted(ROOT.rglob("*.py")) if file != ROOT / "__init__.py"]


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_run_downwards(file: Path) -> None:
    own = file.relative_to(ROOT).with_suffix("").parts[0]
    imported = {m for m in _imports(file) if m.startswith("specplug.") and _package(m) in LEVEL}
    upwards = {m for m in imported if _package(m) != own and LEVEL[_package(m)] <= LEVEL[own]}
    assert not upwards, f"{own} stands below what it imports"


def test_every_module_has_a_layer() -> None:
    assert {file.relative_to(ROOT).with_suffix("").parts[0] for file in FILES} <= set(LEVEL)
