"""Published EAGLE checkpoints load as they are; misfits are named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specplug import LLM, CheckpointError, SamplingParams, UsageError
from specplug_eagle import algorithm

Write = Callable[..., Path]


def load(target: Path, draft: Path | None, **settings: object) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        **settings,
    )


def assert_loaded(llm: LLM, tensors: dict[str, Tensor]) -> None:
    state = llm.engine.runtime.worker.network.state_dict()
    assert state.keys() == tensors.keys()
    for name, tensor in tensors.items():
        torch.testing.assert_close(state[name].cpu(), tensor, rtol=0, atol=0)


@pytest.mark.parametrize("pickled", [False, True])
def test_safeailab_layout(
    target: Path, write_draft: Write, tensors: dict[str, Tensor], pickled: bool
) -> None:
    """Their files bring a copy of the target's embedding."""
    tensors["embed_tokens.weight"] = torch.randn(97, 32, dtype=torch.float64)
    llm = load(target, write_draft(tensors, pickled=pickled))
    assert_loaded(llm, tensors)
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids


def test_sglang_layout(target: Path, write_draft: Write, tensors: dict[str, Tensor]) -> None:
    """``model.`` before the names, another architecture, and an LM head that is the target's."""
    exported = {f"model.{name}": tensor for name, tensor in tensors.items()}
    exported["lm_head.weight"] = torch.randn(97, 32, dtype=torch.float64)
    llm = load(target, write_draft(exported, architectures=["LlamaForCausalLMEagle"]))
    assert_loaded(llm, tensors)


def test_wrong_tensors_are_all_named(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    del tensors["layers.0.post_attention_layernorm.weight"]
    tensors["extra"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(32, 5, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load(target, write_draft(tensors))
    for told in (
        "missing layers.0.post_attention_layernorm.weight [32]",
        "unexpected extra [3]",
        "fc.weight is [32, 5], expected [32, 64]",
    ):
        assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 96}, "vocabulary of 96, the target's is 97"),
        ({"hidden_size": 64}, "hidden size of 64, the target's is 32"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    target: Path, write_draft: Write, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load(target, write_draft(**changes))


def test_another_target_needs_draft_weights(target: Path) -> None:
    with pytest.raises(UsageError, match="EAGLE needs draft weights for this target"):
        load(target, None)
