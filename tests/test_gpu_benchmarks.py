"""The parts of ``benchmarks/gpu`` that run without a GPU: shapes, known drafts, times, tables."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import exactness_bf16
import kernel_trace
import long_contexts
import measurement
import points
import pytest
import shapes
import steps
import tables
from engines import VARIANTS, Engine, drafts_of
from known_drafts import KnownDrafts, accept_length, share_of

from specplug import LLM, SamplingParams
from specplug.registry import Registry

PROMPTS = [[5, 6, 7, 8], [9, 8, 7, 6, 5, 4], [11]]
RUN: dict[str, Any] = {"commit": "0123abc", "versions": {"torch": "2.0"}}
PARAMS = SamplingParams(max_tokens=25, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny target whose whole context decides each token, and all drafts for it."""
    folder = tmp_path_factory.mktemp("shapes")
    return shapes.write_shape(folder, "qwen3-tiny", shapes.DRAFTS, "cpu", context=1.0)


def _complete(
    base: Path, algorithm: str | object, draft: str | None = None
) -> tuple[list[tuple[int, ...]], float]:
    with LLM(
        base / "target",
        device="cpu",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft and base / draft,
        max_total_tokens=2048,
    ) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        return [output.token_ids for output in outputs], llm.stats()["mean_accept_length"]


@pytest.fixture(scope="module")
def plain(base: Path) -> list[tuple[int, ...]]:
    return _complete(base, "NONE")[0]


@pytest.mark.parametrize("draft", shapes.DRAFTS)
def test_write_shape_drafts_load_and_change_no_token(
    base: Path, plain: list[tuple[int, ...]], draft: str
) -> None:
    assert _complete(base, draft.upper(), draft)[0] == plain


@pytest.mark.parametrize("topk", [1, 3])
def test_known_drafts_all_right_are_all_accepted(
    base: Path, plain: list[tuple[int, ...]], topk: int
) -> None:
    known = {tuple(p): t for p, t in zip(PROMPTS, plain, strict=True)}
    drafts = KnownDrafts(known, 1.0, num_steps=3, topk=topk)
    assert _complete(base, drafts) == (plain, 4.0)


def test_known_drafts_none_right_are_all_refused(base: Path, plain: list[tuple[int, ...]]) -> None:
    drafts = KnownDrafts({}, 0.0, num_steps=3, topk=2)
    assert _complete(base, drafts) == (plain, 1.0)


def test_ngram_variant_known_text_is_drafted_and_refused(
    base: Path, plain: list[tuple[int, ...]]
) -> None:
    engine = Engine(base, VARIANTS["ngram"], 2048, device="cpu")
    engine.generate(PROMPTS, PARAMS.max_tokens)
    assert engine.drafting < 0.5  # nothing is known before the first generation
    _, steps, tokens = engine.generate(PROMPTS, PARAMS.max_tokens)
    assert engine.outputs == plain
    assert (steps, tokens) == (24, 75)
    assert engine.drafting > 0.95
    assert engine.drafted > 5
    engine.close()


def test_drafts_of_variants_names_each_draft_once() -> None:
    wanted = ["plain", "eagle3-chain-5", "eagle3-tree-32", "multi-layer-eagle", "ngram"]
    assert drafts_of(wanted) == ["eagle3", "multi_layer_eagle"]
    assert set(drafts_of(VARIANTS)) == set(shapes.DRAFTS)


@pytest.mark.parametrize("length", [1.0, 2.0, 3.5, 6.0])
def test_share_of_accept_length_gives_it_back(length: float) -> None:
    assert accept_length(share_of(length, 5), 5) == pytest.approx(length)


def test_share_of_longer_than_the_draft_is_refused() -> None:
    with pytest.raises(ValueError, match="expected 1 to 6"):
        share_of(7, 5)


def test_time_steps_leaves_the_prefill_out() -> None:
    def generate(prompts: list[list[int]], max_tokens: int) -> points.Generation:
        steps = max_tokens // 2
        return 5.0 + 0.004 * steps, steps, len(prompts) * max_tokens

    found = points.time_steps({"engine": generate}, [[1], [2]])["engine"]
    assert (found.ms, found.median) == pytest.approx((4.0, 4.0))
    assert found.accept_length == 2.0


