"""The order of the hooks in a step, written once for whoever hosts an algorithm.

The embedded engine drives it, and so can any other engine (docs/hosting.md has one of a page)::

    a decode step      begin_decode     resolve -> propose -> narrow
                       (the host)       runs the target's pass over the nodes, samples at each
                       finish_decode    verify -> Host.keep_accepted -> compact -> feed
                       accept, feed     the same, where only the core verifies
    a prefill chunk    (the host)       runs the target's pass over it, samples after it
                       finish_prefill   shift the tokens by one -> extend
    both of them       extend, feed     Host.deliver -> build_draft_input -> publish, stash
    received prefills  receive          build_disagg_draft_input -> publish, stash
    an idle rank       idle             verify -> fixup_idle -> publish, stash, of no request

Nothing here reads device data on the CPU. All of it runs on the current stream, in the
``torch.inference_mode`` that the host has entered. It knows no request, cache, sampler or grammar.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeVar

import attrs
import torch
from torch import Tensor

from specplug.speculative.batch import Batch, ForwardMode, RequestView
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.host_copy import upload
from specplug.speculative.rotation import chunk_tails, rotate_chunks
from specplug.speculative.runtime import Runtime
from specplug.speculative.target_output import CommittedOutput, TargetOutput, compact
from specplug.speculative.verify import VerifyOutput, verify_tree


@attrs.define(eq=False, kw_only=True)
class Half:
    """The requests of a step that decode, or those that prefill. A host may subclass it, to keep
    more with it.

    Its tensors are the host's own. Hooks get those of ``batch``, which are copies: what a hook
    writes to them reaches nobody else.

    Attributes:
        req_indices: [bs] int64, each request's row in the request table.
        lent_rows: two copies of them, for hooks, of a host that keeps ``req_indices`` for later
            steps: ``batch`` gets one, and ``publish`` and ``stash`` of the future map the other.
            One is enough for a half that is never fed.
            Without them ``batch`` gets a new copy, and the future map ``req_indices`` themselves.
        seq_lens: [bs] int64, committed tokens of each request before this step. ``begin_decode``
            sets it for a decode step, the host for all else.
        tokens: [R] int64, the rows of the target's pass: a draft's nodes, set by
            ``begin_decode``, or a prefill's prompt tokens, set by the host.
        batch: what hooks see. ``begin_decode`` makes it for a decode step, the host for all else.
        draft: what the target verifies; None on a prefill.
        report: [bs, C + 1] int64, of a decode step whose draft the order of hooks has verified: the
            target's tokens along each accepted path, and after them its accept length. A host
            copies it in the same step, since a recorded one writes there again.
        is_warm_up: what ``Batch.is_warm_up`` is for its hooks. Set by the host.
    """

    req_indices: Tensor
    lent_rows: list[Tensor] = attrs.field(factory=list)
    seq_lens: Tensor = attrs.field(init=False)
    tokens: Tensor = attrs.field(init=False)
    batch: Batch = attrs.field(init=False)
    draft: Draft | None = None
    report: Tensor | None = None
    is_warm_up: bool = False

    def lend_req_indices(self) -> Tensor:
        """Return a copy of ``req_indices`` for ``batch``."""
        return self.lent_rows.pop() if self.lent_rows else self.req_indices.clone()


H = TypeVar("H", bound=Half)
H_contra = TypeVar("H_contra", bound=Half, contravariant=True)


class Host(Protocol[H_contra]):
    """What a host does its own way in the middle of a step."""

    def keep_accepted(self, half: H_contra, verified: VerifyOutput) -> None:
        """Move the KV of the accepted nodes to the slots from ``half.seq_lens`` on, in the order of
        the path (a chain's is there already), and count their tokens where penalties need that."""

    def deliver(self, half: H_contra, output: CommittedOutput) -> None:
        """Start copying this step's outputs to the CPU, and set ``half.batch.attention``. After
        this the algorithm may write to the tensors of ``output`` and of the plan."""


class HookOrder(Generic[H]):
    """Calls the hooks of a step in their order.

    Args:
        runtime: of the run.
        hooks: of the run's plugins.
        future_map: the algorithm's. It may be of a subclass, and hooks may write to it: so the
            committed lengths and bonus tokens that count are kept in a map of the core's own.
        host: what the host does its own way.

    Attributes:
        committed: the core's own map, out of every plugin's reach: lengths and bonus tokens alone.
            A host that verifies by a kernel of its own may publish there by it.
    """

    def __init__(
        self, runtime: Runtime, hooks: HookCalls, future_map: FutureMap, host: Host[H]
    ) -> None:
        self._runtime = runtime
        self._hooks = hooks
        self._future_map = future_map
        self._host = host
        self.committed = FutureMap(runtime.req_table_size, runtime.device)
        # A subclass may count the steps, or copy their tokens: it hears of each one.
        self._hears_all = not is_plain(future_map)

    def begin_decode(
        self,
        half: H,
        requests: Sequence[RequestView],
        max_draft_nodes: tuple[int, ...],
        *,
        greedy: bool,
    ) -> Draft:
        """Return what the target is to verify for each request; ``half`` holds it too.

        Args:
            requests: bs views of the batch's requests.
            max_draft_nodes: nodes of each request that can be verified, at least 1.
            greedy: whether every request takes its most likely token. Where the host's noise
                cannot be foreseen, drafts are made as if it were so.
        """
        req_indices = half.lend_req_indices()
        both = self._hooks.resolve_with(self.committed, self._future_map, half.req_indices)
        if both is None:
            own = self.committed.resolve(half.req_indices)
            both = own, self._hooks.resolve(self._future_map, req_indices)
        (half.seq_lens, known), (seq_lens, draft_input) = both
        half.batch = Batch(
            mode=ForwardMode.DECODE,
            requests=requests,
            req_indices=req_indices,
            seq_lens=seq_lens,
            max_draft_nodes=max_draft_nodes,
            greedy=greedy or not self._runtime.host.foreseeable_noise,
            is_warm_up=half.is_warm_up,
        )
        draft = self._hooks.propose(
            self._runtime, half.batch, draft_input, roots=known.bonus_tokens
        )
        half.draft = draft = draft.narrow(max_draft_nodes)
        half.tokens = draft.flat_tokens
        return draft

    def finish_decode(
        self, half: H, predict: Tensor, logits: Tensor, per_node: Mapping[str, Tensor]
    ) -> None:
        """Accept what the target agrees with, and feed the draft model.

        Args:
            predict: [T] int64, the token that the host sampled at each node.
            logits: [T, V] of the target's pass.
            per_node: named tensors of leading size T. Plugins may add to them, and replace none.
        """
        assert half.draft is not None
        output = TargetOutput(predict=predict, logits=logits, per_node=dict(per_node))
        verified = self._hooks.verify(self._runtime, half.batch, half.draft, output)
        self.feed(half, *self._commit(half, verified, {**output.per_node, **per_node}))

    @property
    def core_verifies(self) -> bool:
        """Whether only the core implements ``verify``: ``accept`` and ``feed`` together are then
        ``finish_decode``."""
        return self._hooks.core_verifies

    def accept(
        self, half: H, predict: Tensor, per_node: Mapping[str, Tensor]
    ) -> tuple[Tensor, CommittedOutput]:
        """Verify by the core, and commit what is accepted. No plugin is called and nothing of the
        host is read but ``half``'s draft and the forms of tensors, so it can be recorded.

        Args:
            predict, per_node: as in ``finish_decode``.

        Returns:
            What ``feed`` takes.
        """
        assert half.draft is not None
        return self._commit(half, verify_tree(half.draft, predict), per_node)

    def _commit(
        self, half: H, verified: VerifyOutput, per_node: Mapping[str, Tensor]
    ) -> tuple[Tensor, CommittedOutput]:
        """Keep what is accepted; return the lengths after the step, and what was committed."""
        self._host.keep_accepted(half, verified)
        committed = compact(verified, half.tokens, per_node)
        seq_lens, half.report = self.committed.publish_step(
            half.req_indices, half.seq_lens, committed
        )
        return seq_lens, committed

    def finish_prefill(
        self, half: H, last_rows: Tensor, predict: Tensor, per_node: Mapping[str, Tensor]
    ) -> None:
        """Feed the draft model a prefill's chunks.

        Args:
            last_rows: [bs] int64, the row of each chunk's last token.
            predict: [bs] int64, the token that the host sampled after each chunk. Of a chunk that
                does not end its prompt it is not used: the next prompt token follows there.
            per_node: named tensors of leading size R.
        """
        widths = upload(half.batch.chunk_widths, last_rows.device)
        tails = chunk_tails(half.batch, 1, predict)
        output = CommittedOutput(
            next_tokens=rotate_chunks(half.tokens, last_rows, tails),
            own_tokens=half.tokens,
            per_node=per_node,
            last_rows=last_rows,
            accept_lens=widths,
            bonus_tokens=tails,
        )
        self.extend(half, half.seq_lens + widths, output)

    def extend(self, half: H, seq_lens: Tensor, output: CommittedOutput) -> None:
        """Feed the draft model committed tokens, and leave the next step what it starts from.

        A host that verifies by itself calls this in the place of ``finish_decode``, or ``feed``
        where it has published to ``committed``.

        Args:
            seq_lens: [bs] int64, committed tokens of each request after this step.
        """
        self.committed.publish(half.req_indices, seq_lens, output)
        self.feed(half, seq_lens, output)

    def feed(self, half: H, seq_lens: Tensor, output: CommittedOutput) -> None:
        """Deliver what is committed and published, and feed it to the draft model, which may draft
        its first tokens at that: as if all were greedy where the noise cannot be foreseen."""
        self._host.deliver(half, output)
        if not self._runtime.host.foreseeable_noise:
            half.batch.greedy = True
        made = self._hooks.build_draft_input(self._runtime, half.batch, output, self._future_map)
        if not (half.batch.drafts_follow or made.state or self._hears_all):
            return  # nobody resolves this step
        rows = half.lent_rows.pop() if half.lent_rows else half.req_indices
        self._hooks.publish_and_stash(self._future_map, rows, seq_lens, output, made)

    def export_draft_state(self, half: H) -> Mapping[str, Tensor | None]:
        """Return the draft state of prefilled requests, after ``finish_prefill``: named tensors of
        leading size bs, for the instance that decodes them."""
        return self._hooks.export_draft_state(
            self._runtime, half.batch, self._future_map, req_indices=half.req_indices
        )

    def receive(self, half: H, roots: Tensor) -> None:
        """Make the draft input of requests that another instance has prefilled, once their KV is
        in the pool. ``half.tokens`` [bs] are the last tokens of their prompts.

        Args:
            roots: [bs] int64, the token after each prompt.
        """
        order = torch.arange(len(roots), device=roots.device)
        output = CommittedOutput(
            next_tokens=roots,
            own_tokens=half.tokens,
            last_rows=order,
            accept_lens=torch.ones_like(order),
            bonus_tokens=roots,
        )
        self.committed.publish(half.req_indices, half.seq_lens, output)
        made = self._hooks.build_disagg_draft_input(
            self._runtime, half.batch, roots.clone(), self._future_map
        )
        rows = half.req_indices.clone()  # the host still needs its own
        self._hooks.publish_and_stash(self._future_map, rows, half.seq_lens, output, made)

    def idle(self, logits: Tensor) -> None:
        """Take part in a step without a request: verify gets an empty batch, nothing captured.

        Args:
            logits: [0, V].
        """
        nothing = torch.empty(0, dtype=torch.int64, device=logits.device)
        batch = Batch(
            mode=ForwardMode.IDLE, requests=(), req_indices=nothing.clone(), seq_lens=nothing
        )
        draft = Draft.chain(nothing.unsqueeze(1))
        output = TargetOutput(predict=nothing, logits=logits)
        committed = compact(self._hooks.verify(self._runtime, batch, draft, output), nothing, {})
        empty = DraftInput(bonus_tokens=committed.bonus_tokens)
        made = self._hooks.fixup_idle(self._runtime, batch, empty)
        self._hooks.publish_and_stash(self._future_map, nothing, nothing, committed, made)
