"""Rotary frequencies that depend on a sequence's length, chosen for each row.

With longrope and dynamic scaling, transformers takes the frequencies of a whole pass from its
longest position. A token would depend on the batch, the chunk size and the draft. Here each row
has the frequencies that ``generate`` gives it on that prompt alone. ``generate`` reads the prompt
in one pass, so a row of the prompt has those of the prompt's length. Then it goes token by token,
so a later row has those of the length that ends with it. Keys keep the rotation with which they
were written.

Some models (Phi-3) compute all keys anew with the long factors as soon as a sequence outgrows the
short ones. The scheduler does so too (``LengthRule.recomputes``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from specplug.errors import CheckpointError

NEVER = 1 << 60
"""A length that no sequence reaches."""
_ROUNDING = 1e-6
"""Tolerance of an angle, a position: kernels differ in the last bit of a float32 power."""


_SINCE = 5, 20
"""The version of transformers whose rotary modules take frequencies by row, and whose ``generate``
has the rule of ``LengthRule.recomputes``."""


@attrs.frozen(kw_only=True)
class LengthRule:
    """The rule that gives a sequence of some length its set of frequencies.

    Attributes:
        limit: sequences of up to so many tokens have the first set.
        num_sets: number of sets. Each token above the limit takes the next set, up to the last.
        recomputes: whether a sequence that outgrows the limit is computed anew from its start.
    """

    limit: int = NEVER
    num_sets: int = 1
    recomputes: bool = False

    def set_of(self, length: int) -> int:
        """Return the number of the set for a sequence of this length."""
        return min(max(length - self.limit, 0), self.num_sets - 1)


FIXED = LengthRule()
"""The rule of a model whose frequencies are always the same."""


class RowwiseRotary(nn.Module):
    """A rotary embedding of transformers, with frequencies by row.

    Args:
        inner: the module, which turns frequencies into cos and sin.
        tables: [sets, D / 2] float32 by the name of the buffer that they replace.
        rows: gives the set of each row of the running pass.
    """

    def __init__(self, inner: nn.Module, tables: Mapping[str, Tensor], rows: _Rows) -> None:
        super().__init__()
        self.inner = inner
        self._body = inspect.unwrap(type(inner).forward)
        self._rows = rows
        self._names = tuple(tables)
        for name, table in tables.items():
            self.register_buffer(f"table_{name}", table, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor, *layer_type: Any, **named: Any) -> Any:
        """Compute what the module does, for [1, R] positions with a set of frequencies each."""
        sets = self._rows.sets(position_ids)
        for name in self._names:
            # The instance's own dictionary hides the buffer.
            self.inner.__dict__[name] = getattr(self, f"table_{name}")[sets]
        return self._body(self.inner, x, position_ids, *layer_type, **named)

    def forget(self) -> None:
        """Drop the frequencies of the last pass."""
        for name in self._names:
            self.inner.__dict__.pop(name, None)


class _Rows:
    """The lengths that set the frequencies of the running pass's rows; shared by all modules."""

    def __init__(self, rule: LengthRule) -> None:
        self.rule = rule
        self.lengths: Tensor | None = None

    def sets(self, position_ids: Tensor) -> Tensor:
        """Return the set of each row, [1, R] int64."""
        lengths = position_ids.view(-1, position_ids.shape[-1])[:1] + 1
        if self.lengths is not None:
            lengths = self.lengths.unsqueeze(0)
        return (lengths - self.rule.limit).clamp(0, self.rule.num_sets - 1)


