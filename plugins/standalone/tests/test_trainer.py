"""The training of a small model: it begins as the target's own layers, of any kind of target."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB, save_random

from specplug import UsageError
from specplug_standalone.trainer import StandaloneTrainer, new_network

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
}


class Target:
    """A causal LM of transformers, as this trainer sees it."""

    num_layers, hidden_size, vocab_size = 4, HIDDEN, VOCAB
    device, tokenizer = torch.device("cpu"), None

    def __init__(self, kind: str, start: Path | None = None, **options: int) -> None:
        from transformers import AutoConfig, AutoModelForCausalLM

        torch.manual_seed(1)
        config = AutoConfig.for_model(kind, **SIZES)
        self.model: Any = AutoModelForCausalLM.from_config(config)
        self.options = options
        self.config = SimpleNamespace(draft_model_path=start, target_config=config.to_dict())

    def setting(self, name: str, default: int) -> int:
        return self.options.get(name, default)

    def target_weights(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def capture_lm_head_input(self) -> str:
        return "head"


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_all_layers_of_a_target_are_the_target(kind: str) -> None:
    target = Target(kind, num_hidden_layers=4)
    network = new_network(target)  # type: ignore[arg-type]
    tokens = torch.arange(12).unsqueeze(0)
    with torch.no_grad():
        ours, theirs = network(tokens).logits, target.model(tokens).logits
    torch.testing.assert_close(ours, theirs)


def test_first_and_last_layer_are_the_targets() -> None:
    target = Target("llama", num_hidden_layers=2, intermediate_size=48)
    state, own = target.target_weights(), new_network(target).state_dict()  # type: ignore[arg-type]
    name = "model.layers.{}.mlp.up_proj.weight"
    assert torch.equal(own[name.format(0)], state[name.format(0)][:48])
    assert torch.equal(own[name.format(1)], state[name.format(3)][:48])


def test_start_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    start = save_random(LlamaConfig(**{**SIZES, "vocab_size": 50}), tmp_path)
    with pytest.raises(UsageError, match=r"a vocabulary of 50 tokens; expected the target's 97"):
        StandaloneTrainer(Target("llama", start))  # type: ignore[arg-type]
