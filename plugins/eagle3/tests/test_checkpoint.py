"""Published layouts load; what does not fit is told tensor by tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB
from torch import Tensor

from specplug import LLM, Checkpoint, CheckpointError, SamplingParams, UsageError
from specplug_eagle3 import algorithm
from specplug_eagle3.checkpoint import network_config
from specplug_eagle3.network import Eagle3Config, Eagle3Network

Write = Callable[..., Path]


@pytest.fixture
def tensors(write_draft: Write) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(write_draft() / "model.safetensors")


def load(target: Path, draft: Path, **settings: object) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        **settings,
    )


def network_of(llm: LLM) -> Eagle3Network:
    worker = llm.engine.runtime.worker
    network: Eagle3Network = worker.network
    return network


def assert_loaded(llm: LLM, tensors: dict[str, Tensor]) -> None:
    state = network_of(llm).state_dict()
    for name, tensor in tensors.items():
        assert torch.equal(state[name].cpu(), tensor), name


def test_safeailab_layout_loads(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    """A pickle, names without a prefix, no word of layers: the paper's rule gives them."""
    (write_draft() / "model.safetensors").unlink()
    draft = write_draft(
        tensors, pickled=True, eagle_aux_hidden_state_layer_ids=None, max_position_embeddings=None
    )
    llm = load(target, draft)
    assert network_of(llm).config.aux_layer_ids == (2, 2, 1)
    assert_loaded(llm, tensors)


def test_sglang_layout_loads(target: Path, write_draft: Write, tensors: dict[str, Tensor]) -> None:
    """safetensors, names under ``model.``, the layers under ``eagle_config``, no ``t2d``."""
    exported = {
        name if name in ("lm_head.weight", "d2t") else f"model.{name}": tensor
        for name, tensor in tensors.items()
        if name != "t2d"
    }
    draft = write_draft(
        exported,
        eagle_aux_hidden_state_layer_ids=None,
        eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 1, 2]},
    )
    llm = load(target, draft)
    assert network_of(llm).config.aux_layer_ids == (1, 2, 3)
    assert_loaded(llm, {name: t for name, t in tensors.items() if name != "t2d"})


def test_speculators_layout_loads(
    target: Path, write_speculator: Callable[..., tuple[Path, dict[str, Tensor]]]
) -> None:
    """The layer under ``layers.0`` and its sizes nested; aux layers counted by their inputs."""
    draft, tensors = write_speculator()
    llm = load(target, draft)
    config = network_of(llm).config
    assert config.aux_layer_ids == (1, 2, 3)
    assert config.norm_before_residual
    assert_loaded(llm, tensors)
    draft, tensors = write_speculator(
        qwen3=True, norms=("norm_before_fc",), norm_before_residual=False
    )
    llm = load(target, draft)
    assert not network_of(llm).config.norm_before_residual
    assert_loaded(llm, tensors)


def test_eagle_3_1_layouts_load(
    target: Path,
    write_draft: Write,
    write_speculator: Callable[..., tuple[Path, dict[str, Tensor]]],
) -> None:
    """``fc_norm.0.weight`` and so on, in ``speculators``' layout, under ``model.``, and by the
    names that SGLang still reads."""
    draft, tensors = write_speculator(norms=("fc_norm", "norm_output"))
    llm = load(target, draft)
    assert network_of(llm).config.norm_output
    assert_loaded(llm, tensors)
    norms = [name for name in tensors if "fc_norm" in name]
    assert norms == ["fc_norm.0.weight", "fc_norm.1.weight", "fc_norm.2.weight"]
    prefixed = {f"model.{name}": tensor for name, tensor in tensors.items()}
    llm = load(target, write_draft(prefixed, fc_norm=True, norm_output=True))
    assert_loaded(llm, tensors)
    older = dict(zip("012", ("low", "mid", "high"), strict=True))
    aux = {
        f"aux_norm_{older[name[8]]}.weight" if "fc_norm" in name else name: tensor
        for name, tensor in tensors.items()
    }
    llm = load(target, write_draft(aux, use_aux_norm=True))
    assert not network_of(llm).config.norm_output
    assert_loaded(llm, tensors)


