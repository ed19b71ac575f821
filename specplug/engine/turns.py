"""Threads that share an engine take turns, each on the engine's device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from threading import Lock, get_ident

import torch


class Turns:
    """A lock that threads get in the order in which they ask, and may enter again while they have
    it.

    A plain lock goes to the quickest thread: one in a loop of steps would keep it for good.

    Args:
        device: becomes the current CUDA device of the thread whose turn it is, so that kernels,
            streams and graphs are launched there. None, or the CPU: that device stays as it is.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._on_device: AbstractContextManager[None] = nullcontext()
        self._next = Lock()  # its holder waits for the turn, the others for it
        self._turn = Lock()
        self._owner: int | None = None
        self._depth = 0

    @property
    def wanted(self) -> bool:
        """Whether a thread waits for the turn."""
        return self._next.locked()

    def __enter__(self) -> None:
        if self._owner == get_ident():
            self._depth += 1
            return
        with self._next:
            self._turn.acquire()
        # The turn is this thread's from here on: what the garbage collector closes may take it.
        self._owner, self._depth = get_ident(), 1
        try:
            self._on_device = self._make_current()
            self._on_device.__enter__()
        except BaseException:
            self._release()
            raise

    def __exit__(self, *exc: object) -> None:
        if self._depth > 1:
            self._depth -= 1
            return
        try:
            self._on_device.__exit__(None, None, None)
        finally:
            self._release()

    def _release(self) -> None:
        self._owner, self._depth = None, 0
        self._turn.release()

    def _make_current(self) -> AbstractContextManager[None]:
        is_gpu = self._device is not None and self._device.type == "cuda"
        return torch.cuda.device(self._device) if is_gpu else nullcontext()
