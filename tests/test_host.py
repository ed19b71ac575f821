"""What a host gives is enough for an algorithm, or the run is refused with both names."""

from __future__ import annotations

from typing import Any

import attrs
import pytest

from specplug import (
    LLM,
    AlgorithmInfo,
    Capabilities,
    HostCapabilities,
    SpecConfig,
    UsageError,
)
from specplug.algorithm import CAPTURES
from specplug.engine.engine_runtime import EMBEDDED, EngineRuntime
from specplug.registry import Registry

LEAST = HostCapabilities(name="Least 1.0")
CHAINS = HostCapabilities(name="Chains 2.1", draft_models=True, captures=CAPTURES)


def _info(**capabilities: Any) -> AlgorithmInfo:
    able = Capabilities(**capabilities)
    return AlgorithmInfo(name="NEW", summary="A draft.", api_version=1, capabilities=able)


@pytest.mark.parametrize(
    ("capabilities", "expected"),
    [
        ({}, []),
        ({"branching": True}, []),
        ({"draft_model": True}, ["NEW has a draft model, and Least 1.0 runs none"]),
        (
            {"captures": {"layer_inputs", "lm_head_input"}},
            [
                "NEW reads the hidden states before layers (capture_layer_inputs), and Least 1.0 "
                "does not give them",
                "NEW reads the hidden states after the final norm (capture_lm_head_input), and "
                "Least 1.0 does not give them",
            ],
        ),
    ],
)
def test_host_says_what_it_lacks(capabilities: dict[str, Any], expected: list[str]) -> None:
    assert list(LEAST.obstacles(_info(**capabilities))) == expected
    assert list(EMBEDDED.obstacles(_info(**capabilities), own_verify=True)) == []


def test_host_without_trees_takes_chains_alone() -> None:
    info = _info(branching=True)
    chain, tree = (SpecConfig(algorithm="NEW", num_steps=3, topk=topk) for topk in (1, 4))
    CHAINS.check(info, chain)
    message = "^NEW with topk=4 drafts trees, and Chains 2.1 verifies chains only; use topk=1$"
    with pytest.raises(UsageError, match=message):
        CHAINS.check(info, tree)


def test_all_reasons_are_told_together() -> None:
    info = _info(draft_model=True, captures={"layer_inputs"})
    with pytest.raises(UsageError, match=r"runs none; .* does not give them; .*use topk=1"):
        LEAST.check(info, SpecConfig(algorithm="NEW", topk=2))


@pytest.mark.parametrize("what", [HostCapabilities, Capabilities])
def test_captures_have_known_names(what: Any) -> None:
    name = {"name": "Least"} if what is HostCapabilities else {}
    with pytest.raises(ValueError, match="logits"):
        what(captures={"logits"}, **name)


@pytest.mark.parametrize("name", sorted({*Registry().names()} - {"NONE"}))
def test_algorithm_declares_what_it_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without one of the declared captures is refused, and none that is asked for lacks."""
    declared = Registry().select(name).info.capabilities.captures
    asked = set()
    for capture in CAPTURES:
        method = getattr(EngineRuntime, f"capture_{capture}")

        def noting(self: Any, *given: Any, capture: str = capture, method: Any = method) -> str:
            asked.add(capture)
            return str(method(self, *given))

        monkeypatch.setattr(EngineRuntime, f"capture_{capture}", noting)
    LLM(speculative_algorithm=name, max_total_tokens=64, device="cpu").close()
    assert asked == declared
    for capture in declared:
        poorer = attrs.evolve(EMBEDDED, name="Poorer", captures=set(CAPTURES) - {capture})
        monkeypatch.setattr("specplug.engine.engine_runtime.EMBEDDED", poorer)
        with pytest.raises(UsageError, match=f"^{name} reads .*capture_{capture}.*, and Poorer"):
            LLM(speculative_algorithm=name, max_total_tokens=64, device="cpu")
