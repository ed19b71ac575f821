"""``best_plan`` and ``planned`` in C, in a sixth and a third of the time, and a trial of them.

``python compiled_plans.py PATH`` calls each function of a library once, in a process of its own: a
crash of a wrongly compiled one ends only that process. This module imports the standard library
alone, so that the trial is quick.
"""

from __future__ import annotations

import ctypes
import sys
from ctypes import Structure, addressof, c_double, c_int64, c_void_p, sizeof
from pathlib import Path

SOURCE = Path(__file__).with_name("plans.c")
MOST_ALGORITHMS, COSTS = 16, 5
COMPARED = 6, 11, 6
"""Survivals, depths and sets of algorithms that are compared."""


class Step(Structure):
    """The steps that are chosen from: requests, algorithms and depths; how many rows the target's
    curve has; the addresses of survivals [n, A, D], the curve, drafters' costs [A, 5] and the
    shares that they draft [A], all float64; a bit for each algorithm that waits; costs."""

    _fields_ = (
        ("bs", c_int64),
        ("algorithms", c_int64),
        ("deepest", c_int64),
        ("curve_rows", c_int64),
        ("survival", c_void_p),
        ("curve", c_void_p),
        ("drafters", c_void_p),
        ("filled", c_void_p),
        ("waiting", c_int64),
        ("shown", c_double),
        ("ragged", c_double),
    )


class Worth(Structure):
    """What a plan is expected to give and to take."""

    _fields_ = (("tokens", c_double), ("seconds", c_double))


_LAYOUT = (MOST_ALGORITHMS, COSTS, *COMPARED, sizeof(Step), sizeof(Worth))
_SIGNATURES = {
    "best": (c_int64, [c_void_p, c_double, c_void_p, c_void_p, c_void_p]),
    "price": (None, [c_void_p, c_void_p, c_void_p, c_void_p]),
}


class CompiledPlans:
    """The functions of a library.

    Args:
        path: of the library.

    Raises:
        OSError: it cannot be loaded.
        AttributeError: it lacks a function, or its structures differ.
    """

    def __init__(self, path: str | Path) -> None:
        # They are short: to take Python's lock again may take longer.
        library = ctypes.PyDLL(str(path))
        for name, (result, types) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = types, result
        try:
            found = (c_int64 * len(_LAYOUT)).in_dll(library, "layout")
        except ValueError as error:
            raise AttributeError(str(error)) from error
        if tuple(found) != _LAYOUT:
            raise AttributeError(f"its structures are {tuple(found)}; expected {_LAYOUT}")
        self._best, self._price = library.best, library.price

    def best(self, step: Step, rate: float, who: int, depths: int) -> tuple[float, float] | None:
        """Write the best plan that drafts for some requests to [n] int64 each at two addresses.

        Returns:
            The tokens that it is expected to give, and its seconds; None: none may be drafted for.

        Raises:
            MemoryError: there is none.
        """
        worth = Worth()
        found = self._best(addressof(step), rate, who, depths, addressof(worth))
        if found < 0:
            raise MemoryError("for a plan of drafts")
        return (worth.tokens, worth.seconds) if found else None

    def price(self, step: Step, who: int, depths: int) -> tuple[float, float]:
        """Return the tokens and seconds of a plan, [n] int64 each at two addresses."""
        worth = Worth()
        self._price(addressof(step), who, depths, addressof(worth))
        return worth.tokens, worth.seconds


def _try_all(plans: CompiledPlans) -> None:
    """Plan for two requests that one algorithm may draft for, two deep, and for one of them another
    one; and price what was planned."""
    survival = (c_double * 8)(0.9, 0.8, 0, 0, 0.5, 0.25, 0.75, 0)
    curve, drafters = (c_double * 7)(1, 1, 1, 1.1, 1.2, 1.3, 1.4), (c_double * 10)(*[0.02] * 10)
    filled, who, depths = (c_double * 2)(1, 1), (c_int64 * 2)(), (c_int64 * 2)()
    parts = [addressof(each) for each in (survival, curve, drafters, filled)]
    step = Step(2, 2, 2, 7, *parts, 2, 0.5, 0.125)
    best = plans.best(step, 1.0, addressof(who), addressof(depths))
    price = plans.price(step, addressof(who), addressof(depths))
    found = tuple(who), tuple(depths), best, price
    near = best is not None and all(
        abs(own - other) < 1e-9 for own, other in zip(best, price, strict=True)
    )
    if found[:2] != _EXPECTED or not near:
        raise SystemExit(f"error: it plans {found}; expected {_EXPECTED}")


_EXPECTED = (0, 0), (2, 2)

if __name__ == "__main__":
    _try_all(CompiledPlans(sys.argv[1]))
