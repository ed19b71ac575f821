"""Outputs that plugins and extensions add come token by token, as the core's own do."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specplug import (
    LLM,
    Batch,
    Draft,
    PerTokenOutput,
    PluginError,
    RequestOutput,
    Runtime,
    SamplingParams,
    TargetOutput,
    UsageError,
    hookimpl,
)
from specplug.engine.core_outputs import core_outputs
from specplug.settings import settings_of

EXAMPLE = Path(__file__).parents[1] / "examples/token_entropy/specplug_token_entropy.py"
VOCAB_SIZE = 96
MAX_TOKENS = 28
PRESSED: dict[str, Any] = {"page_size": 2, "chunked_prefill_size": 8, "max_total_tokens": 61 + 16}


@pytest.fixture
def extension(plugin_folder: Any) -> None:
    """The example, installed."""
    plugin_folder.write(
        "token-entropy",
        code=EXAMPLE.read_text(),
        distribution="specplug-token-entropy",
        value="specplug_token_entropy:extension",
        group="specplug.extensions",
    )


def asking(name: str, **settings: Any) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=MAX_TOKENS, seed=100 + i, token_outputs=(name,), **settings)
        for i in range(7)
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"disable_overlap_schedule": True},
        {**PRESSED, "enable_mixed_chunk": True},
        {"disaggregation": "both", "chunked_prefill_size": 5},
    ],
    ids=["plain", "pressed", "both"],
)
def test_the_example_tells_how_sure_the_target_is(
    extension: None, tiny_model: Path, reference: Any, successors: Any, options: dict[str, Any]
) -> None:
    with LLM(tiny_model, dtype="float64", speculative_algorithm=successors(), **options) as llm:
        every = SamplingParams(max_tokens=MAX_TOKENS, logprobs=VOCAB_SIZE)
        for _ in range(2):
            outputs = llm.generate(reference.prompts, asking("entropy"))
        plain = llm.generate(reference.prompts, every)
    for output, known in zip(outputs, plain, strict=True):
        assert output.token_ids == known.token_ids
        logprobs = torch.tensor([[e[t].logprob for t in range(VOCAB_SIZE)] for e in known.logprobs])
        expected = -(logprobs.exp() * logprobs).sum(-1)
        torch.testing.assert_close(output.token_outputs["entropy"], expected, rtol=1e-4, atol=1e-5)
        assert known.token_outputs == {}


@pytest.fixture
def adding(scripted: Any, reference: Any) -> Callable[..., Any]:
    """Makes an algorithm of scripted trees that adds outputs: ``adding(*outputs)``."""

    class Adding(scripted):  # type: ignore[misc]
        @hookimpl
        def create_worker(self, runtime: Runtime) -> Any:
            for output in outputs:
                runtime.add_output(output)
            return super().create_worker(runtime)

        @hookimpl
        def verify(self, batch: Batch, draft: Draft, target_output: TargetOutput) -> None:
            """Tell how deep each node stands, and which token."""
            depths = draft.flatten(draft.depths.expand_as(draft.tokens))
            target_output.per_node["depth"] = depths.clone()
            target_output.per_node["token"] = draft.flatten(draft.tokens).to(torch.int32)

    outputs: tuple[PerTokenOutput, ...] = ()

    def make(*added: PerTokenOutput) -> Any:
        nonlocal outputs
        outputs = added
        known = reference.tokens(["greedy"] * 7)
        return Adding(known, tree=True, right=0.7, ragged=True)

    return make


DEPTH = PerTokenOutput(name="depth", dtype=torch.int64, fill=-1)
TOKEN = PerTokenOutput(name="token", dtype=torch.int32, every_position=True, fill=-1)
AUX = PerTokenOutput(
    name="aux_hidden_states", shape=(64,), dtype=torch.float64, every_position=True
)


class Unlike(PerTokenOutput):
    """Its methods are not those of an output."""

    def sample(self, *_: Any) -> Any:
        raise AssertionError("the engine calls no method of a plugin's object")

    forms = found_in = cut = points = asked = sample  # type: ignore[assignment]


@pytest.mark.parametrize("options", [{}, {"enable_mixed_chunk": True}], ids=str)
def test_compute_that_writes_to_its_logits_changes_nobody(
    tiny_model: Path, adding: Any, reference: Any, options: dict[str, Any]
) -> None:
    def overwrite(logits: Tensor, predict: Tensor) -> Tensor:
        first = logits[:, 0].float()
        logits.as_strided((logits.untyped_storage().nbytes() // logits.itemsize,), (1,), 0).zero_()
        predict.zero_()
        return first

    # The requests that want it come first, so that it is computed first.
    params = [SamplingParams(max_tokens=9, token_outputs=("a", "b")) for _ in range(3)]
    params += [SamplingParams(max_tokens=9, logprobs=3) for _ in range(4)]
    made = [PerTokenOutput(name="a", compute=overwrite), Unlike(name="b", compute=overwrite)]
    with LLM(
        tiny_model, dtype="float64", speculative_algorithm=adding(*made),
        speculative_num_draft_tokens=8, chunked_prefill_size=16, **options,
    ) as llm:  # fmt: skip
        outputs = llm.generate(reference.prompts, params)
        expected = llm.generate(reference.prompts, SamplingParams(max_tokens=9, logprobs=3))
    for output, known in zip(outputs, expected, strict=True):
        assert output.token_ids == known.token_ids
    for output, known in zip(outputs[3:], expected[3:], strict=True):
        for found, entry in zip(output.logprobs, known.logprobs, strict=True):
            assert {t: e.logprob for t, e in found.items()} == pytest.approx(
                {t: e.logprob for t, e in entry.items()}, abs=1e-9
            )
    for output in outputs[:3]:
        assert torch.equal(output.token_outputs["a"], output.token_outputs["b"])
        assert bool(output.token_outputs["a"].any())


@pytest.mark.parametrize("options", [{}, {**PRESSED, "enable_mixed_chunk": True}], ids=str)
def test_what_verify_leaves_is_handed_out(
    tiny_model: Path, reference: Any, adding: Any, options: dict[str, Any]
) -> None:
    algorithm = adding(DEPTH, TOKEN, AUX)
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_num_draft_tokens=8,
        **options,
    ) as llm:
        params = [
            SamplingParams(
                max_tokens=MAX_TOKENS,
                seed=100 + i,
                token_outputs=("token", "depth", "aux_hidden_states"),
                return_hidden_states=(0, 1),
            )
            for i in range(7)
        ]
        outputs = llm.generate(reference.prompts, params)
        retractions = llm.stats()["retractions"]
    assert bool(retractions) == bool(options)
    for output, tokens in zip(outputs, reference.tokens(["greedy"] * 7).values(), strict=True):
        assert output.token_ids == tokens
        assert list(output.token_outputs) == ["depth", "token", "aux_hidden_states"]
        depth, token, aux = output.token_outputs.values()
        depths = depth.tolist()
        ends = list(accumulate(output.accept_lens, initial=1))
        passes = [depths[first:end] for first, end in pairwise(ends)]
        prefills = [each for each in passes if each == [-1]]  # of retracted requests
        decoded = [each for each in passes if each != [-1]]
        assert depths[0] == -1
        assert len(prefills) <= retractions
        assert decoded == [list(range(len(each))) for each in decoded], "each accepted node"
        counted = [d for d in depths if d >= 0]
        assert len(depth) == len(tokens)
        ids = [*output.prompt_token_ids, *tokens][:-1]
        assert token.dtype is torch.int32
        assert len(token) == len(ids)
        assert all(found in (-1, t) for found, t in zip(token.tolist(), ids, strict=True))
        assert (token >= 0).sum() == len(counted)
        assert torch.equal(aux, output.hidden_states.flatten(1))


def test_nobody_asks_and_nothing_is_computed(tiny_model: Path, reference: Any, adding: Any) -> None:
    def never(logits: Tensor, predict: Tensor) -> Tensor:
        raise AssertionError

    prompt, params = reference.prompts[1], reference.params["greedy"][1]
    wanting = attrs.evolve(params, token_outputs=("never",))
    algorithm = adding(PerTokenOutput(name="never", compute=never))
    with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        output = llm.generate([prompt], params)[0]
        assert output.token_outputs == {}
        told = r"^algorithm SCRIPTED \(.*\): output 'never': compute\(\) raised AssertionError"
        with pytest.raises(PluginError, match=told):
            llm.generate([prompt], wanting)
        assert llm.generate([prompt], params)[0].token_ids == output.token_ids


def test_an_output_that_is_not_there_is_told(tiny_model: Path, adding: Any) -> None:
    with LLM(tiny_model, speculative_algorithm=adding(DEPTH, TOKEN)) as llm:
        for names in (("entropy",), ("logprobs",)):
            params = SamplingParams(token_outputs=names)
            with pytest.raises(
                UsageError, match=rf"token_outputs=\('{names[0]}',\).*are depth, token;"
            ):
                llm.generate([(1, 2)], params)


@pytest.mark.parametrize("outputs", ["entropy", (1,), ("",), 5, (None,)])
def test_names_that_are_none_are_refused(outputs: Any) -> None:
    with pytest.raises(UsageError, match=r"token_outputs=.*: expected a tuple of names"):
        SamplingParams(token_outputs=outputs)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        (PerTokenOutput(name="depth"), r"'depth' is \[\d+\] of torch.int64.*of torch.float32"),
        (PerTokenOutput(name="token", shape=(2,), dtype=torch.int32), r"expected \[\d+, 2\]"),
        (
            PerTokenOutput(name="other", compute=lambda logits, predict: logits),
            r"'other' is \[1, 96\].*expected \[1\] of torch.float32",
        ),
        (
            PerTokenOutput(name="none", compute=lambda logits, predict: None),  # type: ignore[arg-type,return-value]
            "'none' is of type NoneType; expected",
        ),
        (
            PerTokenOutput(
                name="far", compute=lambda logits, predict: torch.zeros(len(predict), device="meta")
            ),
            r"'far' is \[1\] of torch.float32 on meta; expected \[1\] of torch.float32 on cpu;",
        ),
        (
            PerTokenOutput(
                name="sparse", compute=lambda logits, predict: torch.ones(len(predict)).to_sparse()
            ),
            r"'sparse' is \[1\] of torch.float32 on cpu in torch.sparse_coo; expected",
        ),
    ],
    ids=["dtype", "shape", "computed", "no tensor", "device", "layout"],
)
def test_an_output_of_another_form_is_told(
    tiny_model: Path, reference: Any, adding: Any, output: PerTokenOutput, why: str
) -> None:
    params = attrs.evolve(reference.params["greedy"][1], token_outputs=(output.name,))
    with (
        LLM(tiny_model, dtype="float64", speculative_algorithm=adding(output)) as llm,
        pytest.raises(PluginError, match=rf"^algorithm SCRIPTED \(.*\): output .*{why}"),
    ):
        llm.generate([reference.prompts[1]], params)


def test_failing_compute_of_an_extension_bears_its_name(
    plugin_folder: Any, tiny_model: Path
) -> None:
    code = """
