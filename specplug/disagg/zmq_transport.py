"""``Transport`` over ZeroMQ.

Decode instances bind a ROUTER, and each prefill instance connects a DEALER to it. Messages are
multipart, over TCP; nothing is pickled.

libzmq holds a message until all of its frames are there, before any code here sees it. So only the
connection can be refused, by ZMTP's mechanism PLAIN, before the first message. Both sides always
take that mechanism, an empty key for none: where mechanisms differ, the connection may end before
the side that connects has read why.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import queue
import time
import uuid
from collections import deque
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

import attrs
import zmq
from zmq.utils.monitor import recv_monitor_message

from specplug.disagg.backoff import Backoff
from specplug.disagg.transport import Arrived, Broken, Event, Found, Lost, Refused
from specplug.disagg.wire_message import (
    MOST_FRAME_BYTES,
    WireError,
    WireMessage,
    decode,
    encode,
)
from specplug.errors import InstanceError, UsageError, shown

_log = logging.getLogger(__name__)

_BEAT = b"beat"
_LINGER = 500
_OVER = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
"""Events of a monitor: a connection has ended, or could not be made."""

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH
"""Event of a monitor: the peer expects another key."""

_WHY = "the key differs, or only one of the two has one"
_KEY_FIX = "start both sides with the same disaggregation_key (--disaggregation-key @FILE)"
_NAME = b"specplug"
"""Name of the user and of the domain; the mechanism needs one of each."""

ROUTER_SIDE = "decode instance"
"""The name that a connected side has for its only peer."""


@attrs.frozen
class Pulse:
    """Signs of life, by which a peer's end is noticed where the connection does not tell.

    Attributes:
        interval: seconds between two of them.
        silence: seconds without one after which a peer is lost.
    """

    interval: float = 0.5
    silence: float = 5.0


class ZmqTransport:
    """A socket with a thread of its own, so that signs of life go out while a step runs.

    Made by ``bind`` or ``connect``.

    Args:
        socket: ROUTER or DEALER, not yet bound or connected.
        pulse: intervals of the signs of life.
        key: that a peer of a ROUTER must have; its context must be this transport's alone, to be
            ended with it. None: it needs none, or this is a DEALER.
    """

    def __init__(self, socket: zmq.Socket[bytes], pulse: Pulse, key: bytes | None = None) -> None:
        self._socket = socket
        self._is_router = socket.socket_type == zmq.ROUTER
        self._pulse = pulse
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._outgoing: deque[tuple[str, int, list[bytes | memoryview]]] = deque()
        self._losses = self._losses_told = 0  # of the one peer of a side that connects
        self._heard: dict[str, float] = {}
        self._closing = False
        self._failure: Exception | None = None
        self._backoff = Backoff()
        self._next_try: float | None = None
        self._found_at = 0.0
        self._monitor: Any = None
        if not self._is_router:
            self._monitor = socket.get_monitor_socket(_OVER | _REFUSED)
        self._key = key
        self._has_refused = False
        self._gate: zmq.Socket[bytes] | None = None
        if self._is_router:
            self._gate = socket.context.socket(zmq.REP)
            self._gate.setsockopt(zmq.LINGER, 0)
            self._gate.bind("inproc://zeromq.zap.01")
        self._bell, self._ear = _pair(socket.context)
        self._bell_lock = Lock()  # a socket is one thread's at a time, its end too
        self._thread = Thread(target=self._run, name="transport", daemon=True)
        self.address = ""

    @classmethod
    def bind(cls, address: str, pulse: Pulse = Pulse(), *, key: str | None = None) -> ZmqTransport:
        """Wait for peers at ``address``, such as ``tcp://127.0.0.1:9000``; port ``*`` is any.

        Args:
            key: that a peer must have. It is refused without it before its first message. None: any
                peer may connect, and send a message without end.

        Raises:
            UsageError: it cannot be bound.
        """
        # A context asks one gate about all of its connections.
        socket = _socket(zmq.Context(), zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)  # a send to a lost peer fails
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a peer that returns gets its old name
        socket.setsockopt(zmq.PLAIN_SERVER, 1)
        socket.setsockopt(zmq.ZAP_DOMAIN, _NAME)
        transport = cls(socket, pulse, _digest(key))
        transport._start(socket.bind, address)
        transport.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        transport._thread.start()
        return transport

    @classmethod
    def connect(
        cls, address: str, pulse: Pulse = Pulse(), *, key: str | None = None
    ) -> ZmqTransport:
        """Connect to the peer bound at ``address``, which need not be there yet.

        It may go and come back: it is tried again after growing delays, until a connection lasts.

        Args:
            key: that the peer expects. ``receive`` returns ``Refused`` if it expects another, or
                none.

        Raises:
            UsageError: the address cannot be one.
        """
        socket = _socket(zmq.Context.instance(), zmq.DEALER)
        socket.setsockopt(zmq.PLAIN_USERNAME, _NAME)
        socket.setsockopt(zmq.PLAIN_PASSWORD, _digest(key))
        socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().hex.encode())
        socket.setsockopt(zmq.IMMEDIATE, 1)  # what cannot go out now is not kept for later
        # zmq's own delays begin anew whenever a connection is accepted, however soon it is dropped.
        socket.setsockopt(zmq.RECONNECT_IVL, -1)
        transport = cls(socket, pulse)
        transport._start(socket.connect, address)
        transport.address = address
        transport._thread.start()
        return transport

    def send(self, peer: str, message: WireMessage) -> None:
        """Send a message, without waiting.

        A message sent before ``receive`` has returned the loss of a connection is dropped. So a new
        connection never begins in the middle of what the lost one carried.

        Raises:
            TypeError, ValueError: the message has a value that JSON cannot express.
        """
        self._outgoing.append((peer, self._losses_told, encode(message)))
        self._ring()

    def receive(self, timeout: float) -> list[Event]:
        """Return the events since the last call; wait up to ``timeout`` seconds if there are none.

        Raises:
            InstanceError: the thread has failed, which should not happen.
        """
        if self._failure is not None:
            raise InstanceError(f"the transport at {self.address} has failed: {self._failure!r}")
        events: list[Event] = []
        with suppress(queue.Empty):
            events.append(self._events.get(block=timeout > 0, timeout=timeout))
            while True:
                events.append(self._events.get_nowait())
        if not self._is_router:
            self._losses_told += sum(isinstance(event, Lost) for event in events)
        return events

    def close(self) -> None:
        """Send what is queued, for at most a moment, and disconnect."""
        if not self._closing:
            self._closing = True
            self._ring()
            self._thread.join()

    def _start(self, way: Any, address: str) -> None:
        try:
            way(address)
        except zmq.ZMQError as error:
            self._hang_up()
            raise UsageError(
                f"disaggregation_address={shown(address)}: {error.strerror}; expected "
                "tcp://HOST:PORT, free to be bound by a decode instance"
            ) from error

    def _ring(self) -> None:
        with self._bell_lock, suppress(zmq.ZMQError):  # it rings already, or the thread has ended
            self._bell.send(b"", zmq.NOBLOCK)

    def _run(self) -> None:
        poller = zmq.Poller()
        for source in filter(None, (self._socket, self._ear, self._monitor, self._gate)):
            poller.register(source, zmq.POLLIN)
        next_beat = time.monotonic()
        try:
            while not self._closing:
                now = time.monotonic()
                if now >= next_beat:
                    if now - next_beat > self._pulse.silence / 2:  # it was this one that was away
                        self._heard = dict.fromkeys(self._heard, now)
                    next_beat = now + self._pulse.interval
                    self._beat(now)
                due = min(filter(None, (next_beat, self._next_try)))
                ready = dict(poller.poll(max(1, int(1000 * (due - now)))))
                if self._ear in ready:
                    self._ear.recv()
                self._send_all()
                if self._monitor in ready:
                    self._tell_refusal(recv_monitor_message(self._monitor))
                    self._lose(ROUTER_SIDE)
                    self._plan_next_try()
                if self._next_try is not None and time.monotonic() >= self._next_try:
                    self._connect_again()
                if self._gate is not None and self._gate in ready:
                    self._check_key(self._gate)
                if self._socket in ready:
                    self._receive_all()
            self._send_all()
        except Exception as error:  # ``receive`` raises it
            self._failure = error
        finally:
            self._hang_up()

    def _tell_refusal(self, event: Any) -> None:
        """Queue ``Refused`` if the peer expects another key, or none."""
        if event["event"] == _REFUSED:
            self._events.put(Refused(ROUTER_SIDE, f"{_WHY}; expected the same: {_KEY_FIX}"))

    def _check_key(self, gate: zmq.Socket[bytes]) -> None:
        """Answer libzmq whether a peer may connect (ZAP: https://rfc.zeromq.org/spec/27)."""
        version, number, _, address, _, mechanism, *told = gate.recv_multipart()
        assert self._key is not None
        is_known = (
            mechanism == b"PLAIN" and len(told) == 2 and hmac.compare_digest(told[1], self._key)
        )
        verdict = (b"200", b"OK") if is_known else (b"400", b"the key differs")
        gate.send_multipart([version, number, *verdict, b"", b""])
        if not is_known and not self._has_refused:  # said once, since anybody may try
            self._has_refused = True
            _log.warning(
                "%s: a peer at %s was refused: %s; expected the same: %s",
                self.address,
                address.decode(errors="replace"),
                _WHY,
                _KEY_FIX,
            )

    def _plan_next_try(self) -> None:
        """Set when to connect again: soon after a connection that has lasted, else ever later."""
        if self._next_try is not None:
            return
        now = time.monotonic()
        if self._found_at and now - self._found_at > self._backoff.greatest:
            self._backoff.reset()
        self._found_at = 0.0
        self._next_try = now + self._backoff.next()

    def _connect_again(self) -> None:
        self._next_try = None
        with suppress(zmq.ZMQError):  # there may be nothing left of it
            self._socket.disconnect(self.address)
        try:
            self._socket.connect(self.address)
        except zmq.ZMQError:
            self._plan_next_try()

    def _hang_up(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor = None
        with self._bell_lock:
            self._bell.close()
        for socket in filter(None, (self._socket, self._ear, self._gate)):
            socket.close()
        if self._gate is not None:
            self._socket.context.term()

    def _beat(self, now: float) -> None:
        """Send a sign of life to all peers, and lose those that have sent none for too long."""
        for peer, heard in list(self._heard.items()):
            if now - heard > self._pulse.silence:
                self._lose(peer)
            elif self._is_router:
                self._post(peer, [_BEAT])
        if not self._is_router:
            self._post(ROUTER_SIDE, [_BEAT])

    def _send_all(self) -> None:
        while self._outgoing:
            peer, losses_told, frames = self._outgoing.popleft()
            if losses_told == self._losses:
                self._post(peer, frames)

    def _post(self, peer: str, frames: list[Any]) -> None:
        if self._is_router:
            frames = [bytes.fromhex(peer), *frames]
        try:
            # Large frames are not copied: zmq holds the memory of their tensors until they are out.
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:  # a connection that is not there yet, full of beats
            pass
        except zmq.ZMQError:  # EHOSTUNREACH
            self._lose(peer)

    def _receive_all(self) -> None:
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            peer = parts.pop(0).bytes.hex() if self._is_router else ROUTER_SIDE
            if peer not in self._heard:
                self._found_at = time.monotonic()
                self._events.put(Found(peer))
            self._heard[peer] = time.monotonic()
            frames = [part.buffer for part in parts]
            if len(frames) == 1 and bytes(frames[0]) == _BEAT:
                continue
            try:
                self._events.put(Arrived(peer, decode(frames)))
            except WireError as error:
                self._events.put(Broken(peer, error))
            except Exception as error:  # no message may end the instance
                self._events.put(Broken(peer, WireError(f"it cannot be read: {error!r}")))

    def _lose(self, peer: str) -> None:
        if self._heard.pop(peer, None) is not None:
            self._losses += not self._is_router
            self._events.put(Lost(peer))


def _socket(context: zmq.Context[zmq.Socket[bytes]], kind: int) -> zmq.Socket[bytes]:
    socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, _LINGER)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.MAXMSGSIZE, MOST_FRAME_BYTES)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    return socket


def _digest(key: str | None) -> bytes:
    """Return what stands for a key of any length on the wire, where it may have 255 bytes. None is
    an empty key."""
    return hashlib.sha256((key or "").encode(errors="surrogatepass")).hexdigest().encode()


def _pair(context: zmq.Context[Any]) -> tuple[zmq.Socket[bytes], zmq.Socket[bytes]]:
    """Return two connected sockets: a send on the first wakes a poll of the second."""
    name = f"inproc://{uuid.uuid4().hex}"
    ear, bell = context.socket(zmq.PULL), context.socket(zmq.PUSH)
    for socket in (ear, bell):
        socket.setsockopt(zmq.LINGER, 0)
    ear.bind(name)
    bell.connect(name)
    return bell, ear
