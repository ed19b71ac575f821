"""The DSpark draft network: a DFlash backbone, a Markov head and a confidence head.

"DSpark", arXiv 2607.05147. Parameter names are those of the published checkpoints
(``markov_head.*``, ``confidence_head.*`` beside DFlash's), so their state dicts load unchanged.
Training and serving run these same classes.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from specplug import layers
from specplug_dflash.network import DFlashNetwork
from specplug_dspark.config import DSparkConfig


class MarkovHead(nn.Module):
    """Adds to each token's logits a bias that depends on the tokens drawn before it in its block.

    The bias is a product of low rank r: ``markov_w2 @ z``. z is made from the embedding e =
    ``markov_w1[token before]`` and from the backbone's hidden state h of the row, by the head's
    type:

    - vanilla: z = e.
    - gated: z = sigmoid(gate_proj [h; e]) * e.
    - rnn: [g; c; o] = joint_proj [s; e; h], z = tanh(o), and the state s, zero at the block's first
      row, becomes sigmoid(g) * s + (1 - sigmoid(g)) * tanh(c): it knows all tokens before.

    Args:
        config: the sizes.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.hidden_size
        self.head_type = config.markov_head_type
        self.markov_w1 = layers.Embedding(config.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocab_size, bias=False)
        if self.head_type == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        elif self.head_type == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def step(self, before: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Go one row on in each block.

        Args:
            before: [R, r] embeddings of the tokens before.
            hidden: [R, hidden] of these rows.
            state: [R, r], what the step before left; zeros at a block's first row.

        Returns:
            z [R, r], and the state for the next row.
        """
        if self.head_type == "vanilla":
            return before, state
        if self.head_type == "gated":
            gate = layers.linear(
                torch.cat((hidden, before), dim=-1), self.gate_proj.weight, self.gate_proj.bias
            )
            return torch.sigmoid(gate) * before, state
        joint = torch.cat((state, before, hidden), dim=-1)
        joint = layers.linear(joint, self.joint_proj.weight, self.joint_proj.bias)
        gate, candidate, out = joint.chunk(3, dim=-1)
        state = torch.lerp(torch.tanh(candidate), state, torch.sigmoid(gate))
        return torch.tanh(out), state

    def bias(self, latent: Tensor, logits: Tensor) -> Tensor:
        """Add the bias of z [R, r] to logits [R, V_draft]."""
        return layers.linear(latent, self.markov_w2.weight, residual=logits)


class ConfidenceHead(nn.Module):
    """Says for each row how likely the target is to take its token: a linear map to a logit."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        rank = config.markov_rank if config.confidence_head_with_markov else 0
        self.with_markov = rank > 0
        self.proj = nn.Linear(config.hidden_size + rank, 1)
        nn.init.zeros_(self.proj.bias)  # some checkpoints have none

    def forward(self, hidden: Tensor, before: Tensor | None) -> Tensor:
        """Return the logits [R] of rows with states [R, hidden] and embeddings [R, r] of the tokens
        before, which are None where there is no Markov head."""
        if self.with_markov:
            assert before is not None
            hidden = torch.cat((hidden, before.to(hidden.dtype)), dim=-1)
        return layers.linear(hidden, self.proj.weight, self.proj.bias).squeeze(-1)


class DSparkNetwork(DFlashNetwork):
    """A ``DFlashNetwork`` with the two heads; each is None where the config has none.

    Both read what the LM head reads.
    """

    config: DSparkConfig

    def __init__(
        self,
        config: DSparkConfig,
        num_positions: int,
        *,
        own_embedding: bool = False,
        own_head: bool = False,
    ) -> None:
        super().__init__(config, num_positions, own_embedding=own_embedding, own_head=own_head)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.confidence_head = ConfidenceHead(config) if config.confidence_head else None
