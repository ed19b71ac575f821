"""Prove, when a target is loaded, that a row's bits depend on nothing but the row.

The same tokens run in passes of 1, some, more than 64 and more than 128 rows, as a tree, and by the
kernels of recorded passes; the same queries attend to the same long context in every way that a
pass may read it. All results of a row are compared bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.recorded_launches import recorded_launches
from specplug.kv.tensors import KVShape, drop_tensors, fill_cache
from specplug.model.attention import AttentionKind
from specplug.model.trials import RunPass, TrialRequests, random_tokens, rows_of
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention

PASS_LENGTH = 160
"""Tokens of the sequence whose passes are compared: more than the 128 rows up to which the kernels
compute every product, so the whole of it is computed by other tiles, or by cuBLAS."""
_CHUNK = 70
"""Rows of a chunk of it: more than the 64 rows of a tile."""
_SHORT = 20
"""Rows of a short sequence."""
KEYS = 650
"""Keys of the long context: two whole parts of 256, which are summed apart, and the rest."""
_TILED = 140
"""Rows of a chunk of it that is read in tiles."""


@attrs.frozen(eq=False)
class _Pass:
    """A pass, and what its rows are compared with.

    Attributes:
        name: for messages.
        tokens: [R] int64, or none for attention alone.
        plan: of the pass.
        rows: of the pass that are compared; None: all.
        places: of these in the sequence.
        is_recorded: whether its kernels are those of recorded passes.
    """

    name: str
    tokens: Tensor
    plan: PagedPlan
    places: Tensor
    rows: Tensor | None = None
    is_recorded: bool = False


@attrs.frozen(eq=False, kw_only=True)
class RowProof:
    """Compares the bits of rows.

    Args:
        kv_shape: of the target's cache.
        dtype: of the target.
        device: of the target.
        context_len: of the target.
        vocab_size: of the target.
        kernels: attend on a GPU; None: torch.
    """

    kv_shape: KVShape
    dtype: torch.dtype
    device: torch.device
    context_len: int
    vocab_size: int
    kernels: PagedAttention | None

    @torch.inference_mode()
    def of_passes(
        self,
        run: RunPass,
        layers: Iterable[nn.Module],
        cache: PagedKVCache,
        begin_pass: Callable[[int], None],
    ) -> str | None:
        """Run the same tokens in passes of different rows.

        Args:
            run: runs a pass with ``cache``.
            layers: the decoder layers.
            cache: without tensors; it has some during the proof.
            begin_pass: called before each pass with the number of its rows.

        Returns:
            The first pass that gives a row other bits than the pass over the whole sequence, and
            the layer where it begins; None: there is none.
        """
        states: list[Tensor] = []

        def keep(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            states.append(rows_of(output))

        length = min(PASS_LENGTH, self.context_len)
        requests = self._requests(length)
        fill_cache(cache, self.kv_shape, requests.num_slots, self.dtype, self.device)
        hooks = [layer.register_forward_hook(keep) for layer in layers]
        first: list[Tensor] = []
        variance = None
        try:
            tokens = random_tokens(self.vocab_size, (length,)).to(self.device)
            for one in self._passes(requests, tokens, self.vocab_size):
                states.clear()
                begin_pass(len(one.tokens))
                with recorded_launches() if one.is_recorded else nullcontext():
                    logits = run(one.tokens, one.plan, 0)
                results = [*states, logits.view(len(one.tokens), -1)]
                first = first or results
                variance = variance or _variance(one, results, first)
        finally:
            for hook in hooks:
                hook.remove()
            drop_tensors(cache)
        return variance

    def _passes(self, requests: TrialRequests, tokens: Tensor, limit: int) -> Iterator[_Pass]:
        """Yield the passes, the whole sequence first: the others read the keys that it wrote.

        Args:
            requests: over which they run.
            tokens: of the sequence.
            limit: all tokens are below it.
        """
        length = len(tokens)
        order = torch.arange(length, device=self.device)

        def chunks(name: str, *parts: tuple[int, int]) -> _Pass:
            ends = [(start, min(end, length)) for start, end in parts]
            places = torch.cat([order[slice(*part)] for part in ends])
            starts, widths = [a for a, _ in ends], [b - a for a, b in ends]
            return _Pass(name, tokens[places], requests.plan(starts, widths), places)

        last, middle = length - 1, length // 2
        yield chunks("whole", (0, length))
        yield chunks("a row alone", (last, length))
        yield chunks("a row alone", (middle, middle + 1))
        chunk = chunks(f"a chunk of {_CHUNK} rows", (max(0, length - _CHUNK), length))
        yield chunk
        for one in (chunk, chunks("whole", (0, length))):
            yield attrs.evolve(one, name=f"{one.name}, recorded", is_recorded=True)
        yield chunks("two requests together", (max(0, length - 8), length), (0, _SHORT))
        yield self._tree(requests, tokens, middle, limit)

    def _tree(self, requests: TrialRequests, tokens: Tensor, root: int, limit: int) -> _Pass:
        """Return the tokens from a root on as a branch, beside one of other tokens."""
        right = tokens[root : root + 1 + _SHORT // 2]
        wrong = (right[1:] + 1) % limit
        both = torch.cat((right[:1], torch.stack((wrong, right[1:]), dim=1).flatten()))
        depths = torch.arange(len(right), device=self.device)
        return _Pass("as a tree", both, requests.fork(root, both), root + depths, 2 * depths)

    @torch.inference_mode()
    def of_attention(self, kinds: Iterable[AttentionKind]) -> str | None:
        """Attend with random queries, keys and values: in tiles, by parts and tails, as a tree.

        Args:
            kinds: of the target's attention.

        Returns:
            The first way that gives a row other bits than the whole does; None: there is none.
        """
        length = min(KEYS, self.context_len)
        requests = self._requests(length)
        cache = PagedKVCache()
        one_layer = attrs.evolve(self.kv_shape, num_layers=1)
        fill_cache(cache, one_layer, requests.num_slots, self.dtype, self.device)
        for kind in sorted(kinds, key=str):
            generator = torch.Generator(self.device).manual_seed(0)
            how: Any = {"dtype": self.dtype, "device": self.device, "generator": generator}
            head_dim, kv_heads = self.kv_shape.head_dim, self.kv_shape.num_kv_heads
            q = torch.randn(length, kind.heads, head_dim, **how)
            k, v = torch.randn(2, length, kv_heads, head_dim, **how)
            sinks = torch.randn(kind.heads, **how) if kind.has_sinks else None
            scale = kind.key_dim**-0.5 if kind.scale is None else kind.scale
            form = AttentionForm(scale, kind.window, kind.softcap, sinks)
            whole = None
            for one in self._reads(requests, length):
                at = one.tokens
                out = one.plan.attend(cache, 0, q[at], k[at], v[at], form)
                whole = out if whole is None else whole
                found = _variance(one, [out], [whole])
                if found is not None:
                    window = f" in a window of {kind.window}" if kind.window else ""
                    return f"attention over {length} keys{window}, {one.name}"
        return None

    def _reads(self, requests: TrialRequests, length: int) -> Iterator[_Pass]:
        """Yield the ways to read the context; the tokens are places in it."""
        order = torch.arange(length, device=self.device)
        for one in self._passes(requests, order, length):
            if one.is_recorded:
                continue  # attention is the same there
            yield one
            if one.name == "whole" and length > _TILED:
                start = length - _TILED
                plan = requests.plan((start,), (_TILED,))
                yield _Pass(f"a chunk of {_TILED} rows", order[start:], plan, order[start:])

    def _requests(self, length: int) -> TrialRequests:
        room = length + _SHORT + 2
        return TrialRequests(2, room, length, self.context_len, self.device, self.kernels)


def _variance(one: _Pass, results: Sequence[Tensor], first: Sequence[Tensor]) -> str | None:
    """Return where a pass gives a row other bits than the first pass; None if nowhere.

    Args:
        results: of the layers and the head, by row.
        first: those of the whole sequence.
    """
    for number, (found, whole) in enumerate(zip(results, first, strict=True)):
        rows = found if one.rows is None else found[one.rows]
        if not torch.equal(rows, whole[one.places]):
            last = len(results) - 1
            place = f"from layer {number} on" if number < last else "after the last layer"
            return f"{one.name}: {place}"
    return None
