"""Passes of the target: as they are, padded to few forms, or replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import cache, cached_property, partial
from typing import TypeVar

import attrs
import torch
from torch import Tensor

from specplug.distributed.rank_group import RankGroup
from specplug.model.hidden_states import Point
from specplug.model.layer_range import wanted_draft
from specplug.model.padded_rows import GivenParts, cut_rows, size_of
from specplug.model.pass_form import PassForm, PassSize
from specplug.model.recorded_forms import RecordedForms
from specplug.model.target import PassOutput, Target
from specplug.speculative.buckets import MANY_ROWS, MOST_ROWS, batch_bucket, row_bucket
from specplug.speculative.draft import Draft
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.paged_plan import JoinedPlan, PagedPlan
from specplug.speculative.pass_arguments import BatchPadding, apart

Key = TypeVar("Key", bound=Hashable)
Result = TypeVar("Result")

_LOGITS = "logits"
_DENSE_ROWS = 16
"""A product of fewer rows costs as much: drafts of differing widths are not packed then."""
_MORE_ROWS = 1.25
"""How many times as many rows a recorded pass of equal widths may have as the drafts of differing
ones that it stands in for, where these have many and no form."""
_LAUNCHED = 2.6e11
"""Rows times the weights of a layer that keep a GPU busy for as long as a host takes to launch the
layer's kernels: 0.8 ms, beside an H200."""
_MOST_FORMS = 320
"""The most forms of padded passes that are recorded; a start for 256 requests records about a third
as many."""
_LARGE = 1 << 20
"""Bytes of a tensor from which on it is not kept for each form."""


@attrs.frozen(eq=False)
class PassPart:
    """A part of a pass: its prefill's chunks, or its decode step's nodes.

    Attributes:
        given: [R] int64, the tokens of chunks; of nodes their draft.
        plan: their positions and what they see, from the committed lengths on.
        last_rows: [bs] int64, of chunks the last row of each, whose logits alone are wanted; None:
            those of all rows.
    """

    given: Tensor | Draft
    plan: PagedPlan
    last_rows: Tensor | None = None

    @property
    def draft(self) -> Draft | None:
        """Whose nodes they are; None: they are chunks."""
        return self.given if isinstance(self.given, Draft) else None

    @property
    def tokens(self) -> Tensor:
        """[R] int64."""
        return self.given.flat_tokens if isinstance(self.given, Draft) else self.given


