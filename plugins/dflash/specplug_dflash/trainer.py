"""The training of a DFlash network, of any target (arXiv 2602.06036)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import (
    DraftFiles,
    Trainer,
    TrainingBatch,
    TrainingLoss,
    TrainingRuntime,
    UsageError,
    layer_sizes,
    norm_weight,
)
from specplug_dflash.checkpoint import read
from specplug_dflash.config import DFlashConfig, read_config, read_keys
from specplug_dflash.network import DFlashNetwork

DECAY = 5.0
"""The drafted token j = 0, 1, … of a block counts exp(-j / DECAY), as in the paper."""
REACH = 0.8
"""How much of that weight depends on how likely all drafted tokens before it are to be right."""
SHORTER = 0.3
"""The share of blocks that have fewer rows, so that the network can draft fewer tokens than it was
made for."""


@attrs.frozen(eq=False, kw_only=True)
class Blocks:
    """A blocks in each of B texts, and what S rows of each are to say.

    Attributes:
        hidden: [B, A, rows of a block, H], the LM head's input.
        text: [B, A, S] int64 the text's tokens; before [B, A, S] those before them.
        goal: [B, A, S, V_draft] the target's distribution, float32.
        counted: [B, A, S] bool, whether a row counts.
    """

    hidden: Tensor
    text: Tensor
    before: Tensor
    goal: Tensor
    counted: Tensor


class BlockTrainer(Trainer):
    """What is the same for all networks that draft blocks: which blocks, and how they are run.

    Args:
        runtime: of the run.
        network: that is trained, over the vocabulary that it drafts from.
    """

    network: DFlashNetwork
    learning_rate = 4e-3

    def __init__(self, runtime: TrainingRuntime, network: DFlashNetwork) -> None:
        self.runtime = runtime
        self.network = network.to(runtime.device, torch.float32)
        config = network.config
        self._captured = runtime.capture_layer_inputs(config.feature_layers)
        self._head_input = runtime.capture_lm_head_input()
        self._normed_last = config.normed_last and config.feature_layers[-1] == runtime.num_layers
        self._embed = network.embed_tokens or runtime.embed_tokens
        ids = torch.arange(config.draft_vocab_size, device=runtime.device)
        self.token_ids = ids + network.d2t if network.lm_head is not None else ids
        own_ids = torch.full((runtime.vocab_size,), -1, device=runtime.device)
        self._own_ids = own_ids.index_copy_(0, self.token_ids, ids)
        self._blocks = runtime.setting("blocks", 32)

    def features(self, batch: TrainingBatch) -> Tensor:
        """Return the target's features as ``DFlashNetwork.fuse`` reads them, [B * L, F]."""
        features = batch.features[self._captured].flatten(0, 1)
        if self._normed_last:
            size = self.runtime.hidden_size
            last = self.runtime.final_norm(features[:, -size:])
            features = torch.cat((features[:, :-size], last), dim=1)
        return features.float()

    def draft(self, batch: TrainingBatch) -> Blocks:
        """Draft blocks at random places of each text, first of all those after which the target's
        word counts."""
        config, tokens = self.network.config, batch.tokens
        anchors, lengths = self._choose(batch)
        ahead = torch.arange(config.most_steps, device=tokens.device)
        places = anchors.unsqueeze(2) + ahead
        inside = places < tokens.shape[1] - 1
        places = places.clamp(max=tokens.shape[1] - 2)
        text = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        known = self._own_ids[tokens[text, places + 1]] >= 0
        counted = batch.counted[text, places] & inside
        counted &= ahead < (lengths - config.idle_rows).unsqueeze(2)
        # What follows a token that the draft does not know, or that does not count, is not reached.
        counted = counted.long().cumprod(2).bool()
        reached = F.pad(known[..., :-1], (1, 0), value=True).long().cumprod(2).bool()
        with torch.no_grad():
            logits = self.runtime.target_logits(batch.features[self._head_input][text, places])
            found = self._own_ids[logits.argmax(-1)] >= 0
            goal = logits[..., self.token_ids].float().softmax(-1)
        return Blocks(
            hidden=self._run(batch, anchors, lengths),
            text=self._own_ids[tokens[text, places + 1]].clamp(min=0),
            before=tokens[text, places],
            goal=goal,
            counted=counted & reached & found,
        )

    def _choose(self, batch: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the blocks' places in the texts and their rows, both [B, A]."""
        size, counted = self.network.config.block_size, batch.counted[:, 1:-1]
        chances = torch.rand(counted.shape, device=counted.device) + counted
        anchors = 1 + chances.topk(min(self._blocks, counted.shape[1])).indices
        least = 1 + self.network.config.idle_rows
        lengths = torch.randint(least, max(size, least + 1), anchors.shape, device=anchors.device)
        cut = torch.rand(anchors.shape, device=anchors.device) < SHORTER
        return anchors, torch.where(cut, lengths, size)

    def _run(self, batch: TrainingBatch, anchors: Tensor, lengths: Tensor) -> Tensor:
        """Run the network on blocks at these places, [B, A] each, to ``Blocks.hidden``."""
        network, (rows, length) = self.network, batch.tokens.shape
        size = network.config.block_size
        order = torch.arange(length, device=anchors.device).repeat(rows)
        context = network.context_kv(network.fuse(self.features(batch)), order)
        attend = BlockAttention(network.config, context, anchors, lengths)
        ids = anchors.new_full((*anchors.shape, size), network.config.mask_token_id)
        ids[..., 0] = batch.tokens.gather(1, anchors)
        positions = anchors.unsqueeze(2) + torch.arange(size, device=anchors.device)
        positions = positions.clamp(max=self.runtime.context_len - 1)
        embeds = self._embed(ids.flatten()).float()
        hidden = network.norm(network(embeds, positions.flatten(), attend, size))
        made: Tensor = hidden.view(*ids.shape, -1)
        return made

    def drafting(self, blocks: Blocks) -> Tensor:
        """Return the hidden states of the rows that draft, [B, A, S, H]."""
        config = self.network.config
        return blocks.hidden[:, :, config.first_row : config.first_row + config.most_steps]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits over the draft's vocabulary: […, H] to […, V_draft] float32."""
        head = self.network.lm_head
        if head is None:
            logits = self.runtime.lm_head(hidden.to(self.runtime.dtype))
        else:
            logits = head(hidden)
        return self.network.scaled(logits.float())

    def weighted(
        self, batch: TrainingBatch, blocks: Blocks, each: Tensor, log_q: Tensor
    ) -> TrainingLoss:
        """Return the mean of the rows' losses, by what they count.

        A token after a wrong one is never looked at, so a row need only be right about texts that
        the rows before it would have drafted.

        Args:
            each: [B, A, S] of the rows.
            log_q: [B, A, S, V_draft] what the network says.
        """
        with torch.no_grad():
            text, counted = blocks.text.unsqueeze(3), blocks.counted
            likely = log_q.gather(3, text) - blocks.goal.gather(3, text).clamp(min=1e-30).log()
            right = likely.squeeze(3).clamp(max=0).exp()
            reached = F.pad(right[..., :-1], (1, 0), value=1.0).cumprod(2)
            decay = torch.exp(-torch.arange(each.shape[2], device=each.device) / DECAY)
            weight = decay * (1 - REACH + REACH * reached) * counted
            run = (log_q.argmax(-1) == blocks.text).float().cumprod(2)
            found = [batch.mean(run[..., j], counted[..., j]) for j in range(each.shape[2])]
        return TrainingLoss(loss=batch.mean(each, weight), metrics={"top-1": torch.stack(found)})


class DFlashTrainer(BlockTrainer):
    """Trains a network that drafts ``num_steps`` tokens in one pass.

    Settings (``--set``): ``blocks`` of a text. Of a new network: ``num_hidden_layers``,
    ``intermediate_size``, ``features`` (target layers that are fused), ``mask_token_id`` (a token
    that is written least).
    """

    def __init__(self, runtime: TrainingRuntime) -> None:
        start = runtime.config.draft_model_path
        if start is None:
            config = new_config(runtime)
            network = DFlashNetwork(config, runtime.context_len)
            self._published: Mapping[str, Any] = published_config(config)
        else:
            config = read_config(start)
            refuse_heads(config)
            network = read(DFlashNetwork, config, start, runtime)
            self._published = read_keys(start)
        super().__init__(runtime, network)
        if start is None:
            begin(self.network, runtime, runtime.example().features[self._captured])

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy of the drafted rows to the target's distribution."""
        blocks = self.draft(batch)
        log_q = self.logits(self.drafting(blocks)).log_softmax(-1)
        return self.weighted(batch, blocks, -(blocks.goal * log_q).sum(-1), log_q)

    def export(self) -> DraftFiles:
        """Return the network in z-lab's layout, or in that of the one that it goes on from."""
        return DraftFiles(config=self._published, tensors=self.network.state_dict())


class BlockAttention:
    """An ``Attend`` for training: A blocks in each of B texts of L positions.

    A block sees the target's features of the positions before its anchor, and itself, as far as
    each layer's window and order let it.

    Args:
        config: of the network.
        context: keys and values [B * L, Hkv, D] of the features, for each layer.
        anchors, lengths: [B, A] the blocks' positions and rows; rows after these are padding.
    """

    def __init__(
        self,
        config: DFlashConfig,
        context: list[tuple[Tensor, Tensor]],
        anchors: Tensor,
        lengths: Tensor,
    ) -> None:
        self._context, self._texts = context, len(anchors)
        kinds = list(zip(config.causal, config.windows, strict=True))
        masks = {
            kind: block_mask(anchors, lengths, config.block_size, len(context[0][0]), *kind)
            for kind in set(kinds)
        }
        self._masks = [masks[kind] for kind in kinds]

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [R, H, D], key and value [R, Hkv, D] -> [R, H * D], R rows of all
        blocks."""

        def by_text(x: Tensor) -> Tensor:
            return x.to(value.dtype).reshape(self._texts, -1, *x.shape[1:])

        groups = query.shape[1] // key.shape[1]
        pairs = zip(self._context[layer], (key, value), strict=True)
        keys, values = (
            torch.cat((by_text(a), by_text(b)), 1).repeat_interleave(groups, dim=2).transpose(1, 2)
            for a, b in pairs
        )
        queries = by_text(query).transpose(1, 2)
        mask = self._masks[layer]
        mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)


def block_mask(
    anchors: Tensor, lengths: Tensor, size: int, context: int, causal: bool, window: int | None
) -> Tensor:
    """Return what the rows of blocks see of a text and of all its blocks: [B, 1, A * size, L + A *
    size] bool.

    Args:
        anchors, lengths: as ``BlockAttention`` has them.
        size: rows of a block.
        context: B * L.
        causal, window: of the layer, as ``DFlashConfig`` has them.
    """
    order = torch.arange(context // len(anchors), device=anchors.device)
    row = torch.arange(anchors.shape[1] * size, device=anchors.device)
    block, place = row // size, row % size
    positions = (anchors.unsqueeze(2) + torch.arange(size, device=row.device)).flatten(1)
    starts = anchors.repeat_interleave(size, dim=1)
    before = order < starts.unsqueeze(2)
    same = (block.unsqueeze(1) == block) & (place < lengths.repeat_interleave(size, 1).unsqueeze(1))
    if causal:
        same = same & (place <= place.unsqueeze(1))
    if window is not None:
        before = before & (order > positions.unsqueeze(2) - window)
        same = same & (place > place.unsqueeze(1) - window)
    # A padded row sees itself, so that it sees anything.
    same = same | (row.unsqueeze(1) == row)
    return torch.cat((before, same), dim=2).unsqueeze(1)


def refuse_heads(config: DFlashConfig) -> None:
    """Refuse a network with parts whose losses are not here.

    Raises:
        UsageError: it has such a part.
    """
    parts = {
        "a candidate selector": config.selector_rank,
        "a Domino head": config.gru_hidden_dim,
        "a LiLiCorr head": config.lilicorr is not None,
    }
    for part, is_there in parts.items():
        if is_there:
            raise UsageError(
                f"start: the draft model has {part}; expected one without, which is what this "
                "trainer can go on training"
            )


def new_config(runtime: TrainingRuntime) -> DFlashConfig:
    """Return the sizes of a network as wide as the target, on features spread from its second to
    its third last layer."""
    sizes = layer_sizes(runtime)
    sizes.pop("max_position_embeddings")
    count = runtime.setting("num_hidden_layers", 3)
    first = min(2, runtime.num_layers - 1)
    spread = torch.linspace(
        first, max(first, runtime.num_layers - 2), runtime.setting("features", 5)
    )
    return DFlashConfig(
        **sizes,
        num_hidden_layers=count,
        target_hidden_size=runtime.hidden_size,
        vocab_size=runtime.vocab_size,
        draft_vocab_size=runtime.vocab_size,
        block_size=runtime.config.num_steps + 1,
        mask_token_id=runtime.setting("mask_token_id", int(runtime.token_counts().argmin())),
        feature_layers=tuple(sorted({round(layer) for layer in spread.tolist()})),
        causal=(False,) * count,
        windows=(None,) * count,
        num_target_layers=runtime.num_layers,
    )


@torch.no_grad()
def begin(network: DFlashNetwork, runtime: TrainingRuntime, features: Tensor) -> None:
    """Let a new network begin with small weights and the target's final norm, as the LM head is the
    target's. The features, which grow from layer to layer, are brought to one size.

    Args:
        features: [B, L, layers * hidden_size], which show how large they are.
    """
    for name, parameter in network.named_parameters():
        if parameter.ndim == 2:
            small = 0.3 if "o_proj" in name or "down" in name else 1.0
            nn.init.normal_(parameter, std=small * parameter.shape[1] ** -0.5)
    count = len(network.config.feature_layers)
    parts = features.flatten(0, 1).float().chunk(count, dim=1)
    sizes = torch.stack([part.square().mean().sqrt().clamp(min=1e-6) for part in parts])
    network.fc.weight.view(len(network.fc.weight), count, -1).div_(sizes[:, None])
    scale = norm_weight(runtime.final_norm, network.norm.weight)
    if scale is not None:
        network.norm.weight.copy_(scale)


def published_config(config: DFlashConfig) -> dict[str, Any]:
    """Return ``config.json`` of a new network in z-lab's layout."""
    known = ("rope_theta", "rope_scaling", "rope_parameters")
    same = (
        "block_size", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "num_target_layers", "rms_norm_eps",
        "vocab_size",
    )  # fmt: skip
    return {
        "architectures": ["DFlashDraftModel"],
        "attention_bias": False,
        # The layers whose outputs are read: one less than those whose inputs are.
        "dflash_config": {
            "mask_token_id": config.mask_token_id,
            "target_layer_ids": [layer - 1 for layer in config.feature_layers],
        },
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "layer_types": ["full_attention"] * config.num_hidden_layers,
        "model_type": "qwen3",
        "tie_word_embeddings": True,
        **{name: getattr(config, name) for name in same},
        **{key: config.rope[key] for key in known if config.rope.get(key) is not None},
    }
