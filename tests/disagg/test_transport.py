"""Real sockets: peers are found and lost, messages come whole and in order."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from child_instances import DEADLINE, Instance, bind_and_measure, connect_and_beat
from raw_peer import NO_KEY, present
from tcp_proxy import Proxy
from zmq.utils.monitor import recv_monitor_message

from specplug import UsageError
from specplug.disagg.transport import Arrived, Broken, Event, Found, Lost, Refused
from specplug.disagg.wire_message import MAGIC, MOST_FRAME_BYTES, WireMessage
from specplug.disagg.zmq_transport import ROUTER_SIDE, Pulse, ZmqTransport

PULSE = Pulse(interval=0.05, silence=1.0)


class Listener:
    """A transport, and all that has happened there."""

    def __init__(self, transport: ZmqTransport) -> None:
        self.transport = transport
        self.events: list[Event] = []

    def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        """The events of a kind, when there are so many."""
        deadline = time.monotonic() + DEADLINE
        while True:
            found = [event for event in self.events if isinstance(event, kind)]
            if len(found) >= count:
                return found
            assert time.monotonic() < deadline, self.events
            self.events += self.transport.receive(0.1)

    def messages(self, count: int) -> list[WireMessage]:
        """The first messages."""
        return [event.message for event in self.wait_for(Arrived, count)]


Ends = tuple[Listener, Listener, Proxy]


@pytest.fixture
def ends() -> Iterator[Ends]:
    """A bound transport, and one that is connected to it through a proxy."""
    with ExitStack() as stack:
        bound = ZmqTransport.bind("tcp://127.0.0.1:*", PULSE)
        stack.callback(bound.close)
        proxy = stack.enter_context(Proxy(int(bound.address.rpartition(":")[2])))
        connected = ZmqTransport.connect(proxy.address, PULSE)
        stack.callback(connected.close)
        yield Listener(bound), Listener(connected), proxy


def test_both_sides_find_each_other(ends: Ends) -> None:
    bound, connected, _ = ends
    (found,) = bound.wait_for(Found)
    bound.transport.send(found.peer, WireMessage("who"))
    assert connected.wait_for(Found) == [Found(ROUTER_SIDE)]
    assert connected.messages(1)[0].kind == "who"


def test_messages_arrive_in_order_from_many_threads(ends: Ends) -> None:
    bound, connected, _ = ends
    bound.wait_for(Found)

    def send(thread: int) -> None:
        for number in range(200):
            tensors = {"x": torch.full((number % 7,), number)}
            connected.transport.send(
                ROUTER_SIDE, WireMessage("part", {"n": [thread, number]}, tensors)
            )

    threads = [threading.Thread(target=send, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    arrived = bound.messages(600)
    for i in range(3):
        own = [m for m in arrived if m.fields["n"][0] == i]
        assert [m.fields["n"][1] for m in own] == list(range(200))
    for message in arrived:
        number = message.fields["n"][1]
        assert message.tensors["x"].tolist() == [number] * (number % 7)


class SlowBell:
    """A bell that rings for a moment, and notes whether it was closed meanwhile."""

    def __init__(self, bell: Any) -> None:
        self.bell = bell
        self.rings = threading.Event()
        self.was_closed_in_use = False

    def send(self, *args: Any) -> None:
        self.rings.set()
        time.sleep(0.2)
        if not self.bell.closed:
            self.bell.send(*args)
        self.rings.clear()

    def close(self) -> None:
        self.was_closed_in_use = self.rings.is_set()
        self.bell.close()


def test_close_waits_for_a_thread_that_rings(ends: Ends) -> None:
    """A socket that one thread closes while another one sends ends the process."""
    transport: Any = ends[1].transport
    transport._bell = bell = SlowBell(transport._bell)
    sender = threading.Thread(target=transport.send, args=(ROUTER_SIDE, WireMessage("part")))
    sender.start()
    assert bell.rings.wait(DEADLINE)
    transport._closing = True  # as ``close`` does, before it rings
    sender.join()
    transport._thread.join()
    assert not bell.was_closed_in_use


def test_large_tensors_arrive() -> None:
    patient = Pulse(interval=0.05, silence=DEADLINE)  # a busy machine takes a second for them
    with (
        closing(ZmqTransport.bind("tcp://127.0.0.1:*", patient)) as bound,
        closing(ZmqTransport.connect(bound.address, patient)) as connected,
    ):
        listener = Listener(bound)
        listener.wait_for(Found)
        sent = torch.arange(6 << 20)
        connected.send(ROUTER_SIDE, WireMessage("part", {}, {"x": sent, "y": sent[5:9]}))
        (arrived,) = listener.messages(1)
    assert torch.equal(arrived.tensors["x"], sent)
    assert arrived.tensors["y"].tolist() == [5, 6, 7, 8]


def test_silence_is_noticed_on_both_sides_and_its_end_too(ends: Ends) -> None:
    bound, connected, proxy = ends
    (found,) = bound.wait_for(Found)
    connected.wait_for(Found)
    proxy.hold()
    assert bound.wait_for(Lost) == [Lost(found.peer)]
    assert connected.wait_for(Lost)[0] == Lost(ROUTER_SIDE)
    proxy.cut()
    assert bound.wait_for(Found, 2) == [found] * 2
    connected.wait_for(Found, 2)


def test_a_cut_is_noticed_at_once_where_one_connects(ends: Ends) -> None:
    """And by its next sign of life where one is bound; long before the silence would tell."""
    bound, connected, proxy = ends
    bound.wait_for(Found)
    connected.wait_for(Found)
    proxy.cut()
    assert connected.wait_for(Lost) == [Lost(ROUTER_SIDE)]
    connected.wait_for(Found, 2)
    connected.transport.send(ROUTER_SIDE, WireMessage("register"))
    assert bound.messages(1)[0].kind == "register"


def test_what_was_sent_before_a_loss_was_told_goes_nowhere(ends: Ends) -> None:
    """A new connection begins with what follows the loss, not in the midst of what it cut off."""
    bound, connected, proxy = ends
    bound.wait_for(Found)
    connected.wait_for(Found)
    proxy.cut()
    bound.wait_for(Found, 2)  # they are connected again
    connected.transport.send(ROUTER_SIDE, WireMessage("part"))
    connected.wait_for(Lost)
    connected.transport.send(ROUTER_SIDE, WireMessage("register"))
    assert bound.messages(1)[0].kind == "register"


def test_of_a_message_that_is_cut_nothing_arrives(ends: Ends) -> None:
    bound, connected, proxy = ends
    bound.wait_for(Found)
    connected.wait_for(Found)
    proxy.hold(after=1 << 20)
    tensor = torch.ones(1 << 20)  # 4 MiB
    connected.transport.send(ROUTER_SIDE, WireMessage("part", {"n": 0}, {"x": tensor}))
    proxy.wait_until_held(DEADLINE)
    proxy.cut()
    connected.wait_for(Lost)
    connected.wait_for(Found, 2)
    connected.transport.send(ROUTER_SIDE, WireMessage("part", {"n": 1}, {"x": tensor}))
    assert [m.fields["n"] for m in bound.messages(1)] == [1]
    assert not [event for event in bound.events if isinstance(event, Broken)]


def test_a_connection_that_is_dropped_is_tried_ever_later() -> None:
    """Each delay is half to all of twice the one before, though every try is accepted; and a peer
    that is there at last is found."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        connected = ZmqTransport.connect(f"tcp://127.0.0.1:{port}", PULSE)
        accepted = []
        for _ in range(5):
            line, _ = server.accept()
            accepted.append(time.monotonic())
            line.close()
    try:
        delays = [later - before for before, later in pairwise(accepted)]
        assert [delay >= 0.05 * 2**i for i, delay in enumerate(delays)] == [True] * 4, delays
        with closing(ZmqTransport.bind(f"tcp://127.0.0.1:{port}", PULSE)) as bound:
            (found,) = Listener(bound).wait_for(Found)
            bound.send(found.peer, WireMessage("who"))
            assert Listener(connected).messages(1)[0].kind == "who"
    finally:
        connected.close()


