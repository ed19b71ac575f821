"""A fault that changes tokens is found: its setting, and where it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from torch import Tensor

import specplug.engine.step as step
from specplug import LLM, EngineConfig, PluginError, SamplingParams, UsageError
from specplug.bench.bisection import (
    FAILED,
    IDLE,
    RIGHT,
    UNTRIED,
    WRONG,
    Bisection,
    Suspect,
    bisect,
    suspects_of,
)
from specplug.kernels import sampling
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.kernels.kernel_table import kernels_mode, kernels_used
from specplug.model.target import Target

PROMPT = tuple((7 * i + 3) % 96 for i in range(40))
PARAMS = SamplingParams(max_tokens=12)
CHUNK = 16
"""Three chunks of the prompt: rows 0 to 15, 16 to 31, 32 to 39."""


def run(model: Any, params: SamplingParams = PARAMS, **settings: Any) -> Bisection:
    """Bisect a run of ``PROMPT`` in float64, where nothing is a near-tie."""
    settings = {"dtype": "float64", "skip_model_check": True, "page_size": 4, **settings}
    return bisect(EngineConfig(model=model, **settings), PROMPT, params, LLM)


def settings_of(found: Bisection) -> list[str]:
    return [suspect.setting for suspect in found.culprits]


def statuses(found: Bisection) -> dict[str, str]:
    return {verdict.suspect.part: verdict.status for verdict in found.verdicts}


@pytest.fixture(scope="module")
def model(build_model: Any, tiny_config: Any) -> Any:
    """A random Llama of four layers, without a tokenizer."""
    return build_model(tiny_config(num_hidden_layers=4))


Breaks = Callable[[int, int], bool]
"""``(first position, rows) -> whether a pass is wrong``."""


@pytest.fixture
def break_passes(monkeypatch: pytest.MonkeyPatch) -> Callable[[Breaks, int], None]:
    """Have layer 1 of four give something else for the rows from one on of some passes."""
    forward = Target.forward

    def apply(breaks: Breaks, row: int) -> None:
        def broken(self: Target, token_ids: Any, plan: Any, *more: Any) -> Any:
            if not breaks(int(plan.positions[0]), len(token_ids)):
                return forward(self, token_ids, plan, *more)

            def turn(layer: Any, arguments: Any, output: Tensor) -> Tensor:
                changed = output.clone()
                changed[..., row:, :] = changed[..., row:, :].flip(-1)
                return changed

            hook = self.capture.layers[1].register_forward_hook(turn)
            try:
                return forward(self, token_ids, plan, *more)
            finally:
                hook.remove()

        monkeypatch.setattr(Target, "forward", broken)

    return apply


def test_equal_runs_need_two_engines(model: Any) -> None:
    seen = []
    config = EngineConfig(model=model, speculative_algorithm="NGRAM", skip_model_check=True)
    found = bisect(config, PROMPT, PARAMS, LLM, lambda what, done, most: seen.append((what, done)))
    assert seen == [("the run as it is", 0), ("plain decoding", 1)]
    assert (found.round, found.culprits, found.parting) == (None, (), None)
    assert [len(output.token_ids) for output in found.run.outputs] == [12, 12]
    assert found.run.outputs[1].num_cached_tokens > 0
    plain = found.reference.effective
    assert (plain["algorithm"], plain["page_size"], plain["chunked_prefill_size"]) == (
        "NONE",
        1,
        None,
    )
    off = ("overlap", "prefix_cache", "cuda_graph", "cpu_kernels", "warm_up", "mixed_chunk")
    assert all(plain[name].startswith("off") for name in off)


def second_chunk(start: int, rows: int) -> bool:
    return start == CHUNK and rows > 1


def test_broken_chunk_names_chunks_position_and_layer(model: Any, break_passes: Any) -> None:
    break_passes(second_chunk, 4)
    found = run(model, chunked_prefill_size=CHUNK)
    assert settings_of(found) == ["chunked_prefill_size=None"]
    assert statuses(found)["prefix cache"] == WRONG
    assert statuses(found)["chunked prefill"] == RIGHT
    assert statuses(found)["pages of several tokens"] == UNTRIED
    parting = found.parting
    assert parting is not None
    right, wrong = found.reference.outputs[0].token_ids, found.run.outputs[0].token_ids
    assert right[: parting.index] == wrong[: parting.index]
    assert (parting.expected.token_id, parting.found.token_id) == (
        right[parting.index],
        wrong[parting.index],
    )
    assert parting.position == len(PROMPT) + parting.index
    first = parting.first_beyond_rounding
    assert first is not None
    assert (first.position, first.layer) == (20, 1)
    assert (first.place.kind, first.place.step, first.place.row) == ("prefill", 2, 4)
    assert first.largest > 1e-6 * first.scale
    assert parting.num_rows == parting.position


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_gaps_are_those_that_chose_the_tokens(
    model: Any, break_passes: Any, temperature: float
) -> None:
    break_passes(second_chunk, 4)
    params = attrs.evolve(PARAMS, temperature=temperature)
    parting = run(model, params, chunked_prefill_size=CHUNK).parting
    assert parting is not None
    assert parting.reference_gap is not None
    assert parting.reference_gap > 0
    assert parting.run_gap is not None
    assert parting.run_gap > 0


def test_broken_cached_prefix_is_found_in_the_second_round(model: Any, break_passes: Any) -> None:
    break_passes(lambda start, rows: (start, rows) == (36, 4), 3)
    found = run(model)
    assert (found.round, settings_of(found)) == (1, ["disable_radix_cache=True"])
    parting = found.parting
    assert parting is not None
    assert (parting.is_seen, parting.index) == (False, 0), "watched, it computes the prompt whole"
    assert (parting.place.kind, parting.place.step, parting.place.row) == ("prefill", 1, 3)
    assert parting.expected.token_id == found.reference.outputs[0].token_ids[0]
    assert parting.found.token_id == found.run.outputs[1].token_ids[0]


def test_two_faults_need_two_settings(model: Any, break_passes: Any) -> None:
    break_passes(lambda start, rows: start > 0 and rows > 1, 3)
    found = run(model, chunked_prefill_size=CHUNK)
    assert RIGHT not in statuses(found).values()
    assert settings_of(found) == ["disable_radix_cache=True", "chunked_prefill_size=None"]


def test_setting_that_cannot_run_is_passed_over(model: Any, break_passes: Any) -> None:
    break_passes(second_chunk, 4)

    def open_engine(config: EngineConfig) -> LLM:
        if config.disable_overlap_schedule and config.page_size > 1:
            raise PluginError("it needs overlap")
        return LLM(config)

    config = EngineConfig(model=model, dtype="float64", chunked_prefill_size=CHUNK)
    found = bisect(config, PROMPT, PARAMS, open_engine)
    (failed,) = (verdict for verdict in found.verdicts if verdict.status == FAILED)
    assert (failed.suspect.part, failed.note) == ("overlap schedule", "it needs overlap")
    assert settings_of(found) == ["chunked_prefill_size=None"]


def test_kv_that_is_not_moved_names_trees(shallow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {**shallow.options("EAGLE3"), "speculative_eagle_topk": 4}
    config, prompt = EngineConfig(**settings), "class A:\n    def __init__(self):\n        self."
    params = SamplingParams(max_tokens=48)
    assert bisect(config, prompt, params, LLM).round is None
    monkeypatch.setattr(step, "keep_accepted", lambda *moved: None)
    found = bisect(config, prompt, params, LLM)
    assert settings_of(found) == ["speculative_eagle_topk=1"]
    assert statuses(found)["speculation"] == UNTRIED
    parting = found.parting
    assert parting is not None
    first = parting.first_beyond_rounding
    assert first is not None
    # The keys of an accepted node are not where the next step's root looks for them.
    assert (first.place.kind, first.place.row, first.layer) == ("decode", 0, 0)


def other_numbers(layer: Any) -> Any:
    """The kernel in C, with the numbers of a prompt's rows in another order."""

    def broken(self: CPUKernels, weights: Any, rows: Any, *more: Any) -> Any:
        found = layer(self, weights, rows, *more)
        return found.flip(-1) if rows.count > 4 and found is not None else found

    return broken


