"""What is on, what is off and why, and what is said of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import pytest

from specplug.engine.features import Features
from specplug.errors import FallbackWarning


@pytest.fixture(autouse=True)
def silent() -> Iterator[None]:
    """A warning that a test does not expect fails it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def test_what_nobody_minds_is_on() -> None:
    features = Features()
    assert features.decide("overlap", refused_by=None, obstacle=None) is True
    assert features.states == {"overlap": "on"}


def test_what_the_caller_refused_is_off_without_a_warning() -> None:
    features = Features()
    for obstacle in (None, "it cannot be"):
        assert features.decide("overlap", refused_by="--no-overlap", obstacle=obstacle) is False
        assert features.states == {"overlap": "off: --no-overlap"}


def test_what_cannot_be_is_off_and_warned_of_with_the_reason() -> None:
    features = Features()
    with pytest.warns(FallbackWarning) as caught:
        assert features.decide("prefix_cache", refused_by=None, obstacle="it must see all") is False
    assert features.states == {"prefix_cache": "off: it must see all"}
    assert [str(warning.message) for warning in caught] == ["prefix_cache is off: it must see all"]


def test_features_are_decided_one_by_one() -> None:
    features = Features()
    assert features.decide("overlap", refused_by="asked", obstacle=None) is False
    assert features.decide("prefix_cache", refused_by=None, obstacle=None) is True
    assert features.states == {"overlap": "off: asked", "prefix_cache": "on"}
    assert Features().states == {}
