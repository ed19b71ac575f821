"""SGLang's requests as plugins see them, and how far the request of each row is prefilled."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING

import attrs
from torch import Tensor

from specplug import RequestReport

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

_NO_STATE: Mapping[str, Tensor] = MappingProxyType({})


class SglangRequest:
    """Our ``RequestView`` of one of SGLang's requests, to which it holds a weak reference.

    Attributes:
        is_told: whether plugins were told of the request's end; set by ``KnownRequests``. SGLang
            may still run a step of it that was planned before; plugins do not see that step.
    """

    draft_state = _NO_STATE
    is_told = False

    def __init__(self, request: Req) -> None:
        self._request = weakref.ref(request)
        self.request_id: str = request.rid
        self.prompt_token_ids: Sequence[int] = list(request.origin_input_ids)
        self.max_tokens: int = request.sampling_params.max_new_tokens
        self.cache_salt: str | None = request.extra_key or None
        self._tokens = list(self.prompt_token_ids)

    @property
    def token_ids(self) -> Sequence[int]:
        """The prompt, and the output tokens that the scheduler has processed."""
        request = self._request()
        if request is not None:
            known = len(self._tokens) - len(self.prompt_token_ids)
            self._tokens.extend(request.output_ids[known:])
        return self._tokens

    @property
    def request(self) -> Req | None:
        """SGLang's request; None after SGLang has dropped it."""
        return self._request()

    def is_of(self, request: Req) -> bool:
        """Return whether this is the view of ``request``, not of an earlier one with its id."""
        return self._request() is request

    @property
    def has_ended(self) -> bool:
        """Whether the scheduler has ended the request."""
        request = self._request()
        return request is None or request.finished()

    def report(self) -> RequestReport:
        """Return the report of an ended request. ``finish_reason`` is "" if SGLang gave none."""
        request = self._request()
        reason = getattr(request, "finished_reason", None)
        kind = "" if reason is None else str(reason.to_json().get("type", ""))
        return RequestReport(
            request_id=self.request_id,
            finish_reason=kind if kind in ("stop", "length", "abort") else "",
            num_prompt_tokens=len(self.prompt_token_ids),
            num_output_tokens=len(self.token_ids) - len(self.prompt_token_ids),
        )


@attrs.define
class _Row:
    """A row of the request table: its request, and how far the prompt is prefilled."""

    request_id: str
    prefilled: int
    is_last: bool


class KnownRequests:
    """The requests that the worker has seen and whose end was not told."""

    def __init__(self) -> None:
        self._views: dict[str, SglangRequest] = {}
        self._rows: dict[int, _Row] = {}

    def views(self, requests: Sequence[Req]) -> list[SglangRequest]:
        """Return the views of a batch. A request has the same view until its end is told."""
        return [self._views.get(request.rid) or self._view_of(request) for request in requests]

    def _view_of(self, request: Req) -> SglangRequest:
        """Return a view of a request that is new, or whose end was told."""
        view = SglangRequest(request)
        if request.finished():
            view.is_told = True
        else:
            self._views[request.rid] = view
        return view

    def begin_chunk(self, row: int, request: Req, start: int, end: int, is_last: bool) -> bool:
        """Record a prompt chunk, and return whether it is the request's first in this row: the row
        was another request's, or the request was retracted and begins again.

        Args:
            row: of the request table.
            start, end: the chunk's first position, and the position after its last.
            is_last: whether the chunk ends the prompt.
        """
        known = self._rows.get(row)
        goes_on = (
            known is not None
            and (known.request_id, known.prefilled) == (request.rid, start)
            and not known.is_last
        )
        self._rows[row] = _Row(request.rid, end, is_last)
        return not goes_on

    def end(self, request_id: str) -> Iterator[SglangRequest]:
        """Remove a request, and yield its view if it was known."""
        view = self._views.pop(request_id, None)
        if view is not None:
            yield view

    def ended(self, batch: Sequence[Req]) -> Iterator[SglangRequest]:
        """Remove requests that have ended without a call of ``note_request_finished``, and yield
        their views. SGLang calls that only for requests that end in a decode step.

        Args:
            batch: the requests of the next step, which have not ended.
        """
        running = {request.rid: request for request in batch}
        for name, view in list(self._views.items()):
            if not view.is_of(running[name]) if name in running else view.has_ended:
                yield from self.end(name)
