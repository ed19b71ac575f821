"""Rows of differing widths, padded to forms: chunks, mixed steps, drafts of differing widths."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from copy import copy
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug.model.pass_form import NOTHING, PartForm, PartSize, PassForm, PassSize
from specplug.speculative.draft import Draft
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan, RequestSlots
from specplug.speculative.pass_arguments import apart, cut_requests

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
    return PartSize(plan.bs, plan.num_rows, plan.width, plan.mask is not None)


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
        sizes = [size for part in form.parts for size in (part.rows, part.bs * part.width)]
        if form.prefill is not None:
            sizes.append(form.prefill.bs + form.rows - form.prefill.rows)
        # One tensor: what the host knows comes in one copy. Not of pinned memory, which may be
        # written to only when it has come; of other memory torch makes a copy of its own first.
        self._index = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        self._known = torch.zeros(sum(sizes), dtype=torch.int64)
        self._known_parts = [part.numpy() for part in torch.split(self._known, sizes)]
        if form.prefill is not None:
            nodes = np.arange(form.prefill.rows, form.rows)
            self._known_parts[-1][form.prefill.bs :] = nodes
        places = list(torch.split(self._index, sizes))
        # The last row of each chunk and all nodes; 0, all rows, if there are no chunks.
        self._logits_rows: Tensor | int = 0 if form.prefill is None else places.pop()
        self._parts = [
            _PartInputs(part, part is form.decode, places[2 * i], places[2 * i + 1])
            for i, part in enumerate(form.parts)
        ]
        self._widths: list[tuple[int, ...] | None] | None = None
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
            self._write_known()
            self._index.copy_(self._known, non_blocking=True)
        for inputs, part in zip(self._parts, there, strict=True):
            if inputs.widths is None and part is not None:
                inputs.place_rows(part.plan)

    def _write_known(self) -> None:
        """Write what follows from the widths alone; the device alone knows where they are None."""
        form = self._form
        for i, (part, inputs) in enumerate(zip(form.parts, self._parts, strict=True)):
            if inputs.widths is not None:
                part.write_places(inputs.widths, *self._known_parts[2 * i : 2 * i + 2])
        if form.prefill is not None:
            widths = self._parts[0].widths
            assert widths is not None, "the host knows the widths of chunks"
            ends = self._known_parts[-1][: form.prefill.bs]
            ends[: len(widths)] = np.cumsum(widths) - 1
            ends[len(widths) :] = 0

    def arguments(self, given: GivenParts) -> tuple[Any, ...]:
        """Return the arguments of the pass."""
        plans = [part.plan(*self._slots) for part in self._parts]
        plan = plans[0] if len(plans) == 1 else JoinedPlan((plans[0], plans[1]))
        tokens = [part.flat_tokens() for part in self._parts]
        joined = tokens[0] if len(tokens) == 1 else torch.cat(tokens)
        return joined, plan, self._logits_rows, self._form.kinds

    def epilogue_arguments(self, arguments: tuple[Any, ...]) -> tuple[Draft, PagedPlan]:
        """Return the draft of a pass over chains alone, and its plan."""
        (part,) = self._parts
        return part.draft(), copy(arguments[1])

    def epilogue_cutter(self, output: Any) -> Callable[[], Any]:
        """Return what cuts what followed a pass over chains alone to the requests."""
        (part,) = self._parts
        parts = apart(output)
        return lambda: cut_requests(*parts, part.bs, part.size)

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
            if padded is None or part is None or not part.num_rows:
                found.append(None)
            else:
                rows = slice(row, row + part.num_rows)
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
        of_nodes: whether its rows are nodes, whose tokens stand as in their draft.
        flat_index, padded_rows: [R] and [B * Q] int64, as ``Padding`` has them.

    Attributes:
        widths: of the requests of the last pass, none if it had no such part; None: the device
            alone knows them.
        num_rows: of these requests.
        num_logits: rows whose logits were wanted.
    """

    def __init__(
        self, form: PartForm, of_nodes: bool, flat_index: Tensor, padded_rows: Tensor
    ) -> None:
        self._form = form
        self._flat_index = flat_index
        self._padded_rows = padded_rows
        self.widths: tuple[int, ...] | None = ()
        self.num_rows = self.num_logits = 0
        device = flat_index.device
        req_indices, starts = torch.zeros(2, form.bs, dtype=torch.int64, device=device)
        shape = (form.bs, form.width) if of_nodes else (form.rows,)
        tokens = torch.zeros(shape, dtype=torch.int64, device=device)
        self._kept = tokens, req_indices, starts
        self._filled = [0, 0, 0]  # of each
        self._of_nodes = of_nodes
        self._scores: Tensor | None = None  # as in a draft, from the first one that has some on
        self._has_scores = False
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
        self.widths, self.num_rows, self.num_logits = (), 0, 0
        if part is not None:
            plan, draft = part.plan, part.draft
            given = part.tokens if draft is None else draft.tokens, plan.req_indices, plan.starts
            self.widths, self.num_rows = plan.widths, plan.num_rows
            self.num_logits = plan.num_rows if part.last_rows is None else plan.bs
            if self._masked is not None:
                self._fill_mask(plan, *self._masked)
            else:
                self._fill_scores(draft)
        targets, rests = [], []
        for i, (kept, tensor) in enumerate(zip_longest(self._kept, given)):
            old, new = self._filled[i], 0 if tensor is None else len(tensor)
            self._filled[i] = new
            if new:
                # Narrower nodes leave what is not read after them.
                targets.append(kept[:new] if tensor.dim() == 1 else kept[:new, : tensor.shape[1]])
            if old > new:
                rests.append(kept[new:old])
        if targets:
            torch._foreach_copy_(targets, given)
        if rests:
            torch._foreach_zero_(rests)

    def _fill_scores(self, draft: Draft | None) -> None:
        scores = None if draft is None else draft.scores
        self._has_scores = scores is not None
        if scores is None:
            return
        if self._scores is None:
            shape = self._form.bs, self._form.width
            self._scores = torch.zeros(shape, dtype=torch.float32, device=scores.device)
        self._scores[: len(scores), : scores.shape[1]].copy_(scores)

    @property
    def bs(self) -> int:
        """Requests of the last pass."""
        return self._filled[1]

    @property
    def size(self) -> int:
        """B, the requests that there is room for."""
        return self._form.bs

    def flat_tokens(self) -> Tensor:
        """Return the tokens of all R rows."""
        tokens = self._kept[0]
        return tokens.view(-1)[self._flat_index] if self._of_nodes else tokens

    def draft(self) -> Draft:
        """Return the chains of the last pass; what follows them in the rows is padding."""
        draft = Draft(
            tokens=self._kept[0],
            parents=None,
            widths=None,
            depth=self._form.width - 1,
            scores=self._scores if self._has_scores else None,
        )
        draft.places = self._flat_index
        return draft

    def place_rows(self, plan: PagedPlan) -> None:
        """Write where the rows of a plan stand whose widths are known on the device alone: those of
        ``PartForm.write_places``."""
        assert plan.padding is not None
        form, own = self._form, plan.padding.flat_index
        rows, first = torch.arange(form.rows, device=own.device), plan.bs * form.width
        self._flat_index.copy_(rows - len(own) + first)
        self._flat_index[: len(own)] = own + own // plan.width * (form.width - plan.width)
        self._padded_rows.zero_().index_copy_(0, self._flat_index, rows)

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
        widths = None if self.widths is None else self._form.widths(self.widths)
        return PagedPlan(
            requests=requests,
            req_indices=req_indices,
            starts=starts,
            width=self._form.width,
            length=length,
            given_positions=positions,
            mask=mask,
            padding=Padding.made(widths, self._flat_index, self._padded_rows),
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
