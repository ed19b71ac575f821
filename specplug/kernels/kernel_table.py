"""Which implementation computes what: Triton, C or torch, by operation, device, dtype and threads.

Every call site asks here, and nothing else decides it. ``SPECPLUG_KERNELS`` switches the table as a
whole; ``specplug doctor`` and ``-v`` print it. Imports no Triton: a machine without a GPU needs
none.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from enum import StrEnum
from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specplug.errors import UsageError
from specplug.kernels.card import card_of

if TYPE_CHECKING:
    from specplug.kernels.cpu_kernels import CPUKernels
    from specplug.kernels.paged_attention_kernels import PagedAttention

VARIABLE = "SPECPLUG_KERNELS"
"""The environment variable that switches the table as a whole. It is read once a process."""

MODES = "torch", "triton", "auto"
"""Its values. ``auto``: what is fastest on the device. ``torch``: no kernel at all. ``triton``:
Triton's wherever there is one, on a CPU through its interpreter; torch for the rest."""

HALF = torch.bfloat16, torch.float16
"""The dtypes of the kernels of passes."""

MOST_NODES = 64
"""Nodes of a request that the kernels of ``kernels.tree`` take: a bit each of an int64."""

_DTYPES = torch.float32, torch.float64, *HALF
_SINGLE = *HALF, torch.float32
_LEAST_CAPABILITY = 8, 0
_CPU = torch.device("cpu")


class Implementation(StrEnum):
    """The implementation of an operation."""

    TRITON = "triton"
    C = "C"
    TORCH = "torch"


class Operation(StrEnum):
    """An operation that a kernel computes on some devices, and torch on the others."""

    ATTENTION = "attention"
    LAYERS = "layers"
    ROTARY_ROWS = "rotary rows"
    CAPTURED_ROWS = "captured rows"
    SAMPLING = "sampling"
    NOISE = "noise"
    GREATEST = "greatest"
    TREES = "trees"
    SCORES = "scores"
    TABLE_PAGES = "table pages"
    PUBLISH = "publish"
    STATE_ROWS = "state rows"
    HOST_WRITE = "host write"
    PLUGINS_C = "plugins' C"
    PLUGINS_TRITON = "plugins' Triton"


@attrs.frozen
class Kernels:
    """The kernels of an operation: a row of the table.

    Attributes:
        triton: dtypes of its Triton kernel; None: any dtype; (): it has no Triton kernel.
        c: dtypes of its kernel in C, on a CPU with one thread; None: code of plugins, for any dtype
            and device; (): it has no kernel in C.
        torch_for: what the kernel in C leaves to torch, call by call.
        multiplies: whether the Triton kernel needs tensor cores, those of compute capability 8.0.
        gpu_only: whether a CPU has no use for the operation.
    """

    triton: tuple[torch.dtype, ...] | None = None
    c: tuple[torch.dtype, ...] | None = ()
    torch_for: str = ""
    multiplies: bool = False
    gpu_only: bool = False


TABLE = {
    Operation.ATTENTION: Kernels(
        triton=HALF,
        c=(torch.float32,),
        torch_for="softcaps, sinks, windows over trees, head sizes that 16 does not divide",
        multiplies=True,
    ),
    Operation.LAYERS: Kernels(triton=HALF, c=(torch.float32,), multiplies=True),
    Operation.ROTARY_ROWS: Kernels(),
    Operation.CAPTURED_ROWS: Kernels(),
    Operation.SAMPLING: Kernels(triton=_SINGLE),
    Operation.NOISE: Kernels(),
    Operation.GREATEST: Kernels(triton=_SINGLE, c=(torch.float32,)),
    Operation.TREES: Kernels(),
    Operation.SCORES: Kernels(
        triton=(torch.float32,),
        c=(torch.float32,),
        torch_for=f"drafts of more than {MOST_NODES} nodes",
    ),
    Operation.TABLE_PAGES: Kernels(),
    Operation.PUBLISH: Kernels(),
    Operation.STATE_ROWS: Kernels(),
    Operation.HOST_WRITE: Kernels(gpu_only=True),
    Operation.PLUGINS_C: Kernels(triton=(), c=None),
    Operation.PLUGINS_TRITON: Kernels(),
}
"""The kernels of each operation. Where none fits, torch computes."""

assert TABLE.keys() == set(Operation), "an Operation has no row of TABLE"


@attrs.frozen
class Choice:
    """The implementation of an operation on a device in a dtype, and the reason."""

    implementation: Implementation
    why: str


