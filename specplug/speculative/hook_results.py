"""What hooks return, checked.

A result has the type, dtypes, shapes and device that ``hookspecs`` promises. Everything else is a
``PluginError`` that names the plugin, its distribution and version, and the hook. Values on the
device are bounded so that they can do no harm; with ``SPECPLUG_DEBUG=1`` they are read, and a wrong
one is told.

The engine takes values from a plugin, and no methods. Of what a hook returns the fields are read,
each once, and an object of the core's own type is made of them (``rebuilt``): a subclass, or an
object whose methods were replaced, is of no effect. Tensors are torch's own (``is_dense``).
Workers, future maps and trainers are the plugin's own objects: of these the type is checked at
most, and their methods are called under ``PluginGuard.guard``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

import attrs
import torch
from torch import Tensor

from specplug import debug
from specplug.errors import PluginError, shown
from specplug.speculative.draft import Draft, DraftInput, described, is_dense
from specplug.speculative.draft_plan import ForeseenDrafts
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.verify import TargetOutput, VerifyOutput

Result = TypeVar("Result")
Made = TypeVar("Made", bound=attrs.AttrsInstance)

_MOST_KNOWN = 1 << 40
"""Tokens that no text has."""


class Limits(NamedTuple):
    """What a draft may have.

    Attributes:
        nodes: N, the root included.
        depth: S.
        added: whether an algorithm grows a draft, by as much as its settings say.
    """

    nodes: int
    depth: int
    added: bool = False

    def __str__(self) -> str:
        """As messages tell them."""
        if self.added:
            return (
                f"at most {self.nodes} nodes, {self.depth} deep: num_draft_tokens - 1 nodes and "
                "num_steps levels added"
            )
        return f"at most num_draft_tokens={self.nodes} nodes, num_steps={self.depth} deep"


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
    names, read = _init_fields(kind)

    def remade() -> Made:
        return kind(**dict(zip(names, read(found), strict=True)))

    return plugins.guard(hook, remade)


@cache
def _init_fields(kind: type[attrs.AttrsInstance]) -> tuple[list[str], Callable[[Any], Any]]:
    """Return the names of what a type is made of, and what reads that of an object."""
    names = [field.name for field in attrs.fields(kind) if field.init]
    return names, attrgetter(*names)


def check_draft(
    plugins: PluginGuard, hook: str, found: Any, most: Limits, roots: Tensor, vocab_size: int
) -> Draft:
    """Return what ``hook`` gave, rooted, in tensors of the core's own, if it is a draft within
    ``most`` for as many requests as ``roots`` [bs] int64 has."""
    draft = rebuilt(plugins, hook, found, Draft, "a specplug.Draft")
    if isinstance(draft.widths, tuple | list):
        draft.widths = plugins.guard(hook, tuple, draft.widths)
    _check_form(plugins, hook, draft, values=False)
    size, width = draft.tokens.shape
    if size != len(roots) or width > most.nodes or draft.depth > most.depth:
        plugins.refuse(
            hook,
            f"drafted {width} nodes, {draft.depth} deep, for {size} requests",
            f"{most}, for {len(roots)}",
            "draft less, or raise these in validate_config()",
        )
    if draft.tokens.device != roots.device:
        drafted = f"drafted tokens {described(draft.tokens)}"
        plugins.refuse(hook, drafted, f"them on runtime.device, {roots.device}")
    if debug.DEBUG:
        _check_form(plugins, hook, draft, values=True)
        _check_tokens(plugins, hook, draft, roots, vocab_size)
    return draft.rooted(roots, vocab_size)


def check_foreseen(plugins: PluginGuard, foreseen: ForeseenDrafts, size: int) -> None:
    """Refuse what does not say for each of ``size`` requests what would be drafted."""
    hook, tokens, scores = "foresee_drafts", foreseen.tokens, foreseen.scores
    for name, tensor, dtype in (
        ("tokens", tokens, torch.int64),
        ("scores", scores, torch.float32),
    ):
        if not (is_dense(tensor) and tensor.is_cpu and tensor.dtype == dtype and tensor.dim() == 2):
            plugins.refuse(hook, f"gave {name} {described(tensor)}", f"[bs, D] {dtype} on the CPU")
    if tokens.shape != scores.shape or {len(tokens), len(foreseen.known)} != {size}:
        found = f"tokens {described(tokens)}, scores {described(scores)}"
        counts = f"{len(foreseen.known)} known"
        plugins.refuse(hook, f"gave {found} and {counts}", f"them of {size} requests")
    known = foreseen.known
    if not (
        set(map(type, known)) <= {int}
        and 0 <= min(known, default=0) <= max(known, default=0) < _MOST_KNOWN
    ):
        plugins.refuse(hook, f"gave known={shown(known)}", "numbers of tokens")


def _check_form(plugins: PluginGuard, hook: str, draft: Draft, *, values: bool) -> None:
    try:
        draft.check(values=values)
    except ValueError as error:
        plugins.refuse(hook, f"drafted {error}", fix="make it by Draft.chain or Draft.tree")


def _check_tokens(
    plugins: PluginGuard, hook: str, draft: Draft, roots: Tensor, vocab_size: int
) -> None:
    first, tokens = draft.tokens[:, 0].tolist(), draft.flatten(draft.tokens).tolist()
    if first != roots.tolist():
        expected = f"draft_input.bonus_tokens, {roots.tolist()}"
        plugins.refuse(hook, f"drafted from the roots {first}", expected)
    outside = [token for token in tokens if not 0 <= token < vocab_size]
    if outside:
        found = f"drafted the tokens {outside}"
        plugins.refuse(hook, found, f"tokens from 0 to {vocab_size - 1}")


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
        verified.check(draft, predict, num_steps + 1, values=debug.DEBUG)
    except ValueError as error:
        plugins.refuse(hook, f"returned {error}")
    return verified.bounded(draft, predict)


def check_per_node(
    plugins: PluginGuard, output: TargetOutput, names: Collection[str], draft: Draft
) -> dict[str, Tensor]:
    """Return what ``verify`` has added to ``output.per_node``, the tensors under none of the core's
    own ``names``: contiguous, so that compaction can copy their rows."""
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
    if type(draft_input.state) is dict and not draft_input.state:
        draft_input.state = {}
    else:
        draft_input.state = check_tensors(
            plugins, hook, "a state", draft_input.state, size, like, may_lack=True
        )
    if draft_input.host:
        draft_input.host = check_tensors(
            plugins, hook, "host", draft_input.host, size, like, may_lack=True, on_host=True
        )
    if draft_input.hindsight is not None:
        told = {"hindsight": draft_input.hindsight}
        check_tensors(plugins, hook, "a draft input", told, size, like)
        if draft_input.hindsight.dtype != torch.int8 or draft_input.hindsight.dim() != 2:
            found = described(draft_input.hindsight)
            plugins.refuse(hook, f"gave hindsight {found}", f"[{size}, W] of torch.int8")
    if spec:
        try:
            check_state(spec, draft_input)
        except PluginError as error:
            plugins.refuse(hook, f"gave a wrong state: {error}")
    return draft_input


def check_state(spec: Mapping[str, StateTensor], draft_input: DraftInput) -> None:
    """Refuse a draft input whose tensors are not as declared; what is not declared may be of any
    form, and what is absent is read as zeros.

    Raises:
        PluginError: what was found, and what was declared.
    """
    size, device = len(draft_input.bonus_tokens), draft_input.bonus_tokens.device
    for name, declared in spec.items():
        tensor = draft_input.state.get(name)
        if tensor is None:
            continue
        form = (size, *declared.shape), declared.dtype, device.type
        if (tuple(tensor.shape), tensor.dtype, tensor.device.type) != form:
            raise PluginError(
                f"the draft state {name!r} is {tuple(tensor.shape)} {tensor.dtype} on "
                f"{tensor.device}; expected {form[0]} {form[1]} on {device}, as state_spec() "
                f"declares it for {size} requests: return that, or declare what is returned"
            )


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
    on_host: bool = False,
) -> dict[str, Tensor | None]:
    """Return the named tensors of a mapping, in one of the core's own, if each is of leading
    ``size`` and on the device of ``like``, or ``on_host``; None may stand for a tensor if it
    ``may_lack``."""
    read: dict[Any, Any] = found
    if type(found) is not dict:
        if not isinstance(found, Mapping):
            plugins.refuse(hook, f"gave {what} {described(found)}", "a mapping of named tensors")
        read = plugins.guard(hook, dict, found)
    kept: dict[str, Tensor | None] = {}
    for name, tensor in read.items():
        if type(name) is not str:
            if not issubclass(type(name), str):
                plugins.refuse(hook, f"gave {what} named {shown(name)}", "a string")
            name = str.__str__(name)  # of str itself, if it was a member of a StrEnum
        kept[name] = tensor
        if tensor is None and may_lack:
            continue
        if not (
            is_dense(tensor)
            and tensor.dim()
            and len(tensor) == size
            and (tensor.device == like.device or (on_host and tensor.is_cpu))
        ):
            where = f"{like.device} or the CPU" if on_host else like.device
            expected = f"a tensor of leading size {size} on {where}"
            plugins.refuse(hook, f"gave {what} {shown(name)} {described(tensor)}", expected)
    return kept
