"""The trace has the run's steps and their times."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest

from .conftest import Viewed

PARTS = {"propose": "draft", "target": "target", "verify": "verify", "extend": "extend"}


def test_steps_have_the_durations_of_the_reports(tree: Viewed) -> None:
    steps = {e["name"]: e for e in tree.events if e["ph"] == "X" and e["tid"] == 1 and "args" in e}
    reports = tree.witness.reports
    names = {process["name"] for process in tree.events if process["ph"] == "X"}
    assert {*PARTS.values(), *(f"host {report.number}" for report in reports)} <= names
    for report in reports:
        event = steps[f"{report.mode} {report.number}"]
        on_device = sum(s for part, s in report.seconds.items() if part != "host")
        assert event["dur"] == pytest.approx(on_device * 1e6, abs=1)
        assert event["args"]["widths"] == str(list(report.widths)).replace(" ", "")


def test_parts_stand_inside_of_their_steps(tree: Viewed) -> None:
    inside = [e for e in tree.events if e["ph"] == "X" and e["pid"] == 1 and e["tid"] == 1]
    steps = [e for e in inside if " " in e["name"]]
    parts = [e for e in inside if e["name"] in PARTS.values()]
    assert len(steps) == len(tree.witness.reports)
    assert len(parts) == sum(len(r.seconds) - 1 for r in tree.witness.reports)
    assert all(type(e[key]) is int for e in inside for key in ("ts", "dur"))
    for part in parts:
        assert any(
            step["ts"] <= part["ts"] and part["ts"] + part["dur"] <= step["ts"] + step["dur"]
            for step in steps
        )


def test_times_rise_on_every_track(tree: Viewed) -> None:
    tracks = defaultdict(list)
    for event in tree.events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    assert len(tracks) == 2 + len(tree.outputs)
    for (process, track), events in tracks.items():
        for before, after in pairwise(events):
            assert 0 <= before["ts"] <= after["ts"]
        slices = [e for e in events if e["ph"] == "X" and e["name"] not in PARTS.values()]
        for before, after in pairwise(slices):
            assert before["ts"] + before["dur"] <= after["ts"], (process, track)


def test_requests_have_tracks_with_accept_lengths(tree: Viewed) -> None:
    names = {
        (e["pid"], e["tid"]): e["args"]["name"]
        for e in tree.events
        if e["ph"] == "M" and e["name"] == "thread_name"
    }
    for output in tree.outputs:
        track = next(k for k, name in names.items() if name == f"request {output.request_id}")
        own = [e for e in tree.events if (e["pid"], e["tid"]) == track and e["ph"] != "M"]
        kept = [e["args"]["kept"] for e in own if e["name"].startswith("accept ")]
        assert tuple(n for n in kept if n) == output.accept_lens
        assert own[0]["name"] == f"prefill {len(output.prompt_token_ids)}"
        (end,) = [e for e in own if e["ph"] == "i"]
        assert end["name"] == "end: length"
        assert end["ts"] > own[0]["ts"]


def test_curves_have_batch_sizes_and_accept_lengths(tree: Viewed) -> None:
    drawn = defaultdict(list)
    for event in tree.events:
        if event["ph"] == "C":
            drawn[event["name"]].append(event["args"])
    decodes = [r for r in tree.witness.reports if r.decode_ids]
    assert [each["nodes"] for each in drawn["nodes verified"]] == [sum(r.widths) for r in decodes]
    means = [sum(r.accept_lens) / len(r.accept_lens) for r in decodes]
    assert [each["tokens"] for each in drawn["mean accept length"]] == pytest.approx(means)
    batch = [(len(r.decode_ids), len(r.prefill_ids)) for r in tree.witness.reports]
    assert [(each["decode"], each["prefill"]) for each in drawn["batch size"]] == batch
