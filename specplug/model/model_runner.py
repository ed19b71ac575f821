"""Passes of the target: as they are, padded to few forms, or replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import partial
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from specplug.distributed.rank_group import RankGroup
from specplug.model.hidden_states import Point
from specplug.model.padded_passes import PaddedPasses, PassOutput, PassPart, size_of
from specplug.model.pass_form import PassForm, PassSize
from specplug.model.target import Target
from specplug.speculative.draft import Draft
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner, batch_bucket
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_LOGITS = "logits"
_DENSE_ROWS = 16
"""A product of fewer rows costs as much: drafts of differing widths are not packed then."""


class ModelRunner:
    """Runs a target's passes over flattened tokens, and chooses how.

    Args:
        target: whose passes they are.

    Attributes:
        target: as given.
        records: whether ``verify``'s passes are replayed as CUDA graphs.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.records = False
        self._ranks = target.ranks
        self._graphs: dict[frozenset[str], GraphRunner] = {}
        self._verified: GraphRunner | None = None
        self._padded: PaddedPasses | None = None
        self._buffers: dict[Hashable, Tensor] = {}

    def record_graphs(self) -> None:
        """Replay passes as CUDA graphs from now on. Where torch attends, those of ``verify``
        alone: padding would leave NaN in slot 0, and lengths are part of a graph.

        With other ranks all passes are padded, to forms that the ranks agree on: a collective in a
        graph must be in a graph of every rank.
        """
        if self._ranks is None:
            self.records = True
            self._recorded(frozenset())
        if self.target.kernels is not None:
            self.pad_passes(GraphRecorder(beside_threads=self._ranks is not None))

    def pad_passes(self, recorder: GraphRecorder | None) -> None:
        """Pad passes to few forms from now on; alone, those of differing rows.

        Args:
            recorder: makes their recordings; None: they run as they are.
        """
        self._padded = PaddedPasses(self._padded_forward, recorder, waits=self._ranks is not None)

    @property
    def num_padded_recordings(self) -> int:
        """How many forms of padded passes are recorded."""
        return 0 if self._padded is None else self._padded.num_recordings

    @property
    def recordings(self) -> dict[frozenset[str], int]:
        """How many shapes of ``verify``'s pass are recorded, by the kinds of points it keeps."""
        return {kinds: graph.num_recordings for kinds, graph in self._graphs.items()}

    @property
    def recorders(self) -> list[GraphRunner | PaddedPasses]:
        """What records passes: of ``verify`` for each choice of points that has occurred, and
        padded ones."""
        return [*self._graphs.values(), *((self._padded,) if self._padded else ())]

    @property
    def pads(self) -> bool:
        """Whether passes are padded, and recorded when their form comes for the second time."""
        return self._padded is not None

    @property
    def graph_failure(self) -> str | None:
        """Why recording failed; None if it did not."""
        recorders = (each.recorder for each in self.recorders)
        return next((r.failure for r in recorders if r is not None and r.failure), None)

    def begin_pass(
        self,
        prefill: PassPart | None,
        decode: PassPart | None,
        points: tuple[Point, ...] = (),
    ) -> PassForm | None:
        """Begin a pass of either part, both or none: wait for the other ranks.

        Returns:
            The form that it is padded to, for ``run_padded``; None: it runs as it is, and if it has
            no part with one row of nobody.
        """
        self._verified = None
        kinds = frozenset(point.kind for point in points)
        size = size_of(prefill, decode, kinds)
        if self._ranks is not None:
            return self._agree(self._ranks, size)
        if self._padded is None or (prefill is None and decode is not None and _is_dense(decode)):
            return None
        form = PassForm.of([size])
        return form if form is not None and self._padded.takes(form) else None

    def run_padded(
        self,
        form: PassForm,
        prefill: PassPart | None,
        decode: PassPart | None,
        like: PagedPlan,
    ) -> tuple[PassOutput | None, PassOutput | None]:
        """Run a pass padded to a form, of either part or both; see ``PaddedPasses``."""
        assert self._padded is not None
        return self._padded(form, (prefill, decode), like)

    def prefill(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        points: tuple[Point, ...] = (),
    ) -> PassOutput:
        """Run a pass over prompt tokens, and in a mixed step over the nodes of drafts after them.

        Args:
            token_ids: [R] int64.
            plan: their positions and what they see.
            logits_rows: [M] int64 rows whose logits are wanted, or 0: those of all rows.
            points: where the pass is to be read.
        """
        return self.target.forward(token_ids, plan, logits_rows, points)

    def verify(self, draft: Draft, plan: PagedPlan, points: tuple[Point, ...] = ()) -> PassOutput:
        """Run a pass over the nodes of a draft: as ``prefill``, with the logits of all rows.

        A recorded pass has the same rows for every request: nodes that do not count run too, and
        what they give is dropped.

        Args:
            plan: of the draft's nodes.
        """
        if not self.records:
            return self.target.forward(draft.flat_tokens, plan, 0, points)
        graph = self._recorded(frozenset(point.kind for point in points))
        dense = draft if draft.widths is None else attrs.evolve(draft, widths=None)
        outputs: PassOutput = graph(dense, plan.of_chains())
        if draft.padding is None:
            self._verified = graph
            return outputs
        logits, captured, kept = outputs
        return (
            draft.select(logits),
            {name: draft.select(tensor) for name, tensor in captured.items()},
            {point: draft.select(tensor) for point, tensor in kept.items()},
        )

    def run_epilogue(
        self, key: Hashable, epilogue: Callable[[Draft, PagedPlan, PassOutput], Result]
    ) -> Result | None:
        """Run what follows the pass of ``verify`` over nodes of equal widths, recorded with it.

        Args:
            key: stands for ``epilogue``: of equal keys the same is recorded.
            epilogue: takes the draft and a plan of its nodes as chains, in tensors that are padded
                and the same in every replay, and the pass's output for them.

        Returns:
            What ``epilogue`` returns, cut to the batch. None if that pass was not replayed, or
            another one has begun since; then nothing is run.
        """
        found: Result | None = None
        if self._verified is not None:
            found = self._verified.run_epilogue(key, epilogue)
        return found

    def close(self) -> None:
        """Free the graphs, then the target."""
        for graph in self._graphs.values():
            graph.close()
        self._graphs.clear()
        self._verified = None
        if self._padded is not None:
            self._padded.close()
        self._padded = None
        self._buffers.clear()
        self.target.close()

    def _agree(self, ranks: RankGroup, size: PassSize) -> PassForm | None:
        """Agree with the other ranks on the form of a pass. All know the same passes of the same
        forms, so all choose the same."""
        padded = self._padded
        recorder = None if padded is None else padded.recorder
        fails = recorder is not None and recorder.failure is not None
        wish = size.as_text() if padded is not None and not fails else ""
        wishes = ranks.agree(max(size.rows, 1), wish)
        if padded is None or not wish:
            return None
        if not all(wishes):
            if recorder is not None:
                recorder.give_up(f"rank {wishes.index('')} does not record its passes")
            return None
        form = PassForm.of([PassSize.from_text(each) for each in wishes])
        if form is None or not padded.takes(form):
            return None
        ranks.pad(form.rows)
        return form

    def _recorded(self, kinds: frozenset[str]) -> GraphRunner:
        """Return the recorded pass that keeps all points of these kinds. A pass is recorded anew
        for the kinds that requests want, and not for each choice of points among them."""
        if kinds not in self._graphs:
            points = self.target.capture.points(kinds)
            self._graphs[kinds] = GraphRunner(
                partial(self._keeping_forward, points=points),
                pads=self.target.kernels is not None,
                has_epilogue=True,
            )
        return self._graphs[kinds]

    def _keeping_forward(
        self, draft: Draft, plan: PagedPlan, points: tuple[Point, ...]
    ) -> PassOutput:
        """Run a pass as it is recorded. What stood at the points goes to buffers that all
        recordings share: a recording of each shape would else keep that memory for itself."""
        logits, captured, kept = self.target.forward(
            draft.flat_tokens, plan.of_nodes(draft), 0, points
        )
        return logits, captured, self._buffered(kept)

    def _padded_forward(
        self,
        token_ids: Tensor,
        plan: PagedPlan | JoinedPlan,
        logits_rows: Tensor | int,
        kinds: frozenset[str],
    ) -> PassOutput:
        """Run a padded pass. All that it returns goes to buffers that its forms share."""
        points = self.target.capture.points(kinds)
        logits, captured, kept = self.target.forward(token_ids, plan, logits_rows, points)
        (logits,) = self._buffered({_LOGITS: logits}).values()
        return logits, self._buffered(captured), self._buffered(kept)

    def _buffered(self, tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Copy tensors of leading size R to the buffers of their names."""
        found = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < len(tensor):
                buffer = self._buffers[name] = torch.empty_like(tensor)
            found[name] = buffer[: len(tensor)].copy_(tensor)
        return found


def _is_dense(decode: PassPart) -> bool:
    """Return whether a decode step is left to ``verify``, which is recorded for requests of equal
    widths: they are, or they are few enough to be padded to that."""
    plan = decode.plan
    return plan.padding is None or batch_bucket(plan.bs) * plan.width <= _DENSE_ROWS
