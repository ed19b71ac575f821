"""Runs a subject's algorithm inside another engine, by the plugin that its package brings.

The core names no engine: ``Registry.host`` finds the plugin, ``open_engine`` makes the engine.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs

from specplug.algorithm import find_model
from specplug.host import Completion, EngineOptions, HostCapabilities, MeasuredEngine
from specplug.registry import Registry
from specplug.sampling_params import SamplingParams
from specplug.testing.check import Failure, NotApplicable
from specplug.testing.laboratory import FIRST_SEED, Laboratory

PLAIN = "NONE"
"""Plain decoding, which other engines have by themselves."""

TEMPERATURES = (0.0, 1.0)

SHAPES: Mapping[str, tuple[int | None, int | None, int | None]] = {
    "declared": (None, None, None),
    "one step": (1, 1, 2),
    "wide": (3, 3, 8),
}
"""Depth, branches and nodes of the drafts, by what they are called."""


@attrs.frozen
class HostedLaboratory:
    """Runs a subject's algorithm in the engine that the subject names.

    Attributes:
        laboratory: of the subject: the texts.
        able: what the engine gives.
    """

    laboratory: Laboratory
    able: HostCapabilities

    @classmethod
    def of(cls, laboratory: Laboratory) -> HostedLaboratory:
        """Return that of a laboratory whose subject names an engine.

        Raises:
            NotApplicable: the algorithm cannot run there.
            UsageError: the engine is not installed.
        """
        subject = laboratory.subject
        assert subject.host is not None
        able = Registry().host(subject.host).describe()
        obstacles = "; ".join(able.obstacles(subject.selected.info))
        if obstacles:
            raise NotApplicable(obstacles)
        return cls(laboratory, able)

    @contextmanager
    def engine(
        self, algorithm: str, shape: str = "declared", batch: int = 1
    ) -> Iterator[MeasuredEngine]:
        """Run an engine.

        Args:
            algorithm: by name.
            shape: of ``SHAPES``.
            batch: the most requests that run together.
        """
        subject = self.laboratory.subject
        assert subject.host is not None
        steps, topk, nodes = SHAPES[shape]
        given = {**subject.selected.info.conformance.settings, **subject.settings}
        if algorithm == PLAIN:
            given = {k: v for k, v in given.items() if not k.startswith("speculative_")}
        options = EngineOptions(
            model=find_model(subject.model),
            algorithm=algorithm,
            num_steps=steps,
            topk=topk,
            num_draft_tokens=nodes,
            draft_model_path=given.get("speculative_draft_model_path"),
            dtype=given.get("dtype", "float32"),  # in which tokens are those of plain decoding
            settings=given.get("speculative_settings", {}),
            max_running_requests=batch,
            more=tuple(subject.host_arguments),
        )
        engine = Registry().host(subject.host).open_engine(options)
        try:
            yield engine
        finally:
            engine.close()

    @property
    def shapes(self) -> Sequence[str]:
        """The shapes of drafts that the algorithm has here."""
        branching = self.laboratory.subject.selected.info.capabilities.branching
        return [each for each in SHAPES if each != "wide" or (branching and self.able.trees)]

    @property
    def temperatures(self) -> Sequence[float]:
        """Those at which output is that of plain decoding here."""
        return TEMPERATURES if self.able.exact_sampling else TEMPERATURES[:1]

    def tokens(self, engine: MeasuredEngine) -> dict[float, list[tuple[int, ...]]]:
        """Return the output of each prompt by temperature, twice over: the second time prompts are
        in the prefix cache, if there is one."""
        laboratory, found = self.laboratory, {}
        for temperature in self.temperatures:
            params = SamplingParams(
                max_tokens=laboratory.max_tokens,
                temperature=temperature,
                seed=FIRST_SEED + laboratory.subject.seed,
                ignore_eos=True,
            )
            found[temperature] = [
                tuple(completion.token_ids)
                for _ in range(2)
                for completion in engine.generate(laboratory.prompts(), params)
            ]
        return found


def algorithm_name(laboratory: Laboratory) -> str:
    """Return the name by which an engine finds the algorithm.

    Raises:
        NotApplicable: it is an object.
    """
    name = laboratory.subject.algorithm
    if not isinstance(name, str):
        raise NotApplicable("it is an object, and other engines find algorithms by name")
    return laboratory.subject.selected.name


def tokens_in_host(laboratory: Laboratory) -> str:
    """Compare with the engine's own plain decoding, for each shape of drafts."""
    name, hosted = algorithm_name(laboratory), HostedLaboratory.of(laboratory)
    with hosted.engine(PLAIN) as engine:
        expected = hosted.tokens(engine)
    for place, shape in enumerate(hosted.shapes):
        batch = (8, 3, 1)[place % 3]
        with hosted.engine(name, shape, batch) as engine:
            found = hosted.tokens(engine)
            undrafted: Mapping[str, int] = engine.stats().get("undrafted", {})
        for temperature, wanted in expected.items():
            _compare(shape, temperature, wanted, found[temperature], hosted.able.name)
    told = "".join(f"; {count} without drafts: {why}" for why, count in undrafted.items())
    sampled = "" if hosted.able.exact_sampling else ", greedy alone: it does not sample exactly"
    return f"{', '.join(hosted.shapes)} in {hosted.able.name}{sampled}{told}"


