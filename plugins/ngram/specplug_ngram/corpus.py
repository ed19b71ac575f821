"""The files of a corpus, and their texts as tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from specplug import UsageError, report_progress

_FIELDS = ("prompt", "text", "completion")
_PART = 1 << 16
"""The most characters that are tokenized at once: a part ends with a line, so that a bar can move
while a long file is read."""


def read_corpus(files: Sequence[str], tokenizer: Any) -> Iterator[list[int]]:
    """Yield the tokens of each text of the files.

    Args:
        files: paths; a name that ends in ``.jsonl`` is JSON Lines.
        tokenizer: of transformers; None: the target has none.

    Raises:
        UsageError: a file cannot be read, or is no such text; it names the file, and the line.
    """
    if files and tokenizer is None:
        raise UsageError(
            f"ngram_corpus={files[0]!r} needs a tokenizer; the model has none: leave it out"
        )
    texts = [text for file in files for text in _texts(file, _read(file))]
    total, done = sum(map(len, texts)), 0
    for text in texts:
        tokens: list[int] = []
        for part in _parts(text):
            tokens += tokenizer(part, add_special_tokens=False, verbose=False)["input_ids"]
            done += len(part)
            report_progress(done, total)
        yield tokens


def check_corpus(files: Sequence[str]) -> None:
    """Refuse files that cannot be read, before anything is loaded.

    Raises:
        UsageError: one of them.
    """
    for file in files:
        _read(file)


def _read(file: str) -> str:
    """Return a file's text."""
    try:
        return Path(file).expanduser().read_bytes().decode("utf-8-sig")
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"ngram_corpus {file!r} cannot be read: {why}") from error
    except UnicodeDecodeError as error:
        raise UsageError(
            f"ngram_corpus {file!r} is not UTF-8 (byte {error.start}); expected UTF-8 text, or "
            "JSON Lines in a file whose name ends in .jsonl"
        ) from error


def _texts(file: str, data: str) -> Iterator[str]:
    """Yield the texts of a file, none of them empty."""
    if not file.lower().endswith(".jsonl"):
        yield from [data] if data else []
        return
    for number, line in enumerate(data.split("\n"), 1):
        if not line.strip():
            continue
        text = _text_of(line)
        if text is None:
            raise UsageError(
                f"ngram_corpus {file!r}, line {number}: expected a JSON string, or an object with "
                f"a string under {', '.join(_FIELDS[:-1])} or {_FIELDS[-1]}"
            )
        if text:
            yield text


def _text_of(line: str) -> str | None:
    """Return the text of a line of JSON; None if it has none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fields = value if isinstance(value, dict) else {"text": value}
    found = [fields[name] for name in _FIELDS if fields.get(name) is not None]
    if not found or not all(isinstance(each, str) for each in found):
        return None
    text = "".join(found)
    return text if _is_unicode(text) else None


def _is_unicode(text: str) -> bool:
    """Return whether a tokenizer can read the text: JSON can hold lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parts(text: str) -> Iterator[str]:
    """Cut a text after lines, into parts of about ``_PART`` characters."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + _PART) + 1 or len(text)
        yield text[start:end]
        start = end
