"""The training of an EAGLE-3 head, of any target (arXiv 2503.01840)."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug import (
    DraftFiles,
    FeatureTrainer,
    TrainingBatch,
    TrainingRuntime,
    UsageError,
    begin_like,
    layer_sizes,
    layers,
    norm_weight,
)
from specplug_eagle3.checkpoint import read_network
from specplug_eagle3.network import Eagle3Config, Eagle3Network

ATTENTION, INNER = 320, 1280
"""How wide a head's attention and the inside of its feed-forward layer are at least: a network that
is as narrow as a small target learns slower by more than it is cheaper."""

SMALLEST = 0.01
"""Features that the target's final norm makes smaller than this share of the mean count no more."""


class Eagle3Trainer(FeatureTrainer):
    """Trains a head that begins as the target ends, on the inputs of a low, a middle and a high
    layer.

    Its LM head is the target's, and what that reads is learnt, too; so a few thousand steps are
    enough. With ``--set train_head=1`` it is learnt as the rest is, and so is that of a network to
    go on from.

    Settings (``--set``): ``draft_vocab_size``, ``intermediate_size``, ``num_attention_heads``,
    ``train_head``.
    """

    network: Eagle3Network
    rows = 4

    def __init__(self, runtime: TrainingRuntime) -> None:
        start = runtime.config.draft_model_path
        if start is None:
            self.network = new_network(runtime)
        else:
            self.network = read_network(start, runtime)
        self.network.to(runtime.device, torch.float32)
        config = self.network.config
        self._captured = runtime.capture_layer_inputs(config.aux_layer_ids)
        self._embed = self.network.embed_tokens or runtime.embed_tokens
        ids = torch.arange(config.draft_vocab_size) + self.network.d2t.cpu()
        super().__init__(runtime, ids)
        self._scale: Tensor | None = None
        train_head = runtime.setting("train_head", 0)
        if start is None:
            begin_as_target_ends(self.network, runtime, runtime.example().features[self._captured])
            self.network.lm_head.requires_grad_(bool(train_head))
            scale = norm_weight(runtime.final_norm, self.network.norm.weight)
            if scale is not None:
                sizes = scale.detach().float().abs()
                self._scale = sizes.clamp(min=SMALLEST * float(sizes.mean()))

    def features(self, batch: TrainingBatch) -> Tensor:
        """Return the fused features of the chosen target layers, [B * L, H]."""
        return self.network.fuse(batch.features[self._captured].flatten(0, 1).float())

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run the network on token ids [R] and features [R, H]."""
        output: Tensor = self.network(self._embed(tokens).float(), hidden, positions, attend)
        return output

    def logits(self, hidden: Tensor) -> Tensor:
        """Compute logits over the draft's own vocabulary: [R, H] to [R, V_draft]."""
        return self.network.logits(hidden)

    def distance(self, hidden: Tensor, wanted: Tensor) -> Tensor | None:
        """Compare with what the target's LM head reads, each feature in units of what the final
        norm multiplies it by."""
        if self._scale is None:
            return None
        apart = self.network.norm(hidden).float() - wanted.float()
        return torch.mean((apart / self._scale).square(), dim=-1)

    def export(self) -> DraftFiles:
        """Return the head as SafeAILab publishes it."""
        return DraftFiles(
            config=published_config(self.network.config), tensors=self.network.state_dict()
        )


def new_network(runtime: TrainingRuntime) -> Eagle3Network:
    """Make a small random head as wide as the target, whose vocabulary is the tokens that the
    target writes most."""
    most = min(32000, 3 * runtime.vocab_size // 4)
    vocabulary = runtime.setting("draft_vocab_size", most)
    sizes = layer_sizes(runtime, intermediate_size=max(4 * runtime.hidden_size, INNER))
    heads, each = sizes["num_attention_heads"], sizes["head_dim"]
    # Multiples, so that the first ones can begin as the target's: each with its keys and values.
    wanted = runtime.setting("num_attention_heads", heads * max(1, -(-ATTENTION // (heads * each))))
    if wanted < 1 or wanted % heads:
        raise UsageError(
            f"--set num_attention_heads={wanted}: expected a multiple of the target's {heads}"
        )
    sizes["num_attention_heads"] = wanted
    sizes["num_key_value_heads"] *= wanted // heads
    config = Eagle3Config(
        target_hidden_size=runtime.hidden_size,
        vocab_size=runtime.vocab_size,
        draft_vocab_size=vocabulary,
        aux_layer_ids=aux_layers(runtime.num_layers),
        **sizes,
    )
    network = Eagle3Network(config)
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.1 if name == "fc.weight" else 0.3
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
    counts = runtime.token_counts()
    chosen = counts.argsort(descending=True, stable=True)[:vocabulary].sort().values
    network.d2t.copy_(chosen - torch.arange(vocabulary))
    network.t2d[chosen] = True
    return network


def aux_layers(count: int) -> tuple[int, ...]:
    """Return the layers whose inputs are fused: a low, a middle and a high one of ``count``."""
    return (min(2, count - 1), count // 2, max(count - 3, 0))


@torch.no_grad()
def begin_as_target_ends(
    network: Eagle3Network, runtime: TrainingRuntime, features: Tensor
) -> None:
    """Give a new head the target's last layer, final norm and output head.

    The residual stream begins as the highest feature. All features are brought to one size: those
    of later layers are many times as large. What reads the embeddings, and the lower features,
    begins small and random.

    Args:
        features: [B, L, 3 * hidden_size], which show how large they are.
    """
    count = len(network.config.aux_layer_ids)
    parts = features.flatten(0, 1).float().chunk(count, dim=1)
    sizes = torch.stack([part.square().mean().sqrt().clamp(min=1e-6) for part in parts])
    fused = network.fc.weight.view(network.config.hidden_size, count, -1)
    fused[:, -1].add_(torch.eye(network.config.hidden_size, device=fused.device))
    fused.div_(sizes[:, None])
    layer, last = network.midlayer, runtime.target_layer(-1)
    begin_like(layer, last)
    input_norm = getattr(last, "input_layernorm", None)
    for ours, theirs in ((layer.hidden_norm, input_norm), (network.norm, runtime.final_norm)):
        scale = norm_weight(theirs, ours.weight) if theirs is not None else None
        if scale is not None:
            ours.weight.copy_(scale)
    layer.input_layernorm.weight.fill_(1.0)
    network.lm_head.weight.copy_(runtime.lm_head_rows(network.t2d.nonzero().squeeze(1)))


def published_config(config: Eagle3Config) -> dict[str, Any]:
    """Return ``config.json`` in SafeAILab's layout."""
    values = attrs.asdict(config)
    aux, rope = values.pop("aux_layer_ids"), values.pop("rope")
    for derived in ("attention_bias", "output_bias", "query_key_norm", "own_embedding_size"):
        values.pop(derived)  # the tensors say it
    known = ("rope_theta", "rope_scaling", "rope_parameters")
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **values,
        **{key: rope[key] for key in known if rope.get(key) is not None},
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        # The layers whose outputs are read: one less than those whose inputs are.
        "eagle_aux_hidden_state_layer_ids": [layer - 1 for layer in aux],
    }