def test_time_first_tokens_prompts_are_new_and_shared() -> None:
    """Engines get the same prompt in a round; the first round, which compiles, is left out."""
    given: dict[str, list[list[int]]] = {"one": [], "other": []}
    flushed: list[None] = []

    def engine(name: str, seconds: float) -> points.Generate:
        def generate(prompts: list[list[int]], max_tokens: int) -> points.Generation:
            assert max_tokens == 1
            given[name] += prompts
            return seconds * len(given[name]), 0, 1

        return generate

    found = steps.time_first_tokens(
        {"one": engine("one", 0.001), "other": engine("other", 0.002)},
        16,
        3,
        512,
        between=lambda: flushed.append(None),
    )
    assert found["one"] == pytest.approx([2, 3, 4])
    assert found["other"] == pytest.approx([4, 6, 8])
    assert given["one"] == given["other"]
    assert {len(prompt) for prompt in given["one"]} == {16}
    assert len({prompt[0] for prompt in given["one"]}) == len(flushed) == 4


def test_steps_prompt_tiny_writes_a_row_for_each_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["steps.py", "prompt", "--tiny", "--rounds", "1", "--output", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setenv("SPECPLUG_COMMIT", "0123abc")
    steps.main()
    run, *rows = measurement.read_results(tmp_path / "results.jsonl")
    assert run["kind"] == "run"
    assert [(row["tokens"], row["engine"]) for row in rows] == [(32, "specplug"), (64, "specplug")]
    assert all(row["median"] == row["rounds"][0] > 0 for row in rows)


def test_steps_choice_tiny_tells_of_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["steps.py", "choice", "--tiny", "--rounds", "1", "--batches", "2", "--alone", "eagle3"]
    told += ["ngram", "--output", str(tmp_path), "--models", str(tmp_path), "--workloads", "mixed"]
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setenv("SPECPLUG_COMMIT", "0123abc")
    steps.main()
    rows = measurement.read_results(tmp_path / "results.jsonl")
    found = {row["way"]: row for row in rows if row["kind"] == "choice"}
    depths = [f"eagle3 {depth}" for depth in (1, 2, 5)]
    assert set(found) == {"plain", "several", *depths, "ngram", "none asked"}
    assert [row["differ"] for row in found.values()] == [0] * 7
    lengths = [found[way]["accept_length"] for way in depths]
    assert lengths == sorted(lengths)
    assert found["none asked"]["drafted"] == found["plain"]["drafted"] == {"NONE": 1.0}
    assert found["none asked"]["accept_length"] == 1.0
    assert "NGRAM" in found["several"]["drafted"]  # whether EAGLE3 pays depends on the machine
    assert found["several"]["plan_us"] > found["plain"]["plan_us"] == 0
    assert min(found[way]["accept_length"] for way in ("eagle3 5", "ngram", "several")) > 1.2


def test_exactness_of_several_compares_all_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["exactness_bf16.py", "--tiny", "--several", "--count", "8", "--first", "2"]
    told += ["--models", str(tmp_path), "--output", str(tmp_path), "--set", 'dtype="float32"']
    monkeypatch.setattr(sys, "argv", told)
    monkeypatch.setenv("SPECPLUG_COMMIT", "0123abc")
    assert exactness_bf16.main() == 0
    rows = measurement.read_results(tmp_path / "results.jsonl")[1:]
    assert {row["by_dice"] for row in rows} == {True, False}
    names = {name for row in rows for name in row["algorithm"].split(",")}
    drafted = set().union(*(row["verifications_by_drafter"] for row in rows))
    assert drafted == {*names, "NONE"}
    assert len(drafted) > 3
    assert all(row["tokens"] > 100 for row in rows)
    assert "0 requests that differ, 0 tokens that differ" in capsys.readouterr().out


def test_steps_prompt_peers_that_fail_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vllm.py").write_text("raise ImportError('not here')")
    told = ["steps.py", "prompt", "--tiny", "--rounds", "1", "--output", str(tmp_path), "--peer"]
    told += ["--peer-python", sys.executable, "--peer-packages", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", told)
    steps.main()
    printed = capsys.readouterr().out
    assert all(f"{name}: left out" in printed for name in ("vllm", "vllm-invariant"))
    assert "not here" in (tmp_path / "vllm-invariant.log").read_text()


def test_point_prompts_begin_like_those_of_a_shorter_context() -> None:
    short, long = (points.Point(2, context).prompts(512) for context in (16, 48))
    assert [prompt[:16] for prompt in long] == short
    assert long[0] != long[1]


def test_tables_of_two_runs_keep_the_later_row(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    for ms in (9.0, 8.0):
        results.begin(**RUN, machine={"gpu": "Card X 80GB"}, settings=[], date="2026-01-02")
        results.add("price", what="step", ms={"exact": ms, "cublas": 8.0}, ratio=ms / 8, bar=1.05)
    rows = tables.collect([tmp_path])
    assert tables.name_of(rows) == "2026-01-02-card-x-80gb"
    assert "| step | 8.00 | 8.00 | 1.000 | 1.05 |" in tables.price_tables(rows)
    assert "9.00" not in tables.price_tables(rows)


def test_tables_of_two_cards_are_sections_of_their_own(tmp_path: Path) -> None:
    for card, ms in (("Card X", 6.0), ("Card Y", 4.0)):
        for variant, factor in (("plain", 1.0), ("ngram", 1.25)):
            results = measurement.Results(tmp_path / card / variant)
            results.begin(**RUN, machine={"gpu": card}, settings=[], date="2026-01-02")
            results.add("map", shape="tiny", variant=variant, batch=1, context=1024,
                        ms=ms * factor, accept_length=1.0, drafting=0.5)  # fmt: skip
    output = tmp_path / "results"
    sections = [
        tables.section(rows, output) for rows in tables.by_card(tables.collect([tmp_path])).values()
    ]
    assert [text.splitlines()[0] for text in sections] == [
        "### Card X, 2026-01-02",
        "### Card Y, 2026-01-02",
    ]
    for name, plain, text in zip("xy", ("6.00", "4.00"), sections, strict=True):
        assert f"| 1 | 1,024 | {plain} | 1.25* |" in text
        assert (output / f"2026-01-02-card-{name}.json").is_file()


def test_collect_of_a_written_file_gives_the_same_rows(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    results.begin(**RUN, machine={"gpu": "Card"}, settings=["a=1"], date="2026-01-02", shape="tiny")
    results.add("price", what="step", ms={"exact": 1, "cublas": 1}, ratio=1, bar=1.05)
    rows = tables.collect([tmp_path])
    assert (rows[1]["card"], rows[1]["shape"]) == ("Card", "tiny")
    assert rows[1]["settings_given"] == ["a=1"]
    tables.section(rows, tmp_path)
    assert tables.collect([tmp_path / "2026-01-02-card.json"]) == rows


def test_commits_line_names_each_kind_once(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    for commit in ("0123abc", "0123abc", "4567def"):
        results.begin(**{**RUN, "commit": commit}, machine={"gpu": "Card"}, settings=[])
        results.add("price", what="step")
    line = tables.commits_line(tables.collect([tmp_path]))
    assert line.strip() == "Commits: price 0123abc, 4567def."


def test_exactness_table_compares_with_and_without(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    counted = dict.fromkeys(("verifications", "accepted", "retractions", "cached_tokens"), 1)
    for settings, wrong in (([], [[], []]), (["fast=true"], [[[0, 3, 7]], []])):
        results.begin(**RUN, machine={"gpu": "Card"}, settings=settings, date="2026-01-02")
        results.add("exactness", target="tiny", number=0, algorithm="EAGLE", tokens=100,
                    requests=10, differences=wrong, **counted)  # fmt: skip
    text = tables.exactness_table(tables.collect([tmp_path]))
    assert "| as it comes | 10 | 100 | 0 (0.0%) | 0 (0.0%) |" in text
    assert "| `fast=true` | 10 | 100 | 1 (10.0%) | 7 (7.0%) |" in text


def test_choice_is_compared_with_the_best_single_one(tmp_path: Path) -> None:
    """Round by round, where a machine is slower in one of them; of two measurements the later."""
    rates = {
        "plain": [100, 50, 100],
        "several": [180, 80, 150],
        "ngram": [90, 60, 110],
        "eagle3 1": [120, 60, 110],
        "eagle3 2": [150, 70, 140],
        "none asked": [99, 50, 99],
    }
    results = measurement.Results(tmp_path)
    results.begin(machine={"gpu": "Card"}, date="2026-01-02", shape="some", **RUN)
    for share in (0.5, 1.0):
        for way, own in rates.items():
            given = [each * (share if way == "several" else 1.0) for each in own]
            results.add("choice", workload="agent", batch=4, way=way, rates=given, plan_us=30.4,
                        learn_us=8.0)  # fmt: skip
    rows = tables.collect([tmp_path])
    told = tables.section(rows, tmp_path)
    line = "| agent | 4 | 100 | 1.60 (1.55 to 1.70) | eagle3 2: 1.40 | 1.143 | 0.990 | 30 + 8 |"
    assert line in told
    assert told.endswith("(results/2026-01-02-card-choice.png)\n")
    assert (tmp_path / "2026-01-02-card-choice.png").stat().st_size > 10_000


def test_tables_say_by_how_much_a_bar_is_missed(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    results.begin(**RUN, machine={"gpu": "Card"}, settings=[], date="2026-01-02")
    for what, ratio in (("step", 1.0), ("prefill", 1.5)):
        results.add("price", what=what, ms={}, ratio=ratio, bar=1.25)
    told = tables.missed_line(tables.collect([tmp_path]))
    assert "Of 2 bars 1 are missed:" in told
    assert "- exactness, prefill: 1.500, at most 1.25 (by 20.0%)" in told


def test_map_measures_every_algorithm_that_ships() -> None:
    found = {variant.algorithm for variant in VARIANTS.values()}
    names = {each for each in found if isinstance(each, str)} | {"NGRAM"}
    assert set(Registry().names()) <= names


def test_trace_leaves_out_the_steps_that_the_profiler_delays() -> None:
    """In the first two a kernel comes late; the others are as long as their kernels."""
    steps, events, now = kernel_trace.FIRST + kernel_trace.STEPS, [], 0.0
    for step in range(steps):
        now += 500 if step < kernel_trace.FIRST else 1
        for name, duration in (("_row_tails", 3.0), ("_linear", 5.0), (kernel_trace.LAST, 1.0)):
            events.append({"ph": "X", "cat": "kernel", "name": name, "ts": now, "dur": duration})
            now += duration
    trace = kernel_trace.read_trace(events, on_gpu=True)
    assert trace.num_steps == steps - kernel_trace.FIRST - 1
    assert max(gap for gap, _, _ in trace.gaps()) == 1
    assert trace.by("kind") == [("products", 0.005, 1.0), ("attention", 0.003, 1.0),
                                ("bookkeeping", 0.001, 1.0)]  # fmt: skip


RESULTS = sorted(Path("benchmarks").rglob("results/*.json*"))


def test_results_row_names_commit_card_and_versions(tmp_path: Path) -> None:
    results = measurement.Results(tmp_path)
    with pytest.raises(AssertionError, match=r"before Results\.begin"):
        results.add("price", what="step")
    results.begin(**RUN, machine={"gpu": "Card"})
    results.add("price", what="step")
    for row in measurement.read_results(tmp_path / "results.jsonl"):
        assert (row["commit"], row["card"], row["versions"]) == (
            "0123abc",
            "Card",
            {"torch": "2.0"},
        )


@pytest.mark.parametrize("file", RESULTS, ids=lambda file: file.name)
def test_results_in_the_repository_say_what_they_are_of(file: Path) -> None:
    text = file.read_text()
    rows = json.loads(text) if file.suffix == ".json" else map(json.loads, text.splitlines())
    for row in rows:
        assert re.fullmatch(r"[0-9a-f]{7,40}", row["commit"]), row
        assert row["card"].startswith(("NVIDIA", "2 x NVIDIA")), row
        assert {"torch"} < set(row["versions"]), row


def test_measured_commit_without_a_checkout_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECPLUG_COMMIT", "0123abc")
    assert measurement.measured_commit() == "0123abc"
    monkeypatch.delenv("SPECPLUG_COMMIT")
    monkeypatch.setattr(measurement, "__file__", str(tmp_path / "measurement.py"))
    with pytest.raises(SystemExit, match="set SPECPLUG_COMMIT"):
        measurement.measured_commit()


def test_long_contexts_accept_as_set_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of contexts that are longer than what drafts see."""
    output = tmp_path / "results"
    words = ["--tiny", "--rounds", "1", "--models", str(tmp_path), "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["long_contexts.py", *words])
    long_contexts.main()
    rows = [
        row for row in measurement.read_results(output / "results.jsonl") if row["kind"] == "long"
    ]
    assert len(rows) == len(long_contexts.TINY) * len(long_contexts.MODES)
    for row in rows:
        assert (row["differ"], row["tokens"] > 0) == (0, True)
        assert (row["accept_length"] > 2) is (row["steps"] > 0)
