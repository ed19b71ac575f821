"""The kit checks an algorithm in another engine: here in one that is the embedded one, by the door
by which others come."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from shallow_target import ShallowTarget

from specplug import LLM, EngineOptions, HostCapabilities, Registry, RequestOutput, ServerOptions
from specplug.cli.check import check
from specplug.testing import Subject, all_checks
from specplug.testing.kit import checks_named
from specplug.testing.laboratory import Laboratory
from specplug.testing.verdict import Verdict, judge


class Altered(LLM):
    """An engine whose third token is another one."""

    def generate(self, *given: Any, **named: Any) -> list[RequestOutput]:
        found = super().generate(*given, **named)
        return [
            attrs.evolve(each, token_ids=(*each.token_ids[:2], 7, *each.token_ids[3:]))
            for each in found
        ]


@attrs.frozen
class Elsewhere:
    """A ``HostPlugin``.

    Attributes:
        able: what it gives.
        kind: of engine under an algorithm.
        opened: what was asked for.
    """

    able: HostCapabilities
    kind: type[LLM] = LLM
    opened: list[EngineOptions] = attrs.field(factory=list)

    def versions(self) -> Mapping[str, str | None]:
        return {"elsewhere": "1"}

    def describe(self) -> HostCapabilities:
        return self.able

    def server_command(self, options: ServerOptions) -> Sequence[str]:
        raise NotImplementedError

    def open_engine(self, options: EngineOptions) -> LLM:
        self.opened.append(options)
        kind = LLM if options.algorithm == "NONE" else self.kind
        return kind(
            options.model,
            dtype=options.dtype,
            speculative_algorithm=options.algorithm,
            speculative_num_steps=options.num_steps,
            speculative_eagle_topk=options.topk,
            speculative_num_draft_tokens=options.num_draft_tokens,
            speculative_draft_model_path=options.draft_model_path,
            max_running_requests=options.max_running_requests,
        )


ABLE = HostCapabilities(
    name="Elsewhere 1",
    draft_models=True,
    captures={"layer_inputs"},
    trees=True,
    exact_sampling=True,
)


def _judged(
    id: str, host: Elsewhere, shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> Verdict:
    monkeypatch.setattr(Registry, "host", lambda registry, name: host)
    draft = shallow.drafts["EAGLE3"]
    subject = Subject(
        algorithm="EAGLE3",
        model=shallow.path,
        settings={"speculative_draft_model_path": draft},
        host="elsewhere",
        host_arguments=["--own"],
    )
    return judge(checks_named([id])[0], Laboratory(subject))


def test_tokens_in_a_host_are_compared_with_its_own(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Elsewhere(ABLE)
    verdict = _judged("exact.tokens", host, shallow, monkeypatch)
    assert (verdict.status, verdict.told) == ("passed", "declared, one step, wide in Elsewhere 1")
    assert [options.algorithm for options in host.opened] == ["NONE", *["EAGLE3"] * 3]
    assert {options.more for options in host.opened} == {("--own",)}
    assert [options.num_steps for options in host.opened] == [None, None, 1, 3]


def test_other_tokens_in_a_host_are_told(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = _judged("exact.tokens", Elsewhere(ABLE, Altered), shallow, monkeypatch)
    assert verdict.status == "failed"
    assert "declared shape at temperature 0: prompt 0 has other tokens from token 2" in verdict.told
    assert "as Elsewhere 1 gives without drafts" in verdict.told


def test_host_that_does_not_sample_exactly_is_asked_greedily(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    able = attrs.evolve(ABLE, exact_sampling=False, trees=False)
    verdict = _judged("exact.tokens", Elsewhere(able), shallow, monkeypatch)
    assert verdict.told.startswith("declared, one step in Elsewhere 1, greedy alone")


def test_algorithm_that_a_host_cannot_run_is_not_applicable(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Elsewhere(attrs.evolve(ABLE, draft_models=False))
    verdict = _judged("exact.tokens", host, shallow, monkeypatch)
    assert verdict.status == "not applicable"
    assert "EAGLE3 has a draft model, and Elsewhere 1 runs none" in verdict.told


def test_acceptance_in_a_host_is_the_embedded_engines(
    shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = _judged("gold.acceptance", Elsewhere(ABLE), shallow, monkeypatch)
    found = re.fullmatch(r"(.+) tokens a verification in Elsewhere 1, none declared", verdict.told)
    assert found, verdict.told
    here = attrs.evolve(
        Subject(algorithm="EAGLE3"),
        model=shallow.path,
        settings={"speculative_draft_model_path": shallow.drafts["EAGLE3"]},
    )
    (acceptance,) = checks_named(["gold.acceptance"])
    embedded = judge(acceptance, Laboratory(here)).told
    # An output may end within an accepted path.
    assert float(found[1]) == pytest.approx(float(embedded.partition(" ")[0]), rel=0.03)


def test_checks_of_the_embedded_engine_do_not_apply() -> None:
    laboratory = Laboratory(Subject(algorithm="NGRAM", host="elsewhere"))
    inside = [each for each in all_checks() if each.hosted is None]
    verdicts = [judge(each, laboratory) for each in inside]
    assert {verdict.status for verdict in verdicts} == {"not applicable"}
    assert {each.id for each in all_checks()} - {each.id for each in inside} == {
        "exact.tokens",
        "form.hooks",
        "form.listing",
        "gold.acceptance",
    }


def test_check_in_a_host_gives_no_grade(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Registry, "host", lambda registry, name: Elsewhere(ABLE))
    done = CliRunner().invoke(check, ["NGRAM", "--host", "elsewhere", "--only", "form"])
    assert done.exit_code == 0, done.output
    assert "grade:" not in done.stdout


def test_arguments_without_a_host_are_refused() -> None:
    done = CliRunner().invoke(check, ["NGRAM", "--only", "form", "--", "--own"])
    assert "'--own': expected --host with them" in str(done.exception)
