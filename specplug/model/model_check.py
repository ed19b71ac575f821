"""Check that our passes give a model's own logits, when it is loaded.

transformers' models differ in more than a list of architectures can hold. So each loaded model runs
a short sequence through its own attention and masks, and then through ours.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor, nn

from specplug.errors import CheckpointError, SpecplugError, first_line
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.kv.tensors import KVShape, drop_tensors, fill_cache
from specplug.model.attention import IMPLEMENTATION, AttentionKind, attention, running
from specplug.model.trials import RunPass, TrialRequests, random_tokens, rows_of
from specplug.speculative.paged_plan import PagedKVCache, PagedPlan

if TYPE_CHECKING:
    from specplug.kernels.paged_attention_kernels import PagedAttention

_WATCHED = "specplug-watched"
_LENGTH = 20
_TOLERANCE = {torch.float64: 1e-3, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.2
_SHARE_OF_ROWS = 0.25
"""Rows that may differ in half precision: where two experts tie, a row may be routed otherwise."""
_ATTENTION_TOLERANCE = 1e-3
"""Tolerance of a single attention call, which is compared in float32 or better."""
_CHECK: ContextVar[ModelCheck] = ContextVar("model_check")


@attrs.frozen(eq=False)
class _Pass:
    """One of our passes, and the rows of the model's own logits that it must reproduce."""

    name: str
    tokens: Tensor
    plan: PagedPlan
    expected: Tensor