def test_both_norms_of_the_features_are_refused(target: Path, write_draft: Write) -> None:
    draft = write_draft(fc_norm=True, norm_before_fc=True)
    with pytest.raises(CheckpointError, match="fc_norm and norm_before_fc are both true"):
        load(target, draft)


OPTIONS: dict[str, dict[str, Any]] = {
    "norm_before_residual": {"norm_before_residual": True},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "attention_bias": {"more": {"midlayer.self_attn.q_proj.bias": torch.zeros(32)}},
    "output_bias": {"more": {"midlayer.self_attn.o_proj.bias": torch.zeros(24)}},
    "query_key_norm": {"more": {"midlayer.self_attn.q_norm.weight": torch.zeros(8)}},
    "own_embedding_size": {"more": {"embed_tokens.weight": torch.zeros(VOCAB, 24)}},
}
"""How a checkpoint has each option of the network that it may leave out."""


def test_every_option_of_the_network_is_listed_here() -> None:
    fields = attrs.fields(Eagle3Config)
    assert {*OPTIONS} == {field.name for field in fields if field.default is not attrs.NOTHING}


@pytest.mark.parametrize("option", OPTIONS)
def test_option_of_a_checkpoint_changes_the_network(
    option: str, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    """An option that the loader or the network forgets changes nothing."""

    def config(more: Mapping[str, Tensor], **keys: Any) -> Eagle3Config:
        draft = write_draft({**tensors, **more}, **keys)
        return network_config(Checkpoint.read(draft), num_layers=4, context_len=CONTEXT)

    def output(config: Eagle3Config) -> tuple[list[tuple[str, torch.Size]], Tensor]:
        torch.manual_seed(3)
        own = config.own_embedding_size is not None
        network = Eagle3Network(config, own_embedding=own).double()
        shapes = [(name, tensor.shape) for name, tensor in network.state_dict().items()]
        fused = torch.randn(5, 3 * HIDDEN, dtype=torch.float64)
        embeds = torch.randn(5, config.embedding_size, dtype=torch.float64)
        with torch.inference_mode():
            return shapes, network(
                embeds, network.fuse(fused), torch.arange(5), lambda layer, q, k, v: q.flatten(1)
            )

    plain, changed = config({}), config(**{"more": {}, **OPTIONS[option]})
    assert getattr(changed, option) != getattr(plain, option)
    (shapes, found), (own_shapes, own) = output(plain), output(changed)
    assert shapes != own_shapes or not torch.equal(found, own)


def test_other_speculators_are_refused(
    target: Path, write_speculator: Callable[..., tuple[Path, dict[str, Tensor]]]
) -> None:
    draft, _ = write_speculator(speculators_model_type="medusa")
    with pytest.raises(CheckpointError, match="speculators_model_type 'medusa'; expected 'eagle3'"):
        load(target, draft)
    draft, _ = write_speculator(transformer_layer_config={"num_hidden_layers": 2})
    with pytest.raises(CheckpointError, match="2 draft layers; expected 1"):
        load(target, draft)


def test_an_embedding_of_its_own_is_used(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    own = torch.randn(97, 32, dtype=torch.float64)
    llm = load(target, write_draft({**tensors, "embed_tokens.weight": own}))
    assert_loaded(llm, {"embed_tokens.weight": own})
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))[0].token_ids


