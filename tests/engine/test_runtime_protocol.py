"""Every installed algorithm runs on a ``Runtime`` that has nothing but the protocol.

The embedded engine gives its plugins no more than any other host could. Plugins get a runtime whose
other names raise, KV caches that are bare handles, and plans of the protocol's methods alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import Tensor

from specplug import LLM, AttentionPlan, Batch, KVCache, SamplingParams
from specplug.algorithm import find_model
from specplug.engine.engine_runtime import EMBEDDED
from specplug.registry import Registry
from specplug.speculative.lent_runtime import MEMBERS, LentRuntime
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.runtime_base import RuntimeBase

PLAN = {name for name in vars(AttentionPlan) if not name.startswith("_")}
PROMPTS = ["def f(x):\n    return ", "class Queue:\n    def ", "import os\nimport "]


class Handle(KVCache):
    """A cache that has nothing to read."""


@attrs.frozen(eq=False)
class BarePlan:
    """An ``AttentionPlan``, from handles to the engine's caches."""

    plan: Any
    caches: dict[KVCache, KVCache]

    @property
    def positions(self) -> Tensor:
        found: Tensor = self.plan.positions
        return found

    def attend(self, cache: KVCache, *given: Any, **named: Any) -> Tensor:
        out: Tensor = self.plan.attend(self.caches[cache], *given, **named)
        return out

    def write(self, cache: KVCache, *given: Any, **named: Any) -> None:
        self.plan.write(self.caches[cache], *given, **named)


class BareRuntime:
    """What the protocol names, from an engine's runtime.

    Attributes:
        used: the members that were asked for.
    """

    def __init__(self, runtime: Any, used: set[str]) -> None:
        self._runtime, self.used = runtime, used
        self._caches: dict[KVCache, KVCache] = {}

    def __getattr__(self, name: str) -> Any:
        if name not in MEMBERS:
            raise AttributeError(f"{name!r} is no member of Runtime")
        self.used.add(name)
        return getattr(self._runtime, name)

    def allocate_kv(self, *shape: int, **named: int) -> KVCache:
        handle = Handle()
        self._caches[handle] = self._runtime.allocate_kv(*shape, **named)
        return handle

    def plan_attention(
        self, batch: Batch, starts: Tensor, width: int | Sequence[int], **layout: Any
    ) -> BarePlan:
        plan = self._runtime.plan_attention(batch, starts, width, **layout)
        return BarePlan(plan, self._caches)


def test_runtime_has_nothing_of_the_engine() -> None:
    """Besides the members of ``Runtime``, what any host does with its runtime (``RuntimeBase``)."""
    with LLM(device="cpu", max_total_tokens=64) as llm:
        runtime = llm.engine.runtime
        names = {name for name in dir(runtime) if not name.startswith("_")}
        of_base = set(dir(RuntimeBase(EMBEDDED, runtime.config)))
    assert names >= MEMBERS
    assert names - MEMBERS - of_base == {"close"}


def test_runtime_knows_the_target_and_its_tokenizer(tmp_path: Path) -> None:
    with LLM(device="cpu", max_total_tokens=64) as llm:
        runtime = llm.engine.runtime
        assert runtime.model_path == find_model(None)
        assert runtime.tokenizer is llm.tokenizer
    # A host that knows where the tokenizer is has it loaded; there may be none.
    base = RuntimeBase(EMBEDDED, runtime.config)
    assert (base.model_path, base.tokenizer) == (None, None)
    base = RuntimeBase(EMBEDDED, runtime.config)
    base.tokenizer_path = runtime.model_path
    assert base.tokenizer.get_vocab() == llm.tokenizer.get_vocab()
    base = RuntimeBase(EMBEDDED, runtime.config)
    base.tokenizer_path = str(tmp_path)
    assert base.tokenizer is None


def _generate(algorithm: str, **settings: Any) -> list[tuple[int, ...]]:
    params = [
        SamplingParams(max_tokens=16, ignore_eos=True),
        SamplingParams(max_tokens=16, temperature=0.8, seed=3, ignore_eos=True),
        SamplingParams(max_tokens=12, ignore_eos=True),
    ]
    with LLM(
        speculative_algorithm=algorithm, device="cpu", max_total_tokens=1024,
        chunked_prefill_size=8, **settings,
    ) as llm:  # fmt: skip
        return [output.token_ids for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def plain() -> list[tuple[int, ...]]:
    """What NONE generates."""
    return _generate("NONE")


@pytest.mark.parametrize("name", sorted({*Registry().names()} - {"NONE"}))
def test_algorithm_needs_nothing_but_the_protocol(
    name: str, plain: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    call, used = PluginGuard.call, set[str]()
    bare: BareRuntime | None = None

    def call_with_bare(self: PluginGuard, hook: str, **arguments: Any) -> Any:
        nonlocal bare
        runtime = arguments.get("runtime")
        if isinstance(runtime, LentRuntime):
            bare = bare or BareRuntime(runtime, used)
            arguments["runtime"] = bare
        batch = arguments.get("batch")
        if batch is not None and batch.attention is not None:
            caches = arguments["runtime"]._caches
            batch = attrs.evolve(batch, attention=BarePlan(batch.attention, caches))
            arguments["batch"] = batch
        return call(self, hook, **arguments)

    monkeypatch.setattr(PluginGuard, "call", call_with_bare)
    branches = Registry().select(name).info.capabilities.branching
    assert _generate(name, speculative_eagle_topk=3 if branches else 1) == plain
    assert "config" in used
