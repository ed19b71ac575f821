"""The conformance kit: its verdicts, its page, its ways to be called."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import attrs
import pytest
from mutants import HookMisspelt, Item, NoFinalNorm, WithEagle3
from shallow_target import ShallowTarget

import specplug
from specplug import AlgorithmInfo, Batch, Conformance, Draft, DraftInput, hookimpl
from specplug.cli import main
from specplug.cli.check import declared, told_in_lines
from specplug.errors import UsageError
from specplug.registry import Registry
from specplug.testing import Failure, NotApplicable, Subject, all_checks, kit
from specplug.testing.check import PAGE, Check
from specplug.testing.configuration import DIMENSIONS, SIMPLEST, cover, is_possible, smallest
from specplug.testing.kit import checks_named, refuse_unknown
from specplug.testing.laboratory import Drafted, Laboratory
from specplug.testing.verdict import Verdict, grade_of, judge, told_grade
from specplug_eagle3.worker import Eagle3Worker

REPOSITORY = Path(specplug.__file__).parents[1]


class RootsAlone(Eagle3Worker):
    """Drafts nothing, against what it declares."""

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


def test_every_built_in_algorithm_has_the_kit_in_its_suite() -> None:
    suites = REPOSITORY.glob("plugins/*/tests/test_conformance.py")
    named = {re.findall(r'algorithm = "(.+)"', path.read_text())[0] for path in suites}
    assert named == set(Registry().names()) - {"NONE"}


def test_every_check_has_its_section() -> None:
    headings = re.findall(r"^## (.+)$", (REPOSITORY / PAGE).read_text(), re.MULTILINE)
    anchors = {heading.lower().replace(".", "").replace(" ", "-") for heading in headings}
    assert {check.page.partition("#")[2] for check in all_checks()} <= anchors
    named = {heading for heading in headings if "." in heading}
    assert named == {check.id for check in all_checks()}


def test_page_declares_what_can_be_declared() -> None:
    def info(_: Any, **given: Any) -> AlgorithmInfo:
        return AlgorithmInfo(name="MINE", summary="as the page has it", api_version=1, **given)

    text = (REPOSITORY / PAGE).read_text()
    declared: dict[str, Any] = {"AlgorithmInfo": info, "Conformance": Conformance}
    for block in re.findall(r"^```py\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, declared)
    subject = declared["TestMine"].subject()
    assert (subject.algorithm, subject.accept_length) == ("MINE", 2.4)
    refuse_unknown(subject.expected_failures)
    for named in re.findall(r"(?:--fails |expected_failures=\{\")([\w.]+)", text):
        refuse_unknown({named: "declared"})


def test_section_says_the_grade_of_its_check() -> None:
    sections = re.split(r"^## ", (REPOSITORY / PAGE).read_text(), flags=re.MULTILINE)[1:]
    grades = {}
    for section in sections:
        heading, _, text = section.partition("\n\n")
        grades[heading] = text[1:].partition(".")[0].partition(",")[0].lower()
    assert all(grades[check.id] == check.grade for check in all_checks())


def _check(error: Exception | None) -> Check:
    def run(laboratory: Laboratory) -> str:
        if error is not None:
            raise error
        return "measured"

    return Check("blind.made", "silver", "made for a test", run)


def _judged(error: Exception | None, reason: str | None = None) -> Verdict:
    expected = {} if reason is None else {"blind.made": reason}
    subject = Subject(algorithm="NGRAM", expected_failures=expected)
    return judge(_check(error), Laboratory(subject))


def test_expected_failure_that_fails_is_expected() -> None:
    verdict = _judged(Failure("found"), "no time")
    assert verdict.status == "expected"
    assert not verdict.is_wrong
    assert "no time" in verdict.told
    assert "found" in verdict.told


def test_expected_failure_that_passes_is_wrong() -> None:
    verdict = _judged(None, "no time")
    assert verdict.status == "passed unexpectedly"
    assert verdict.is_wrong
    assert "take 'blind.made' out" in verdict.told


def test_expected_failure_without_reason_is_refused() -> None:
    with pytest.raises(UsageError, match="expected the reason"):
        Subject(algorithm="NGRAM", expected_failures={"exact.tokens": " "})


class DeclaresFailure:
    """Declares what it is known to fail."""

    def __init__(self, **failures: str) -> None:
        self._declared = Conformance(expected_failures={"blind.made": "not yet", **failures})

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="MADE", summary="made", api_version=1, conformance=self._declared)

    @hookimpl
    def create_worker(self, runtime: Any) -> None: ...

    @hookimpl
    def build_draft_input(self, target_output: Any) -> None: ...

    @hookimpl
    def propose(self, draft_input: Any) -> None: ...


def test_failure_that_the_plugin_declares_is_expected() -> None:
    laboratory = Laboratory(Subject(algorithm=DeclaresFailure()))
    verdict = judge(_check(Failure("found")), laboratory)
    assert verdict.status == "expected"
    assert "not yet" in verdict.told
    assert judge(_check(None), laboratory).status == "passed unexpectedly"
    told = Subject(algorithm=DeclaresFailure(), expected_failures={"blind.made": "mine"})
    assert told.known_failures == {"blind.made": "mine"}


def test_declared_failure_without_a_reason_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a check's id, and the reason"):
        Conformance(expected_failures={"blind.made": " "})


def test_check_that_raises_anything_is_a_failure() -> None:
    verdict = _judged(ZeroDivisionError("by zero"))
    assert verdict.status == "failed"
    assert "ZeroDivisionError" in verdict.told
    assert PAGE in verdict.told


def test_grade_ends_below_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "all_checks", lambda: [_check(None)])
    passed, failed, other = _judged(None), _judged(Failure("")), _judged(NotApplicable(""))
    assert grade_of([passed]) == "gold"
    assert grade_of([passed, failed]) == "bronze"
    assert grade_of([other]) == "gold"


def test_grade_needs_all_checks_of_it() -> None:
    bronze, silver = (
        [Verdict(check, "passed", "", 0.0) for check in all_checks() if check.grade == grade]
        for grade in ("bronze", "silver")
    )
    assert grade_of(bronze) == "bronze"
    assert told_grade(bronze) == f"bronze; 0 of {len(silver)} silver checks ran"
    assert grade_of([*bronze[1:], *silver]) is None
    assert grade_of([*bronze, *silver[1:]]) == "bronze"
    assert grade_of([*bronze, *silver]) == "silver"


def test_unknown_check_is_refused_with_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"did you mean exact\.tokens"):
        checks_named(["exact.token"])


def test_cover_has_every_possible_pair() -> None:
    found = cover()
    for a, first in DIMENSIONS.items():
        for b, second in DIMENSIONS.items():
            for x in first:
                for y in second:
                    both = {**SIMPLEST, a: x, b: y}
                    if a < b and is_possible(both):
                        assert any(each[a] == x and each[b] == y for each in found), (a, x, b, y)
    assert all(map(is_possible, found))


def test_smallest_configuration_has_what_fails_alone() -> None:
    failing = {**SIMPLEST, "chunk": 5, "batch": 8, "cache": True}
    found = smallest(failing, lambda c: c["chunk"] is not None and c["batch"] > 1)
    assert found == {**SIMPLEST, "chunk": 8, "batch": 3}


def test_smallest_configuration_has_no_chunks_of_mixed_steps() -> None:
    failing = {**SIMPLEST, "chunk": 8, "mixed": True, "cache": True}
    assert smallest(failing, lambda c: c["cache"]) == {**SIMPLEST, "cache": True}


@pytest.mark.parametrize(
    ("parents", "chain", "follows"),
    [
        ((-1, 0, 1), (5, 6, 7), True),
        ((-1, 0, 1), (5, 7), False),
        ((-1, 0, 0), (6, 9), True),
        ((-1, 0, 0), (9,), False),
        ((-1, 0, 1), (5,), True),
    ],
)
def test_draft_follows_a_chain_to_its_leaves(
    parents: tuple[int, ...], chain: tuple[int, ...], follows: bool
) -> None:
    assert Drafted(tokens=(4, 5, 6), parents=parents).follows(chain) is follows


def _acceptance(algorithm: object) -> Verdict:
    return judge(checks_named(["gold.acceptance"])[0], Laboratory(Subject(algorithm=algorithm)))


def test_acceptance_of_no_drafts_is_not_applicable() -> None:
    verdict = _acceptance("NONE")
    assert verdict.status == "not applicable"
    assert "num_draft_tokens=1" in verdict.told


def test_acceptance_without_drafts_fails() -> None:
    verdict = _acceptance(WithEagle3(RootsAlone))
    assert verdict.status == "failed"
    assert "nothing was drafted" in verdict.told


def test_accept_length_is_that_which_the_plugin_declares() -> None:
    published = Registry().select("EAGLE3").info.conformance.accept_lengths["tiny-code"]
    assert Subject(algorithm="EAGLE3").declared_accept_length == published
    assert Subject(algorithm="EAGLE3", accept_length=3.0).declared_accept_length == 3.0
    # Of other weights, another shape or another model it says nothing.
    assert Subject(algorithm="EAGLE3", model="other").declared_accept_length is None
    settings = {"speculative_num_steps": 2}
    assert Subject(algorithm="EAGLE3", settings=settings).declared_accept_length is None


def test_right_plugin_has_the_declared_accept_length() -> None:
    told = _acceptance("NGRAM")
    assert told.status == "passed"
    assert re.fullmatch(r"2\.\d\d tokens a verification, 2\.47 declared", told.told)


def test_accept_length_below_the_references_fails() -> None:
    subject = Subject(algorithm=WithEagle3(NoFinalNorm), reference="EAGLE3")
    verdict = judge(checks_named(["gold.acceptance"])[0], Laboratory(subject))
    assert verdict.status == "failed"
    assert re.search(r"\d\.\d\d tokens a .* the reference EAGLE3 has \d\.\d\d here", verdict.told)
    right = attrs.evolve(subject, algorithm=WithEagle3())
    verdict = judge(checks_named(["gold.acceptance"])[0], Laboratory(right))
    assert verdict.status == "passed"
    assert "the reference EAGLE3 has" in verdict.told


class Declaring(WithEagle3):
    """Declares a reference."""

    def __init__(self, reference: str) -> None:
        super().__init__()
        self._reference = reference

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return attrs.evolve(super().describe(), conformance=Conformance(reference=self._reference))


def test_declared_reference_is_what_its_name_says() -> None:
    assert Subject(algorithm=Declaring("NGRAM")).measured_reference == "NGRAM"
    object_named = Subject(algorithm=Declaring("specplug_eagle3:algorithm"))
    assert object_named.measured_reference is Registry().select("EAGLE3").plugin
    given = attrs.evolve(object_named, reference="NGRAM")
    assert given.measured_reference == "NGRAM"
    assert Subject(algorithm="NGRAM").measured_reference is None


@pytest.mark.parametrize("reference", ["specplug_eagle3:nothing", "no_such_module:algorithm"])
def test_declared_reference_that_is_not_there_is_told(reference: str) -> None:
    with pytest.raises(UsageError, match=r'expected an installed algorithm.* or "module:object"'):
        _ = Subject(algorithm=Declaring(reference)).measured_reference


def test_acceptance_is_compared_with_the_declared_reference() -> None:
    told = _acceptance(Declaring("specplug_eagle3:algorithm"))
    assert told.status == "passed"
    assert "the reference EAGLE3 has" in told.told


def test_declared_settings_make_a_plugin_draft() -> None:
    laboratory = Laboratory(Subject(algorithm="SPARSE_SELF"))
    assert any(laboratory.observe(prompts=laboratory.prompts()[3:4]).drafts.values())
    settings = {"speculative_settings": {"sparse_self_tokens": 400}}
    laboratory = Laboratory(Subject(algorithm="SPARSE_SELF", settings=settings))
    assert not any(laboratory.observe(prompts=laboratory.prompts()[3:4]).drafts.values())


def test_joined_algorithm_has_the_settings_of_the_first() -> None:
    joined = Subject(algorithm="SPARSE_SELF+NGRAM").selected.info.conformance
    assert joined.settings == {"speculative_settings": {"sparse_self_tokens": 40}}


def test_read_is_told_with_its_line() -> None:
    laboratory = Laboratory(Subject(algorithm=WithEagle3(Item)))
    verdict = judge(checks_named(["conduct.waits"])[0], laboratory)
    assert "if batch.seq_lens.max().item() < 0:" in verdict.told


def test_plugin_object_of_wrong_form_fails() -> None:
    verdict = judge(checks_named(["form.hooks"])[0], Laboratory(Subject(algorithm=HookMisspelt())))
    assert verdict.status == "failed"


def test_import_of_torch_at_the_top_is_found(plugin_folder: Any) -> None:
    plugin_folder.write("HEAVY", ("from specplug import", "import torch\nfrom specplug import"))
    done = plugin_folder.specplug("check", "HEAVY", "--only", "form.listing")
    assert done.returncode == 1
    assert "imports torch at its top" in done.stderr
    assert done.stderr.splitlines()[-1] == f"See {PAGE}#formlisting"


def test_check_prints_table_and_grade(plugin_folder: Any) -> None:
    done = plugin_folder.specplug("check", "NGRAM", "--only", "form", "--only", "conduct.waits")
    assert done.returncode == 0, done.stderr
    assert "form.listing" in done.stdout
    assert "conduct.waits" in done.stdout
    assert "no read" in done.stdout
    assert "grade: not known: 2 of 5 bronze checks ran" in done.stdout


def test_check_tells_how_far_it_is_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def judged(check: Check, laboratory: Laboratory) -> Verdict:
        time.sleep(0.15)
        return Verdict(check, "passed", "", 0.15)

    monkeypatch.setattr("specplug.testing.verdict.judge", judged)
    monkeypatch.setattr("specplug.cli.progress.LINE_SECONDS", 0.1)
    main.main(["check", "NONE", "--only", "form"], standalone_mode=False)
    told = capsys.readouterr().err.splitlines()
    assert "progress:   0 % after 0 s: NONE, form.listing" in told
    assert "progress:  50 % after 0 s: NONE, form.hooks" in told


def test_check_prints_json(plugin_folder: Any) -> None:
    done = plugin_folder.specplug("check", "NGRAM", "--only", "form", "--json")
    told = json.loads(done.stdout)
    assert told["algorithm"] == "NGRAM"
    assert told["kit_version"] >= 1
    assert {check["status"] for check in told["checks"]} == {"passed"}
    assert told["grade"] is None
    assert "exact.tokens" in told["checks_left_out"]


def test_pytest_checks_a_name_in_an_empty_folder(plugin_folder: Any) -> None:
    installed = "specplug" in entry_points(group="pytest11").names
    loaded = [] if installed else ["-p", "specplug.testing.pytest_plugin"]
    command = [
        *loaded,
        "--specplug",
        "NGRAM",
        "--specplug-check",
        "form",
        "--specplug-seed",
        "3",
        "-v",
    ]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *command],
        cwd=plugin_folder.path,
        env=plugin_folder.environment(),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_conforms[form.listing] PASSED" in done.stdout
    assert "2 passed" in done.stdout


def test_declared_failure_that_passes_fails(plugin_folder: Any) -> None:
    named = "check", "NGRAM", "--only", "form.hooks", "--fails", "form.hooks=misspelt = known"
    done = plugin_folder.specplug(*named)
    assert done.returncode == 1, done.stdout
    assert "it passes, and is declared to fail: 'misspelt = known'" in done.stderr


def test_declared_failure_that_fails_passes(plugin_folder: Any) -> None:
    plugin_folder.write("HEAVY", ("from specplug import", "import torch\nfrom specplug import"))
    named = "check", "HEAVY", "--only", "form.listing", "--fails", "form.listing=reads a table"
    done = plugin_folder.specplug(*named)
    assert (done.returncode, done.stderr) == (0, "")
    assert "fails as declared" in done.stdout
    assert "reads a table" in done.stdout
    assert "grade: none" in done.stdout


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["form.hooks"], "expected a check and the reason why it fails"),
        (["form.hooks= "], "expected a check and the reason why it fails"),
        (["form.hooks=a", "form.hooks=b"], "form.hooks has a reason"),
    ],
)
def test_declared_failure_without_sense_is_refused(given: list[str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        declared(given)


def test_declared_failure_of_no_check_is_refused() -> None:
    with pytest.raises(UsageError, match=r"did you mean form\.hooks"):
        refuse_unknown({"form.hook": "none"})


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment without what the extras bring that a check could use."""
    for module in ("zmq", "xgrammar", "matplotlib", "copier"):
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.delitem(sys.modules, "specplug.disagg.zmq_transport", raising=False)


