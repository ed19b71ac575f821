"""The frozen target of a training, and what trainers may use of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from specplug.algorithm import SpecConfig
from specplug.errors import UsageError, shown
from specplug.model.checkpoint import load_checkpoint
from specplug.model.hidden_states import HiddenStateCapture
from specplug.speculative.trainer import TrainingBatch, Value
from specplug.training.logit_form import LogitForm
from specplug.training.reading import read_ahead
from specplug.training.rows import Rows

EXAMPLES = 64
"""Rows of an example."""

KEPT_SHARE = 0.25
"""The most of a machine's memory that features are kept in on a CPU from one epoch to the next, in
bfloat16 where products are."""


class FrozenTarget:
    """A causal LM of transformers, as transformers runs it, of which nothing is trained.

    Args:
        path: folder or hub id.
        dtype: of its weights; None: what the checkpoint says.
        device: where it runs.

    Attributes:
        model: the module.
        capture: what its passes keep.
        logit_form: what it makes of its head's logits.
    """

    def __init__(self, path: str, dtype: torch.dtype | None, device: torch.device) -> None:
        self.model: Any = load_checkpoint(path, dtype, device).eval().requires_grad_(False)
        try:
            self.model.set_attn_implementation("sdpa")
        except ValueError:  # what caps its scores, or has sinks, is not computed so
            self.model.set_attn_implementation("eager")
        self.device = device
        self.logit_form = LogitForm.of(self.model)
        self.capture = HiddenStateCapture(self.model)
        self.config: Any = self.model.config.get_text_config()

    @torch.no_grad()
    def run(self, tokens: Tensor) -> dict[str, Tensor]:
        """Run tokens [B, L] int64, each text from its beginning, and return what was captured: [B,
        L, C] by name. What is padded at the end is seen by no token before it."""
        self.capture.decoder(input_ids=tokens, use_cache=False)
        shape = tokens.shape
        return {name: found.view(*shape, -1) for name, found in self.capture.collect().items()}


class FrozenRuntime:
    """The ``TrainingRuntime`` of ``specplug train``.

    Args:
        target: the frozen one.
        config: the algorithm's settings.
        rows: that are trained on.
        options: what the user gave by ``--set``.
        tokenizer: the target's.

    Attributes:
        rows: those that are trained on.
    """

    def __init__(
        self,
        target: FrozenTarget,
        config: SpecConfig,
        rows: Rows,
        options: Mapping[str, str],
        tokenizer: Any,
    ) -> None:
        self._target, self.rows, self._options = target, rows, dict(options)
        self._asked: set[str] = set()
        self._derived: list[Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]] = []
        self._features: dict[int, dict[str, Tensor]] = {}
        self._bytes = 0
        self._most_bytes = int(KEPT_SHARE * memory_bytes())
        self.config = config
        self.tokenizer = tokenizer
        self.device = target.device
        self.dtype: torch.dtype = target.model.dtype
        self.vocab_size: int = target.config.vocab_size
        self.hidden_size: int = target.config.hidden_size
        self.num_layers = len(target.capture.layers)
        self.context_len = context_len(target.config)

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        """Apply the target's input embedding."""
        embedded: Tensor = self._target.model.get_input_embeddings()(token_ids)
        return embedded

    def lm_head(self, hidden: Tensor) -> Tensor:
        """Apply the target's output head."""
        logits: Tensor = self._target.model.get_output_embeddings()(hidden)
        return logits

    def target_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the target's own distribution."""
        return self._target.logit_form(self.lm_head(hidden))

    def lm_head_rows(self, token_ids: Tensor) -> Tensor:
        """Return rows of the target's output head."""
        weight: Tensor = self._target.model.get_output_embeddings().weight
        return weight[token_ids.to(weight.device)]

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        """Ask for the hidden states before these layers."""
        return self._target.capture.keep_layer_inputs(layer_ids)

    def capture_lm_head_input(self) -> str:
        """Ask for what the LM head reads."""
        return self._target.capture.keep_lm_head_input()

    def derive(self, compute: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]) -> None:
        """Ask for what is computed of the captured features."""
        self._derived.append(compute)

    def setting(self, name: str, default: Value) -> Value:
        """Return a setting of the trainer's own."""
        self._asked.add(name)
        given = self._options.get(name)
        if given is None:
            return default
        try:
            return type(default)(given)
        except ValueError as error:
            raise UsageError(
                f"--set {name}={shown(given)}: expected a value like {default!r}"
            ) from error

    def check_options(self) -> None:
        """Refuse what was given and no trainer has asked for.

        Raises:
            UsageError: there is such a setting.
        """
        unknown = sorted(set(self._options) - self._asked)
        if unknown:
            known = ", ".join(sorted(self._asked)) or "none"
            raise UsageError(
                f"--set {unknown[0]}: {self.config.algorithm}'s trainer has no such setting; "
                f"expected one of: {known}"
            )

    def token_counts(self) -> Tensor:
        """Count the tokens that are learnt."""
        written = self.rows.tokens[self.rows.learnt].long()
        return torch.bincount(written, minlength=self.vocab_size)

    def example(self) -> TrainingBatch:
        """Return the first rows as a batch."""
        batch = self.batch(range(min(EXAMPLES, len(self.rows))))
        self._features.clear()  # more may be captured after this
        self._bytes = 0
        return batch

    def target_layer(self, index: int) -> nn.Module:
        """Return a decoder layer of the target."""
        return self._target.capture.layers[index]

    def target_weights(self) -> Mapping[str, Tensor]:
        """Return the target's weights."""
        weights: Mapping[str, Tensor] = self._target.model.state_dict()
        return weights

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the norm after the target's last layer."""
        normed: Tensor = _final_norm(self._target.capture.decoder)(hidden)
        return normed

    def batch(
        self, indices: Any, step: int = 0, total: Callable[[Tensor], Tensor] = lambda count: count
    ) -> TrainingBatch:
        """Run the target on rows, and return them as a batch.

        Args:
            indices: of the rows, [B].
            step: steps that were taken before.
            total: of ``TrainingBatch.mean``.
        """
        chosen = torch.as_tensor(indices)
        tokens, counted = self.rows.batch(chosen)
        tokens = tokens.to(self.device)
        one_by_one = self.device.type == "cpu"
        return TrainingBatch(
            tokens=tokens,
            counted=counted.to(self.device),
            features=self._kept(chosen) if one_by_one else self._run(tokens),
            step=step,
            total=total,
        )

    def _run(self, tokens: Tensor) -> dict[str, Tensor]:
        """Return what the target computes for tokens [B, L], and what is derived of it."""
        found = self._target.run(tokens)
        if torch.is_autocast_enabled("cpu"):
            found = {name: each.to(torch.bfloat16) for name, each in found.items()}
        for compute in self._derived:
            found.update(compute(found))
        return found

    def read_ahead(
        self, order: Tensor, most_seconds: float, tell: Callable[[int, int], None]
    ) -> None:
        """Run the target over rows before they are asked for, as far as there is memory. Rows whose
        turn did not come in time are not trained on: the others become ``rows``.

        Args:
            order: [n] int64, of the rows.
            most_seconds: after these no further row is begun.
            tell: is told how many rows are read, and of how many.
        """
        begun = time.monotonic()
        found = read_ahead(
            lambda place: self._compute(int(order[place])),
            self.rows.lengths[order].tolist(),
            most_bytes=self._most_bytes,
            most_seconds=most_seconds,
            tell=tell,
        )
        read = order[: len(found)]
        if time.monotonic() - begun > most_seconds:
            self.rows, read = self.rows.picked(read), torch.arange(len(read))
        self._features = dict(zip(read.tolist(), found, strict=True))
        self._bytes = sum(each.nbytes for row in found for each in row.values())

    def _kept(self, chosen: Tensor) -> dict[str, Tensor]:
        """Return the features of rows, [B, L, C] by name, of which those that fit into
        ``KEPT_SHARE`` of the memory are computed once.

        Each row runs by itself, so that its bits do not depend on what else is in a batch, and a
        resume finds the same. On a CPU that costs nothing.
        """
        found = [self._features_of(index) for index in chosen.tolist()]
        return {
            name: nn.utils.rnn.pad_sequence([each[name] for each in found], batch_first=True)
            for name in found[0]
        }

    def _features_of(self, index: int) -> dict[str, Tensor]:
        if index in self._features:
            return self._features[index]
        found = self._compute(index)
        size = sum(each.nbytes for each in found.values())
        if self._bytes + size <= self._most_bytes:
            self._features[index] = found
            self._bytes += size
        return found

    def _compute(self, index: int) -> dict[str, Tensor]:
        tokens, _ = self.rows.batch([index])
        return {name: each[0] for name, each in self._run(tokens).items()}


def memory_bytes() -> int:
    """Return how large the machine's memory is."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def context_len(config: Any) -> int:
    """Return the tokens of a target's longest sequence, by its text config of transformers."""
    return getattr(config, "max_position_embeddings", None) or 2048


def _final_norm(decoder: nn.Module) -> nn.Module:
    """Return the norm after the layers, which models call ``norm``, ``ln_f`` or otherwise: the last
    child that is a norm."""
    norms = [child for name, child in decoder.named_children() if "norm" in name or "ln" in name]
    if not norms:
        raise UsageError(f"{type(decoder).__name__} has no final norm; expected one")
    return norms[-1]
