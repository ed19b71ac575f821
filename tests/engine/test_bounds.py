"""Every number that a run takes: absurd ones are refused by name, quickly, or they work."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest

from specplug import LLM, AlgorithmInfo, RequestOutput, SamplingParams, SpecConfig, UsageError
from specplug.algorithm import Capabilities, Defaults

ABSURD = [0, -1, 2**31, 10**12, 10**30, 10**5000, 1e30, math.nan, math.inf, -math.inf, True, "8"]
NUMBERS = ("int", "int | None", "float", "float | None")


def numbers_of(function: Any) -> list[str]:
    """Arguments that are numbers, by their annotations."""
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.annotation in NUMBERS]


def told(value: Any) -> str:
    """How a message begins that names a value."""
    return "=" if isinstance(value, int) and value > 10**30 else f"={value!r}"


OF_THE_LLM = numbers_of(LLM.__init__)


def test_the_walk_finds_the_numbers_of_the_llm() -> None:
    assert {"seed", "page_size", "max_total_tokens", "num_threads", "dp_timeout"} <= {*OF_THE_LLM}


@pytest.mark.parametrize("name", OF_THE_LLM)
def test_absurd_number_is_refused_or_works(name: str, tiny_model: Path) -> None:
    settings: dict[str, Any] = {"max_running_requests": 2, "max_model_len": 40}
    for value in ABSURD:
        output: RequestOutput | None = None
        said = ""
        try:
            with LLM(tiny_model, dtype="float64", **{**settings, name: value}) as llm:
                (output,) = llm.generate([1, 2, 3], SamplingParams(max_tokens=2))
        except UsageError as error:
            said = str(error)
        if output is not None:
            assert len(output.token_ids) == 2
        else:
            short = name.removeprefix("speculative_").removeprefix("eagle_")
            assert said.startswith(short + told(value))
            assert "expected " in said


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_threads": 100_000}, "num_threads=100000: expected at most [0-9]+, 4 for each of "),
        (
            {"speculative_num_steps": 99_999_999_999},
            "num_steps=99999999999: expected at most 1023, as a draft has at most 1024 tokens, its",
        ),
        (
            {"max_total_tokens": 10**12},
            r"max_total_tokens=1000000000000: needs [0-9,.]+ GiB, \d+ bytes per token; expected at "
            r"most the [0-9,.]+ GiB that cpu has; lower max_total_tokens",
        ),
        (
            {"page_size": 5000},
            "page_size=5000: expected at most 4096, as even a request of one token",
        ),
        ({"max_running_requests": 16385}, "max_running_requests=16385: expected at most 16384"),
        ({"dp_timeout": math.inf}, "dp_timeout=inf: expected seconds, above 0 and at most 1000000"),
    ],
)
def test_bound_says_where_it_is_from(
    settings: dict[str, Any], message: str, tiny_model: Path
) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        LLM(tiny_model, dtype="float64", device="cpu", **settings)


def test_pool_beyond_what_is_free_is_no_allocators_text(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine has as much in all, it is told, but not now."""
    monkeypatch.setattr("specplug.engine.kv_pool.memory_of", lambda device: 2**80)
    with pytest.raises(
        UsageError, match=r"^max_total_tokens=10{14}: the KV pool needs .*has no such"
    ):
        LLM(tiny_model, dtype="float64", device="cpu", max_total_tokens=10**14, page_size=1)


@pytest.mark.parametrize("name", ["num_steps", "topk", "num_draft_tokens"])
def test_speculation_settings_are_bounded(name: str) -> None:
    info = AlgorithmInfo(
        name="X", summary="", api_version=1, capabilities=Capabilities(branching=True)
    )
    for value in ABSURD:
        with pytest.raises(UsageError, match=f"^{name}="):
            SpecConfig.resolve(info, **{name: value})
    with pytest.raises(ValueError, match=name):
        Defaults(**{name: 10**6})
    with pytest.raises(ValueError, match=name):
        SpecConfig(algorithm="X", **{name: 10**6})


def test_depth_times_width_is_bounded() -> None:
    able = Capabilities(branching=True)
    info = AlgorithmInfo(name="X", summary="", api_version=1, capabilities=able)
    with pytest.raises(
        UsageError, match=r"^num_steps=256 with topk=64 makes num_draft_tokens 16385"
    ):
        SpecConfig.resolve(info, num_steps=256, topk=64)
    fitted = SpecConfig.resolve(info, num_steps=256, topk=64, num_draft_tokens=1024)
    assert fitted.num_draft_tokens == 1024


@pytest.fixture(scope="module")
def llm(tiny_model: Path) -> Iterator[LLM]:
    with LLM(tiny_model, dtype="float64", max_model_len=40) as llm:
        yield llm


OF_A_REQUEST = [each.name for each in attrs.fields(SamplingParams) if each.type in NUMBERS]


@pytest.mark.parametrize("name", OF_A_REQUEST)
def test_absurd_sampling_number_is_refused_or_works(name: str, llm: LLM) -> None:
    for value in ABSURD:
        if value == 10**5000 and name != "max_tokens":
            continue  # no JSON holds it, and no message
        settings = {"max_tokens": 2, "temperature": 1.0, name: value}
        said = f"{name}="
        try:
            (output,) = llm.generate([1, 2, 3], SamplingParams(**settings))
        except UsageError as error:
            said = str(error)
        else:
            assert output.finish_reason == "length"
        assert said.startswith(f"{name}=")
    llm.check_pool()
