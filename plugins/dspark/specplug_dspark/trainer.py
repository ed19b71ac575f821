"""The training of a DSpark network, of any target (arXiv 2607.05147)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug import DraftFiles, TrainingBatch, TrainingLoss, TrainingRuntime, UsageError
from specplug_dflash import trainer as dflash
from specplug_dflash.checkpoint import read
from specplug_dflash.config import DFlashConfig, flatten, read_keys
from specplug_dflash.config import read_config as read_backbone
from specplug_dflash.network import DFlashNetwork
from specplug_dspark.config import DSparkConfig, HeadType, read_config
from specplug_dspark.network import DSparkNetwork

CROSS_ENTROPY, DISTANCE, CONFIDENCE = 0.5, 0.9, 1.0
"""What counts in the loss how much: the cross entropy to the target's distribution, the L1 distance
from it, and the binary cross entropy of the confidence head."""


class DSparkTrainer(dflash.BlockTrainer):
    """Trains a network that drafts ``num_steps`` tokens in one pass, and draws them one by one.

    ``--start`` may be a DFlash network as well, which gets heads that change nothing yet.

    Settings (``--set``): those of DFlash's trainer; of new heads: ``markov_rank``,
    ``markov_head_type``.
    """

    network: DSparkNetwork
    learning_rate = 3e-3

    def __init__(self, runtime: TrainingRuntime) -> None:
        start = runtime.config.draft_model_path
        if start is not None and _has_heads(start):
            config = read_config(start)
            dflash.refuse_heads(config)
            optional = frozenset({"confidence_head.proj.bias"})
            network = read(DSparkNetwork, config, start, runtime, optional)
            self._published: Mapping[str, Any] = read_keys(start)
            super().__init__(runtime, network)
            return
        backbone, keys = _backbone(start, runtime)
        config = _with_heads(backbone.config, runtime)
        network = DSparkNetwork(
            config,
            runtime.context_len,
            own_embedding=backbone.embed_tokens is not None,
            own_head=backbone.lm_head is not None,
        )
        network.load_state_dict(backbone.state_dict(), strict=False)
        self._published = published_config(config, keys)
        super().__init__(runtime, network)
        if start is None:
            dflash.begin(self.network, runtime, runtime.example().features[self._captured])
        _begin_heads(self.network, runtime)

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the loss of drafts and of confidence.

        A draft of distribution q is accepted with the probability 1 - |p - q| / 2, which is the
        confidence head's goal. The Markov head is told the text's tokens: a row is looked at only
        if those before it are right.
        """
        blocks = self.draft(batch)
        drafting, markov = self.drafting(blocks), self.network.markov_head
        logits, before = self.logits(drafting), None
        if markov is not None:
            before = markov.markov_w1(blocks.before)
            logits = logits + markov.markov_w2(self._latents(blocks.hidden, before)).float()
        log_q = logits.log_softmax(-1)
        distance = (blocks.goal - log_q.exp()).abs().sum(-1)
        each = CROSS_ENTROPY * -(blocks.goal * log_q).sum(-1) + DISTANCE * distance
        if self.network.confidence_head is not None:
            sure = self.network.confidence_head(drafting, before).float()
            goal = (1 - distance.detach() / 2).clamp(0, 1)
            unsure = F.binary_cross_entropy_with_logits(sure, goal, reduction="none")
            each = each + CONFIDENCE * unsure
        return self.weighted(batch, blocks, each, log_q)

    def _latents(self, hidden: Tensor, before: Tensor) -> Tensor:
        """Return what the Markov head makes of the drafting rows: [B, A, S, r].

        Args:
            hidden: [B, A, rows of a block, H].
            before: [B, A, S, r] embeddings of the tokens before.
        """
        head, first = self.network.markov_head, self.network.config.first_row
        assert head is not None
        state = torch.zeros_like(before[:, :, 0])
        if first:  # the head passes over the anchor's row, too
            _, state = head.step(before[:, :, 0], hidden[:, :, 0], state)
        rows = []
        for row in range(before.shape[2]):
            latent, state = head.step(before[:, :, row], hidden[:, :, row + first], state)
            rows.append(latent)
        return torch.stack(rows, dim=2)

    def export(self) -> DraftFiles:
        """Return the network as deepseek-ai publishes it, or in the layout of the one that it goes
        on from."""
        return DraftFiles(config=self._published, tensors=self.network.state_dict())


def _has_heads(path: Path) -> bool:
    """Return whether a checkpoint is DSpark's; else it is DFlash's."""
    return flatten(read_keys(path)).get("markov_rank") is not None


def _backbone(
    start: Path | None, runtime: TrainingRuntime
) -> tuple[DFlashNetwork, Mapping[str, Any]]:
    """Return the DFlash network that heads are added to, and its ``config.json``."""
    if start is None:
        config: DFlashConfig = dflash.new_config(runtime)
        network = DFlashNetwork(config, runtime.context_len)
        return network, dflash.published_config(config)
    config = read_backbone(start)
    dflash.refuse_heads(config)
    return read(DFlashNetwork, config, start, runtime), read_keys(start)


def _with_heads(config: DFlashConfig, runtime: TrainingRuntime) -> DSparkConfig:
    kind: Any = runtime.setting("markov_head_type", "rnn")
    if kind not in get_args(HeadType):
        raise UsageError(
            f"--set markov_head_type={kind}: expected one of {', '.join(get_args(HeadType))}"
        )
    return DSparkConfig(
        **attrs.asdict(config, recurse=False),
        markov_rank=runtime.setting("markov_rank", min(256, config.hidden_size)),
        markov_head_type=kind,
        confidence_head=True,
        confidence_head_with_markov=True,
    )


@torch.no_grad()
def _begin_heads(network: DSparkNetwork, runtime: TrainingRuntime) -> None:
    """Let new heads change nothing yet. The Markov head knows tokens by as much as it has room for
    of the target's embeddings, at a size of 1."""
    markov, confidence = network.markov_head, network.confidence_head
    assert markov is not None
    assert confidence is not None
    ids = torch.arange(runtime.vocab_size, device=runtime.device)
    embedding = runtime.embed_tokens(ids)[:, : network.config.markov_rank].float()
    size = embedding.square().mean().sqrt().clamp(min=1e-6)
    markov.markov_w1.weight[:, : embedding.shape[1]] = embedding / size
    for projection in (markov.markov_w2, confidence.proj):
        for parameter in projection.parameters():
            nn.init.zeros_(parameter)


def published_config(config: DSparkConfig, keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``config.json`` of heads that are new.

    Args:
        keys: of the backbone, in z-lab's layout or ``speculators``', which stay as they are.
    """
    values = {
        **keys,
        "architectures": ["DSparkDraftModel"],
        "confidence_head_with_markov": config.confidence_head_with_markov,
        "enable_confidence_head": config.confidence_head,
        "markov_head_type": config.markov_head_type,
        "markov_rank": config.markov_rank,
        "sample_from_anchor": config.sample_from_anchor,
    }
    if "speculators_model_type" in keys:
        values["speculators_model_type"] = "dspark"
    return values
