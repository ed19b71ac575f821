"""Checks of what a plugin does beside drafting: what it waits for, keeps and leaves."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug import SpecplugError, hookimpl
from specplug.testing.blindness import AGREE, agreement, first_parting
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.host_reads import DeviceLender, HostReads
from specplug.testing.laboratory import Drafted, Key, Laboratory, Recorder
from specplug.testing.lifetimes import Spoiler
from specplug.testing.sizes import roots_of, sizes

if TYPE_CHECKING:
    from specplug import FutureMap

FEW_TOKENS = 8
"""Of each output, where a check looks at every step."""


@check("conduct.waits", "silver", "no hook of a step reads device data on the host")
def waits(laboratory: Laboratory) -> str:
    """Run steps whose tensors are told apart from the host's, and look for reads."""
    if not laboratory.subject.selected.info.capabilities.overlap:
        raise NotApplicable("it declares Capabilities(overlap=False): its hooks may wait")
    reads = HostReads()
    prompts = laboratory.prompts()[1:4]  # none is so short that hardly anything is drafted
    params = laboratory.params(len(prompts), sampled=True, max_tokens=FEW_TOKENS)
    for shape in ("declared", "wide"):
        configuration = {**SIMPLEST, "batch": 3, "chunk": 8, "overlap": True, "shape": shape}
        lender = DeviceLender(reads)
        with laboratory.engine(configuration, extensions=[lender]) as llm, reads:
            llm.generate(prompts, params)
    if reads.found:
        told = "; ".join(
            f"{each.hook}() reads a device tensor on the host by {each.how}, at {each.place}: "
            f"{each.line}"
            for each in reads.found.values()
        )
        raise Failure(
            f"{told}; expected no read between resolve and publish: the host would wait for the "
            "device there, and overlap be lost; compute it on the device, or return it as "
            "DraftInput(host=...) and read it in on_host_tensors()"
        )
    return "no read"


@check("conduct.lifetime", "silver", "lent tensors and plans are used in their step alone")
def lifetime(laboratory: Laboratory) -> str:
    """Fill what hooks were lent with junk afterwards; the drafts must stay what they are."""
    expected = _spoiled(laboratory, frozenset())[0]
    found, names = _spoiled(laboratory, None)
    if agreement(expected, found) >= AGREE:
        return f"{len(names)} tensors, and all plans"
    guilty = [
        name
        for name in sorted(names)
        if agreement(expected, _spoiled(laboratory, frozenset({name}))[0]) < AGREE
    ]
    raise Failure(
        f"drafts change if {', '.join(guilty) or 'lent tensors'} is overwritten after its call; "
        "expected them not to: what a hook is lent is good for the call (a batch: for the step), "
        f"so keep a clone() of it. {first_parting(expected, found)}"
    )


def _spoiled(
    laboratory: Laboratory, names: frozenset[str] | None
) -> tuple[dict[Key, Drafted], set[str]]:
    """Return the drafts of a run where these are filled with junk, and the names of all that is
    lent.

    Raises:
        Failure: a plan is used after its step.
    """
    recorder, spoiler = Recorder(), Spoiler(names)
    prompts = laboratory.prompts()[:4]
    configuration = {**SIMPLEST, "batch": 3, "chunk": 8, "overlap": True}
    params = laboratory.params(len(prompts), sampled=False, max_tokens=2 * FEW_TOKENS)
    with (
        laboratory.engine(configuration, extensions=[recorder, spoiler]) as llm,
        spoiler.watching(),
    ):
        llm.generate(prompts, params)
    return recorder.drafts, spoiler.names


class Kept:
    """An extension that takes note of the run's future map."""

    future_map: FutureMap | None = None

    @hookimpl(wrapper=True)
    def create_future_map(self) -> Generator[None, FutureMap, FutureMap]:
        """Take note of it."""
        self.future_map = yield
        return self.future_map


REQUESTS = 334
QUICK_REQUESTS = 20
"""After which a plugin's memory is measured first; and after twice and three times as many."""


