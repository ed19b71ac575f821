"""Checks of what a plugin does beside drafting: what it waits for, keeps and leaves."""

from __future__ import annotations

from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.host_reads import DeviceLender, HostReads
from specplug.testing.laboratory import Laboratory

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
