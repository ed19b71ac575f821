"""What is known of a step, stage by stage. Each value is frozen, and made of the one before it.

    Scheduled   who decodes                    made by the host
    Drafted     + lengths, the draft           HookOrder.draft
    Verified    + the accepted nodes           HookOrder.verify, of the target's token at each node
    Committed   what later steps start from    HookOrder.commit
    (fed)       the draft model has it too     HookOrder.feed

    Chunks      who is prefilled, and what     made by the host
    Committed   what later steps start from    HookOrder.commit_chunks, of the token after each
    (fed)                                      HookOrder.feed

Their tensors are the host's own and the core's. Hooks get those of a ``Batch``, which are copies:
what a hook writes to them reaches nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import attrs
from torch import Tensor

from specplug.speculative.batch import Batch, RequestView
from specplug.speculative.draft import Draft
from specplug.speculative.target_output import CommittedOutput
from specplug.speculative.verify import VerifyOutput


@attrs.frozen(eq=False, kw_only=True)
class Scheduled:
    """Requests that take a decode step.

    Attributes:
        req_indices: [bs] int64, each request's row in the request table.
        requests: bs views of them, for hooks.
        max_draft_nodes: the most nodes of each that can be verified, at least 1.
        greedy: whether every request takes its most likely token.
        is_warm_up: what ``Batch.is_warm_up`` is for the hooks of the step.
        batch_rows: a copy of ``req_indices`` for hooks; None: it is made.
        map_rows: as in ``Half``. A host that keeps ``req_indices`` for later steps gives both.
    """

    req_indices: Tensor
    requests: Sequence[RequestView]
    max_draft_nodes: tuple[int, ...]
    greedy: bool = True
    is_warm_up: bool = False
    batch_rows: Tensor | None = None
    map_rows: Tensor | None = None


@attrs.frozen(eq=False, kw_only=True)
class Half:
    """The requests of a step that decode, or those that prefill.

    Attributes:
        req_indices: [bs] int64, each request's row in the request table.
        batch: what hooks see of them.
        map_rows: ``req_indices`` as the future map's ``publish`` and ``stash`` get them, which may
            write there; None: they get ``req_indices``.
    """

    req_indices: Tensor
    batch: Batch
    map_rows: Tensor | None = None


@attrs.frozen(eq=False, kw_only=True)
class Drafted(Half):
    """What the target is to verify.

    Attributes:
        seq_lens: [bs] int64, committed tokens of each request before this step. Node i of a request
            has the slot ``seq_lens + i``.
        draft: T nodes of all requests; its roots are the core's.
    """

    seq_lens: Tensor
    draft: Draft

    @property
    def tokens(self) -> Tensor:
        """[T] int64, the nodes: the rows of the target's pass."""
        return self.draft.flat_tokens


@attrs.frozen(eq=False, kw_only=True)
class Chunks(Half):
    """Prompt tokens that are prefilled. ``batch`` says where each chunk begins and ends.

    Attributes:
        seq_lens: [bs] int64, tokens of each request with KV before this step.
        tokens: [R] int64, the chunks one after the other: the rows of the target's pass.
        last_rows: [bs] int64, the row of each chunk's last token.
    """

    seq_lens: Tensor
    tokens: Tensor
    last_rows: Tensor


@attrs.frozen(eq=False, kw_only=True)
class Verified:
    """What the target accepts. The host now moves the KV of a tree's accepted nodes to the slots
    from ``drafted.seq_lens`` on, in the order of the path; a chain's is there already.

    Attributes:
        drafted: what was verified.
        accepted: of its nodes.
        per_node: all outputs by name, of leading size T: the target's, and what plugins add.
    """

    drafted: Drafted
    accepted: VerifyOutput
    per_node: Mapping[str, Tensor]


class Committed(NamedTuple):
    """What a step has committed. It has tensors alone, so that what makes it can be recorded.

    Attributes:
        seq_lens: [bs] int64, committed tokens of each request after this step.
        output: the committed rows, which the draft model is fed next.
        report: [bs, C + 1] int64, after a decode step: the target's tokens along each accepted
            path, and after them its accept length. A host copies it in the same step: a recorded
            one writes there again. None after a prefill, or where the host has verified.
    """

    seq_lens: Tensor
    output: CommittedOutput
    report: Tensor | None = None
