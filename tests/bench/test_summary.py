"""The figures of a benchmark."""

from __future__ import annotations

import json

import pytest

from specplug.bench.summary import (
    PARTS,
    Difference,
    Drafted,
    ScoredNodes,
    Spread,
    Summary,
    TimeSplit,
    benefits,
    caption,
    differences,
    legend,
    summarize,
    tables,
    undrafted,
)

SECONDS = {"NONE": [4.0, 8.0, 4.0], "A": [2.0, 2.0, 4.0], "B": [1.0, 1.0, 1.0]}


def test_spread():
    assert Spread.of([3.0]) == Spread(median=3.0, low=3.0, high=3.0, least=3.0, greatest=3.0)
    assert Spread.of([4.0, 2.0]) == Spread(median=3.0, low=2.5, high=3.5, least=2.0, greatest=4.0)
    found = Spread.of([1.0, 9.0, 2.0, 3.0, 4.0])
    assert found == Spread(median=3.0, low=2.0, high=4.0, least=1.0, greatest=9.0)
    assert (found.within(True), found.within(False)) == ((2.0, 4.0), (1.0, 9.0))


def test_speed_up_is_against_the_baseline_of_the_same_round(make_series):
    (none, b, a), problems = summarize(make_series("A,B", SECONDS))
    assert problems == []
    assert [none.label, b.label, a.label] == ["NONE", "B", "A"], "the fastest first"
    assert a.speed_up.median == 2.0  # of 2, 4 and 1; the ratio of the medians would be 2 too
    assert (a.speed_up.low, a.speed_up.high) == (1.5, 3.0)
    assert b.speed_up.median == 4.0
    assert none.speed_up == Spread.of([1.0])
    assert none.tokens_per_second.median == 1.0
    skewed = {"NONE": [1.0, 2.0, 9.0], "A": [2.0, 1.0, 1.5]}
    _, a = summarize(make_series("A", skewed))[0]
    assert a.speed_up.median == 2.0, "not 2 / 1.5"


def test_acceptance(make_series):
    none, mine = summarize(make_series("A", {"NONE": [1.0], "A": [1.0]}))[0]
    assert (mine.drafted, mine.accepted) == ([10, 8, 4], [5, 4, 2])
    assert mine.acceptance == [0.5, 0.5, 0.5]
    assert mine.mean_accept_length == 2.1
    assert (none.acceptance, none.mean_accept_length) == ([], 1.0)


def test_who_drafted_is_told_where_several_can(make_series, make_report):
    seconds = {"NONE": [4.0, 4.0], "[A,B]": [2.0, 2.0], "A": [2.0, 2.0]}
    report = make_report(make_series("[A,B],A", seconds))
    _, several, alone = report.summaries
    assert alone.drafters == {}
    assert list(several.drafters) == ["NONE", "A"], "the busiest first"
    assert several.drafters["A"] == Drafted(share=0.4, verified_nodes=4.0, accept_length=3.5)
    found = json.loads(json.dumps(several.as_mapping()))["drafters"]
    assert found["NONE"] == {"share": 0.6, "verified_nodes": 1.0, "accept_length": 1.0}
    (table,) = (each for each in tables(report) if "drafter" in each.columns)
    assert [list(row) for row in table.rows] == [
        ["[A,B]", "1", "NONE", "60%", "1.00", "1.00"],
        ["[A,B]", "1", "A", "40%", "4.00", "3.50"],
    ]
    assert "drafter" not in table.right
    assert "in which the drafter drafted" in " ".join(legend(report))


def test_what_speculation_brought_is_told(make_series, make_report):
    series = make_series("A", {"NONE": [4.0], "A": [2.0]})
    series[0].runs[0].statistics["speculation"] = None
    series[1].runs[0].statistics["speculation"] = {
        "accept_length": 2.1, "draft_share": 0.3, "speed_up": 1.8,
        "alone": {"A": {"depth": 3, "speed_up": 1.7}}, "shallower": None,
    }  # fmt: skip
    assert benefits(make_report(series)) == [
        "A, batch 1: speculation: 2.10 tokens a step, 1.80 times plain decoding as measured in "
        "this run; drafting took 30 % of decoding; alone, as in the steps it was chosen for: "
        "A 1.70 (3 deep)"
    ]


def test_rounds_that_drafted_to_other_depths_are_added_up(make_series):
    (short,) = make_series("NONE", {"NONE": [1.0]})
    (_, deep) = make_series("A", {"NONE": [1.0], "A": [1.0]})
    deep.runs += make_series("A", {"NONE": [1.0], "A": [1.0]}, drafted=[6])[1].runs
    short.runs *= 2
    summary = Summary(deep, short)
    assert summary.drafted == [16, 8, 4]
    assert summary.accepted == [8, 4, 2]


