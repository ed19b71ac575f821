"""The frozen target of a training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from specplug import SpecConfig
from specplug.training.corpus import Text
from specplug.training.rows import Rows
from specplug.training.target import FrozenRuntime, FrozenTarget

TEXTS = [Text(token_ids=range(5, 5 + n), learnt=[True] * n) for n in (20, 9, 14)]


@pytest.fixture
def runtime(target: Path) -> FrozenRuntime:
    """A runtime over three rows, of which the inputs of two layers are captured."""
    frozen = FrozenTarget(str(target), torch.float32, torch.device("cpu"))
    rows = Rows.of(TEXTS, 20)
    made = FrozenRuntime(frozen, SpecConfig(algorithm="X"), rows, {}, None)
    made.capture_layer_inputs((1, 4))
    return made


def features(runtime: FrozenRuntime, indices: Sequence[int]) -> Tensor:
    return runtime.batch(indices).features["aux_hidden_states"]


def test_features_are_those_of_the_model(runtime: FrozenRuntime, target: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0]))
    with torch.no_grad():
        states = model(runtime.batch([0]).tokens, output_hidden_states=True).hidden_states
    expected = torch.cat((states[1], kept[0]), dim=-1)
    torch.testing.assert_close(features(runtime, [0]), expected, atol=1e-4, rtol=1e-4)


def test_features_of_a_row_do_not_depend_on_its_batch(runtime: FrozenRuntime) -> None:
    together, alone = features(runtime, [1, 0]), features(runtime, [1])
    assert together.shape[1] == 20
    assert torch.equal(together[0, :9], alone[0])
    assert not together[0, 9:].any()


def test_kept_features_have_all_that_was_asked_for_later(runtime: FrozenRuntime) -> None:
    runtime.example()
    name = runtime.capture_lm_head_input()
    assert runtime.batch([2]).features.keys() == {"aux_hidden_states", name}


def test_norm_and_head_are_the_targets(runtime: FrozenRuntime) -> None:
    name = runtime.capture_lm_head_input()
    batch = runtime.batch([0])
    last = batch.features["aux_hidden_states"].chunk(2, dim=-1)[1]
    torch.testing.assert_close(runtime.final_norm(last), batch.features[name])
    ids = torch.tensor([3, 77])
    logits = runtime.lm_head(batch.features[name])[..., ids]
    torch.testing.assert_close(logits, batch.features[name] @ runtime.lm_head_rows(ids).t())


def test_tokens_that_are_learnt_are_counted(runtime: FrozenRuntime) -> None:
    counts = runtime.token_counts()
    assert counts[5].item() == 3
    assert counts[24].item() == 1
    assert counts.sum().item() == 43
