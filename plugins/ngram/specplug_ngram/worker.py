"""The n-gram drafter: it drafts the tokens that followed the same tokens before."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from ctypes import PyDLL
from itertools import compress
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specplug import (
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    ForcedTokens,
    ForeseenDrafts,
    RequestView,
    UsageError,
    upload_together,
)
from specplug_ngram.compiled_drafter import CompiledDrafter
from specplug_ngram.config import DEFAULTS, ENGINE, REQUEST, TENANT, NgramSettings
from specplug_ngram.draft_tree import Shape
from specplug_ngram.drafter import Drafter, Drafts, PlainDrafter
from specplug_ngram.forced_drafts import forced_chains, with_forced
from specplug_ngram.index import Index
from specplug_ngram.policy import CPU_COSTS, Costs, StepCost

if TYPE_CHECKING:
    from specplug_ngram.growth import DraftGrower


Forced = Sequence[ForcedTokens | None]
"""What ``Runtime.forced_tokens`` returns."""

LEAST_FORESEEN = 0.02
"""The probability that a node exceeds which is told before anything is drafted."""
MOST_COMMITTED = 16
"""Tokens by which more is foreseen than drafted, at most, where it is a step too early."""


@attrs.define(eq=False)
class RequestState:
    """The state of a running request.

    Attributes:
        owner: the key of its owner in the index; None: the index had no room for it.
        drafted: the drafter's state of the request; None without an owner.
        prompt_read: the number of prompt tokens that are in the history.
        observed: the number of tokens after the prompt that are there.
    """

    owner: Hashable
    drafted: Any
    prompt_read: int = 0
    observed: int = 0


@attrs.frozen(eq=False)
class Foreseen:
    """What was told of a step's requests before a choice was made of their drafts.

    Attributes:
        request_ids: of the requests.
        drafts: of each, as deep as it is likely at all.
        read: the steps that were read then.
    """

    request_ids: Sequence[str]
    drafts: Drafts
    read: int

    def of(self, request_ids: Sequence[str]) -> Drafts | None:
        """Return the drafts of some of the requests; None: there are others among them."""
        if request_ids == self.request_ids:
            return self.drafts
        if not set(request_ids).issubset(self.request_ids):
            return None
        rows = [self.request_ids.index(each) for each in request_ids]
        widths = [self.drafts.widths[row] for row in rows]
        drafts = self.drafts
        return attrs.evolve(
            drafts, tokens=drafts.tokens[rows], scores=drafts.scores[rows], widths=widths
        )


@attrs.frozen(eq=False)
class HostDraft:
    """The worker's drafts of a batch, on the host.

    Attributes:
        tokens, parents, scores: [bs, N], as in ``Drafts``.
        widths: the nodes of each request, the root included; what follows them does not count.
        depth: the greatest depth of a node.
    """

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    widths: Sequence[int]
    depth: int


class NgramWorker:
    """Keeps the index, and drafts from it.

    Whose text a request drafts from is the index's ``scope``. Proposals change no output, but the
    speed of a request may reveal what its owner's text is.

    Args:
        shape: the limits of each request's tree.
        settings: of the index.
        compiled: the functions of the compiled drafter; None: the drafter runs in Python.
        costs: the costs of the device's steps.
        foreseen: the nodes of a chain that is foreseen, the root included; None, or fewer than are
            drafted: as many as these.

    Attributes:
        index: the tokens of all owners.
        requests: the state of each running request, by its id.
        grower: adds to the drafts of another algorithm; None before there is one.
    """

    grower: DraftGrower | None = None

    def __init__(
        self,
        shape: Shape,
        settings: NgramSettings = DEFAULTS,
        compiled: PyDLL | None = None,
        costs: Costs = CPU_COSTS,
        foreseen: int | None = None,
    ) -> None:
        self._shape = shape
        self._most_foreseen = max(foreseen or 0, shape.num_draft_tokens)
        self._costs = costs
        self._scope = settings.ngram_index_scope
        relink = None if compiled is None else compiled.relink
        self.index = Index(settings.ngram_index_bytes, relink)
        deeper = attrs.evolve(
            shape, num_steps=self._most_foreseen - 1, num_draft_tokens=self._most_foreseen
        )

        def drafter(limits: Shape) -> Drafter:
            if compiled is None:
                return PlainDrafter(self.index, limits)
            return CompiledDrafter(compiled, self.index, limits)

        self._drafter = drafter(shape)
        self._foreseer = drafter(deeper) if shape.topk == 1 else self._drafter
        self.requests: dict[str, RequestState] = {}
        self._foreseen: Foreseen | None = None
        self._is_asked = False  # what it foresees: drafts are as a plan chooses them
        self._read = 0  # steps

    def read_corpus(self, texts: Iterable[Sequence[int]]) -> None:
        """Let all owners draft from these texts, given as tokens, too.

        Raises:
            UsageError: they do not fit in the index.
        """
        read = list(texts)
        count = sum(map(len, read))
        if not count:
            return
        corpus = self.index.open_corpus(count)
        if corpus is None:
            most = self.index.most_bytes
            raise UsageError(
                f"ngram_corpus has {count:,} tokens, whose index takes, with that of a request, "
                f"{self.index.bytes_with(count):,} bytes; expected at most "
                f"ngram_index_bytes={most:,}: raise that, or take a part of the corpus"
            )
        for text in read:
            self._drafter.read(self._drafter.request(corpus), text)

    def read_prompts(self, views: Sequence[RequestView], ends: Sequence[int]) -> None:
        """Add each request's prompt up to ``ends`` to its owner's history.

        A long prompt is added chunk by chunk, while the device computes the chunk.
        """
        for view, end in zip(views, ends, strict=True):
            request = self.requests.get(view.request_id)
            if request is None:
                request = self.requests[view.request_id] = self._begin(view)
            if request.drafted is None:
                continue
            chunk = view.prompt_token_ids[request.prompt_read : end]
            self._drafter.read(request.drafted, chunk)
            request.prompt_read += len(chunk)

    def feed(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        """Read the prompts of a prefill; leave a step's new tokens for ``observe``."""
        bonus_tokens = target_output.bonus_tokens
        if batch.is_warm_up:
            return DraftInput(bonus_tokens=bonus_tokens)
        if batch.is_prefill:
            self.read_prompts(batch.requests, batch.chunk_ends)
            if self.grower is not None:
                self.grower.forget_rows(compress(batch.requests, batch.first_chunk))
            tokens = bonus_tokens.unsqueeze(1)
            counts = torch.tensor(batch.last_chunk, dtype=torch.int64)
        else:
            tokens = target_output.next_tokens.view(batch.size, -1)
            counts = target_output.accept_lens
            if self.grower is not None:
                self.grower.write(batch, tokens)
        return DraftInput(bonus_tokens=bonus_tokens, host={"tokens": tokens, "counts": counts})

    def observe(self, request_ids: Sequence[str], tokens: Tensor, counts: Tensor) -> None:
        """Add the new tokens of a step's requests, except requests that have ended.

        Args:
            request_ids: the step's requests.
            tokens: [bs, C] int64, on the host.
            counts: [bs] int64, on the host, the number of new tokens of each row.
        """
        self._read += 1
        read = [self.requests.get(each) for each in request_ids]
        self._drafter.observe(_drafted_of(read), tokens, counts)
        for request, count in zip(read, counts.tolist(), strict=True):
            if request is not None:
                request.observed += count

    def foresee(self, request_ids: Sequence[str], forced: Forced = ()) -> ForeseenDrafts | None:
        """Return the chain that would be drafted for each request, as deep as it is likely at all;
        None: they are to be trees. What comes of it teaches each request's ``Novelty``.

        Args:
            forced: what grammars force, as far as the host knows.
        """
        if self._shape.topk > 1:
            return None
        self._is_asked = True
        rooms = [self._most_foreseen] * len(request_ids)
        read = [self.requests.get(each) for each in request_ids]
        known = [0 if each is None else each.prompt_read + each.observed for each in read]
        chains = forced_chains(forced, known)
        drafts = self._look_up(request_ids, rooms, LEAST_FORESEEN, chains, self._foreseer)
        self._foreseen = Foreseen(request_ids, drafts, self._read)
        tokens, scores = drafts.tokens[:, 1:].clone(), drafts.scores[:, 1:].clone()
        return ForeseenDrafts(tokens=tokens, scores=scores, known=known)

    def propose(self, batch: Batch, draft_input: DraftInput, forced: Forced = ()) -> Draft:
        """Draft a tree for each request, within its ``max_draft_nodes``; chains if none branches.

        A request without a probable continuation gets the root alone. If nobody asks what is
        foreseen, so do all requests if their drafts together do not pay, and if the chains of the
        device should have the same length, shorter ones are padded with token 0. Who asks chooses:
        what was foreseen is drafted as it was chosen, and so is what is found in steps that keep to
        an earlier choice.

        A node's score is how often its token followed the same tokens before, smoothed by
        ``Novelty``: the longer the match and the more often it occurred, the surer. The score of
        padding is -inf.

        Args:
            forced: what the requests' grammars force after the roots; it is drafted first.
        """
        roots = draft_input.bonus_tokens
        if batch.is_warm_up:
            return self._widest(roots, batch.max_draft_nodes)
        drafts, widths = self._draft(batch, forced)
        width = max(widths)
        if width == 1:
            return Draft.chain(roots.unsqueeze(1))
        found = [
            t[:, :width] for t in (drafts.tokens, drafts.scores, drafts.parents) if t is not None
        ]
        tokens, scores, *parents = found if roots.is_cpu else upload_together(found, roots.device)
        tokens[:, 0] = roots
        if not parents:
            return Draft.chain(tokens, widths, scores=scores)
        return Draft.tree(tokens, parents[0], drafts.depth, widths, scores=scores)

    def draft_on_host(self, batch: Batch, forced: Forced = ()) -> HostDraft | None:
        """Return what ``propose`` drafts, in tensors of the host as wide as any draft; None:
        nothing."""
        if batch.is_warm_up:
            return None
        drafts, widths = self._draft(batch, forced)
        # Chains are not padded to one length: what is added to has another one.
        widths = [min(width, made) for width, made in zip(widths, drafts.widths, strict=True)]
        if max(widths) == 1:
            return None
        parents = drafts.parents
        if parents is None:
            parents = torch.arange(-1, drafts.tokens.shape[1] - 1).expand(drafts.tokens.shape)
        depth = min(drafts.depth, max(widths) - 1)
        return HostDraft(drafts.tokens, parents, drafts.scores, widths, depth)

    def _draft(self, batch: Batch, forced: Forced) -> tuple[Drafts, Sequence[int]]:
        """Return drafts, and how many nodes of each request are proposed."""
        request_ids = [request.request_id for request in batch.requests]
        rooms = [min(most, self._shape.num_draft_tokens) for most in batch.max_draft_nodes]
        foreseen, self._foreseen = self._foreseen, None
        if foreseen is not None and foreseen.read == self._read:
            chosen = foreseen.of(request_ids)
            if chosen is not None:
                return chosen, [min(each) for each in zip(chosen.widths, rooms, strict=True)]
        cost = StepCost(batch.size, self._costs)
        if self._is_asked:  # a step too early, or before a step whose plan is kept
            least = max(LEAST_FORESEEN, cost.least)
            drafts = self._look_up(request_ids, rooms, least, forced_chains(forced))
            return drafts, drafts.widths
        uniform = self._costs.uniform and self._shape.topk == 1
        # If chains have the same length, an improbable node costs no more than padding.
        least = 0.0 if uniform else cost.least
        drafts = self._look_up(request_ids, rooms, least, forced_chains(forced))
        if uniform:
            width = cost.best_width(drafts.gains)
            return drafts, [min(width, room) for room in rooms]
        if not cost.pays(sum(drafts.gains), drafts.nodes):
            return drafts, [1] * batch.size
        return drafts, drafts.widths

    def _look_up(
        self,
        request_ids: Sequence[str],
        rooms: Sequence[int],
        least: float,
        chains: Sequence[tuple[int, ...]],
        drafter: Drafter | None = None,
    ) -> Drafts:
        """Return what followed the requests' text before, and first what is forced.

        Args:
            rooms: the most nodes of each request.
            least: the probability that a node exceeds.
            chains: by ``forced_chains``.
            drafter: that looks it up; None: the one of drafts.
        """
        drafts = (drafter or self._drafter).draft(self._drafted(request_ids), rooms, least)
        steps = self._shape.num_steps if drafter is None else drafts.tokens.shape[1] - 1
        return with_forced(drafts, chains, rooms, steps)

    def _widest(self, roots: Tensor, rooms: Sequence[int]) -> Draft:
        """Return the widest draft within ``rooms``, of arbitrary tokens with the least score. Each
        level of a tree is full before the next level begins."""
        topk = self._shape.topk
        widths = [min(self._shape.num_draft_tokens, room) for room in rooms]
        width = max(widths)
        nodes = torch.arange(width, device=roots.device)
        tokens = nodes.expand(len(roots), -1).clone()
        tokens[:, 0] = roots
        scores = torch.full((len(roots), width), -torch.inf, device=roots.device)
        scores[:, 0] = 0
        if topk == 1 or width == 1:
            return Draft.chain(tokens, widths, scores=scores)
        parents = torch.div(nodes - 1, topk, rounding_mode="floor")
        depth, level = 0, 0
        while level < width - 1:
            depth += 1
            level += topk**depth
        parents = parents.expand_as(tokens).clone()
        return Draft.tree(tokens, parents, depth, widths, scores=scores)

    def forget(self, request_id: str) -> None:
        """Drop the state of a request that has ended. If it owned its text, that goes too."""
        if self.grower is not None:
            self.grower.forget(request_id)
        request = self.requests.pop(request_id, None)
        if request is not None and request.drafted is not None:
            self.index.close(request.owner, keep=request.owner != (REQUEST, request_id))

    def forget_text(self, cache_salt: str | None = None) -> None:
        """Drop the text of all requests of a salt; None: that of all requests. The corpus stays."""
        if cache_salt is None or self._scope == ENGINE:
            self.index.clear()
        elif self._scope == TENANT:
            self.index.remove((TENANT, cache_salt))

    def _begin(self, view: RequestView) -> RequestState:
        owner = owner_of(view, self._scope)
        history = self.index.open(owner)
        drafted = None if history is None else self._foreseer.request(history)  # has most nodes
        return RequestState(owner, drafted)

    def _drafted(self, request_ids: Sequence[str]) -> list[Any]:
        """Return the drafter's state of each request; None for one that has ended."""
        return _drafted_of(map(self.requests.get, request_ids))


def _drafted_of(requests: Iterable[RequestState | None]) -> list[Any]:
    return [None if request is None else request.drafted for request in requests]


def owner_of(view: RequestView, scope: str) -> Hashable:
    """Return the owner of a request's text. In the scope of tenants a request without a salt is an
    owner by itself."""
    if scope == ENGINE:
        return ENGINE
    if scope == TENANT and view.cache_salt is not None:
        return TENANT, view.cache_salt
    return REQUEST, view.request_id
