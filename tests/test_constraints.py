"""The pins of constraints.txt go together, with the torch that is published too.

The torch that runs the tests may be a CPU build, which needs less than the published one on Linux.
What that one needs stands in published_torch.json, so nothing is downloaded here. After torch's pin
has changed:

    python tests/test_constraints.py
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from importlib_metadata import Distribution, distributions
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PUBLISHED = Path(__file__).parent / "published_torch.json"
PROJECTS = [ROOT / "pyproject.toml", *sorted(ROOT.glob("plugins/*/pyproject.toml"))]
PYTHONS = ("3.11", "3.12", "3.13")


def _pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    parts = (line.partition("==") for line in lines if line and not line.startswith("#"))
    return {canonicalize_name(name): Version(version) for name, _, version in parts}


def _environment(python: str, system: str = "Linux") -> dict[str, str]:
    """What markers see there, on an ordinary machine."""
    platform = {"Linux": "linux", "Darwin": "darwin", "Windows": "win32"}[system]
    return {
        **default_environment(),
        "extra": "",
        "implementation_name": "cpython",
        "os_name": "nt" if system == "Windows" else "posix",
        "platform_machine": "x86_64",
        "platform_python_implementation": "CPython",
        "platform_system": system,
        "python_full_version": f"{python}.0",
        "python_version": python,
        "sys_platform": platform,
    }


def _misfits(name: str, needs: Iterable[str], environment: dict[str, str]) -> Iterator[str]:
    """The pins that break a requirement."""
    pins = _pins()
    for need in map(Requirement, needs):
        if need.marker is None or need.marker.evaluate(environment):
            pin = pins.get(canonicalize_name(need.name))
            if pin is not None and not need.specifier.contains(pin, prereleases=True):
                yield f"{name} needs {need}; constraints.txt pins {pin}"


def _published() -> list[str]:
    version, known = str(_pins()["torch"]), json.loads(PUBLISHED.read_text())
    assert version in known, (
        f"{PUBLISHED.name} has torch {', '.join(known)}, constraints.txt pins {version}: "
        "python tests/test_constraints.py asks the package index"
    )
    needs: list[str] = known[version]
    return needs


def _declared() -> Iterator[tuple[str, list[str]]]:
    for path in PROJECTS:
        project = tomllib.loads(path.read_text())["project"]
        yield project["name"], project["dependencies"]
        for extra, needs in project.get("optional-dependencies", {}).items():
            yield f"{project['name']}[{extra}]", needs


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_fit_the_published_torch(python: str) -> None:
    assert list(_misfits("torch", _published(), _environment(python))) == []


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_fit_one_another(python: str) -> None:
    environment, pins = _environment(python), _pins()

    def pinned(found: Distribution) -> bool:
        name = canonicalize_name(found.metadata["Name"])
        return name in pins and Version(found.version).public == pins[name].public

    found = {each.name: each for each in distributions() if pinned(each)}
    assert len(found) > len(pins) // 2
    misfits = [
        misfit
        for name, each in found.items()
        for misfit in _misfits(name, each.requires or (), environment)
    ]
    assert misfits == []


@pytest.mark.parametrize("python", PYTHONS)
def test_pins_fit_the_ranges(python: str) -> None:
    for name, needs in _declared():
        assert list(_misfits(name, needs, _environment(python))) == []


def test_triton_is_needed_on_linux_alone() -> None:
    (triton,) = (
        need
        for _, needs in _declared()
        for need in map(Requirement, needs)
        if need.name == "triton"
    )
    assert triton.marker is not None
    systems = "Linux", "Darwin", "Windows"
    wanted = [s for s in systems if triton.marker.evaluate(_environment("3.12", s))]
    assert wanted == ["Linux"]
    (of_torch,) = (need for need in map(Requirement, _published()) if need.name == "triton")
    (exact,) = of_torch.specifier
    assert triton.specifier.contains(exact.version)


def _ask_index(version: str) -> list[str]:
    """What the published wheel of this torch needs, asked of the index that pip uses."""
    wheel = ["--only-binary=:all:", "--platform=manylinux_2_28_x86_64", "--python-version=3.12"]
    wheel.append("--target=nowhere")  # pip wants one, and with --dry-run writes nothing
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command = [*pip, "--no-deps", "--report=-", *wheel, f"torch=={version}"]
    try:
        result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    except subprocess.CalledProcessError:
        sys.exit(f"torch {version}: no answer from the package index; pip's own words stand above")
    (found,) = json.loads(result.stdout)["install"]
    needs: list[str] = found["metadata"]["requires_dist"]
    if Version(found["metadata"]["version"]).local is not None or not any(
        Requirement(need).name == "triton" for need in needs
    ):
        sys.exit(
            f"pip found {found['metadata']['version']}, a build of its own; expected the "
            "published one: leave other indexes out (pip config list)"
        )
    return needs


if __name__ == "__main__":
    torch_version = str(_pins()["torch"])
    PUBLISHED.write_text(json.dumps({torch_version: _ask_index(torch_version)}, indent=1) + "\n")