def choose(
    operation: Operation,
    device: torch.device = _CPU,
    dtype: torch.dtype | None = None,
    threads: int | None = None,
) -> Choice:
    """Return what computes an operation. It compiles the CPU's kernels, if they may be chosen.

    Args:
        device: of its tensors.
        dtype: of its tensors; None where it does not matter.
        threads: torch's on the CPU; None: as many as it has.

    Raises:
        UsageError: ``SPECPLUG_KERNELS`` has no value of ``MODES``.
    """
    kernels, reasons = TABLE[operation], []
    if kernels_mode() == "torch":
        return Choice(Implementation.TORCH, f"{VARIABLE}=torch")
    if kernels.triton != ():
        missing = _missing_for(kernels, device, dtype)
        if missing is None:
            return Choice(Implementation.TRITON, _why_triton(device))
        reasons.append(missing)
    if kernels.c is None or (kernels.c and device.type == "cpu"):
        missing = _missing_in_c(kernels, device, dtype, threads)
        if missing is None:
            return Choice(Implementation.C, _why_c(kernels))
        reasons.append(missing)
    return Choice(Implementation.TORCH, "; ".join(reasons))


@cache
def runs_triton(
    operation: Operation, device: torch.device, dtype: torch.dtype | None = None
) -> bool:
    """Return whether a Triton kernel computes an operation, as ``choose`` says."""
    kernels = TABLE[operation]
    is_left_out = kernels.triton == () or kernels_mode() == "torch"
    return not is_left_out and _missing_for(kernels, device, dtype) is None


def runs_tree_kernels(nodes: Tensor) -> bool:
    """Return whether ``kernels.tree`` serves drafts [bs, N] on this device."""
    bs, width = nodes.shape
    return runs_triton(Operation.TREES, nodes.device) and bs > 0 and width <= MOST_NODES


def attention_kernels(device: torch.device, dtype: torch.dtype) -> PagedAttention | None:
    """Return Triton's attention over pages; None: torch or C attends. Runs call it first.

    Raises:
        UsageError: ``SPECPLUG_KERNELS=triton``, and Triton's kernels cannot run on this device.
    """
    if kernels_mode() == "triton":
        for operation, kernels in TABLE.items():
            missing = _missing_on(kernels, device) if _has(kernels.triton, dtype) else None
            if missing is not None:
                raise UsageError(
                    f"{VARIABLE}=triton on {device}: {operation} has no kernel, as {missing}; "
                    f"expected what Triton needs: fix that, or unset {VARIABLE}"
                )
    if not runs_triton(Operation.ATTENTION, device, dtype):
        return None
    from specplug.kernels.paged_attention_kernels import PagedAttention

    return PagedAttention(device)


