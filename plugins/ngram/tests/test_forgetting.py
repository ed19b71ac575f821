"""Text that ``LLM.flush_cache`` has forgotten is neither drafted nor found in the prefix cache."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from specplug import LLM, SamplingParams, UsageError
from specplug.outputs import RequestOutput

PROMPT = "def area(width, height):\n    return width * height\n\n\ndef "
SETTINGS = {"device": "cpu", "dtype": "float32", "max_total_tokens": 2048, "page_size": 4}
US, THEM = "us", "them"


def _params(salt: str | None, max_tokens: int = 40) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, cache_salt=salt)


@pytest.fixture(scope="module", params=["NGRAM", "EAGLE3+NGRAM"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    with LLM(speculative_algorithm=request.param, **SETTINGS) as llm:
        yield llm


@pytest.fixture(autouse=True)
def _forget(llm: LLM) -> Iterator[None]:
    yield
    llm.flush_cache()
    llm.check_pool()
    assert llm.occupancy["cached"] == 0


def _said(llm: LLM, salt: str | None) -> RequestOutput:
    (output,) = llm.generate([PROMPT], _params(salt))
    return output


def _index(llm: LLM) -> Any:
    worker = llm.engine.runtime.worker
    ngram = worker.parts[-1].worker if hasattr(worker, "parts") else worker
    return ngram.index


def _steps(output: RequestOutput) -> int:
    return len(output.accept_lens)


def test_forgotten_text_of_a_salt_is_not_known_and_tokens_stay(llm: LLM) -> None:
    first = _said(llm, US)
    _said(llm, THEM)
    again = _said(llm, US)
    assert again.num_cached_tokens > 0
    assert _steps(again) < _steps(first), "it drafts what the first request said"
    llm.flush_cache(US)
    forgotten, theirs = _said(llm, US), _said(llm, THEM)
    assert forgotten.num_cached_tokens == 0
    assert _steps(forgotten) == _steps(first)
    assert theirs.num_cached_tokens == again.num_cached_tokens
    assert _steps(theirs) < _steps(first)
    assert {out.token_ids for out in (again, forgotten, theirs)} == {first.token_ids}


def test_all_text_is_forgotten_without_a_salt(llm: LLM) -> None:
    for salt in (US, THEM, None):
        _said(llm, salt)
    llm.flush_cache()
    assert _index(llm).num_tokens == llm.occupancy["cached"] == 0


def test_salt_that_no_request_had_changes_nothing(llm: LLM) -> None:
    _said(llm, US)
    before = _index(llm).num_tokens, llm.occupancy
    assert before[0] > 0
    llm.flush_cache("another")
    assert (_index(llm).num_tokens, llm.occupancy) == before


@pytest.mark.parametrize("salt", ["", 5, b"us", "x" * 257])
def test_what_is_no_salt_is_refused_and_nothing_forgotten(llm: LLM, salt: Any) -> None:
    _said(llm, US)
    before = _index(llm).num_tokens, llm.occupancy
    with pytest.raises(UsageError, match="cache_salt"):
        llm.flush_cache(salt)
    assert (_index(llm).num_tokens, llm.occupancy) == before


@pytest.mark.parametrize("salt", [US, None])
def test_running_requests_go_on_and_stay_exact(llm: LLM, salt: str | None) -> None:
    expected = _said(llm, US)
    found = {}
    for owner in (US, THEM):
        llm.add_request(PROMPT, _params(owner))
    while llm.has_unfinished_requests:
        for output in llm.step():
            found[output.request_id] = output
        llm.flush_cache(salt)
        llm.check_pool()
    assert [out.token_ids for out in found.values()] == 2 * [expected.token_ids]


def test_text_of_requests_that_have_just_ended_is_forgotten(llm: LLM) -> None:
    """With overlap the next step, which still has them, is on the device."""
    stop = _said(llm, THEM).token_ids[20]  # an end that the scheduler cannot foresee
    llm.add_request(PROMPT, SamplingParams(stop_token_ids=[stop], cache_salt=US))
    aborted = llm.add_request(PROMPT + "area(", _params(US))
    while not any(out.finish_reason for out in llm.step()):
        pass
    llm.abort(aborted)
    llm.flush_cache(US)
    assert _said(llm, US).num_cached_tokens == 0
    assert _said(llm, THEM).num_cached_tokens > 0
