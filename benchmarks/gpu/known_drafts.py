"""Drafters that are right as often as they are told to be: for a share of known texts, and never.

They are plugin objects as a third party would write them, given to
``LLM(speculative_algorithm=KnownDrafts(…))``. ``KnownDrafts`` costs one look-up a step. So what a
verification costs and what acceptance is worth can be measured apart from any draft model.
``KnownEagle3`` and ``KnownNgram`` cost what theirs do, and are accepted as is set: with random
weights nothing else is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug import (
    AlgorithmInfo,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    FutureMap,
    Runtime,
    hookimpl,
)
from specplug_eagle3 import Eagle3
from specplug_ngram import Ngram

Continuations = Mapping[tuple[int, ...], Sequence[int]]
"""Prompt -> what the target writes after it."""


@attrs.define(eq=False)
class _Worker:
    """The texts on the device.

    Attributes:
        numbers: the row of ``texts`` of each prompt.
        texts: [n + 1, L] int64, prompts and what follows; row 0 is for unknown prompts.
        right: [n + 1, L] bool, where a draft of the token at a position is right.
        branch: [n + 1, L] int64, which of the siblings is on the path.
        text_of: [rows of the request table] int64, the text of each request.
    """

    numbers: dict[tuple[int, ...], int]
    texts: Tensor
    right: Tensor
    branch: Tensor
    text_of: Tensor
    siblings: Tensor
    steps: Tensor


class KnownDrafts:
    """Drafts chains, or trees whose every depth has ``topk`` siblings of which one goes on.

    Args:
        continuations: what is known. Other prompts are drafted wrongly.
        share: how many of the drafted tokens are right, given that those before them are.
        num_steps: draft depth S.
        topk: siblings K of each depth; a draft has 1 + S·K nodes.
        seed: of the choice which are right.
        alike: the same positions are right in all texts.
    """

    def __init__(
        self,
        continuations: Continuations,
        share: float,
        *,
        num_steps: int,
        topk: int = 1,
        seed: int = 0,
        alike: bool = False,
    ) -> None:
        self._continuations, self._share, self._seed = continuations, share, seed
        self._num_steps, self._topk, self._alike = num_steps, topk, alike
        self._worker: _Worker | None = None

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="KNOWN",
            summary="The true continuation, right as often as wanted",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(
                num_steps=self._num_steps,
                topk=self._topk,
                num_draft_tokens=1 + self._num_steps * self._topk,
            ),
        )

    def know(self, continuations: Continuations, share: float) -> None:
        """Draft from these continuations from now on. No request may be running."""
        self._continuations, self._share = continuations, share
        if self._worker is not None:
            self._fill(self._worker)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> _Worker:
        device = runtime.device
        none = torch.zeros(0, dtype=torch.int64, device=device)
        self._worker = worker = _Worker(
            numbers={},
            texts=none,
            right=none,
            branch=none,
            text_of=torch.zeros(runtime.req_table_size, dtype=torch.int64, device=device),
            siblings=torch.arange(self._topk, device=device),
            steps=torch.arange(1, self._num_steps + 1, device=device),
        )
        self._fill(worker)
        return worker

    def _fill(self, worker: _Worker) -> None:
        known = [(list(prompt), list(rest)) for prompt, rest in self._continuations.items()]
        length = 1 + max((len(prompt) + len(rest) for prompt, rest in known), default=0)
        texts = torch.zeros(len(known) + 1, length, dtype=torch.int64)
        for number, (prompt, rest) in enumerate(known, 1):
            texts[number, : len(prompt) + len(rest)] = torch.tensor(prompt + rest)
        draw = torch.Generator().manual_seed(self._seed)
        drawn = torch.rand(texts.shape, generator=draw)
        right = (drawn[:1].expand_as(drawn) if self._alike else drawn) < self._share
        right[0] = False
        device = worker.text_of.device
        worker.numbers = {tuple(prompt): number for number, (prompt, _) in enumerate(known, 1)}
        worker.texts, worker.right = texts.to(device), right.to(device)
        worker.branch = torch.randint(self._topk, texts.shape, generator=draw).to(device)

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        worker: _Worker = runtime.worker
        if batch.is_prefill and any(batch.first_chunk):
            found = [worker.numbers.get(tuple(r.prompt_token_ids), 0) for r in batch.requests]
            numbers = torch.tensor(found)
            if runtime.device.type == "cuda":
                numbers = numbers.pin_memory().to(runtime.device, non_blocking=True)
            worker.text_of.index_copy_(0, batch.req_indices, numbers)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker: _Worker = runtime.worker
        steps, topk = len(worker.steps), len(worker.siblings)
        root = draft_input.bonus_tokens.unsqueeze(1)
        text = worker.text_of[batch.req_indices].unsqueeze(1)
        at = (batch.seq_lens.unsqueeze(1) + worker.steps).clamp(max=worker.texts.shape[1] - 1)
        true, right, branch = (
            worker.texts[text, at],
            worker.right[text, at],
            worker.branch[text, at],
        )
        wrong = true.unsqueeze(2) + 1 + worker.siblings
        chosen = (worker.siblings == branch.unsqueeze(2)) & right.unsqueeze(2)
        nodes = torch.where(chosen, true.unsqueeze(2), wrong) % runtime.vocab_size
        tokens = torch.cat((root, nodes.flatten(1)), dim=1)
        if topk == 1:
            return Draft.chain(tokens)
        first = torch.zeros_like(branch[:, :1])
        on_path = 1 + (worker.steps[:-1] - 1) * topk + branch[:, :-1]
        parents = torch.cat((first, on_path), dim=1).repeat_interleave(topk, dim=1)
        return Draft.tree(tokens, torch.cat((first - 1, parents), dim=1), steps)


class RefusedNgram(Ngram):
    """NGRAM whose drafted tokens are replaced by others, after it has chosen them: every step is of
    full width and makes one token, as with the drafts of random weights.

    Random prompts say nothing of what follows, but from the second generation of the same prompts
    on NGRAM drafts what it has read. Prompts that teach it wrong tokens would not do: it learns
    that they are refused. The vocabulary's size must be even.
    """

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        draft.tokens[:, 1:].bitwise_xor_(1)
        return draft


_POSITIONS = 1 << 13
"""Positions that ``KnownNgram`` and ``KnownEagle3`` tell apart; no text is as long."""


PARTLY = "partly "
"""How the names of tenants begin whose texts ``KnownNgram`` finds again in parts."""
STRETCH, COPIED_STRETCH = 32, 24
"""Tokens after which such a part begins, and those that it has."""


class KnownNgram(Ngram):
    """NGRAM some of whose drafted tokens are replaced by wrong ones, as it foresees too. Of some
    texts it finds parts alone, as of one that copies and goes on by itself in turns. The
    vocabulary's size must be even. What it does beside NGRAM is on the host, and little.

    Args:
        share: how many of the tokens are left as they are.
    """

    def __init__(self, share: float) -> None:
        draw = np.random.default_rng(0)
        self._wrong = (draw.random(_POSITIONS) >= share).astype(np.int64)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        worker = super().create_worker(runtime)
        look_up, wrong = worker._look_up, self._wrong

        def known(request_ids: Sequence[str], rooms: Sequence[int], *rest: Any) -> Any:
            states = [*map(worker.requests.get, request_ids)]
            read = [0 if each is None else each.prompt_read + each.observed for each in states]
            partly = [each is not None and _is_partly(each.owner) for each in states]
            own = rooms
            if any(partly):
                own = [
                    min(room, 1 + max(0, COPIED_STRETCH - place % STRETCH)) if some else room
                    for room, place, some in zip(rooms, read, partly, strict=True)
                ]
            drafts = look_up(request_ids, own, *rest)
            tokens = drafts.tokens.numpy()[:, 1:]
            places = np.array(read)[:, None] + np.arange(tokens.shape[1]) + 31 * tokens
            tokens ^= wrong[places & (_POSITIONS - 1)]  # for each text elsewhere
            return drafts

        worker._look_up = known
        return worker


@cache
def _is_partly(owner: Any) -> bool:
    """Return whether only parts of the text of an owner are found."""
    tenant = None if owner is None else owner[1]
    return tenant is not None and tenant.startswith(PARTLY)


class KnownEagle3(Eagle3):
    """EAGLE-3 in chains whose drafted tokens are replaced by known ones, after it has computed
    them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, ...], int] = {}
        self._texts = torch.zeros(1, _POSITIONS, dtype=torch.int64)
        self._right = torch.zeros(1, _POSITIONS, dtype=torch.int8)
        self._text_of = torch.zeros(1, dtype=torch.int64)

    def know(self, continuations: Continuations, shares: Sequence[float]) -> None:
        """Draft from these continuations from now on. No request may be running.

        Args:
            shares: for each, how many of the tokens are right, given that those before them are.
        """
        known = [[*prompt, *rest] for prompt, rest in continuations.items()]
        texts = torch.zeros(1 + len(known), _POSITIONS, dtype=torch.int64)
        for number, text in enumerate(known, 1):
            texts[number, : len(text)] = torch.tensor(text)
        draw = torch.Generator().manual_seed(1)
        least = torch.tensor([1.0, *shares]).unsqueeze(1)
        right = torch.rand(texts.shape, generator=draw) < least
        texts += (~right).to(torch.int64)
        self._numbers = {prompt: number for number, prompt in enumerate(continuations, 1)}
        self._texts = texts.to(self._text_of.device)
        self._right = right.to(self._text_of.device, torch.int8)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        self._text_of = torch.zeros(
            runtime.req_table_size, dtype=torch.int64, device=runtime.device
        )
        self._texts = self._texts.to(runtime.device)
        self._right = self._right.to(runtime.device)
        return super().create_worker(runtime)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        if any(batch.first_chunk):
            found = [self._numbers.get(tuple(r.prompt_token_ids), 0) for r in batch.requests]
            numbers = torch.tensor(found).to(runtime.device, non_blocking=True)
            self._text_of.index_copy_(0, batch.req_indices, numbers)
        made: DraftInput = super().build_draft_input(runtime, batch, target_output, future_map)
        if made.hindsight is not None:
            made.hindsight = self._known_hindsight(batch, target_output, made.hindsight)
        return made

    def _known_hindsight(self, batch: Batch, output: CommittedOutput, own: Tensor) -> Tensor:
        """Return which of the tokens that are looked back at are right, [bs, W], where the network
        looks back at some: the last of them is the root."""
        told = own >= 0
        back = told.sum(1, keepdim=True) - torch.arange(own.shape[1], device=own.device)
        at = (batch.seq_lens + output.accept_lens + 1).unsqueeze(1) - back
        right = self._right[self._text_of[batch.req_indices].unsqueeze(1), at.clamp(min=0)]
        return right.masked_fill(~told, -1)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        order = torch.arange(1, draft.width, device=batch.seq_lens.device)
        at = batch.seq_lens.unsqueeze(1) + order
        drafted = self._texts[self._text_of[batch.req_indices].unsqueeze(1), at]
        draft.tokens[:, 1:] = drafted % runtime.vocab_size
        return draft


def accept_length(share: float, num_steps: int) -> float:
    """Return the tokens a step that a share of right tokens gives, 1 + p + … + p^S."""
    return sum(share**step for step in range(num_steps + 1))


def share_of(length: float, num_steps: int) -> float:
    """Return the share of right tokens that gives this accept length.

    Raises:
        ValueError: no draft of so many steps does.
    """
    if not 1 <= length <= num_steps + 1:
        raise ValueError(f"accept length {length}; expected 1 to {num_steps + 1}, num_steps + 1")
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if accept_length(middle, num_steps) < length else (low, middle)
    return high
