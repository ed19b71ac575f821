"""Checks of a plugin's package: how it is found, listed and declared."""

from __future__ import annotations

import subprocess
import sys

from specplug.registry import Registry
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.laboratory import Laboratory

HEAVY = "torch", "transformers", "triton"


@check("form.listing", "bronze", "listing the algorithm imports no torch", anywhere=True)
def listing(laboratory: Laboratory) -> None:
    """Import the plugin in a process of its own, as a listing does."""
    name = laboratory.subject.algorithm
    if not isinstance(name, str) or "+" in name:
        raise NotApplicable("it is an object, or made of others, and so is not listed")
    code = (
        "import sys; from specplug.registry import Registry; Registry().select(sys.argv[1]);"
        f"print(*[each for each in {HEAVY!r} if each in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, name], capture_output=True, text=True, timeout=120, check=False
    )
    if done.returncode:
        raise Failure(f"it cannot be imported: {done.stderr.strip().splitlines()[-1]}")
    if done.stdout.strip():
        raise Failure(
            f"its module imports {', '.join(done.stdout.split())} at its top; expected that within "
            "functions: choosing it would take seconds"
        )


@check(
    "form.hooks",
    "bronze",
    "its hooks are the contract's, with the contract's arguments",
    anywhere=True,
)
def hooks(laboratory: Laboratory) -> None:
    """Ask the registry what is wrong with the plugin."""
    name = laboratory.subject.algorithm
    if not isinstance(name, str) or "+" in name:
        laboratory.subject.selected  # noqa: B018 - an object is examined when it is selected
        return
    problems = Registry().check(name)
    if problems:
        raise Failure("; ".join(map(str, problems)))
