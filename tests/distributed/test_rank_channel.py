"""The channels between ranks, several of them in one process."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from specplug import FallbackWarning, RankError, UsageError
from specplug.distributed import rank_channel
from specplug.distributed.rank_channel import RankChannel

DEADLINE = 60.0


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def all_of(calls: Sequence[Callable[[], Any]]) -> list[Any]:
    """What the calls return, each in a thread of its own; an error is returned as well."""
    with ThreadPoolExecutor(len(calls)) as threads:
        futures: list[Future[Any]] = [threads.submit(call) for call in calls]
        return [future.exception(DEADLINE) or future.result() for future in futures]


def join(ranks: Sequence[int], size: int, address: str = "", **settings: Any) -> list[Any]:
    """Channels of these ranks, or the error of each."""
    where = address or free_address()
    how = {"timeout": 30.0, "join_timeout": 10.0, **settings}
    return all_of([lambda rank=rank: RankChannel(rank, size, where, {}, **how) for rank in ranks])


def close(channels: Sequence[RankChannel]) -> None:
    for channel in channels:
        channel.close()


def test_all_ranks_learn_the_rows_of_all() -> None:
    channels = join(range(4), 4)
    draw = random.Random(0)
    rows = [[draw.randrange(1, 100) for _ in channels] for _ in range(50)]
    told = all_of([lambda r=r: [channels[r].agree(step[r]) for step in rows] for r in range(4)])
    assert told == [[tuple(step) for step in rows]] * 4
    close(channels)


def test_who_comes_first_calls_the_others() -> None:
    channels = join(range(2), 2)
    assert not channels[1].called
    with ThreadPoolExecutor(1) as thread:
        first = thread.submit(channels[0].agree, 7)
        while not channels[1].called:
            channels[1].rest(0.01)
        assert not first.done()
        assert channels[1].agree(1) == (7, 1)
        assert first.result(DEADLINE) == (7, 1)
    assert not channels[1].called
    close(channels)


def test_notes_and_wishes_are_told_apart() -> None:
    channels = join(range(2), 2)
    for note, wish in ("", "a wish"), ("a note", ""), ("a note", "wish\nof two lines"):
        all_of(
            [
                lambda note=note, wish=wish: channels[0].agree(1, wish, note),
                lambda: channels[1].agree(2),
            ]
        )
        for channel in channels:
            assert channel.wishes == (wish, "")
            assert channel.notes == (note, "")
    close(channels)


def test_a_rest_ends() -> None:
    channels = join(range(2), 2)
    began = time.monotonic()
    for _ in range(10):
        channels[0].rest(0.01)
    assert time.monotonic() - began < DEADLINE
    close(channels)


def test_done_is_counted() -> None:
    channels = join(range(2), 2)
    for _ in range(3):
        channels[0].say_done()
        assert not channels[0].all_done
        channels[1].say_done()
        while not (channels[0].all_done and channels[1].all_done):
            channels[0].rest(0.01)
    close(channels)


def test_who_is_waited_for_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_channel, "_SLOW_STEP_SECONDS", 0.3)
    channels = join(range(2), 2, timeout=1.0)
    with ThreadPoolExecutor(1) as thread:

        def late() -> Any:
            time.sleep(1.5)  # what is shown is that a rank stays away; it lives meanwhile
            return channels[1].agree(2)

        other = thread.submit(late)
        with pytest.warns(
            FallbackWarning, match=r"rank 0 has waited .* for rank 1, which is alive"
        ):
            assert channels[0].agree(1) == (1, 2)
        assert other.result(DEADLINE) == (1, 2)
    close(channels)


def test_the_first_failure_counts() -> None:
    channels = join(range(3), 3)
    channels[2].fail(2, "failed: ValueError: first")
    for channel in channels:
        while channel.failure is None:
            time.sleep(0.005)
        channel.fail(1, "failed: second")
        with pytest.raises(RankError, match=r"^rank 2 failed: ValueError: first$"):
            channel.check()
        with pytest.raises(RankError, match=r"^rank 2 failed: ValueError: first$"):
            channel.agree(1)
    close(channels)


@pytest.mark.parametrize("ranks", [[0], [0, 1, 1]], ids=str)
def test_a_rank_that_does_not_come(ranks: Sequence[int]) -> None:
    for error in join(ranks, 3, join_timeout=1.0):
        assert isinstance(error, RankError)
        assert "start all ranks" in str(error)


def test_no_rank_0() -> None:
    (error,) = join([1], 2, join_timeout=1.0)
    assert isinstance(error, RankError)
    assert str(error).startswith("rank 1 found no rank 0 at 127.0.0.1:")


def test_a_port_in_use() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        (error,) = join([0], 2, address, join_timeout=1.0)
    assert isinstance(error, UsageError)
    assert "cannot listen there" in str(error)


def test_a_stranger_who_calls_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever reaches a rank's port and does not know the run's token is no rank."""
    listen = socket.create_server
    strangers = []

    def with_a_stranger(address: tuple[str, int], **how: Any) -> socket.socket:
        server = listen(address, **how)
        stranger = socket.create_connection(server.getsockname())
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: here\r\n" + b"x: y\r\n" * 20)
        silent = socket.create_connection(server.getsockname())
        strangers.extend((stranger, silent))
        return server

    address = free_address()
    monkeypatch.setattr(rank_channel.socket, "create_server", with_a_stranger)
    began = time.monotonic()
    channels = join(range(2), 2, address)
    assert time.monotonic() - began < 8.0, "a rank does not wait for one that says nothing"
    assert all_of([lambda: channels[0].agree(1), lambda: channels[1].agree(2)]) == [(1, 2)] * 2
    close(channels)
    assert len(strangers) == 4
    for stranger in strangers:
        stranger.close()


