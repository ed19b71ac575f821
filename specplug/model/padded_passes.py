"""Passes of differing rows, padded to few forms: chunks, mixed steps, drafts of differing widths.

Each form has tensors of its own, which a pass reads. The first pass of a form runs as it is, the
second is recorded, and those that follow are replayed: a form that is seen once costs no recording.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable
from itertools import accumulate
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from specplug.model.pass_form import NOTHING, PartForm, PartSize, PassForm, PassSize
from specplug.speculative.graph_recorder import GraphRecorder, Recorded
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan, RequestSlots

_MOST_FORMS = 96
"""The most forms that are recorded; passes of others run as they are."""

Key = TypeVar("Key", bound=Hashable)
PassOutput = tuple[Tensor, dict[str, Tensor], dict[Hashable, Tensor]]
"""The result of a pass: logits [M, V]; the captured outputs that algorithms asked for, by name; and
the tensors at the points to read. Both have leading size R."""
Forward = Callable[[Tensor, PagedPlan | JoinedPlan, Tensor | int, frozenset[str]], PassOutput]
"""Runs a pass: tokens, plan, rows whose logits are wanted (0: all), kinds of points to keep."""


@attrs.frozen(eq=False)
class PassPart:
    """A part of a pass: its prefill's chunks, or its decode step's nodes.

    Attributes:
        tokens: [R] int64.
        plan: their positions and what they see, from the committed lengths on.
        ends_only: whether the logits of each request's last row alone are wanted: of chunks.
    """

    tokens: Tensor
    plan: PagedPlan
    ends_only: bool

    @property
    def size(self) -> PartSize:
        """Its size."""
        plan = self.plan
        return PartSize(plan.bs, sum(plan.widths), plan.width, plan.mask is not None)


def size_of(prefill: PassPart | None, decode: PassPart | None, kinds: frozenset[str]) -> PassSize:
    """Return the size of a pass of either part, both or none."""
    first, second = (NOTHING if part is None else part.size for part in (prefill, decode))
    return PassSize(first, second, kinds)


Parts = tuple[PassPart | None, PassPart | None]
"""The prefill's and the decode step's part of a pass; None for one that is not there."""


class PaddedPasses:
    """Runs passes padded to forms, recorded where that is possible.

    Args:
        forward: the pass. What it returns may be overwritten by the next one.
        recorder: makes recordings; None: passes are padded and run as they are.
        waits: replay a pass from the next one of its form on, not at once: other ranks' recordings
            must have succeeded too.

    Attributes:
        recorder: as given.
    """

    def __init__(
        self, forward: Forward, recorder: GraphRecorder | None, *, waits: bool = False
    ) -> None:
        self._forward = forward
        self.recorder = recorder
        self._waits = waits
        self._inputs: dict[PassForm, _Inputs] = {}
        self._recordings: dict[PassForm, Recorded] = {}

    @property
    def num_recordings(self) -> int:
        """The forms that are recorded."""
        return len(self._recordings)

    def takes(self, form: PassForm) -> bool:
        """Return whether passes of this form are padded: none is where recording has failed."""
        if self.recorder is not None and self.recorder.failure is not None:
            return False
        return form in self._inputs or len(self._inputs) < _MOST_FORMS

    def __call__(
        self, form: PassForm, parts: Parts, like: PagedPlan
    ) -> tuple[PassOutput | None, PassOutput | None]:
        """Run a pass.

        Args:
            form: that ``takes`` and has room for the parts.
            parts: of the pass.
            like: any plan of this step.

        Returns:
            For each part the logits that it wants, and what was captured; None without the part.
        """
        inputs = self._inputs.get(form)
        is_known = inputs is not None
        if inputs is None:
            inputs = self._inputs[form] = _Inputs(form, like.starts.device)
        inputs.fill(parts, like)
        return _cut(form, parts, self._run(form, inputs, is_known))

    def _run(self, form: PassForm, inputs: _Inputs, is_known: bool) -> PassOutput:
        def run() -> PassOutput:
            return self._forward(inputs.tokens, inputs.plan(), inputs.logits_rows, form.kinds)

        recorded = self._recordings.get(form)
        if recorded is None and self.recorder is not None and is_known:
            found = self.recorder.record(run)
            if found is not None:
                self._recordings[form] = found
                recorded = None if self._waits else found
        return run() if recorded is None else recorded.replay()

    def close(self) -> None:
        """Free the recordings and their tensors, and drop the pass."""
        if self.recorder is not None:
            self.recorder.close()
        self._recordings.clear()
        self._inputs.clear()
        del self._forward


class _PartInputs:
    """The tensors of a part of a form.

    Args:
        form: of the part.
        tokens: [R] int64 of the pass's.
        flat_index, padded_rows: [R] and [B * Q] int64, as ``Padding`` has them.

    Attributes:
        widths: of the requests of the pass.
    """

    def __init__(
        self, form: PartForm, tokens: Tensor, flat_index: Tensor, padded_rows: Tensor
    ) -> None:
        self._form = form
        self._tokens = tokens
        self._flat_index = flat_index
        self._padded_rows = padded_rows
        self.widths: tuple[int, ...] = ()
        device = tokens.device
        self._req_indices, self._starts = torch.zeros(2, form.bs, dtype=torch.int64, device=device)
        self._masked: tuple[Tensor, Tensor] | None = None
        if form.masked:
            self._masked = (
                torch.zeros(form.bs, form.width, dtype=torch.int64, device=device),
                torch.zeros(form.bs, form.width, form.width, dtype=torch.bool, device=device),
            )
        self._filled = 0, 0  # requests and rows
        self._width = 0

    def fill(self, part: PassPart | None) -> None:
        """Copy a part's tensors; what follows is nobody's: request row 0, token 0."""
        plan = None if part is None else part.plan
        self.widths = () if plan is None else plan.widths
        old, self._filled = self._filled, (len(self.widths), sum(self.widths))
        if part is not None and plan is not None:
            self._tokens[: len(part.tokens)].copy_(part.tokens)
            self._req_indices[: plan.bs].copy_(plan.req_indices)
            self._starts[: plan.bs].copy_(plan.starts)
        if old[0] > self._filled[0]:
            for tensor in (self._req_indices, self._starts):
                tensor[self._filled[0] : old[0]].zero_()
        if old[1] > self._filled[1]:
            self._tokens[self._filled[1] : old[1]].zero_()
        if plan is not None and self._masked is not None:
            if plan.width < self._width:
                self._masked[1].zero_()  # of wider requests
            self._width = plan.width
            positions, mask = _positions_and_mask(plan)
            self._masked[0][: plan.bs, : plan.width].copy_(positions)
            self._masked[1][: plan.bs, : plan.width, : plan.width].copy_(mask)

    def plan(self, requests: RequestSlots, length: int) -> PagedPlan:
        """Return a plan of these tensors."""
        widths = self._form.widths(self.widths)
        positions, mask = self._masked or (None, None)
        return PagedPlan(
            requests=requests,
            req_indices=self._req_indices,
            starts=self._starts,
            width=self._form.width,
            length=length,
            given_positions=positions,
            mask=mask,
            padding=Padding(widths, self._flat_index, self._padded_rows),
        )


class _Inputs:
    """The tensors of a form.

    Args:
        form: of the pass.
        device: that runs it.

    Attributes:
        tokens: [R] int64, of all parts.
        logits_rows: [M] int64, the last row of each chunk and all nodes; 0 if there are no chunks.
    """

    def __init__(self, form: PassForm, device: torch.device) -> None:
        self.tokens = torch.zeros(form.rows, dtype=torch.int64, device=device)
        self.logits_rows: Tensor | int = 0
        sizes = [size for part in form.parts for size in (part.rows, part.bs * part.width)]
        if form.prefill is not None:
            sizes.append(form.prefill.bs + form.rows - form.prefill.rows)
        # One tensor: what the host knows comes in one copy.
        self._index = torch.zeros(sum(sizes), dtype=torch.int64, device=device)
        places = list(torch.split(self._index, sizes))
        if form.prefill is not None:
            self.logits_rows = places.pop()
        tokens = torch.split(self.tokens, [part.rows for part in form.parts])
        self._parts = [
            _PartInputs(part, tokens[i], places[2 * i], places[2 * i + 1])
            for i, part in enumerate(form.parts)
        ]
        self._form = form
        self._slots: tuple[RequestSlots, int]
        self._widths: tuple[tuple[int, ...], ...] | None = None

    def fill(self, parts: Parts, like: PagedPlan) -> None:
        """Copy the tensors of the parts, for a pass in the step of the plan ``like``."""
        form = self._form
        self._slots = like.requests, like.length
        there = [
            part
            for part, padded in zip(parts, (form.prefill, form.decode), strict=True)
            if padded is not None
        ]
        for inputs, part in zip(self._parts, there, strict=True):
            inputs.fill(part)
        widths = tuple(inputs.widths for inputs in self._parts)
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

    def plan(self) -> PagedPlan | JoinedPlan:
        """Return the plan of a pass of these tensors."""
        plans = [part.plan(*self._slots) for part in self._parts]
        return plans[0] if len(plans) == 1 else JoinedPlan((plans[0], plans[1]))


def _cut(
    form: PassForm, parts: Parts, output: PassOutput
) -> tuple[PassOutput | None, PassOutput | None]:
    """Cut what a padded pass has given to what is the parts'."""
    logits, captured, points = output
    found: list[PassOutput | None] = [None, None]
    row = place = 0
    for i, padded in enumerate((form.prefill, form.decode)):
        if padded is None:
            continue
        part = parts[i]
        if part is not None:
            rows = slice(row, row + sum(part.plan.widths))
            wanted = part.plan.bs if part.ends_only else sum(part.plan.widths)
            of_part = logits[place : place + wanted]
            found[i] = of_part, _rows(captured, rows), _rows(points, rows)
        row += padded.rows
        place += padded.bs if i == 0 else padded.rows
    return found[0], found[1]


def _positions_and_mask(plan: PagedPlan) -> tuple[Tensor, Tensor]:
    """Return the positions [bs or 1, Q] and the mask [bs or 1, Q, Q] of nodes, causal ones too."""
    width, device = plan.width, plan.starts.device
    positions, mask = plan.given_positions, plan.mask
    if positions is None:
        positions = plan.starts.unsqueeze(1) + torch.arange(width, device=device)
    if mask is None:
        mask = torch.ones(1, width, width, dtype=torch.bool, device=device).tril_()
    return positions, mask


def _rows(tensors: dict[Key, Tensor], rows: slice) -> dict[Key, Tensor]:
    return {name: tensor[rows] for name, tensor in tensors.items()}
