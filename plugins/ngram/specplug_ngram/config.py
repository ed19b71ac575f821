"""``NgramSettings``: the settings of NGRAM's index. No torch here."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import attrs

from specplug import UsageError
from specplug.settings import Choice, Integer, Texts, setting

REQUEST, TENANT, ENGINE = "request", "tenant", "engine"
SCOPES = (REQUEST, TENANT, ENGINE)

INDEX_BYTES = 64 << 20


@attrs.frozen
class Files(Texts):
    """Paths of files."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what is no tuple of paths."""
        if not isinstance(value, tuple) or not all(isinstance(v, str) and v for v in value):
            raise UsageError(f"{name}={value!r}: expected the path of a file, or a list of paths")


def _paths(value: Any) -> Any:
    """One path, or several, as a tuple of texts."""
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, Iterable):
        return value
    return tuple(str(each) if isinstance(each, Path) else each for each in several)


@attrs.frozen(kw_only=True)
class NgramSettings:
    """The settings of the index. docs/settings.md shows them."""

    ngram_index_scope: str = setting(
        TENANT,
        Choice(SCOPES, ", ".join(SCOPES)),
        "Whose text a request drafts from. request: its own. tenant: that of all requests of its "
        "cache_salt; without a salt its own. engine: that of all requests: a request's speed may "
        "then reveal what others have read or written.",
        group="NGRAM",
    )
    ngram_index_bytes: int = setting(
        INDEX_BYTES,
        Integer(least=1),
        "Most memory of the index, 52 bytes a token. Where it is full, the text of ended requests "
        "goes first, least recently used, then the oldest of the longest.",
        group="NGRAM",
        unit="bytes",
    )
    ngram_corpus: tuple[str, ...] = setting(
        (),
        Files(),
        "Files of text that all requests draft from: UTF-8, or JSON Lines (.jsonl) of texts, of "
        '{"text": …} or {"prompt": …, "completion": …}. What is in them can be guessed from a '
        "request's speed.",
        group="NGRAM",
        unset="none",
        converter=_paths,
        metavar="FILE",
    )


DEFAULTS = NgramSettings()
