"""Our engine as the benchmarks of this folder make and time it."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import torch
from known_drafts import KnownDrafts, RefusedNgram
from points import Generation, Results, measured_commit
from shapes import MTP_LAYERS, SHAPES, kv_bytes, weight_bytes

from specplug import LLM, SamplingParams
from specplug.bench.machine import describe_machine, versions
from specplug.model import half_precision


@attrs.frozen(kw_only=True)
class Variant:
    """A way to decode.

    Attributes:
        algorithm: an installed one, a plugin object, or a list of these, of which each drafts for
            some requests.
        draft: the folder of its draft model under a shape's; None: it has none.
        settings: of ``EngineConfig``.
        passes: how often a step reads the draft's weights.
        heads: how often its draft, which has no LM head of its own, reads the target's.
        bar: the most that a step may take, in plain steps; None: nothing is asked.
    """

    algorithm: str | object = "NONE"
    draft: str | None = None
    settings: Mapping[str, Any] = {}
    passes: int = 0
    heads: int = 0
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
        algorithm="DFLASH", draft="dflash", settings=_shape(15, 1, 16), passes=1, heads=1, bar=1.25
    ),
    "dspark-8": Variant(
        algorithm="DSPARK", draft="dspark", settings=_shape(7, 1, 8), passes=1, heads=1
    ),
    "peagle-chain-7": Variant(
        algorithm="PEAGLE", draft="peagle", settings=_shape(7, 1, 8), passes=2
    ),
    "standalone-4": Variant(
        algorithm="STANDALONE", draft="standalone", settings=_shape(4, 1, 5), passes=4
    ),
    "eagle-chain-5": Variant(
        algorithm="EAGLE", draft="eagle", settings=_shape(5, 1, 6), passes=5, heads=5
    ),
    "multi-layer-eagle": Variant(
        algorithm="MULTI_LAYER_EAGLE",
        draft="multi_layer_eagle",
        settings=_shape(MTP_LAYERS, 1, MTP_LAYERS + 1),
        passes=1,
        heads=MTP_LAYERS,
    ),
    # Each generation drafts from the text of those before it.
    "ngram": Variant(
        algorithm=RefusedNgram(),
        settings={"speculative_settings": {"ngram_index_scope": "engine"}},
    ),
    # It drafts where contexts are longer than 4,096 tokens.
    "sparse-self": Variant(algorithm="SPARSE_SELF", settings=_shape(4, 1, 5)),
}
"""By name. ``verify-…`` are drafts that cost nothing. All drafts are wrong."""


def drafts_of(names: Iterable[str]) -> list[str]:
    """Return the draft models that these variants need, as ``shapes.write_shape`` takes them."""
    found = (VARIANTS[name].draft for name in names)
    return list(dict.fromkeys(draft for draft in found if draft is not None))


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


def add_run(results: Results, arguments: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Begin a run: its rows say where, when and with what they were measured.

    Returns:
        The machine.
    """
    machine = describe_machine(settings_of(arguments)["device"])
    found = versions(("specplug", "torch", "triton", "transformers"))
    date = time.strftime("%Y-%m-%d")
    given = arguments.settings
    commit = measured_commit()
    results.begin(commit=commit, machine=machine, versions=found, settings=given, date=date, **more)
    return machine


BY_CUBLAS = {"disable_row_invariance": True}
"""The settings of engines that are made within ``products_by_cublas``."""


@contextmanager
def products_by_cublas() -> Iterator[None]:
    """Have cuBLAS compute all products of the targets that are loaded meanwhile, as it likes. The
    engine itself takes the kernels for few rows in any case, since they are faster."""
    usual = half_precision.Products
    half_precision.Products = partial(usual, kernel_rows=0)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        half_precision.Products = usual  # type: ignore[misc]


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
        self.drafting = self.drafted = 0.0
        self.outputs: list[Sequence[int]] = []

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Generate greedily; see ``points.Generate``.

        Then ``parts`` has the milliseconds of each part of a decode step, as the device's clock has
        them, ``outputs`` the tokens, ``drafting`` the share of the requests' steps that drafted,
        and ``drafted`` the tokens that such a step drafted.
        """
        return self.complete(
            prompts, SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
        )

    def complete(
        self, prompts: list[list[int]], params: SamplingParams | list[SamplingParams]
    ) -> Generation:
        """Generate with these parameters, otherwise as ``generate``."""
        self.llm.reset_stats()
        start = time.perf_counter()
        outputs = self.llm.generate(prompts, params)
        seconds = time.perf_counter() - start
        stats = self.llm.stats()
        steps = stats["decode_steps"]
        self.parts = {name: s / steps * 1e3 for name, s in stats["seconds"].items()}
        drafting = sum(count for width, count in stats["widths"].items() if int(width) > 1)
        self.drafting = drafting / max(stats["verifications"], 1)
        self.drafted = stats["drafted"] / max(drafting, 1)
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
        shape = SHAPES[self.base.name]
        size += self.variant.heads * 2 * shape["vocab_size"] * shape["hidden_size"]
        return size + int(batch * context * kv_bytes(shape))
