"""Nothing on the host waits for the device: neither in a step, nor where a request is admitted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from shallow_target import ShallowTarget
from torch.overrides import TorchFunctionMode

from specplug import LLM, SamplingParams
from specplug.engine.engine import Engine
from specplug.engine.step import StepRunner
from specplug.registry import Registry

READS = {
    *("item", "tolist", "cpu", "numpy", "is_nonzero"),
    *("__bool__", "__int__", "__float__", "__index__"),
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "equal", "allclose"),
}
"""Names of what brings a tensor's values to the host, or needs them for a shape."""
PROMPTS = ["def f(x):\n    return ", "class Queue:\n    ", "import ", "x = [1, 2, 3]\ny = "]
NAMES = [name for name in Registry().names() if name != "NGRAM"]
"""NGRAM drafts on the host: its future map waits, as it must, in resolve."""

SHAPES = [("SUCCESSORS", None)] + [
    (name, topk)
    for name in NAMES
    for topk in ((1, 4) if Registry().select(name).info.capabilities.branching else (None,))
]
"""Each algorithm with chains, and with trees where it branches."""


class HostReads(TorchFunctionMode):
    """Counts what reads a tensor on the host; a boolean index too, whose result has its count, and
    a number that is copied to one item, or to those of an index: the host waits for the copy."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self.found[name] += 1
        if name in ("__getitem__", "__setitem__"):
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(p, torch.Tensor) and p.dtype is torch.bool for p in parts):
                self.found[f"{name} by a mask"] += 1
        if name == "__setitem__" and isinstance(args[2], int | float):
            is_item = len(parts) == args[0].dim() and all(isinstance(p, int) for p in parts)
            if is_item or any(isinstance(p, torch.Tensor) for p in parts):
                self.found["__setitem__ of a number"] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> HostReads:
    """Every step and admission is counted, but for the checks that only run in tests."""
    counted = HostReads()
    run_within(monkeypatch, lambda: counted)
    return counted


def run_within(monkeypatch: pytest.MonkeyPatch, block: Callable[[], Any]) -> None:
    """Have steps launched, and requests admitted, within a block."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    run, admit = StepRunner.run, Engine._admit

    def launch(self: StepRunner, step: Any) -> Any:
        with block():
            return run(self, step)

    def enter(self: Engine, request: Any) -> None:
        with block():
            admit(self, request)

    monkeypatch.setattr(StepRunner, "run", launch)
    monkeypatch.setattr(Engine, "_admit", enter)


def settings() -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=20, temperature=0.8, top_p=0.9, top_k=50, seed=1),
        SamplingParams(max_tokens=20, repetition_penalty=1.2, logit_bias={5: 1.0}),
        SamplingParams(max_tokens=20, temperature=1.0, logprobs=2, seed=2),
    ]


@pytest.mark.parametrize(("name", "topk"), SHAPES)
@pytest.mark.parametrize("mixed", [False, True])
def test_no_step_reads_a_tensor(
    name: str,
    topk: int | None,
    mixed: bool,
    reads: HostReads,
    successors: Any,
    shallow: ShallowTarget,
) -> None:
    with LLM(
        **shallow.options(successors() if name == "SUCCESSORS" else name),
        speculative_eagle_topk=topk,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=8,
        max_total_tokens=120,
        device="cpu",
    ) as llm:
        llm.generate(PROMPTS, settings())
        assert llm.stats()["decode_steps"] > 3
    assert reads.found == {}


def test_the_counter_counts(reads: HostReads) -> None:
    with reads:
        tensor = torch.arange(4)
        assert tensor[0].item() == 0
        assert tensor.tolist() == [0, 1, 2, 3]
        assert bool(tensor[1] > 0)
        tensor[tensor > 1] = 0
        tensor[1:] = 0  # a kernel takes the number
        tensor[1].fill_(1)
    found = {"item": 1, "tolist": 1, "__bool__": 1, "__setitem__ by a mask": 1}
    assert reads.found == {**found, "__setitem__ of a number": 1}
    with reads:
        tensor[1] = 1
        tensor[torch.tensor([0])] = 1
    assert reads.found["__setitem__ of a number"] == 3


@contextmanager
def no_waiting() -> Iterator[None]:
    """CUDA raises where the host would wait for it."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("name", "topk"), SHAPES)
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("graphs", [False, True])
def test_no_step_waits_for_a_gpu(
    name: str,
    topk: int | None,
    graphs: bool,
    mixed: bool,
    monkeypatch: pytest.MonkeyPatch,
    successors: Callable[[], Any],
) -> None:
    run_within(monkeypatch, no_waiting)
    with LLM(
        dtype="float32",
        speculative_algorithm=successors() if name == "SUCCESSORS" else name,
        speculative_eagle_topk=topk,
        enable_mixed_chunk=mixed,
        disable_cuda_graph=not graphs,
        chunked_prefill_size=8,
        max_total_tokens=120,
        device="cuda",
    ) as llm:
        assert len(llm.generate(PROMPTS, settings())) == len(PROMPTS)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain loop"])
def test_no_step_is_launched_after_the_last_token(tiny_model: Path, overlap: bool) -> None:
    """The last token's step is in flight when the next one would be scheduled."""
    with LLM(tiny_model, disable_overlap_schedule=not overlap) as llm:
        (output,) = llm.generate([[1, 2, 3]], SamplingParams(max_tokens=6, ignore_eos=True))
        assert len(output.token_ids) == 6
        assert llm.stats()["steps"]["decode"] == 5  # the prefill gives the first token


def test_an_algorithm_may_refuse_overlap_and_the_cache(successors: Any, tiny_model: Path) -> None:
    """It is warned of once, with the reason, and can be read in the effective configuration."""
    import attrs

    from specplug import Capabilities, FallbackWarning, hookimpl

    class Strict(successors):  # type: ignore[misc]
        @hookimpl
        def describe(self) -> Any:
            can = Capabilities(overlap=False, prefix_cache=False)
            return attrs.evolve(super().describe(), capabilities=can)

    with pytest.warns(FallbackWarning) as told:
        llm = LLM(tiny_model, speculative_algorithm=Strict())
    with llm:
        config = llm.effective_config
    assert [str(warning.message) for warning in told] == [
        "overlap is off: SUCCESSORS drafts from what the host has read",
        "prefix_cache is off: SUCCESSORS must itself see every token that it drafts after",
    ]
    assert config["overlap"] == "off: SUCCESSORS drafts from what the host has read"
    assert config["prefix_cache"].startswith("off: SUCCESSORS must itself see every token")


def test_a_warning_at_loading_names_the_callers_file(successors: Any, tiny_model: Path) -> None:
    import attrs

    from specplug import Capabilities, FallbackWarning, hookimpl

    class Adjusting(successors):  # type: ignore[misc]
        @hookimpl
        def describe(self) -> Any:
            return attrs.evolve(super().describe(), capabilities=Capabilities(overlap=False))

        @hookimpl
        def validate_config(self, config: Any) -> Any:
            return config.adjust("one step", num_steps=1, num_draft_tokens=2)

    with pytest.warns(FallbackWarning) as told:
        LLM(tiny_model, speculative_algorithm=Adjusting()).close()
    assert len(told) == 2
    assert {warning.filename for warning in told} == {__file__}
