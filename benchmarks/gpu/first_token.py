"""Milliseconds to the first token of one new prompt, beside vLLM's, batch-invariant and not.

    python benchmarks/gpu/first_token.py --models FOLDER --output DIR \
        --peer --peer-packages SITE --set 'warm_up="off"'

Plain decoding of ours and two processes of vLLM, of which one has ``VLLM_BATCH_INVARIANT=1``, are
on one card with the same weights. They take turns on prompts that no cache holds, a new one in each
round. Each computes a prompt in one pass: no engine's chunks are shorter than the longest prompt.
vLLM runs eagerly, without ``torch.compile`` and CUDA graphs. A time is that of ``generate`` with
one token; vLLM's has the way to its engine's process and back.

``--set chunked_prefill_size=512`` gives ours as it comes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engines import VARIANTS, Engine, add_arguments, add_run, settings_of
from peer_vllm import Peer
from points import Generate, Results
from shapes import SHAPES, kv_bytes, write_shape

PROMPTS = (1024, 2048, 4096, 8192, 16384, 32768)
TINY_PROMPTS = (32, 64)
ROOM = 64
"""Tokens that an engine holds beyond the longest prompt."""
PEERS: Mapping[str, bool] = {"vllm": False, "vllm-invariant": True}
"""vLLM's processes by name: if its results depend on no batch."""
PEER_SHARE = 0.1
"""Of the memory, which vLLM asks for when it starts; the size of its cache is told apart."""


def time_first_tokens(
    engines: Sequence[tuple[str, Generate]],
    tokens: int,
    rounds: int,
    vocab_size: int,
    *,
    between: Callable[[], object] = lambda: None,
) -> dict[str, list[float]]:
    """Time prompts of so many tokens, which the engines take by turns.

    The first round compiles what is compiled for this length, and is left out.

    Args:
        engines: by name.
        tokens: of each prompt. No two rounds have prompts that begin alike.
        rounds: that are timed.
        vocab_size: of the model.
        between: is called before each round, to empty caches.

    Returns:
        Milliseconds of each round, by engine.
    """
    found: dict[str, list[float]] = {name: [] for name, _ in engines}
    for number in range(rounds + 1):
        rng = random.Random(f"{tokens} {number}")
        prompt = [rng.randrange(10, vocab_size - 10) for _ in range(tokens)]
        between()
        for name, generate in engines:
            seconds, _, _ = generate([prompt], 1)
            if number:
                found[name].append(seconds * 1e3)
    return found


def start_peers(arguments: argparse.Namespace, base: Path, longest: int) -> dict[str, Peer]:
    """Start vLLM with and without batch invariance, at once. One that fails is left out."""
    folder: Path = arguments.output or Path(tempfile.gettempdir())
    folder.mkdir(parents=True, exist_ok=True)
    length = longest + ROOM
    settings = {
        "max_model_len": length,
        "max_num_batched_tokens": length,
        "max_num_seqs": 4,
        "enforce_eager": True,
        # Memory that is told depends on no other process's, so all may start at once.
        "kv_cache_memory_bytes": (length + ROOM) * kv_bytes(SHAPES[base.name]),
    }

    def start(name: str) -> Peer | None:
        try:
            return Peer(
                base,
                "none",
                python=arguments.peer_python,
                packages=arguments.peer_packages,
                log=folder / f"{name}.log",
                share=PEER_SHARE,
                dummy=arguments.peer_dummy,
                batch_invariant=PEERS[name],
                settings=settings,
            )
        except RuntimeError as error:
            print(f"{name}: left out, {error}", flush=True)
            return None

    with ThreadPoolExecutor(len(PEERS)) as pool:
        started = zip(PEERS, pool.map(start, PEERS), strict=True)
        return {name: peer for name, peer in started if peer is not None}


def measure(arguments: argparse.Namespace, base: Path, results: Results) -> None:
    """Time all lengths, and print a line for each."""
    lengths = TINY_PROMPTS if arguments.tiny else arguments.prompts
    longest, shape = max(lengths), SHAPES[base.name]
    given: dict[str, Any] = {"chunked_prefill_size": None, **settings_of(arguments)}
    start = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(start_peers, arguments, base, longest) if arguments.peer else None
        own = Engine(base, VARIANTS["plain"], longest + 16 * ROOM, **given)
        print(f"specplug: ready in {own.ready_s:.1f} s", flush=True)
        peers = starting.result() if starting else {}
    try:
        for name, peer in peers.items():
            print(f"{name} {peer.about['vllm']}: ready in {peer.about['ready_s']} s", flush=True)
        print(f"all ready in {time.perf_counter() - start:.1f} s", flush=True)
        engines: list[tuple[str, Generate]] = [("specplug", own.generate)]
        engines += [(name, peer.generate) for name, peer in peers.items()]
        print(f"{base.name}: milliseconds to the first token, medians of {arguments.rounds}")
        print(f"{'tokens':>8}" + "".join(f"{name:>16}" for name, _ in engines), flush=True)
        for tokens in lengths:
            found = time_first_tokens(
                engines, tokens, arguments.rounds, shape["vocab_size"], between=own.llm.flush_cache
            )
            medians = {name: statistics.median(times) for name, times in found.items()}
            ratios = "".join(
                f"  ours / {name} {medians['specplug'] / medians[name]:.3f}" for name in peers
            )
            print(f"{tokens:8,}" + "".join(f"{ms:16.2f}" for ms in medians.values()) + ratios)
            for name, times in found.items():
                ours = name == "specplug"
                results.add(
                    "first_token", engine=name, shape=base.name, tokens=tokens,
                    median=medians[name], rounds=times,
                    chunk=given["chunked_prefill_size"] if ours else longest + ROOM,
                    eager=not ours, vllm=None if ours else peers[name].about["vllm"],
                )  # fmt: skip
    finally:
        for peer in peers.values():
            peer.close()
        own.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_arguments(parser)
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--prompts", nargs="+", type=int, default=PROMPTS, metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", action="store_true", help="vLLM beside it, as two processes")
    parser.add_argument("--peer-python", default="python3", help="of an environment with vLLM")
    parser.add_argument("--peer-packages", type=Path, help="a folder for its PYTHONPATH")
    parser.add_argument("--peer-dummy", action="store_true", help="vLLM draws its own weights")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        device = "cpu" if arguments.tiny else "cuda"
        shape = "llama-tiny" if arguments.tiny else arguments.shape
        start = time.perf_counter()
        base = write_shape(arguments.models or Path(scratch), shape, (), device)
        print(f"{base}: there in {time.perf_counter() - start:.1f} s", flush=True)
        results = Results(arguments.output)
        add_run(results, arguments, shape=shape)
        measure(arguments, base, results)


if __name__ == "__main__":
    main()
