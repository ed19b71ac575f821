"""A part of a target's decoder layers, run for drafts."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specplug.errors import PluginError, SpecplugError, UsageError, first_line
from specplug.kernels.attention_form import AttentionForm
from specplug.kv.tensors import drop_tensors, fill_cache
from specplug.model.attention import running
from specplug.model.trials import TrialRequests, random_tokens
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan

if TYPE_CHECKING:
    from specplug.model.target import Target

_NORMS = "norm", "final_layernorm", "ln_f", "final_layer_norm", "norm_f", "final_norm"
"""What models call the norm after their last layer."""
_DRAFTS = "draft "
"""How a rank's wish begins that is to run layers for a draft."""
_LENGTH = 12
"""Tokens of the proof."""
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-3}
_HALF_TOLERANCE = 5e-2
_GATHERED_BYTES = 128 << 20
"""The most bytes of keys that are gathered at once."""


class LayerRange:
    """The decoder layers ``first`` to ``last - 1`` of a target, without its final norm.

    The model's own decoder runs them: a copy of that module, with the same weights, whose other
    layers return what they are given. So whatever a model computes for its layers is computed. That
    this gives what the layers give in a whole pass is proved.

    Args:
        target: whose layers they are. Its cache has no tensors yet.
        first, last: of the layers.

    Attributes:
        wish: as this rank announces that it drafts with them.

    Raises:
        UsageError: there are no such layers, or they do not run by themselves.
    """

    def __init__(self, target: Target, first: int, last: int) -> None:
        self._target = target
        self._name = f"layers {first} to {last - 1} of {type(target.model).__name__}"
        if not 0 <= first < last <= target.num_layers:
            raise UsageError(
                f"target_layers({first}, {last}): expected 0 <= first < last <= "
                f"{target.num_layers}, the target's number of layers"
            )
        self._first, self._last = first, last
        self.wish = f"{_DRAFTS}{first} {last}"
        self._decoder = self._part(target.capture.decoder)
        self._prove()
        target.draft_ranges[self.wish] = self

    def draft(self, hidden: Tensor, plan: Any) -> Tensor:
        """Run the layers, [R, H] -> [R, H], and have the other ranks run theirs.

        Ranks whose layers are sharded run one kind of pass at a time. Where others draft with other
        layers first, this rank takes part in that before its own pass.
        """
        ranks = self._target.ranks
        if ranks is None:
            return self(hidden, plan)
        if hidden.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise PluginError(
                f"{self._name}: recorded, though the ranks have to agree on each pass; call "
                "target_layers() before record_draft()"
            )
        rows = len(hidden)
        while (wanted := wanted_draft(ranks.agree(rows, self.wish))) != self.wish:
            assert wanted is not None, "this rank wants one"
            self._target.draft_ranges[wanted].take_part(rows)
        return self(hidden, plan)

    def take_part(self, rows: int) -> None:
        """Run the layers over padding, while other ranks draft: as many rows as this rank has
        announced."""
        target = self._target
        hidden = torch.zeros(rows, target.hidden_size, dtype=target.dtype, device=target.device)
        self(hidden, _PaddingRows(rows, target.device))

    def __call__(self, hidden: Tensor, plan: Any) -> Tensor:
        """[R, H] -> [R, H]; ``plan`` is that of the R rows."""
        target = self._target
        target.rotary.begin(plan.lengths)
        with running(plan, target.cache):
            out = self._decoder(
                inputs_embeds=hidden.unsqueeze(0),
                position_ids=plan.positions.unsqueeze(0),
                use_cache=False,
            )
        rows: Tensor = out[0].squeeze(0)
        return rows

    def _part(self, decoder: nn.Module) -> nn.Module:
        """Return the copy of the decoder."""
        layers, norm = self._target.capture.layers, final_norm(decoder)
        names = [name for name, child in decoder.named_children() if child is layers]
        if norm is None or not names:
            raise self._refusal("it has no list of layers with a norm after it")
        part = _unhooked(decoder)
        kept = range(self._first, self._last)
        every = [each if n in kept else _skipped(each) for n, each in enumerate(layers)]
        part.__dict__[names[0]] = nn.ModuleList(every)
        part.__dict__[norm[0]] = nn.Identity()
        return part

    @torch.inference_mode()
    def _prove(self) -> None:
        """Compare with a whole pass."""
        target = self._target
        length = min(_LENGTH, target.context_len)
        requests = TrialRequests(
            1, length, length, target.context_len, target.device, target.kernels, target.cpu_kernels
        )
        fill_cache(target.cache, target.kv_shape, requests.num_slots, target.dtype, target.device)
        tokens = random_tokens(target.vocab_size, (length,)).to(target.device)
        try:
            with target.stepping():
                target.begin_proved_pass(length)
                before, after, out = self._whole_pass(tokens, requests.plan((0,), (length,)))
                if self._first == 0:
                    before = target.embed_tokens(tokens)
                target.begin_proved_pass(length)
                found = self(before, requests.plan((0,), (length,)))
            normed = _normed(target, after) if self._last == target.num_layers else None
        except (SpecplugError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refusal(first_line(error)) from error
        finally:
            drop_tensors(target.cache)
        if not _is_near(found, after) or (normed is not None and not _is_near(normed, out)):
            raise self._refusal("they give something else there than in a whole pass")

    def _whole_pass(self, tokens: Tensor, plan: PagedPlan) -> tuple[Tensor, Tensor, Tensor]:
        """Return what goes into the range, what comes out of it, and what leaves the decoder, of a
        pass over all layers: [R, H] each."""
        kept: dict[str, Tensor] = {}

        def keep_input(module: nn.Module, args: Any, kwargs: Any) -> None:
            kept["before"] = args[0] if args else kwargs["hidden_states"]

        def keeps(name: str) -> Callable[..., None]:
            def keep_output(module: nn.Module, args: Any, output: Any) -> None:
                kept[name] = output if isinstance(output, Tensor) else output[0]

            return keep_output

        capture = self._target.capture
        first, last = capture.layers[self._first], capture.layers[self._last - 1]
        hooks = (
            first.register_forward_pre_hook(keep_input, with_kwargs=True),
            last.register_forward_hook(keeps("after")),
            capture.decoder.register_forward_hook(keeps("out")),
        )
        try:
            self._target.forward(tokens, plan, 0)
        finally:
            for hook in hooks:
                hook.remove()
        before, after, out = (kept[name].squeeze(0) for name in ("before", "after", "out"))
        return before, after, out

    def _refusal(self, why: str) -> UsageError:
        return UsageError(
            f"{self._name} do not run by themselves for drafts: {why}; expected layers that pass "
            "on one tensor of hidden states; choose another algorithm for this target"
        )


def wanted_draft(wishes: Sequence[str]) -> str | None:
    """Return which layers the ranks are to run next for a draft, by their wishes; None: none."""
    return next((wish for wish in wishes if wish.startswith(_DRAFTS)), None)


def final_norm(decoder: nn.Module) -> tuple[str, nn.Module] | None:
    """Return the norm after the last layer, by its name; None: there is none of a known name."""
    children = dict(decoder.named_children())
    return next(((name, children[name]) for name in _NORMS if name in children), None)


def _normed(target: Target, hidden: Tensor) -> Tensor:
    found = final_norm(target.capture.decoder)
    assert found is not None
    rows: Tensor = found[1](hidden.unsqueeze(0)).squeeze(0)
    return rows


def _unhooked(module: nn.Module) -> nn.Module:
    """Return a copy of a module with its weights and none of its hooks."""
    made = copy(module)
    made.__dict__["_forward_hooks"] = OrderedDict()
    made.__dict__["_forward_pre_hooks"] = OrderedDict()
    return made


def _skipped(layer: nn.Module) -> nn.Module:
    """Return a layer that looks like this one and returns what it is given."""
    made = _unhooked(layer)
    made.__dict__["forward"] = _skip
    return made


def _skip(hidden_states: Tensor, *more: Any, **named: Any) -> Tensor:
    return hidden_states


def _is_near(found: Tensor, expected: Tensor) -> bool:
    if found.shape != expected.shape:
        return False
    gap = torch.linalg.vector_norm((found - expected).double())
    tolerance = _TOLERANCE.get(found.dtype, _HALF_TOLERANCE)
    return bool(gap <= tolerance * torch.linalg.vector_norm(expected.double()))


class _PaddingRows:
    """The plan of rows that only take part in what other ranks compute."""

    lengths: Tensor | None = None

    def __init__(self, rows: int, device: torch.device) -> None:
        self.positions = self.slots = torch.zeros(rows, dtype=torch.int64, device=device)

    def attend(
        self,
        cache: PagedKVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Attend to nothing."""
        return q.new_zeros(q.shape).flatten(1)

    def attend_written(
        self, cache: PagedKVCache, layer: int, q: Tensor, form: AttentionForm
    ) -> Tensor:
        """Attend to nothing."""
        return q.new_zeros(q.shape).flatten(1)


class _Attended(Exception):
    """The layer that is watched has its queries; what follows is not computed."""


class AttentionWatch:
    """The plan of rows whose attention is looked at in one layer, and not computed. What the layer
    writes goes to slot 0, which is padding.

    Args:
        table: [bs, L] int64, the slots of each request.
        positions: [bs] int64 of the rows, one for each request.
        lengths: [bs] int64, as ``PagedPlan.lengths``; None: they follow from the positions.
        page_size: tokens of a page.

    Attributes:
        shares: [bs, pages] float32: how much of its attention a row gives to each page.
    """

    def __init__(
        self, table: Tensor, positions: Tensor, lengths: Tensor | None, page_size: int
    ) -> None:
        self._table = table
        self._page_size = page_size
        self.positions = positions
        self.lengths = lengths
        self.slots = torch.zeros_like(positions)
        self.shares: Tensor | None = None

    def attend(
        self,
        cache: PagedKVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Look at the attention, and leave the layer."""
        return self.attend_written(cache, layer, q, form)

    def attend_written(
        self, cache: PagedKVCache, layer: int, q: Tensor, form: AttentionForm
    ) -> Tensor:
        """Look at the attention, and leave the layer."""
        keys = cache.keys[layer]
        row_bytes = self._table.shape[1] * keys[0].nbytes
        at_once = max(1, _GATHERED_BYTES // max(row_bytes, 1))
        given = q, self._table, self.positions
        parts = zip(*(torch.split(each, at_once) for each in given), strict=True)
        shares = [
            page_shares(each, keys[table], last, form, self._page_size)
            for each, table, last in parts
        ]
        self.shares = shares[0] if len(shares) == 1 else torch.cat(shares)
        raise _Attended

    def of(self, layers: LayerRange, hidden: Tensor) -> Tensor:
        """Return ``shares``.

        Args:
            layers: the layer, a range of one.
            hidden: [bs, H], what goes into it.
        """
        with suppress(_Attended):
            layers(hidden, self)
        assert self.shares is not None
        return self.shares


def page_shares(
    q: Tensor, keys: Tensor, last: Tensor, form: AttentionForm, page_size: int
) -> Tensor:
    """Return how much of its attention each row gives to each page, the mean over its heads.

    Sinks take from all pages of a head alike, and are left out.

    Args:
        q: [bs, H, D].
        keys: [bs, L, Hkv, D], those of each row's request.
        last: [bs] int64, the position up to which a row sees them.

    Returns:
        [bs, ceil(L / page_size)] float32.
    """
    bs, length, kv_heads, dim = keys.shape
    grouped = q.reshape(bs, kv_heads, -1, dim)
    scores = (grouped @ keys.permute(0, 2, 3, 1)).flatten(1, 2).float() * form.scale
    if form.softcap is not None:
        scores = form.softcap * torch.tanh(scores / form.softcap)
    order, ends = torch.arange(length, device=q.device), last.unsqueeze(1)
    hidden = order > ends
    if form.window is not None:
        hidden |= order <= ends - form.window
    weights = scores.masked_fill_(hidden.unsqueeze(1), float("-inf")).softmax(-1).mean(1)
    return F.pad(weights, (0, -length % page_size)).view(bs, -1, page_size).sum(2)
