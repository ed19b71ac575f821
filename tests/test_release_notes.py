"""Release notes are what the changelog says of a version."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

MADE = runpy.run_path(str(Path(__file__).parents[1] / "docs" / "release_notes.py"))
TEXT = """# Changelog

## [0.2.0] - 2027-01-02

Words that
go on.

### Added

- **One** that
  goes on ([page](docs/a.md)).
- Two.

## [0.1.0]

First.
"""


def test_notes_of_the_newest_version_have_whole_lines():
    assert MADE["release_notes"](TEXT) == (
        "# specplug 0.2.0\n\nWords that go on.\n\n### Added\n\n"
        "- **One** that goes on ([page](docs/a.md)).\n- Two.\n"
    )


def test_notes_of_an_older_version_are_its_own():
    assert MADE["release_notes"](TEXT, "0.1.0") == "# specplug 0.1.0\n\nFirst.\n"


def test_version_that_is_not_there_is_told():
    with pytest.raises(ValueError, match=r"no version 3; expected one of 0\.2\.0, 0\.1\.0"):
        MADE["release_notes"](TEXT, "3")


def test_changelog_of_this_repository_is_read():
    text = MADE["CHANGELOG"].read_text(encoding="utf-8")
    assert "### Added" in MADE["release_notes"](text)
