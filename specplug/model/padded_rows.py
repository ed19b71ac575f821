"""Rows of differing widths, padded to forms: chunks, mixed steps, drafts of differing widths."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from functools import partial
from itertools import accumulate, zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import torch
from torch import Tensor

from specplug.model.pass_form import NOTHING, PartForm, PartSize, PassForm, PassSize
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan, RequestSlots

if TYPE_CHECKING:
    from specplug.model.model_runner import PassPart
    from specplug.model.target import PassOutput

Key = TypeVar("Key", bound=Hashable)


def size_of(prefill: PassPart | None, decode: PassPart | None, kinds: frozenset[str]) -> PassSize:
    """Return the size of a pass of either part, both or none."""
    return PassSize(_size(prefill), _size(decode), kinds)


def _size(part: PassPart | None) -> PartSize:
    if part is None:
        return NOTHING
    plan = part.plan
    return PartSize(plan.bs, sum(plan.widths), plan.width, plan.mask is not None)


@attrs.frozen(eq=False)
class GivenParts:
    """A pass that is padded to a form. Implements ``GivenPass``.

    The pass takes tokens, a plan, the rows whose logits are wanted (0: all), and the kinds of
    points to keep. What it returns may be overwritten by the next one.

    Attributes:
        bucket: the form.
        prefill, decode: its parts; None for one that is not there.
        like: any plan of this step.
    """

    bucket: PassForm
    prefill: PassPart | None
    decode: PassPart | None
    like: PagedPlan

    def inputs(self) -> FormInputs:
        """Return inputs for all passes of its form."""
        return FormInputs(self.bucket, self.like.starts.device)


class FormInputs:
    """The inputs of a form. Implements ``PassInputs``.

    Args:
        form: of the pass.
        device: that runs it.
    """

    def __init__(self, form: PassForm, device: torch.device) -> None:
        self._form = form
        self._tokens = torch.zeros(form.rows, dtype=torch.int64, device=device)
        sizes = [size for part in form.parts for size in (part.rows, part.bs * part.width)]
        if form.prefill is not None:
            sizes.append(form.prefill.bs + form.rows - form.prefill.rows)
        # One tensor: what the host knows comes in one copy.
        self._index = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        places = list(torch.split(self._index, sizes))
        # The last row of each chunk and all nodes; 0, all rows, if there are no chunks.
        self._logits_rows: Tensor | int = 0 if form.prefill is None else places.pop()
        tokens = torch.split(self._tokens, [part.rows for part in form.parts])
        self._parts = [
            _PartInputs(part, tokens[i], places[2 * i], places[2 * i + 1])
            for i, part in enumerate(form.parts)
        ]
        self._widths: list[tuple[int, ...]] | None = None
        self._slots: tuple[RequestSlots, int]

    def fill(self, given: GivenParts) -> None:
        """Copy the tensors of the parts."""
        self._slots = given.like.requests, given.like.length
        padded = self._form.prefill, self._form.decode
        parts = given.prefill, given.decode
        there = [part for part, form in zip(parts, padded, strict=True) if form is not None]
        for inputs, part in zip(self._parts, there, strict=True):
            inputs.fill(part)
        widths = [inputs.widths for inputs in self._parts]
        if widths != self._widths:
            self._widths = widths
            index = torch.frombuffer(self._indices(), dtype=torch.int64)
            self._index.copy_(index, non_blocking=True)

    def _indices(self) -> array[int]:
        """Return what follows from the widths alone."""
        form, index = self._form, array("q")
        for part, inputs in zip(form.parts, self._parts, strict=True):
            for places in part.places(inputs.widths):
                index += places
        if form.prefill is not None:
            ends = [end - 1 for end in accumulate(self._parts[0].widths)]
            index.extend(ends + [0] * (form.prefill.bs - len(ends)))
            index.extend(range(form.prefill.rows, form.rows))
        return index

    def arguments(self, given: GivenParts) -> tuple[Any, ...]:
        """Return the arguments of the pass."""
        plans = [part.plan(*self._slots) for part in self._parts]
        plan = plans[0] if len(plans) == 1 else JoinedPlan((plans[0], plans[1]))
        return self._tokens, plan, self._logits_rows, self._form.kinds

    def cutter(self, output: PassOutput) -> Callable[[], list[PassOutput | None]]:
        """Return what cuts a padded output to what each part wants: its logits, and what was
        captured; None without the part."""
        return partial(self._cut, output)

    def _cut(self, output: PassOutput) -> list[PassOutput | None]:
        logits, captured, points = output
        found: list[PassOutput | None] = []
        left = iter(self._parts)
        row = place = 0
        for i, padded in enumerate((self._form.prefill, self._form.decode)):
            part = None if padded is None else next(left)
            if padded is None or part is None or not part.widths:
                found.append(None)
            else:
                rows = slice(row, row + sum(part.widths))
                of_part = logits[place : place + part.num_logits]
                found.append((of_part, cut_rows(captured, rows), cut_rows(points, rows)))
            if padded is not None:
                row += padded.rows
                place += padded.bs if i == 0 else padded.rows
        return found


class _PartInputs:
    """The inputs of a part of a form.

    Args:
        form: of the part.
        tokens: [R] int64 of the pass's.
        flat_index, padded_rows: [R] and [B * Q] int64, as ``Padding`` has them.

    Attributes:
        widths: of the requests of the last pass; none if it had no such part.
        num_logits: rows whose logits were wanted.
    """

    def __init__(
        self, form: PartForm, tokens: Tensor, flat_index: Tensor, padded_rows: Tensor
    ) -> None:
        self._form = form
        self._flat_index = flat_index
        self._padded_rows = padded_rows
        self.widths: tuple[int, ...] = ()
        self.num_logits = 0
        device = tokens.device
        req_indices, starts = torch.zeros(2, form.bs, dtype=torch.int64, device=device)
        self._kept = tokens, req_indices, starts
        self._filled = [0, 0, 0]  # of each
        self._masked: tuple[Tensor, Tensor] | None = None
        if form.masked:
            self._masked = (
                torch.zeros(form.bs, form.width, dtype=torch.int64, device=device),
                torch.zeros(form.bs, form.width, form.width, dtype=torch.bool, device=device),
            )
        self._width = 0  # of the mask

    def fill(self, part: PassPart | None) -> None:
        """Copy a part's tensors; what follows is padding: request row 0, token 0."""
        given: tuple[Tensor, ...] = ()
        self.widths, self.num_logits = (), 0
        if part is not None:
            plan = part.plan
            given = part.tokens, plan.req_indices, plan.starts
            self.widths = plan.widths
            self.num_logits = sum(plan.widths) if part.last_rows is None else plan.bs
            if self._masked is not None:
                self._fill_mask(plan, *self._masked)
        for i, (kept, tensor) in enumerate(zip_longest(self._kept, given)):
            old, new = self._filled[i], 0 if tensor is None else len(tensor)
            self._filled[i] = new
            if new:
                kept[:new].copy_(tensor)
            if old > new:
                kept[new:old].zero_()

    def _fill_mask(self, plan: PagedPlan, positions: Tensor, mask: Tensor) -> None:
        if plan.width < self._width:
            mask.zero_()  # of wider requests
        self._width = plan.width
        given_positions, given_mask = _positions_and_mask(plan)
        positions[: plan.bs, : plan.width].copy_(given_positions)
        mask[: plan.bs, : plan.width, : plan.width].copy_(given_mask)

    def plan(self, requests: RequestSlots, length: int) -> PagedPlan:
        """Return a plan of these tensors."""
        _, req_indices, starts = self._kept
        positions, mask = self._masked or (None, None)
        widths = self._form.widths(self.widths)
        return PagedPlan(
            requests=requests,
            req_indices=req_indices,
            starts=starts,
            width=self._form.width,
            length=length,
            given_positions=positions,
            mask=mask,
            padding=Padding(widths, self._flat_index, self._padded_rows),
        )


def cut_rows(tensors: dict[Key, Tensor], rows: slice) -> dict[Key, Tensor]:
    """Return these rows of each tensor."""
    return {name: tensor[rows] for name, tensor in tensors.items()}


def _positions_and_mask(plan: PagedPlan) -> tuple[Tensor, Tensor]:
    """Return the positions [bs or 1, Q] and the mask [bs or 1, Q, Q] of nodes, causal ones too."""
    width, device = plan.width, plan.starts.device
    positions, mask = plan.given_positions, plan.mask
    if positions is None:
        positions = plan.starts.unsqueeze(1) + torch.arange(width, device=device)
    if mask is None:
        mask = torch.ones(1, width, width, dtype=torch.bool, device=device).tril_()
    return positions, mask
