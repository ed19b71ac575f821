"""A prefill on its way from one instance to another: what is cut out, and what arrives."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import attrs
from torch import Tensor

from specplug.outputs import Logprob

if TYPE_CHECKING:
    from specplug.engine.request import Request


@attrs.define(eq=False, kw_only=True)
class KVSlice:
    """The KV of some consecutive positions of a request, cut out of the pool on its way to the
    host.

    Attributes:
        request: whose it is.
        start, end: the positions.
        caches: of the target and of each draft cache, [layers, 2, end - start, Hkv, D].
        draft_state: named tensors of the request, without a leading size; only with the last slice.
    """

    request: Request
    start: int
    end: int
    caches: tuple[Tensor, ...]
    draft_state: dict[str, Tensor] = attrs.field(factory=dict)


@attrs.define(eq=False, kw_only=True)
class Cutting:
    """A slice that has reached the host, with what the same step sampled.

    Attributes:
        first_token: the token behind the prompt, with the last slice; else None.
        logprobs: its log-probabilities, if they were asked for.
        experts: [tokens, layers, experts a token] of the whole prompt, with the last slice, if
            they were asked for.
    """

    kv: KVSlice
    first_token: int | None = None
    logprobs: dict[int, Logprob] | None = None
    experts: Tensor | None = None


@attrs.define(eq=False, kw_only=True)
class Parcel:
    """A whole prefill that has arrived.

    Attributes:
        start, end: the positions whose KV is here; ``end`` is the prompt's length.
        caches: of each cache the tensors [layers, 2, n, Hkv, D] that follow one another; the
            target's alone if the peer has no draft cache of this kind. A draft's cache has as many
            layers as the peer's settings gave it.
        draft_state: what the peer's ``export_draft_state`` gave, on the CPU; empty if nothing.
        first_token: the token behind the prompt.
        logprobs: its log-probabilities, if they were asked for.
        experts: [end, layers, experts a token] of the prompt, if they were asked for.
    """

    start: int
    end: int
    caches: Sequence[Sequence[Tensor]]
    draft_state: Mapping[str, Tensor] = attrs.field(factory=dict)
    first_token: int
    logprobs: dict[int, Logprob] | None = None
    experts: Tensor | None = None

    @property
    def num_bytes(self) -> int:
        """Of its KV and its draft state."""
        tensors = [t for cache in self.caches for t in cache] + list(self.draft_state.values())
        return sum(t.numel() * t.element_size() for t in tensors)


@attrs.frozen(kw_only=True)
class Unpacking:
    """A parcel whose request has got its pages.

    Attributes:
        start: the first position to write; those before it were found in the prefix cache.
        pages: those of the positions from ``start`` on.
    """

    request: Request
    parcel: Parcel
    start: int
    pages: tuple[int, ...]


class RemotePrefill(Protocol):
    """Has requests prefilled by other instances. The engine's side of ``specplug.disagg``."""

    @property
    def has_work(self) -> bool:
        """Whether a request is here or away."""

    def __iter__(self) -> Iterator[Request]:
        """All that are here or away."""

    def add(self, request: Request) -> None:
        """Take a request."""

    def poll(self, num_waiting: int, *, wait: bool) -> list[Request]:
        """Those that have come back: each with a ``parcel``, or with an ``error``.

        Args:
            num_waiting: requests that came back before and have no row yet.
            wait: nothing else is to be done: block for a moment if none has.
        """

    def find(self, request_ids: Collection[str]) -> list[Request]:
        """Those of these names that are here or away."""

    def remove(self, request: Request) -> bool:
        """Forget a request that has ended; False if it is not here."""

    def reset(self) -> list[Request]:
        """Forget all requests; these."""
