"""Finds where a plugin reads device data on the host, on the CPU too.

There every tensor is on the host, and a read waits for nothing. So tensors that would be on a
device are marked, and so is what is computed of them; a read of a marked one is noted, with its
hook and the line of the plugin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specplug import hookimpl

if TYPE_CHECKING:
    from specplug import Batch, CommittedOutput, Draft, DraftInput, TargetOutput, VerifyOutput

_MARK = "_specplug_on_device"

_READS: Mapping[Any, str] = {
    Tensor.item: "item()",
    Tensor.tolist: "tolist()",
    Tensor.numpy: "numpy()",
    Tensor.__array__: "numpy()",
    Tensor.cpu: "cpu()",
    Tensor.__bool__: "bool()",
    Tensor.__int__: "int()",
    Tensor.__float__: "float()",
    Tensor.__index__: "an index",
    Tensor.__contains__: "in",
    Tensor.__format__: "a text of it",
    Tensor.__repr__: "a text of it",
    Tensor.nonzero: "nonzero()",
    torch.nonzero: "nonzero()",
    torch.argwhere: "argwhere()",
    Tensor.masked_select: "masked_select()",
    torch.masked_select: "masked_select()",
    Tensor.unique: "unique()",
    torch.unique: "unique()",
    torch.unique_consecutive: "unique_consecutive()",
    torch.equal: "equal()",
    Tensor.equal: "equal()",
    torch.allclose: "allclose()",
    Tensor.allclose: "allclose()",
}
"""What needs values on the host, and how it is told."""


@attrs.frozen
class HostRead:
    """A read of device data on the host.

    Attributes:
        hook: in which it happened.
        how: the operation.
        place: file and line.
        line: the code there.
    """

    hook: str
    how: str
    place: str
    line: str


class HostReads(TorchFunctionMode):
    """Marks what hooks are lent, and notes reads of it.

    Attributes:
        found: the reads, each place once.
        hook: that runs now; None: no hook of a step does.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, HostRead] = {}
        self.hook: str | None = None

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation; note it if it reads, and mark what it makes of marked tensors."""
        named = kwargs or {}
        if self.hook is None:
            return func(*args, **named)
        given = list(_tensors((args, named)))
        marked = any(_is_marked(each) for each in given)
        how = _read(func, args, named) if marked else None
        if how is not None:
            self._note(self.hook, how)
        result = func(*args, **named)
        if how is None and (marked or _is_made_there(named.get("device"))):
            mark(result)
        return result

    def _note(self, hook: str, how: str) -> None:
        frame = _caller()
        if frame is None:
            return
        path, number = Path(frame.f_code.co_filename), frame.f_lineno
        place = f"{path.parent.name}/{path.name}:{number}"
        self.found.setdefault(place, HostRead(hook, how, place, _line_of(path, number)))

    @contextmanager
    def during(self, hook: str) -> Iterator[None]:
        """Note reads while a hook runs."""
        before, self.hook = self.hook, hook
        try:
            yield
        finally:
            self.hook = before


def _read(func: Any, args: tuple[Any, ...], named: Mapping[str, Any]) -> str | None:
    """Return how an operation on marked tensors reads them on the host; None: it does not."""
    how = _READS.get(func)
    if how is not None:
        return how
    if func is Tensor.to and "cpu" in (*args[1:], named.get("device")):
        return 'to("cpu")'
    if func in (Tensor.__getitem__, Tensor.__setitem__) and _has_mask(args[1]):
        # A value of one element is filled in by the mask, on the device.
        if func is Tensor.__setitem__ and not (isinstance(args[2], Tensor) and args[2].dim()):
            return None
        return "an index by a mask"
    if func is torch.where and len(args) == 1 and not named:
        return "where() of a mask alone"
    if func in (Tensor.repeat_interleave, torch.repeat_interleave):
        repeats = [*args[1:2], named.get("repeats")]
        if any(isinstance(each, Tensor) for each in repeats) and not named.get("output_size"):
            return "repeat_interleave() without output_size"
    return None


def _has_mask(index: Any) -> bool:
    each = index if isinstance(index, tuple) else (index,)
    return any(isinstance(i, Tensor) and i.dtype is torch.bool and _is_marked(i) for i in each)


def _is_made_there(device: Any) -> bool:
    """Return whether what is made with this argument would be on the device: it is the runtime's,
    or another tensor's, and not told by its name."""
    return isinstance(device, torch.device)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple | list):
        for each in value:
            yield from _tensors(each)
    elif isinstance(value, Mapping):
        yield from _tensors(list(value.values()))


def _is_marked(tensor: Tensor) -> bool:
    return getattr(tensor, _MARK, False)


def mark(value: Any, on_device: bool = True) -> None:
    """Mark the tensors of a value as those of a device, or of the host."""
    for tensor in _tensors(value):
        setattr(tensor, _MARK, on_device)


def _caller() -> FrameType | None:
    """Return the innermost frame that is not torch's; None if it is the core's: what that reads on
    a CPU it does not read on a device."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module != __name__ and module.partition(".")[0] != "torch":
            return None if module.partition(".")[0] == "specplug" else frame
        frame = frame.f_back
    return None


def _line_of(path: Path, number: int) -> str:
    try:
        return path.read_text("utf-8").splitlines()[number - 1].strip()
    except (OSError, IndexError):
        return ""


class DeviceLender:
    """An extension that marks what the hooks of a step are lent.

    Args:
        reads: that notes what they read.
    """

    def __init__(self, reads: HostReads) -> None:
        self._reads = reads

    @hookimpl(wrapper=True)
    def propose(
        self, batch: Batch, draft_input: DraftInput
    ) -> Generator[None, Draft | None, Draft | None]:
        """Mark the batch and its state."""
        self._lend(batch, draft_input.bonus_tokens, draft_input.state)
        with self._reads.during("propose"):
            return (yield)

    @hookimpl(wrapper=True)
    def grow_draft(
        self, batch: Batch, draft_input: DraftInput, draft: Draft
    ) -> Generator[None, Draft | None, Draft | None]:
        """Mark the batch, its state and the draft."""
        lent = draft.tokens, draft.parents, draft.scores
        self._lend(batch, draft_input.bonus_tokens, draft_input.state, lent)
        with self._reads.during("grow_draft"):
            return (yield)

    @hookimpl(wrapper=True)
    def verify(
        self, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> Generator[None, VerifyOutput | None, VerifyOutput | None]:
        """Mark the batch, the draft and the target's output."""
        output = target_output
        lent = draft.tokens, draft.parents, draft.scores, output.predict, output.logits
        self._lend(batch, lent, output.per_node)
        with self._reads.during("verify"):
            return (yield)

    @hookimpl(wrapper=True)
    def build_draft_input(
        self, batch: Batch, target_output: CommittedOutput
    ) -> Generator[None, DraftInput, DraftInput]:
        """Mark the batch and what is committed."""
        output = target_output
        lent = output.next_tokens, output.own_tokens, output.last_rows, output.accept_lens
        self._lend(batch, lent, output.bonus_tokens, output.per_node)
        with self._reads.during("build_draft_input"):
            return (yield)

    @hookimpl(wrapper=True)
    def on_host_tensors(self, tensors: Mapping[str, Tensor]) -> Generator[None, Any, Any]:
        """Mark what has come to the host as there."""
        mark(dict(tensors), on_device=False)
        return (yield)

    def _lend(self, batch: Batch, *lent: Any) -> None:
        mark((batch.req_indices, batch.seq_lens, *lent))
        if batch.attention is not None:
            mark(batch.attention.positions)
