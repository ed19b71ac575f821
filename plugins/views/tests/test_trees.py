"""The page's records are the run's, and looking changes no token."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from specplug import LLM, PluginError, SamplingParams, UsageError, hookimpl
from specplug.cli import main
from specplug_views import Trace, Trees
from specplug_views.token_text import GrowingText, TokenText

from .conftest import PROMPTS, TREE, Viewed, records_of, view

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "tree": ("EAGLE3", TREE),
    "chain": ("EAGLE3", {"speculative_num_steps": 4, "speculative_eagle_topk": 1}),
    "text": ("NGRAM", {}),
    "both": ("EAGLE3+NGRAM", {}),
    "one of two": ("NGRAM,EAGLE3", {}),
    "none": ("NONE", {}),
    "budget": ("EAGLE3", {**TREE, "verify_budget": 14}),
    "pressure": ("EAGLE3", {**TREE, "max_total_tokens": 64, "page_size": 4}),
    "no overlap": ("EAGLE3", {**TREE, "disable_overlap_schedule": True}),
    "two instances": ("EAGLE3", {**TREE, "disaggregation": "both"}),
    "mixed": ("EAGLE3", {**TREE, "enable_mixed_chunk": True, "chunked_prefill_size": 8}),
}


def decodes(records: list[dict[str, Any]], request: str) -> list[dict[str, Any]]:
    return [r for r in records if r["kind"] == "decode" and r["request"] == request]


@pytest.mark.parametrize("case", CASES)
def test_page_has_what_the_run_did(case: str, tmp_path: Path) -> None:
    algorithm, settings = CASES[case]
    params = SamplingParams(max_tokens=24, temperature=0.8, seed=5)
    viewed = view(tmp_path, algorithm, params, **settings)
    with LLM(device="cpu", disable_extensions=["VIEWS"]) as llm:
        expected = llm.generate(PROMPTS, params)
    for output, plain in zip(viewed.outputs, expected, strict=True):
        assert output.token_ids == plain.token_ids
        assert output.text == plain.text
        check_request(viewed, output.request_id, plain.token_ids, plain.text or "")
    check_drafts(viewed)
    if case == "pressure":
        assert any(report.retracted_ids for report in viewed.witness.reports)
    if case == "two instances":
        assert {r["run"] for r in viewed.records if r["kind"] == "step"} == {0, 1}
    if case == "mixed":
        assert any(not all(report.sampled) for report in viewed.witness.reports)
    chosen = [step for step in viewed.records if step["kind"] == "step" and "reason" in step]
    assert bool(chosen) == (case == "one of two")
    reports = {report.number: report for report in viewed.witness.reports}
    for step in chosen:
        report = reports[step["step"]]
        assert (step["reason"], step["expected"]) == (
            report.reason,
            round(report.expected_tokens, 2),
        )
    if case == "budget":
        assert any(-1 in r["target"] for r in viewed.records if r["kind"] == "decode")


def check_request(viewed: Viewed, request: str, tokens: tuple[int, ...], text: str) -> None:
    """A request's records add up to its output."""
    own = [r for r in viewed.records if r.get("request") == request and "new" in r]
    assert tuple(token for r in own for token in r["new"]) == tokens
    assert "".join(piece for r in own for piece in r["text"]) == text
    (end,) = [r for r in viewed.records if r["kind"] == "end" and r["request"] == request]
    assert end["reason"] == "length"


def check_drafts(viewed: Viewed) -> None:
    """Each draft is what the target verified, and its path what the step accepted."""
    records, drafts = viewed.records, iter(viewed.witness.drafts)
    for report in viewed.witness.reports:
        if not report.decode_ids:
            continue
        seen = next(drafts)
        for i, request in enumerate(report.decode_ids):
            (found,) = [r for r in decodes(records, request) if r["step"] == report.number]
            nodes = len(found["tokens"])
            assert nodes >= found["width"] == report.widths[i]
            assert found["drafter"] == report.drafters[i]
            assert found["planned"] == report.planned[i]
            assert found["tokens"] == seen["tokens"][i][:nodes]
            assert found["target"] == seen["target"][i][:nodes]
            assert set(seen["target"][i][nodes:]) <= {-1}
            parents = found.get("parents") or [node - 1 for node in range(nodes)]
            if seen["parents"] is not None:
                assert parents == seen["parents"][i][:nodes]
            path = found["path"]
            assert len(path) == report.accept_lens[i]
            assert path[0] == 0
            for parent, node in pairwise(path):
                assert parents[node] == parent
                assert found["tokens"][node] == found["target"][parent]
            assert len(found["new"]) == report.kept[i]
            if report.chances is not None:
                expected = abs(report.chances[i, :nodes]).tolist()
                assert found["chances"] == pytest.approx(expected, abs=6e-4)
    assert next(drafts, None) is None


def test_empty_run_leaves_a_page_and_a_trace(tmp_path: Path) -> None:
    viewed = view(tmp_path, prompts=[])
    assert [record["kind"] for record in viewed.records] == ["run"]
    assert {event["ph"] for event in viewed.events} == {"M", "i"}


def test_aborted_request_is_shown_to_its_end(tmp_path: Path) -> None:
    page, trace = tmp_path / "trees.html", tmp_path / "trace.json"
    views = [Trees(page), Trace(trace)]
    with LLM(device="cpu", speculative_algorithm="EAGLE3", extensions=views) as llm:
        name = llm.add_request(PROMPTS[0], SamplingParams(max_tokens=500, ignore_eos=True))
        other = llm.add_request(PROMPTS[1], SamplingParams(max_tokens=30))
        for _ in range(4):
            llm.step()
        records_of(page)  # it is whole while the run lasts
        llm.abort(name)
        (output,) = [
            o for _ in range(40) for o in llm.step() if o.request_id == other and o.finished
        ]
    records = records_of(page)
    ends = {r["request"]: r["reason"] for r in records if r["kind"] == "end"}
    assert ends == {name: "abort", other: "length"}
    own = [r for r in records if r.get("request") == other and "new" in r]
    assert tuple(token for r in own for token in r["new"]) == output.token_ids


