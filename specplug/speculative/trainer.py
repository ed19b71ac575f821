"""The training of a draft network: what an algorithm says of it, and what it gets.

``specplug train`` reads texts, runs the frozen target over them, steps, saves and measures. An
algorithm's ``create_trainer`` returns a ``Trainer``: the network, a batch's loss, and how the
network is published. ``FeatureTrainer`` has the loss of those that go from one position to the
next, as ``FeatureDrafter`` serves them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.algorithm import SpecConfig
from specplug.speculative.cross_entropy import cross_entropy
from specplug.speculative.layers import Attend

Value = TypeVar("Value", int, float, str)

STEP_WEIGHT = 0.8
"""The loss of an unrolled step counts as much as this share of that of the step before it."""

LATER_EVERY = 4
"""Every so many positions of a text go on to the unrolled steps after the first one."""

GOAL_TOKENS = 32
"""How many of the target's likeliest tokens a draft learns the probabilities of."""

HEAD = "lm_head"
"""As published networks call the module that scores tokens."""

GOAL_SHARES, GOAL_PLACES, GOAL_COUNTS = "goal_shares", "goal_places", "goal_counts"


@attrs.frozen(eq=False, kw_only=True)
class TrainingBatch:
    """B texts of L tokens, and what the target computed for them.

    Attributes:
        tokens: [B, L] int64. Shorter texts are padded at their end with 0.
        counted: [B, L] bool, whether what the target says *after* a position is to be learnt. It is
            not after a prompt's tokens, other turns of a chat, and padding.
        features: [B, L, C] in the target's dtype, by the names that the captures returned.
        step: steps of the optimizer that were taken before.
    """

    tokens: Tensor
    counted: Tensor
    features: Mapping[str, Tensor]
    step: int = 0
    _total: Callable[[Tensor], Tensor] = lambda count: count

    def mean(self, values: Tensor, counted: Tensor) -> Tensor:
        """Return the mean of the values that count, over the batch's rows in all processes.

        Args:
            values, counted: of the same shape, counted as bool, 0 and 1, or a weight.

        Returns:
            A scalar whose mean over the processes is that mean; 0 where nothing counts.
        """
        counted = counted.to(values.dtype)
        return (values * counted).sum() / self._count(counted)

    def weights(self, counted: Tensor) -> Tensor:
        """Return what each value weighs in ``mean``, float32 of the shape of ``counted``."""
        counted = counted.float()
        return counted / self._count(counted)

    def _count(self, counted: Tensor) -> Tensor:
        return self._total(counted.sum()).clamp(min=1e-6)


@attrs.frozen(eq=False, kw_only=True)
class TrainingLoss:
    """What a batch says of the network.

    Attributes:
        loss: a scalar, with gradient.
        metrics: what is shown beside it, such as "top-1", by name: shares from 0 to 1, [steps].
    """

    loss: Tensor
    metrics: Mapping[str, Tensor] = attrs.field(factory=dict)


