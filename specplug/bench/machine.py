"""Describe the machine that a benchmark runs on."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import importlib_metadata
import torch


def describe_machine(device: str) -> dict[str, Any]:
    """Return processor, cores, torch's threads, and the GPU if it is used."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    on_gpu = torch.device(device).type == "cuda"
    return {
        "cpu": _processor(),
        "cores": cores,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name(device) if on_gpu else None,
        "system": f"{platform.system()} {platform.machine()}",
    }


def versions(distributions: Iterable[str]) -> dict[str, str]:
    """Return Python's version and those of ``distributions`` that are installed."""
    found = {"python": platform.python_version()}
    for name in dict.fromkeys(distributions):
        try:
            found[name] = importlib_metadata.version(name)
        except importlib_metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.processor() or platform.machine()
