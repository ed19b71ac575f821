"""Tokens of an accepted path are added up to the one that ends a request."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import SamplingParams
from specplug.engine.request import Request

TOKENS = st.lists(st.integers(0, 5), max_size=6)


def request_of(max_tokens: int, stop: tuple[int, ...]) -> Request:
    """Return a request that 5 ends, as its end of text, and the tokens of ``stop``."""
    return Request(
        request_id="a",
        number=0,
        prompt=None,
        prompt_token_ids=(1,),
        params=SamplingParams(stop_token_ids=stop),
        max_tokens=max_tokens,
        seed=0,
        eos_token_ids=frozenset({5}),
    )


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(
    paths=st.lists(TOKENS, max_size=5),
    max_tokens=st.integers(1, 12),
    stop=st.sets(st.integers(0, 4), max_size=2),
)
def test_paths_are_taken_as_token_by_token(
    paths: list[list[int]], max_tokens: int, stop: set[int]
) -> None:
    own, other = (request_of(max_tokens, tuple(sorted(stop))) for _ in range(2))
    for path in paths:
        before = len(other.output_token_ids)
        for token in path:
            if not other.finished:
                other.append(token)
        assert own.extend(path) == len(other.output_token_ids) - before
        for name in ("token_ids", "output_token_ids", "status", "finish_reason", "stop_reason"):
            assert getattr(own, name) == getattr(other, name)
