"""Each distribution of the repository: its license, its types, the checks that cover it."""

from __future__ import annotations

import tomllib
from glob import glob
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECTS = [
    ROOT,
    *sorted(path.parent for path in ROOT.glob("plugins/*/pyproject.toml")),
    *sorted(path.parent for path in ROOT.glob("hosts/*/pyproject.toml")),
]


def settings(project: Path) -> dict:
    return tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))


def package(project: Path) -> Path:
    return project / settings(project)["project"]["name"].replace("-", "_")


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_distribution_ships_the_license(project):
    assert settings(project)["project"]["license-files"] == ["LICENSE"]
    assert (project / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_distribution_ships_its_types(project):
    data = settings(project)["tool"]["setuptools"]["package-data"]
    assert "py.typed" in data[package(project).name]
    assert (package(project) / "py.typed").is_file()


@pytest.mark.parametrize("project", PROJECTS, ids=lambda path: path.name)
def test_distribution_is_type_checked(project):
    patterns = settings(ROOT)["tool"]["mypy"]["files"]
    named = {
        Path(path) for pattern in patterns for path in glob(str(ROOT / pattern), recursive=True)
    }
    modules = list(package(project).rglob("*.py"))
    assert modules
    assert [path for path in modules if named.isdisjoint((path, *path.parents))] == []