def test_wrong_tensors_are_all_named(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    del tensors["norm.weight"]
    tensors["extra"] = torch.zeros(3)
    tensors["fc.weight"] = torch.zeros(24, 5, dtype=torch.float64)
    with pytest.raises(CheckpointError) as error:
        load(target, write_draft(tensors))
    for told in (
        "missing norm.weight [24]",
        "unexpected extra [3]",
        "fc.weight is [24, 5], expected [24, 96]",
    ):
        assert told in str(error.value)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"vocab_size": 96}, "vocabulary of 96, the target's is 97"),
        ({"target_hidden_size": 64}, "hidden size of 64, the target's is 32"),
        ({"eagle_aux_hidden_state_layer_ids": [0, 1, 9]}, r"layers \[1, 2, 10\], the target has 4"),
        ({"hidden_size": None}, "'hidden_size' is missing"),
    ],
)
def test_a_draft_of_another_target_is_refused(
    target: Path, write_draft: Write, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load(target, write_draft(**changes))


def test_a_vocabulary_map_that_points_outside_is_refused(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    tensors["d2t"] = torch.full_like(tensors["d2t"], 60)
    with pytest.raises(CheckpointError, match="d2t points outside the vocabulary of 97"):
        load(target, write_draft(tensors))


def test_a_vocabulary_map_that_names_a_token_twice_is_refused(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    tensors["d2t"][0] = tensors["d2t"][1] + 1
    with pytest.raises(CheckpointError, match="d2t gives two draft tokens the same target id"):
        load(target, write_draft(tensors))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported; expected 'silu'"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported; expected 1"),
        ({"layer_types": ["sliding_attention"]}, "sliding_attention in layer_types True is not"),
    ],
)
def test_layers_of_another_kind_are_refused(
    target: Path, write_draft: Write, changes: dict[str, object], told: str
) -> None:
    with pytest.raises(CheckpointError, match=told):
        load(target, write_draft(**changes))


def test_keys_that_the_published_code_ignores_are_ignored(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    """They are the target's; the layer has no window, and biases where there are tensors."""
    llm = load(target, write_draft(sliding_window=8, attention_bias=True))
    assert_loaded(llm, tensors)
    assert network_of(llm).midlayer.self_attn.q_proj.bias is None


def test_a_tensor_under_two_names_is_told(
    target: Path, write_draft: Write, tensors: dict[str, Tensor]
) -> None:
    tensors["model.fc.weight"] = tensors["fc.weight"].clone()
    with pytest.raises(CheckpointError, match=r"fc\.weight is there 2 times"):
        load(target, write_draft(tensors))


def test_more_branches_than_the_draft_has_tokens_are_refused(
    target: Path, write_draft: Write
) -> None:
    with pytest.raises(UsageError, match="topk=51: the draft model knows 50 tokens"):
        load(target, write_draft(), speculative_eagle_topk=51)


def test_a_missing_folder_and_a_broken_file_are_told(target: Path, write_draft: Write) -> None:
    with pytest.raises(CheckpointError, match="no such folder"):
        load(target, Path("nowhere"))
    draft = write_draft()
    (draft / "model.safetensors").write_bytes(b"\x08\x00\x00\x00")
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(target, draft)
    (draft / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no \*.safetensors"):
        load(target, draft)


def test_another_target_needs_draft_weights(target: Path) -> None:
    with pytest.raises(UsageError, match="EAGLE3 needs draft weights for this target"):
        LLM(target, speculative_algorithm=algorithm)


def test_settings_are_adjusted_and_the_reason_told(target: Path, write_draft: Write) -> None:
    llm = load(target, write_draft(), speculative_num_steps=3, speculative_num_draft_tokens=9)
    assert llm.effective_config["num_draft_tokens"] == 4
    assert llm.effective_config["adjustments"] == ("num_draft_tokens 9 -> 4: a chain of 3 steps",)
    llm = load(
        target,
        write_draft(),
        speculative_num_steps=2,
        speculative_eagle_topk=2,
        speculative_num_draft_tokens=64,
    )
    assert llm.effective_config["num_draft_tokens"] == 7
    with pytest.raises(UsageError, match="num_draft_tokens=1: expected at least 2"):
        load(target, write_draft(), speculative_eagle_topk=2, speculative_num_draft_tokens=1)
