"""What it gains to record chunks, mixed steps and drafts of differing widths, pass by pass.

    python benchmarks/gpu/padded_passes.py --models FOLDER --shape llama-8b

Prints a line for each pass of the target: its rows, those of the form that it is padded to, and the
milliseconds of the pass as it is and replayed, the quickest of three rounds of 20 in turns. A draft
of differing widths is beside the same draft padded to one width, which is replayed too.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import torch
from engines import add_arguments, settings_of
from shapes import SHAPES, write_shape

from specplug import LLM, Draft
from specplug.model.model_runner import ModelRunner
from specplug.model.padded_rows import PassPart, size_of
from specplug.model.pass_form import PassForm
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.padding import Padding

ROUNDS, PASSES = 3, 20
CHUNKS = (16, 32, 64, 128, 192, 256, 384, 504)
NODES = 8
RAGGED = (16, 1, 1, 1, 4, 1, 1, 2)


class NoRecorder(GraphRecorder):
    """Records nothing, and does not give up."""

    def record(self, run: Callable[[], Any], *, warms_up: bool = False) -> None:
        """Return that the pass runs as it is."""


class Passes:
    """Passes of a target over requests that have slots, and no engine's state.

    Args:
        llm: with the target.
        context: committed tokens of each request.
    """

    def __init__(self, llm: LLM, context: int) -> None:
        self._kv = llm.engine.steps.kv
        self._context = context
        self.runner = llm.engine.steps.runner
        table = self._kv.table.slots
        length = context + 1024
        for row in range(1, len(table)):
            first = 1 + (row - 1) * length
            table[row, :length] = torch.arange(first, first + length, device=table.device)
        self._kv.begin_step(length)

    def part(self, rows: Sequence[int], widths: Sequence[int], *, ends_only: bool) -> PassPart:
        """Make a part of these rows of the request table."""
        device, width = self._kv.table.slots.device, max(widths)
        plan = self._kv.make_plan(
            torch.tensor(rows, device=device),
            torch.full((len(rows),), self._context, device=device),
            width,
            padding=Padding.of(widths, width, device),
        )
        tokens = torch.randint(10, self.runner.target.vocab_size, (sum(widths),), device=device)
        last_rows = torch.tensor([*accumulate(widths)], device=device) - 1
        return PassPart(tokens, plan, last_rows=last_rows if ends_only else None)

    def plain(self, prefill: PassPart | None, decode: PassPart | None) -> Callable[[], Any]:
        """Return the pass as it is."""
        part = prefill or decode
        assert part is not None
        plain = ModelRunner(self.runner.target)  # it records nothing
        return lambda: plain.run(prefill, decode, part.plan)

    def padded(
        self, prefill: PassPart | None, decode: PassPart | None
    ) -> tuple[int, Callable[[], Any]]:
        """Return the rows of the form, and the pass padded to it."""
        form = PassForm.of([size_of(prefill, decode, frozenset())])
        part, padded = prefill or decode, self.runner.padded_pass
        assert form is not None
        assert part is not None
        assert padded is not None
        return form.rows, lambda: padded(form, prefill, decode, part.plan)


def time_both(calls: Sequence[Callable[[], Any]], device: str) -> list[float]:
    """Return milliseconds a call of each, taken in turns."""

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    found: list[list[float]] = [[] for _ in calls]
    for _ in range(ROUNDS + 1):
        for call, times in zip(calls, found, strict=True):
            wait()
            start = time.perf_counter()
            for _ in range(PASSES):
                call()
            wait()
            times.append((time.perf_counter() - start) / PASSES * 1e3)
    return [min(times[1:]) for times in found]


def cases_of(passes: Passes) -> dict[str, tuple[PassPart | None, PassPart | None]]:
    """Return the passes to time, by name."""
    cases: dict[str, tuple[PassPart | None, PassPart | None]] = {}
    decode = passes.part(range(1, NODES + 1), [1] * NODES, ends_only=False)
    for width in CHUNKS:
        chunk = passes.part([NODES + 1], [width], ends_only=True)
        cases[f"a chunk of {width}"] = chunk, None
        cases[f"a chunk of {width}, {NODES} nodes"] = chunk, decode
    ragged = passes.part(range(1, NODES + 1), RAGGED, ends_only=False)
    cases[f"nodes {', '.join(map(str, RAGGED))}"] = None, ragged
    return cases


def measure(passes: Passes, device: str) -> None:
    """Time all passes and print a line for each."""
    print(f"{'pass':32} {'rows':>5} {'form':>5} {'plain ms':>9} {'replayed':>9} {'ratio':>6}")
    for name, parts in cases_of(passes).items():
        rows, padded = passes.padded(*parts)
        plain, replayed = time_both([passes.plain(*parts), padded], device)
        real = sum(len(part.tokens) for part in parts if part is not None)
        ratio = replayed / plain
        print(f"{name:32} {real:5} {rows:5} {plain:9.2f} {replayed:9.2f} {ratio:6.2f}")
    wide = passes.part(range(1, NODES + 1), [max(RAGGED)] * NODES, ends_only=False)
    nodes = attrs.evolve(wide, draft=Draft.chain(wide.tokens.view(NODES, -1)))
    (dense,) = time_both([lambda: passes.runner.run(None, nodes, wide.plan)], device)
    print(f"{'the same, all of one width':32} {len(wide.tokens):5} {'':15} {dense:9.2f}")


@torch.inference_mode()
def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    add_arguments(parser)
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--context", type=int, default=1024)
    arguments = parser.parse_args()
    shape = "llama-tiny" if arguments.tiny else arguments.shape
    context = 64 if arguments.tiny else arguments.context
    settings = settings_of(arguments)
    settings |= {
        "max_running_requests": NODES + 1,
        "max_total_tokens": (NODES + 2) * (context + 1024),
        "warm_up": "off",
    }
    with tempfile.TemporaryDirectory() as scratch:
        models = arguments.models or Path(scratch)
        base = write_shape(models, shape, (), settings["device"])
        with LLM(base / "target", **settings) as llm:
            passes = Passes(llm, context)
            if arguments.tiny:  # there is nothing to record
                passes.runner.pad_passes(NoRecorder())
            print(f"{shape}, context {context:,}, {llm.engine.runtime.dtype}")
            measure(passes, settings["device"])


if __name__ == "__main__":
    main()
