"""Drafting token by token from the target's features: what all EAGLE-like algorithms share.

One network reads (token, feature) and predicts the next feature and, through it, the next token:
Li et al., EAGLE (arXiv 2401.15077), with the dynamic trees of EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from typing import Protocol

import attrs
import torch
from torch import Tensor

from specplug.spec.batch import Batch
from specplug.spec.coupling import couple
from specplug.spec.draft import Draft, DraftInput
from specplug.spec.runtime import AttentionPlan, KVCache, Runtime
from specplug.spec.target_output import CommittedOutput
from specplug.spec.tree import select_tree


class FeatureNetwork(Protocol):
    """A draft network that goes from one position to the next."""

    @property
    def hidden_size(self) -> int:
        """Width of its hidden states."""

    @property
    def token_ids(self) -> Tensor:
        """[V_draft] int64, its vocabulary in the target's ids."""

    def step(self, tokens: Tensor, hidden: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        """One pass: at position p, the token at p + 1 and the feature of p.

        Args:
            tokens: [R] int64 target ids.
            hidden: [R, hidden_size], from the target's features or this method's last result.

        Returns:
            [R, hidden_size], the feature of position p + 1.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> [R, V_draft]: of the token at p + 2."""


@attrs.define(eq=False)
class _Frontier:
    """The K best nodes of the last level of a tree that is being expanded.

    Attributes:
        tokens: [bs, K] int64.
        scores: [bs, K] cumulative log-probabilities.
        hidden: [bs * K, H], what each node's parent left.
        places: [bs, K] int64, their index among all candidates.
        mask: [bs, K, levels * K] bool over the slots written so far: ancestors and itself.
    """

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    places: Tensor
    mask: Tensor


class FeatureDrafter:
    """Extends the draft's cache with what the target accepted, then drafts a chain or a tree.

    Between steps a request's state is ``hidden_states`` [bs, H], the network's result at the last
    committed position, and the K best next tokens, ``tokens`` [bs, K] and ``scores`` [bs, K].

    Args:
        runtime: the engine's.
        network: the drafter's.
        cache: of the network's attention layers, from ``runtime.allocate_kv``.
    """

    def __init__(self, runtime: Runtime, network: FeatureNetwork, cache: KVCache) -> None:
        self._runtime = runtime
        self._network = network
        self._cache = cache
        self._topk = runtime.config.topk
        self._steps = runtime.config.num_steps
        self._width = runtime.config.num_draft_tokens
        device = runtime.device
        self._itself = torch.eye(self._topk, dtype=torch.bool, device=device)
        self._order = torch.arange(self._topk, device=device)

    def extend(self, batch: Batch, output: CommittedOutput, features: Tensor) -> DraftInput:
        """Run the committed rows through the network and choose what follows the last of each.

        Args:
            output: of a prefill chunk or an accepted path.
            features: [R, H], what the target computed for these rows, as the network reads it.
        """
        if batch.is_prefill:
            assert batch.attention is not None
            plan = batch.attention
        else:
            width = output.tokens.shape[0] // batch.size
            plan = self._runtime.plan_attention(batch, batch.seq_lens, width)
        hidden = self._network.step(output.tokens, features, plan, self._cache)[output.last_rows]
        # The bonus token stands one behind the last row, what is drafted first two behind it.
        first = batch.seq_lens + output.accept_lens + 1
        scores, tokens = self._best(batch, hidden, first.unsqueeze(1))
        state = {"hidden_states": hidden, "tokens": tokens, "scores": scores}
        return DraftInput(bonus_tokens=output.bonus_tokens, state=state)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """A chain if ``topk`` is 1, else a dynamic tree."""
        if self._width == 1:
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        if self._topk == 1:
            return self._chain(batch, draft_input)
        return self._tree(batch, draft_input)

    def _chain(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """S tokens one behind the other: nothing to rank, nothing to select."""
        token, hidden = draft_input["tokens"][:, 0], draft_input["hidden_states"]
        chain = [draft_input.bonus_tokens, token]
        for step in range(1, self._steps):
            plan = self._runtime.plan_attention(batch, batch.seq_lens, 1, offset=step - 1)
            hidden = self._network.step(token, hidden, plan, self._cache)
            position = (batch.seq_lens + step + 1).unsqueeze(1)
            token = self._best(batch, hidden, position)[1].squeeze(1)
            chain.append(token)
        return Draft.chain(torch.stack(chain, dim=1))

    def _tree(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Expand the K best nodes at each step, then keep the N - 1 best of all candidates."""
        bs, topk = batch.size, self._topk
        tokens, scores = draft_input["tokens"], draft_input["scores"]
        frontier = _Frontier(
            tokens=tokens,
            scores=scores,
            hidden=draft_input["hidden_states"].repeat_interleave(topk, dim=0),
            places=self._order.expand(bs, -1),
            mask=self._itself.expand(bs, -1, -1),
        )
        candidates = [(scores, tokens, torch.full_like(tokens, -1))]
        for step in range(1, self._steps):
            frontier, children = self._expand(batch, frontier, step)
            candidates.append(children)
        all_scores, all_tokens, parents = (
            torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)
        )
        return select_tree(
            draft_input.bonus_tokens, all_scores, all_tokens, parents, self._width, self._steps
        )

    def _expand(
        self, batch: Batch, frontier: _Frontier, step: int
    ) -> tuple[_Frontier, tuple[Tensor, Tensor, Tensor]]:
        """The K children of each node of the frontier, and the K best of them, which is the next.

        Returns:
            The next frontier, and all K * K children: scores, tokens and parents [bs, K * K].
        """
        bs, topk = batch.size, self._topk
        positions = (batch.seq_lens + step - 1).unsqueeze(1).expand(-1, topk)
        plan = self._runtime.plan_attention(
            batch,
            batch.seq_lens,
            topk,
            offset=(step - 1) * topk,
            positions=positions,
            mask=frontier.mask,
        )
        tokens = frontier.tokens.reshape(-1)
        hidden = self._network.step(tokens, frontier.hidden, plan, self._cache)
        scores, children = self._best(batch, hidden, positions + 2)
        scores = (frontier.scores.unsqueeze(2) + scores.view(bs, topk, topk)).view(bs, -1)
        children = children.view(bs, -1)
        parents = frontier.places.repeat_interleave(topk, dim=1)
        best_scores, best = scores.topk(topk, dim=1)
        above = best // topk
        rows = (torch.arange(bs, device=best.device).unsqueeze(1) * topk + above).view(-1)
        lineage = frontier.mask.gather(1, above.unsqueeze(2).expand(-1, -1, step * topk))
        following = _Frontier(
            tokens=children.gather(1, best),
            scores=best_scores,
            hidden=hidden[rows],
            places=best + topk + (step - 1) * topk * topk,
            mask=torch.cat((lineage, self._itself.expand(bs, -1, -1)), dim=2),
        )
        return following, (scores, children, parents)

    def _best(self, batch: Batch, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The K best tokens of each row: ([R, K] log-scores, [R, K] target ids).

        Args:
            hidden: [R, H], R = bs * w.
            positions: [bs, w] where the tokens would stand.
        """
        ids = self._network.token_ids
        logits = couple(self._runtime, batch, self._network.logits(hidden), positions, ids)
        if self._topk == 1:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(best, dtype=logits.dtype), ids[best]
        scores, best = logits.log_softmax(-1).topk(self._topk, dim=-1)
        return scores, ids[best]
