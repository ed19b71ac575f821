"""What is wrapped of vLLM stands in one list, of which the README's table is made.

Needs no vLLM: nothing of it is imported before a patch is made.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "hosts" / "vllm"
PACKAGE = FOLDER / "specplug_vllm"
HEADINGS = re.findall("^### (.*)$", (FOLDER.parents[1] / "docs/hosts.md").read_text(), re.MULTILINE)


@pytest.fixture
def make_readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    import make_readme

    return make_readme


def test_tables_of_the_readme_are_those_of_the_code(make_readme: ModuleType) -> None:
    text = make_readme.PAGE.read_text("utf-8")
    assert make_readme.with_tables(text) == text, "run python hosts/vllm/make_readme.py"
    assert make_readme.with_tables(text.replace("| V1, V2 |", "| V3 |")) == text


def test_every_patch_names_its_test_and_what_would_end_it(make_readme: ModuleType) -> None:
    patches = make_readme.PATCHES
    assert len({patch.place for patch in patches}) == len(patches) > 10
    for patch in patches:
        file, _, test = patch.test.partition("::")
        assert f"\ndef {test}(" in (FOLDER / file).read_text("utf-8"), patch.place
        assert set(patch.versions) <= set(make_readme.TESTED)
    written = [each for names in make_readme.NAMES.values() for each in names.written.values()]
    for each in [*patches, *written]:
        assert each.section in HEADINGS
        assert each.why
        assert each.upstream


def test_nothing_but_the_list_sets_what_is_vllms() -> None:
    """An attribute of a module or class of vLLM, or of a model runner."""
    for file in PACKAGE.rglob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        of_vllm = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "vllm"
            for name in node.names
        } | {"runner", "vllm"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node.value) not in of_vllm, f"{file.name}: {ast.unparse(node)}"
            if isinstance(node, ast.Name) and node.id == "setattr":
                assert file.name in ("patches.py", "forms.py"), file.name


def test_patch_wraps_once_and_gives_the_original(
    make_readme: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    from specplug_vllm.patches import Patch, When

    lake = ModuleType("lake")
    lake.depth = lambda at: at  # type: ignore[attr-defined]
    lake.Shore = type("Shore", (), {"length": property(lambda shore: 3)})  # type: ignore[attr-defined]
    shop = ModuleType("shop")
    monkeypatch.setitem(__import__("sys").modules, "lake", lake)
    monkeypatch.setitem(__import__("sys").modules, "shop", shop)
    more = {"why": "w", "upstream": "u", "section": "s", "test": "t", "runner": "V1"}
    for place, wrapper in {
        "lake:depth": lambda original, at: original(at) + 10,
        "lake:Shore.length": lambda original, shore: original(shore) + 10,
    }.items():
        patch = Patch(
            place=place, parameters="at", wrapper=wrapper, when=When.START, also="shop", **more
        )
        patch.apply()
        patch.apply()
    assert lake.depth(1) == shop.depth(1) == 11
    assert lake.Shore().length == 13