def test_nothing_was_verified(make_series):
    none, mine = make_series("A", {"NONE": [1.0], "A": [1.0]}, drafted=())
    mine.runs[0].statistics.update(accepted=0, verifications=0)
    assert Summary(mine, none).mean_accept_length is None


def test_time_split_adds_up_to_the_wall(make_series):
    (none,) = make_series("NONE", {"NONE": [4.0, 6.0]})
    split = TimeSplit.of(none.runs)
    assert split.wall == pytest.approx(10.0)
    assert split.shares() == pytest.approx(
        {
            "propose": 0.2,
            "target": 0.3,
            "verify": 0.1,
            "extend": 0.1,
            "prefill": 0.2,
            "other": 0.1,
        }
    )
    assert tuple(split.shares()) == PARTS


def test_differences(make_series, make_report):
    outputs = {"A": [[1, 2, 3, 4], [1, 2, 9, 4]], "B": [[1, 2, 3], [1, 2, 3, 4]]}
    seconds = {name: [1.0, 1.0] for name in SECONDS}
    report = make_report(make_series("A,B", seconds, batch_size=2, outputs=outputs))
    assert not report.sound
    none, a, b = report.summaries
    assert none.differences == []
    assert a.differences == [Difference(1, 2, 2), Difference(2, 2, 2)]
    assert b.differences == [Difference(1, 1, 3), Difference(2, 1, 3)]
    assert differences(report)[0] == (
        "A, batch 2: 2 of 4 outputs are not NONE's, the first at round 1, prompt 2, output token 3"
    )
    identical = [row[-1] for row in tables(report)[0].rows]
    assert identical == ["yes", "NO", "NO"]
    assert make_report(make_series("A,B", SECONDS)).sound


def test_requests_without_drafts(make_series, make_report):
    series = make_series("NONE,A", {"NONE": [2, 2], "A": [1, 1]}, 4)
    for run, counts in zip(
        series[1].runs, ({"grammar": 1}, {"grammar": 2, "failed": 1}), strict=True
    ):
        run.statistics["undrafted"] = counts
    report = make_report(series)
    none, a = report.summaries
    assert (none.undrafted, a.undrafted) == ({}, {"grammar": 3, "failed": 1})
    assert a.as_mapping()["undrafted"] == {"grammar": 3, "failed": 1}
    assert undrafted(report) == [
        "A, batch 4: 1 request decoded without drafts: failed",
        "A, batch 4: 3 requests decoded without drafts: grammar",
    ]


@pytest.mark.parametrize("skipped", [True, False])
def test_problems(make_series, make_report, skipped):
    series = make_series("A,B", SECONDS)
    series[1].problem, series[1].skipped = "told", skipped
    series[1].runs = series[1].runs[:1]
    report = make_report(series)
    assert [summary.label for summary in report.summaries] == ["NONE", "B"]
    assert report.problems == [
        {"variant": "A", "batch_size": 1, "skipped": skipped, "reason": "told"}
    ]
    assert report.sound is skipped


def test_tables(make_series, make_report):
    more = make_series("A,B", {k: [s / 4 for s in v] for k, v in SECONDS.items()}, batch_size=8)
    found = tables(make_report(make_series("A,B", SECONDS), more))
    speed, time, nodes, acceptance, scores = found
    assert speed.rows[:3] == [
        ["NONE", "1", "-", "-", "-", "1.0", "1.00", "-", "1.00", "yes"],
        ["B", "1", "3", "1", "4", "4.0", "4.00", "4.00 to 8.00", "2.10", "yes"],
        ["A", "1", "3", "1", "4", "2.0", "2.00", "1.00 to 4.00", "2.10", "yes"],
    ]
    assert [row[1] for row in speed.rows] == ["1"] * 3 + ["8"] * 3
    assert time.rows[0] == ["NONE", "1", "1333.33", "20%", "30%", "10%", "10%", "20%", "10%"]
    assert nodes.columns == ("algorithm", "batch", "drafted", "verified", "accepted", "wasted")
    assert nodes.rows[0] == ["B", "1", "5.40", "3.20", "2.10", "1.10"]
    assert acceptance.columns == ("algorithm", "batch", "drafts", "pos 1", "pos 2", "pos 3")
    assert [row[0] for row in acceptance.rows] == ["B", "B", "A", "A"] * 2
    assert acceptance.rows[0][2:] == ["reach", "30", "24", "12"]
    assert acceptance.rows[1][2:] == ["accepted", *["50%"] * 3]
    assert scores.rows[0] == ["B", "1", "43.9%", "50.0%", "0.061", ".2..5....9"]
    assert [row[0] for row in scores.rows] == ["B", "A", "B", "A"]
    left = {"algorithm", "identical", "reliability", "drafts"}
    for table in found:
        assert all(len(row) == len(table.columns) for row in table.rows)
        assert set(table.right) == set(table.columns) - left


