"""Reads the texts that a user names: prompts, datasets, templates, grammars. No torch here."""

from __future__ import annotations

from pathlib import Path

from specplug.errors import UsageError


def read_text(what: str, file: Path) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark.

    Args:
        what: how messages call it, as "dataset".

    Raises:
        UsageError: it cannot be read, or is not UTF-8.
    """
    named = f"{what} {str(file)!r}"
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"{named} cannot be read: {error.strerror or error}") from error
    return decode_text(named, data)


def decode_text(named: str, data: bytes) -> str:
    """Decode UTF-8 text, with or without a byte order mark.

    Args:
        named: how messages call it.

    Raises:
        UsageError: it is not UTF-8.
    """
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{named} is not UTF-8 (byte {error.start}); expected UTF-8 text"
        ) from error
