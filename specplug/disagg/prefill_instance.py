"""The prefill side: looks for decode instances, and prefills what they send."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import attrs

from specplug.disagg.backoff import Backoff
from specplug.disagg.identity import HandshakeError, Identity
from specplug.disagg.incoming import OUTPUT, STATE
from specplug.disagg.prefill_request import PrefillRequest, read_prefill_request
from specplug.disagg.transport import (
    Arrived,
    Broken,
    Event,
    Found,
    Lost,
    Refused,
    Transport,
)
from specplug.disagg.wire_message import WireMessage
from specplug.engine.kv_transfer import PrefillSlice
from specplug.engine.request import Request
from specplug.printable import one_line

_log = logging.getLogger(__name__)
_TELL_SECONDS = 1.0
_MOMENT = 0.002
"""Seconds to wait for a message where nothing is to be done."""


@attrs.define(eq=False)
class Link:
    """The connection to a decode instance, the only peer of its transport.

    Attributes:
        peer: the transport's name of it.
        accepted: whether it has accepted this instance.
        session: counts how often this instance has forgotten what it was asked for over this link.
        backoff: delays between registrations.
        next_try: when to register again if no answer has come, on the monotonic clock.
        next_told: when to send ``working`` again.
        refused: why this instance was refused; None if it was not.
    """

    transport: Transport
    peer: str = ""
    accepted: bool = False
    session: int = 0
    backoff: Backoff = attrs.field(factory=Backoff)
    next_try: float = 0.0
    next_told: float = 0.0
    refused: str | None = None

    def say(self, message: WireMessage) -> None:
        """Send a message."""
        self.transport.send(self.peer, message)


@attrs.define(eq=False)
class _Work:
    """A job, and the request that it becomes."""

    job: PrefillRequest
    link: Link
    request: Request | None = None


class PrefillInstance:
    """Prefills for decode instances.

    It sends

    - ``register`` after growing delays until it is ``accepted``, and again whenever the connection
      was lost or a decode instance asks ``who`` it is. It forgets then what it was asked for,
    - ``part`` with each slice of KV that is final; the last one brings the first token and the
      per-token outputs. Or ``failed``,
    - ``working`` every second, with the jobs that it has,
    - ``leave`` when it closes.

    It receives ``accepted``, ``refused``, ``who``, ``prefill`` and ``cancel``. If all decode
    instances refuse it, it raises; if some do, it serves the others and keeps registering.

    Args:
        links: to the decode instances.
        identity: of this instance.
        prepare: makes a request of a prompt and its settings; may be called from other threads.
        submit: queues a request.
        abort: ends one by its name.

    Attributes:
        links: as given.
    """

    def __init__(
        self,
        links: Sequence[Link],
        identity: Identity,
        *,
        prepare: Callable[..., Request],
        submit: Callable[[Request], None],
        abort: Callable[[str], None],
    ) -> None:
        self.links = list(links)
        self._identity = identity
        self._prepare = prepare
        self._submit = submit
        self._abort = abort
        self._work: dict[tuple[int, str], _Work] = {}
        self._by_request: dict[Request, _Work] = {}
        self._preparing: dict[Future[Request], _Work] = {}
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="grammar")

    @property
    def has_work(self) -> bool:
        """Whether a decode instance waits for a prefill of this one."""
        return bool(self._work)

    def receive(self, *, wait: bool) -> None:
        """Register where that is due, and handle the messages that have come.

        Args:
            wait: block for a moment if there are none; the engine has nothing else to do.

        Raises:
            HandshakeError: all decode instances refuse this one.
        """
        for link in self.links:
            self._register(link)
            self._tell_jobs(link)
            for event in link.transport.receive(_MOMENT / len(self.links) if wait else 0.0):
                self._take(link, event)
        for future in [f for f in self._preparing if f.done()]:
            work = self._preparing.pop(future)
            if self._work.get(self._key(work)) is work:
                self._begin(work, future.result)

    def send(self, slices: Iterable[PrefillSlice]) -> None:
        """Send prefilled slices to the decode instances that asked for them."""
        for prefill_slice in slices:
            work = self._by_request.get(prefill_slice.kv.request)
            if work is not None:
                work.link.say(_part(work.job, prefill_slice))
                if prefill_slice.first_token is not None:
                    self._drop(work)

    def tell_failed(self, ended: Iterable[Request]) -> None:
        """Send ``failed`` for requests that ended before they were prefilled."""
        for request in ended:
            work = self._by_request.get(request)
            if work is not None and request.finished:
                self._fail(work, request.error or f"it ended: {request.finish_reason}")

    def close(self) -> None:
        """Send ``leave`` and disconnect."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for link in self.links:
            link.say(WireMessage("leave"))
            link.transport.close()

    def _register(self, link: Link) -> None:
        now = time.monotonic()
        if not link.accepted and now >= link.next_try:
            link.next_try = now + link.backoff.next()
            fields = {"session": link.session, "identity": self._identity.as_fields()}
            link.say(WireMessage("register", fields))

    def _tell_jobs(self, link: Link) -> None:
        """Send ``working`` if it is due."""
        now = time.monotonic()
        if link.accepted and now >= link.next_told:
            link.next_told = now + _TELL_SECONDS
            names = [work.job.name for work in self._work.values() if work.link is link]
            link.say(WireMessage("working", {"jobs": names}))

    def _take(self, link: Link, event: Event) -> None:
        match event:
            case Found(peer):
                link.peer = peer
            case Refused(_, why):
                self._note_refusal(link, why)
            case Lost():
                _log.warning("the decode instance at %s is lost", link.transport.address)
                self._start_anew(link)
            case Broken(_, error):
                _log.warning("from %s: %s", link.transport.address, error)
                name = error.fields.get("job")
                if isinstance(name, str):
                    link.say(WireMessage("failed", {"job": name, "error": str(error)}))
            case Arrived(_, message):
                self._hear(link, message)

    def _hear(self, link: Link, message: WireMessage) -> None:
        match message.kind:
            case "accepted":
                if not link.accepted:
                    _log.info("registered at %s", link.transport.address)
                link.accepted, link.refused = True, None
                link.backoff.reset()
            case "refused":
                self._note_refusal(link, str(message.fields.get("why")))
            case "who" if link.accepted:  # it has begun anew itself, or had lost this one
                self._start_anew(link)
            case "who":
                link.next_try = 0.0
            case "prefill":
                self._accept(link, message)
            case "cancel":
                work = self._work.get((id(link), str(message.fields.get("job"))))
                if work is not None:
                    self._cancel(work)
            case kind:
                _log.warning("%s says %r, which is no message", link.transport.address, kind)

    def _note_refusal(self, link: Link, why: str) -> None:
        """Note that a decode instance refuses this one; go on if there is another."""
        told = f"the decode instance at {link.transport.address} refuses this one: {why}"
        if all(each.refused for each in self.links if each is not link):
            raise HandshakeError(told)
        if link.refused is None:
            _log.warning("%s", one_line(told))
        link.accepted, link.refused = False, why

    def _start_anew(self, link: Link) -> None:
        """Forget what the link's decode instance has asked for, and register again."""
        for work in [w for w in self._work.values() if w.link is link]:
            self._cancel(work)
        link.accepted = False
        link.session += 1
        link.next_try = 0.0

    def _accept(self, link: Link, message: WireMessage) -> None:
        """Make a request of a job, in a thread if a grammar is to be compiled."""
        try:
            job = read_prefill_request(message)
        except (KeyError, TypeError, ValueError) as error:
            link.say(
                WireMessage(
                    "failed", {"job": message.fields.get("job"), "error": f"no job: {error!r}"}
                )
            )
            return
        work = _Work(job, link)
        self._work[self._key(work)] = work
        prepare = partial(self._prepare, job.token_ids, job.params, priority=job.priority)
        if job.params.grammar is not None:
            self._preparing[self._threads.submit(prepare)] = work
        else:
            self._begin(work, prepare)

    def _begin(self, work: _Work, prepare: Callable[[], Request]) -> None:
        try:
            request = work.request = prepare()
        except Exception as error:
            self._fail(work, str(error))
            return
        request.export_from = work.job.start
        self._by_request[request] = work
        self._submit(request)

    def _fail(self, work: _Work, why: str) -> None:
        self._drop(work)
        work.link.say(WireMessage("failed", {"job": work.job.name, "error": why}))

    def _cancel(self, work: _Work) -> None:
        self._drop(work)
        if work.request is not None:
            self._abort(work.request.request_id)

    def _drop(self, work: _Work) -> None:
        self._work.pop(self._key(work), None)
        if work.request is not None:
            self._by_request.pop(work.request, None)

    def _key(self, work: _Work) -> tuple[int, str]:
        return id(work.link), work.job.name


def _part(job: PrefillRequest, prefill_slice: PrefillSlice) -> WireMessage:
    """Return the message that brings a slice."""
    kv = prefill_slice.kv
    fields: dict[str, Any] = {"job": job.name, "start": kv.start, "end": kv.end}
    caches = kv.caches if job.draft else kv.caches[:1]
    tensors = {f"cache{n}": tensor for n, tensor in enumerate(caches)}
    if prefill_slice.first_token is None:
        return WireMessage("part", fields, tensors)
    fields["token"] = prefill_slice.first_token
    tensors |= {f"{OUTPUT}{name}": tensor for name, tensor in prefill_slice.outputs.items()}
    if job.draft:
        tensors |= {f"{STATE}{name}": tensor for name, tensor in kv.draft_state.items()}
    return WireMessage("part", fields, tensors)
