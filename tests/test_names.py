"""The names of tests can be read in a listing: under 60 characters."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_names_of_tests_are_under_60_characters() -> None:
    files = [*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]
    assert len(files) > 100
    names = {
        name
        for file in files
        for name in re.findall(r"^\s*def (test_\w+)", file.read_text(encoding="utf-8"), re.M)
    }
    assert sorted(name for name in names if len(name) >= 60) == []
