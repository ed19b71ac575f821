"""Every hook is documented, called through one typed function, and exercised by a test."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from specplug import contract, hookspecs, registry
from specplug.contract import HOOKS
from specplug.speculative.hook_calls import HookCalls

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "hooks.md"
BEFORE_STEPS = {
    "describe",
    "validate_config",
    "create_worker",
    "create_future_map",
    "create_trainer",
    "register_commands",
    "register_options",
}
"""Called by the registry, ``start_algorithm``, training and the command line: the same for all
hosts."""
HOST_PAGES = ["hosts/vllm/README.md", "hosts/sglang/README.md"]


def spec(hook: str) -> Callable[..., Any]:
    """The hook's specification."""
    function: Callable[..., Any] = getattr(hookspecs, hook)
    return function


def section(text: str, name: str) -> str:
    """A section of a docstring, such as ``Args:``; empty if there is none."""
    found = re.search(rf"^{name}:\n(.*?)(?=^\w|\Z)", text, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_docstring_says_when_with_what_and_what_for(hook: str) -> None:
    text = inspect.cleandoc(spec(hook).__doc__ or "")
    first, *_ = text.split("\n\n")
    assert first.endswith("."), "the first paragraph says what the hook does"
    assert re.search(r"\bCalled\b", text), "it says when it is called"
    documented = re.findall(r"^    (\w+): ", section(text, "Args"), re.MULTILINE)
    assert documented == list(HOOKS[hook]), "it says what each argument is, in order"


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_docstring_says_what_none_means(hook: str) -> None:
    options = spec(hook).specplug_spec  # type: ignore[attr-defined]
    returns = section(inspect.cleandoc(spec(hook).__doc__ or ""), "Returns")
    if options["firstresult"]:
        assert re.search(r"\bNone(: | is refused\.)", returns)
        assert ("None is refused" in returns) == (hook in hookspecs.REQUIRED)
    else:
        assert spec(hook).__annotations__["return"] == "None"
        assert not returns


def test_hooks_table_lists_each_hook_once() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+) \| (.+) \|$", TABLE.read_text(), re.MULTILINE)
    assert [hook for hook, *_ in rows] == list(HOOKS)
    required = {hook for hook, _, without in rows if without == "required"}
    assert required == set(hookspecs.REQUIRED)


def test_reference_of_hooks_is_that_of_the_code() -> None:
    made = runpy.run_path(str(TABLE.with_name("make_hooks.py")))["page"]()
    assert TABLE.read_text(encoding="utf-8") == made, "run: python docs/make_hooks.py"


def wrappers(hook: str) -> list[Callable[..., Any]]:
    """The functions through which a hook is called: of a run, or outside of one."""
    owners = HookCalls, contract, registry
    return [vars(owner)[hook] for owner in owners if hook in vars(owner)]


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_has_one_typed_function_with_its_arguments(hook: str) -> None:
    """Further arguments of the function are the core's own, and keyword-only. Its result is the
    hook's, without None: a default has answered by then."""
    (function,) = wrappers(hook)
    expected, found = inspect.signature(spec(hook)), inspect.signature(function)
    own = [p for p in found.parameters.values() if p.name != "self"]
    plain = [p for p in own if p.kind is not p.KEYWORD_ONLY]
    assert [(p.name, p.annotation) for p in plain] == [
        (p.name, p.annotation) for p in expected.parameters.values()
    ]
    assert found.return_annotation == expected.return_annotation.removesuffix(" | None")


def called_names(folder: Path) -> set[str]:
    """The names of everything that the modules in a folder call."""
    found = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                found.add(getattr(node.func, "attr", getattr(node.func, "id", "")))
    return found


def test_every_hook_is_called_by_the_core() -> None:
    assert set(HOOKS) <= called_names(ROOT / "specplug")


@pytest.mark.parametrize("page", HOST_PAGES)
def test_page_of_a_host_says_what_calls_each_hook(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    assert not {hook for hook in HOOKS if f"`{hook}`" not in text} - BEFORE_STEPS
