"""Each distribution of the repository: its license, its types, the checks that cover it."""

from __future__ import annotations

import re
import runpy
import tomllib
from glob import glob
from pathlib import Path

import pytest

from specplug.settings import settings_of

ROOT = Path(__file__).parents[1]
PYTHONS = "3.11", "3.12", "3.13"
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
def test_distribution_has_the_page_of_an_index(project):
    own, core = (settings(folder)["project"] for folder in (project, ROOT))
    assert own["classifiers"] == core["classifiers"]
    assert own["requires-python"] == core["requires-python"]
    assert (project / own["readme"]).read_text(encoding="utf-8").startswith(f"# {own['name']}\n")
    pythons = [each.split()[-1] for each in own["classifiers"] if re.search(r"3\.\d+$", each)]
    assert pythons == list(PYTHONS)


def test_plugins_readmes_are_as_the_code_makes_them():
    made = runpy.run_path(str(ROOT / "plugins" / "make_readmes.py"))
    found = made["algorithms"]()
    assert len(found) >= 9
    for folder, info in found.items():
        name = settings(folder)["project"]["name"]
        text = (folder / "README.md").read_text(encoding="utf-8")
        assert text == made["readme"](info, name), "python plugins/make_readmes.py"


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


def test_page_of_algorithms_is_right_about_each():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    made = runpy.run_path(str(ROOT / "plugins" / "make_readmes.py"))["algorithms"]()
    for info in made.values():
        section = text.partition(f"\n## {info.name}\n")[2].partition("\n## ")[0]
        assert info.paper.rpartition("/")[2] in section, info.name
        own = () if info.settings is None else settings_of(info.settings)
        assert all(f"`{name}`" in section for name in own), info.name
        steps, nodes = info.defaults.num_steps, info.defaults.num_draft_tokens
        shape = f"{steps}, {info.defaults.topk}, {nodes or steps + 1}"
        kind = "both" if info.capabilities.branching else "chains"
        row = rf"^\| \[`{info.name}`\]\(#{info.name.lower()}\) \| {shape} \|.*\| {kind} \|$"
        assert re.search(row, text, re.MULTILINE), (info.name, shape)


def test_figures_of_algorithms_are_those_of_the_benchmarks():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    measured = (ROOT / "benchmarks" / "gpu" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| \[`(\w+)`\]\S+ \| (\d.*?) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE
    )
    assert len(rows) == 8
    for name, shape, length, alone, together in rows:
        row = rf"^\| {name} \| {shape} \| {length} \| [\d,]+ \| {alone} \(.* \| {together} \("
        assert re.search(row, measured, re.MULTILINE), name
