"""Hidden states of chosen layers come back token by token: those of transformers' own forward."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from shallow_target import ShallowTarget
from torch import Tensor

from specplug import LLM, RequestOutput, SamplingParams, UsageError
from specplug.registry import Registry

PROMPTS = [tuple(range(3, 3 + n)) for n in (1, 4, 11, 23)]
LAYERS: list[bool | tuple[int, ...]] = [(0, 1, 2), True, (2, 0), (1,)]
NUM_LAYERS = 2
PARAMS = [
    SamplingParams(max_tokens=20, temperature=0.8 * (i % 2), seed=i, return_hidden_states=layers)
    for i, layers in enumerate(LAYERS)
]
SILENT = [attrs.evolve(params, return_hidden_states=False) for params in PARAMS]

Known = list[tuple[tuple[int, ...], Tensor]]


@pytest.fixture(scope="session")
def layernorm_model(build_model: Callable[..., Path]) -> Path:
    """Its norms are float64 throughout: transformers computes RMS norms in float32."""
    from transformers import GPTNeoXConfig

    config = GPTNeoXConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        max_position_embeddings=96,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build_model(config)


@pytest.fixture(scope="session")
def expected(layernorm_model: Path) -> Known:
    """NONE's tokens, and the hidden states that transformers has for them.

    It computes them on the run's own device: rotary angles are float32 in a float64 model too, and
    their last bit is not the same on every device.
    """
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    with LLM(layernorm_model, dtype="float64", disable_overlap_schedule=True) as llm:
        outputs = llm.generate(PROMPTS, SILENT)
    model = AutoModelForCausalLM.from_pretrained(layernorm_model, dtype=torch.float64).to(device)
    found = []
    for output, layers in zip(outputs, LAYERS, strict=True):
        known = [*output.prompt_token_ids, *output.token_ids][:-1]
        with torch.inference_mode():
            ids = torch.tensor([known], device=device)
            states = model(ids, output_hidden_states=True, use_cache=False).hidden_states
        chosen = (NUM_LAYERS,) if layers is True else layers
        assert isinstance(chosen, tuple)
        found.append(
            (output.token_ids, torch.cat([states[n] for n in chosen]).transpose(0, 1).cpu())
        )
    return found


def check(outputs: list[RequestOutput], expected: Known) -> None:
    for output, (tokens, states) in zip(outputs, expected, strict=True):
        assert output.token_ids == tokens
        assert output.hidden_states is not None
        assert output.hidden_states.shape == (len(output.prompt_token_ids) + 19, *states.shape[1:])
        torch.testing.assert_close(output.hidden_states, states, rtol=0, atol=1e-9)


@pytest.fixture
def scripts(scripted: Any, expected: Known) -> Callable[..., Any]:
    """Makes the algorithm whose drafts are right by script."""
    known = {prompt: tokens for prompt, (tokens, _) in zip(PROMPTS, expected, strict=True)}

    def script(**options: Any) -> Any:
        return scripted(known, **options)

    return script


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize(
    ("page_size", "chunk", "mixed", "tree"),
    [(1, 5, False, True), (4, 8, True, False), (16, None, False, False), (64, 8, True, True)],
    ids=str,
)
def test_hidden_states_are_those_of_transformers(
    layernorm_model: Path,
    expected: Known,
    scripts: Any,
    page_size: int,
    chunk: int | None,
    mixed: bool,
    tree: bool,
    cache: bool,
    overlap: bool,
) -> None:
    """The second time what is cached has none: with them it is computed again."""
    with LLM(
        layernorm_model,
        dtype="float64",
        speculative_algorithm=scripts(tree=tree, right=0.7, ragged=True),
        speculative_num_draft_tokens=8 if tree else 5,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        disable_radix_cache=not cache,
        disable_overlap_schedule=not overlap,
    ) as llm:
        for _ in range(2):
            check(llm.generate(PROMPTS, PARAMS), expected)
        llm.check_pool()


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
@pytest.mark.parametrize("mixed", [True, False], ids=["mixed", "apart"])
def test_pressure_loses_no_hidden_states(
    layernorm_model: Path, expected: Known, scripts: Any, mixed: bool, overlap: bool
) -> None:
    with LLM(
        layernorm_model,
        dtype="float64",
        speculative_algorithm=scripts(right=0.3),
        page_size=2,
        chunked_prefill_size=8,
        enable_mixed_chunk=mixed,
        max_total_tokens=max(map(len, PROMPTS)) + 20 + 16,
        disable_overlap_schedule=not overlap,
    ) as llm:
        for params in (PARAMS, PARAMS, SILENT, SILENT, PARAMS):
            outputs = llm.generate(PROMPTS, params)
            if params is PARAMS:
                check(outputs, expected)
        assert llm.stats()["retractions"] > 0
        assert llm.stats()["cached_tokens"] > 0
        llm.check_pool()


@pytest.mark.parametrize("pressed", [True, False], ids=["pressed", "roomy"])
def test_hidden_states_come_from_a_prefill_instance(
    layernorm_model: Path, expected: Known, successors: Any, pressed: bool
) -> None:
    with LLM(
        layernorm_model,
        dtype="float64",
        speculative_algorithm=successors(),
        page_size=4,
        chunked_prefill_size=5,
        max_total_tokens=max(map(len, PROMPTS)) + 20 + 16 if pressed else None,
        disaggregation="both",
    ) as llm:
        for params in (PARAMS, SILENT, PARAMS):
            outputs = llm.generate(PROMPTS, params)
            if params is PARAMS:
                check(outputs, expected)
        assert llm.stats()["received"] == 3 * len(PROMPTS)


def test_cached_kv_does_not_travel_again_with_outputs(
    layernorm_model: Path, expected: Known
) -> None:
    with LLM(layernorm_model, dtype="float64", page_size=4, disaggregation="both") as llm:
        sizes = []
        for _ in range(2):
            check(llm.generate(PROMPTS[3:], PARAMS[3:]), expected[3:])
            sizes.append(llm.stats()["received_bytes"] - sum(sizes))
        assert sizes[1] <= sizes[0] * 3 // 23 + 1, "more than the last page came"


TEXTS = ["def total(values):\n    result = 0\n    for", "import ", "class Stack:\n    def "]
LAYERS_OF_TEXTS: list[tuple[int, ...]] = [(0, 3, 5), (5, 1), (2,)]


def of_texts(layers: tuple[int, ...]) -> SamplingParams:
    return SamplingParams(max_tokens=14, seed=3, temperature=0.7, return_hidden_states=layers)


@pytest.fixture(scope="module")
def plain_outputs(shallow: ShallowTarget) -> list[RequestOutput]:
    with LLM(**shallow.options("NONE"), dtype="float64", disable_overlap_schedule=True) as llm:
        each = zip(TEXTS, map(of_texts, LAYERS_OF_TEXTS), strict=True)
        return [llm.generate([text], params)[0] for text, params in each]


@pytest.mark.parametrize("disaggregation", [None, "both"])
@pytest.mark.parametrize("name", Registry().names())
def test_every_algorithm_leaves_the_hidden_states_of_none(
    name: str,
    disaggregation: str | None,
    shallow: ShallowTarget,
    plain_outputs: list[RequestOutput],
) -> None:
    with LLM(
        **shallow.options(name),
        dtype="float64",
        page_size=3,
        chunked_prefill_size=4,
        disable_overlap_schedule=disaggregation is None,
        disaggregation=disaggregation,
    ) as llm:
        outputs = llm.generate(TEXTS, list(map(of_texts, LAYERS_OF_TEXTS)))
    for output, plain in zip(outputs, plain_outputs, strict=True):
        assert output.token_ids == plain.token_ids
        torch.testing.assert_close(output.hidden_states, plain.hidden_states, rtol=0, atol=1e-9)


def test_who_asks_for_nothing_gets_nothing(layernorm_model: Path, expected: Known) -> None:
    with LLM(layernorm_model, dtype="float64") as llm:
        outputs = llm.generate(PROMPTS, [*PARAMS[:2], *SILENT[2:]])
        check(outputs[:2], expected[:2])
        assert [o.token_ids for o in outputs[2:]] == [tokens for tokens, _ in expected[2:]]
        assert all(o.hidden_states is None for o in outputs[2:])
        llm.generate(PROMPTS[:1], SILENT[:1])
        hooks = [
            len(layer._forward_pre_hooks) for layer in llm.engine.steps.runner.target.capture.layers
        ]
        assert hooks == [0, 0], "a pass that nobody reads runs hooks"


def test_all_outputs_of_a_request_come_together(moe_model: Path) -> None:
    params = SamplingParams(
        max_tokens=6, logprobs=2, return_routed_experts=True, return_hidden_states=True
    )
    with LLM(moe_model, dtype="float64", chunked_prefill_size=5) as llm:
        output = llm.generate([PROMPTS[2]], params)[0]
        head = llm.engine.steps.runner.target.lm_head.weight.detach().cpu()
        assert output.logprobs is not None
        assert output.routed_experts is not None
        assert output.hidden_states is not None
        assert output.routed_experts.shape == (11 + 5, 2, 2)
        logits = output.hidden_states[10:, 0] @ head.T
    for token, entry, row in zip(output.token_ids, output.logprobs, logits, strict=True):
        assert entry[token].logprob == pytest.approx(float(row.log_softmax(-1)[token]), abs=1e-9)


def test_hidden_states_keep_the_dtype_of_the_target(layernorm_model: Path) -> None:
    with LLM(layernorm_model, dtype="bfloat16") as llm:
        output = llm.generate([PROMPTS[1]], PARAMS[1])[0]
    assert output.hidden_states is not None
    assert output.hidden_states.dtype is torch.bfloat16


@pytest.mark.parametrize(
    ("layers", "why"),
    [
        ((0, 3), r"return_hidden_states=\(0, 3\): expected layers from 0 to 2"),
        ((), r"return_hidden_states=\(\): expected True, False or a tuple of layer numbers"),
        ((-1,), r"return_hidden_states=\(-1,\): expected"),
        ((True,), r"return_hidden_states=\(True,\): expected"),
        (1, "return_hidden_states=1: expected"),
        ("all", "return_hidden_states='all': expected"),
    ],
    ids=str,
)
def test_layers_that_are_not_there_are_told(layernorm_model: Path, layers: Any, why: str) -> None:
    with LLM(layernorm_model) as llm, pytest.raises(UsageError, match=why):
        llm.generate([PROMPTS[0]], SamplingParams(return_hidden_states=layers))
