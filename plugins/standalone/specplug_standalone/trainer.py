"""The training of a small language model, of any target (arXiv 2211.17192)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from specplug import (
    DATA_ONLY,
    DraftFiles,
    Trainer,
    TrainingBatch,
    TrainingLoss,
    TrainingRuntime,
    UsageError,
)

_NUMBERED = re.compile(r"(.*?\.)(\d+)(\..*)")
"""A layer's weight: what is before its number, the number, and what is after it."""


class StandaloneTrainer(Trainer):
    """Trains a model of the target's kind and vocabulary to the target's distribution.

    A new one has the target's embeddings, head and some of its layers, the first and the last
    among them. ``--start`` may be any causal LM of transformers of as many tokens.

    Settings (``--set``), of a new one: ``num_hidden_layers``, ``intermediate_size``.
    """

    network: Any
    learning_rate = 4e-3

    def __init__(self, runtime: TrainingRuntime) -> None:
        self.runtime = runtime
        self._head_input = runtime.capture_lm_head_input()
        start = runtime.config.draft_model_path
        network = new_network(runtime) if start is None else read_network(str(start), runtime)
        self.network = network.to(runtime.device, torch.float32).train()

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        """Return the cross entropy to the target's distribution after each position."""
        with torch.no_grad():
            goal = self.runtime.target_logits(batch.features[self._head_input]).float()
        logits = self.network(input_ids=batch.tokens, use_cache=False).logits.float()
        each = logits.logsumexp(-1) - (goal.softmax(-1) * logits).sum(-1)
        right = (logits.argmax(-1) == goal.argmax(-1)).float()
        return TrainingLoss(
            loss=batch.mean(each, batch.counted),
            metrics={"top-1": batch.mean(right, batch.counted).view(1)},
        )

    def export(self) -> DraftFiles:
        """Return the model as transformers publishes it, with the target's tokenizer."""
        config = self.network.config.to_dict()
        config |= {"architectures": [type(self.network).__name__], "dtype": "bfloat16"}
        seen: set[int] = set()
        tensors: dict[str, Tensor] = {}
        for name, tensor in self.network.state_dict().items():
            if id_of(tensor) not in seen:  # a tied head is the embedding
                tensors[name] = tensor
            seen.add(id_of(tensor))
        return DraftFiles(config=config, tensors=tensors, tokenizer=self.runtime.tokenizer)


def id_of(tensor: Any) -> int:
    """Return what two names of one tensor have in common, sharded or not."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.untyped_storage().data_ptr()


def read_network(path: str, runtime: TrainingRuntime) -> Any:
    """Read a model to go on training it.

    Raises:
        UsageError: it has another vocabulary.
    """
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **DATA_ONLY)
    found = network.config.get_text_config().vocab_size
    if found != runtime.vocab_size:
        raise UsageError(
            f"start={path!r}: a vocabulary of {found} tokens; expected the target's "
            f"{runtime.vocab_size}, since STANDALONE's trainer teaches the target's tokens"
        )
    return network


def new_network(runtime: TrainingRuntime) -> Any:
    """Make a model of some of the target's layers."""
    from transformers import AutoModelForCausalLM

    count = min(runtime.setting("num_hidden_layers", 3), runtime.num_layers)
    last = runtime.num_layers - 1
    places = [round(number * last / max(count - 1, 1)) for number in range(count)]
    kind: Any = AutoModelForCausalLM
    network = kind.from_config(own_config(runtime, places)).float()
    begin_as_target(network, runtime, places)
    return network


def own_config(runtime: TrainingRuntime, places: Sequence[int]) -> Any:
    """Return the target's config with these of its layers alone. What a config has for each layer,
    it has for these."""
    from transformers import AutoConfig

    target = dict(runtime.config.target_config)
    model_type: str = target.pop("model_type")
    for key in ("quantization_config", "transformers_version", "architectures", "dtype"):
        target.pop(key, None)
    values = {
        key: [value[place] for place in places]
        if isinstance(value, list) and len(value) == runtime.num_layers
        else value
        for key, value in target.items()
    }
    size = values.get("intermediate_size") or 4 * runtime.hidden_size
    if not isinstance(size, list):
        values["intermediate_size"] = runtime.setting("intermediate_size", size)
    values["num_hidden_layers"] = len(places)
    return AutoConfig.for_model(model_type, **values)


@torch.no_grad()
def begin_as_target(network: Any, runtime: TrainingRuntime, places: Sequence[int]) -> None:
    """Copy the target's weights. A narrower feed-forward layer gets the first inner features."""
    theirs = runtime.target_weights()
    for name, tensor in network.state_dict().items():
        found = _NUMBERED.fullmatch(name)
        if found is not None:
            name = f"{found[1]}{places[int(found[2])]}{found[3]}"
        other = theirs.get(name)
        if other is not None and other.ndim == tensor.ndim:
            room = tuple(slice(min(a, b)) for a, b in zip(tensor.shape, other.shape, strict=True))
            tensor[room] = other[room].to(tensor)
