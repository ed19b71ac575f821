"""Our attention as transformers' models call it: that of the plan of the running pass."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import attrs
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.kernels.attention_form import AttentionForm, kept_form
from specplug.speculative.paged_plan import JoinedPlan, PagedKVCache, PagedPlan

IMPLEMENTATION = "specplug"
"""The name under which transformers' ``AttentionInterface`` knows our attention."""


@attrs.frozen
class AttentionKind:
    """The kind of a module's attention, as far as it matters to the kernels.

    Attributes:
        heads: of the queries.
        key_dim: of a head of the queries and keys.
        scale: of the scores; None: by the head's size.
        window: of a sliding window, in tokens; None: there is none.
        softcap: of the scores, or None.
        has_sinks: whether each head has a score without a value.
    """

    heads: int
    key_dim: int
    scale: float | None = None
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    @classmethod
    def of_call(cls, heads: int, key_dim: int, arguments: Mapping[str, Any]) -> AttentionKind:
        """Return the kind of a call with these keywords of transformers."""
        scale, window, softcap = map(arguments.get, ("scaling", "sliding_window", "softcap"))
        return cls(heads, key_dim, scale, window, softcap, arguments.get("s_aux") is not None)


@attrs.frozen(eq=False)
class TargetPass:
    """The running pass, as our attention needs it: the plan and the target's cache."""

    plan: PagedPlan | JoinedPlan
    cache: PagedKVCache


TARGET_PASS: ContextVar[TargetPass] = ContextVar("target_pass")
"""The pass that runs in this thread. Not a keyword: some models drop keywords."""


@contextmanager
def running(plan: PagedPlan | JoinedPlan, cache: PagedKVCache) -> Iterator[None]:
    """Enclose the forward of a model, or of layers of it, whose attention is to read these."""
    before = TARGET_PASS.set(TargetPass(plan, cache))
    try:
        yield
    finally:
        TARGET_PASS.reset(before)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do: [1, H, T, D] in, [1, T, H, D] out."""
    target_pass = TARGET_PASS.get()
    plan, cache = target_pass.plan, target_pass.cache
    layer: int = module.layer_idx  # type: ignore[assignment]
    width = value.shape[3]
    if width < key.shape[3]:  # latent attention: the cache has one width for both
        value = F.pad(value, (0, key.shape[3] - width))
    k, v = key.squeeze(0).transpose(0, 1), value.squeeze(0).transpose(0, 1)
    q = query.squeeze(0).transpose(0, 1)
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    if s_aux is None:
        form = kept_form(scale, sliding_window, softcap)
    else:
        form = AttentionForm(scale, sliding_window, softcap, s_aux)
    flat = plan.attend(cache, layer, q, k, v, form)
    out = flat.view(1, flat.shape[0], query.shape[1], -1)
    return out[..., :width].contiguous(), None  # some models call view() on it


def register() -> None:
    """Make ``attn_implementation="specplug"`` known to transformers. May be called again."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, attention)
