"""The decode side: sends each prompt to a prefill instance, and takes back its KV."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Collection, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import attrs

from specplug.disagg.identity import HandshakeError, Identity
from specplug.disagg.incoming import IncomingPrefill, KVFormat
from specplug.disagg.prefill_request import prefill_message
from specplug.disagg.transport import Arrived, Broken, Event, Found, Lost, Transport
from specplug.disagg.wire_message import WireError, WireMessage
from specplug.engine.request import Request
from specplug.engine.waiting_queue import WaitingQueue
from specplug.kv.prefix_cache import PrefixCache
from specplug.printable import one_line

_log = logging.getLogger(__name__)


@attrs.define(eq=False)
class _Peer:
    """A registered prefill instance.

    Attributes:
        session: changes whenever the instance has forgotten what it was asked for.
        same_draft: whether its draft KV and draft states can be used here.
        jobs: requests that it has, by job.
        heard: when its loop last sent something, on the monotonic clock.
    """

    session: int
    same_draft: bool
    jobs: dict[str, IncomingPrefill] = attrs.field(factory=dict)
    heard: float = 0.0


@attrs.define(kw_only=True)
class Transfers:
    """Counts of what happened between this instance and the prefill instances.

    Attributes:
        sent: requests sent to an instance, each try counted.
        received: prefills that came back whole.
        tries_again: requests that were sent once more because a try failed.
        failed: requests that ended with an error because no instance could prefill them.
        refused: instances that were refused at the handshake.
        lost: instances that went away.
        seconds: from sending a request to having its prefill, summed over all received.
        peers: instances that are registered now.
    """

    sent: int = 0
    received: int = 0
    tries_again: int = 0
    failed: int = 0
    refused: int = 0
    lost: int = 0
    seconds: float = 0.0
    peers: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Return the entries of ``LLM.stats``: all counts together as ``transfers``, then seconds
        and peers."""
        counts = attrs.asdict(self)
        seconds, peers = counts.pop("seconds"), counts.pop("peers")
        return {"transfers": counts, "transfer_seconds": seconds, "prefill_instances": peers}


