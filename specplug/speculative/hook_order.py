"""The stages of a step, the order of its hooks and what they see of it, once for all hosts.

The embedded engine drives it, and so can any other engine (docs/hosting.md has one of a page)::

    a decode step      draft            foresee_drafts -> plan_drafts -> resolve -> propose
                                        -> prune, narrow, cut to the budget
                       (the host)       runs the target's pass over the nodes, samples at each
                       verify           verify
                       (the host)       moves the KV of accepted nodes
                       commit           compact -> publish to the core's own map
                       (the host)       starts copying tokens to the CPU
                       feed             build_draft_input -> publish, stash
    a prefill chunk    (the host)       runs the target's pass over it, samples after it
                       commit_chunks    shift the tokens by one -> publish to the core's own map
                       (the host)       starts copying tokens to the CPU
                       feed             build_draft_input -> publish, stash
    received prefills  receive          build_disagg_draft_input -> publish, stash
    an idle rank       idle             verify -> fixup_idle -> publish, stash, of no request

Each call takes the stage that the one before it has made, a frozen value::

    Scheduled   the requests that decode       made by the host
    Drafted     + lengths, the draft           HookOrder.draft
    Verified    + the accepted nodes           HookOrder.verify, of the target's token at each node
    Committed   what later steps start from    HookOrder.commit
    (fed)       the draft model has it too     HookOrder.feed

    Chunks      what is prefilled              made by the host
    Committed   what later steps start from    HookOrder.commit_chunks, of the token after each
    (fed)                                      HookOrder.feed

Their tensors are the host's own and the core's. Hooks get those of a ``Batch``, which are copies:
what a hook writes to them reaches nothing else. Nothing here reads device data on the CPU. All of
it runs on the current stream, in the ``torch.inference_mode`` that the host has entered. It knows
no request, cache, sampler or grammar.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import attrs
import torch
from torch import Tensor

from specplug.speculative.calibration import Calibration
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_cuts import cut_to_budget, narrow
from specplug.speculative.draft_plan import (
    UNDRAFTED,
    DraftChoices,
    DraftPlan,
    DraftWish,
    ForeseenDrafts,
    Hindsight,
)
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.host_copy import upload
from specplug.speculative.parts_future_map import PartsFutureMap
from specplug.speculative.planned_drafts import (
    Proposer,
    drafters_of,
    drafting_hooks,
    evolved,
    late_feeds,
    plans_within,
    propose_planned,
)
from specplug.speculative.rotation import chunk_tails, rotate_chunks
from specplug.speculative.runtime import AttentionPlan, Runtime
from specplug.speculative.several_worker import SeveralWorker
from specplug.speculative.verify import (
    CommittedOutput,
    TargetOutput,
    VerifyOutput,
    compact,
    verify_tree,
)

# What hooks see of a step


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
    def cache_salt(self) -> str | None:
        """Its tenant: text that is kept after a request is for requests of an equal salt. None: it
        was given none, or the host does not say (``HostCapabilities.cache_salts``)."""

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
        max_draft_slots: for each request of a decode step, the slots from ``seq_lens`` on that a
            draft model may write to; (): as many as ``max_draft_nodes`` says, which is less where
            fewer nodes are wanted than there is room for.
        drafters: for each request of a decode step of several algorithms (``A,B``), the place of
            the one that drafts for it, among their names; -1: none does. (): the first one does.
        greedy: whether every request takes the most likely token, or drafts are to, so that no
            noise is needed.
        is_warm_up: whether the engine runs the step before its first request, so that what the
            hooks launch is compiled and recorded. Its requests are made up: keep nothing of them
            and learn nothing from their tokens. Draft as widely as ``max_draft_nodes`` allows.
        drafts_follow: in ``build_draft_input``, whether ``propose`` is called for what it leaves. A
            host that has stopped drafting for a while says no, and so does the core where a part is
            fed late: then only what later steps cannot do without is needed, as a draft model's
            keys and values are. It is fed again before it drafts.
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
    max_draft_slots: tuple[int, ...] = ()
    drafters: tuple[int, ...] = ()
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


# The stages of a step


@attrs.frozen(eq=False, kw_only=True)
class Scheduled:
    """Requests that take a decode step.

    Attributes:
        req_indices: [bs] int64, each request's row in the request table.
        requests: bs views of them, for hooks.
        max_draft_nodes: the most nodes of each that can be verified, at least 1.
        verify_budget: the most nodes of all together, at least bs; None: no limit. A host that sets
            it takes drafts whose widths are known on the device alone.
        greedy: whether every request takes its most likely token.
        wishes: what each request asks for of its drafts; (): nothing.
        drafter: who drafts for all, as in ``DraftPlan.who``: for the warm-up alone. None: it is
            chosen.
        is_warm_up: what ``Batch.is_warm_up`` is for the hooks of the step.
        batch_rows: a copy of ``req_indices`` for hooks; None: it is made.
        map_rows: as in ``Half``. A host that keeps ``req_indices`` for later steps gives both.
        prune: leaves out nodes of a draft that the host knows to be forbidden, before it is cut;
            None: it knows of none in time.
    """

    req_indices: Tensor
    requests: Sequence[RequestView]
    max_draft_nodes: tuple[int, ...]
    verify_budget: int | None = None
    wishes: tuple[DraftWish, ...] = ()
    drafter: int | None = None
    greedy: bool = True
    is_warm_up: bool = False
    batch_rows: Tensor | None = None
    map_rows: Tensor | None = None
    prune: Callable[[Draft], Draft] | None = None


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
        proposed: nodes of each request before the cuts, the root included.
        drafters: what drafted for each request, by name; ``UNDRAFTED`` where nothing did.
        planned: the most nodes that were to be drafted for each, the root included.
        plan: by which they were; None: nothing was chosen.
        draft_seconds: the host's time of drafting alone.
    """

    seq_lens: Tensor
    draft: Draft
    proposed: tuple[int, ...]
    drafters: tuple[str, ...] = ()
    planned: tuple[int, ...] = ()
    plan: DraftPlan | None = None
    draft_seconds: float = 0.0

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
        chances: [bs, N] float32, how likely each node was to be accepted, and whether it was, as
            ``Calibration.observe`` says; None where ``report`` is, or the draft has no scores.
    """

    seq_lens: Tensor
    output: CommittedOutput
    report: Tensor | None = None
    chances: Tensor | None = None


class HookOrder:
    """Calls the hooks of a step in their order.

    Args:
        runtime: of the run.
        hooks: of the run's plugins.
        future_map: the algorithm's. It may be of a subclass, and hooks may write to it: so the
            committed lengths and bonus tokens that count are kept in a map of the core's own.

    Attributes:
        committed: the core's own map, out of every plugin's reach: lengths and bonus tokens alone.
            A host that verifies by a kernel of its own may publish there by it.
        calibration: of the scores of drafts.
        deepest: the most drafted tokens that a step can accept of a request.
    """

    def __init__(self, runtime: Runtime, hooks: HookCalls, future_map: FutureMap) -> None:
        self._runtime = runtime
        self._hooks = hooks
        self._future_map = future_map
        self.committed = FutureMap(runtime.req_table_size, runtime.device)
        if isinstance(future_map, PartsFutureMap) and not hooks.reads_map:
            future_map.read_ends(self.committed)
        self.calibration = Calibration(runtime.req_table_size, runtime.device)
        config = runtime.config
        self.deepest = min(config.num_steps, config.num_draft_tokens - 1)
        # Those that can draft, and the most nodes of each one's drafts.
        self._drafters = drafters_of(runtime)
        self._plans_within = plans_within(runtime)
        self._drafting = drafting_hooks(runtime) or [hooks]
        self._late = late_feeds(runtime)
        # A subclass may count the steps, or copy their tokens: it hears of each one.
        self._hears_all = not is_plain(future_map)

    @property
    def core_verifies(self) -> bool:
        """Whether only the core implements ``verify``: then ``verify`` and ``commit`` call no
        plugin, and read nothing but tensors and the draft's form: they can be recorded."""
        return self._hooks.core_verifies

    # A decode step

    def draft(self, scheduled: Scheduled) -> Drafted:
        """Return what the target is to verify for each request. Where nobody drafts no plugin but
        the one that plans is called, and the target verifies the roots, as in plain decoding. Where
        the host's noise cannot be foreseen, drafts are made as if all requests were greedy."""
        rows, batch_rows = scheduled.req_indices, scheduled.batch_rows
        if batch_rows is None:
            batch_rows = rows.clone()
        plan = both = None
        if self._is_planned(scheduled):  # where nobody drafts the algorithm's state is not read
            own = self.committed.resolve(rows)
            batch = self._batch(scheduled, batch_rows, own[0].clone())
            plan = self._plan(batch, scheduled)
        else:
            both = self._hooks.resolve_with(self.committed, self._future_map, rows)
            own = self.committed.resolve(rows) if both is None else both[0]
        starts, known = own
        began, draft_seconds = time.perf_counter(), 0.0
        if plan is not None and plan.drafts_nothing:
            draft = Draft.chain(known.bonus_tokens.unsqueeze(1))
        else:
            seq_lens, draft_input = (
                self._hooks.resolve(self._future_map, batch_rows) if both is None else both[1]
            )
            # The core's own lengths place the nodes; the algorithm's are what its hooks see.
            batch = self._batch(scheduled, batch_rows, seq_lens)
            draft = self._propose(batch, draft_input, plan, known.bonus_tokens)
            draft_seconds = time.perf_counter() - began
        most = scheduled.max_draft_nodes if plan is None else plan.most_nodes
        proposed = draft.widths or (draft.width,) * len(draft.tokens)
        if scheduled.prune is not None:
            draft = scheduled.prune(draft)
        if draft.scores is not None:
            self.calibration.count_step()
        return Drafted(
            req_indices=rows,
            batch=batch,
            map_rows=scheduled.map_rows,
            seq_lens=starts,
            draft=self._cut(draft, most, _budget(plan, scheduled), rows),
            proposed=proposed,
            drafters=self._names(plan, len(starts)),
            planned=most,
            plan=plan,
            draft_seconds=draft_seconds,
        )

    def _batch(self, scheduled: Scheduled, rows: Tensor, seq_lens: Tensor) -> Batch:
        """Return what hooks see of the requests, [bs] rows and lengths, before they are drafted
        for."""
        return Batch(
            mode=ForwardMode.DECODE,
            requests=scheduled.requests,
            req_indices=rows,
            seq_lens=seq_lens,
            max_draft_nodes=scheduled.max_draft_nodes,
            greedy=scheduled.greedy or not self._runtime.host.foreseeable_noise,
            is_warm_up=scheduled.is_warm_up,
        )

    def _names(self, plan: DraftPlan | None, bs: int) -> tuple[str, ...]:
        """Return what drafts for each request."""
        names = tuple(self._drafters)
        if plan is None:
            return names[:1] * bs
        return tuple(UNDRAFTED if index < 0 else names[index] for index in plan.who)

    def _is_planned(self, scheduled: Scheduled) -> bool:
        """Return whether it is chosen who drafts. Else the first algorithm does for all, as much as
        there is room for."""
        return scheduled.drafter is not None or self._asks(scheduled) or bool(scheduled.wishes)

    def _asks(self, scheduled: Scheduled) -> bool:
        """Return whether a plugin chooses."""
        return self._hooks.plans_drafts and not scheduled.is_warm_up

    def _plan(self, batch: Batch, scheduled: Scheduled) -> DraftPlan:
        """Return who drafts for each request, and how much."""
        most, wishes = scheduled.max_draft_nodes, scheduled.wishes
        if scheduled.drafter is not None:
            return DraftPlan(who=(scheduled.drafter,) * len(most), most_nodes=most)
        if not self._asks(scheduled):
            choices = DraftChoices.of(self._drafters, most, wishes, scheduled.verify_budget)
            return choices.default()
        choices = DraftChoices.of(
            self._drafters,
            most,
            wishes,
            scheduled.verify_budget,
            takes_budget=self._runtime.host.verify_budget,
        )
        for hooks in self._drafting:
            hooks.begin_plan()
        kept = self._hooks.kept_plan(batch, choices)
        if kept is not None:
            if kept.as_foreseen is not None:
                self._foreseen(batch)
            return kept
        told = attrs.evolve(
            choices, foreseen=self._foreseen(batch), hindsight=tuple(self._hindsight())
        )
        return self._hooks.plan_drafts(self._runtime, batch, told)

    def _foreseen(self, batch: Batch) -> tuple[ForeseenDrafts, ...]:
        """Return what each that can draft says that it would."""
        worker = self._runtime.worker
        if isinstance(worker, SeveralWorker):
            return tuple(part.foresee_drafts(batch.requests) for part in worker.parts)
        return (self._hooks.foresee_drafts(self._runtime, batch.requests),)

    def _hindsight(self) -> Iterator[Hindsight]:
        """Yield what each that can draft would have had right, as far as that is new."""
        for number, hooks in enumerate(self._drafting):
            yield from hooks.hindsight(self._runtime, number)

    def _propose(
        self, batch: Batch, draft_input: DraftInput, plan: DraftPlan | None, roots: Tensor
    ) -> Draft:
        """Return what is drafted as planned: for some requests at least.

        Args:
            roots: [bs] int64, the core's own.
        """
        hooks, runtime = self._hooks, self._runtime
        for each in self._drafting:
            each.as_foreseen = None if plan is None else plan.as_foreseen
        if plan is None:
            return hooks.propose(runtime, batch, draft_input, roots=roots)
        batch.max_draft_nodes, batch.max_draft_slots = plan.most_nodes, batch.max_draft_nodes
        if self._plans_within:
            batch.drafters = plan.who
            return hooks.propose(runtime, batch, draft_input, roots=roots)

        def propose(part: Batch, given: DraftInput) -> Draft:
            lent = attrs.evolve(given, bonus_tokens=given.bonus_tokens.clone())
            return hooks.propose(runtime, part, lent, roots=given.bonus_tokens)

        planned = evolved(batch, drafters=plan.who)
        own = attrs.evolve(draft_input, bonus_tokens=roots)
        return propose_planned(planned, own, [Proposer(propose, lambda name: True)])

    def _cut(self, draft: Draft, most: tuple[int, ...], budget: int | None, rows: Tensor) -> Draft:
        """Cut a draft to what each request has room for, and to the step's budget."""
        if draft.is_wider(most):  # a chain's first nodes survive most likely
            survival = None if draft.is_chain else self.calibration.survival(draft, rows)
            draft = narrow(draft, most, survival)
        if budget is not None and budget < draft.total:
            draft = cut_to_budget(draft, budget, self.calibration.survival(draft, rows))
        return draft

    def verify(
        self, drafted: Drafted, predict: Tensor, logits: Tensor, per_node: Mapping[str, Tensor]
    ) -> Verified:
        """Return what is accepted of the drafts.

        Args:
            predict: [T] int64, the token that the host sampled at each node.
            logits: [T, V] of the target's pass. A plugin's ``verify`` may write to them.
            per_node: named tensors of leading size T. Plugins may add to them, and replace none.
        """
        if self._hooks.core_verifies:
            accepted = verify_tree(drafted.draft, predict)
            return Verified(drafted=drafted, accepted=accepted, per_node=per_node)
        output = TargetOutput(predict=predict, logits=logits, per_node=dict(per_node))
        accepted = self._hooks.verify(self._runtime, drafted.batch, drafted.draft, output)
        every = {**output.per_node, **per_node}
        return Verified(drafted=drafted, accepted=accepted, per_node=every)

    def commit(self, verified: Verified) -> Committed:
        """Compact the accepted paths, and publish how far each request is."""
        drafted = verified.drafted
        output = compact(verified.accepted, drafted.tokens, verified.per_node)
        seq_lens, report = self.committed.publish_step(
            drafted.req_indices, drafted.seq_lens, output
        )
        chances = self.calibration.observe(drafted.draft, drafted.req_indices, verified.accepted)
        return Committed(seq_lens, output, report, chances)

    def publish(self, half: Half, seq_lens: Tensor, output: CommittedOutput) -> Committed:
        """Publish how far each request is, in the place of ``verify`` and ``commit`` where the host
        verifies by itself.

        Args:
            seq_lens: [bs] int64, committed tokens of each request after this step.
            output: the committed rows.
        """
        self.committed.publish(half.req_indices, seq_lens, output)
        return Committed(seq_lens, output)

    # A prefill

    def commit_chunks(
        self, chunks: Chunks, predict: Tensor, per_node: Mapping[str, Tensor]
    ) -> Committed:
        """Shift the tokens of chunks by one, and publish how far each request is.

        Args:
            predict: [bs] int64, the token that the host sampled after each chunk. Of a chunk that
                does not end its prompt it is not used: the next prompt token follows there.
            per_node: named tensors of leading size R.
        """
        widths = upload(chunks.batch.chunk_widths, chunks.last_rows.device)
        tails = chunk_tails(chunks.batch, 1, predict)
        output = CommittedOutput(
            next_tokens=rotate_chunks(chunks.tokens, chunks.last_rows, tails),
            own_tokens=chunks.tokens,
            per_node=per_node,
            last_rows=chunks.last_rows,
            accept_lens=widths,
            bonus_tokens=tails,
        )
        return self.publish(chunks, chunks.seq_lens + widths, output)

    # The end of both

    def feed(self, half: Half, committed: Committed, plan: AttentionPlan | None = None) -> None:
        """Feed the draft model what is committed, and leave the next step what it starts from. The
        algorithm may write to the tensors of ``committed.output`` and ``plan`` from now on. It may
        draft its first tokens here: as if all were greedy where the noise cannot be foreseen.

        Args:
            plan: of the target's rows; ``batch.attention``. Needed on a prefill.
        """
        batch, output = half.batch, committed.output
        batch.attention = plan
        if not self._runtime.host.foreseeable_noise:
            batch.greedy = True
        made = self._hooks.build_draft_input(self._runtime, batch, output, self._future_map)
        if not (batch.drafts_follow or made.state or self._hears_all):
            return  # no step resolves this one
        rows = half.req_indices if half.map_rows is None else half.map_rows
        self._hooks.publish_and_stash(self._future_map, rows, committed.seq_lens, output, made)

    # What waits to be fed

    def learn(self, request_ids: Sequence[str], accept_lens: Sequence[int]) -> None:
        """Take what a decode step has accepted, once the host knows it: tokens of each request, the
        bonus token included. Steps are told in the order in which they were launched."""
        for late in self._late:
            late.learn(request_ids, accept_lens)

    def caught_up(self) -> tuple[str, ...]:
        """Return the algorithms that were fed several steps at once since this was last asked."""
        late = [each for each in self._late if each.has_caught_up]
        for each in late:
            each.has_caught_up = False
        return tuple(dict.fromkeys(each.name for each in late))

    def leave(self, request_id: str) -> int:
        """Forget a request that gives up its slots, and return of how many of its last committed
        tokens, as far as the host knows them, a draft model lacks the keys: pages with these
        are nobody else's."""
        return max((late.leave(request_id) for late in self._late), default=0)

    def lacking(self, request_id: str) -> int:
        """Return the same of one that keeps its slots."""
        return max((late.lacking(request_id) for late in self._late), default=0)

    def check(self, running: Collection[str]) -> None:
        """Assert that nothing is kept of requests other than these."""
        for late in self._late:
            assert set(running).issuperset(late.waiting), (
                "what an ended request was to be fed is kept"
            )

    # Disaggregation, and ranks without a request

    def export_draft_state(self, half: Half) -> Mapping[str, Tensor | None]:
        """Return the draft state of prefilled requests that were fed: named tensors of leading size
        bs, for the instance that decodes them."""
        return self._hooks.export_draft_state(
            self._runtime, half.batch, self._future_map, req_indices=half.req_indices
        )

    def receive(self, half: Half, seq_lens: Tensor, last_tokens: Tensor, roots: Tensor) -> None:
        """Make the draft input of requests that another instance has prefilled, once their KV is
        in the pool.

        Args:
            seq_lens: [bs] int64, tokens of each prompt.
            last_tokens: [bs] int64, the last token of each prompt.
            roots: [bs] int64, the token after each prompt.
        """
        order = torch.arange(len(roots), device=roots.device)
        output = CommittedOutput(
            next_tokens=roots,
            own_tokens=last_tokens,
            last_rows=order,
            accept_lens=torch.ones_like(order),
            bonus_tokens=roots,
        )
        self.publish(half, seq_lens, output)
        made = self._hooks.build_disagg_draft_input(
            self._runtime, half.batch, roots.clone(), self._future_map
        )
        rows = half.req_indices.clone()  # the host still needs its own
        self._hooks.publish_and_stash(self._future_map, rows, seq_lens, output, made)

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


def _budget(plan: DraftPlan | None, scheduled: Scheduled) -> int | None:
    """Return the most nodes that a step verifies: those of the run, or fewer by its plan."""
    found = scheduled.verify_budget, None if plan is None else plan.verify_budget
    return min((each for each in found if each is not None), default=None)
