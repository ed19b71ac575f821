"""The P-EAGLE draft network: EAGLE-3's layer, decoder layers after it, and rows of masks.

Hui, Huang, Campos Salas et al., "P-EAGLE: Parallel-Drafting EAGLE with Scalable Training",
arXiv 2602.01469. Parameter names are EAGLE-3's; the further layers are ``layers.1.*`` and so on,
as in the published checkpoints. Training and serving run this same class, with different
``attend`` callbacks.
"""

from __future__ import annotations

import attrs
import torch
from torch import Tensor, nn

from specplug import layers
from specplug_eagle3.network import Eagle3Config, Eagle3Network


@attrs.frozen(kw_only=True)
class PEagleConfig(Eagle3Config):
    """The sizes of a draft network.

    Attributes:
        num_hidden_layers: its decoder layers, EAGLE-3's included.
        mask_token_id: the token whose embedding stands for one that is not known.
    """

    num_hidden_layers: int
    mask_token_id: int


class PEagleNetwork(Eagle3Network):
    """Predicts the tokens after a position in one pass.

    A row at position p reads the embedding of token p+1 and the feature of p, as EAGLE-3's does,
    and its logits are those of token p+2. Where token and feature are not known, the row is a mask:
    it reads the embedding of the mask token and ``mask_feature``, which is the same for all. A row
    sees the rows at its own position and before, so S - 1 masks after the last known row predict
    the S - 1 tokens after its own.

    Args:
        config: the sizes.
        own_embedding: the checkpoint has an embedding; otherwise the target's is used.
    """

    config: PEagleConfig

    def __init__(self, config: PEagleConfig, own_embedding: bool = False) -> None:
        super().__init__(config, own_embedding)
        # Their keys are the layers' numbers, as in the names of the published tensors.
        self.layers = nn.ModuleDict(
            {
                str(index): layers.DecoderLayer(
                    config.hidden_size,
                    config.intermediate_size,
                    config.num_attention_heads,
                    config.num_key_value_heads,
                    config.head_dim,
                    config.rms_norm_eps,
                    bias=config.attention_bias,
                    output_bias=config.output_bias,
                    qk_norm=config.query_key_norm,
                )
                for index in range(1, config.num_hidden_layers)
            }
        )
        # The target's features of a mask, before they are fused.
        self.mask_hidden = nn.Parameter(torch.zeros(1, 1, self.fc.in_features))

    @property
    def num_layers(self) -> int:
        """The layers that call ``attend``."""
        return self.config.num_hidden_layers

    def mask_feature(self) -> Tensor:
        """Compute the feature of a mask, [1, hidden]."""
        return self.fuse(self.mask_hidden.view(1, -1))

    def forward(
        self, embeds: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        """Run one pass of all layers.

        Args:
            embeds: [R, embedding_size] embedding of the token after each position, or of the mask.
            hidden: [R, hidden] fused target feature, or ``mask_feature``.
            positions: [R] int64.
            attend: a ``specplug.layers.Attend``.

        Returns:
            [R, hidden], the argument of ``logits``.
        """
        rotary = self.rotary(positions)
        hidden = self.run_midlayer(embeds, hidden, rotary, attend)
        for index, layer in enumerate(self.layers.values(), start=1):
            hidden = layer(hidden, rotary, index, attend)
        return self.finish(hidden)