def _compare(
    shape: str, temperature: float, expected: Sequence[Any], found: Sequence[Any], name: str
) -> None:
    for place, (right, got) in enumerate(zip(expected, found, strict=True)):
        if right == got:
            continue
        same = next((i for i, (a, b) in enumerate(zip(right, got, strict=False)) if a != b), -1)
        count = len(expected) // 2
        again = ", from the prefix cache," if place >= count else ""
        raise Failure(
            f"{shape} shape at temperature {temperature:g}: prompt {place % count}{again} has "
            f"other tokens from token {same} on: {list(got[same : same + 4])}; expected "
            f"{list(right[same : same + 4])}, as {name} gives without drafts"
        )


def acceptance_in_host(laboratory: Laboratory) -> str:
    """Measure the accept length, and compare it with the declared one."""
    name, hosted = algorithm_name(laboratory), HostedLaboratory.of(laboratory)
    if laboratory.subject.selected.info.defaults.num_draft_tokens == 1:
        raise NotApplicable("it declares to draft nothing: Defaults(num_draft_tokens=1)")
    if laboratory.subject.quick:
        raise NotApplicable("nothing is measured in a quick run")
    with hosted.engine(name) as engine:
        params = SamplingParams(max_tokens=64, temperature=0.0, ignore_eos=True)
        engine.reset_stats()
        outputs = engine.generate(laboratory.standard_prompts(), params)
        stats = engine.stats()
    length = _accept_length(outputs, stats)
    declared = laboratory.subject.declared_accept_length
    expected = "more than 1.10" if declared is None else f"{declared:.2f}, which is declared"
    if length < (1.1 if declared is None else 0.95 * declared):
        raise Failure(
            f"{length:.2f} tokens a verification in {hosted.able.name}; expected {expected}"
        )
    told = "none declared" if declared is None else f"{declared:.2f} declared"
    return f"{length:.2f} tokens a verification in {hosted.able.name}, {told}"


def _accept_length(outputs: Sequence[Completion], stats: Mapping[str, Any]) -> float:
    """Return the tokens a verification. Some engines leave out those without a draft: then tokens
    are missing, of which each took one. A prefill gives the first token of each output."""
    accepted, verifications = int(stats["accepted"]), int(stats["verifications"])
    decoded = sum(len(output.token_ids) for output in outputs) - len(outputs)
    alone = max(0, decoded - accepted)
    return (accepted + alone) / max(1, verifications + alone)
