"""The ranks of a data-parallel run: their common steps and their collectives."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, Protocol

import torch
from torch import Tensor

from specplug.config import RANKS, EngineConfig
from specplug.distributed.rank_channel import RankChannel
from specplug.errors import RankError, SpecplugError

_POLL = timedelta(seconds=0.5)
_ABORT_SECONDS = 5.0


class Notes(Protocol):
    """What ranks tell one another with the steps that they enter, beside what a pass needs."""

    def tell(self) -> str:
        """Return what this rank has to tell, one line; "": nothing. Called at each step."""

    def hear(self, notes: tuple[str, ...]) -> None:
        """Take what the ranks have told at a step, in their order: the same in each of them."""


class RankGroup:
    """One rank's side of the steps and collectives that all ranks enter together.

    A step has exactly one pass of the target, and all ranks take part in it. ``agree`` begins it
    and exchanges the number of rows of each rank. ``gather`` and ``scatter`` are the collectives
    of the pass.

    On the CPU the host waits for each collective (gloo), so it learns at once that a rank has
    failed. On GPUs the device waits (NCCL), and the listening thread aborts the collective.

    Args:
        rank, size: of this process, and how many there are.
        address: host:port at which rank 0 listens.
        device: where the target is.
        facts: what must be the same in all ranks, by name.
        timeout: seconds of silence after which a rank is taken for dead.

    Attributes:
        notes: what is told beside the steps; None: nothing. All ranks have some, or none has.

    Raises:
        UsageError: the address cannot be used, or the ranks differ in their facts.
        RankError: not all ranks came in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        facts: Mapping[str, Any],
        *,
        timeout: float,
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.notes: Notes | None = None
        self.channel = RankChannel(rank, size, address, facts, timeout=timeout)
        self._rows: tuple[int, ...] = (1,) * size
        self._resting = threading.Event()
        self._resting.set()
        self._on_cpu = device.type == "cpu"
        # A collective of gloo cannot be cancelled, and the process cannot end before it does.
        limit = timedelta(seconds=timeout + 5.0)
        self._process_group: Any = None
        self.channel.on_failure(self._abort_collectives)
        try:
            self._process_group = self._gloo(limit) if self._on_cpu else self._nccl()
            self.sum(torch.zeros(1, device=device))  # waits for all ranks
        except BaseException as error:
            cause = self.end(error)
            self.channel.close()
            raise cause from error

    def _gloo(self, limit: timedelta) -> Any:
        from torch.distributed import ProcessGroupGloo

        return ProcessGroupGloo(self.channel.store, self.rank, self.size, limit)

    def _nccl(self) -> Any:
        from torch.distributed import ProcessGroupNCCL

        # torch would end the process when a peer is lost; our channel names that peer instead.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")
        # Else NCCL's ranks exchange buffers while they record, and a rank that fails to record
        # would leave the others waiting.
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        with torch.cuda.device(self.device):
            return ProcessGroupNCCL(
                self.channel.store, self.rank, self.size, ProcessGroupNCCL.Options()
            )

    # Steps

    @property
    def called(self) -> bool:
        """Whether another rank has begun a step and waits for this one."""
        return self.channel.called

    def agree(self, rows: int, wish: str = "") -> tuple[str, ...]:
        """Begin a step with ``rows`` rows, 1 or more. Waits for all ranks.

        Args:
            wish: how its pass is to be run.

        Returns:
            The wishes of all ranks, from which each must draw the same conclusion.
        """
        notes = self.notes
        self._rows = self.channel.agree(rows, wish, "" if notes is None else notes.tell())
        if notes is not None and any(self.channel.notes):
            notes.hear(self.channel.notes)
        return self.channel.wishes

    def pad(self, rows: int) -> None:
        """Have the pass of this step so many rows in each rank, as all have agreed."""
        self._rows = (rows,) * self.size

    def rest(self, seconds: float) -> None:
        """Wait until another rank begins a step, at most ``seconds``."""
        self.channel.rest(seconds)

    @property
    def own(self) -> slice:
        """This rank's rows among the gathered ones."""
        start = self.rank * max(self._rows)
        return slice(start, start + self._rows[self.rank])

    def gather(self, hidden: Tensor) -> Tensor:
        """Gather [R, H] of each rank to [ranks * P, H], padded with zeros; P is the greatest R."""
        most = max(self._rows)
        if len(hidden) < most:
            padded = hidden.new_zeros(most, hidden.shape[1])
            padded[: len(hidden)] = hidden
            hidden = padded
        out = hidden.new_empty(self.size * most, hidden.shape[1])
        rows = hidden.contiguous()
        self._wait(lambda: self._process_group._allgather_base(out, rows))
        return out

    def scatter(self, partial: Tensor) -> Tensor:
        """Sum [ranks * P, H] over the ranks and return this rank's [R, H] of it.

        The sums are taken here, in the order of the ranks, in float32 or better, and rounded once.
        A reduction of NCCL or gloo begins at another rank for other places in the tensor, and
        chooses how to reduce by its size: a row's bits would depend on the other rows.
        """
        whole = partial.contiguous()
        parts = torch.empty_like(whole)
        self._wait(lambda: self._process_group.alltoall_base(parts, whole, [], []))
        own = parts.view(self.size, -1, parts.shape[1])[:, : self._rows[self.rank]].unbind()
        total = own[0].float() if partial.dtype.itemsize < 4 else own[0]
        for other in own[1:]:
            total += other
        return total.to(partial.dtype)

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all ranks. It may be on any device; all have the same shape."""
        total = tensor.to(self.device, copy=True)
        with self.stepping():
            self._wait(lambda: self._process_group.allreduce([total]))
            return total.to(tensor.device)

    def _wait(self, begin: Callable[[], Any]) -> None:
        """Begin a collective and wait for it; on the CPU, until a rank fails.

        Raises:
            RankError: a rank has failed.
            RuntimeError: it cannot be recorded.
        """
        is_recorded = not self._on_cpu and torch.cuda.is_current_stream_capturing()
        self.check()  # what is begun after a failure would wait until NCCL has ended its abort
        try:
            work = begin()
            while not self._arrived(work):
                self.channel.check()
        except RuntimeError as error:
            if is_recorded:
                raise
            self.channel.wait_for_failure()
            self.channel.fail(self.rank, f"failed: in a collective: {error}")  # if none is known
            raise RankError(str(self.channel.failure)) from error

    def _arrived(self, work: Any) -> bool:
        if not self._on_cpu:
            return bool(work.wait())  # the device waits
        try:
            return bool(work.wait(_POLL))
        except RuntimeError:
            if work.is_completed():
                raise
            return False

    # The end

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Enclose everything that may wait for a collective."""
        self._resting.clear()
        try:
            yield
        finally:
            self._resting.set()

    def finish(self, step: Callable[[], None]) -> None:
        """Take part in the other ranks' steps until all have called this as often as this one.

        Args:
            step: runs a step without work of this rank.

        Raises:
            RankError: a rank has failed.
        """
        for _ in ("nothing to launch", "nothing on the device"):
            self.channel.say_done()
            while not self.channel.all_done:
                step()
            self.settle()

    def settle(self) -> None:
        """Wait until the device has done all that was launched, passes of idle steps included.

        Raises:
            RankError: a rank has failed.
        """
        if not self._on_cpu:
            with self.stepping():
                torch.cuda.synchronize(self.device)
        self.check()

    def check(self) -> None:
        """Raise ``RankError`` if a rank has failed."""
        self.channel.check()

    def end(self, error: BaseException) -> BaseException:
        """Tell all ranks that this one has failed, and return what to raise.

        If another rank was the cause, that is a ``RankError`` that names it.

        Args:
            error: what a step has raised.
        """
        caused = self.channel.failure
        if not isinstance(error, RankError):
            self.channel.fail(self.rank, f"failed: {type(error).__name__}: {error}")
        if caused is None or isinstance(error, SpecplugError):
            return error
        return RankError(str(caused))

    def fail(self, error: BaseException) -> BaseException:
        """Leave, since this rank cannot be made. Returns what to raise, as ``end`` does."""
        cause = self.end(error)
        self.close()
        return cause

    def close(self) -> None:
        """Leave the group and tell the others."""
        with suppress(RankError, RuntimeError):
            if self.channel.failure is None:
                self.settle()  # the others wait for this rank's part of the last pass
        self.channel.close()
        if not self._on_cpu:
            self._abort()
        self._process_group = None

    def _abort(self) -> None:
        group = self._process_group
        with suppress(RuntimeError):
            if group is not None:
                group.abort()

    def _abort_collectives(self) -> None:
        """Abort the device's collectives after a failure; end the process if that does not help."""
        if self._on_cpu:
            return  # ``_wait`` polls there
        # NCCL goes on aborting until the graphs that hold its collectives have been freed.
        threading.Thread(target=self._abort, name="abort of collectives", daemon=True).start()
        if not self._resting.wait(_ABORT_SECONDS):
            print(f"specplug: {self.channel.failure}", file=sys.stderr, flush=True)
            os._exit(1)


def join_ranks(
    config: EngineConfig, device: torch.device, target_config: Mapping[str, Any]
) -> RankGroup | None:
    """Join the rank group that a run's settings name; None for a run with one rank.

    Args:
        target_config: of the model, which all ranks must have.

    Raises:
        UsageError: the ranks differ.
        RankError: not all ranks came in time.
    """
    if config.dp_size == 1:
        return None
    assert config.dp_address is not None, "EngineConfig has checked it"
    facts = {name: value for name, value in target_config.items() if not name.startswith("_")}
    facts |= {**config.agreed(RANKS), "device": device.type}
    return RankGroup(
        config.dp_rank,
        config.dp_size,
        config.dp_address,
        device,
        facts,
        timeout=config.dp_timeout,
    )