def test_broken_kernel_in_c_is_named(
    build_model: Any, tiny_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build_model(tiny_config(head_dim=16))  # the kernel takes multiples of 16
    monkeypatch.setattr(CPUKernels, "decoder_layer", other_numbers(CPUKernels.decoder_layer))
    found = run(model, dtype="float32")
    assert settings_of(found) == ["disable_cpu_kernels=True"]
    assert statuses(found)["all kernels"] == UNTRIED
    assert (found.run.kernels, found.reference.kernels) == ("auto", "torch")


def next_token(choose: Any) -> Any:
    """The sampling kernel, one token further."""
    return lambda logits, *more, **named: (choose(logits, *more, **named) + 1) % logits.shape[1]


@kernels_used("triton")
def test_broken_triton_kernel_names_the_table(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    params = attrs.evolve(PARAMS, temperature=1.0)
    settings = {"dtype": "float32", "speculative_algorithm": "NGRAM"}
    assert run(model, params, **settings).round is None
    monkeypatch.setattr(sampling, "choose_tokens", next_token(sampling.choose_tokens))
    found = run(model, params, **settings)
    assert settings_of(found) == ["SPECPLUG_KERNELS='torch'"]
    assert statuses(found)["kernels in C"] == IDLE
    assert statuses(found)["speculation"] == UNTRIED
    parting = found.parting
    assert parting is not None
    assert parting.is_seen
    assert parting.first_beyond_rounding is None, "the target is right"
    assert kernels_mode() == "triton", "the process's own is put back"


def test_kernels_come_between_arithmetic_and_trees(model: Any) -> None:
    def kernels_of(device: str, dtype: str, kernels: str = "auto") -> tuple[Suspect, list[str]]:
        effective = {**plain, "device": device, "dtype": dtype}
        suspects = suspects_of(EngineConfig(), effective, (), 8, kernels)
        parts = [suspect.part for suspect in suspects]
        at = parts.index("all kernels")
        return suspects[at], [parts[at - 1], parts[at + 1]]

    with LLM(model, skip_model_check=True) as llm:
        plain = llm.effective_config
    found, beside = kernels_of("cuda:0", "bfloat16")
    assert beside == ["row-invariant arithmetic", "draft trees"]
    assert found.is_arithmetic, "torch's products there depend on the rows of a pass"
    assert not kernels_of("cuda:0", "float32")[0].is_arithmetic
    assert not kernels_of("cpu", "bfloat16")[0].is_arithmetic
    assert kernels_of("cpu", "float32", "torch")[0].idle == "off: SPECPLUG_KERNELS=torch"


def test_page_has_the_suspects_in_their_order(model: Any) -> None:
    with LLM(model, skip_model_check=True) as llm:
        suspects = suspects_of(EngineConfig(), llm.effective_config, (), 8, "auto")
    page = Path(__file__).parents[2] / "docs" / "wrong-token.md"
    table = page.read_text().partition("| suspect |")[2].partition("\n\n")[0]
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert [row[0].removeprefix("| ") for row in rows] == [each.part for each in suspects]
    for row, suspect in zip(rows, suspects, strict=True):
        assert next(iter(suspect.changes)) in row[1]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disaggregation": "decode"}, "disaggregation='decode': expected an engine of one"),
        (
            {"dp_size": 2, "dp_address": "localhost:1", "enable_dp_attention": True},
            "dp_size=2, .*leave these settings out",
        ),
    ],
)
def test_settings_of_many_processes_are_refused(settings: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        bisect(EngineConfig(**settings), PROMPT, PARAMS, LLM)


def test_several_outputs_are_refused() -> None:
    with pytest.raises(UsageError, match="n=2: expected 1, since one output is compared"):
        bisect(EngineConfig(), PROMPT, SamplingParams(n=2), LLM)


def test_request_that_fails_is_told(model: Any) -> None:
    with pytest.raises(UsageError, match="expected at most"):
        bisect(EngineConfig(model=model), PROMPT * 10, PARAMS, LLM)
