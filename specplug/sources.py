"""Read a plugin's source without importing it: its file, its summary, why it cannot be imported.

Source is read, never run. What it does not show plainly (a summary that is computed, a module in an
archive) stays unknown, and no problem is reported that importing would not have.
"""

from __future__ import annotations

import ast
import re
import sys
import warnings
from collections.abc import Iterator
from importlib.util import cache_from_source, find_spec
from pathlib import Path

import attrs

from specplug.contract import Problem, let_ctrl_c_pass
from specplug.entries import PluginEntry, import_failure, parse_value

HEAVY = ("torch", "transformers", "triton")
"""Modules that a plugin must not import at its top: every checked listing would wait for them."""


@attrs.frozen
class Source:
    """The findings in a plugin's source.

    Attributes:
        file: of its module; None if unknown.
        summary: of its ``describe()``, if that is a literal; else None.
        problem: why its module cannot be imported; None if unknown.
    """

    file: Path | None = None
    summary: str | None = None
    problem: Problem | None = None


def look(entry: PluginEntry) -> Source:
    """Read the source of the plugin of ``entry``, if there is any."""
    place = parse_value(entry.value)
    if place is None:
        return Source()
    module = place[0]
    package = module.partition(".")[0]
    try:
        spec = find_spec(package)  # of a top-level name: it imports nothing
    except BaseException as error:  # of a custom finder, or an entry of sys.modules
        let_ctrl_c_pass(error)
        return Source()
    if spec is None:
        missing = ModuleNotFoundError(f"No module named {package!r}", name=package)
        return Source(problem=import_failure(entry, module, missing))
    folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
    file = _file_of(module, spec.origin, folders)
    if file is None:
        return Source()
    try:
        text = file.read_bytes()
    except OSError:
        return Source()
    problem = None
    if not _is_compiled(file):
        problem = _syntax_problem(entry, module, file, text)
    if b"AlgorithmInfo" not in text:  # an extension, or ``describe()`` is in another module
        return Source(file, problem=problem)
    return Source(file, _summary(text.decode("utf-8", "replace"), entry.name), problem)


def heavy_imports(module: str) -> list[str]:
    """Return those of ``HEAVY`` that an imported module's package imports at its top."""
    package = module.partition(".")[0]
    found: set[str] = set()
    for name, loaded in list(sys.modules.items()):
        file = getattr(loaded, "__file__", None)
        if name.partition(".")[0] == package and isinstance(file, str) and file.endswith(".py"):
            try:
                tree = _parsed(Path(file).read_bytes(), file)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            found.update(each.partition(".")[0] for each in _imported(tree.body))
    return [name for name in HEAVY if name in found]


def _file_of(module: str, origin: str | None, folders: list[Path]) -> Path | None:
    parts = module.split(".")[1:]
    if not parts:
        return Path(origin) if origin and origin.endswith(".py") else None
    for folder in folders:
        stem = folder.joinpath(*parts)
        for file in (stem / "__init__.py", stem.with_name(f"{stem.name}.py")):
            if file.is_file():
                return file
    return None


def _is_compiled(file: Path) -> bool:
    """Whether Python has compiled a source since it was last written."""
    try:
        return Path(cache_from_source(str(file))).stat().st_mtime >= file.stat().st_mtime
    except OSError:
        return False


def _syntax_problem(entry: PluginEntry, module: str, file: Path, text: bytes) -> Problem | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SyntaxWarning)  # a warning for its author, at import
            compile(text, str(file), "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # as importing would
        return import_failure(entry, module, error)
    return None


def _summary(text: str, name: str) -> str | None:
    """Find the literal summary of the ``AlgorithmInfo`` of that name."""
    for call in re.finditer(r"\bAlgorithmInfo\(", text):
        try:
            tree = ast.parse(_balanced(text, call.start(), call.end()), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        if not isinstance(tree.body, ast.Call):
            continue
        given = {
            word.arg: word.value.value
            for word in tree.body.keywords
            if isinstance(word.value, ast.Constant)
        }
        if given.get("name") == name:
            summary = given.get("summary")
            return summary if isinstance(summary, str) else None
    return None


_TOKENS = re.compile(
    r"""[()] | \#[^\n]* | \"{3}.*?\"{3} | '{3}.*?'{3}
    | "(?:\\.|[^"\\\n])*" | '(?:\\.|[^'\\\n])*'""",
    re.VERBOSE | re.DOTALL,
)
"""Parentheses, comments and strings: what decides where a parenthesis ends."""


def _balanced(text: str, start: int, inside: int) -> str:
    """Return ``text`` from ``start`` to the end of the parenthesis that is open at ``inside``."""
    depth = 1
    for token in _TOKENS.finditer(text, inside):
        depth += {"(": 1, ")": -1}.get(token.group(), 0)
        if not depth:
            return text[start : token.end()]
    return ""


def _parsed(text: bytes, file: str) -> ast.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # a warning for its author, at import
        return ast.parse(text, file)


def _imported(body: list[ast.stmt]) -> Iterator[str]:
    """Return the modules that statements import when they run, as far as they name them."""
    for statement in body:
        if isinstance(statement, ast.Import):
            yield from (alias.name for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom):
            yield "" if statement.level else statement.module or ""
        elif isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
            yield from _imported(statement.orelse)
        elif isinstance(statement, ast.If | ast.Try | ast.With | ast.For | ast.While):
            for part in ("body", "orelse", "finalbody"):
                yield from _imported(getattr(statement, part, []))
        elif isinstance(statement, ast.ClassDef):
            yield from _imported(statement.body)
