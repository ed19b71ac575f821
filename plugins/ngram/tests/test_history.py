"""What a plain scan over the history says, in constant time and memory."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug_ngram.history import ORDERS, TOKEN_BYTES, History, Stream

exactly = settings(max_examples=300, deadline=None, derandomize=True, database=None)
turns = st.lists(st.tuples(st.integers(0, 2), st.lists(st.integers(0, 2), max_size=6)), max_size=30)
Turns = Sequence[tuple[int, list[int]]]


@attrs.frozen
class Written:
    """An entry as a plain list holds it: whose it is, and all that its request had said then."""

    request: int
    said: tuple[int, ...]


def _write(turns: Turns, capacity: int) -> tuple[History, list[Stream], list[Written]]:
    history, streams = History(capacity), [Stream() for _ in range(3)]
    said: list[tuple[int, ...]] = [()] * 3
    log: list[Written] = []
    for request, tokens in turns:
        history.extend(streams[request], tokens)
        for token in tokens:
            said[request] += (token,)
            log.append(Written(request, said[request]))
    return history, streams, log


def _kept_length(log: Sequence[Written], entry: int, oldest: int, end: Sequence[int]) -> int:
    """How many of the tokens ``end`` stand at ``entry`` and before it, as far as they are kept."""
    own = [e for e in range(oldest + 1, entry + 1) if log[e - 1].request == log[entry - 1].request]
    length = 0
    for e, token in zip(reversed(own), reversed(end), strict=False):
        if log[e - 1].said[-1] != token:
            break
        length += 1
    return length


def _scan(
    log: Sequence[Written],
    request: int,
    capacity: int,
    limit: int,
    bucket: Callable[[tuple[int, ...]], Hashable],
) -> tuple[int, list[int]]:
    oldest = max(len(log) - capacity, 0)
    own = [e for e in range(1, len(log) + 1) if log[e - 1].request == request]
    if not own or own[-1] <= oldest:
        return 0, []
    said = log[own[-1] - 1].said
    for order in ORDERS:
        if len(said) < order:
            continue
        same = [
            e
            for e in range(own[-1] - 1, oldest, -1)
            if len(log[e - 1].said) >= order
            and bucket(log[e - 1].said[-order:]) == bucket(said[-order:])
        ][:limit]
        lengths = {
            e: _kept_length(log, e, oldest, said[-ORDERS[0] :])
            for e in same
            if any(later.request == log[e - 1].request for later in log[e:])
        }
        longest = max(lengths.values(), default=0)
        if longest >= order:
            return longest, [e for e in same if lengths.get(e) == longest]
    return 0, []


@exactly
@given(turns=turns, limit=st.integers(1, 12))
def test_matches_are_those_of_a_scan_over_the_whole_history(turns: Turns, limit: int) -> None:
    history, streams, log = _write(turns, 1 << 14)
    for request, stream in enumerate(streams):
        expected = _scan(log, request, 1 << 14, limit, bucket=lambda gram: gram)
        assert history.matches(stream, limit) == expected


@exactly
@given(turns=turns, capacity=st.sampled_from([2, 4, 8, 16, 32]), limit=st.integers(1, 12))
def test_matches_are_those_of_a_scan_over_what_is_kept(
    turns: Turns, capacity: int, limit: int
) -> None:
    history, streams, log = _write(turns, capacity)
    assert len(history) == min(len(log), capacity)
    for request, stream in enumerate(streams):
        expected = _scan(
            log, request, capacity, limit, bucket=lambda gram: hash(gram) & (capacity - 1)
        )
        assert history.matches(stream, limit) == expected


@exactly
@given(turns=turns, capacity=st.sampled_from([8, 1 << 14]))
def test_what_follows_an_entry_is_its_own_requests_next_token(turns: Turns, capacity: int) -> None:
    history, _, log = _write(turns, capacity)
    kept = range(max(len(log) - capacity, 0) + 1, len(log) + 1)
    for entry in kept:
        later = [e for e in kept if e > entry and log[e - 1].request == log[entry - 1].request]
        assert history.following([entry]) == later[:1]
    found: dict[int, list[int]] = {}
    for entry in kept:
        found.setdefault(log[entry - 1].said[-1], []).append(entry)
    assert list(history.continuations(kept).items()) == list(found.items())


def test_requests_that_take_turns_keep_their_own_order() -> None:
    history, one, other = History(64), Stream(), Stream()
    for a, b in zip([1, 2, 3, 4], [9, 2, 3, 8], strict=True):
        history.extend(one, [a])
        history.extend(other, [b])
    asking = Stream()
    history.extend(asking, [1, 2, 3])
    matched, places = history.matches(asking, 8)
    assert matched == 3
    assert list(history.continuations(history.following(places))) == [4]


def test_long_match_is_found_among_many_later_pairs() -> None:
    history = History(1 << 10)
    passage = [*range(10, 20), 1, 2]
    history.extend(Stream(), [*passage, 3])
    history.extend(Stream(), [t for i in range(100) for t in (1, 2, 500 + i)])
    asking = Stream()
    history.extend(asking, passage)
    matched, places = history.matches(asking, 8)
    assert matched == 8
    assert list(history.continuations(history.following(places))) == [3]


def test_memory_is_bounded_over_many_requests() -> None:
    history = History(1 << 13)
    for start in range(400):
        history.extend(Stream(), range(start, start + 100))
        assert history.num_bytes == TOKEN_BYTES << 13
    tables = (history._tokens, history._before, history._after, *history._same, *history._heads)
    assert sum(table.itemsize * len(table) for table in tables) == history.num_bytes
    assert len(history) == history.capacity
    for start, known in ((395, True), (10, False)):
        asking = Stream()
        history.extend(asking, [start + 4, start + 5])
        assert bool(history.matches(asking, 8)[1]) is known


@exactly
@given(turns=turns, sizes=st.lists(st.sampled_from([1, 4, 8, 16, 64]), min_size=1, max_size=4))
def test_history_resized_finds_what_a_scan_finds(turns: Turns, sizes: list[int]) -> None:
    """What is kept after each move is what the smallest capacity since has kept."""
    history, streams = History(64), [Stream() for _ in range(3)]
    said: list[tuple[int, ...]] = [()] * 3
    log: list[Written] = []
    oldest, step = 0, -(-len(turns) // len(sizes))
    for number, capacity in enumerate(sizes):
        history.resize(capacity)
        oldest = max(oldest, len(log) - capacity)
        for request, tokens in turns[number * step : (number + 1) * step]:
            history.extend(streams[request], tokens)
            for token in tokens:
                said[request] += (token,)
                log.append(Written(request, said[request]))
        oldest = max(oldest, len(log) - capacity)
        assert (history.end, history.oldest, history.capacity) == (len(log), oldest, capacity)
    kept = range(oldest + 1, len(log) + 1)
    for entry in kept:
        later = [e for e in kept if e > entry and log[e - 1].request == log[entry - 1].request]
        assert history.following([entry]) == later[:1]
        assert [*history.continuations([entry])] == [log[entry - 1].said[-1]]
    history.resize(1 << 14)  # no two n-grams of this test in one chain
    for request, stream in enumerate(streams):
        expected = _scan_kept(log, request, oldest, bucket=lambda gram: gram)
        assert history.matches(stream, 12) == expected


def _scan_kept(
    log: Sequence[Written], request: int, oldest: int, bucket: Callable[..., Hashable]
) -> tuple[int, list[int]]:
    """As ``_scan``; n-grams that begin with a token that is gone are gone."""
    shown = [
        Written(w.request, w.said[-_own(log, e, oldest) :] if e > oldest else ())
        for e, w in enumerate(log, 1)
    ]
    own = [e for e in range(oldest + 1, len(log) + 1) if log[e - 1].request == request]
    if not own:
        return 0, []
    shown[own[-1] - 1] = log[own[-1] - 1]
    return _scan(shown, request, len(log) - oldest, 12, bucket)


def _own(log: Sequence[Written], entry: int, oldest: int) -> int:
    """Count the tokens of an entry's request from ``oldest`` to it."""
    return sum(log[e - 1].request == log[entry - 1].request for e in range(oldest + 1, entry + 1))


