"""Checks of what hooks return: types, dtypes, shapes and devices; values under DEBUG.

A failed check ends in ``PluginGuard.refuse``, a ``PluginError`` that names the plugin and the hook.

The engine takes values from a plugin, and no methods. Of what a hook returns the fields are read,
each once, and an object of the core's own type is made of them (``rebuilt``): a subclass, or an
object whose methods were replaced, is of no effect. Tensors are torch's own (``is_dense``).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from operator import attrgetter
from typing import Any, TypeVar

import attrs
from torch import Tensor

from specplug.algorithm import SpecConfig
from specplug.debug import DEBUG
from specplug.errors import PluginError, shown
from specplug.speculative.draft import Draft, DraftInput, described, is_dense
from specplug.speculative.draft_state import StateTensor, check_state
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.target_output import TargetOutput
from specplug.speculative.verify import VerifyOutput

Result = TypeVar("Result")
Made = TypeVar("Made", bound=attrs.AttrsInstance)


def check_type(
    plugins: PluginGuard, hook: str, result: Any, expected: type[Result], called: str
) -> Result:
    """Return ``result`` if it is of the type ``expected``, which messages call ``called``."""
    if type(result) is not expected and not plugins.guard(hook, isinstance, result, expected):
        found = "None" if result is None else f"a value {described(result)}"
        plugins.refuse(hook, f"returned {found}", called)
    checked: Result = result
    return checked


def rebuilt(plugins: PluginGuard, hook: str, found: Any, kind: type[Made], called: str) -> Made:
    """Return an object of the type ``kind`` itself with the fields of what a hook gave, if it gave
    a ``kind``, which messages call ``called``."""
    check_type(plugins, hook, found, kind, called)
    names = [field.name for field in attrs.fields(kind) if field.init]
    values = plugins.guard(hook, attrgetter(*names), found)
    return plugins.guard(hook, kind, **dict(zip(names, values, strict=True)))


def check_draft(
    plugins: PluginGuard, found: Any, config: SpecConfig, roots: Tensor, vocab_size: int
) -> Draft:
    """Return what ``propose`` gave if it is a draft for as many requests as ``roots`` [bs] int64
    has, within the run's settings. Its tensors are still the plugin's."""
    hook = "propose"
    draft = rebuilt(plugins, hook, found, Draft, "a specplug.Draft")
    if isinstance(draft.widths, tuple | list):
        draft.widths = plugins.guard(hook, tuple, draft.widths)
    _check_form(plugins, draft, values=False)
    size, width = draft.tokens.shape
    most, steps = config.num_draft_tokens, config.num_steps
    if size != len(roots) or width > most or draft.depth > steps:
        plugins.refuse(
            hook,
            f"drafted {width} nodes, {draft.depth} deep, for {size} requests",
            f"at most num_draft_tokens={most} nodes, num_steps={steps} deep, for {len(roots)}",
            "draft less, or raise these in validate_config()",
        )
    if draft.tokens.device != roots.device:
        drafted = f"drafted tokens {described(draft.tokens)}"
        plugins.refuse(hook, drafted, f"them on runtime.device, {roots.device}")
    if DEBUG:
        _check_form(plugins, draft, values=True)
        _check_tokens(plugins, draft, roots, vocab_size)
    return draft


def _check_form(plugins: PluginGuard, draft: Draft, *, values: bool) -> None:
    try:
        draft.check(values=values)
    except ValueError as error:
        plugins.refuse("propose", f"drafted {error}", fix="make it by Draft.chain or Draft.tree")


def _check_tokens(plugins: PluginGuard, draft: Draft, roots: Tensor, vocab_size: int) -> None:
    first, tokens = draft.tokens[:, 0].tolist(), draft.flatten(draft.tokens).tolist()
    if first != roots.tolist():
        expected = f"draft_input.bonus_tokens, {roots.tolist()}"
        plugins.refuse("propose", f"drafted from the roots {first}", expected)
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        found = f"drafted the tokens {outside}"
        plugins.refuse("propose", found, f"tokens from 0 to {vocab_size - 1}")


def check_verified(
    plugins: PluginGuard,
    found: Any,
    draft: Draft,
    predict: Tensor,
    num_steps: int,
) -> VerifyOutput:
    """Return what ``verify`` gave, cut to a path of ``draft`` from each root along which each token
    is the target's own.

    Args:
        predict: [T] int64, the engine's own, and not what the plugins were lent.
    """
    hook = "verify"
    verified = rebuilt(plugins, hook, found, VerifyOutput, "a specplug.VerifyOutput, or None")
    try:
        verified.check(draft, predict, num_steps + 1, values=DEBUG)
    except ValueError as error:
        plugins.refuse(hook, f"returned {error}")
    return verified.bounded(draft, predict)


def check_per_node(
    plugins: PluginGuard, output: TargetOutput, names: Collection[str], draft: Draft
) -> dict[str, Tensor]:
    """Return the tensors of ``output.per_node`` as ``verify`` has left it, those under other
    ``names`` in memory of their own size, so that compaction can copy their rows."""
    hook = "verify"
    found = plugins.guard(hook, getattr, output, "per_node")
    what = "target_output.per_node"
    kept = check_tensors(plugins, hook, what, found, draft.total, draft.tokens)
    added = {n: t for n, t in kept.items() if t is not None and n not in names}
    return {n: plugins.guard(hook, Tensor.contiguous, tensor) for n, tensor in added.items()}


def check_draft_input(
    plugins: PluginGuard,
    hook: str,
    made: Any,
    size: int,
    like: Tensor,
    spec: Mapping[str, StateTensor],
) -> DraftInput:
    """Return ``made`` if it is a draft input of ``size`` requests, on the device of ``like``, with
    the state that the worker declares in ``spec``."""
    draft_input = rebuilt(plugins, hook, made, DraftInput, "a specplug.DraftInput")
    tokens = {"bonus_tokens": draft_input.bonus_tokens}
    check_tensors(plugins, hook, "a draft input", tokens, size, like)
    check_integers(plugins, hook, "gave bonus_tokens", draft_input.bonus_tokens, like)
    draft_input.state = check_tensors(
        plugins, hook, "a state", draft_input.state, size, like, may_lack=True
    )
    if spec:
        try:
            check_state(spec, draft_input)
        except PluginError as error:
            plugins.refuse(hook, f"gave a wrong state: {error}")
    return draft_input


def check_integers(plugins: PluginGuard, hook: str, what: str, found: Any, like: Tensor) -> None:
    """Refuse all but a tensor [bs] int64 as ``like`` is one."""
    form = like.shape, like.dtype, like.device
    if not is_dense(found) or (found.shape, found.dtype, found.device) != form:
        plugins.refuse(hook, f"{what} {described(found)}", described(like))


def check_tensors(
    plugins: PluginGuard,
    hook: str,
    what: str,
    found: Any,
    size: int,
    like: Tensor,
    *,
    may_lack: bool = False,
) -> dict[str, Tensor | None]:
    """Return the named tensors of a mapping, in one of the core's own, if each is of leading
    ``size`` and on the device of ``like``; None may stand for a tensor if it ``may_lack``."""
    if not isinstance(found, Mapping):
        plugins.refuse(hook, f"gave {what} {described(found)}", "a mapping of named tensors")
    read: dict[Any, Any] = plugins.guard(hook, dict, found)
    kept: dict[str, Tensor | None] = {}
    for name, tensor in read.items():
        if not issubclass(type(name), str):
            plugins.refuse(hook, f"gave {what} named {shown(name)}", "a string")
        kept[str.__str__(name)] = tensor  # of str itself, if it was a member of a StrEnum
        if tensor is None and may_lack:
            continue
        if not (
            is_dense(tensor)
            and tensor.dim()
            and len(tensor) == size
            and tensor.device == like.device
        ):
            expected = f"a tensor of leading size {size} on {like.device}"
            plugins.refuse(hook, f"gave {what} {shown(name)} {described(tensor)}", expected)
    return kept
