"""The DFlash drafter: it writes the target's features to its KV cache, and drafts blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    couple,
    likeliest_tokens,
)
from specplug_dflash.checkpoint import load_network
from specplug_dflash.network import DFlashNetwork


class DFlashWorker:
    """The draft network and its KV cache, which is its only state between steps.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.network = network = self._load(runtime)
        config = network.config
        own_embedding, own_head = network.embed_tokens, network.lm_head
        self._embed = runtime.embed_tokens if own_embedding is None else own_embedding
        self._lm_head = runtime.lm_head if own_head is None else own_head
        self._token_ids = torch.arange(config.draft_vocab_size, device=runtime.device)
        self._has_own_ids = own_head is not None
        if self._has_own_ids:
            self._token_ids += network.d2t
        self._first_row = config.first_row
        self._capture(runtime)
        self._width = runtime.config.num_draft_tokens
        # A draft of the root alone needs no layer.
        layers = config.num_hidden_layers if self._width > 1 else 0
        self._cache = runtime.allocate_kv(layers, config.num_key_value_heads, config.head_dim)
        device, width = runtime.device, self._width
        self._masks = torch.full((1, width - 1), config.mask_token_id, device=device)
        self._ahead = torch.arange(1, width, device=device)
        all_seen = torch.ones(1, width, width, dtype=torch.bool, device=device)
        # The masks within a block, for causal and for other layers.
        self._block_masks = {
            causal: None if causal else all_seen for causal in sorted(set(config.causal))
        }
        self._draft = runtime.record_draft(self._blocks)
        self._write_paths = runtime.record_draft(self._write)

    def _load(self, runtime: Runtime) -> DFlashNetwork:
        """Return the draft network of the run's checkpoint."""
        return load_network(runtime)

    def _capture(self, runtime: Runtime) -> None:
        """Ask the target for the features that the network fuses."""
        config = self.network.config
        normed = [config.normed_last and i == runtime.num_layers for i in config.feature_layers]
        inputs = [i for i, last in zip(config.feature_layers, normed, strict=True) if not last]
        self._inputs = runtime.capture_layer_inputs(tuple(inputs)) if inputs else None
        self._last = runtime.capture_lm_head_input() if any(normed) else None
        self._normed = normed

    def _features(self, output: CommittedOutput) -> Tensor:
        """Join the features by layer: [R, len(feature_layers) * target_hidden]."""
        if self._last is None:
            assert self._inputs is not None
            return output.per_node[self._inputs]
        last = output.per_node[self._last]
        width = last.shape[1]
        inputs = torch.split(output.per_node[self._inputs], width, 1) if self._inputs else ()
        others = iter(inputs)
        return torch.cat([last if normed else next(others) for normed in self._normed], dim=1)

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Write the keys and values of the committed rows to the draft's KV cache."""
        if self._width > 1:
            plan = batch.attention
            if not batch.is_prefill:
                width = output.next_tokens.shape[0] // batch.size
                plan = self._runtime.plan_attention(batch, batch.seq_lens, width)
            assert plan is not None
            write = self._write if batch.is_prefill else self._write_paths
            write(self._features(output), plan)
        return DraftInput(bonus_tokens=output.bonus_tokens)

    def _write(self, features: Tensor, plan: AttentionPlan) -> None:
        """Write the keys and values of features [R, len(feature_layers) * target_hidden]."""
        context = self.network.fuse(features)
        for layer, (k, v) in enumerate(self.network.context_kv(context, plan.positions)):
            plan.write(self._cache, layer, k, v)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain of one block for each request in one pass, within ``max_draft_nodes``."""
        roots = draft_input.bonus_tokens
        width = min(self._width, max(batch.max_draft_nodes))
        if width == 1:
            return Draft.chain(roots.unsqueeze(1))
        rows = width - 1 + self._first_row
        plans = [
            self._runtime.plan_attention(
                batch, batch.seq_lens, rows, mask=None if mask is None else mask[:, :rows, :rows]
            )
            for mask in self._block_masks.values()
        ]
        tokens, scores = self._draft(batch, roots, rows, *plans)
        return Draft.chain(tokens, scores=scores)

    def _blocks(
        self, batch: Batch, roots: Tensor, rows: int, *plans: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Draft blocks of some rows each. ``plans`` are in the order of ``_block_masks``.

        Returns:
            Tokens [bs, N] int64, the roots first, and their scores, float32.
        """
        root = roots.unsqueeze(1)
        masks = self._masks[:, : rows - 1].expand(len(roots), -1)
        hidden = self._hidden(torch.cat((root, masks), dim=1), *plans)
        tokens, scores = self._choose(batch, roots, hidden)
        # The root's score is 0.
        scores = F.pad(scores.to(torch.float32), (1, 0))
        return torch.cat((root, tokens), dim=1), scores

    def _choose(self, batch: Batch, roots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the tokens of blocks.

        Args:
            roots: [bs] int64.
            hidden: [bs, rows, hidden], the input of the LM head; rows before ``_first_row`` draft
                nothing.

        Returns:
            Tokens [bs, N - 1] int64, and their scores [bs, N - 1]: of each token by itself,
            whatever stands before it.
        """
        drafting = hidden[:, self._first_row :]
        logits = self._lm_head(drafting.flatten(0, 1))
        bs, count = drafting.shape[:2]
        if not batch.greedy:
            positions = batch.seq_lens.unsqueeze(1) + self._ahead[:count]
            logits = couple(self._runtime, batch, logits, positions, self._token_ids)
        tokens, scores = self._likeliest(logits)
        return tokens.view(bs, count), scores.view(bs, count)

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each row of [R, V_draft], in the target's ids, and its
        log-probability: [R] int64, [R]."""
        return likeliest_tokens(logits, self._token_ids if self._has_own_ids else None)

    def _hidden(self, block: Tensor, *plans: AttentionPlan) -> Tensor:
        """Run blocks of token ids [bs, rows]. ``plans`` are in the order of ``_block_masks``.

        Returns:
            [bs, rows, hidden], the input of the LM head.
        """
        kinds = dict(zip(self._block_masks, plans, strict=True))
        config = self.network.config
        of_layer = [kinds[causal] for causal in config.causal]

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            window = config.windows[layer]
            return of_layer[layer].attend(self._cache, layer, q, k, v, window=window)

        hidden: Tensor = self.network(self._embed(block.flatten()), plans[0].positions, attend)
        normed: Tensor = self.network.norm(hidden)
        return normed.view(*block.shape, -1)
