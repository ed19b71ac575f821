"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

SOUND = """
from specplug import AlgorithmInfo, hookimpl


class Algorithm:
    @hookimpl
    def describe(self):
        return AlgorithmInfo(name="NAME", summary="Own words of NAME", api_version=1)

    @hookimpl
    def create_worker(self, runtime):
        return self

    @hookimpl
    def build_draft_input(self, runtime, batch, target_output):
        raise NotImplementedError

    @hookimpl
    def propose(self, runtime, batch, draft_input):
        raise NotImplementedError


algorithm = Algorithm()
"""


@attrs.define
class PluginFolder:
    """A folder on the import path, into which real plugin distributions are written."""

    path: Path

    def write(
        self,
        name: str,
        *replacements: tuple[str, str],
        code: str = SOUND,
        distribution: str = "",
        value: str = "",
        group: str = "specplug.algorithms",
        entry_points: str = "",
        metadata: str | None = "Name: {}\nVersion: 1.0\nSummary: Distribution of {}\n\nReadme\n",
    ) -> Path:
        """Install a distribution that brings the plugin ``name``; returns its module.

        Args:
            replacements: changes to the source of a sound algorithm, each must apply.
            distribution: ``specplug-name`` by default; its module is ``specplug_name``.
            metadata: text of METADATA, ``{}`` is the distribution; None writes no such file.
        """
        distribution = distribution or f"specplug-{name.lower()}"
        module = distribution.replace("-", "_")
        for old, new in replacements:
            assert old in code, old
            code = code.replace(old, new)
        source = self.path / module / "__init__.py"
        source.parent.mkdir()
        source.write_text(code.replace("NAME", name))
        info = self.path / f"{module}-1.0.dist-info"
        info.mkdir()
        line = f"[{group}]\n{name} = {value or f'{module}:algorithm'}\n"
        (info / "entry_points.txt").write_text(entry_points or line)
        if metadata is not None:
            (info / "METADATA").write_text(metadata.replace("{}", distribution))
        return source

    def remove(self, distribution: str) -> None:
        """Uninstall a distribution."""
        module = distribution.replace("-", "_")
        shutil.rmtree(self.path / module)
        shutil.rmtree(self.path / f"{module}-1.0.dist-info")

    def environment(self, **variables: str) -> dict[str, str]:
        """Of a process that has these plugins installed."""
        ours = "SPECPLUG_", "PYTHONUNBUFFERED"
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        path = os.pathsep.join(filter(None, (str(self.path), os.environ.get("PYTHONPATH"))))
        return {**kept, "PYTHONPATH": path, **variables}

    def specplug(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run the ``specplug`` command as a process of its own."""
        return subprocess.run(
            [sys.executable, "-m", "specplug", *arguments],
            env=self.environment(**variables),
            cwd=self.path,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )


@pytest.fixture
def plugin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PluginFolder]:
    """A ``PluginFolder``, on the path of this process too; what came from it is forgotten."""
    folder = tmp_path / "site"
    folder.mkdir()
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delenv("SPECPLUG_DISABLE", raising=False)
    yield PluginFolder(folder)
    for name, module in list(sys.modules.items()):
        if str(getattr(module, "__file__", None) or "").startswith(str(folder)):
            del sys.modules[name]
