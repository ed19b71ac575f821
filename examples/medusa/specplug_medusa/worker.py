"""The drafter: all heads read the same hidden state, and what they say is joined to a tree."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import (
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Lattice,
    Runtime,
    StateTensor,
    couple,
    likeliest_tree,
    received_state,
)
from specplug_medusa.heads import read_heads

HIDDEN = "hidden_states"
"""The state between steps: what the target's LM head read at the last committed position."""


class MedusaWorker:
    """Drafts the token that is k after the root by head k - 1, all heads at once.

    Args:
        runtime: the run's.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        path = runtime.config.draft_model_path
        assert path is not None  # the core refuses to run without one
        self._heads = read_heads(path, runtime.hidden_size).to(runtime.device, runtime.dtype)
        self._captured = runtime.capture_lm_head_input()
        self._token_ids = torch.arange(runtime.vocab_size, device=runtime.device)
        self._candidates = runtime.record_draft(self._say)

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries."""
        return {HIDDEN: StateTensor((self._runtime.hidden_size,), self._runtime.dtype)}

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Keep the hidden state of the last committed row, after a prefill or a verify."""
        hidden = output.per_node[self._captured][output.last_rows]
        return DraftInput(bonus_tokens=output.bonus_tokens, state={HIDDEN: hidden})

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Take the state of requests that another instance has prefilled; zeros if none came."""
        state = received_state(batch, self.state_spec()).tensors
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain if ``topk`` is 1, else the tree that survives most likely, within
        ``batch.max_draft_nodes``."""
        config, roots = self._runtime.config, draft_input.bonus_tokens
        nodes = min(config.num_draft_tokens, max(batch.max_draft_nodes))
        steps = min(config.num_steps, nodes - 1)
        if not steps:
            return Draft.chain(roots.unsqueeze(1))
        tokens, scores = self._candidates(batch, draft_input[HIDDEN], steps)
        if config.topk == 1:
            chain = torch.cat((roots.unsqueeze(1), tokens[:, :, 0]), dim=1)
            zero = torch.zeros_like(scores[:, :1, 0])
            return Draft.chain(chain, scores=torch.cat((zero, scores[:, :, 0]), dim=1))
        lattice = Lattice(tokens.unbind(1), [each.unsqueeze(1) for each in scores.unbind(1)])
        tokens, parents, scores = likeliest_tree(lattice, roots, config.topk, nodes)
        return Draft.tree(tokens, parents, steps, scores=scores)

    def _say(self, batch: Batch, hidden: Tensor, steps: int) -> tuple[Tensor, Tensor]:
        """Return each head's likeliest tokens and their scores: [bs, steps, topk] int64 and
        float32."""
        read = torch.stack([self._heads[step](hidden) for step in range(steps)], dim=1)
        logits = self._runtime.lm_head(read.flatten(0, 1)).view(len(hidden), steps, -1).float()
        if not batch.greedy:  # choose with the noise with which the target will
            ahead = torch.arange(1, steps + 1, device=hidden.device)
            positions = batch.seq_lens.unsqueeze(1) + ahead
            logits = couple(self._runtime, batch, logits, positions, self._token_ids)
        scores, tokens = logits.log_softmax(-1).topk(self._runtime.config.topk, dim=-1)
        return tokens, scores.float()
