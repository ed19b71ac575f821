"""Checks for drafts that are exact but blind: they hang on how a step came about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import (
    SIMPLEST,
    Configuration,
    shown,
    simplest_alike,
    smallest,
)
from specplug.testing.hosted import acceptance_in_host
from specplug.testing.laboratory import Drafted, Key, Laboratory
from specplug.testing.parting import left_in, told_from_simplest, told_parting
from specplug.testing.symptoms import likely_cause

AGREE = 0.97
"""Share of the roots at which drafts must agree: float32 rounds otherwise in other shapes, and so
now and then another candidate is the likeliest."""


@check("blind.invariance", "silver", "a request's drafts do not depend on the schedule")
def invariance(laboratory: Laboratory) -> str:
    """Compare the drafts of a simple run with those of stressed ones, root by root. The latter are
    those of ``exact.tokens``, in which every other request is sampled."""

    def share_of(configuration: Configuration) -> float:
        expected = laboratory.observe(simplest_alike(configuration), sampled=True)
        found = laboratory.observe(configuration, sampled=True)
        return agreement(expected.drafts, found.drafts)

    _same_in_order(laboratory)
    _same_in_chunks(laboratory)
    stressed = [c for c in laboratory.cover() if c["shape"] == "declared" and c != SIMPLEST]
    least_share = 1.0
    for configuration in stressed:
        share = share_of(configuration)
        least_share = min(least_share, share)
        if share < AGREE:
            least = smallest(configuration, lambda c: share_of({**c, "shape": "declared"}) < AGREE)
            parting = first_parting(
                laboratory.observe(simplest_alike(least), sampled=True).drafts,
                laboratory.observe(least, sampled=True).drafts,
            )
            states = told_from_simplest(laboratory, least)
            raise Failure(
                f"{shown(least)}: {100 * share:.0f} % of the drafts are those of the simplest "
                f"configuration; expected {100 * AGREE:.0f} %: what is drafted after a text must "
                f"not depend on how it came there. {usual_causes(least)}{parting}{states}"
            )
    return (
        f"{100 * least_share:.1f} % agree in the worst of {len(stressed)} configurations"
        f"{laboratory.told_without}"
    )


def _same_in_order(laboratory: Laboratory) -> None:
    """Compare with a run of the same prompts in the opposite order, one after the other.

    Raises:
        Failure: the drafts are not equal.
    """
    prompts = laboratory.prompts()[::-1]
    others = laboratory.observe(SIMPLEST, prompts)
    told = "after other requests: "
    causes = (
        "Usual causes: a row's state that is not reset when another request gets the row "
        "(batch.first_chunk), text or counts of other requests. "
    )
    _demand_equal(laboratory, others.drafts, told, causes, SIMPLEST, prompts)


def _same_in_chunks(laboratory: Laboratory) -> None:
    """Compare with a run of chunks, which changes nothing else.

    Raises:
        Failure: the drafts are not equal.
    """
    configuration = {**SIMPLEST, "chunk": 5}
    chunked = laboratory.observe(configuration)
    told = f"{shown(configuration)}: "
    causes = usual_causes(configuration)
    prompts = laboratory.prompts()
    _demand_equal(laboratory, chunked.drafts, told, causes, configuration, prompts)


def _demand_equal(
    laboratory: Laboratory,
    found: Mapping[Key, Drafted],
    told: str,
    causes: str,
    configuration: Configuration,
    prompts: Sequence[Any],
) -> None:
    """Refuse drafts that are not equal to those of the simplest run: nothing makes them narrower.

    Args:
        configuration, prompts: of the run in which they were found.

    Raises:
        Failure: fewer than ``AGREE`` are.
    """
    simple = laboratory.observe(SIMPLEST).drafts
    roots = [key for key in simple.keys() & found.keys() if simple[key] or found[key]]
    differing = [key for key in roots if simple[key].paths != found[key].paths]
    if len(differing) > (1 - AGREE) * len(roots):
        key = min(differing, key=lambda key: key[::-1])
        share = 1 - len(differing) / len(roots)
        states = told_parting(
            left_in(laboratory, SIMPLEST, laboratory.prompts()),
            left_in(laboratory, configuration, prompts),
        )
        raise Failure(
            f"{told}{100 * share:.0f} % of {len(roots)} drafts are those of the simplest run; "
            f"expected {100 * AGREE:.0f} %. {causes}"
            f"{shown_draft(*key, found[key], simple[key].tokens[1:])}{states}"
        )


CAUSES: Mapping[str, str] = {
    "batch": "rows of different requests are mixed up, or a row's state is not reset when another "
    "request gets it (batch.first_chunk)",
    "page_size": "slots are taken for positions",
    "chunk": "the token after the end of a chunk (next_tokens), positions, which go on from "
    "batch.seq_lens, or text of later chunks that is not read",
    "overlap": "something kept on the host, which is a step late",
    "mixed": "a prefill and a decode step share something",
    "cache": "positions or text of the part of a prompt that is found in the prefix cache, which "
    "is not fed: they begin at batch.seq_lens",
    "pressure": "a request that was retracted is prefilled again, with its output so far "
    "(token_ids)",
    "budget": "drafts are cut, and what is fed is narrower than what was drafted",
    "structured": "requests with a grammar, which end early and draft what it forbids",
    "transfer": "what export_draft_state leaves out, or build_disagg_draft_input, which must reset "
    "a row's state as a first chunk does",
}
"""Usual causes, by the dimension along which drafts change."""


def usual_causes(configuration: Configuration) -> str:
    """Return the usual causes where drafts change in a configuration, as a sentence."""
    causes = [cause for name, cause in CAUSES.items() if configuration[name] != SIMPLEST[name]]
    return f"Usual causes: {'; '.join(causes)}. " if causes else ""


def agreement(expected: Mapping[Key, Drafted], found: Mapping[Key, Drafted]) -> float:
    """Return at which share of the roots that both have the drafts agree. A draft that was made
    narrower agrees if the other has its paths."""
    roots = expected.keys() & found.keys()
    if not roots:
        return 1.0
    return sum(expected[root].agrees(found[root]) for root in roots) / len(roots)


def first_parting(expected: Mapping[Key, Drafted], found: Mapping[Key, Drafted]) -> str:
    """Return the first root at which drafts differ, in words."""
    for prompt, position in sorted(expected.keys() & found.keys(), key=lambda key: key[::-1]):
        a, b = expected[prompt, position], found[prompt, position]
        if not a.agrees(b):
            told = shown_draft(prompt, position, b, a.tokens[1:])
            return told if a.is_chain else f"{told[:-1]}, parents {list(a.parents)}."
    return ""


def shown_draft(
    prompt: Sequence[int], position: int, found: Drafted, expected: Sequence[int]
) -> str:
    """Return a draft and what it should have been, in words.

    Args:
        position: of its root, in the text that begins with ``prompt``.
        expected: tokens after the root.
    """
    tree = "" if found.is_chain else f", parents {list(found.parents)}"
    after = position - len(prompt)
    return (
        f"First: the root at position {position}, {after} after its prompt: drafted "
        f"{list(found.tokens[1:])}{tree}; expected {list(expected)[: max(1, found.depth)]}."
    )


@check("blind.replay", "silver", "drafts are the same whether a text was prompted or generated")
def replay(laboratory: Laboratory) -> str:
    """Prompt the text up to a root, and compare the draft there with that of decoding."""
    found = laboratory.observe(SIMPLEST)
    roots = [key for key in sorted(found.drafts, key=lambda key: key[::-1]) if key[1] > len(key[0])]
    if not roots:
        raise NotApplicable("no draft was made after the first step")
    outputs = dict(zip(_prompts_of(found.drafts), found.tokens, strict=True))
    full = [key for key in roots if found.drafts[key]]
    chosen = [*_spread(full, 16), *_spread([key for key in roots if not found.drafts[key]], 8)]
    again = {
        (prompt, position): list(prompt) + list(outputs[prompt][: position - len(prompt)])
        for prompt, position in chosen
    }
    replayed = laboratory.observe(SIMPLEST, list(again.values()), max_tokens=3).drafts
    first = {key[0]: drafted for key, drafted in replayed.items() if key[1] == len(key[0])}
    expected = {
        key: first[tuple(text)]
        for key, text in again.items()
        if tuple(text) in first and (found.drafts[key] or first[tuple(text)])
    }
    if not expected:
        raise NotApplicable("no draft was made after a prompt, nor where one is replayed")
    share = agreement(expected, {key: found.drafts[key] for key in expected})
    if share < 0.9:
        told = first_parting(expected, found.drafts)
        left = left_in(laboratory, SIMPLEST, list(again.values()), max_tokens=3)
        prompted = {
            key: left[tuple(text), key[1]] for key, text in again.items() if key in expected
        }
        decoded = left_in(laboratory, SIMPLEST, laboratory.prompts())
        told += told_parting(prompted, decoded)
        raise Failure(
            f"{100 * share:.0f} % of {len(expected)} drafts are those after a prompt of the same "
            "text; expected 90 %: build_draft_input must leave after a verify what it leaves after "
            f"a prefill. {told}"
        )
    return f"{100 * share:.0f} % of {len(expected)}"


def _spread(keys: Sequence[Key], count: int) -> Sequence[Key]:
    """Return so many of the keys, evenly."""
    return keys[:: max(1, len(keys) // count)][:count]


def _prompts_of(drafts: Mapping[Key, Drafted]) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(prompt for prompt, _ in drafts))


def refuse_quick(laboratory: Laboratory) -> None:
    """Refuse to measure in a quick run.

    Raises:
        NotApplicable: the run is quick.
    """
    if laboratory.subject.quick:
        raise NotApplicable("nothing is measured in a quick run")


@check(
    "gold.acceptance",
    "gold",
    "accept length is what its author declares",
    hosted=acceptance_in_host,
)
def acceptance(laboratory: Laboratory) -> str:
    """Measure the accept length, and compare it with the declared one."""
    if laboratory.subject.selected.info.defaults.num_draft_tokens == 1:
        raise NotApplicable("it declares to draft nothing: Defaults(num_draft_tokens=1)")
    refuse_quick(laboratory)
    prompts = laboratory.standard_prompts()
    found = laboratory.observe(SIMPLEST, prompts, max_tokens=64)
    if not any(found.drafts.values()):
        raise Failure(
            "nothing was drafted; expected drafts: if the algorithm drafts no texts as short as "
            "the kit's, declare the settings that make it (AlgorithmInfo.conformance)"
        )
    length, declared = found.accept_length, laboratory.subject.declared_accept_length
    told = _compared_with_reference(laboratory, length)
    if declared is None and told:
        return told
    if declared is None:
        if length < 1.1:
            raise Failure(
                f"{length:.2f} tokens a verification; expected more than 1.10: hardly a draft is "
                "right; compare the draft's inputs and weights with the model they were trained by"
                f"{likely_cause(laboratory, found, prompts)}"
            )
        return f"{length:.2f} tokens a verification; none declared"
    if length < 0.95 * declared:
        raise Failure(
            f"{length:.2f} tokens a verification; expected {declared:.2f}, which is declared: "
            f"drafts are right less often than they were{likely_cause(laboratory, found, prompts)}"
        )
    return told or f"{length:.2f} tokens a verification, {declared:.2f} declared"


def _compared_with_reference(laboratory: Laboratory, length: float) -> str:
    """Measure the reference, and compare; return both in words, "" if there is none.

    Raises:
        Failure: the reference's drafts are better.
    """
    reference = laboratory.subject.measured_reference
    if reference is None:
        return ""
    other = Laboratory(attrs.evolve(laboratory.subject, algorithm=reference))
    expected = other.observe(SIMPLEST, other.standard_prompts(), max_tokens=64).accept_length
    name = other.subject.selected.name
    if length < 0.95 * expected:
        raise Failure(
            f"{length:.2f} tokens a verification; the reference {name} has {expected:.2f} here, "
            "with the same settings; expected 95 % of that: compare step by step what the drafts "
            "are computed from: tokens, features, positions, norms, the vocabulary map"
        )
    return f"{length:.2f} tokens a verification; the reference {name} has {expected:.2f} here"
