"""The kit runs where the algorithm does: each tensor that it makes says on which device."""

from __future__ import annotations

import ast
from pathlib import Path

import specplug.testing

MADE = {"arange", "empty", "eye", "full", "linspace", "ones", "rand", "randint", "tensor", "zeros"}
FOLDER = Path(specplug.testing.__file__).parent


def test_kit_makes_no_tensor_without_a_device() -> None:
    found, made = [], 0
    for path in sorted(FOLDER.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                continue
            module = node.func.value
            if isinstance(module, ast.Name) and module.id == "torch" and node.func.attr in MADE:
                made += 1
                if "device" not in {keyword.arg for keyword in node.keywords}:
                    found.append(f"{path.name}:{node.lineno}")
    assert made
    assert found == []
