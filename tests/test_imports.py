"""Imports run one way: from what users touch down to what knows nothing of it.

Hosts import what ``specplug`` exports, and ``specplug.speculative``. No package has a circle.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

import specplug

ROOT = Path(specplug.__file__).parent
REPOSITORY = Path(__file__).parents[1]
LAYERS = (
    {"__main__"},
    {"cli"},
    {"testing"},
    {"training"},
    {"serve", "bench"},
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
    {"algorithm_names"},
    {"contract"},
    {"hookspecs"},
    {"host"},
    {"config", "sampling_params", "outputs"},
    {"algorithm"},
    {"settings"},
    {"bounds", "cache_folder", "text_file"},
    {"errors", "debug", "heap", "startup"},
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


HOST_FILES = sorted(REPOSITORY.glob("hosts/*/specplug_*/**/*.py"))


@pytest.mark.parametrize(
    "file", HOST_FILES, ids=lambda file: "/".join(file.relative_to(REPOSITORY / "hosts").parts[1:])
)
def test_host_imports_what_specplug_exports(file: Path) -> None:
    """Also for types: a host that names what is not exported breaks when that moves."""
    of_core = {m for m in _imports(file) if m.startswith("specplug.")}
    inner = {m for m in of_core if _package(m) not in {"speculative", *specplug.__all__}}
    assert not inner, "export it through specplug or specplug.speculative, with a reason"


def test_hosts_are_looked_at() -> None:
    assert {file.parts[len(REPOSITORY.parts) + 1] for file in HOST_FILES} == {"vllm", "sglang"}


PACKAGES = [ROOT, *sorted(REPOSITORY.glob("plugins/*/specplug_*/__init__.py"))]
PACKAGES += sorted(REPOSITORY.glob("hosts/*/specplug_*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES, ids=lambda file: file.parent.name)
def test_no_imports_run_in_a_circle(package: Path) -> None:
    assert _circles(package if package.is_dir() else package.parent) == []


def test_circle_of_imports_is_found(tmp_path: Path) -> None:
    """In functions too, and across packages; not for types alone, and not by the package."""
    package = tmp_path / "lake"
    (package / "shore").mkdir(parents=True)
    for name, text in {
        "__init__": "def f():\n    from lake import duck",
        "duck": "from lake import swan",
        "swan": "def f():\n    from lake.shore.reed import reed",
        "shore/__init__": "",
        "shore/reed": "import lake.duck\nfrom lake import heron",
        "heron": "if TYPE_CHECKING:\n    from lake.duck import Duck",
    }.items():
        (package / f"{name}.py").write_text(text)
    assert _circles(package) == [["lake.duck", "lake.shore.reed", "lake.swan"]]


def _circles(package: Path) -> list[list[str]]:
    """Return the groups of modules of a package each of which imports all others in the end."""
    names = {
        ".".join((package.name, *file.relative_to(package).with_suffix("").parts)): file
        for file in sorted(package.rglob("*.py"))
    }
    files = {name.removesuffix(".__init__"): file for name, file in names.items()}
    reached = {name: _modules(file, files.keys()) - {name} for name, file in files.items()}
    grows = True
    while grows:
        grows = False
        for name, known in reached.items():
            more = set().union(*(reached[each] for each in known)) - known
            grows, reached[name] = grows or bool(more), known | more
    circles = {tuple(sorted(m for m in known if name in reached[m] and m in reached[m]))
               for name, known in reached.items() if name in known}  # fmt: skip
    return [list(circle) for circle in sorted(circles)]


def _modules(file: Path, known: Collection[str]) -> set[str]:
    """Return the known modules that a file imports, wherever in it, but not for types alone."""
    tree = ast.parse(file.read_text("utf-8"))
    typing = {
        id(node)
        for branch in ast.walk(tree)
        if isinstance(branch, ast.If) and ast.unparse(branch.test) == "TYPE_CHECKING"
        for node in ast.walk(branch)
    }
    found: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing:
            continue
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{each.name}" for each in node.names}
            found |= inner & set(known) or {node.module}
        elif isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
    return found & set(known)
