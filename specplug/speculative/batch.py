"""``Batch``: the requests of a step, as hooks see them."""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
from torch import Tensor

if TYPE_CHECKING:
    from specplug.speculative.runtime import AttentionPlan


class ForwardMode(enum.Enum):
    """What a pass is for."""

    PREFILL = "prefill"
    DECODE = "decode"
    IDLE = "idle"


class RequestView(Protocol):
    """The part of a request that a plugin may read. Nothing in it can be changed."""

    @property
    def request_id(self) -> str:
        """Its name, unique in the run."""

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        """Its prompt."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Its prompt, and all that the host knows of its output: with overlap, not that of the
        step that is running. While it is prefilled that is everything, because a request that was
        retracted is prefilled with its output so far."""

    @property
    def max_tokens(self) -> int:
        """Most tokens that it may generate."""

    @property
    def draft_state(self) -> Mapping[str, Tensor]:
        """In ``build_disagg_draft_input``: what the instance that prefilled it has exported, CPU
        tensors without a leading size; empty if it gave nothing."""


@attrs.define(eq=False, kw_only=True)
class Batch:
    """The requests of one step: of its prefill, or of its decode step.

    Its tensors are copies, made for the hooks. The views and the plan are good for this step.

    Attributes:
        mode: prefill, decode, or idle (no request; the rank only takes part).
        requests: one view per request, bs of them.
        req_indices: [bs] int64, each request's row in the request table; row 0 is padding.
        seq_lens: [bs] int64, tokens of each request whose KV is committed **before** this step,
            which is the position of its first token in this step.
        chunk_widths: tokens of each request in this prefill, known on the host.
        chunk_ends: how many of each request's ``token_ids`` are prefilled when this chunk is.
        first_chunk: for each request of a prefill, whether it has just got its row: what was kept
            by row is another's, and what lies before the chunk was found in the prefix cache.
        last_chunk: for each request of a prefill, whether the chunk ends its ``token_ids``.
        max_draft_nodes: for each request of a decode step, the most nodes that can be verified, a
            slot each from ``seq_lens`` on. Known on the CPU. At least 1; N or more unless the KV
            pool is short. It binds: of a wider draft the first so many are verified. So draft no
            more, and put the likeliest nodes first. Keys that a draft model writes to later slots
            are lost, and what reads them means nothing.
        greedy: whether every request takes the most likely token, or drafts are to, so that no
            noise is needed.
        is_warm_up: whether the engine runs the step before its first request, so that what the
            hooks launch is compiled and recorded. Its requests are made up: keep nothing of them
            and learn nothing from their tokens. Draft as widely as ``max_draft_nodes`` allows.
        drafts_follow: in ``build_draft_input`` of a decode step, whether ``propose`` is called for
            what it leaves. A host that has stopped drafting for a while says no: then only what
            later steps cannot do without is needed, as a draft model's keys and values are.
        attention: the target pass's plan, in ``build_draft_input``: on a prefill a draft model
            uses it as its own. None before.
    """

    mode: ForwardMode
    requests: Sequence[RequestView]
    req_indices: Tensor
    seq_lens: Tensor
    chunk_widths: tuple[int, ...] = ()
    chunk_ends: tuple[int, ...] = ()
    first_chunk: tuple[bool, ...] = ()
    last_chunk: tuple[bool, ...] = ()
    max_draft_nodes: tuple[int, ...] = ()
    greedy: bool = True
    is_warm_up: bool = False
    drafts_follow: bool = True
    attention: AttentionPlan | None = None

    @property
    def size(self) -> int:
        """bs."""
        return len(self.requests)

    @property
    def is_prefill(self) -> bool:
        """Whether this is a prefill (chunk), not a decode step."""
        return self.mode is ForwardMode.PREFILL
