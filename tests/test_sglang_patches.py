"""What is wrapped of SGLang stands in one list, of which the README's table is made.

Needs no SGLang: nothing of it is imported before a function is wrapped.
"""

from __future__ import annotations

import ast
import re
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parents[1] / "hosts" / "sglang"
HEADINGS = re.findall("^### (.*)$", (FOLDER.parents[1] / "docs/hosts.md").read_text(), re.MULTILINE)


@pytest.fixture
def make_readme(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = spec_from_file_location("make_sglang_readme", FOLDER / "make_readme.py")
    assert spec is not None
    assert spec.loader is not None
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def test_tables_of_sglangs_readme_are_those_of_the_code(make_readme: ModuleType) -> None:
    text = make_readme.PAGE.read_text("utf-8")
    assert make_readme.with_tables(text) == text, "run python hosts/sglang/make_readme.py"
    changed = text.replace("| `1` | pipeline stages", "| `2` | pipeline stages")
    assert changed != text
    assert make_readme.with_tables(changed) == text


def test_every_patch_of_sglang_names_its_test_and_its_end(make_readme: ModuleType) -> None:
    patches = make_readme.PATCHES
    assert len({patch.place for patch in patches}) == len(patches) >= 5
    for patch in patches:
        file, _, test = patch.test.partition("::")
        assert f"\ndef {test}(" in (FOLDER / file).read_text("utf-8"), patch.place
        assert patch.why
        assert patch.upstream
        assert set(patch.versions) <= set(make_readme.TESTED)
        # What SGLang's newest version no longer needs has no open change.
        assert (patch.section in HEADINGS) == (make_readme.TESTED[-1] in patch.versions)


def test_nothing_but_the_list_sets_what_is_sglangs() -> None:
    for file in (FOLDER / "specplug_sglang").glob("*.py"):
        tree = ast.parse(file.read_text("utf-8"))
        of_sglang = {
            name.asname or name.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "sglang"
            for name in node.names
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                assert ast.unparse(node.value) not in of_sglang, f"{file.name}: {ast.unparse(node)}"
            if isinstance(node, ast.Name) and node.id == "setattr":
                assert file.name == "patches.py"