def test_text_of_others_ends_no_script(tmp_path: Path) -> None:
    text = '</script><script>alert(1)</script><!-- <b>&amp; größe 日本語 🙂 \u2028"\\'
    viewed = view(tmp_path, prompts=[text, text + "x"])
    page = viewed.page.read_text(encoding="utf-8")
    template = page.partition('id="records">')[0]
    rest = page[len(template) :].partition("</script>")[0]
    assert not set("<>&") & set(rest.removeprefix('id="records">'))
    assert page.count("</script>") == template.count("</script>") + 1
    assert [r["prompt"] for r in viewed.records if r["kind"] == "request"] == [text, text + "x"]


def test_request_of_one_token_has_it(tmp_path: Path) -> None:
    viewed = view(tmp_path, params=SamplingParams(max_tokens=1))
    for output in viewed.outputs:
        check_request(viewed, output.request_id, output.token_ids, output.text or "")


def test_object_of_two_runs_shows_both(tmp_path: Path) -> None:
    trees = Trees(tmp_path / "trees.html")
    for algorithm in ("EAGLE3", "NGRAM"):
        with LLM(device="cpu", speculative_algorithm=algorithm, extensions=[trees]) as llm:
            llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    records = records_of(tmp_path / "trees.html")
    assert [r["algorithm"] for r in records if r["kind"] == "run"] == ["EAGLE3", "NGRAM"]
    requests = [r["request"] for r in records if r["kind"] == "request"]
    assert len(set(requests)) == 2


class Failing:
    """Fails once, after a draft was verified."""

    def __init__(self) -> None:
        self.steps = 0

    @hookimpl(wrapper=True)
    def build_draft_input(self, batch: Any) -> Generator[None, Any, Any]:
        self.steps += not batch.is_prefill
        if self.steps == 3:
            self.steps += 1
            raise RuntimeError("once")
        return (yield)


def test_step_that_failed_is_not_shown_as_another(tmp_path: Path) -> None:
    page = tmp_path / "trees.html"
    views = [Trees(page), Failing()]
    params = SamplingParams(max_tokens=16)
    with LLM(device="cpu", speculative_algorithm="EAGLE3", extensions=views) as llm:
        with pytest.raises(PluginError, match="once"):
            llm.generate(PROMPTS, params)
        outputs = llm.generate(PROMPTS, params)
    records = records_of(page)
    ends = [r["reason"] for r in records if r["kind"] == "end"]
    assert ends == ["error"] * 3 + ["length"] * 3
    for output in outputs:
        own = [r for r in records if r.get("request") == output.request_id and "new" in r]
        assert tuple(token for r in own for token in r["new"]) == output.token_ids


def test_text_of_tokens_that_are_parts_of_characters() -> None:
    with LLM(device="cpu") as llm:
        tokenizer = llm.tokenizer
        text = "größe — 日本語 🙂."
        tokens = tokenizer.encode(text)
        assert len(tokens) > len(text)
        of_tokens = TokenText(tokenizer)
        growing = GrowingText(of_tokens, tokenizer.encode("x = "))
        added = [growing.add(token) for token in tokens]
        assert "".join(added) == text
        assert "" in added
        assert of_tokens.piece(tokenizer.encode("日")[0]).startswith("⟨")
        assert of_tokens.piece(tokenizer.encode("a the")[-1]) == " the"
    unnamed = TokenText(None)
    assert (unnamed.piece(7), unnamed.all([7, 8])) == ("⟨7⟩", "⟨7⟩⟨8⟩")


def test_file_that_is_lost_stops_the_view_alone(tmp_path: Path) -> None:
    page = tmp_path / "trees.html"
    with LLM(device="cpu", speculative_algorithm="EAGLE3", extensions=[Trees(page)]) as llm:
        page.unlink()
        with pytest.warns(Warning, match=r"switched off: extension Trees .* FileNotFoundError"):
            (lost,) = llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8))
    with warnings.catch_warnings(), LLM(device="cpu") as llm:
        assert llm.generate(PROMPTS[:1], SamplingParams(max_tokens=8))[0].text == lost.text


@pytest.mark.parametrize("kind", [Trace, Trees])
def test_place_without_a_folder_is_refused_at_once(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="its folder is not there; expected a file"):
        kind(tmp_path / "no" / "file")
    with pytest.raises(UsageError, match="it is a folder; expected a file"):
        kind(tmp_path)


def test_options_of_generate(tmp_path: Path) -> None:
    page, trace = tmp_path / "trees.html", tmp_path / "trace.json"
    typed = ["generate", "--speculative-algorithm", "EAGLE3", "--max-new-tokens", "9", PROMPTS[0]]
    plain = CliRunner().invoke(main, typed)
    done = CliRunner().invoke(main, [*typed, "--trees", str(page), "--trace", str(trace)])
    assert (done.exit_code, done.stdout) == (0, plain.stdout)
    assert sum(len(r.get("new", ())) for r in records_of(page)) == 9
    assert Viewed(None, (), page, trace).events  # type: ignore[arg-type]
    done = CliRunner().invoke(main, [*typed, "--trees", str(tmp_path)])
    assert isinstance(done.exception, UsageError)