@pytest.fixture
def quick_ngram(shallow: ShallowTarget) -> Laboratory:
    settings = shallow.options("NGRAM")
    model, algorithm = settings.pop("model"), settings.pop("speculative_algorithm")
    return Laboratory(Subject(algorithm=algorithm, model=model, settings=settings, quick=True))


@pytest.mark.usefixtures("bare")
def test_check_without_pyzmq_is_left_out(quick_ngram: Laboratory) -> None:
    verdict = judge(checks_named(["conduct.state"])[0], quick_ngram)
    assert (verdict.status, verdict.is_wrong) == ("left out", False)
    assert verdict.told.endswith("pip install 'specplug[disagg]'")


@pytest.mark.usefixtures("bare")
def test_check_without_pyzmq_runs_without_transfers(quick_ngram: Laboratory) -> None:
    verdicts = [
        judge(check, quick_ngram) for check in checks_named(["exact.tokens", "blind.invariance"])
    ]
    assert [verdict.status for verdict in verdicts] == ["passed"] * 2, verdicts
    assert all("; none with a transfer: disaggregation needs" in v.told for v in verdicts)


@pytest.mark.usefixtures("bare")
def test_check_without_xgrammar_has_no_structured_output(quick_ngram: Laboratory) -> None:
    assert not any(each["structured"] for each in quick_ngram.cover())
    verdicts = [
        judge(check, quick_ngram) for check in checks_named(["exact.tokens", "blind.invariance"])
    ]
    assert [verdict.status for verdict in verdicts] == ["passed"] * 2, verdicts
    assert all(v.told.endswith("pip install 'specplug[grammar]'") for v in verdicts), verdicts