def test_a_rank_may_go_on_before_it_is_answered() -> None:
    token = b"t" * 32
    alive = rank_channel._HEADER.pack(rank_channel._Kind.ALIVE, 0, 0, 0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as caller:
            hello = rank_channel._HEADER.pack(rank_channel._Kind.HELLO, 1, 0, len(token))
            caller.sendall(hello + token + alive)
            (peer,) = rank_channel.accept_peers(server, token, 1, DEADLINE)
        with peer.connection:
            assert peer.rank == 1
            assert peer.connection.recv(65536) == alive, "this is for the listening thread"


def failure_of(channel: RankChannel) -> str:
    """What its listening thread fails with."""
    told = threading.Event()
    channel.on_failure(told.set)
    assert told.wait(DEADLINE)
    return str(channel.failure)


def test_on_failure_after_the_failure_is_called_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = join(range(2), 2)

    def fails(*_: Any) -> None:
        raise ValueError("any")

    monkeypatch.setattr(channels[0], "_take", fails)  # which ends its listening thread
    channels[1].say_done()
    channels[0]._listener.join(DEADLINE)
    calls = []
    channels[0].on_failure(lambda: calls.append(1))
    assert calls == [1]
    close(channels)


@pytest.mark.parametrize(("kind", "length"), [(99, 0), (rank_channel._Kind.ALIVE, 1 << 31)])
def test_a_malformed_message_fails_all(kind: int, length: int) -> None:
    channels = join(range(3), 3)
    channels[1]._peers[0].send(rank_channel._HEADER.pack(kind, 0, 0, length))
    why = f"rank 1 sent a malformed message (kind {kind:d}, {length} bytes)"
    assert [failure_of(channel) for channel in channels] == [why] * 3
    close(channels)


def test_a_listening_thread_does_not_end_without_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    channels = join(range(2), 2)

    def fails(*_: Any) -> None:
        raise ValueError("any")

    monkeypatch.setattr(channels[0], "_take", fails)
    channels[1].say_done()
    why = "rank 0 failed: ValueError where it listens to the others: any"
    assert [failure_of(channel) for channel in channels] == [why] * 2
    close(channels)


def test_a_long_reason_is_cut() -> None:
    channels = join(range(2), 2)
    channels[0].fail(0, "failed: " + "é" * 100_000)
    assert failure_of(channels[1]).startswith("rank 0 failed: éé")
    close(channels)
