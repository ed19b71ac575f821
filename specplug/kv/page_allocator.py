"""The free pages of the KV pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable


class PageAllocator:
    """Hands out pages of ``page_size`` slots. Page 0 is padding and is never handed out.

    Args:
        num_pages: pages, page 0 included.
        page_size: tokens per page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1, num_pages
        assert page_size >= 1, page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque[int]()
        self.reset()

    @property
    def num_free(self) -> int:
        """The number of free pages."""
        return len(self._free)

    @property
    def num_tokens(self) -> int:
        """The tokens that all pages together hold, without page 0."""
        return (self.num_pages - 1) * self.page_size

    def pages_for(self, num_tokens: int) -> int:
        """Return how many pages hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def reset(self) -> None:
        """Free every page."""
        self._free = deque(range(1, self.num_pages))

    def take(self, count: int) -> list[int]:
        """Take ``count`` free pages; there must be that many."""
        return [self._free.popleft() for _ in range(count)]

    def free(self, pages: Iterable[int]) -> None:
        """Free pages."""
        self._free.extend(pages)

    def check(self, owned: Iterable[int]) -> None:
        """Assert that each page is free or in ``owned``, exactly once."""
        pages = sorted([*self._free, *owned])
        assert pages == list(range(1, self.num_pages)), "a KV page leaked or has two owners"
