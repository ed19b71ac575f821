"""docs/troubleshooting.md quotes messages that the code has."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "troubleshooting.md"
ROW = re.compile(r"^\| `([^`]+)` \| .+ \|$", re.MULTILINE)


def messages() -> list[str]:
    return ROW.findall(PAGE.read_text(encoding="utf-8"))


def text_of(node: ast.AST) -> str:
    """What a string of the code says; ``…`` stands for what is put in."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) for part in node.values)
    return "…"


def texts() -> Iterator[str]:
    for path in [*ROOT.glob("specplug/**/*.py"), *ROOT.glob("plugins/*/specplug_*/**/*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr) or (
                isinstance(node, ast.Constant) and isinstance(node.value, str)
            ):
                yield text_of(node)


@pytest.fixture(scope="module")
def code() -> str:
    """All strings of the code, one a line."""
    return "\n".join(texts())


def test_the_page_quotes_messages() -> None:
    assert len(messages()) > 25


@pytest.mark.parametrize("message", messages())
def test_message_stands_in_the_code(message: str, code: str) -> None:
    assert message in code
