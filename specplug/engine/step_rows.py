"""The rows of a step's pass on the device: a prefill's chunks, and the nodes of drafts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import attrs

from specplug.engine.request import Request
from specplug.engine.step_outputs import WantedOutputs
from specplug.grammar.state import HostTree
from specplug.model.padded_rows import PassPart
from specplug.sampling_params import Needs
from specplug.speculative.draft import Draft
from specplug.speculative.paged_plan import PagedPlan
from specplug.speculative.step_stages import Chunks, Drafted


@attrs.frozen(eq=False, kw_only=True)
class RequestGroup:
    """The requests of a step that prefill, or those that decode, and what they need together.

    Attributes:
        needs: what any of them needs.
        wanted: what they want for each token besides the token; None: nothing.
    """

    requests: tuple[Request, ...]
    needs: Needs
    wanted: WantedOutputs | None

    @classmethod
    def of(cls, requests: Sequence[Request]) -> Self:
        """Return the group of these requests."""
        needs = Needs.NOTHING
        for request in requests:
            needs |= request.needs
        wanted = WantedOutputs(requests) if needs & Needs.OUTPUTS else None
        return cls(requests=tuple(requests), needs=needs, wanted=wanted)

    @property
    def points(self) -> tuple[Any, ...]:
        """Where the target's pass is to be read for what they want."""
        return self.wanted.points if self.wanted else ()


@attrs.frozen(eq=False, kw_only=True)
class ChunkRows:
    """The rows of a prefill.

    Attributes:
        plan: where the chunks' tokens stand.
    """

    group: RequestGroup
    chunks: Chunks
    plan: PagedPlan

    @property
    def part(self) -> PassPart:
        """Their part of the target's pass: the logits of each chunk's last row are wanted."""
        return PassPart(self.chunks.tokens, self.plan, last_rows=self.chunks.last_rows)


@attrs.frozen(eq=False, kw_only=True)
class NodeRows:
    """The rows of a decode step.

    Attributes:
        plan: where the drafts' nodes stand.
        tree: of the draft, on its way to the host, if a request has a grammar.
    """

    group: RequestGroup
    drafted: Drafted
    plan: PagedPlan
    tree: HostTree | None = None

    @property
    def part(self) -> PassPart:
        """Their part of the target's pass: the logits of all rows are wanted."""
        return PassPart(self.drafted.tokens, self.plan, draft=self.drafted.draft)

    def padded(self, draft: Draft, plan: PagedPlan) -> Self:
        """Return them in the tensors of a recorded pass, for which the batch is padded.

        Args:
            plan: of the nodes as chains.
        """
        rows, starts = plan.req_indices, plan.starts
        drafted = attrs.evolve(self.drafted, req_indices=rows, seq_lens=starts, draft=draft)
        return attrs.evolve(self, drafted=drafted, plan=plan.of_nodes(draft))