class ModelCheck:
    """Runs two short sequences through a model's own attention and keeps the logits.

    The two share a prefix, so that they are also two branches of a tree. Every call of the
    attention is compared with ours for the same queries, keys and values, and every mask with those
    of our plans, also at positions that the sequences do not reach.

    Args:
        path: of the model, for messages.
        model: of transformers, loaded with our attention, on its device, not changed yet.
        layers: its decoder layers.
        context_len: of the model.
        begin_pass: called before each pass with the number of its rows and the lengths [T] that
            set the rotary frequencies of a sequence.
        kernels: with which our passes attend on a GPU; None: torch.
        cpu_kernels: with which they attend on the CPU; None: torch.

    Attributes:
        kv_shape: of the cache, as observed in the attention calls.
        attentions: the kinds of attention that the calls are of.

    Raises:
        CheckpointError: our attention cannot replace the model's.
    """

    def __init__(
        self,
        path: str,
        model: Any,
        layers: Iterable[nn.Module],
        context_len: int,
        begin_pass: Callable[[int, Tensor], None],
        kernels: PagedAttention | None = None,
        cpu_kernels: CPUKernels | None = None,
    ) -> None:
        self._name = f"model {path!r} ({type(model).__name__})"
        self._device: torch.device = model.device
        self._dtype: torch.dtype = model.dtype
        self._context_len = context_len
        self._length = min(_LENGTH, context_len)
        self._begin_pass = begin_pass
        self._fork = self._length // 2 + 1
        self._tokens = self._make_tokens(model.config.get_text_config().vocab_size)
        self._masks: dict[int, tuple[Tensor, Callable[..., Tensor]]] = {}
        self._checked: set[tuple[int, int | None]] = set()
        self._shapes: dict[int, tuple[int, int]] = {}
        self._states: list[Tensor] = []
        self._hooks = [layer.register_forward_hook(self._keep_state) for layer in layers]
        # A tree needs more slots than a sequence.
        self._requests = TrialRequests(
            2, 2 * self._length, self._length, context_len, self._device, kernels, cpu_kernels
        )
        self.attentions: set[AttentionKind] = set()
        self._kept = _windows_of_cache(model.config.get_text_config())
        self._lengths = torch.full((self._length,), self._length, device=self._device)
        self._own_logits = self._run_own(model)
        self._own_states, self._states = self._states, []
        self.kv_shape = self._kv_shape()

    def _make_tokens(self, vocab_size: int) -> Tensor:
        """Return the token ids of two sequences, [2, T] int64."""
        tokens = random_tokens(vocab_size, (2, self._length))
        tokens[1, : self._fork] = tokens[0, : self._fork]
        tokens[1, self._fork :] += tokens[0, self._fork :] == tokens[1, self._fork :]
        return tokens.clamp_(max=vocab_size - 1).to(self._device)

    # The model's own pass

    @torch.inference_mode()
    def _run_own(self, model: Any) -> Tensor:
        """Run the model's own forward; return its scores [2 * T, V]."""
        _register()
        model.set_attn_implementation(_WATCHED)
        before = _CHECK.set(self)
        try:
            self._begin_pass(2 * self._length, self._lengths)
            logits: Tensor = model(input_ids=self._tokens, use_cache=False).logits
        except (SpecplugError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self._refusal(f"its own forward fails: {first_line(error)}") from error
        finally:
            _CHECK.reset(before)
            model.set_attn_implementation(IMPLEMENTATION)
        if logits.isnan().any():
            raise CheckpointError(
                f"{self._name}: its own logits are not numbers in {self._dtype}; choose another "
                "dtype, or look for what is wrong with the checkpoint"
            )
        self._masks.clear()
        return _scores(logits.flatten(0, 1))

    def keep_mask(self, mask: Tensor, function: Callable[..., Tensor]) -> None:
        """Keep a mask that transformers made, and the function that says which key a query sees."""
        self._masks[mask.untyped_storage().data_ptr()] = mask, function

    def watch(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        arguments: dict[str, Any],
    ) -> tuple[Tensor, Tensor | None]:
        """Run the model's own attention and compare ours with it."""
        what = f"{type(module).__name__} of layer {getattr(module, 'layer_idx', '?')}"
        layer = getattr(module, "layer_idx", None)
        if not isinstance(layer, int):
            raise self._refusal(f"{what}: the attention has no layer_idx to find its cache by")
        if key.shape[2] != query.shape[2] or len(query) != 2:
            raise self._refusal(f"{what}: its keys are not those of the sequence")
        window = arguments.get("sliding_window")
        self._check_mask(what, mask, window)
        kept = self._kept.get(layer, self._context_len)
        if min(window or self._context_len, self._context_len) > kept:
            raise self._refusal(
                f"{what} sees all tokens before it, and transformers' own cache forgets those more "
                f"than {kept} before: its tokens depend on whether it has a cache"
            )
        own_attention = _own_attention(module)
        kind = AttentionKind.of_call(query.shape[1], key.shape[3], arguments)
        self.attentions.add(kind)
        size = key.shape[1], max(key.shape[3], value.shape[3])
        if self._shapes.setdefault(layer, size) != size:
            raise self._refusal(f"{what} has two caches of different shape")
        own = own_attention(module, query, key, value, mask, **arguments)
        precise, expected = (query, key, value), own[0]
        if query.dtype.itemsize < 4:
            precise = query.float(), key.float(), value.float()
            expected = own_attention(module, *precise, mask, **arguments)[0]
        found = self._ours(module, *precise, arguments)
        gap = _gaps(found.flatten(2), expected.reshape(found.shape).flatten(2)).max().item()
        if not gap <= _ATTENTION_TOLERANCE:
            known = "s_aux", "position_ids"
            given = [k for k, v in arguments.items() if isinstance(v, Tensor) and k not in known]
            told = f"; it is also given {', '.join(given)}" if given else ""
            raise self._refusal(f"{what} differs from ours by {gap:.2g}{told}")
        return own[0], own[1]

    def _ours(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, arguments: Any
    ) -> Tensor:
        """Compute our attention for the same queries, keys and values: [2, T, H, D]."""
        layer: int = module.layer_idx  # type: ignore[assignment]
        shape = KVShape(1, *self._shapes[layer])
        one = PagedKVCache()
        fill_cache(one, shape, self._requests.num_slots, key.dtype, self._device)
        cache = PagedKVCache(one.keys * (layer + 1), one.values * (layer + 1))
        with running(self._requests.plan((0, 0), (self._length,) * 2), cache):
            q, k, v = (t.transpose(0, 1).flatten(1, 2).unsqueeze(0) for t in (query, key, value))
            found, _ = attention(module, q, k, v, None, **arguments)
        return found.view(2, self._length, *found.shape[2:])

    def _check_mask(self, what: str, mask: Tensor | None, window: int | None) -> None:
        """Compare a mask of the model's own pass with that of our plans."""
        if mask is None:
            raise self._refusal(f"{what} also sees the tokens after each token")
        storage = mask.untyped_storage().data_ptr()
        if storage not in self._masks:
            raise self._refusal(f"{what} makes its own mask")
        if (storage, window) in self._checked:
            return
        self._checked.add((storage, window))
        _, function = self._masks[storage]
        visible = mask if mask.dtype is torch.bool else mask > torch.finfo(mask.dtype).min / 2
        near = self._requests.plan((0, 0), (self._length,) * 2).visible(window)
        ours = f"with a window of {window}" if window else "without a window"
        if not torch.equal(visible.expand(2, 1, -1, -1).squeeze(1), near):
            raise self._refusal(f"{what} is called {ours}, but its mask differs")
        try:
            same = self._same_far_away(function, window)
        except (IndexError, RuntimeError):
            same = False
        if not same:
            raise self._refusal(
                f"{what} is called {ours}, but its mask differs at positions after {self._length}"
            )

    def _same_far_away(self, function: Callable[..., Tensor], window: int | None) -> bool:
        """Return whether a mask equals that of a window, at positions up to the context's end."""
        last, pairs = self._context_len - 1, []
        near = window or 1
        for query in {last, last // 2, min(near, last), min(2 * near, last), min(near + 1, last)}:
            steps = {1 << n for n in range(query.bit_length())} | {
                near - 1,
                near,
                near + 1,
                query,
            }
            pairs += [(query, query - d) for d in (-1, -near, 0, *steps) if 0 <= query - d <= last]
        queries, keys = torch.tensor(pairs, device=self._device).unbind(1)
        zero = torch.zeros((), dtype=torch.int64, device=self._device)
        shown = function(zero, zero, queries, keys).expand(len(pairs))
        expected = keys <= queries
        if window:
            expected &= queries - keys < window
        return torch.equal(shown, expected)

    def _kv_shape(self) -> KVShape:
        sizes = set(self._shapes.values())
        if not sizes:
            raise self._refusal("its layers have no attention through the interface")
        if len(sizes) > 1:
            told = ", ".join(f"{heads} of size {dim}" for heads, dim in sorted(sizes))
            raise self._refusal(f"its layers have key heads of different shapes: {told}")
        return KVShape(max(self._shapes) + 1, *sizes.pop())

    # Ours

    @torch.inference_mode()
    def compare(self, run: RunPass, cache: PagedKVCache) -> None:
        """Run the same tokens in all the ways that the engine does.

        Args:
            run: runs a pass with ``cache``.
            cache: without tensors; it has some during the comparison.

        Raises:
            CheckpointError: a pass gives other logits than the model's own.
        """
        fill_cache(cache, self.kv_shape, self._requests.num_slots, self._dtype, self._device)
        for one in self._passes():
            self._states.clear()
            try:
                self._begin_pass(len(one.tokens), self._lengths)
                rows = torch.arange(len(one.tokens), device=self._device)
                found = run(one.tokens, one.plan, 0 if one.plan.mask is not None else rows)
            except (SpecplugError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise self._refusal(f"{one.name}: our pass fails: {first_line(error)}") from error
            self._compare(one, found)
        drop_tensors(cache)
        for hook in self._hooks:
            hook.remove()

    def _passes(self) -> Iterator[_Pass]:
        """Yield the passes, each after those that write what it reads from the cache."""
        length = self._length
        middle = length * 5 // 8
        first, second = self._tokens
        order = torch.arange(2 * length, device=self._device)
        yield _Pass("whole", first, self._requests.plan((0,), (length,)), order[:length])
        yield _Pass(
            "in chunks",
            first[middle:],
            self._requests.plan((middle,), (length - middle,)),
            order[middle:length],
        )
        widths = length - middle, length - 1
        yield _Pass(
            "two requests together",
            torch.cat((first[middle:], second[: widths[1]])),
            self._requests.plan((middle, 0), widths),
            torch.cat((order[middle:length], order[length : length + widths[1]])),
        )
        yield self._tree()

    def _tree(self) -> _Pass:
        """Return both sequences as branches from the last token that they share."""
        root, length = self._fork - 1, self._length
        after = ((branch, place) for place in range(self._fork, length) for branch in (0, 1))
        nodes = [(0, root), *after]
        tokens = torch.stack([self._tokens[node] for node in nodes])
        plan = self._requests.fork(root, tokens)
        rows = [branch * length + place for branch, place in nodes]
        return _Pass("as a tree", tokens, plan, torch.tensor(rows, device=self._device))

    def _compare(self, one: _Pass, found: Tensor) -> None:
        expected = self._own_logits[one.expected]
        found = _scores(found)
        if found.shape != expected.shape:
            shapes = f"{tuple(found.shape)} instead of {tuple(expected.shape)}"
            raise self._refusal(f"{one.name}: logits of shape {shapes}")
        if not self._differ(found, expected):
            return
        gap = _gaps(found, expected).max().item()
        where = next(
            (
                f"from layer {number} on"
                for number, (own, ours) in enumerate(
                    zip(self._own_states, self._states, strict=False)
                )
                if self._differ(ours, own[one.expected])
            ),
            "after the last layer",
        )
        raise self._refusal(f"{one.name}: logits differ by {gap:.2g} of their size, {where}")

    def _differ(self, found: Tensor, expected: Tensor) -> bool:
        gaps = _gaps(found, expected)
        if self._dtype in _TOLERANCE:
            return not bool((gaps <= _TOLERANCE[self._dtype]).all())
        off = (gaps <= _HALF_TOLERANCE).logical_not()
        return off.sum().item() > _SHARE_OF_ROWS * len(off)

    def _keep_state(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._states.append(rows_of(output))

    def _refusal(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self._name}: {why}; expected what its own attention gives: choose another model, or "
            "skip_model_check=True if you know that it is right"
        )


def _scores(logits: Tensor) -> Tensor:
    """Return logits without a common offset, and with the lowest clamped."""
    scores = logits.float()
    scores = (scores - scores.amax(-1, keepdim=True)).clamp(min=-50)
    return scores - scores.mean(-1, keepdim=True)


def _gaps(found: Tensor, expected: Tensor) -> Tensor:
    """Return the distance of rows, relative to their size: […] from […, n]."""
    found, expected = found.float(), expected.float()
    size = torch.linalg.vector_norm(expected, dim=-1)
    gaps: Tensor = torch.linalg.vector_norm(found - expected, dim=-1)
    return gaps.div(size.clamp(min=0.1 * size.mean().item() + 1e-20))


def _windows_of_cache(config: Any) -> dict[int, int]:
    """Return the window of ``generate``'s cache for each layer whose cache has one."""
    from transformers import DynamicCache

    layers = DynamicCache(config=config).layers
    windows = {n: getattr(layer, "sliding_window", None) for n, layer in enumerate(layers)}
    return {n: window for n, window in windows.items() if window}


def _own_attention(module: nn.Module) -> Any:
    """Return the attention that the module calls by default."""
    eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
    if eager is None:
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        return ALL_ATTENTION_FUNCTIONS["sdpa"]
    return eager


def _watched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **arguments: Any,
) -> tuple[Tensor, Tensor | None]:
    return _CHECK.get().watch(module, query, key, value, attention_mask, arguments)


def _watched_mask(*, mask_function: Callable[..., Tensor], **arguments: Any) -> Tensor | None:
    from transformers.masking_utils import eager_mask

    mask: Tensor | None = eager_mask(mask_function=mask_function, **arguments)
    if mask is not None:
        _CHECK.get().keep_mask(mask, mask_function)
    return mask


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(_WATCHED, _watched_attention)
    AttentionMaskInterface.register(_WATCHED, _watched_mask)