from specplug import PerTokenOutput, hookimpl

class Measure:
    @hookimpl(wrapper=True)
    def create_worker(self, runtime):
        runtime.add_output(PerTokenOutput(name="ratio", compute=lambda logits, predict: 1 / 0))
        return (yield)

extension = Measure()
"""
    plugin_folder.write(
        "measure", code=code, distribution="their-measure", value="their_measure:extension",
        group="specplug.extensions",
    )  # fmt: skip
    params = SamplingParams(max_tokens=4, token_outputs=("ratio",))
    told = r"measure.*their-measure 1\.0.*: output 'ratio': compute\(\) raised ZeroDivisionError"
    with LLM(tiny_model) as llm, pytest.raises(PluginError, match=told):
        llm.generate([(1, 2, 3)], params)


@pytest.mark.parametrize(
    ("outputs", "why"),
    [
        ((DEPTH, DEPTH), "there is an output 'depth' already"),
        ((PerTokenOutput(name="logprobs"),), "there is an output 'logprobs' already"),
        ((PerTokenOutput(name="logprob_ids"),), "there is an output 'logprob_ids' already"),
        (
            (PerTokenOutput(name="aux_hidden_states", compute=lambda logits, predict: predict),),
            "there is an output 'aux_hidden_states' already",
        ),
        (("depth",), "of type str; expected a specplug.PerTokenOutput"),
    ],
    ids=["twice", "the core's", "a tensor of the core's", "an algorithm's capture", "no output"],
)
def test_an_output_that_cannot_be_added_is_told(
    tiny_model: Path, adding: Any, outputs: Any, why: str
) -> None:
    with pytest.raises(PluginError, match=why):
        LLM(tiny_model, speculative_algorithm=adding(*outputs))


def test_logits_are_not_known_at_every_position() -> None:
    with pytest.raises(PluginError, match="has compute and every_position; expected one of them"):
        PerTokenOutput(name="x", every_position=True, compute=lambda logits, predict: predict)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": ""}, "name=''"),
        ({"name": 5}, "name=5"),
        ({"shape": 3}, "shape=3"),
        ({"shape": (-1,)}, r"shape=\(-1,\)"),
        ({"dtype": "float32"}, "dtype='float32'"),
        ({"dtype": torch.complex64}, "dtype=torch.complex64"),
        ({"compute": 5}, "compute=5"),
        ({"every_position": "yes"}, "every_position='yes'"),
        ({"dtype": torch.int64, "fill": float("nan")}, "fill=nan"),
    ],
    ids=str,
)
def test_a_false_declaration_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(PluginError, match=f"{told}; expected .*; fix the plugin"):
        PerTokenOutput(**{"name": "x", **fields})


NO_OUTPUTS = {"cache_salt", "n", "skip_special_tokens", "token_outputs"}
"""Settings of the group Output that ask for no output of the core."""


def test_every_output_of_the_core_is_asked_for_kept_and_told() -> None:
    """A kind that is left out of the table, or a field that is left out, would be found by a run
    that asks for it alone."""
    target: Any = SimpleNamespace(
        vocab_size=9,
        dtype=torch.float32,
        num_layers=2,
        hidden_size=4,
        capture=SimpleNamespace(num_routers=1),
    )
    kinds = core_outputs(target, None)
    settings = {n for n, about in settings_of(SamplingParams).items() if about.group == "Output"}
    page = (Path(__file__).parents[1] / "docs" / "outputs.md").read_text(encoding="utf-8")
    asked = []
    for name in sorted(settings - NO_OUTPUTS):
        params = SamplingParams(**{name: True if name.startswith("return_") else 1})
        (kind,) = (each for each in kinds if each.asked(params) is not None)
        assert kind.name in attrs.fields_dict(RequestOutput), "where the caller finds it"
        assert f"`{name}=" in page
        asked.append(kind)
    assert set(asked) == set(kinds)
