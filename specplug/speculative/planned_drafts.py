"""Drafts of some of a batch's requests: each is drafted for by one algorithm, or by none.

All that says who drafts for whom is known on the host, so nothing here reads the device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.host_copy import upload
from specplug.speculative.joined_draft import JoinedDraft
from specplug.speculative.joint_algorithm import JointWorker
from specplug.speculative.several_worker import SeveralWorker

if TYPE_CHECKING:
    from specplug.speculative.hook_calls import HookCalls
    from specplug.speculative.hook_order import Batch
    from specplug.speculative.late_feed import LateFeed
    from specplug.speculative.runtime import Runtime


_FEW_WIDTHS = 8
"""Nodes of the widest draft up to which a start records all narrower ones."""


def drafters_of(runtime: Runtime) -> Mapping[str, int]:
    """Return the algorithms that can draft in a run, and the most nodes of each one's drafts."""
    if isinstance(runtime.worker, SeveralWorker):
        return {part.name: part.config.num_draft_tokens for part in runtime.worker.parts}
    return {runtime.config.algorithm: runtime.config.num_draft_tokens}


def plans_within(runtime: Runtime) -> bool:
    """Return whether the run's algorithm itself gives each request to one that drafts."""
    return isinstance(runtime.worker, SeveralWorker)


def drafting_hooks(runtime: Runtime) -> Sequence[HookCalls]:
    """Return the hooks of the parts that can draft in a run; none where it has no such parts."""
    worker = runtime.worker
    return [part.hooks for part in worker.parts] if isinstance(worker, SeveralWorker) else ()


def late_feeds(runtime: Runtime) -> Sequence[LateFeed]:
    """Return what waits for the algorithms of a run that are fed late."""
    return runtime.worker.late if isinstance(runtime.worker, SeveralWorker) else ()


@attrs.frozen
class WarmDrafter:
    """A choice that the warm-up makes for all requests of its steps.

    Attributes:
        who: as in ``DraftPlan.who``; None: it is not chosen who drafts.
        num_draft_tokens: the most nodes of its drafts.
        widths: of drafts that are narrower than the widest though there is room.
        is_ragged: whether its drafts are as wide as there is something to propose.
    """

    who: int | None
    num_draft_tokens: int
    widths: tuple[int, ...] = ()
    is_ragged: bool = False


@attrs.frozen(kw_only=True)
class TimedStep:
    """A decode step of the warm-up, run once more as later ones are: recorded, and launched while
    the device is busy.

    Attributes:
        size: requests.
        width: nodes verified of each, the root included.
        seconds: that it took without drafting.
    """

    size: int
    width: int
    seconds: float


def warm_drafters(runtime: Runtime, *, plans: bool, has_draft_cache: bool) -> list[WarmDrafter]:
    """Return the choices that a run may make for all requests of a step.

    Args:
        plans: whether a plugin chooses.
        has_draft_cache: whether a single algorithm has a KV cache of its own.
    """
    worker, most = runtime.worker, runtime.config.num_draft_tokens
    if isinstance(worker, SeveralWorker):
        found = [
            _warm_drafter(
                who, part.config.num_draft_tokens, part.worker, part.has_draft_model, plans
            )
            for who, part in enumerate(worker.parts)
        ]
    else:
        found = [_warm_drafter(None, most, worker, has_draft_cache, plans)]
    nobody = [WarmDrafter(-1, 1)] if most > 1 and (plans or plans_within(runtime)) else []
    return [*found, *nobody]


def _warm_drafter(
    who: int | None, most: int, worker: object, has_model: bool, plans: bool
) -> WarmDrafter:
    grown = worker.draft_widths if isinstance(worker, JointWorker) else ()
    is_ragged = not (grown or has_model or most == 1)
    widths = _widths(most) if is_ragged or (plans and has_model) else ()
    return WarmDrafter(who, most, grown or widths, is_ragged)


def _widths(most: int) -> tuple[int, ...]:
    """Return widths of drafts below the widest that a plan may ask for, or that are found: each is
    a pass of its own. All if they are few, else powers of two."""
    if most <= _FEW_WIDTHS:
        return tuple(range(2, most))
    return tuple(1 << power for power in range(1, (most - 1).bit_length()))


@attrs.frozen(eq=False)
class Proposer:
    """An algorithm that drafts for the requests that it is given.

    Attributes:
        propose: of its hooks: takes a batch and its draft input.
        owns: whether a state of the draft input, by its name, is its own.
        waits: whether it waits for the step before, to read on the host what that has left.
    """

    propose: Callable[[Batch, DraftInput], Draft]
    owns: Callable[[str], bool]
    waits: bool = False


def propose_planned(batch: Batch, draft_input: DraftInput, proposers: Sequence[Proposer]) -> Draft:
    """Return the drafts of a batch, each made by the one that ``batch.drafters`` names.

    Each proposer gets a batch of its requests alone, and none where it has none. Those that wait
    come last: a device runs the passes of the others meanwhile.

    Args:
        batch: a decode step's. Without ``drafters`` the first one drafts for all.
        draft_input: of all its requests, with the states of all proposers.
    """
    who = batch.drafters or (0,) * batch.size
    roots, parts = draft_input.bonus_tokens, []
    for index, proposer in sorted(enumerate(proposers), key=lambda each: each[1].waits):
        places = [place for place, drafter in enumerate(who) if drafter == index]
        if places and len(places) == batch.size:
            return proposer.propose(evolved(batch, drafters=()), draft_input)
        if places:
            rows = upload(places, roots.device)
            given = _sub_input(draft_input, rows, proposer.owns)
            parts.append((proposer, sub_batch(batch, places, rows), given, places, rows))
    # All that can be made before anybody waits is: a device waits too then.
    joined = JoinedDraft(roots, max(batch.max_draft_nodes, default=1))
    for proposer, part, given, places, rows in parts:
        joined.add(places, rows, proposer.propose(evolved(part, drafters=()), given))
    return joined.draft()


def evolved(batch: Batch, **changes: Any) -> Batch:
    """Return a batch with other values in some fields, as ``attrs.evolve`` does: each step makes
    some, and this takes a third of the time."""
    kind: Any = type(batch)
    made: Batch = object.__new__(kind)
    for name in _field_names(kind):
        setattr(made, name, changes[name] if name in changes else getattr(batch, name))
    return made


@cache
def _field_names(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in attrs.fields(kind))


def sub_batch(batch: Batch, places: Sequence[int], rows: Tensor) -> Batch:
    """Return a decode step's batch of some of its requests, in tensors of its own.

    Args:
        places: which, in ascending order.
        rows: the same on the device, [n] int64.
    """

    def picked(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[place] for place in places) if values else ()

    return evolved(
        batch,
        requests=tuple(batch.requests[place] for place in places),
        req_indices=batch.req_indices[rows],
        seq_lens=batch.seq_lens[rows],
        max_draft_nodes=picked(batch.max_draft_nodes),
        max_draft_slots=picked(batch.max_draft_slots),
        drafters=picked(batch.drafters),
    )


def _sub_input(draft_input: DraftInput, rows: Tensor, owns: Callable[[str], bool]) -> DraftInput:
    state = {
        name: None if tensor is None else tensor[rows]
        for name, tensor in draft_input.state.items()
        if owns(name)
    }
    return DraftInput(bonus_tokens=draft_input.bonus_tokens[rows], state=state)
