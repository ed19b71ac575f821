"""Several processes that train one network together, each on a GPU of its own.

They are started as PyTorch's own ``torchrun --nproc-per-node 4 target.py …`` starts them: by the
environment variables RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. A script that is
started alone is the only rank.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from datetime import timedelta

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn


@attrs.frozen
class Ranks:
    """This process among those that train together.

    Attributes:
        device: of this rank, such as ``cuda:1``.
    """

    rank: int
    size: int
    device: str

    def say(self, text: str) -> None:
        """Print a line, once for all ranks."""
        if self.rank == 0:
            print(text, flush=True)

    def agree(self, value: float) -> float:
        """Return the first rank's value. All ranks call it, and wait for it."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.broadcast(box, 0)
        return box.item()

    def mean(self, value: float) -> float:
        """Return the mean of all ranks' values, the same in each."""
        if self.size == 1:
            return value
        box = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(box)
        return self.agree(box.item() / self.size)

    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Put the mean of all ranks' gradients in the place of this rank's, in one collective."""
        if self.size == 1:
            return
        gradients = [p.grad for p in parameters if p.grad is not None]
        joint = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(joint)
        joint /= self.size
        parts = joint.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))

    def share(self, rows: Tensor) -> Tensor:
        """Return this rank's rows of those that all ranks have: every ``size``-th.

        Raises:
            ValueError: there are fewer rows than ranks.
        """
        if len(rows) < self.size:
            raise ValueError(
                f"a batch of {len(rows)} rows for {self.size} ranks; expected one each or more: "
                "raise --batch"
            )
        return rows[self.rank :: self.size]

    def leave(self) -> None:
        """Wait for the others, and end the group."""
        if self.size > 1:
            self.agree(0.0)
            dist.destroy_process_group()


def join(device: str) -> Ranks:
    """Join the ranks that the environment tells of, on this kind of device."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return Ranks(0, 1, device)
    rank = int(os.environ["RANK"])
    if device == "cuda":
        device = f"cuda:{os.environ['LOCAL_RANK']}"
        torch.cuda.set_device(device)
    backend = "gloo" if device == "cpu" else "nccl"
    dist.init_process_group(backend, timeout=timedelta(minutes=3))
    return Ranks(rank, size, device)