def why_not_in_c(operation: Operation, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the CPU's kernels do not compute an operation; None: they do."""
    return _missing_in_c(TABLE[operation], device, dtype)


def kernels_in_c(
    operation: Operation, device: torch.device, dtype: torch.dtype
) -> CPUKernels | None:
    """Return the CPU's kernels if they compute an operation; None: Triton or torch does."""
    if why_not_in_c(operation, device, dtype) is not None:
        return None
    from specplug.kernels.cpu_kernels import load_cpu_kernels

    found = load_cpu_kernels()
    return None if isinstance(found, str) else found


_c_declined: ContextVar[bool] = ContextVar("c_declined", default=False)


@contextmanager
def c_declined(declined: bool) -> Iterator[None]:
    """Have the table choose no C meanwhile in this thread, if that is ``declined``: for a run with
    ``disable_cpu_kernels``."""
    before = _c_declined.set(declined)
    try:
        yield
    finally:
        _c_declined.reset(before)


def compiles_triton(device: torch.device) -> bool:
    """Return whether Triton compiles kernels for a device before their first launch."""
    return device.type == "cuda" and runs_triton(Operation.PUBLISH, device)


_used: str | None = None


def kernels_mode() -> str:
    """Return the value of ``SPECPLUG_KERNELS``, or what ``kernels_used`` has put in its place.

    Raises:
        UsageError: it is none of ``MODES``.
    """
    return _mode_of_environment() if _used is None else _used


@contextmanager
def kernels_used(mode: str) -> Iterator[None]:
    """Switch the table of the whole process within the block, as ``SPECPLUG_KERNELS`` would: for
    tests and measurements. Objects that were made before keep their kernels."""
    global _used
    before, _used = _used, _checked(mode)
    _forget()
    try:
        yield
    finally:
        _used = before
        _forget()


def _forget() -> None:
    for function in (runs_triton, _mode_of_environment):
        function.cache_clear()


@cache
def _mode_of_environment() -> str:
    return _checked(os.environ.get(VARIABLE) or "auto")


def _checked(mode: str) -> str:
    if mode not in MODES:
        raise UsageError(
            f"{VARIABLE}={mode!r}; expected one of {', '.join(MODES)}: set it to one of these, or "
            "unset it for auto"
        )
    return mode


def _has(dtypes: tuple[torch.dtype, ...] | None, dtype: torch.dtype | None) -> bool:
    return dtypes is None or dtype in dtypes


def _missing_for(kernels: Kernels, device: torch.device, dtype: torch.dtype | None) -> str | None:
    """Return why no Triton kernel computes a dtype on a device; None: one does."""
    if kernels.triton is not None and dtype not in kernels.triton:
        return f"Triton's is for {_named(kernels.triton)}"
    if device.type == "cpu" and kernels.gpu_only:
        return "there is nothing to copy"
    missing = _missing_on(kernels, device)
    if missing is None and device.type == "cpu" and kernels.multiplies and dtype is torch.bfloat16:
        return "Triton's interpreter has no products of bfloat16"
    return missing


def _missing_on(kernels: Kernels, device: torch.device) -> str | None:
    """Return why no Triton kernel of a row of the table runs on a device; None: it does."""
    if device.type not in ("cuda", "cpu") or (device.type == "cpu" and kernels_mode() == "auto"):
        return "Triton's runs on a GPU"
    if not _has_triton():
        return "Triton is not installed"
    if device.type == "cpu":
        # Triton reads it when a module with kernels is imported.
        is_on = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")
        return None if is_on else "TRITON_INTERPRET=1 is not set, and it runs kernels on a CPU"
    card = card_of(device)
    if kernels.multiplies and card.is_nvidia and card.capability < _LEAST_CAPABILITY:
        found, least = (".".join(map(str, each)) for each in (card.capability, _LEAST_CAPABILITY))
        return f"this card has compute capability {found}, the kernels need {least}"
    return None


def _missing_in_c(
    kernels: Kernels,
    device: torch.device,
    dtype: torch.dtype | None,
    threads: int | None = None,
) -> str | None:
    """Return why no kernel in C computes a dtype on a device; None: one does."""
    if kernels_mode() != "auto":
        return f"{VARIABLE}={kernels_mode()} takes none in C"
    if _c_declined.get():
        return "disable_cpu_kernels"
    if kernels.c is None:
        return None
    if device.type != "cpu":
        return "C's is for the CPU"
    if dtype not in kernels.c:
        return f"C's is for {_named(kernels.c)}"
    threads = threads or torch.get_num_threads()
    if threads > 1:
        return f"C's is for one thread, and torch has {threads}"
    from specplug.kernels.cpu_kernels import load_cpu_kernels

    found = load_cpu_kernels()
    return found if isinstance(found, str) else None


def _why_c(kernels: Kernels) -> str:
    if kernels.c is None:
        return "on the CPU, where there is a C compiler"
    return "on one thread" + (f"; torch for {kernels.torch_for}" if kernels.torch_for else "")


def _why_triton(device: torch.device) -> str:
    return f"{VARIABLE}=triton, interpreted" if device.type == "cpu" else "on a GPU"


def _named(dtypes: Sequence[torch.dtype] | None) -> str:
    *others, last = (_name(dtype) for dtype in dtypes or ())
    return f"{', '.join(others)} and {last}" if others else last


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def table_rows(device: torch.device) -> list[tuple[str, str, str, str]]:
    """Return the table for a device, each row with its operations, dtypes, implementation, why.

    On a CPU it tells one thread, which a small model has, from as many as torch has by itself.
    """
    found: dict[tuple[str, Choice], list[str]] = {}
    counts = sorted({1, torch.get_num_threads()}) if device.type == "cpu" else [None]
    for operation, kernels in TABLE.items():
        by_choice: dict[Choice, list[str]] = {}
        for dtype in _DTYPES if kernels.triton or kernels.c else (None,):
            choices = {choose(operation, device, dtype, count): count for count in counts}
            for choice, count in choices.items():
                told = "any" if dtype is None else _name(dtype)
                told += f" (threads: {count})" if len(choices) > 1 else ""
                by_choice.setdefault(choice, []).append(told)
        for choice, dtypes in by_choice.items():
            found.setdefault((", ".join(dtypes), choice), []).append(operation)
    return [
        (", ".join(operations), dtypes, choice.implementation, choice.why)
        for (dtypes, choice), operations in found.items()
    ]


def table_lines(device: torch.device, dtype: torch.dtype) -> Iterator[str]:
    """Yield a line for a log for each implementation and reason, of a device and a dtype."""
    by_choice: dict[Choice, list[str]] = {}
    for operation in TABLE:
        by_choice.setdefault(choose(operation, device, dtype), []).append(operation)
    for choice, told in by_choice.items():
        yield f"{choice.implementation} for {', '.join(told)}: {choice.why}"


def main() -> None:
    """Print the table of this machine's device as JSON: for ``specplug doctor``, whose own process
    imports no torch."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {"mode": kernels_mode(), "device": str(device), "table": table_rows(device)}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
