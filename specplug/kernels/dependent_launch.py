"""Programmatic dependent launch: a kernel starts while the one before it in the stream still runs.

What a kernel does before its wait (finding its tile, reading constants) then costs no time of its
own. The rules: nothing that an earlier kernel writes is read before the wait, and nothing is
written before it. Every kernel waits, so that what is before it is also before those after it.

A small kernel lets the next one start at once, a product when it has read its weights: the next
one's programs would else crowd on those processors that are done first. (Fetching weights ahead to
the L2 cache gained nothing on an H100.) A kernel that reads before its wait what the last but one
has written says so, and the one between them lets it start only after its own wait.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specplug.kernels.card import card_of

enabled = True
"""Whether kernels are launched so, on devices that can. Recorded graphs stay as they are."""


def launch_options(tensor: Tensor) -> dict[str, bool]:
    """Return the keyword arguments of a launch on the device of ``tensor``, ``PDL`` among them.

    A product and a sum after it are never fused into one operation, which would round once where
    the modules round twice.
    """
    on = (
        enabled
        and card_of(tensor.device).launches_dependently
        and not triton.knobs.runtime.interpret
    )
    launch = {"PDL": True, "launch_pdl": True} if on else {"PDL": False}
    return {**launch, "enable_fp_fusion": False}


@triton.jit
def let_next_start(PDL: tl.constexpr):
    """Let the next kernel start as soon as all programs of this one have come here."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait_for_last(PDL: tl.constexpr):
    """Wait until the kernels before this one are complete, and what they wrote can be read."""
    if PDL:
        tl.extra.cuda.gdc_wait()