@attrs.frozen(eq=False, kw_only=True)
class DraftFiles:
    """A draft model as it is published.

    Attributes:
        config: of ``config.json``.
        tensors: of ``model.safetensors``, by their published names.
        tokenizer: of transformers, that is written beside them; None: none is.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    tokenizer: Any = None


class TrainingRuntime(Protocol):
    """What a trainer may use of the run: the frozen target and the rows that are trained on.

    Attributes:
        device: where target and network are.
        dtype: of the target, its features and embeddings. The network has float32 weights.
        config: the algorithm's settings; ``num_steps`` is the depth to train for, and
            ``draft_model_path`` the folder of the network to go on from, or None.
        vocab_size, hidden_size, num_layers, context_len: of the target.
        tokenizer: of the target, of transformers; None where it has none.
    """

    device: torch.device
    dtype: torch.dtype
    config: SpecConfig
    vocab_size: int
    hidden_size: int
    num_layers: int
    context_len: int

    @property
    def tokenizer(self) -> Any:
        """The target's tokenizer, of transformers; None where it has none."""

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Apply the target's input embedding: […] int64 -> […, hidden_size]."""

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the target's output head to what leaves the final norm: […, hidden_size] ->
        […, vocab_size]. A draft that ends in this head reads it so when it is served, too."""

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the target's own distribution, which a draft learns: those of
        ``lm_head``, scaled and capped as the target does it. […, hidden_size] -> […,
        vocab_size]."""

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        """Ask for the hidden states before these decoder layers, as ``Runtime`` has it: [B, L,
        len(layer_ids) * hidden_size] of ``TrainingBatch.features``. Call it in
        ``create_trainer``."""

    def capture_lm_head_input(self) -> str:
        """Ask for what the target's LM head reads, [B, L, hidden_size]. Call it in
        ``create_trainer``."""

    def derive(self, compute: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """Ask for what is computed of the captured features, under names of its own beside them.
        Call it in ``create_trainer``. On a CPU that is done once for a text, not at each step.

        Args:
            compute: gets the features [..., L, C] of texts, and returns tensors [..., L, D].
        """

    def setting(self, name: str, default: Value) -> Value:
        """Return what the user gave by ``--set NAME=VALUE``, in the default's type.

        Raises:
            UsageError: it is of another type.
        """

    def token_counts(self) -> Tensor:
        """Count the tokens of the rows that count: [vocab_size] int64 on the CPU."""

    def example(self) -> TrainingBatch:
        """Return some rows as a batch, with what was captured so far."""

    def target_layer(self, index: int) -> nn.Module:
        """Return a decoder layer of the target, to copy weights of; -1 is the last one."""

    def target_weights(self) -> Mapping[str, Tensor]:
        """Return all of the target's weights by transformers' names, to copy."""

    def lm_head_rows(self, token_ids: Tensor) -> Tensor:
        """Return the rows of the target's output head for these tokens: [n] int64 -> [n,
        hidden_size]."""

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the target's last layer: […, hidden_size] -> […, hidden_size]."""


class Trainer(ABC):
    """What ``create_trainer`` returns: a draft network, and how it learns.

    A subclass sets ``network``, whose parameters are those that are trained (float32, on the
    runtime's device, not packed), and says what a batch's ``loss`` is and how the network is
    published (``export``). Its class attributes are the defaults of ``specplug train``.

    Attributes:
        network: all of its parameters that require a gradient are trained.
        rows: texts of a step on a CPU, in all processes together; on a GPU 32 times as many.
        learning_rate: the highest, after the warm-up.
    """

    network: nn.Module
    rows: ClassVar[int] = 2
    learning_rate: ClassVar[float] = 3e-3

    def orthogonal(self) -> Sequence[nn.Parameter]:
        """Return the matrices that Muon steps (Jordan et al., 2024; torch.optim.Muon): those from
        features to features, not those of a row or a column a token. AdamW steps all others; by
        default all."""
        return ()

    @abstractmethod
    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the loss of a batch. Whatever is random is drawn from torch's generators, which
        are seeded for each step."""

    @abstractmethod
    def export(self) -> DraftFiles:
        """Return the network in the layout in which such networks are published, and which the
        algorithm's own worker loads."""


class FeatureTrainer(Trainer):
    """Trains a network that goes from one position to the next, as ``FeatureDrafter`` serves it.

    The drafting is unrolled over ``num_steps`` steps (the training-time test of EAGLE-3, arXiv
    2503.01840): after the first one the network reads its own results, as it does when it drafts.
    The goal is the target's distribution over its ``GOAL_TOKENS`` likeliest tokens of the draft's
    vocabulary. The methods a subclass writes
    are those of ``FeatureDrafter``.

    Args:
        runtime: of the run.
        token_ids: [V_draft] int64, the network's vocabulary in the target's ids.
        num_steps: unrolled steps; the run's if None.
    """

    def __init__(
        self, runtime: TrainingRuntime, token_ids: Tensor, num_steps: int | None = None
    ) -> None:
        self.runtime = runtime
        self.num_steps = num_steps or runtime.config.num_steps
        self.token_ids = token_ids.to(runtime.device)
        self._head_input = runtime.capture_lm_head_input()
        runtime.derive(self._goal)

    @abstractmethod
    def features(self, batch: TrainingBatch) -> Tensor:
        """Return what the target computed, as the network reads it: [B * L, H]."""

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run one pass, as ``FeatureDrafter.forward``: [R], [R, H] and [R] to [R, H]."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token at p + 2: [R, H] to [R, V_draft]."""

    def distance(self, hidden: Tensor, wanted: Tensor) -> Tensor | None:
        """Return how far what the LM head reads is from what the target's own read there: [R, H]
        and [R, hidden_size] to [R].

        It is learnt beside the distribution, at all positions; the distribution, which costs a
        product with the vocabulary, then at some of them. None, by default: the distribution alone.
        """
        return None

    def orthogonal(self) -> Sequence[nn.Parameter]:
        """Return the network's matrices, but those of embeddings and of what is called
        ``lm_head``, which have a row a token. A shape does not tell: a vocabulary may be as large
        as a layer is wide."""
        of_tokens = {
            id(parameter)
            for name, module in self.network.named_modules()
            if isinstance(module, nn.Embedding) or name.rpartition(".")[2] == HEAD
            for parameter in module.parameters()
        }
        return [p for p in self.network.parameters() if p.ndim == 2 and id(p) not in of_tokens]

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy to the target's distribution, summed over the unrolled steps.

        Row p of step j reads the text's tokens up to p + 1 + j and the target's features up to p,
        and says what follows token p + 1 + j. What it finds in later steps is what a draft would
        find whose earlier tokens were right. All positions take the first step. Every
        ``LATER_EVERY``-th goes on from there, others in each step of the optimizer: neighbours
        teach nearly the same, and a text costs a third. Where a ``distance`` is learnt too, the
        distribution is at those positions alone, and in later steps at every other one of them.
        """
        rows, length = batch.tokens.shape
        # The token, the goal and whether it counts stand one further on in each step.
        padding = self.num_steps + 1
        tokens = F.pad(batch.tokens, (0, padding))
        learnt = F.pad(batch.counted, (0, padding))
        counted = F.pad(batch.counted & batch.features[GOAL_COUNTS][..., 0], (0, padding))
        shares = F.pad(batch.features[GOAL_SHARES].float(), (0, 0, 0, padding))
        places = F.pad(batch.features[GOAL_PLACES].long(), (0, 0, 0, padding))
        read = F.pad(batch.features[self._head_input], (0, 0, 0, padding))
        at = torch.arange(length, device=tokens.device)
        attend, hidden = UnrolledAttention(rows), self.features(batch)
        total, found = hidden.new_zeros(()), []
        begin, every = batch.step % min(LATER_EVERY, length), LATER_EVERY
        half = batch.step // LATER_EVERY % 2  # once each has begun, the other ones of them
        for step in range(self.num_steps):
            if step == 1:
                at = at[begin::every]
                hidden = hidden.view(rows, length, -1)[:, at].flatten(0, 1)
                attend.go_on_from(at)
            here = at + 1 + step
            positions = (at + step).clamp(max=self.runtime.context_len - 1).repeat(rows)
            hidden = self.forward(tokens[:, here].flatten(), hidden, positions, attend)
            weight, chosen = STEP_WEIGHT**step, hidden
            apart = self.distance(hidden, read[:, here].flatten(0, 1))
            if apart is not None:
                total = total + weight * batch.mean(apart, learnt[:, here].flatten())
                some = slice(begin, None, every) if step == 0 else slice(half, None, 2)
                chosen = hidden.view(rows, len(here), -1)[:, some].flatten(0, 1)
                here = here[some]
            weights = batch.weights(counted[:, here]).flatten()
            goal = places[:, here].flatten(0, 1), shares[:, here].flatten(0, 1)
            loss, right = cross_entropy(self.logits(chosen), *goal, weights)
            total = total + weight * loss
            found.append((weights * right).sum())
        return TrainingLoss(loss=total, metrics={"top-1": torch.stack(found)})

    @torch.no_grad()
    def _goal(self, features: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return what the target says after each position: its likeliest tokens of the draft's
        vocabulary, the likeliest first, with their probabilities among these, [..., L, K], and
        whether its top token is one of that vocabulary [..., L, 1]."""
        logits = self.runtime.target_logits(features[self._head_input])
        known = logits[..., self.token_ids].float()
        most = known.topk(min(GOAL_TOKENS, known.shape[-1]), dim=-1)
        return {
            GOAL_SHARES: most.values.softmax(-1),
            GOAL_PLACES: most.indices.to(torch.int32),
            GOAL_COUNTS: most.values[..., :1] >= logits.amax(-1, keepdim=True),
        }


class UnrolledAttention:
    """An ``Attend`` for training: B texts of L positions, in the first pass and those after it.

    In pass j, row p stands at position p + j. It sees the first pass's keys of the positions up to
    p, which came from the target's features, and its own keys of the passes 1 … j. So does a chain
    that is drafted from position p. After the first pass some of the positions may go on alone.

    Args:
        texts: B.
    """

    def __init__(self, texts: int) -> None:
        self._texts = texts
        self._at: Tensor | None = None
        self._keys: dict[int, list[Tensor]] = {}
        self._values: dict[int, list[Tensor]] = {}

    def go_on_from(self, positions: Tensor) -> None:
        """Let these positions of the first pass, [n] int64, take all later ones, whose rows are [B
        * n]. Call it after the first pass; all go on where it is not called."""
        self._at = positions

    def __call__(self, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attend: query [B * L, H, D], key and value [B * L, Hkv, D] -> [B * L, H * D]."""
        groups = query.shape[1] // key.shape[1]
        query, key, value = (
            x.to(value.dtype).view(self._texts, -1, *x.shape[1:]).transpose(1, 2)
            for x in (query, key, value)
        )
        if groups > 1:
            key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
        keys = self._keys.setdefault(layer, [])
        values = self._values.setdefault(layer, [])
        keys.append(key)
        values.append(value)
        if len(keys) == 1:
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            mixed = self._later_pass(query, keys, values)
        return mixed.transpose(1, 2).flatten(0, 1).flatten(1)

    def _later_pass(self, query: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend in a pass after the first: query, and the keys and values of these passes, [B, H,
        n, D]; the first pass's are [B, H, L, D] -> [B, H, n, D]."""
        length, scale = keys[0].shape[2], query.shape[3] ** -0.5
        every = torch.arange(length, device=query.device)
        future = every > (every if self._at is None else self._at).unsqueeze(1)
        scores = query @ keys[0].transpose(2, 3) * scale
        own = [(query * key).sum(-1, keepdim=True) * scale for key in keys[1:]]
        shares = torch.cat([scores.masked_fill(future, -torch.inf), *own], -1).float().softmax(-1)
        shares = shares.to(query.dtype)
        mixed = shares[..., :length] @ values[0]
        for step, value in enumerate(values[1:]):
            mixed = mixed + shares[..., length + step, None] * value
        return mixed
