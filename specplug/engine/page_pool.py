"""The pages of the KV pool: who owns which, and which are kept for whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from specplug.engine.request import Request


class PagePool:
    """Hands out pages of ``page_size`` slots. Page 0 is padding and is never handed out.

    What a request needs without any draft is kept for it from its admission on (``admit``), so that
    it can always go on. More, for the nodes of a draft, it gets while there are pages that are kept
    for nobody.

    Args:
        num_pages: pages, page 0 included.
        page_size: tokens a page.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        assert num_pages > 1, num_pages
        assert page_size >= 1, page_size
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = deque(range(1, num_pages))
        self._kept = 0

    @property
    def num_free(self) -> int:
        """Pages that nobody owns."""
        return len(self._free)

    @property
    def num_available(self) -> int:
        """Pages that nobody owns and that are kept for nobody."""
        return len(self._free) - self._kept

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold ``num_tokens``."""
        return -(-num_tokens // self.page_size)

    def admit(self, request: Request, num_tokens: int) -> bool:
        """Keep pages for ``num_tokens`` of a request; False if there are too few."""
        budget = self.pages_for(num_tokens)
        if budget > self.num_available:
            return False
        request.page_budget = budget
        self._kept += budget
        return True

    def grow(self, request: Request, num_tokens: int) -> list[int]:
        """Give an admitted request pages for ``num_tokens``; the new pages.

        Pages within its budget are always there; of those beyond it, as many as are available.
        """
        missing = max(0, self.pages_for(num_tokens) - len(request.pages))
        owed = min(missing, max(0, request.page_budget - len(request.pages)))
        extra = min(missing - owed, self.num_available)
        pages = [self._free.popleft() for _ in range(owed + extra)]
        request.pages += pages
        self._kept -= owed
        return pages

    def release(self, request: Request) -> None:
        """Take back a request's pages and what was kept for it."""
        self._kept -= _kept_for(request)
        self._free.extend(request.pages)
        request.pages = []
        request.page_budget = 0

    def check(self, owners: Iterable[Request]) -> None:
        """Assert that each page is free or owned by exactly one of ``owners``."""
        requests = list(owners)
        pages = [*self._free, *(page for request in requests for page in request.pages)]
        assert sorted(pages) == list(range(1, self.num_pages)), "a KV page leaked or has two owners"
        kept = sum(_kept_for(request) for request in requests)
        assert kept == self._kept, (kept, self._kept)


def _kept_for(request: Request) -> int:
    """Pages that it does not own yet and may not be refused."""
    return max(0, request.page_budget - len(request.pages))
