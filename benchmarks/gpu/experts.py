"""Microseconds of a mixture of experts beside torch's grouped products, on one GPU.

    python benchmarks/gpu/experts.py
    python benchmarks/gpu/experts.py --experts 8 --choices 2 --hidden 4096 --inner 14336 --rows 1 64

The default shape is Qwen3-30B-A3B's. For each number of rows: our kernels, each and together,
torch's ``grouped_mm`` as transformers calls it, and the bytes of the chosen experts' weights over
our time. Several mixtures with other choices are recorded in a CUDA graph, so that the weights come
from the memory. ``equal bits``: whether the first row has the bits that it has alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from timing import replay_us
from torch import Tensor

from specplug.kernels.experts import (
    SortedPairs,
    expert_gated_linear,
    expert_linear,
    sort_pairs,
    sum_choices,
)

DEVICE, DTYPE = "cuda", torch.bfloat16
CALLS, REPLAYS = 16, 10


class Mixture:
    """Experts with random weights, and the choices of R rows, another for each call."""

    def __init__(self, joint: Tensor, down: Tensor, rows: int, choices: int) -> None:
        self.joint, self.down = joint, down
        self.x = torch.randn(rows, joint.shape[2], device=DEVICE, dtype=DTYPE)
        scores = torch.rand(CALLS, rows, len(joint), device=DEVICE).topk(choices)
        self.experts, self.weights = scores.indices, scores.values.to(DTYPE)
        self.pairs: list[SortedPairs] = [sort_pairs(each, len(joint)) for each in self.experts]
        self.inner = self.gated(0)
        self.result = self.second(0)

    def sort(self, call: int) -> SortedPairs:
        return sort_pairs(self.experts[call], len(self.joint))

    def gated(self, call: int) -> Tensor:
        return expert_gated_linear(self.x, *self.joint.chunk(2, dim=1), self.pairs[call])

    def second(self, call: int) -> Tensor:
        return expert_linear(self.inner, self.down, None, self.pairs[call])

    def add(self, call: int) -> Tensor:
        return sum_choices(self.result, self.weights[call], self.experts[call], len(self.joint))

    def ours(self, call: int, rows: slice = slice(None)) -> Tensor:
        experts = self.experts[call][rows]
        pairs = sort_pairs(experts, len(self.joint))
        inner = expert_gated_linear(self.x[rows], *self.joint.chunk(2, dim=1), pairs)
        result = expert_linear(inner, self.down, None, pairs)
        return sum_choices(result, self.weights[call][rows], experts, len(self.joint))

    def torchs(self, call: int) -> Tensor:
        """As transformers' grouped_mm implementation."""
        experts, weights = self.experts[call], self.weights[call]
        sorted_experts, order = torch.sort(experts.flatten())
        counts = torch.histc(sorted_experts.int(), len(self.joint), 0, len(self.joint) - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        rows = self.x[order // experts.shape[1]]
        gate, up = F.grouped_mm(rows, self.joint.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        result = F.grouped_mm(F.silu(gate) * up, self.down.transpose(1, 2), offs=ends)
        result = result * weights.flatten()[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=DEVICE)
        return result[back].view(*experts.shape, -1).sum(1)

    @property
    def weight_bytes(self) -> float:
        """Of the experts that a call's rows choose, in the mean."""
        each = (self.joint[0].nbytes + self.down[0].nbytes) / CALLS
        return sum(each * len(experts.unique()) for experts in self.experts)


def microseconds(call: Callable[[int], object]) -> float:
    """Return the time of a call, the least of several replays of ``CALLS`` of them."""

    def run() -> None:
        for number in range(CALLS):
            call(number)

    return replay_us(run, CALLS, REPLAYS)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--choices", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--inner", type=int, default=768)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 16, 32, 64, 512, 4096])
    options = parser.parse_args()
    new = partial(torch.randn, device=DEVICE, dtype=DTYPE)
    joint = new(options.experts, 2 * options.inner, options.hidden).mul_(options.hidden**-0.5)
    down = new(options.experts, options.hidden, options.inner).mul_(options.inner**-0.5)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    names = "rows", "sort", "gated", "second", "sum", "ours", "torch", "GB/s", "equal bits"
    print("  ".join(f"{name:>8}" for name in names))
    for rows in options.rows:
        mixture = Mixture(joint, down, rows, options.choices)
        parts = mixture.sort, mixture.gated, mixture.second, mixture.add
        times = [microseconds(part) for part in (*parts, mixture.ours, mixture.torchs)]
        speed = mixture.weight_bytes / times[4] / 1e3
        equal = torch.equal(mixture.ours(0)[:1], mixture.ours(0, slice(0, 1)))
        figures = [
            f"{rows:8}",
            *(f"{each:8.1f}" for each in times),
            f"{speed:8.0f}",
            f"{equal!s:>8}",
        ]
        print("  ".join(figures), flush=True)


if __name__ == "__main__":
    main()
