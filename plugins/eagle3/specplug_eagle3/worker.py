"""The EAGLE-3 drafter: extends its cache with what the target accepted, then drafts."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import AttentionPlan, Batch, CommittedOutput, Draft, DraftInput, Runtime, select_tree
from specplug_eagle3.checkpoint import load_network


class Eagle3Worker:
    """Draft weights, draft KV cache, and the passes over them.

    Between steps a request's state is ``hidden_states`` [bs, hidden], the network's result at the
    last committed position, and the K best next tokens, ``tokens`` [bs, K] and ``scores`` [bs, K].

    Args:
        runtime: the engine.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._network = load_network(runtime)
        config = self._network.config
        self._features = runtime.capture_layer_inputs(config.aux_layer_ids)
        self._cache = runtime.allocate_kv(1, config.num_key_value_heads, config.head_dim)
        self._embedding = self._network.embed_tokens
        order = torch.arange(config.draft_vocab_size, device=runtime.device)
        self._target_ids = order + self._network.d2t
        self._topk = runtime.config.topk
        self._steps = runtime.config.num_steps

    def hidden_size_for(self) -> int:
        """Width of the hidden states in a draft input: the draft's own, not the target's."""
        return self._network.config.hidden_size

    def dtype_for(self) -> torch.dtype:
        """Type of the hidden states in a draft input."""
        return self._runtime.dtype

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Run the committed rows through the layer and choose what follows the last of each."""
        plan: AttentionPlan
        if batch.is_prefill:
            assert batch.attention is not None
            plan = batch.attention
        else:
            width = output.tokens.shape[0] // batch.size
            plan = self._runtime.plan_attention(batch, batch.seq_lens, width)
        fused = self._network.fuse(output.per_node[self._features])
        hidden = self._forward(output.tokens, fused, plan)[output.last_rows]
        # The bonus token stands one behind the last row, what is drafted first two behind it.
        first = batch.seq_lens + output.accept_lens + 1
        scores, tokens = self._best(batch, self._network.logits(hidden), first.unsqueeze(1))
        state = {"hidden_states": hidden, "tokens": tokens, "scores": scores}
        return DraftInput(bonus_tokens=output.bonus_tokens, state=state)

    def propose_chain(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """S tokens, one behind the other."""
        token, hidden = draft_input["tokens"][:, 0], draft_input["hidden_states"]
        chain = [draft_input.bonus_tokens, token]
        starts = batch.seq_lens
        for step in range(1, self._steps):
            plan = self._runtime.plan_attention(batch, starts, 1, offset=step - 1)
            hidden = self._forward(token, hidden, plan)
            position = (starts + step + 1).unsqueeze(1)
            token = self._next_token(batch, self._network.logits(hidden), position)
            chain.append(token)
        return Draft.chain(torch.stack(chain, dim=1))

    def propose_tree(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Expand the K best nodes at each step, then keep the N - 1 best of all candidates."""
        bs, topk = batch.size, self._topk
        device = self._runtime.device
        frontier = draft_input["scores"]
        tokens = draft_input["tokens"]
        hidden = draft_input["hidden_states"].repeat_interleave(topk, dim=0)
        candidates = [(frontier, tokens, torch.full_like(tokens, -1))]
        chosen = torch.arange(topk, device=device).expand(bs, -1)  # the frontier's candidate index
        mask = torch.eye(topk, dtype=torch.bool, device=device).expand(bs, -1, -1)
        for step in range(1, self._steps):
            positions = (batch.seq_lens + step - 1).unsqueeze(1).expand(-1, topk)
            plan = self._runtime.plan_attention(
                batch,
                batch.seq_lens,
                topk,
                offset=(step - 1) * topk,
                positions=positions,
                mask=mask,
            )
            hidden = self._forward(tokens.reshape(-1), hidden, plan)
            scores, children = self._best(batch, self._network.logits(hidden), positions + 2)
            scores = frontier.unsqueeze(2) + scores.view(bs, topk, topk)
            parents = chosen.unsqueeze(2).expand(-1, -1, topk)
            candidates.append(tuple(t.reshape(bs, -1) for t in (scores, children, parents)))
            frontier, best = scores.view(bs, -1).topk(topk, dim=1)
            above = best // topk
            tokens = children.reshape(bs, -1).gather(1, best)
            hidden = hidden.view(bs, topk, -1)[torch.arange(bs, device=device).unsqueeze(1), above]
            hidden = hidden.reshape(bs * topk, -1)
            chosen = best + topk + (step - 1) * topk * topk
            itself = torch.eye(topk, dtype=torch.bool, device=device).expand(bs, -1, -1)
            lineage = mask.gather(1, above.unsqueeze(2).expand(-1, -1, mask.shape[2]))
            mask = torch.cat((lineage, itself), dim=2)
        scores, nodes, parents = (
            torch.cat(parts, dim=1) for parts in zip(*candidates, strict=True)
        )
        return select_tree(
            draft_input.bonus_tokens,
            scores,
            nodes,
            parents,
            self._runtime.config.num_draft_tokens,
            self._steps,
        )

    def _forward(self, tokens: Tensor, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(self._cache, 0, q, k, v)

        embeds = self._embedding(tokens) if self._embedding else self._runtime.embed_tokens(tokens)
        return self._network(embeds, hidden, plan.positions, attend)

    def _next_token(self, batch: Batch, logits: Tensor, positions: Tensor) -> Tensor:
        """[bs, V_draft] logits -> [bs] the draft's choice, in the target's ids."""
        if not batch.greedy:
            logits = self._coupled(batch, logits, positions)
        return self._target_ids[logits.argmax(-1)]

    def _best(self, batch: Batch, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """The K best tokens of each row: ([R, K] log-scores, [R, K] target ids).

        Args:
            logits: [R, V_draft], R = bs * w.
            positions: [bs, w] where the tokens would stand.
        """
        if not batch.greedy:
            logits = self._coupled(batch, logits, positions)
        if self._topk == 1:
            best = logits.argmax(-1, keepdim=True)
            return torch.zeros_like(best, dtype=logits.dtype), self._target_ids[best]
        scores, best = logits.log_softmax(-1).topk(self._topk, dim=-1)
        return scores, self._target_ids[best]

    def _coupled(self, batch: Batch, logits: Tensor, positions: Tensor) -> Tensor:
        """Choose with the target's own noise: argmax(log q + g) agrees with argmax(log p + g)
        more often than the top token does (Daliri, Musco and Suresh, arXiv 2408.07978)."""
        bs, width = positions.shape
        rows = logits.view(bs, width, -1) / self._runtime.temperatures(batch).unsqueeze(1)
        noise = self._runtime.gumbel_noise(batch, positions, self._target_ids)
        return (rows + noise).view(logits.shape)
