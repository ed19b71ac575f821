"""Makes text of other origin harmless to a terminal and to a log."""

from __future__ import annotations

_JOINERS = "\u200c\u200d"
"""Format characters that belong to words and emoji of many scripts."""


def printable(text: str) -> str:
    """Return ``text`` with control characters, line ends and changes of direction as escapes.

    An escape sequence could repaint what stands above, a line end could feign a line of ours, and
    an override of direction could show a name as another.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        character if _is_harmless(character) else _escaped(character) for character in text
    )


def one_line(text: str) -> str:
    """Return ``text`` as one printable line: line ends become spaces."""
    return printable(" ".join(text.splitlines()))


def _is_harmless(character: str) -> bool:
    import unicodedata  # a library of its own, which few listings need

    kind = unicodedata.category(character)
    return character in _JOINERS or kind not in ("Cc", "Cf", "Cs", "Zl", "Zp")


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
