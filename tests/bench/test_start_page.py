"""docs/start.md shows a bench's tables as they are, and explains each column."""

from __future__ import annotations

import re
from pathlib import Path

from specplug.bench.summary import tables

PAGE = Path(__file__).parents[2] / "docs" / "start.md"


def test_page_shows_and_explains_every_column(make_series, make_report) -> None:
    text = PAGE.read_text(encoding="utf-8")
    heads = [line.split() for line in text.splitlines() if line.startswith("ALGORITHM ")]
    report = make_report(make_series("EAGLE3", {"NONE": [2.0] * 3, "EAGLE3": [1.0] * 3}))
    columns = {c.upper() for table in tables(report) for c in table.columns if c[:4] != "pos "}
    shown = {word for head in heads for word in head}
    explained = set(re.findall(r"`([^`]+)`", "".join(re.findall(r"^\| `.*?\| ", text, re.M))))
    assert len(columns) > 12
    assert {word for column in columns for word in column.split()} <= shown
    assert columns <= explained