class DecodeInstance:
    """Sends requests to the prefill instances that have registered. Implements ``RemotePrefill``.

    It sends

    - ``who`` to an instance that it does not know,
    - ``accepted`` or ``refused`` to one that registers,
    - ``prefill`` for each request, and ``cancel`` if that has ended.

    It receives

    - ``register``,
    - ``part``: some positions of a request, in order; the last one brings the first token and the
      per-token outputs,
    - ``working``: the jobs that an instance has,
    - ``failed`` and ``leave``.

    A request whose instance is lost or sends what makes no sense is sent again, up to ``tries``
    times in all. Then it ends with an error. So does a request for which no instance registers in
    time.

    Args:
        transport: bound to where prefill instances connect.
        identity: of this instance.
        cache: of this instance; the KV of cached prefixes need not be sent.
        form: of what must come.
        most_away: most requests that may be away, or back without a row.
        timeout: seconds without a message of its loop after which an instance's requests are sent
            again, and seconds that a request waits for an instance to register.
        tries: how often a request is sent at most.
        moment: seconds that ``poll`` may wait.

    Attributes:
        identity, form, timeout: as given.
    """

    def __init__(
        self,
        transport: Transport,
        identity: Identity,
        *,
        cache: PrefixCache,
        form: KVFormat,
        most_away: int,
        timeout: float,
        tries: int = 3,
        moment: float = 0.002,
    ) -> None:
        self.transfers = Transfers()
        self._transport = transport
        self.identity = identity
        self._cache = cache
        self.form = form
        self._most_away = most_away
        self.timeout = timeout
        self._tries = tries
        self._moment = moment
        self._name = uuid.uuid4().hex
        self._jobs = 0
        self._waiting = WaitingQueue()
        self._peers: dict[str, _Peer] = {}
        self._away: dict[str, IncomingPrefill] = {}
        self._tried: dict[str, list[str]] = {}
        self._alone_since = time.monotonic()
        self._queued_at: dict[str, float] = {}
        self._back: list[Request] = []

    # ``RemotePrefill``

    @property
    def has_work(self) -> bool:
        """Whether a request is here or away."""
        return bool(self._waiting or self._away or self._back)

    @property
    def away(self) -> Mapping[str, IncomingPrefill]:
        """The requests that an instance has, by name, and what of them has come."""
        return MappingProxyType(self._away)

    @property
    def address(self) -> str:
        """The address that prefill instances connect to."""
        return self._transport.address

    def __iter__(self) -> Iterator[Request]:
        yield from (away.request for away in self._away.values())
        yield from self._waiting
        yield from self._back

    def add(self, request: Request) -> None:
        """Queue a request."""
        self._queue(request)

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Return the requests of these names that are here or away."""
        away = (a.request for a in self._away.values() if a.request.request_id in request_ids)
        return [*away, *filter(None, map(self._waiting.get, request_ids))]

    def remove(self, request: Request) -> bool:
        """Forget a request that has ended, and tell its instance; False if it is not here."""
        self._tried.pop(request.request_id, None)
        away = self._away.get(request.request_id)
        if away is not None:
            self._cancel(away)
            return True
        if self._waiting.get(request.request_id) is None:
            return False
        self._unqueue(request)
        return True

    def reset_transfers(self) -> None:
        """Start counting anew."""
        self.transfers = Transfers(peers=len(self._peers))

    def reset(self) -> list[Request]:
        """Forget all requests, and return them."""
        requests = list(self)
        for request in requests:
            self.remove(request)
        self._back.clear()
        return requests

    def poll(self, num_waiting: int, *, wait: bool) -> list[Request]:
        """Return the requests that have come back, each with ``received`` or ``error`` set."""
        for event in self._transport.receive(self._moment if wait else 0.0):
            self._take(event)
        self._give_up()
        self._give_away(self._most_away - num_waiting - len(self._back))
        back, self._back = self._back, []
        return back

    def close(self) -> None:
        """Disconnect. Prefill instances look for this one until it is there again."""
        self._transport.close()

    # Sending

    def _queue(self, request: Request) -> None:
        self._waiting.add(request)
        self._queued_at[request.request_id] = time.monotonic()

    def _unqueue(self, request: Request) -> None:
        self._waiting.remove(request)
        del self._queued_at[request.request_id]

    def _give_away(self, room: int) -> None:
        """Send the first of the waiting requests, while there is room for more away."""
        while self._peers and len(self._away) < room:
            request = self._waiting.first()
            if request is None:
                return
            self._unqueue(request)
            self._send(request, self._choose(request))

    def _choose(self, request: Request) -> str:
        """Return the instance that was sent this request least often; of these, the one with the
        fewest jobs."""
        tried = self._tried.get(request.request_id, [])
        return min(self._peers, key=lambda name: (tried.count(name), len(self._peers[name].jobs)))

    def _send(self, request: Request, name: str) -> None:
        peer, self._jobs = self._peers[name], self._jobs + 1
        tokens = request.prompt_token_ids
        # Per-token outputs come for the whole prompt, wherever the KV begins.
        found = self._cache.match(tokens, len(tokens), request.page_kind)
        start = found.depth * self._cache.pool.page_size
        away = IncomingPrefill(
            request=request,
            peer=name,
            job=f"{self._name}-{self._jobs}",
            start=start,
            form=self.form if peer.same_draft else self.form.target_alone,
        )
        if not peer.jobs:
            peer.heard = away.sent_at  # it had nothing to do till now
        message = prefill_message(away.job, request, start, peer.same_draft)
        try:
            self._transport.send(name, message)
        except (TypeError, ValueError) as error:  # of its parameters; nothing was sent
            self._fail(request, f"it cannot be told to a prefill instance: {error}")
            return
        peer.jobs[away.job] = self._away[request.request_id] = away
        self._tried.setdefault(request.request_id, []).append(name)
        self.transfers.sent += 1

    def _cancel(self, away: IncomingPrefill) -> None:
        self._forget(away)
        if away.peer in self._peers:
            self._transport.send(away.peer, WireMessage("cancel", {"job": away.job}))

    def _forget(self, away: IncomingPrefill) -> None:
        del self._away[away.request.request_id]
        if away.peer in self._peers:
            del self._peers[away.peer].jobs[away.job]

    def _again(self, away: IncomingPrefill, why: str) -> None:
        """Queue a request once more, or end it with an error if this was its last try."""
        self._cancel(away)
        request = away.request
        tried = len(self._tried[request.request_id])
        _log.warning(
            "request %s, try %d of %d: %s", request.request_id, tried, self._tries, one_line(why)
        )
        if tried >= self._tries:
            self._fail(request, f"prefill failed {tried} times; the last time {why}")
            return
        self.transfers.tries_again += 1
        self._queue(request)

    def _fail(self, request: Request, why: str) -> None:
        self._tried.pop(request.request_id, None)
        self.transfers.failed += 1
        request.error = why
        self._back.append(request)

    def _give_up(self) -> None:
        """Take requests back from instances that hang, and end those that waited for any too
        long."""
        now = time.monotonic()
        for name, peer in list(self._peers.items()):
            if peer.jobs and now - peer.heard > self.timeout:
                why = f"the prefill instance gave nothing for {self.timeout:g} s"
                for away in list(peer.jobs.values()):
                    self._again(away, why)
                peer.heard = now
                _log.warning("%s (%s)", why, name[:8])
        if not self._peers and self._waiting and now - self._alone_since > self.timeout:
            why = (
                f"no prefill instance has registered at {self.address} for {self.timeout:g} s; "
                f"start one with --disaggregation-mode prefill and this address"
            )
            for request in list(self._waiting):
                if now - self._queued_at[request.request_id] > self.timeout:
                    self._unqueue(request)
                    self._fail(request, why)

    # Receiving

    def _take(self, event: Event) -> None:
        """Handle an event of the transport."""
        match event:
            case Found(peer):
                self._transport.send(peer, WireMessage("who"))
            case Lost(peer):
                self._lose(peer, "the connection to the prefill instance was lost")
            case Broken(peer, error):
                _log.warning("from %s: %s", peer[:8], error)
                self._spoil(peer, error.fields, str(error))
            case Arrived(peer, message):
                try:
                    self._hear(peer, message)
                except (WireError, KeyError, TypeError, ValueError) as error:
                    why = f"a {message.kind!r} message makes no sense: {error!r}"
                    _log.warning("from %s: %s", peer[:8], why)
                    self._spoil(peer, message.fields, why)

    def _hear(self, name: str, message: WireMessage) -> None:
        if message.kind == "register":
            self._register(name, message.fields)
        elif name not in self._peers:
            self._transport.send(name, WireMessage("who"))
        elif message.kind == "leave":
            self._lose(name, "the prefill instance has left")
        elif message.kind == "working":
            self._check_jobs(self._peers[name], message.fields["jobs"])
        elif message.kind in ("part", "failed"):
            peer = self._peers[name]
            peer.heard = time.monotonic()
            away = peer.jobs.get(message.fields["job"])
            if away is not None and message.kind == "failed":
                self._again(away, f"the prefill instance said: {message.fields['error']}")
            elif away is not None:  # else it has ended meanwhile
                self._take_part(away, message)
        else:
            known = "register, part, working, failed or leave"
            raise WireError(f"expected {known}", message.fields)

    def _check_jobs(self, peer: _Peer, names: Collection[str]) -> None:
        """Send requests again that their instance should know by now, and does not."""
        peer.heard = now = time.monotonic()
        for away in list(peer.jobs.values()):
            if away.job not in names and now - away.sent_at > self.timeout:
                self._again(away, "the prefill instance does not know of it")

    def _take_part(self, away: IncomingPrefill, message: WireMessage) -> None:
        """Keep a part of a prefill. With the last one the request is back."""
        away.take(message)
        if "token" not in message.fields:
            return
        away.request.received = away.received(message)
        self._forget(away)
        self._tried.pop(away.request.request_id, None)
        self.transfers.received += 1
        self.transfers.seconds += time.monotonic() - away.sent_at
        self._back.append(away.request)

    def _register(self, name: str, fields: Mapping[str, Any]) -> None:
        """Accept an instance, or refuse it and say why.

        If it has begun a new session, the requests that it had are sent again.
        """
        session, peer = fields["session"], self._peers.get(name)
        if type(session) is not int:
            raise WireError(f"session {session!r:.40}; expected an integer")
        if peer is not None and peer.session == session:
            self._transport.send(name, WireMessage("accepted"))
            return
        self._lose(name, "the prefill instance has begun anew")
        try:
            theirs = Identity.from_fields(fields["identity"])
            misfit = self.identity.misfit(theirs)
        except HandshakeError as error:
            misfit = str(error)
        if misfit is not None:
            self.transfers.refused += 1
            _log.warning("a prefill instance was refused: %s", misfit)
            self._transport.send(name, WireMessage("refused", {"why": misfit}))
            return
        same = theirs.draft == self.identity.draft
        if not same:
            _log.warning(
                "a prefill instance has the draft %r, this one has %r: requests begin without a "
                "draft state",
                theirs.draft,
                self.identity.draft,
            )
        self._peers[name] = _Peer(session, same, heard=time.monotonic())
        self.transfers.peers = len(self._peers)
        self._transport.send(name, WireMessage("accepted"))
        _log.info("a prefill instance has registered (%s)", name[:8])

    def _lose(self, name: str, why: str) -> None:
        """Forget an instance, and send its requests again."""
        peer = self._peers.pop(name, None)
        if peer is None:
            return
        self.transfers.lost += 1
        self.transfers.peers = len(self._peers)
        if not self._peers:
            self._alone_since = time.monotonic()
        _log.info("%s (%s)", why, name[:8])
        for away in list(peer.jobs.values()):
            self._again(away, why)

    def _spoil(self, name: str, fields: Mapping[str, Any], why: str) -> None:
        """Send the request again that a bad message was about. If the message does not say which,
        send all of the instance's requests again, since any of them may wait for it."""
        peer = self._peers.get(name)
        if peer is None:
            return
        job = fields.get("job")
        jobs = [peer.jobs.get(job)] if isinstance(job, str) else list(peer.jobs.values())
        for away in filter(None, jobs):
            self._again(away, why)