def test_tokenizer_that_xgrammar_refuses_is_told(
    quick_ngram: Laboratory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("of no known kind")

    monkeypatch.setattr("specplug.grammar.compiler._vocabulary", refuse)
    assert "xgrammar cannot use the tokenizer" in quick_ngram.no_grammars
    assert "of no known kind" in quick_ngram.told_without
    assert not any(each["structured"] for each in quick_ngram.cover())


@pytest.mark.parametrize("quick", [True, False])
def test_structured_requests_run_beside_plain_ones(quick: bool) -> None:
    laboratory = Laboratory(Subject(algorithm="NGRAM", quick=quick))
    free = laboratory.plain(sampled=True)
    found = laboratory.plain(sampled=True, structured=True)
    changed = [i for i, (a, b) in enumerate(zip(free, found, strict=True)) if a != b]
    assert changed == ([1, 2] if quick else [1, 2, 5, 6])
    configuration = {**SIMPLEST, "structured": True}
    assert laboratory.observe(configuration, sampled=True).tokens == found


@pytest.mark.usefixtures("bare")
def test_perfect_drafter_without_pyzmq_is_checked(shallow: ShallowTarget) -> None:
    settings = shallow.options("STANDALONE")
    model, algorithm = settings.pop("model"), settings.pop("speculative_algorithm")
    subject = Subject(algorithm=algorithm, model=model, settings=settings, quick=True)
    verdict = judge(checks_named(["blind.perfect"])[0], Laboratory(subject))
    assert verdict.status == "passed", verdict.told
    assert "in the worst of 3 configurations; none with a transfer" in verdict.told


def test_check_with_all_extras_leaves_nothing_out(quick_ngram: Laboratory) -> None:
    assert quick_ngram.cover() == cover()
    assert quick_ngram.told_without == ""
    assert judge(checks_named(["conduct.state"])[0], quick_ngram).status == "passed"


def test_grade_without_a_check_says_so() -> None:
    left_out, *others = sorted(all_checks(), key=lambda check: check.id != "conduct.state")
    verdicts = [Verdict(check, "passed", "", 0.0) for check in others]
    verdicts.append(Verdict(left_out, "left out", "install it", 0.0))
    assert grade_of(verdicts) == "gold"
    assert told_grade(verdicts) == "gold; conduct.state was left out: install it"


def test_seed_changes_texts_but_not_the_standard_ones() -> None:
    first, other = (Laboratory(Subject(algorithm="NGRAM", seed=seed)) for seed in (0, 1))
    assert set(first.prompts()).isdisjoint(other.prompts())
    assert first.standard_prompts() == other.standard_prompts() == first.prompts()
    seeds = [each.params(1, sampled=True, max_tokens=1)[0].seed for each in (first, other)]
    assert seeds[0] != seeds[1]


def test_quick_run_measures_nothing() -> None:
    laboratory = Laboratory(Subject(algorithm="NGRAM", quick=True))
    assert len(laboratory.prompts()) == 4
    verdicts = [judge(check, laboratory) for check in checks_named(["gold"])]
    assert {verdict.told for verdict in verdicts} == {"nothing is measured in a quick run"}


@pytest.mark.parametrize("quick", [True, False])
def test_pressure_retracts_requests(shallow: ShallowTarget, quick: bool) -> None:
    settings = shallow.options("NGRAM")
    model, algorithm = settings.pop("model"), settings.pop("speculative_algorithm")
    subject = Subject(algorithm=algorithm, model=model, settings=settings, quick=quick)
    laboratory = Laboratory(subject)
    texts = laboratory.prompts()
    configuration = {**SIMPLEST, "batch": 3, "pressure": True}
    with laboratory.engine(configuration, texts=texts) as llm:
        llm.generate(texts, laboratory.params(len(texts), sampled=False, max_tokens=12))
        assert llm.stats()["retractions"] > 0
    with laboratory.engine({**SIMPLEST, "batch": 3}) as llm:
        llm.generate(texts, laboratory.params(len(texts), sampled=False, max_tokens=12))
        assert llm.stats()["retractions"] == 0


def test_failure_of_many_lines_is_printed_in_lines() -> None:
    told = told_in_lines("blind.made: found\nbelow\x1b[1m\nSee the page")
    assert told.splitlines() == ["blind.made: found", "  below\\x1b[1m", "See the page"]
