"""What choosing the tokens of a step costs: the kernels beside the torch operations.

    python benchmarks/gpu/sampling.py

For 1, 16 and 192 rows of 128,256 logits in bf16, and for greedy, sampled and truncated requests:
microseconds of both, the time that reading the logits once takes at the memory's bandwidth, and
whether all tokens are equal. Both are recorded in CUDA graphs, ten calls each, each call on logits
of its own, so that they come from memory as far as the cache is smaller. ``peaked`` logits are a
language model's (one token stands out), ``flat`` ones are nearly equal. Exits with 1 if a token
differs; where only top-p decides, one that differs is counted alone, since sums are rounded
otherwise.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from timing import bandwidth, replay_us
from torch import Tensor

CALLS = 10
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"temperature": 0.8},
    "sampled, penalties": {"temperature": 0.8, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "top-k 50": {"temperature": 0.8, "top_k": 50},
    "top-p 0.9": {"temperature": 0.8, "top_p": 0.9},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
}
SPREADS = {"peaked": 4.0, "flat": 0.05}


def microseconds(call: Callable[[int], Tensor], device: torch.device) -> float:
    """Time a call, which gets its number of ``CALLS``; the quickest of five rounds."""
    if device.type != "cuda":
        start = time.perf_counter()
        call(0)
        return (time.perf_counter() - start) * 1e6

    def run() -> None:
        for i in range(CALLS):
            call(i)

    return replay_us(run, CALLS, repeats=5)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 192])
    parser.add_argument("--vocab", type=int, default=128_256)
    parser.add_argument("--tiny", action="store_true", help="try it out without a GPU")
    options = parser.parse_args()
    if options.tiny:
        options.rows, options.vocab = [1, 3], 300
    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device("cuda" if on_gpu else "cpu")
    speed = bandwidth(device.type) / 1e6  # bytes a microsecond
    print(f"{torch.cuda.get_device_name() if on_gpu else 'no GPU'}, torch {torch.__version__}")
    print("| rows | requests | logits | read once | kernels | torch | tokens that differ |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    wrong = False
    for rows in options.rows:
        for spread, scale in SPREADS.items():
            generator = torch.Generator(device).manual_seed(rows)
            shape = CALLS if on_gpu else 1, rows, options.vocab
            logits = torch.randn(shape, generator=generator, device=device).mul_(scale).bfloat16()
            floor = logits[0].nbytes / speed
            for kind, settings in KINDS.items():
                fused, plain, differing = compare(logits, settings, device)
                print(
                    f"| {rows} | {kind} | {spread} | {floor:.1f} | {fused:.1f} | {plain:.1f} | "
                    f"{differing} of {logits.shape[0] * rows} |",
                    flush=True,
                )
                wrong |= differing > ("top_p" in settings)
    sys.exit(int(wrong))


def compare(
    logits: Tensor, settings: dict[str, Any], device: torch.device
) -> tuple[float, float, int]:
    """Return the microseconds of the kernels and of torch, and how many tokens differ.

    Args:
        logits: [calls, T, V].
    """
    from specplug import SamplingParams
    from specplug.kernels.kernel_table import kernels_used
    from specplug.model.sampler import Sampler
    from specplug.sampling_params import Needs

    calls, rows, vocab = logits.shape
    requests = torch.arange(rows, device=device) % 32 + 1
    positions = torch.arange(rows, device=device) + 100
    took, chosen = [], []
    for mode in ("triton", "torch"):
        sampler = Sampler(33, vocab, device)
        params = SamplingParams(**settings)
        for row in range(1, 33):
            sampler.admit(row, params, row, range(50), range(20, 90))
        random = sampler.is_random(requests) if params.needs & Needs.NOISE else None

        def call(
            i: int,
            sampler: Sampler = sampler,
            params: SamplingParams = params,
            random: Tensor | None = random,
        ) -> Tensor:
            return sampler.sample(logits[i], params.needs, random, requests, positions, None)

        with kernels_used(mode):
            took.append(microseconds(call, device))
            chosen.append(torch.stack([call(i) for i in range(calls)]))
    return took[0], took[1], int((chosen[0] != chosen[1]).sum())


if __name__ == "__main__":
    main()
