"""Milliseconds of a decode step: plain and drafted, beside the memory's limit and beside vLLM.

    python benchmarks/gpu/decode_step.py --models FOLDER --shape llama-8b --output DIR \
        --peer --peer-packages SITE

A step takes (T(96 tokens) - T(16 tokens)) / steps, the minimum of three rounds, in which the
engines take turns: plain decoding, one variant after the other, and vLLM in a process of its own on
the same card. The limit is what the weights and the keys and values of a step weigh, over the
bandwidth that is measured first. "Other" is what is neither target nor draft. Accept lengths are 1,
since the weights are random.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path
from typing import Any

from engines import (
    VARIANTS,
    Engine,
    add_arguments,
    add_run,
    drafts_of,
    settings_of,
)
from peer_vllm import Peer
from points import DRAFTED, LONG, PLAIN, SHORT, TINY, Generate, Point, Results, StepTime, time_steps
from shapes import SHAPES, write_shape
from timing import bandwidth

PLAIN_BAR = 0.85
"""The least share of the memory's limit that a plain step at batch 1 is to reach."""

WITH_BARS = ["plain", *(name for name, variant in VARIANTS.items() if variant.bar)]

PEERS = {"plain": "none", "eagle3-chain-5": "eagle3"}
"""Which of vLLM's algorithms stands beside which of our variants."""

SLOTS = 40 * 1024
"""Of each KV pool: 32 requests of 1,024 tokens, and what they generate and draft."""


class Table:
    """The rows that were measured, as text and as results.

    Args:
        results: where they go.
        rate: bytes a second of the memory.
        shape: the target's name.
    """

    def __init__(self, results: Results, rate: float, shape: str) -> None:
        self._results, self._rate, self._shape = results, rate, shape
        self._lines: list[str] = []

    def add(self, engine: Engine, name: str, point: Point, own: StepTime, plain: StepTime) -> None:
        """Add a variant of ours."""
        context = point.context + (SHORT + LONG) / 2
        limit = engine.step_bytes(point.batch, context) / self._rate * 1e3
        ratio = own.ms / plain.ms
        bar = engine.variant.bar if point.batch == 1 else None
        text = f"{ratio:.3f} x plain" + (f" (bar {bar})" if bar else "")
        text += f", {engine.drafting:.1%} of steps drafted {engine.drafted:.1f} tokens"
        if name == "plain":
            bar = PLAIN_BAR if point.batch == 1 else None
            text = f"bar {bar:.0%} of the limit" if bar else ""
        self._add(
            "specplug", name, point, own, text, limit=limit, bar=bar, ratio=ratio,
            parts=engine.parts, other=_other(engine.parts, own.ms), ready_s=engine.ready_s,
            drafting=engine.drafting, drafted=engine.drafted,
        )  # fmt: skip

    def add_peer(
        self, name: str, point: Point, own: StepTime, ours: StepTime, version: str
    ) -> None:
        """Add vLLM's, with its version."""
        text = f"ours is {ours.ms / own.ms:.3f} of it (bar 1)"
        self._add(
            "vllm", name, point, own, text, ratio=ours.ms / own.ms, bar=1.0,
            vllm=version,
        )  # fmt: skip

    def _add(
        self, engine: str, name: str, point: Point, own: StepTime, text: str, **more: Any
    ) -> None:
        limit = more.get("limit")
        share = f"{limit / own.ms:6.1%}" if limit else ""
        other = f"{more['other']:6.1%}" if "other" in more else ""
        self._lines.append(
            f"{engine:9}{name:16}{point.batch:6}{point.context:8}{own.ms:9.3f}{own.median:9.3f}"
            f"{share:>8}{other:>8}{own.accept_length:8.2f}  {text}"
        )
        print(self._lines[-1], flush=True)
        self._results.add(
            "step", engine=engine, variant=name, shape=self._shape, batch=point.batch,
            context=point.context, ms=own.ms, median=own.median, rounds=own.rounds,
            accept_length=own.accept_length, **more,
        )  # fmt: skip

    def print(self) -> None:
        """Print all rows together."""
        print(f"\n{self._shape}")
        print(f"{'engine':9}{'variant':16}{'batch':>6}{'context':>8}{'ms':>9}{'median':>9}", end="")
        print(f"{'limit':>8}{'other':>8}{'accept':>8}")
        print("\n".join(self._lines))


