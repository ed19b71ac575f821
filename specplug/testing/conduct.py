"""Checks of what a plugin does beside drafting: what it waits for, keeps and leaves."""

from __future__ import annotations

from specplug.testing.blindness import AGREE, agreement, first_parting
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.host_reads import DeviceLender, HostReads
from specplug.testing.laboratory import Drafted, Key, Laboratory, Recorder
from specplug.testing.lifetimes import Spoiler

FEW_TOKENS = 8
"""Of each output, where a check looks at every step."""


@check("conduct.waits", "silver", "no hook of a step reads device data on the host")
def waits(laboratory: Laboratory) -> str:
    """Run steps whose tensors are told apart from the host's, and look for reads."""
    if not laboratory.subject.selected.info.capabilities.overlap:
        raise NotApplicable("it declares Capabilities(overlap=False): its hooks may wait")
    reads = HostReads()
    prompts = laboratory.prompts()[:3]
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
