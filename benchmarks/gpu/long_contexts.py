"""What a step of a long context costs, plain and drafted by the target over a part of the context.

    python benchmarks/gpu/long_contexts.py --models FOLDER --output DIR

One engine decodes plainly and with ``SPARSE_SELF``, by turns: the same weights, the same pool. The
drafts are computed as they always are, and then replaced by tokens of the true continuation that
are right as often as the column "right" says: with random weights the target's own drafts say
nothing about a real model's. "x plain" is tokens a second over those of plain decoding. Tokens that
differ from plain decoding's are counted: there are none.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
from engines import Engine, Variant, add_arguments, add_run, settings_of
from known_drafts import KnownDrafts
from points import Generation, Point, Results, time_steps
from shapes import SHAPES, write_shape

from specplug import Batch, CommittedOutput, Draft, DraftInput, FutureMap, Runtime, hookimpl
from specplug_sparse_self import SparseSelf
from specplug_sparse_self.view import View
from specplug_sparse_self.worker import SparseSelfWorker

POINTS = [Point(1, 16384), Point(8, 16384), Point(1, 32768), Point(8, 32768)]
TINY = [Point(1, 96), Point(2, 160)]
MOST_STEPS = 5
SHORT, LONG = 8, 64


@attrs.frozen
class Mode:
    """A way to decode.

    Attributes:
        steps: tokens that are drafted; 0: plain decoding.
        right: how many of them are right, given that those before them are.
    """

    steps: int = 0
    right: float = 0.0

    def __str__(self) -> str:
        return f"{self.steps} steps, {self.right:.0%}" if self.steps else "plain"


MODES = [Mode(), Mode(3, 0.8), Mode(3, 0.9), Mode(5, 0.9)]


class SetAcceptance(SparseSelf):
    """``SPARSE_SELF``, whose drafts are computed and then replaced by known ones.

    Args:
        view: what drafts see; None: the usual.
    """

    def __init__(self, view: View | None) -> None:
        super().__init__(view)
        self.mode = Mode()
        self._known = KnownDrafts({}, 0.0, num_steps=MOST_STEPS, alike=True)
        self._known_runtime: Any = None

    @hookimpl
    def create_worker(self, runtime: Runtime) -> SparseSelfWorker:
        known = self._known.create_worker(runtime)
        self._known_runtime = SimpleNamespace(
            worker=known, vocab_size=runtime.vocab_size, device=runtime.device
        )
        return super().create_worker(runtime)

    def draft(self, mode: Mode, truth: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        """Decode so from now on. No request may be running."""
        self.mode = mode
        self._known.know(truth, mode.right)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        known = self._known.build_draft_input(self._known_runtime, batch, target_output)
        if not self.mode.steps:
            return known
        return super().build_draft_input(runtime, batch, target_output, future_map)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        if not self.mode.steps:
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        runtime.worker.num_draft_tokens = self.mode.steps + 1
        computed = super().propose(runtime, batch, draft_input)
        known = self._known.propose(self._known_runtime, batch, draft_input)
        width = computed.tokens.shape[1]
        return Draft.chain(known.tokens[:, :width], scores=computed.scores)


class Run:
    """The engine in one mode; it counts the tokens that are not those of plain decoding."""

    def __init__(self, engine: Engine, drafts: SetAcceptance, mode: Mode, truth: Any) -> None:
        self._engine, self._drafts, self._mode, self._truth = engine, drafts, mode, truth
        self.parts: dict[str, float] = {}
        self.differ = self.tokens = 0

    def __call__(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Generate; see ``points.Generate``."""
        self._drafts.draft(self._mode, self._truth)
        found = self._engine.generate(prompts, max_tokens)
        self.parts = self._engine.parts
        for prompt, output in zip(prompts, self._engine.outputs, strict=True):
            plain = self._truth[tuple(prompt)][: len(output)]
            self.differ += sum(a != b for a, b in zip(plain, output, strict=True))
            self.tokens += len(output)
        return found


def measure(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time all modes at all points."""
    points = TINY if arguments.tiny else POINTS
    shape, settings = SHAPES[base.name], settings_of(arguments)
    drafts = SetAcceptance(View.of_tokens(48) if arguments.tiny else None)
    nodes = {"speculative_num_steps": MOST_STEPS, "speculative_num_draft_tokens": MOST_STEPS + 1}
    variant = Variant(algorithm=drafts, settings=nodes)
    # A longer prompt begins with the shorter one of its number, so these share pages.
    slots = arguments.slots or max(p.batch * (p.context + 512) for p in points)
    batch = max(point.batch for point in points)
    engine = Engine(
        base, variant, slots, **{"warm_up": "off", "max_running_requests": batch, **settings}
    )
    print(f"ready in {engine.ready_s:.1f} s, {slots:,} slots", flush=True)
    print(f"{'':28}{'':14}{'ms/step':>9}{'propose':>9}{'target':>8}{'extend':>8}{'accept':>8}"
          f"{'ms/token':>10}{'x plain':>9}{'differ':>8}")  # fmt: skip
    for point in points:
        prompts = point.prompts(shape["vocab_size"])
        drafts.draft(Mode(), {})
        began = time.perf_counter()
        engine.generate(prompts, LONG + 16)
        print(f"{point}: prefilled in {time.perf_counter() - began:.1f} s", flush=True)
        truth = {tuple(p): tuple(t) for p, t in zip(prompts, engine.outputs, strict=True)}
        runs = {str(mode): Run(engine, drafts, mode, truth) for mode in MODES}
        found = time_steps(runs, prompts, rounds=arguments.rounds, short=SHORT, long=LONG)
        plain = found["plain"]
        for mode in MODES:
            own, run = found[str(mode)], runs[str(mode)]
            a_token = own.ms / own.accept_length
            ratio = plain.ms / plain.accept_length / a_token
            parts = [run.parts.get(name, 0.0) for name in ("propose", "target", "extend")]
            print(f"{point!s:28}{mode!s:14}{own.ms:9.3f}{parts[0]:9.3f}{parts[1]:8.3f}"
                  f"{parts[2]:8.3f}{own.accept_length:8.2f}{a_token:10.3f}{ratio:9.3f}"
                  f"{run.differ:5}/{run.tokens}", flush=True)  # fmt: skip
            results.add("long", shape=base.name, batch=point.batch, context=point.context,
                        steps=mode.steps, right=mode.right, ms=own.ms, parts=run.parts,
                        accept_length=own.accept_length, ratio=ratio, differ=run.differ,
                        tokens=run.tokens)  # fmt: skip
    engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--slots", type=int, help="of the KV pool; default: for the greatest point")
    arguments = parser.parse_args()
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    with tempfile.TemporaryDirectory() as scratch:
        start = time.perf_counter()
        base = write_shape(
            arguments.models or Path(scratch), shape, (), settings_of(arguments)["device"]
        )
        print(f"{base}: there in {time.perf_counter() - start:.1f} s", flush=True)
        results = Results(arguments.output)
        add_run(results, arguments, shape=shape)
        measure(arguments, base, results)


if __name__ == "__main__":
    main()
