"""Checks of what hooks return: types, dtypes, shapes and devices; values under DEBUG.

Each check ends in ``PluginGuard.refuse``, a ``PluginError`` that names the plugin and the hook.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor

from specplug.algorithm import SpecConfig
from specplug.debug import DEBUG
from specplug.errors import PluginError
from specplug.speculative.draft import Draft, DraftInput, described
from specplug.speculative.draft_state import StateTensor, check_state
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.target_output import TargetOutput
from specplug.speculative.verify import VerifyOutput

Result = TypeVar("Result")


def check_type(
    plugins: PluginGuard, hook: str, result: Any, expected: type[Result], called: str
) -> Result:
    """Return ``result`` if it is of the type ``expected``, which messages call ``called``."""
    if not isinstance(result, expected):
        found = "None" if result is None else f"a value {described(result)}"
        plugins.refuse(hook, f"returned {found}", called)
    checked: Result = result
    return checked


def check_draft(
    plugins: PluginGuard, found: Any, config: SpecConfig, roots: Tensor, vocab_size: int
) -> Draft:
    """Return what ``propose`` gave if it is a draft for as many requests as ``roots`` [bs] int64
    has, within the run's settings."""
    hook = "propose"
    draft = check_type(plugins, hook, found, Draft, "a specplug.Draft")
    try:
        draft.check(values=DEBUG)
    except ValueError as error:
        plugins.refuse(hook, f"drafted {error}", fix="make it by Draft.chain or Draft.tree")
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
        _check_tokens(plugins, draft, roots, vocab_size)
    return draft


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
    output: TargetOutput,
    num_steps: int,
    vocab_size: int,
) -> VerifyOutput:
    """Return what ``verify`` gave, cut to a path of ``draft`` from each root.

    Args:
        output: as the plugins leave it, with what they have added to ``per_node``.
    """
    hook = "verify"
    verified = check_type(plugins, hook, found, VerifyOutput, "a specplug.VerifyOutput, or None")
    try:
        verified.check(draft, num_steps + 1, vocab_size - 1, values=DEBUG)
    except ValueError as error:
        plugins.refuse(hook, f"returned {error}")
    what = "target_output.per_node"
    check_tensors(plugins, hook, what, output.per_node, draft.total, draft.tokens)
    return verified.bounded(draft, vocab_size - 1)


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
    draft_input = check_type(plugins, hook, made, DraftInput, "a specplug.DraftInput")
    tokens = {"bonus_tokens": draft_input.bonus_tokens}
    check_tensors(plugins, hook, "a draft input", tokens, size, like)
    check_tensors(plugins, hook, "a state", draft_input.state, size, like, may_lack=True)
    if spec:
        try:
            check_state(spec, draft_input)
        except PluginError as error:
            plugins.refuse(hook, f"gave a wrong state: {error}")
    return draft_input


def check_tensors(
    plugins: PluginGuard,
    hook: str,
    what: str,
    found: Any,
    size: int,
    like: Tensor,
    *,
    may_lack: bool = False,
) -> None:
    """Refuse all but named tensors of leading ``size``, on the device of ``like``; None in the
    place of a tensor if it ``may_lack``."""
    if not isinstance(found, Mapping):
        plugins.refuse(hook, f"gave {what} {described(found)}", "a mapping of named tensors")
    for name, tensor in found.items():
        if tensor is None and may_lack:
            continue
        if not (
            isinstance(name, str)
            and isinstance(tensor, Tensor)
            and tensor.dim()
            and len(tensor) == size
            and tensor.device == like.device
        ):
            expected = f"a tensor of leading size {size} on {like.device}"
            plugins.refuse(hook, f"gave {what} {name!r} {described(tensor)}", expected)
