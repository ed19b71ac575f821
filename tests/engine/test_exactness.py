"""Whatever is drafted, and however it is scheduled, the output is that of plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specplug import LLM, RequestOutput, SamplingParams
from specplug.kernels.kernel_table import kernels_used

KINDS = ("greedy", "seeded", "truncated", "penalized", "penalized and sampled")
MAX_TOKENS = 28


@attrs.frozen
class Case:
    """One run: its engine's settings, its requests, and its drafts."""

    kinds: tuple[str, ...]
    max_tokens: tuple[int, ...]
    logprobs: tuple[int | None, ...]
    hidden_states: tuple[bool | tuple[int, ...], ...]
    page_size: int
    overlap: bool
    chunk: int | None
    rows: int
    mixed: bool
    cache: bool
    priorities: tuple[int, ...]
    spare: int | None
    rounds: int
    tree: bool
    num_steps: int
    num_draft_tokens: int
    right: float
    ragged: bool
    seed: int

    def engine(self, prompts: Sequence[Sequence[int]]) -> dict[str, Any]:
        needs = [len(p) + most for p, most in zip(prompts, self.max_tokens, strict=False)]
        return {
            # From just enough for the longest request, without any draft, upwards.
            "max_total_tokens": None if self.spare is None else max(needs) + self.spare,
            "dtype": "float64",
            "page_size": self.page_size,
            "chunked_prefill_size": self.chunk,
            "disable_overlap_schedule": not self.overlap,
            "max_running_requests": self.rows,
            "enable_mixed_chunk": self.mixed,
            "disable_radix_cache": not self.cache,
            "skip_model_check": self.seed % 8 > 0,  # it is the same model every time
        }


