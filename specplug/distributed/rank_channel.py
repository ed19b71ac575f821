"""The channel between a run's rank processes: which steps they enter, and which has failed."""

from __future__ import annotations

import enum
import json
import secrets
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import attrs

from specplug.errors import RankError, UsageError, shown, warn_fallback

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

_HEADER = struct.Struct("!BqqI")
"""A message: its kind, two numbers, and how many bytes of text follow."""

_LONGEST_TEXT = 1 << 16
"""Bytes of text. A message that announces more is malformed."""

_JOIN_SECONDS = 120.0
_SLOW_STEP_SECONDS = 30.0


class _Kind(enum.IntEnum):
    """The kinds of messages, with their two numbers and their text.

    HELLO: (rank, 0) and the token of the run, the first message of a connection.
    ALIVE: the sender is alive.
    STEP: (number, rows), a note, a line's end and a wish: the sender enters this step with so many
        rows.
    DONE: (count, 0) the sender has nothing left to do, for the count-th time.
    CLOSED: the sender leaves.
    FAILED: (rank, 0) and the reason why that rank failed; no rank can go on.
    """

    HELLO = 0
    ALIVE = 1
    STEP = 2
    DONE = 3
    CLOSED = 4
    FAILED = 5


_KINDS = frozenset(_Kind)


@attrs.define(eq=False)
class _Peer:
    """Another rank, and what it has said.

    Attributes:
        steps: rows, and the note and wish as they came, by the number of each step that it has
            entered and this rank has not.
        done: how often it had nothing left to do.
        closed: whether it has left.
        heard: when it was last heard of.
    """

    rank: int
    connection: socket.socket
    steps: dict[int, tuple[int, str]] = attrs.field(factory=dict)
    done: int = 0
    closed: bool = False
    heard: float = attrs.field(factory=time.monotonic)
    unread: bytearray = attrs.field(factory=bytearray)
    sending: threading.Lock = attrs.field(factory=threading.Lock)

    def send(self, message: bytes) -> None:
        """Send a message. A broken connection is left to the listening thread to find."""
        with suppress(OSError), self.sending:
            self.connection.sendall(message)


