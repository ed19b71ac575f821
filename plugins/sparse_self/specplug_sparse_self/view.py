"""The part of a context that drafts see."""

from __future__ import annotations

import attrs

MOST_TOKENS = 4096
"""The most that drafts see, however long contexts may be."""


@attrs.frozen
class View:
    """The part of a context that drafts see.

    Attributes:
        sinks: first tokens, to which heads attend that have nothing else to look at.
        window: last tokens.
        pages: how many pages between them.
        page_size: tokens of a page.
    """

    sinks: int
    window: int
    pages: int
    page_size: int

    @property
    def tokens(self) -> int:
        """The most tokens that are seen. A shorter context is seen whole."""
        return self.sinks + self.window + self.pages * self.page_size

    @classmethod
    def of_tokens(cls, tokens: int, *, sinks: int = 4, page_size: int = 16) -> View:
        """Return a view of about so many tokens: half of them the last ones."""
        sinks = min(sinks, tokens // 4)
        pages = (tokens // 2 - sinks) // page_size
        pages = max(pages, 0)
        return cls(sinks, tokens - sinks - pages * page_size, pages, page_size)

    @classmethod
    def of_context(cls, context_len: int) -> View:
        """Return the usual view: a quarter of the longest context, at most ``MOST_TOKENS``."""
        return cls.of_tokens(max(min(context_len // 4, MOST_TOKENS), 1))
