"""Our engine as the benchmarks of this folder make and time it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import torch
from known_drafts import KnownDrafts
from points import Generation
from shapes import SHAPES, kv_bytes, weight_bytes

from specplug import LLM, SamplingParams


@attrs.frozen(kw_only=True)
class Variant:
    """A way to decode.

    Attributes:
        algorithm: an installed one, or a plugin object.
        draft: the folder of its draft model under a shape's; None: it has none.
        settings: of ``EngineConfig``.
        passes: how often a step reads the draft's weights.
        reads_head: its draft has no LM head of its own and reads the target's once.
        bar: the most that a step may take, in plain steps; None: nothing is asked.
    """

    algorithm: str | object = "NONE"
    draft: str | None = None
    settings: Mapping[str, Any] = {}
    passes: int = 0
    reads_head: bool = False
    bar: float | None = None


def _shape(steps: int, topk: int, nodes: int) -> dict[str, int]:
    return {
        "speculative_num_steps": steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
    }


def _wrong(steps: int, topk: int = 1) -> KnownDrafts:
    return KnownDrafts({}, 0.0, num_steps=steps, topk=topk)


VARIANTS: Mapping[str, Variant] = {
    "plain": Variant(),
    "verify-16": Variant(algorithm=_wrong(15), bar=1.08),
    "verify-16-tree": Variant(algorithm=_wrong(5, 3), bar=1.08),
    "eagle3-chain-5": Variant(
        algorithm="EAGLE3", draft="eagle3", settings=_shape(5, 1, 6), passes=5, bar=1.35
    ),
    "eagle3-tree-32": Variant(
        algorithm="EAGLE3", draft="eagle3", settings=_shape(5, 8, 32), passes=5, bar=1.5
    ),
    "dflash-16": Variant(
        algorithm="DFLASH",
        draft="dflash",
        settings=_shape(15, 1, 16),
        passes=1,
        reads_head=True,
        bar=1.25,
    ),
    "ngram": Variant(algorithm="NGRAM"),
}
"""By name. ``verify-…`` are drafts that cost nothing and are wrong."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what every benchmark of this folder can be told."""
    parser.add_argument("--tiny", action="store_true", help="try it out: small models, on the CPU")
    parser.add_argument("--models", type=Path, help="where shapes.py wrote, or is to write")
    parser.add_argument("--output", type=Path, help="a folder for results.jsonl and plots")
    parser.add_argument(
        "--set",
        dest="settings",
        nargs="*",
        default=[],
        metavar="NAME=JSON",
        help="settings of EngineConfig for every run, such as page_size=32",
    )


def settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the device, the dtype and what ``--set`` says."""
    on = {"device": "cpu" if arguments.tiny else "cuda", "dtype": "bfloat16"}
    given = (pair.partition("=") for pair in arguments.settings)
    return {**on, **{name: json.loads(value) for name, _, value in given}}


class Engine:
    """An ``LLM`` that is timed.

    Args:
        base: what ``shapes.write_shape`` returned.
        variant: how it decodes.
        slots: of its KV pool.
        settings: more of ``EngineConfig``.
    """

    def __init__(self, base: Path, variant: Variant, slots: int, **settings: Any) -> None:
        start = time.perf_counter()
        self.base, self.variant = base, variant
        given: dict[str, Any] = {"chunked_prefill_size": 8192, "max_running_requests": 32}
        given |= {"max_total_tokens": slots, **variant.settings, **settings}
        if variant.draft is not None:
            given["speculative_draft_model_path"] = base / variant.draft
        self.llm = LLM(base / "target", speculative_algorithm=variant.algorithm, **given)
        self.ready_s = time.perf_counter() - start
        self.parts: dict[str, float] = {}
        self.outputs: list[Sequence[int]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Generate greedily; see ``points.Generate``. ``parts`` then has the milliseconds of each
        part of a decode step, as the device's clock has them, and ``outputs`` the tokens."""
        params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        self.llm.reset_stats()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        stats = self.llm.stats()
        steps = stats["decode_steps"]
        self.parts = {name: s / steps * 1e3 for name, s in stats["seconds"].items()}
        self.outputs = [output.token_ids for output in outputs]
        return seconds, steps, sum(map(len, self.outputs))

    def close(self) -> None:
        """Free the model and its caches."""
        self.llm.close()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()

    def step_bytes(self, batch: int, context: float) -> int:
        """Bytes that a decode step must read: the target's weights once, the draft's in each of
        its passes, and the keys and values of all requests."""
        size = weight_bytes(self.base / "target")
        if self.variant.draft is not None:
            size += self.variant.passes * weight_bytes(self.base / self.variant.draft)
        if self.variant.reads_head:
            shape = SHAPES[self.base.name]
            size += 2 * shape["vocab_size"] * shape["hidden_size"]
        per_token = kv_bytes(SHAPES[self.base.name])
        return size + int(batch * context * per_token)


def bandwidth(device: str) -> float:
    """Measure what the memory gives to a kernel that only reads, in bytes a second: the median of
    20 sums of 2 GiB (on the CPU of 64 MiB)."""
    numbers = torch.ones(1 << (29 if device == "cuda" else 24), device=device)
    seconds = []
    for _ in range(25):
        if device == "cuda":
            torch.cuda.synchronize()
        start = time.perf_counter()
        if device == "cuda":
            before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            before.record()
            numbers.sum()
            after.record()
            torch.cuda.synchronize()
            seconds.append(before.elapsed_time(after) / 1e3)
        else:
            numbers.sum()
            seconds.append(time.perf_counter() - start)
    return numbers.numel() * numbers.element_size() / sorted(seconds[5:])[10]