class RotaryByLength:
    """Replaces a target's rotary modules by rowwise ones, where frequencies depend on the length.

    Args:
        model: a causal LM of transformers; changed in place.

    Attributes:
        rule: of all rotary modules; ``FIXED`` if none depends on the length.
        context_len: tokens of the longest sequence.

    Raises:
        CheckpointError: the frequencies cannot be chosen by row.
    """

    def __init__(self, model: nn.Module) -> None:
        config: Any = model.config.get_text_config()  # type: ignore[operator, union-attr]
        self.context_len: int = config.max_position_embeddings
        found = [
            (parent, name, child, scaled)
            for parent in list(model.modules())
            for name, child in list(parent.named_children())
            if (scaled := scaled_parts(child))
        ]
        kinds = {_limits(child, part) for _, _, child, scaled in found for part in scaled}
        self.rule = FIXED
        self._rows = _Rows(FIXED)
        if not kinds:
            return
        if len(kinds) > 1:
            raise CheckpointError(
                f"{type(model).__name__}: its layers change their rotary frequencies at different "
                f"lengths, {sorted(kinds)}; expected one rule: choose another model"
            )
        limit, self.context_len = kinds.pop()
        if self.context_len <= limit:
            return  # no sequence is longer
        _check_transformers(type(model).__name__)
        longrope = not any("dynamic" in kind for _, _, _, s in found for kind in s.values())
        self.rule = self._rows.rule = LengthRule(
            limit=limit,
            num_sets=2 if longrope else self.context_len - limit + 1,
            recomputes=longrope and _recomputes(model, limit),
        )
        for parent, name, child, scaled in found:
            tables = {_buffer(part): self._table(child, part) for part in scaled}
            rowwise = RowwiseRotary(child, tables, self._rows)
            self._prove(rowwise, scaled)
            setattr(parent, name, rowwise)

    def begin(self, lengths: Tensor | None) -> None:
        """Set the lengths [R] int64 of the next pass's rows; None: each by its position alone."""
        self._rows.lengths = lengths

    def _table(self, module: Any, part: str | None) -> Tensor:
        """Compute the sets of a module, as its own update does."""
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        kind = types_of(module)[part]
        init: Callable[..., Any] = ROPE_INIT_FUNCTIONS[kind]
        layer = {} if part is None else {"layer_type": part}
        original = getattr(module, _buffer(part).replace("inv_freq", "original_inv_freq"))
        later = torch.arange(self.rule.num_sets - 1) + self.rule.limit + 1
        if "dynamic" in kind:
            table, _ = init(module.config, None, seq_len=later.unsqueeze(1), **layer)
        else:
            table = init(module.config, None, seq_len=self.rule.limit + 1, **layer)[0].unsqueeze(0)
        original = original.detach().float()
        return torch.cat((original.unsqueeze(0), table.to(original.device)))

    @torch.inference_mode()
    def _prove(self, rowwise: RowwiseRotary, scaled: Mapping[str | None, str]) -> None:
        """Compare with the module's own results for one sequence a pass."""
        device = next(rowwise.buffers()).device
        limit, x = self.rule.limit, torch.empty(0, dtype=torch.float32, device=device)
        lengths = sorted({1, limit, limit + 1, self.context_len})
        positions = [torch.tensor([[n // 3, n - 1]], device=device) for n in lengths]
        for part in scaled:
            layer = () if part is None else (part,)
            own = [_as_real(rowwise.inner(x, at, *layer)) for at in positions]
            self.begin(torch.tensor(lengths, device=device).repeat_interleave(2))
            try:
                found = _as_real(rowwise(x, torch.cat(positions, dim=1), *layer))
            except (RuntimeError, TypeError, ValueError) as error:
                raise CheckpointError(_refusal(rowwise.inner)) from error
            finally:
                self.begin(None)
                rowwise.forget()
            for i, expected in enumerate(own):
                tolerance = 1e-5 + _ROUNDING * lengths[i]
                rows = found[..., 2 * i : 2 * i + 2, :]
                if rows.shape != expected.shape or (rows - expected).abs().max() > tolerance:
                    raise CheckpointError(_refusal(rowwise.inner))


def _refusal(module: nn.Module) -> str:
    return (
        f"{type(module).__name__} gives another result with frequencies by row, so tokens would "
        "depend on the batch; choose another model, or a later version of transformers"
    )


def _as_real(output: Any) -> Tensor:
    """Stack a rotary module's output, cos and sin or complex, along a new first axis."""
    parts = output if isinstance(output, tuple) else (output.real, output.imag)
    return torch.stack([part.double() for part in parts])


def types_of(module: Any) -> Mapping[str | None, str]:
    """Return a module's rotary type by layer type; by None if all layers have the same."""
    types = getattr(module, "rope_type", None)
    if isinstance(types, str):
        return {None: types}
    return types if isinstance(types, dict) else {}


def scaled_parts(module: Any) -> dict[str | None, str]:
    """Return a module's types whose frequencies depend on the length, as ``types_of`` does."""
    types = types_of(module).items()
    return {part: kind for part, kind in types if "dynamic" in kind or kind == "longrope"}


def _limits(module: Any, part: str | None) -> tuple[int, int]:
    """Return the length up to which the first set is used, and the longest length."""
    rope, longest = module.config.rope_parameters, module.config.max_position_embeddings
    rope = rope if part is None else rope[part]
    if "dynamic" in types_of(module)[part]:
        return longest, int(longest * max(1.0, rope["factor"]))
    return rope["original_max_position_embeddings"], longest


def _buffer(part: str | None) -> str:
    return "inv_freq" if part is None else f"{part}_inv_freq"


def _recomputes(model: Any, limit: int) -> bool:
    """Return whether the model's ``generate`` computes a sequence anew when it outgrows the
    limit."""
    from transformers import DynamicCache

    past, nothing = DynamicCache(), torch.zeros(1, 1, limit, 1, device=model.device)
    past.update(nothing, nothing, 0)
    ids = torch.zeros(1, limit + 1, dtype=torch.int64, device=model.device)
    inputs = model.prepare_inputs_for_generation(
        ids,
        next_sequence_length=1,
        past_key_values=past,
        attention_mask=torch.ones_like(ids),
        use_cache=True,
    )
    return bool(inputs["input_ids"].shape[1] > 1)


def _check_transformers(model: str) -> None:
    import transformers

    found = transformers.__version__
    if tuple(map(int, found.split(".")[:2])) < _SINCE:
        raise CheckpointError(
            f"{model}: its rotary frequencies depend on a sequence's length, which transformers "
            f"{found} does otherwise; expected {'.'.join(map(str, _SINCE))} or newer: "
            "pip install -U transformers"
        )