@pytest.fixture
def bound() -> Iterator[Listener]:
    listener = Listener(ZmqTransport.bind("tcp://127.0.0.1:*", PULSE))
    yield listener
    listener.transport.close()


@pytest.mark.parametrize("end", [Instance.halt, Instance.kill], ids=["halted", "killed"])
def test_a_process_that_ends_or_hangs_is_lost(
    bound: Listener, tmp_path: Path, end: Callable[[Instance], None]
) -> None:
    child = Instance(connect_and_beat, tmp_path / "log", address=bound.transport.address)
    try:
        (found,) = bound.wait_for(Found)
        end(child)
        assert bound.wait_for(Lost) == [Lost(found.peer)]
    finally:
        child.kill()


def test_what_is_no_message_is_told_and_does_no_harm(bound: Listener) -> None:
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        present(stranger)
        stranger.connect(bound.transport.address)
        garbage = [[b""], [b"\xff" * 9], [MAGIC], [MAGIC, b"{"], [b"beat", b"beat"]]
        for frames in garbage:
            stranger.send_multipart(frames)
        broken = bound.wait_for(Broken, len(garbage))
        assert len({event.peer for event in broken}) == 1
        stranger.send_multipart([MAGIC, b'{"kind": "leave", "fields": {}, "tensors": []}'])
        assert bound.messages(1)[0].kind == "leave"
    context.term()


