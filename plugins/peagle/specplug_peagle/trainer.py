"""The training of a P-EAGLE head, of any target (arXiv 2602.01469)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import (
    Checkpoint,
    DraftFiles,
    Trainer,
    TrainingBatch,
    TrainingLoss,
    TrainingRuntime,
    begin_like,
)
from specplug_eagle3 import trainer as eagle3
from specplug_eagle3.checkpoint import read_network as read_head
from specplug_eagle3.network import Eagle3Network
from specplug_peagle.checkpoint import read_network
from specplug_peagle.network import PEagleConfig, PEagleNetwork

DECAY = 5.0
"""A mask of depth d counts exp(-d / DECAY)."""
REACH = 0.8
"""How much of a mask's weight depends on how likely it is that its group is right before it."""


class PEagleTrainer(Trainer):
    """Trains a head that drafts ``num_steps`` tokens in one pass.

    ``--start`` may be an EAGLE-3 head as well, which gets further layers that change nothing yet.

    Settings (``--set``): ``groups``, the places of a text that masks stand after. Of a new head:
    ``num_hidden_layers``, ``mask_token_id`` (a token that is written least), and those of EAGLE-3's
    trainer.
    """

    network: PEagleNetwork
    learning_rate = 4e-3

    def __init__(self, runtime: TrainingRuntime) -> None:
        self.runtime = runtime
        start = runtime.config.draft_model_path
        if start is not None and not _is_eagle3(start):
            network = read_network(start, runtime)
        else:
            head = eagle3.new_network(runtime) if start is None else read_head(start, runtime)
            network = _new_network(head, runtime)
        self.network = network.to(runtime.device, torch.float32)
        config = network.config
        self._captured = runtime.capture_layer_inputs(config.aux_layer_ids)
        self._head_input = runtime.capture_lm_head_input()
        if start is None or _is_eagle3(start):
            features = runtime.example().features[self._captured]
            if start is None:
                eagle3.begin_as_target_ends(network, runtime, features)
            _begin_masks(network, runtime, features)
        self._embed = network.embed_tokens or runtime.embed_tokens
        self.token_ids = torch.arange(config.draft_vocab_size, device=runtime.device) + network.d2t
        known = torch.zeros(config.vocab_size, dtype=torch.bool, device=runtime.device)
        self._known = known.index_fill_(0, self.token_ids, True)
        self._depth = runtime.config.num_steps - 1
        self._groups = runtime.setting("groups", 32)

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy of all positions, and of the masks after some of them, to the
        target's distribution.

        A mask's weight falls with its depth d = 1, 2, …, and with how likely it is that its group
        is right before it: what follows a wrong token is never looked at.
        """
        goal, counted = self._goal(batch)
        anchors = self._choose_anchors(counted)
        text, masks = self._draft(batch, anchors)
        of_text = -(goal[:, 1:] * text[:, :-1]).sum(-1)
        loss = batch.mean(of_text, counted[:, 1:])
        # Of each group: its anchor, which says the first token, and its masks.
        places = anchors.unsqueeze(2) + 1 + torch.arange(self._depth + 1, device=anchors.device)
        row = torch.arange(len(anchors), device=anchors.device).view(-1, 1, 1)
        inside = places < goal.shape[1]
        places = places.clamp(max=goal.shape[1] - 1)
        goals, counts = goal[row, places], (counted[row, places] & inside).long().cumprod(2)
        first = text.gather(1, anchors.unsqueeze(2).expand(-1, -1, text.shape[2]))
        ours = torch.cat((first.unsqueeze(2), masks), dim=2)
        with torch.no_grad():
            reached = torch.minimum(goals, ours.exp()).sum(-1).cumprod(2)[..., :-1]
            depths = torch.arange(1, self._depth + 1, device=anchors.device)
            weight = torch.exp(-depths / DECAY) * (1 - REACH + REACH * reached) * counts[..., 1:]
            right = (ours.argmax(-1) == goals.argmax(-1)).float().cumprod(2)
            found = [batch.mean(right[..., d], counts[..., d]) for d in range(self._depth + 1)]
        loss = loss + batch.mean(-(goals[:, :, 1:] * masks).sum(-1), weight)
        return TrainingLoss(loss=loss, metrics={"top-1": torch.stack(found)})

    def _goal(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the target's distribution after each position over the draft's vocabulary, [B, L,
        V_draft] float32, and where it counts [B, L]: its top token is in that vocabulary."""
        with torch.no_grad():
            logits = self.runtime.target_logits(batch.features[self._head_input])
            counted = batch.counted & self._known[logits.argmax(-1)]
            return logits[..., self.token_ids].float().softmax(-1), counted

    def _choose_anchors(self, counted: Tensor) -> Tensor:
        """Return [B, A] different positions of each text, first of all those before one that
        counts."""
        length = counted.shape[1] - 1
        chances = torch.rand(len(counted), length, device=counted.device) + counted[:, 1:]
        return chances.topk(min(self._groups, length)).indices

    def _draft(self, batch: TrainingBatch, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Run the network over texts, and over masks after their anchors.

        Returns:
            Log-probabilities: [B, L, V_draft] of the token at p + 2, and [B, A, D, V_draft], where
            mask d = 1, 2, … after an anchor says the token d + 2 after it.
        """
        network, depth, (rows, length) = self.network, self._depth, batch.tokens.shape
        count = anchors.shape[1] * depth
        ahead = torch.arange(1, depth + 1, device=anchors.device)
        places = (anchors.unsqueeze(2) + ahead).flatten(1).clamp(max=self.runtime.context_len - 1)
        order = torch.arange(length, device=anchors.device).expand(rows, -1)
        positions = torch.cat((order, places), dim=1)
        mask = places.new_full((rows, count), network.config.mask_token_id)
        read = torch.cat((F.pad(batch.tokens[:, 1:], (0, 1)), mask), dim=1)
        features = batch.features[self._captured].flatten(0, 1).float()
        fused = network.fuse(features).view(rows, length, -1)
        unknown = network.mask_feature().to(fused.dtype).expand(rows, count, -1)
        hidden = network(
            self._embed(read.flatten()).float(),
            torch.cat((fused, unknown), dim=1).flatten(0, 1),
            positions.flatten(),
            ParallelAttention(anchors, length, depth),
        )
        logs = network.logits(hidden).float().log_softmax(-1)
        logs = logs.view(rows, length + count, -1)
        shape = rows, anchors.shape[1], depth, logs.shape[2]
        return logs[:, :length], logs[:, length:].reshape(shape)

    def export(self) -> DraftFiles:
        """Return the head as ``speculators`` publishes it."""
        tensors = {
            name.replace("midlayer.", "layers.0.", 1): tensor
            for name, tensor in self.network.state_dict().items()
        }
        config = published_config(self.network.config, self.runtime.config.num_steps)
        return DraftFiles(config=config, tensors=tensors)


class ParallelAttention:
    """An ``Attend`` for training: B texts of L positions, and groups of D masks after some of them.

    The rows of a text are its L positions, and then A groups of D masks. A position sees those up
    to itself. A mask sees the positions up to its group's anchor, and the masks of its group up to
    itself.

    Args:
        anchors: [B, A] positions.
        length, depth: L and D.
    """

    def __init__(self, anchors: Tensor, length: int, depth: int) -> None:
        self._texts, groups = anchors.shape
        order = torch.arange(length, device=anchors.device)
        masks = torch.arange(groups * depth, device=anchors.device)
        text = (order <= order.unsqueeze(1)).expand(self._texts, -1, -1)
        context = (order <= anchors.unsqueeze(2)).repeat_interleave(depth, dim=1)
        group, place = masks // max(depth, 1), masks % max(depth, 1)
        own = (group == group.unsqueeze(1)) & (place <= place.unsqueeze(1))
        lower = torch.cat((context, own.expand(self._texts, -1, -1)), dim=2)
        self._mask = torch.cat((F.pad(text, (0, len(masks))), lower), dim=1).unsqueeze(1)

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [R, H, D], key and value [R, Hkv, D] -> [R, H * D], R = B * (L + A * D)."""
        groups = query.shape[1] // key.shape[1]
        query, key, value = (
            x.to(value.dtype).reshape(self._texts, -1, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=self._mask)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def _is_eagle3(path: Path) -> bool:
    """Return whether a checkpoint is an EAGLE-3 head: it has no mask."""
    names: list[str] = []
    Checkpoint.read(path, keep=lambda name: bool(names.append(name)))  # type: ignore[func-returns-value]
    return not any(name.endswith("mask_hidden") for name in names)


def _new_network(head: Eagle3Network, runtime: TrainingRuntime) -> PEagleNetwork:
    """Return an EAGLE-3 head with further layers as large as its own."""
    config = PEagleConfig(
        **attrs.asdict(head.config, recurse=False),
        num_hidden_layers=runtime.setting("num_hidden_layers", 3),
        mask_token_id=runtime.setting("mask_token_id", int(runtime.token_counts().argmin())),
    )
    network = PEagleNetwork(config, own_embedding=head.embed_tokens is not None)
    network.load_state_dict(head.state_dict(), strict=False)
    return network


@torch.no_grad()
def _begin_masks(network: PEagleNetwork, runtime: TrainingRuntime, features: Tensor) -> None:
    """Let the further layers begin as the target's last one, but change nothing yet; and a mask at
    random, as large as the features are.

    Args:
        features: [B, L, layers * target_hidden_size].
    """
    for layer in network.layers.values():
        begin_like(layer, runtime.target_layer(-1))
        for name, parameter in layer.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                nn.init.zeros_(parameter)
    parts = features.flatten(0, 1).float().chunk(len(network.config.aux_layer_ids), dim=1)
    sizes = torch.stack([part.square().mean().sqrt() for part in parts])
    mask = torch.randn(len(parts), network.config.target_hidden_size, device=sizes.device)
    network.mask_hidden.copy_((mask * sizes.unsqueeze(1)).view(1, 1, -1))


def published_config(config: PEagleConfig, num_steps: int) -> dict[str, Any]:
    """Return ``config.json`` in ``speculators``' layout."""
    known = ("rope_theta", "rope_scaling", "rope_parameters")
    decoder = (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
        "head_dim", "num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings",
    )  # fmt: skip
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_steps}
    return {
        "architectures": ["PEagleSpeculator"],
        "draft_vocab_size": config.draft_vocab_size,
        "dtype": "bfloat16",
        "eagle_aux_hidden_state_layer_ids": list(config.aux_layer_ids),
        "fc_norm": config.fc_norm,
        "mask_token_id": config.mask_token_id,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "speculators_config": {
            "algorithm": "peagle",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
        "speculators_model_type": "peagle",
        "target_hidden_size": config.target_hidden_size,
        "transformer_layer_config": {
            "model_type": "llama",
            "hidden_act": "silu",
            **{name: getattr(config, name) for name in decoder},
            **{key: config.rope[key] for key in known if config.rope.get(key) is not None},
        },
    }