@st.composite
def cases(draw: Callable[..., Any]) -> Case:
    batch = draw(st.integers(1, 7))
    one_kind = draw(st.sampled_from([None, *KINDS]))
    each = st.sampled_from(KINDS) if one_kind is None else st.just(one_kind)
    num_steps = draw(st.sampled_from([1, 4]))
    tree = draw(st.booleans())

    def of_batch(values: Any) -> Any:
        return draw(st.lists(values, min_size=batch, max_size=batch).map(tuple))

    return Case(
        kinds=of_batch(each),
        max_tokens=of_batch(st.sampled_from([1, 2, 9, MAX_TOKENS, MAX_TOKENS])),
        logprobs=of_batch(st.sampled_from([None, 0, 3])),
        hidden_states=of_batch(st.sampled_from([False, False, True, (0, 2), (1,)])),
        page_size=draw(st.sampled_from([1, 3, 4, 16, 64])),
        overlap=draw(st.booleans()),
        chunk=draw(st.sampled_from([None, 5, 16])),
        rows=draw(st.sampled_from([batch, max(1, batch // 2)])),
        mixed=draw(st.booleans()),
        cache=draw(st.booleans()),
        priorities=of_batch(st.integers(0, 2)),
        spare=draw(st.sampled_from([None, 0, 1, 7, 40])),
        rounds=draw(st.sampled_from([1, 2])),
        tree=tree,
        num_steps=num_steps,
        num_draft_tokens=draw(st.integers(1, 9 if tree else num_steps + 1)),
        right=draw(st.sampled_from([0.0, 0.5, 0.8, 1.0])),
        ragged=draw(st.booleans()),
        seed=draw(st.integers(0, 1000)),
    )


def _params(case: Case, reference: Any) -> list[SamplingParams]:
    return [
        attrs.evolve(
            reference.params[kind][i],
            max_tokens=case.max_tokens[i],
            logprobs=case.logprobs[i],
            return_hidden_states=case.hidden_states[i],
        )
        for i, kind in enumerate(case.kinds)
    ]


@pytest.fixture(scope="module")
def all_layers(tiny_model: Path, reference: Any) -> dict[str, list[Tensor]]:
    """Of each kind and prompt the hidden states [tokens, 3, hidden size], by NONE."""
    with LLM(tiny_model, dtype="float64", disable_overlap_schedule=True) as llm:
        return {
            kind: [
                output.hidden_states
                for output in llm.generate(
                    reference.prompts,
                    [attrs.evolve(each, return_hidden_states=(0, 1, 2)) for each in params],
                )
                if output.hidden_states is not None
            ]
            for kind, params in reference.params.items()
        }


def _check(
    case: Case,
    reference: Any,
    all_layers: dict[str, list[Tensor]],
    outputs: list[RequestOutput],
) -> None:
    for i, output in enumerate(outputs):
        plain = reference.outputs[case.kinds[i]][i]
        most = case.max_tokens[i]
        assert output.token_ids == plain.token_ids[:most], (i, case.kinds[i])
        assert output.finish_reason == "length"
        assert sum(output.accept_lens) + 1 == len(output.token_ids)
        _check_logprobs(output, plain, case.logprobs[i])
        _check_hidden_states(output, all_layers[case.kinds[i]][i], case.hidden_states[i])


def _check_hidden_states(
    output: RequestOutput, all_layers: Tensor, layers: bool | tuple[int, ...]
) -> None:
    if layers is False:
        assert output.hidden_states is None
        return
    rows = len(output.prompt_token_ids) + len(output.token_ids) - 1
    columns = [2] if layers is True else list(layers)
    expected = all_layers[:rows, columns]
    torch.testing.assert_close(output.hidden_states, expected, rtol=0, atol=1e-9)


def _check_logprobs(output: RequestOutput, plain: RequestOutput, count: int | None) -> None:
    if count is None:
        assert output.logprobs is None
        return
    assert output.logprobs is not None
    assert plain.logprobs is not None
    assert len(output.logprobs) == len(output.token_ids)
    for token, found, expected in zip(
        output.token_ids, output.logprobs, plain.logprobs, strict=False
    ):
        wanted = {t: p for t, p in expected.items() if t == token or p.rank <= count}
        assert {t: p.rank for t, p in found.items()} == {t: p.rank for t, p in wanted.items()}
        for other, value in found.items():
            assert value.logprob == pytest.approx(wanted[other].logprob, abs=1e-9)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_scripted_drafts_never_change_the_output(
    case: Case, tiny_model: Path, reference: Any, all_layers: Any, scripted: Any
) -> None:
    algorithm = scripted(
        reference.tokens(case.kinds),
        tree=case.tree,
        right=case.right,
        ragged=case.ragged,
        seed=case.seed,
    )
    prompts = reference.prompts[: len(case.kinds)]
    with LLM(
        tiny_model,
        speculative_algorithm=algorithm,
        speculative_num_steps=case.num_steps,
        speculative_num_draft_tokens=case.num_draft_tokens,
        **case.engine(prompts),
    ) as llm:
        for _ in range(case.rounds):
            outputs = llm.generate(prompts, _params(case, reference), priority=case.priorities)
            llm.check_pool()
        assert llm.effective_config["num_draft_tokens"] == case.num_draft_tokens
    _check(case, reference, all_layers, outputs)
    if case.right == 1.0 and not case.tree and not case.ragged and case.spare is None:
        most = min(case.num_draft_tokens, case.num_steps + 1)
        for output in outputs:
            assert all(count == most for count in output.accept_lens[:-1])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(case=cases())
def test_plain_decoding_does_not_depend_on_the_schedule(
    case: Case, tiny_model: Path, reference: Any, all_layers: Any
) -> None:
    prompts = reference.prompts[: len(case.kinds)]
    with LLM(tiny_model, **case.engine(prompts)) as llm:
        for _ in range(case.rounds):
            outputs = llm.generate(prompts, _params(case, reference), priority=case.priorities)
            llm.check_pool()
    _check(case, reference, all_layers, outputs)
    assert all(set(output.accept_lens) <= {1} for output in outputs)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_draft_shrinks_where_the_pool_is_short(
    tree: bool, overlap: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """A pool that just holds one request ends every one, with narrower and narrower drafts."""
    prompts, params = reference.prompts, reference.params["greedy"]
    algorithm = scripted(reference.tokens(["greedy"] * 7), tree=tree, right=0.2)
    with LLM(
        tiny_model,
        dtype="float64",
        page_size=1,
        max_total_tokens=max(len(prompt) for prompt in prompts) + MAX_TOKENS,
        speculative_algorithm=algorithm,
        disable_overlap_schedule=not overlap,
    ) as llm:
        outputs = llm.generate(prompts, params)
        llm.check_pool()
        plain = [output.token_ids for output in reference.outputs["greedy"]]
        assert [output.token_ids for output in outputs] == plain
    widths = algorithm.widths[prompts[-1]]
    assert max(widths) == 5, "there is room for a whole draft at first"
    assert widths[-1] < 5, "and none at the pool's end"


def test_streams_give_the_same_tokens_as_generate(
    tiny_model: Path, reference: Any, scripted: Any
) -> None:
    algorithm = scripted(reference.tokens(["seeded"] * 7), tree=True, right=0.7, ragged=True)
    with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        grown: dict[str, list[tuple[int, ...]]] = {}
        for output in llm.stream(reference.prompts, reference.params["seeded"]):
            grown.setdefault(output.request_id, []).append(output.token_ids)
        llm.check_pool()
    for i, steps in enumerate(grown.values()):
        expected = reference.outputs["seeded"][i].token_ids
        assert steps[-1] == expected
        assert all(expected[: len(tokens)] == tokens for tokens in steps)
        assert [len(tokens) for tokens in steps] == sorted(len(tokens) for tokens in steps)


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_changes_no_token_either(
    kind: str, tree: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    prompts, params = reference.prompts, reference.params[kind]
    with LLM(tiny_model, dtype="float32") as llm:
        plain = [output.token_ids for output in llm.generate(prompts, params)]
    known = dict(zip(prompts, plain, strict=True))
    algorithm = scripted(known, tree=tree, right=0.8, ragged=True, tolerance=1e-4)
    with LLM(tiny_model, dtype="float32", speculative_algorithm=algorithm, page_size=3) as llm:
        assert [output.token_ids for output in llm.generate(prompts, params)] == plain


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_generates_the_same_twice(
    kind: str, dtype: str, tiny_model: Path, reference: Any
) -> None:
    found = []
    for _ in range(2):
        with LLM(tiny_model, dtype=dtype) as llm:
            outputs = llm.generate(reference.prompts, reference.params[kind])
            found.append([output.token_ids for output in outputs])
            assert all(len(output.token_ids) == MAX_TOKENS for output in outputs)
    assert found[0] == found[1]


@kernels_used("triton")
def test_kernels_around_the_pass_change_no_token(
    tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """Those of ``kernels.tree``, which a GPU launches in the place of torch."""
    prompts, params = reference.prompts[:2], reference.params["penalized"][:2]
    algorithm = scripted(reference.tokens(["penalized"] * 7), tree=True, right=0.8, ragged=True)
    with LLM(tiny_model, dtype="float64", page_size=3, speculative_algorithm=algorithm) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["mean_accept_length"] > 1.5
    expected = [output.token_ids for output in reference.outputs["penalized"][:2]]
    assert [output.token_ids for output in outputs] == expected