def test_a_peer_that_is_not_there_can_be_written_to(bound: Listener) -> None:
    for peer in ("00ff", ""):
        bound.transport.send(peer, WireMessage("who"))
    elsewhere = ZmqTransport.connect("tcp://127.0.0.1:9", PULSE)
    for _ in range(3):
        elsewhere.send(ROUTER_SIDE, WireMessage("register"))
    assert elsewhere.receive(0.2) == []
    elsewhere.close()
    assert bound.transport.receive(0.2) == []


@pytest.mark.parametrize("address", ["nowhere", "tcp://", "tcp://x", "udp://x:1"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    for way in (ZmqTransport.bind, ZmqTransport.connect):
        with pytest.raises(
            UsageError, match=r"disaggregation_address=.*expected\s+tcp://HOST:PORT"
        ):
            way(address, PULSE)


def test_a_port_that_is_taken_is_told(bound: Listener) -> None:
    with pytest.raises(UsageError, match="in use"):
        ZmqTransport.bind(bound.transport.address)


MIB = 1 << 20


def send_until_cut(address: str, frames: list[bytes], **options: Any) -> None:
    """Send one message as a stranger would, and wait until the other side ends the connection."""
    context = zmq.Context()
    with context.socket(zmq.DEALER) as stranger, stranger.get_monitor_socket() as monitor:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.setsockopt(zmq.RECONNECT_IVL, -1)
        for name, value in options.items():
            stranger.setsockopt(getattr(zmq, name), value)
        stranger.connect(address)
        with suppress(zmq.Again):  # it has been ended already: nothing takes a message
            stranger.send_multipart(frames, zmq.NOBLOCK, copy=False)
        while True:
            assert monitor.poll(1000 * DEADLINE), "the connection has not been ended"
            if recv_monitor_message(monitor)["event"] == zmq.EVENT_DISCONNECTED:
                break
        stranger.disable_monitor()
    context.term()


PLAIN = {"PLAIN_USERNAME": b"specplug", "PLAIN_PASSWORD": b"sesame"}


@pytest.mark.parametrize(
    ("key", "sizes", "options"),
    [
        (None, [200 * MIB], NO_KEY),
        (None, [10, MOST_FRAME_BYTES + 1] + [MOST_FRAME_BYTES] * 30, NO_KEY),
        ("a key", [MOST_FRAME_BYTES] * 30, {}),
        ("a key", [MOST_FRAME_BYTES] * 30, NO_KEY),
        ("a key", [MOST_FRAME_BYTES] * 30, PLAIN),
        ("a key", [200 * MIB], PLAIN),
    ],
    ids=["one frame", "a frame of many", "no words", "no key", "another key", "that, one frame"],
)
def test_what_a_stranger_sends_takes_no_memory(
    tmp_path: Path, key: str | None, sizes: list[int], options: dict[str, bytes]
) -> None:
    child = Instance(bind_and_measure, tmp_path / "log", key=key)
    try:
        address = child.hear()
        child.pipe.send("measure")
        before = child.hear()
        send_until_cut(address, [bytes(size) for size in sizes], **options)
        child.pipe.send("measure")
        assert child.hear() - before < 16 * MIB
    finally:
        child.kill()


def test_peers_with_the_same_key_exchange_messages() -> None:
    key = "äöü" * 1000
    with (
        closing(ZmqTransport.bind("tcp://127.0.0.1:*", PULSE, key=key)) as bound,
        closing(ZmqTransport.connect(bound.address, PULSE, key=key)) as connected,
    ):
        (found,) = Listener(bound).wait_for(Found)
        sent = torch.arange(3 * MIB)
        bound.send(found.peer, WireMessage("who", {}, {"x": sent}))
        (arrived,) = Listener(connected).messages(1)
        assert torch.equal(arrived.tensors["x"], sent)


@pytest.mark.parametrize(
    ("theirs", "ours"), [("sesame", "thistle"), ("sesame", None), (None, "thistle")]
)
def test_a_peer_with_another_key_is_told_so(
    theirs: str | None, ours: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        closing(ZmqTransport.bind("tcp://127.0.0.1:*", PULSE, key=theirs)) as bound,
        closing(ZmqTransport.connect(bound.address, PULSE, key=ours)) as connected,
    ):
        refused = Listener(connected).wait_for(Refused, 2)  # it goes on
        assert bound.receive(0.0) == []
    why = "the key differs, or only one of the two has one; expected the same: start both"
    assert all(event.why.startswith(why) for event in refused)
    assert caplog.text.count("was refused") == 1
    assert "sesame" not in caplog.text
    assert "thistle" not in caplog.text
