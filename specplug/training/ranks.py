"""The processes that train one network together, as ``torchrun`` starts them.

``torchrun --nproc-per-node 4 -m specplug train …`` sets RANK, LOCAL_RANK, WORLD_SIZE, MASTER_ADDR
and MASTER_PORT. A process that is started alone is the only rank.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch import Tensor, nn

from specplug.model.loading import choose_device


@attrs.frozen
class Ranks:
    """This process among those that train together.

    Attributes:
        rank, size: its number, and of how many.
        device: its own.
    """

    rank: int
    size: int
    device: torch.device

    @classmethod
    def join(cls, device: str | None) -> Ranks:
        """Join the processes that the environment tells of, on this kind of device."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        if size == 1:
            return cls(0, 1, choose_device(device))
        if device is None or device == "cuda":
            device = f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu"
        chosen = choose_device(device)
        if chosen.type == "cuda":
            torch.cuda.set_device(chosen)
        backend = "gloo" if chosen.type == "cpu" else "nccl"
        own = chosen if chosen.type == "cuda" else None
        dist.init_process_group(backend, timeout=timedelta(minutes=60), device_id=own)
        return cls(int(os.environ["RANK"]), size, chosen)

    @property
    def is_first(self) -> bool:
        """Whether this process writes and tells what all have done."""
        return self.rank == 0

    @property
    def is_on_cpu(self) -> bool:
        """Whether the ranks train on processors."""
        return self.device.type == "cpu"

    def share(self, indices: Tensor) -> Tensor:
        """Return this rank's of what all ranks have: every ``size``-th."""
        return indices[self.rank :: self.size]

    def mean_total(self, count: Tensor) -> Tensor:
        """Return the mean over the ranks of a scalar without gradient."""
        if self.size == 1:
            return count
        total = count.detach().clone()
        dist.all_reduce(total)
        return total / self.size

    def agree(self, value: Any) -> Any:
        """Return the first rank's value, a plain one."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, 0, device=self.device)
        return box[0]

    def wait(self) -> None:
        """Wait for the others."""
        if self.size > 1:
            dist.barrier()

    def shard(self, module: nn.Module) -> None:
        """Shard the parameters of a module, their gradients and what the optimizer keeps of them
        over the ranks: torch's FSDP2. They are whole while the module runs."""
        if self.size == 1:
            return
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(module, mesh=init_device_mesh(self.device.type, (self.size,)))

    def leave(self) -> None:
        """Wait for the others, and end the group."""
        if self.size > 1:
            self.wait()
            dist.destroy_process_group()


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor of all ranks, on the CPU. All ranks call it."""
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().to("cpu", copy=True).contiguous()


def put(tensor: Tensor, value: Tensor) -> None:
    """Write a whole value to a tensor that may be sharded. All ranks call it."""
    value = value.to(tensor.device, tensor.dtype)
    if hasattr(tensor, "full_tensor"):
        from torch.distributed.tensor import distribute_tensor

        sharded: Any = tensor
        value = distribute_tensor(value, sharded.device_mesh, sharded.placements)
    with torch.no_grad():
        tensor.copy_(value)
