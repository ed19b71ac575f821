"""The settings of each rank, where a server runs several engines."""

from __future__ import annotations

import socket
from typing import Any

import attrs

from specplug.bounds import check_integer
from specplug.config import EngineConfig
from specplug.errors import UsageError, shown
from specplug.settings import MAX_PORT


def settings_of_ranks(
    config: EngineConfig, size: int, *, enable_dp_attention: bool, num_gpus: int
) -> list[EngineConfig]:
    """The settings of each of ``size`` ranks.

    Each rank has a GPU of its own, if there are any, and a decode instance's ranks wait for prefill
    instances at ports that follow one another. With data-parallel attention the ranks find each
    other at a free port of this machine.

    Args:
        config: what all have in common.
        size: engines, each a process.
        enable_dp_attention: whether they share the model's MLPs.
        num_gpus: CUDA devices of this machine.

    Raises:
        UsageError: there are more ranks than this machine has room for or than it has GPUs, a port
            is not among those there are, or a single rank is to share.
    """
    check_integer("num_engines", size, told="dp_size")
    if size == 1:
        if enable_dp_attention:
            raise UsageError(
                "dp_size=1 with enable_dp_attention: there is no other rank to share the MLPs "
                "with; expected a dp_size of 2 or more (--dp-size)"
            )
        return [config]
    together: dict[str, Any] = {}
    if enable_dp_attention:
        address = f"127.0.0.1:{_free_port()}"
        together = {"dp_size": size, "dp_address": address, "enable_dp_attention": True}
    return [
        attrs.evolve(
            config,
            **together,
            dp_rank=rank if enable_dp_attention else 0,
            disaggregation_address=_address(config, rank),
            device=_device(config.device, rank, size, num_gpus),
        )
        for rank in range(size)
    ]


def _device(device: str | None, rank: int, size: int, num_gpus: int) -> str | None:
    if device not in (None, "cuda") or not num_gpus:
        return device
    if size > num_gpus:
        raise UsageError(
            f"dp_size={size}: this machine has {num_gpus} GPUs; expected no more ranks than these, "
            "or --device cpu"
        )
    return f"cuda:{rank}"


def _address(config: EngineConfig, rank: int) -> str | None:
    """A decode rank's own address."""
    if config.disaggregation != "decode":
        return config.disaggregation_address
    from specplug.disagg.instances import DEFAULT_ADDRESS

    address = config.disaggregation_address or DEFAULT_ADDRESS
    host, _, port = address.rpartition(":")
    first = int(port) if port.isdigit() else 0
    if not 0 < first <= MAX_PORT - rank:
        raise UsageError(
            f"disaggregation_address={shown(address)}: expected tcp://HOST:PORT; with several "
            "ranks each takes the next port"
        )
    return f"{host}:{first + rank}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