@check("conduct.leaks", "silver", "nothing grows with the number of ended requests")
def leaks(laboratory: Laboratory) -> str:
    """Complete short requests, and compare what the plugin keeps after some and after more."""
    measured: list[dict[str, int]] = []
    plugin = laboratory.subject.selected.plugin
    configuration = {**SIMPLEST, "batch": 8}
    kept, requests = Kept(), QUICK_REQUESTS if laboratory.subject.quick else REQUESTS
    with laboratory.engine(configuration, extensions=[kept]) as llm:
        for _ in range(3):
            texts = [[i % 7, 8, 9, 10 + len(measured), i] for i in range(requests)]
            llm.generate(texts, laboratory.params(requests, sampled=False, max_tokens=3))
            llm.check_pool()
            worker = llm.engine.runtime.worker
            measured.append(sizes(roots_of(plugin, worker, kept.future_map)))
    first, second, third = measured
    grown = [
        f"{name}: {first.get(name, 0)} -> {size} entries"
        for name, size in third.items()
        if first.get(name, 0) < second.get(name, 0) < size
    ]
    if grown:
        told = "; ".join(grown[:3]) + (f" and {len(grown) - 3} more" if len(grown) > 3 else "")
        raise Failure(
            f"after {requests} and {3 * requests} ended requests, {told}; expected as "
            "many: drop in on_request_finished() what is kept of a request, or keep at most a "
            "fixed number"
        )
    return f"{len(third)} containers and tensors after {3 * requests} requests"


State = Mapping[str, Tensor | None]

STATES: Mapping[str, Callable[[Tensor], Tensor | None]] = {
    "never arrives": lambda tensor: None,
    "is all zeros": torch.zeros_like,
    "has twice as many entries": lambda tensor: torch.cat((tensor, tensor), dim=-1),
    "is of another type": lambda tensor: tensor.to(torch.float16),
}
"""What may come of another instance's draft state, by how it is told."""


class StateChanger:
    """An extension that changes the draft state on its way from one instance to another.

    Args:
        change: of each tensor. Those [bs], of one number a request, are given as [bs, 1].
    """

    def __init__(self, change: Callable[[Tensor], Tensor | None]) -> None:
        self._change = change

    @hookimpl(wrapper=True)
    def export_draft_state(self) -> Generator[None, State, State]:
        """Change it."""
        state = yield
        return {name: self._changed(tensor) for name, tensor in state.items()}

    def _changed(self, tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        changed = self._change(tensor if tensor.dim() > 1 else tensor.unsqueeze(1))
        if changed is None or changed.shape[1:] != (1,) or tensor.dim() > 1:
            return changed
        return changed.squeeze(1)


@check("conduct.state", "bronze", "a draft state that is lost, empty or of another form is taken")
def state(laboratory: Laboratory) -> str:
    """Idle without a request; change the state that prefilled requests bring along."""
    _idle(laboratory)
    laboratory.demand_transfers()
    prompts = laboratory.prompts()[1:4]
    params = laboratory.params(len(prompts), sampled=True, max_tokens=FEW_TOKENS)
    expected = laboratory.plain(prompts, sampled=True, max_tokens=FEW_TOKENS)
    configuration = {**SIMPLEST, "batch": 3, "transfer": True}
    for told, change in STATES.items():
        try:
            with laboratory.engine(configuration, extensions=[StateChanger(change)]) as llm:
                found = [output.token_ids for output in llm.generate(prompts, params)]
        except (SpecplugError, AssertionError) as error:
            raise Failure(
                f"a draft state that {told}: {error}; expected build_disagg_draft_input() to go on "
                "without it: another instance may run another version"
            ) from error
        if found != expected:
            raise Failure(
                f"a draft state that {told}: other tokens than plain decoding; expected the same"
            )
    return f"{len(STATES)} states, and an empty batch"


def _idle(laboratory: Laboratory) -> None:
    """Step without a request, before the first one and after the last."""
    with laboratory.engine({**SIMPLEST, "overlap": True}) as llm:
        for _ in range(2):
            try:
                llm.engine.steps.idle()
                llm.engine.steps.idle()
            except (SpecplugError, AssertionError) as error:
                raise Failure(
                    f"a batch of no request: {error}; expected fixup_idle() and verify() to take "
                    "it: a rank without work takes part in the others' steps"
                ) from error
            params = laboratory.params(1, sampled=False, max_tokens=3)
            llm.generate(laboratory.prompts()[:1], params)