def test_history_cleared_knows_nothing_and_goes_on() -> None:
    history, stream = History(64), Stream()
    history.extend(stream, [1, 2, 3, 1, 2])
    history.clear(16)
    assert (len(history), history.capacity, history.matches(stream, 8)) == (0, 16, (0, []))
    assert not any(history._tokens)
    history.extend(stream, [3, 1, 2, 3, 1, 2])
    assert history.matches(stream, 8)[0] == 3


def test_a_request_longer_than_the_history_keeps_its_end() -> None:
    history, stream = History(16), Stream()
    history.extend(stream, [*range(100), *range(90, 95)])
    matched, places = history.matches(stream, 8)
    assert matched == 5
    assert list(history.continuations(history.following(places))) == [95]


def test_request_forgotten_while_it_waits_begins_again() -> None:
    history, waiting = History(8), Stream()
    history.extend(waiting, [1, 2, 3])
    history.extend(Stream(), range(20, 40))
    assert history.matches(waiting, 8) == (0, [])
    history.extend(waiting, [1, 2, 3, 1, 2])
    assert history.matches(waiting, 8)[0] == 2


@pytest.mark.parametrize("capacity", [0, 3, 1000])
def test_the_capacity_is_a_power_of_two(capacity: int) -> None:
    with pytest.raises(AssertionError):
        History(capacity)


class Counted(array):  # type: ignore[type-arg]
    """An array that counts what is read and written."""

    touched = 0

    def __getitem__(self, index: Any) -> Any:
        Counted.touched += 1
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        Counted.touched += 1
        super().__setitem__(index, value)


def _counted(length: int, period: int) -> tuple[int, int]:
    """Accesses for adding a token to a history of ``length``, and for a look-up in it."""
    history, stream = History(1 << 15), Stream()
    history.extend(stream, [i % period for i in range(length)])
    history._tokens = Counted("i", history._tokens)
    for name in ("_before", "_after"):
        setattr(history, name, Counted("q", getattr(history, name)))
    for name in ("_same", "_heads"):
        setattr(history, name, [Counted("q", table) for table in getattr(history, name)])
    Counted.touched = 0
    history.extend(stream, [length % period])
    added, Counted.touched = Counted.touched, 0
    history.matches(stream, 16)
    return added, Counted.touched


@pytest.mark.parametrize("period", [1, 7, 300])
def test_the_cost_does_not_depend_on_the_length_of_the_history(period: int) -> None:
    first = _counted(6_000, period)
    assert first[1] > 0
    assert first == _counted(30_000, period)
    assert first == _counted(100_000, period)  # three times the capacity
    assert first[0] <= 4 + 4 * len(ORDERS)
    assert first[1] <= len(ORDERS) * 16 * (2 + 2 * ORDERS[0])
