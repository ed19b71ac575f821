"""The EAGLE-3 drafter: fuses the target's features and drafts from them."""

from __future__ import annotations

import torch
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    FeatureDrafter,
    KVCache,
    Runtime,
)
from specplug_eagle3.checkpoint import load_network


class Eagle3Worker:
    """Draft weights and draft KV cache; the network that ``FeatureDrafter`` steps.

    Args:
        runtime: the engine's.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._network = load_network(runtime)
        config = self._network.config
        own = self._network.embed_tokens
        self._embed = runtime.embed_tokens if own is None else own
        self._features = runtime.capture_layer_inputs(config.aux_layer_ids)
        self._dtype = runtime.dtype
        self.hidden_size = config.hidden_size
        order = torch.arange(config.draft_vocab_size, device=runtime.device)
        self.token_ids = order + self._network.d2t
        cache = runtime.allocate_kv(1, config.num_key_value_heads, config.head_dim)
        self._drafter = FeatureDrafter(runtime, self, cache)

    def hidden_size_for(self) -> int:
        """Width of the hidden states in a draft input: the draft's own, not the target's."""
        return self.hidden_size

    def dtype_for(self) -> torch.dtype:
        """Type of the hidden states in a draft input."""
        return self._dtype

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """See ``FeatureDrafter.extend``."""
        fused = self._network.fuse(output.per_node[self._features])
        return self._drafter.extend(batch, output, fused)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """See ``FeatureDrafter.propose``."""
        return self._drafter.propose(batch, draft_input)

    def step(self, tokens: Tensor, hidden: Tensor, plan: AttentionPlan, cache: KVCache) -> Tensor:
        """See ``FeatureNetwork.step``."""

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(cache, layer, q, k, v)

        return self._network(self._embed(tokens), hidden, plan.positions, attend)

    def logits(self, hidden: Tensor) -> Tensor:
        """See ``FeatureNetwork.logits``."""
        return self._network.logits(hidden)