def _other(parts: dict[str, float], ms: float) -> float:
    """The share of a step of ``ms`` that is neither the target's pass nor the draft's work."""
    return 1 - sum(parts.get(name, 0.0) for name in ("propose", "target", "extend")) / ms


def open_peer(arguments: argparse.Namespace, base: Path, algorithm: str) -> Peer | None:
    """Start vLLM, if it is asked for."""
    if not arguments.peer:
        return None
    folder = arguments.output or Path(tempfile.gettempdir())
    peer = Peer(
        base,
        algorithm,
        python=arguments.peer_python,
        packages=arguments.peer_packages,
        log=folder / f"vllm_{algorithm}.log",
        share=arguments.peer_share,
        dummy=arguments.peer_dummy,
    )
    print(f"vLLM {peer.about['vllm']}, {algorithm}: ready in {peer.about['ready_s']} s", flush=True)
    return peer


def measure(arguments: argparse.Namespace, base: Path, table: Table) -> None:
    """Time all variants that are asked for."""
    settings, vocab_size = settings_of(arguments), SHAPES[base.name]["vocab_size"]
    slots = 4096 if arguments.tiny else SLOTS
    began, plain = time.monotonic(), None
    try:
        for name in arguments.variants:
            if time.monotonic() - began > arguments.seconds:
                print(f"{name}: left out, {arguments.seconds:.0f} s are over")
                continue
            peer = open_peer(arguments, base, PEERS[name]) if name in PEERS else None
            plain = plain or Engine(base, VARIANTS["plain"], slots, **settings)
            own = plain
            if name != "plain":
                own = Engine(base, VARIANTS[name], slots, **settings)
            print(f"{name}: ready in {own.ready_s:.1f} s", flush=True)
            engines: list[tuple[str, Generate]] = [("plain", plain.generate)]
            engines += [(name, own.generate)] if own is not plain else []
            engines += [("peer", peer.generate)] if peer else []
            for point in _points(arguments, name):
                found = time_steps(engines, point.prompts(vocab_size), rounds=arguments.rounds)
                table.add(own, name, point, found[name], found["plain"])
                if peer:
                    table.add_peer(name, point, found["peer"], found[name], peer.about["vllm"])
            if peer:
                peer.close()
            if own is not plain:
                own.close()
    finally:
        if plain:
            plain.close()
        table.print()


def _points(arguments: argparse.Namespace, name: str) -> list[Point]:
    if arguments.tiny:
        return TINY
    return PLAIN if name == "plain" else DRAFTED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--variants", nargs="+", default=WITH_BARS, choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no variant after that")
    parser.add_argument("--peer", action="store_true", help="vLLM beside plain and EAGLE-3's chain")
    parser.add_argument("--peer-python", default="python3", help="of an environment with vLLM")
    parser.add_argument("--peer-packages", type=Path, help="a folder for its PYTHONPATH")
    parser.add_argument("--peer-share", type=float, default=0.34, help="of the GPU's memory")
    parser.add_argument("--peer-dummy", action="store_true", help="vLLM draws its own weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        device = "cpu" if arguments.tiny else "cuda"
        shape = "llama-tiny" if arguments.tiny else arguments.shape
        start = time.perf_counter()
        models = arguments.models or Path(scratch)
        base = write_shape(models, shape, drafts_of(arguments.variants), device)
        print(f"{base}: there in {time.perf_counter() - start:.1f} s", flush=True)
        results = Results(arguments.output)
        rate = bandwidth(device)
        machine = add_run(results, arguments, bandwidth=rate, shape=shape)
        print(f"{machine['gpu'] or machine['cpu']}: reads {rate / 1e12:.3f} TB/s", flush=True)
        measure(arguments, base, Table(results, rate, shape))


if __name__ == "__main__":
    main()
