"""Fixtures that all tests share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor
from triton_interpreter import prepare_interpreter

from specplug import (
    AlgorithmInfo,
    Batch,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    Runtime,
    hookimpl,
)

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # the kernels run through Triton's interpreter
    if find_spec("triton"):
        prepare_interpreter()

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


class Successors:
    """An algorithm unlike the built-in ones, with the required hooks alone.

    It keeps a state of its own on the device, outside of pages and draft inputs: for each request
    row the token that came last behind each token. What it proposes is as wide as the request's
    name and the step's number say, so hardly two requests of a batch are alike.
    """

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="SUCCESSORS",
            summary="What came behind the same token last",
            api_version=1,
            defaults=Defaults(num_steps=4),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Successors:
        size = runtime.req_table_size, runtime.vocab_size
        self._next_tokens = torch.full(size, -1, dtype=torch.int64, device=runtime.device)
        self._last = torch.zeros(runtime.req_table_size, dtype=torch.int64, device=runtime.device)
        self._steps = 0
        return self

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        if batch.is_prefill:
            for b, request in enumerate(batch.requests):
                known = request.token_ids[: batch.chunk_ends[b]]
                row = batch.req_indices[b : b + 1]
                self._read(row, known, anew=batch.first_chunk[b])
                if batch.last_chunk[b]:
                    last = self._upload(known[-1:])
                    self._next_tokens.index_put_((row, last), target_output.bonus_tokens[b : b + 1])
        else:
            before = self._last[batch.req_indices]
            for column, token in enumerate(
                target_output.next_tokens.view(batch.size, -1).unbind(1)
            ):
                counts = column < target_output.accept_lens
                # Row 0 is padding.
                rows = torch.where(counts, batch.req_indices, 0)
                self._next_tokens[rows, before] = token
                before = token
        self._last[batch.req_indices] = target_output.bonus_tokens
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        chain = [draft_input.bonus_tokens]
        for _ in range(runtime.config.num_steps):
            chain.append(self._next_tokens[batch.req_indices, chain[-1]].clamp(min=0))
        self._steps += 1
        nodes = runtime.config.num_draft_tokens
        widths = [1 + (int(r.request_id) + self._steps) % nodes for r in batch.requests]
        return Draft.chain(torch.stack(chain, dim=1)[:, : max(widths)].contiguous(), widths)

    def _read(self, row: Tensor, tokens: Sequence[int], *, anew: bool) -> None:
        """Enter known tokens; what was cached is among them, so a hit loses nothing."""
        if anew:
            self._next_tokens.index_fill_(0, row, -1)
        last = dict(pairwise(tokens))
        if last:
            keys, values = self._upload([list(last), list(last.values())])
            self._next_tokens.index_put_((row.expand(len(last)), keys), values)

    def _upload(self, tokens: Any) -> Tensor:
        return torch.tensor(tokens).to(self._last.device, non_blocking=True)


@pytest.fixture(scope="session")
def successors() -> type[Successors]:
    """The class of an algorithm that resembles no built-in one."""
    return Successors
