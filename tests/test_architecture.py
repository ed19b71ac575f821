"""docs/architecture.md names the packages, names and imports, and which file writes what."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import attrs

import specplug
from specplug.engine.request import Request

PACKAGE = Path(specplug.__file__).parent
PAGE = PACKAGE.parent / "docs" / "architecture.md"
TEXT = PAGE.read_text(encoding="utf-8")
FIELDS = {field.name for field in attrs.fields(Request)}
MUTATORS = {"append", "clear", "extend", "insert", "pop", "remove", "update"}


def section(title: str) -> str:
    return TEXT.partition(f"## {title}\n")[2].partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("| ")][2:]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def parts() -> set[str]:
    """Packages and modules at the top of specplug."""
    modules = {file.stem for file in PACKAGE.glob("*.py") if not file.stem.startswith("__")}
    return modules | {
        folder.parent.name for folder in PACKAGE.glob("*/__init__.py") if folder.parent != PACKAGE
    }


def defined(tree: ast.AST, prefix: str = "") -> Iterator[str]:
    """Functions and classes, methods as ``Class.method``."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield prefix + node.name
            if isinstance(node, ast.ClassDef):
                yield from defined(node, f"{node.name}.")


def imports(part: str) -> set[str]:
    files = [PACKAGE / f"{part}.py"] if (PACKAGE / f"{part}.py").exists() else []
    found = set()
    for file in files or (PACKAGE / part).rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specplug."):
                found.add(node.module.split(".")[1])
    return found


def written(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement or a call changes."""
    targets: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        targets = node.targets
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        targets = [node.target]
    elif (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in MUTATORS
    ):
        targets = [node.func.value]
    for target in targets:
        for one in target.elts if isinstance(target, ast.Tuple) else [target]:
            yield one.value if isinstance(one, ast.Subscript) else one


def writers() -> dict[str, set[str]]:
    """By field of a request, the files that write it."""
    found = defaultdict(set)
    for file in PACKAGE.rglob("*.py"):
        name = file.relative_to(PACKAGE).as_posix()
        owners = {"request", "self"} if name == "engine/request.py" else {"request"}
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            for target in written(node):
                if isinstance(target, ast.Attribute) and target.attr in FIELDS:
                    owner = target.value
                    called = getattr(owner, "attr", None) or getattr(owner, "id", None)
                    if called in owners:
                        found[target.attr].add(name)
    return found


def test_architecture_names_every_package() -> None:
    named = [name for row in rows(section("Packages")) for name in quoted(row[0])]
    assert sorted(named) == sorted(parts())


def test_architecture_picture_shows_imports_that_exist() -> None:
    arrows = re.findall(r"^    (\w+) --> (\w+)$", section("Packages"), re.MULTILINE)
    assert len(arrows) > 20
    assert [arrow for arrow in arrows if arrow[1] not in imports(arrow[0])] == []


def test_architecture_names_code_that_exists() -> None:
    links = re.findall(r"\[`([\w.]+)`\]\(\.\./([\w/]+\.py)\)", TEXT)
    assert len(links) > 30
    for name, path in links:
        tree = ast.parse((PACKAGE.parent / path).read_text(encoding="utf-8"))
        assert name in set(defined(tree)), f"{path} has no {name}"


def test_architecture_names_each_file_of_the_choice() -> None:
    folder = PACKAGE / "speculative" / "choice"
    told = re.findall(rf"\]\(\.\./specplug/{folder.relative_to(PACKAGE)}/(\w+)\.py\)", TEXT)
    assert {*told} == {file.stem for file in folder.glob("*.py")} - {"__init__"}


def test_architecture_names_who_writes_each_request_field() -> None:
    told = {
        field: set(quoted(row[1]))
        for row in rows(section("Who writes what of a request"))
        for field in quoted(row[0])
    }
    found = writers()
    assert told == {field: found[field] for field in FIELDS}
