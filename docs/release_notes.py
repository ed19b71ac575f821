"""Print a version's notes from the changelog: ``python docs/release_notes.py [VERSION]``.

Without a version: of the newest one. Links to pages are kept as they stand.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CHANGELOG = Path(__file__).parents[1] / "CHANGELOG.md"


def sections(text: str) -> dict[str, str]:
    """Return what a changelog says of each version, the newest first."""
    parts = re.split(r"^## \[([^\]]+)\].*$", text, flags=re.MULTILINE)
    return {version: said.strip() for version, said in zip(parts[1::2], parts[2::2], strict=True)}


def release_notes(text: str, version: str | None = None) -> str:
    """Return the notes of a version, as Markdown.

    Raises:
        ValueError: the changelog does not have it.
    """
    found = sections(text)
    wanted = next(iter(found), "none") if version is None else version
    if wanted not in found:
        raise ValueError(
            f"{CHANGELOG.name} has no version {wanted}; expected one of {', '.join(found)}"
        )
    said = re.sub(r"\n(?=[ ]*[^\s#*|-])\s*", " ", found[wanted])  # a page of releases breaks lines
    return f"# specplug {wanted}\n\n{said}\n"


if __name__ == "__main__":
    try:
        print(release_notes(CHANGELOG.read_text(encoding="utf-8"), *sys.argv[1:2]), end="")
    except ValueError as error:
        sys.exit(str(error))