class ModelRunner:
    """Runs a target's passes over flattened tokens, and chooses how.

    Args:
        target: whose passes they are.

    Attributes:
        target: as given.
        verify_passes: by the kinds of points that they keep, the passes over nodes of equal widths
            that are recorded; none if nothing is.
        padded_pass: every other pass, padded to a form and recorded when it is padded to that for
            the second time; None: they run as they are.
        forms: of these passes.
    """

    def __init__(self, target: Target) -> None:
        self.target = target
        self.verify_passes: dict[frozenset[str], GraphRunner] = {}
        self.padded_pass: GraphRunner | None = None
        self.forms: RecordedForms | None = None
        self._ranks = target.ranks
        self._verified: GraphRunner | None = None
        self._buffers: dict[Hashable, Tensor] = {}

    def record_graphs(self) -> None:
        """Replay passes as CUDA graphs from now on. Where torch attends, those of equal widths
        alone: padding would leave NaN in slot 0, and lengths are part of a graph.

        With other ranks all passes are padded, to forms that the ranks agree on: a collective in a
        graph must be in a graph of every rank.
        """
        if self._ranks is None:
            self._verify_pass(frozenset())
        if self.target.kernels is not None:
            self.pad_passes(GraphRecorder(beside_threads=self._ranks is not None))

    def pad_passes(self, recorder: GraphRecorder) -> None:
        """Pad passes to few forms from now on; alone, those of differing rows."""
        self.padded_pass = GraphRunner(
            self._padded_forward,
            GivenParts,
            recorder,
            most_buckets=_MOST_FORMS,
            warms_up=False,
            waits=self._ranks is not None,
            has_epilogue=self._ranks is None,
        )
        self.forms = RecordedForms(self.padded_pass)

    @property
    def recorders(self) -> list[GraphRunner]:
        """What records passes."""
        padded = [] if self.padded_pass is None else [self.padded_pass]
        return [*self.verify_passes.values(), *padded]

    @property
    def graph_failure(self) -> str | None:
        """Why recording failed; None if it did not."""
        failures = (each.recorder.failure for each in self.recorders)
        return next(filter(None, failures), None)

    def run(
        self,
        prefill: PassPart | None,
        decode: PassPart | None,
        like: PagedPlan,
        points: tuple[Point, ...] = (),
    ) -> Sequence[PassOutput | None]:
        """Run a pass over chunks, over the nodes of drafts, or over both; with neither over one
        padding row, because other ranks run theirs. It waits for these.

        Args:
            prefill, decode: the parts of the pass, if they are there.
            like: any plan of this step; without a part, of request row 0.
            points: where the pass is to be read.

        Returns:
            For the prefill and for the decode step the logits that are wanted and what was
            captured; None for one that is not there.
        """
        self._verified = None
        form = self._form_of(prefill, decode, points)
        if form is not None:
            assert self.padded_pass is not None
            found: list[PassOutput | None] = self.padded_pass(form, prefill, decode, like)
            if form.prefill is None and decode is not None and decode.plan.mask is None:
                self._verified = self.padded_pass
            return found
        if prefill is not None:
            return self._run_chunks(prefill, decode, points)
        if decode is None:
            decode = PassPart(Draft.chain(like.starts.unsqueeze(1)), like)
        return None, self._run_nodes(decode, points)

    def _run_chunks(
        self, prefill: PassPart, decode: PassPart | None, points: tuple[Point, ...]
    ) -> Sequence[PassOutput | None]:
        """Run chunks as they are, and nodes after them."""
        tokens, ends = prefill.tokens, prefill.last_rows
        assert ends is not None
        if decode is None:
            return self.target.forward(tokens, prefill.plan, ends, points), None
        width = len(tokens)
        nodes = torch.arange(width, width + len(decode.tokens), device=ends.device)
        logits, captured, kept = self.target.forward(
            torch.cat((tokens, decode.tokens)),
            JoinedPlan((prefill.plan, decode.plan)),
            torch.cat((ends, nodes)),
            points,
        )
        chunk_rows, node_rows = slice(None, width), slice(width, None)
        return (
            (logits[: len(ends)], cut_rows(captured, chunk_rows), cut_rows(kept, chunk_rows)),
            (logits[len(ends) :], cut_rows(captured, node_rows), cut_rows(kept, node_rows)),
        )

    def _run_nodes(self, decode: PassPart, points: tuple[Point, ...]) -> PassOutput:
        """Run the nodes of drafts, replayed if passes are recorded. Then they have the same rows
        for every request: nodes that do not count run too, and what they give is dropped."""
        if not self.verify_passes or self._is_shorter_unrecorded(decode):
            return self.target.forward(decode.tokens, decode.plan, 0, points)
        draft = decode.draft
        assert draft is not None
        verify_pass = self._verify_pass(frozenset(point.kind for point in points))
        dense = draft if draft.widths is None else attrs.evolve(draft, widths=None)
        outputs: PassOutput = verify_pass(dense, decode.plan.of_chains())
        if draft.padding is None:
            self._verified = verify_pass
            return outputs
        logits, captured, kept = outputs
        return (
            draft.select(logits),
            {name: draft.select(tensor) for name, tensor in captured.items()},
            {point: draft.select(tensor) for point, tensor in kept.items()},
        )

    @cached_property
    def _layer_weights(self) -> float:
        """The weights of a layer of the target, on average."""
        layers = self.target.capture.layers
        return sum(p.numel() for layer in layers for p in layer.parameters()) / len(layers)

    def _is_shorter_unrecorded(self, decode: PassPart) -> bool:
        """Return whether the nodes of drafts of differing widths are so many, and yet so much fewer
        than nodes of equal widths, that they take less time than a replay of those although the
        host launches each kernel. With a small target they do not."""
        plan, rows = decode.plan, len(decode.tokens)
        if plan.padding is None or self.forms is None or rows <= MANY_ROWS:
            return False
        filled = batch_bucket(plan.bs) * plan.width
        return filled > _MORE_ROWS * rows and filled * self._layer_weights > _LAUNCHED

    def run_epilogue(
        self, key: Hashable, epilogue: Callable[[Draft, PagedPlan, PassOutput], Result]
    ) -> Result | None:
        """Run what follows a pass over nodes of equal widths, or over chains, recorded with it.

        Args:
            key: stands for ``epilogue``: of equal keys the same is recorded.
            epilogue: takes the draft and a plan of its nodes as chains, in tensors that are padded
                and the same in every replay, and the pass's output for them.

        Returns:
            What ``epilogue`` returns, cut to the batch. None if that pass was not replayed, or
            another one has begun since; then nothing is run.
        """
        verified = self._verified
        if verified is None:
            return None

        def run(draft: Draft, plan: PagedPlan, passed: PassOutput) -> Result:
            output = epilogue(draft, plan, passed)
            return self._kept_large(output) if verified is self.padded_pass else output

        found: Result | None = verified.run_epilogue(key, run)
        return found

    def close(self) -> None:
        """Free the graphs, then the target."""
        for each in self.recorders:
            each.close()
        self.verify_passes.clear()
        self._verified = self.padded_pass = self.forms = None
        self._buffers.clear()
        self.target.close()

    def _form_of(
        self, prefill: PassPart | None, decode: PassPart | None, points: tuple[Point, ...]
    ) -> PassForm | None:
        """Return the form that a pass is padded to, agreed with the other ranks; None: it is not
        padded."""
        kinds = frozenset(point.kind for point in points)
        if self._ranks is not None:
            return self._agree(self._ranks, size_of(prefill, decode, kinds))
        if self.forms is None:
            return None
        if prefill is None and decode is not None and _is_dense(decode.plan):
            plan = decode.plan
            if plan.mask is not None or not _has_shorter_form(plan.bs, plan.width):
                return None
            size, rows = size_of(prefill, decode, kinds), batch_bucket(plan.bs) * plan.width
            return self.forms.of_fewer_rows(size, rows)
        return self.forms.of([size_of(prefill, decode, kinds)])

    def _agree(self, ranks: RankGroup, size: PassSize) -> PassForm | None:
        """Agree with the other ranks on the form of a pass. All know the same passes of the same
        forms, so all choose the same."""
        padded = self.padded_pass
        wish = "" if padded is None or padded.recorder.failure is not None else size.as_text()
        rows = max(size.rows, 1)
        wishes = ranks.agree(rows, wish)
        while (drafting := wanted_draft(wishes)) is not None:
            self.target.draft_ranges[drafting].take_part(rows)
            wishes = ranks.agree(rows, wish)
        if padded is None or self.forms is None or not wish:
            return None
        if not all(wishes):
            padded.recorder.give_up(f"rank {wishes.index('')} does not record its passes")
            return None
        form = self.forms.of([PassSize.from_text(each) for each in wishes])
        if form is not None:
            ranks.pad(form.rows)
        return form

    def _verify_pass(self, kinds: frozenset[str]) -> GraphRunner:
        """Return the recorded pass that keeps all points of these kinds. A pass is recorded anew
        for the kinds that requests want, and not for each choice of points among them."""
        if kinds not in self.verify_passes:
            points = self.target.capture.points(kinds)
            self.verify_passes[kinds] = GraphRunner(
                partial(self._verify_forward, points=points),
                BatchPadding(pads=self.target.kernels is not None, is_written=False),
                GraphRecorder(),
                has_epilogue=True,
            )
        return self.verify_passes[kinds]

    def _verify_forward(
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

    def _kept_large(self, output: Result) -> Result:
        """Return an output whose large tensors stand in buffers that the forms of passes share."""
        tensors, remake = apart(output)
        for place, tensor in enumerate(tensors):
            if tensor.nbytes > _LARGE:
                name = place, tensor.dtype, tensor.shape[1:]
                (tensors[place],) = self._buffered({name: tensor}).values()
        made: Result = remake(iter(tensors))
        return made

    def _buffered(self, tensors: dict[Key, Tensor]) -> dict[Key, Tensor]:
        """Copy tensors of leading size R to the buffers of their names."""
        found = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or len(buffer) < len(tensor):
                buffer = self._buffers[name] = torch.empty_like(tensor)
            found[name] = buffer[: len(tensor)].copy_(tensor)
        return found


@cache
def _has_shorter_form(bs: int, width: int) -> bool:
    """Return whether the form of nodes of equal widths has fewer rows than requests that are padded
    to a batch size: 34 of 3 nodes have 128, in place of 48 times 3. Asked at each step."""
    rows = bs * width
    return rows <= MOST_ROWS and row_bucket(rows) < batch_bucket(bs) * width


def _is_dense(plan: PagedPlan) -> bool:
    """Return whether nodes run as requests of equal widths, for which passes are recorded: they
    are, or they are few enough to be padded to that."""
    return plan.padding is None or batch_bucket(plan.bs) * plan.width <= _DENSE_ROWS