def test_two_rounds_have_a_range_and_four_have_quartiles(make_series, make_report):
    """Of two nothing lies between the quartiles."""
    shown = []
    for rounds in (2, 4):
        seconds = {"NONE": [4.0] * rounds, "A": [1.0, 2.0, 4.0, 2.0][:rounds]}
        report = make_report(make_series("A", seconds))
        (speed, *_), words = tables(report), " ".join(legend(report))
        shown.append((speed.columns[7], speed.rows[1][7], "half of the rounds" in words))
    assert shown == [
        ("range", "2.00 to 4.00", False),
        ("quartiles", "1.75 to 2.50", True),
    ]


def test_accepted_of_all_verifications_give_the_accept_length(make_series):
    mine = Summary(*reversed(make_series("A", {"NONE": [1.0], "A": [1.0]})))
    survival = [accepted / 10 for accepted in mine.accepted]
    assert survival == [0.5, 0.4, 0.2]
    assert mine.mean_accept_length == pytest.approx(1 + sum(survival))
    assert mine.wasted_nodes == pytest.approx(3.2 - 2.1)


def test_without_drafts_there_is_no_third_table(make_series, make_report):
    report = make_report(make_series("NONE", {"NONE": [1.0]}))
    assert len(tables(report)) == 2
    assert "reliability" not in " ".join(legend(report))


def test_without_scores_there_is_no_fourth_table(make_series, make_report):
    series = make_series("A", SECONDS)
    for run in series[1].runs:
        for name in ("scored", "predicted", "accepted_of_scored", "proposed"):
            del run.statistics[name]
    report = make_report(series)
    assert [table.columns[-1] for table in tables(report)] == [
        *("identical", "other", "wasted", "pos 3")
    ]
    found = report.as_mapping()["results"][1]
    assert (found["calibration_error"], found["reliability"]) == (None, {})
    assert (found["proposed_nodes"], found["verified_nodes"]) == (None, 3.2)


def test_reliability_adds_up_the_rounds(make_series):
    a = Summary(*reversed(make_series("A", SECONDS)))
    rounds = len(SECONDS["A"])
    assert list(a.reliability) == [10, 45, 95]
    assert a.reliability[45] == ScoredNodes(10 * rounds, 4.75 * rounds, 5 * rounds)
    assert a.calibration_error == pytest.approx((1.0 + 0.25 + 0.1) / 22)


def test_words(make_series, make_report):
    report = make_report(make_series("NONE", {"NONE": [1.0]}))
    assert caption(report)[0] == (
        "tiny-code, float32, on a processor, 1 thread; greedy, at most 4 new tokens per prompt, "
        "page size 16; 1 round of 4 prompts of the built-in set"
    )
    report.settings["workload"] = "mixed"
    assert "greedy, a quarter at temperature 4, at most" in caption(report)[0]
    assert caption(report)[0].endswith("of the built-in set, workload mixed")
    assert "GPU" not in " ".join(legend(report))
    machine = {"cpu": "a processor", "threads": 1, "gpu": "a GPU"}
    report = make_report(make_series("NONE", {"NONE": [1.0]}), machine=machine)
    assert "on a GPU waiting for it is other" in " ".join(legend(report))


def test_json(make_series, make_report):
    report = json.loads(json.dumps(make_report(make_series("A,B", SECONDS)).as_mapping()))
    _, fast, _ = report["results"]
    assert fast["variant"] == "B"
    spread = {"median": 4.0, "low": 4.0, "high": 6.0, "least": 4.0, "greatest": 8.0}
    assert fast["speed_up"] == spread
    assert fast["seconds"]["wall"] == pytest.approx(3.0)
    parts = fast["seconds_by_part"]
    assert sum(parts.values()) == pytest.approx(3.0)
    assert parts["propose"] + parts["extend"] == pytest.approx(fast["seconds"]["draft"])
    assert [each["tokens_per_second"] for each in fast["rounds"]] == [4.0, 4.0, 4.0]
