"""Drafting token by token from the target's features: what all EAGLE-like algorithms share.

One network reads (token, feature) and predicts the next feature and, through it, the next token:
Li et al., EAGLE (arXiv 2401.15077), with the dynamic trees of EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress
from functools import reduce
from operator import add

import attrs
import torch
from torch import Tensor

from specplug.errors import UsageError
from specplug.kernels.argmax import likeliest_tokens
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor, received_state
from specplug.speculative.hook_order import Batch
from specplug.speculative.host_copy import upload
from specplug.speculative.layers import Attend
from specplug.speculative.noise import couple
from specplug.speculative.runtime import AttentionPlan, Runtime
from specplug.speculative.tree import select_nodes
from specplug.speculative.verify import CommittedOutput


@attrs.define(eq=False)
class _Frontier:
    """The F best nodes of the last level of a tree that is being expanded; K, or fewer where the
    KV pool is short.

    Attributes:
        tokens: [bs, F] int64.
        scores: [bs, F] cumulative log-probabilities.
        hidden: [bs * F, H], what each node's parent left.
        places: [bs, F] int64, their index among all candidates.
        mask: [bs, F, levels * F] bool over the slots written so far: ancestors and itself.
    """

    tokens: Tensor
    scores: Tensor
    hidden: Tensor
    places: Tensor
    mask: Tensor


class FeatureDrafter(ABC):
    """A worker that drafts with a network going from one position to the next.

    A subclass says what the network reads (``features``), one pass of it (``forward``) and its
    head (``logits``); extending the draft's cache with what the target accepted, chains and trees
    are here. Between steps a request's state is ``hidden_states`` [bs, H], the network's result at
    the last committed position, and the K best next tokens, ``tokens`` and ``scores`` [bs, K].

    Raises:
        UsageError: ``topk`` is greater than the draft's vocabulary.

    Args:
        runtime: the engine's.
        hidden_size: H, width of the network's hidden states.
        token_ids: [V_draft] int64, the network's vocabulary in the target's ids.
        num_layers, num_kv_heads, head_dim: of the draft's KV cache.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        hidden_size: int,
        token_ids: Tensor,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        self._runtime = runtime
        self._hidden_size = hidden_size
        self._token_ids = token_ids
        self._cache = runtime.allocate_kv(num_layers, num_kv_heads, head_dim)
        self._topk = runtime.config.topk
        if self._topk > len(token_ids):
            raise UsageError(
                f"topk={self._topk}: the draft model knows {len(token_ids)} tokens; "
                "expected no more than these"
            )
        self._steps = runtime.config.num_steps
        self._width = runtime.config.num_draft_tokens
        # Each is one graph where the host records: the whole chain or tree, not a step of it.
        self._draft_chain = runtime.record_draft(self._chain)
        self._draft_tree = runtime.record_draft(self._tree)
        self._extend_paths = runtime.record_draft(self._extend)
        self._write_paths = runtime.record_draft(self._write)
        self._last_layer = num_layers - 1
        self._itself = torch.eye(self._topk, dtype=torch.bool, device=runtime.device)
        self._order = torch.arange(self._topk, device=runtime.device)

    @abstractmethod
    def features(self, output: CommittedOutput) -> Tensor:
        """Return what the target computed for the committed rows, as the network reads it."""

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run one pass: at position p, the token at p + 1 and the feature of p.

        Args:
            tokens: [R] int64 target ids.
            hidden: [R, H], ``features`` or this method's own result of the position before.
            positions: [R] int64.
            attend: see ``specplug.layers.Attend``.

        Returns:
            [R, H], the feature of position p + 1.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token at p + 2, [R, V_draft], for a result of ``forward``
        [R, H]."""

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries: hidden states as wide as the network's own."""
        precise = _precise(self._runtime.dtype)
        return {
            "hidden_states": StateTensor((self._hidden_size,), self._runtime.dtype),
            "tokens": StateTensor((self._topk,), torch.int64, kept="first"),
            "scores": StateTensor((self._topk,), precise, kept="first"),
        }

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Run the committed rows, of a prefill chunk or an accepted path, through the network and
        choose what follows the last of each. Where no draft follows, only write their keys."""
        if not (batch.is_prefill or batch.drafts_follow):
            self._write_paths(batch, output)
            return DraftInput(bonus_tokens=output.bonus_tokens)
        extend = self._extend if batch.is_prefill else self._extend_paths
        return DraftInput(bonus_tokens=output.bonus_tokens, state=extend(batch, output))

    def _write(self, batch: Batch, output: CommittedOutput) -> tuple[()]:
        """Write the keys and values of an accepted path: the pass ends where its last layer would
        attend to them."""
        plan = self._path_plan(batch, output)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if layer < self._last_layer:
                return plan.attend(self._cache, layer, q, k, v)
            plan.write(self._cache, layer, k, v)
            raise _Written

        with suppress(_Written):
            self.forward(output.next_tokens, self.features(output), plan.positions, attend)
        return ()

    def _path_plan(self, batch: Batch, output: CommittedOutput) -> AttentionPlan:
        """Return the plan of an accepted path's rows."""
        width = output.next_tokens.shape[0] // batch.size
        return self._runtime.plan_attention(batch, batch.seq_lens, width)

    def _extend(self, batch: Batch, output: CommittedOutput) -> dict[str, Tensor]:
        """Return the state that ``extend`` leaves."""
        if batch.is_prefill:
            assert batch.attention is not None
            plan = batch.attention
        else:
            plan = self._path_plan(batch, output)
        hidden = self._pass(output.next_tokens, self.features(output), plan)[output.last_rows]
        # The bonus token stands one after the last row, what is drafted first two after it.
        ends = batch.seq_lens.unsqueeze(1), output.accept_lens.unsqueeze(1)
        scores, tokens = self._best(batch, hidden, *ends, 1)
        return {"hidden_states": hidden, "tokens": tokens, "scores": scores}

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests that another instance has prefilled. One that came without
        it is drafted from its last token alone: one pass of the network, the feature unknown. Of
        more branches than are kept here the best are taken; where there are fewer, they are chosen
        anew.

        Args:
            last_tokens: [bs] int64, the roots of the next step.
        """
        runtime = self._runtime
        received = received_state(batch, self.state_spec())
        state = received.tensors
        # A peer's word is not to be trusted.
        state["tokens"].clamp_(0, runtime.vocab_size - 1)
        state["scores"].nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0)
        if unknown := received.lacking("hidden_states"):
            index, part = self._part(batch, unknown)
            plan = runtime.plan_attention(part, part.seq_lens, 1, offset=-1)
            hidden = self._pass(last_tokens[index], state["hidden_states"][index], plan)
            state["hidden_states"].index_copy_(0, index, hidden)
        few = {*unknown, *received.lacking("tokens"), *received.lacking("scores")}
        if few:
            index, part = self._part(batch, sorted(few))
            hidden = state["hidden_states"][index]
            scores, tokens = self._best(part, hidden, part.seq_lens.unsqueeze(1), 1)
            state["tokens"].index_copy_(0, index, tokens)
            state["scores"].index_copy_(0, index, scores)
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def _part(self, batch: Batch, indices: list[int]) -> tuple[Tensor, Batch]:
        """Take some requests of a batch: return their indices [n] int64, and a batch of them."""
        index = upload(indices, self._runtime.device)
        part = attrs.evolve(
            batch,
            requests=[batch.requests[i] for i in indices],
            req_indices=batch.req_indices[index],
            seq_lens=batch.seq_lens[index],
        )
        return index, part

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain if ``topk`` is 1, else a dynamic tree, within ``batch.max_draft_nodes``."""
        nodes = min(self._width, max(batch.max_draft_nodes))
        steps = min(self._steps, nodes - 1)
        if nodes == 1:
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        begin = (
            draft_input.bonus_tokens,
            draft_input["tokens"],
            draft_input["scores"],
            draft_input["hidden_states"],
        )
        if self._topk == 1:
            drafted, scores = self._draft_chain(batch, *begin, steps)
            return Draft.chain(drafted, scores=scores)
        beam = self._beam(batch.max_draft_nodes, steps)
        drafted, parents, scores = self._draft_tree(batch, *begin, beam, nodes, steps)
        return Draft.tree(drafted, parents, steps, scores=scores)

    def _chain(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor,
        steps: int,
    ) -> tuple[Tensor, Tensor]:
        """Draft ``steps`` tokens, each from the one before: nothing to rank, nothing to select.

        Returns:
            Tokens [bs, steps + 1] int64, the roots first, and their scores, float32.
        """
        token, score = tokens[:, 0], scores[:, 0]
        chain, chain_scores = [roots, token], [torch.zeros_like(score), score]
        for step in range(1, steps):
            plan = self._runtime.plan_attention(batch, batch.seq_lens, 1, offset=step - 1)
            hidden = self._pass(token, hidden, plan)
            score, token = self._best_token(batch, hidden, batch.seq_lens.unsqueeze(1), step + 1)
            chain.append(token)
            chain_scores.append(score)
        return torch.stack(chain, dim=1), torch.stack(chain_scores, dim=1).to(torch.float32)

    def _tree(
        self,
        batch: Batch,
        roots: Tensor,
        tokens: Tensor,
        scores: Tensor,
        hidden: Tensor,
        beam: int,
        nodes: int,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Expand the F best nodes at each step, then keep the best of all candidates.

        Args:
            beam: F.

        Returns:
            Tokens and parents, [bs, nodes] int64 each, and scores, [bs, nodes] float32.
        """
        bs = batch.size
        frontier = _Frontier(
            tokens=tokens[:, :beam],
            scores=scores[:, :beam],
            hidden=hidden.repeat_interleave(beam, dim=0, output_size=bs * beam),
            places=self._order[:beam].expand(bs, -1),
            mask=self._itself[:beam, :beam].expand(bs, -1, -1),
        )
        candidates = [(scores, tokens, torch.full_like(tokens, -1))]
        for step in range(1, steps):
            frontier, children = self._expand(batch, frontier, step)
            candidates.append(children)
        all_scores, all_tokens, parents = (
            torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)
        )
        nodes = min(nodes, all_scores.shape[1] + 1)
        return select_nodes(roots, all_scores, all_tokens, parents, nodes)

    def _beam(self, max_draft_nodes: Sequence[int], steps: int) -> int:
        """Return F, the nodes of each level to expand: K, or as many as have slots for their keys.

        Each level takes F slots of every request, ``steps - 1`` levels. A node without a slot would
        be expanded as if it were not there. Who has no slot for each level even of a chain keeps
        too few nodes for its lower levels to matter, so it does not hold back the others.
        """
        levels = steps - 1
        if not levels:
            return self._topk
        return min((self._topk, *(own // levels for own in max_draft_nodes if own >= levels)))

    def _expand(
        self, batch: Batch, frontier: _Frontier, step: int
    ) -> tuple[_Frontier, tuple[Tensor, Tensor, Tensor]]:
        """Find the K children of each node of the frontier, and the F best of them, which is the
        next.

        Returns:
            The next frontier, and all F * K children: scores, tokens and parents [bs, F * K].
        """
        bs, topk = batch.size, self._topk
        beam = frontier.tokens.shape[1]
        positions = (batch.seq_lens + step - 1).unsqueeze(1).expand(-1, beam)
        plan = self._runtime.plan_attention(
            batch,
            batch.seq_lens,
            beam,
            offset=(step - 1) * beam,
            positions=positions,
            mask=frontier.mask,
        )
        hidden = self._pass(frontier.tokens.reshape(-1), frontier.hidden, plan)
        scores, children = self._best(batch, hidden, positions, 2)
        scores = (frontier.scores.unsqueeze(2) + scores.view(bs, beam, topk)).view(bs, -1)
        children = children.view(bs, -1)
        parents = frontier.places.repeat_interleave(topk, dim=1)
        best_scores, best = scores.topk(beam, dim=1)
        above = best // topk
        rows = (torch.arange(bs, device=best.device).unsqueeze(1) * beam + above).view(-1)
        lineage = frontier.mask.gather(1, above.unsqueeze(2).expand(-1, -1, step * beam))
        following = _Frontier(
            tokens=children.gather(1, best),
            scores=best_scores,
            hidden=hidden[rows],
            places=best + topk + (step - 1) * beam * topk,
            mask=torch.cat((lineage, self._itself[:beam, :beam].expand(bs, -1, -1)), dim=2),
        )
        return following, (scores, children, parents)

    def _pass(self, tokens: Tensor, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(self._cache, layer, q, k, v)

        return self.forward(tokens, hidden, plan.positions, attend)

    def _best(
        self, batch: Batch, hidden: Tensor, *positions: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return the K best tokens of each row: ([R, K] log-scores, [R, K] target ids).

        Args:
            hidden: [R, H], R = bs * w.
            positions: [bs, w] where the tokens would stand, as the terms of a sum: of a greedy
                batch they are not added up.
        """
        if self._topk == 1:
            score, token = self._best_token(batch, hidden, *positions)
            return score.unsqueeze(1), token.unsqueeze(1)
        logits = self._coupled(batch, hidden, *positions)
        # Scores add up over the depth and are compared: half precision would round them away.
        precise = _precise(logits.dtype)
        scores, best = logits.log_softmax(-1, dtype=precise).topk(self._topk, dim=-1)
        return scores, self._token_ids[best]

    def _best_token(
        self, batch: Batch, hidden: Tensor, *positions: Tensor | int
    ) -> tuple[Tensor, Tensor]:
        """Return the best token of each row: ([R] log-scores, [R] target ids); the arguments as in
        ``_best``."""
        logits = self._coupled(batch, hidden, *positions)
        token, score = likeliest_tokens(logits, self._token_ids)
        return score, token

    def _coupled(self, batch: Batch, hidden: Tensor, *positions: Tensor | int) -> Tensor:
        """Return the scores of each row, [R, V_draft]; the arguments as in ``_best``."""
        logits = self.logits(hidden)
        if batch.greedy:
            return logits
        summed = torch.as_tensor(reduce(add, positions))
        return couple(self._runtime, batch, logits, summed, self._token_ids)


class _Written(Exception):
    """Ends a pass whose keys and values are written."""


def _precise(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)
