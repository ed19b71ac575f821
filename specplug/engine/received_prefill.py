"""A prefill that another instance has computed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
from torch import Tensor


@attrs.define(eq=False, kw_only=True)
class ReceivedPrefill:
    """A whole prefill that has arrived.

    Attributes:
        start, end: the positions whose KV is here; ``end`` is the prompt's length.
        caches: for each cache consecutive tensors [layers, 2, n, Hkv, D]. The target's alone, if
            the peer has no draft cache of this kind. A draft's cache may have more or fewer layers
            than here, as the peer's settings say.
        draft_state: what the peer's ``export_draft_state`` gave, on the CPU; empty if nothing.
        first_token: the token after the prompt.
        outputs: the per-token outputs that were asked for, by name of their tensors, [n, …]: of
            the whole prompt, or of the first token.
    """

    start: int
    end: int
    caches: Sequence[Sequence[Tensor]]
    draft_state: Mapping[str, Tensor] = attrs.field(factory=dict)
    first_token: int
    outputs: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def num_bytes(self) -> int:
        """The bytes of its KV and draft state."""
        tensors = [t for cache in self.caches for t in cache] + list(self.draft_state.values())
        return sum(t.numel() * t.element_size() for t in tensors)