class RankChannel:
    """TCP connections to every other rank, and a thread that listens to all of them.

    The thread tells the others that this process is alive, and notices when one of them is not. A
    process that was killed closes its connections; one that is stopped or cut off falls silent.
    All ranks are equal, but rank 0 has the store in which the others find each other.

    ``torch.distributed`` cannot carry this. A waiting collective (``monitored_barrier``) cannot be
    cancelled, and its time limit would limit a living rank's work between two steps; a wait on its
    store goes on to its limit, too, when the process that it waits for is killed.

    Args:
        rank, size: of this process, and how many there are.
        address: host:port at which rank 0 listens.
        facts: what must be the same in all ranks, by name.
        timeout: seconds of silence after which a rank is taken for dead.
        join_timeout: seconds for all ranks to come.

    Attributes:
        wishes, notes: of each rank in the step that was entered last.

    Raises:
        UsageError: the address cannot be used, or the ranks differ in their facts.
        RankError: not all ranks came in time.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        address: str,
        facts: Mapping[str, Any],
        *,
        timeout: float,
        join_timeout: float = _JOIN_SECONDS,
    ) -> None:
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self.failure: RankError | None = None
        self.wishes: tuple[str, ...] = ("",) * size
        self.notes: tuple[str, ...] = ("",) * size
        self._changed = threading.Condition()
        self._number = 0
        self._done = 0
        self._closing = False
        self._on_failure: Callable[[], None] | None = None
        self.store = _open_store(rank, size, address, join_timeout)
        self._compare(facts)
        self._peers = {
            peer.rank: peer for peer in _connect_peers(self.store, rank, size, join_timeout)
        }
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._listener = threading.Thread(target=self._listen, name="rank channel", daemon=True)
        self._listener.start()

    # What the stepping thread calls

    @property
    def called(self) -> bool:
        """Whether another rank has entered the next step and waits for this one."""
        return any(self._number + 1 in peer.steps for peer in self._peers.values())

    def agree(self, rows: int, wish: str = "", note: str = "") -> tuple[int, ...]:
        """Enter the next step and wait until all ranks have.

        Args:
            rows: of this rank's pass.
            wish: how it is to be run, for the other ranks; ``wishes`` then has those of all.
            note: one line that has nothing to do with the pass; ``notes`` then has those of all.

        Returns:
            The rows of each rank.

        Raises:
            RankError: one of the others cannot enter it any more.
        """
        self.check()
        self._number += 1
        text = f"{note}\n{wish}"
        self._tell(_Kind.STEP, self._number, rows, text)
        peers, began, warned = self._peers.values(), time.monotonic(), False
        with self._changed:
            while missing := [peer for peer in peers if self._number not in peer.steps]:
                self.check()
                self._check_closed(missing)
                if not warned and time.monotonic() - began > _SLOW_STEP_SECONDS:
                    warned = True
                    _warn_of_waiting(self.rank, missing[0].rank)
                self._changed.wait(self.timeout)
            told = {peer.rank: peer.steps.pop(self._number) for peer in peers}
        told[self.rank] = rows, text
        texts = (told[rank][1].partition("\n") for rank in range(self.size))
        self.notes, _, self.wishes = zip(*texts, strict=True)
        return tuple(told[rank][0] for rank in range(self.size))

    def rest(self, seconds: float) -> None:
        """Wait until another rank enters the next step, at most ``seconds``.

        Raises:
            RankError: a rank has failed.
        """
        with self._changed:
            self._changed.wait_for(lambda: self.called or self.failure, seconds)
        self.check()

    def say_done(self) -> None:
        """Tell the others that this rank has nothing left to do."""
        self._done += 1
        self._tell(_Kind.DONE, self._done)

    @property
    def all_done(self) -> bool:
        """Whether every rank has said so as often as this one, or has left."""
        return all(peer.done >= self._done or peer.closed for peer in self._peers.values())

    def check(self) -> None:
        """Raise if a rank has failed.

        Raises:
            RankError: which rank failed, and how.
        """
        if self.failure is not None:
            raise RankError(str(self.failure))

    def fail(self, rank: int, what: str) -> None:
        """Record that a rank failed and tell the others. Only the first failure counts."""
        with self._changed:
            if self.failure is not None or self._closing:
                return
            self.failure = RankError(f"rank {rank} {what}")
            self._tell(_Kind.FAILED, rank, 0, what)
            self._changed.notify_all()

    def on_failure(self, call: Callable[[], None]) -> None:
        """Call ``call`` once a rank has failed: in the listening thread, or here if one has."""
        with self._changed:
            self._on_failure = call
        self._call_on_failure()

    def wait_for_failure(self) -> None:
        """Wait until it is known which rank failed, at most as long as a silent rank takes."""
        with self._changed:
            self._changed.wait_for(lambda: self.failure, self.timeout + 2.0)

    def close(self) -> None:
        """Tell the others that this rank leaves."""
        if self._closing:
            return
        self._tell(_Kind.CLOSED)
        self._closing = True
        for peer in self._peers.values():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_RDWR)  # which wakes the listener
        self._listener.join()
        del self.store  # which ends at rank 0 when its process group has ended

    def _tell(self, kind: _Kind, first: int = 0, second: int = 0, text: str = "") -> None:
        encoded = text.encode(errors="replace")[:_LONGEST_TEXT]
        message = _HEADER.pack(kind, first, second, len(encoded)) + encoded
        for peer in self._peers.values():
            peer.send(message)

    def _check_closed(self, missing: Sequence[_Peer]) -> None:
        for peer in missing:
            if peer.closed:
                raise RankError(
                    f"rank {peer.rank} has closed, and rank {self.rank} has work: every rank must "
                    "go on calling step() until all have none, as wait_for_ranks() does"
                )

    def _compare(self, facts: Mapping[str, Any]) -> None:
        """Refuse ranks that were started with different settings."""
        ours = json.dumps(dict(facts), default=str)
        self.store.set(f"facts/{self.rank}", ours)
        all_facts = [_read(self.store, f"facts/{rank}", rank) for rank in range(self.size)]
        self.store.set(f"compared/{self.rank}", "")
        if self.rank == 0:  # its store must stay until all have read
            for rank in range(self.size):
                _read(self.store, f"compared/{rank}", rank)
        own = json.loads(ours)
        for rank, theirs in enumerate(map(json.loads, all_facts)):
            for name in own:
                if theirs.get(name) != own[name]:
                    raise UsageError(
                        f"{name}: {own[name]!r} in rank {self.rank}, {theirs.get(name)!r} in rank "
                        f"{rank}; expected the same in all ranks"
                    )

    # The listening thread

    def _listen(self) -> None:
        try:
            self._hear_all()
        except Exception as error:  # the rank would hear nothing any more
            what = f"failed: {type(error).__name__} where it listens to the others: {error}"
            self.fail(self.rank, what)
            self._call_on_failure()
        self._selector.close()
        for peer in self._peers.values():
            peer.connection.close()

    def _hear_all(self) -> None:
        tick = min(1.0, self.timeout / 4)
        told = time.monotonic()
        while not self._closing and self._selector.get_map():
            for key, _ in self._selector.select(tick):
                self._hear(key.data)
            now = time.monotonic()
            if now - told >= tick:
                self._tell(_Kind.ALIVE)
                self._check_silence(now, was_away=now - told > 3 * tick)
                told = now
            self._call_on_failure()

    def _call_on_failure(self) -> None:
        with self._changed:
            if self.failure is None or self._on_failure is None:
                return
            call, self._on_failure = self._on_failure, None
        call()

    def _check_silence(self, now: float, *, was_away: bool) -> None:
        for peer in self._peers.values():
            if was_away:  # this process was stopped itself: the others have yet to be heard
                peer.heard = now
            if not peer.closed and now - peer.heard > self.timeout:
                silent = f"was not heard of for {self.timeout:g} s: it hangs, or is cut off"
                self.fail(peer.rank, silent)

    def _hear(self, peer: _Peer) -> None:
        """Read what a peer has sent."""
        data = _received(peer.connection, 65536)
        if not data:
            self._selector.unregister(peer.connection)
            if not peer.closed:
                self.fail(peer.rank, "died: its process has ended without a word")
            return
        with self._changed:
            peer.heard = time.monotonic()
            peer.unread += data
            self._read(peer)
            self._changed.notify_all()

    def _read(self, peer: _Peer) -> None:
        """Process the messages that have arrived completely."""
        while len(peer.unread) >= _HEADER.size:
            kind, first, second, length = _HEADER.unpack_from(peer.unread)
            if kind not in _KINDS or length > _LONGEST_TEXT:
                self._selector.unregister(peer.connection)
                self.fail(peer.rank, f"sent a malformed message (kind {kind}, {length} bytes)")
                return
            end = _HEADER.size + length
            if len(peer.unread) < end:
                return
            text = peer.unread[_HEADER.size : end].decode(errors="replace")
            del peer.unread[:end]
            self._take(peer, _Kind(kind), first, second, text)

    def _take(self, peer: _Peer, kind: _Kind, first: int, second: int, text: str) -> None:
        """Record what a message says."""
        if kind is _Kind.STEP:
            peer.steps[first] = second, text
        elif kind is _Kind.DONE:
            peer.done = first
        elif kind is _Kind.CLOSED:
            peer.closed = True
        elif kind is _Kind.FAILED:
            peer.closed = True  # what follows is its end
            self.fail(first, text)


def _warn_of_waiting(rank: int, other: int) -> None:
    warn_fallback(
        f"rank {rank} has waited {_SLOW_STEP_SECONDS:g} s for rank {other}, which is alive: every "
        "rank must go on calling step(), or wait_for_ranks(), while another has work"
    )


def _open_store(rank: int, size: int, address: str, join_timeout: float) -> TCPStore:
    """Open the store of rank 0, where the ranks find each other."""
    from datetime import timedelta

    from torch.distributed import DistError, TCPStore  # type: ignore[attr-defined]

    host, _, port = address.rpartition(":")
    wait = timedelta(seconds=join_timeout)
    try:
        return TCPStore(host, int(port), size, rank == 0, wait, wait_for_workers=False)
    except (DistError, RuntimeError) as error:
        if rank == 0:
            raise UsageError(
                f"dp_address={shown(address)}: rank 0 cannot listen there: choose another"
            ) from error
        raise RankError(
            f"rank {rank} found no rank 0 at {address} for {join_timeout:g} s: start all ranks, "
            "with the same dp_address"
        ) from error


def _read(store: TCPStore, key: str, rank: int) -> str:
    """Wait for what a rank has left in the store."""
    from torch.distributed import DistError

    try:
        value: bytes = store.get(key)
    except (DistError, RuntimeError) as error:
        raise RankError(
            f"rank {rank} did not come in time: start all ranks, each with a dp_rank of its own"
        ) from error
    return value.decode()


def _connect_peers(store: TCPStore, rank: int, size: int, join_timeout: float) -> list[_Peer]:
    """Connect to every other rank. Each rank calls those before it."""
    if rank == 0:
        store.set("token", secrets.token_hex(16))
    token = _read(store, "token", 0).encode()
    with socket.create_connection((store.host, store.port), join_timeout) as probe:
        here = probe.getsockname()[0]  # the address by which this machine is reached
    with socket.create_server((here, 0), family=_family(here), backlog=size) as server:
        store.set(f"address/{rank}", f"{server.getsockname()[1]} {here}")
        peers = []
        for other in range(rank):
            port, where = _read(store, f"address/{other}", other).split()
            connection = _connect(where, int(port), other)
            connection.sendall(_HEADER.pack(_Kind.HELLO, rank, 0, len(token)) + token)
            peers.append(_Peer(other, connection))
        peers += accept_peers(server, token, size - 1 - rank, join_timeout)
    for peer in peers:
        peer.connection.settimeout(None)
        peer.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peers


def _connect(host: str, port: int, rank: int) -> socket.socket:
    try:
        return socket.create_connection((host, port), 30.0)
    except OSError as error:
        raise RankError(f"rank {rank} does not answer at {host}:{port}: {error}") from error


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def accept_peers(
    server: socket.socket, token: bytes, count: int, join_timeout: float
) -> list[_Peer]:
    """Accept ``count`` ranks. Strangers may connect too, and delay none of them.

    No more than a HELLO is read from a connection: what follows is for the listening thread.
    """
    peers: list[_Peer] = []
    size, ends = _HEADER.size + len(token), time.monotonic() + join_timeout
    server.setblocking(False)
    with selectors.DefaultSelector() as selector:
        selector.register(server, selectors.EVENT_READ)
        try:
            while len(peers) < count:
                left = ends - time.monotonic()
                if left <= 0:
                    raise RankError("not all ranks came in time: start all ranks")
                for key, _ in selector.select(left):
                    connection, hello = cast(socket.socket, key.fileobj), key.data
                    if connection is server:
                        with suppress(OSError):  # it has hung up
                            accepted, _ = server.accept()
                            selector.register(accepted, selectors.EVENT_READ, bytearray())
                        continue
                    data = _received(connection, size - len(hello))
                    hello += data
                    if data and len(hello) < size:
                        continue
                    selector.unregister(connection)
                    if hello[_HEADER.size :] == token:
                        peers.append(_Peer(_HEADER.unpack_from(hello)[1], connection))
                    else:
                        connection.close()
        finally:
            for key in list(selector.get_map().values()):
                if key.fileobj is not server:
                    cast(socket.socket, key.fileobj).close()
    return peers


def _received(connection: socket.socket, most: int) -> bytes:
    """Return what a connection has brought, at most so many bytes; nothing: it has ended."""
    try:
        return connection.recv(most)
    except OSError:
        return b""
