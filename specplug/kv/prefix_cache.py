"""The prefix cache: a radix tree whose nodes are pages, and whoever needs a page asks it.

A page of it holds the KV of a prompt's or an output's tokens, of the target and of the draft model
alike, which share their slots. A request that begins with the same tokens starts behind them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from itertools import count

from specplug.kv.cached_page import CachedPage, Key
from specplug.kv.page_pool import PagePool


class PrefixCache:
    """Shares the pages of equal prefixes, and hands out pages: free ones first, then those of the
    cache that nobody uses, the least recently used first.

    A draft model's KV at a position may depend on the tokens behind it: EAGLE's layer reads the
    next token, the k-th of several MTP layers the k-th next. So a page is found only by a request
    which has the same ``lookahead`` tokens behind the page too, and a hit leaves the draft model
    the very context that it would have computed. And only by one of the same ``rotary_set``: tokens
    that are turned otherwise have other keys.

    Args:
        pool: of all pages.
        lookahead: tokens behind a position on which its KV depends.
        enabled: False: nothing is ever found, and nothing stays.
    """

    def __init__(self, pool: PagePool, lookahead: int, *, enabled: bool = True) -> None:
        self.pool = pool
        self.lookahead = lookahead
        self.enabled = enabled
        self.num_pages = 0
        self.num_unused = 0
        self.evicted = 0
        self.changes = 0
        self._root = CachedPage()
        self._order: list[tuple[int, int, CachedPage]] = []
        self._entries = count()
        self._clock = 0

    @property
    def root(self) -> CachedPage:
        """The empty prefix, which every request shares."""
        return self._root

    @property
    def num_available(self) -> int:
        """Pages that ``take`` can give."""
        return self.pool.num_free + self.num_unused

    def match(self, tokens: Sequence[int], most: int, rotary_set: int = 0) -> CachedPage:
        """The longest cached prefix of ``tokens`` that is at most ``most`` tokens long."""
        node, size = self._root, self.pool.page_size
        if self.num_pages:
            for start in range(0, most - size + 1, size):
                child = node.children.get(self._key(tokens, start, rotary_set))
                if child is None:
                    break
                node = child
        return node

    def hold(self, node: CachedPage) -> None:
        """A request begins to use the path to ``node``."""
        self._clock += 1
        for used in node.path():
            self._use(used)

    def let_go(self, node: CachedPage) -> None:
        """A request no longer uses the path to ``node``."""
        self._clock += 1
        self.changes += 1
        for used in node.path():
            used.last_used = self._clock
            used.users -= 1
            self.num_unused += not used.users
        self._queue(node)

    def keep(
        self,
        pages: list[int],
        shared: CachedPage,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        rotary_set: int = 0,
    ) -> tuple[CachedPage, list[int]]:
        """Insert the pages whose content is final: those whose tokens are computed, with the
        ``lookahead`` tokens after them known. A pass that computes the last positions again, for
        layers that read tokens further ahead, writes the same there.

        Where the same page is cached already, that one takes its place in ``pages``.

        Args:
            pages: of the sequence, in order of position; those up to ``shared`` are cached.
            shared: the last of them that the cache has, and that the sequence holds.
            token_ids: of the sequence.

        Returns:
            The last page that the cache has now, which the sequence holds with all before it, and
            the indices of pages that were replaced.
        """
        if not self.enabled:
            return shared, []
        node, size = shared, self.pool.page_size
        final = min(num_computed_tokens, len(token_ids) - self.lookahead)
        replaced: list[int] = []
        if final // size > node.depth:
            self._clock += 1
            self.changes += 1
            for index in range(node.depth, final // size):
                key = self._key(token_ids, index * size, rotary_set)
                child = node.children.get(key)
                if child is None:
                    child = self._add(node, key, pages[index])
                else:
                    self.pool.give_back([pages[index]])
                    pages[index] = child.page
                    replaced.append(index)
                self._use(child)
                node = child
        return node, replaced

    def take(self, num_pages: int) -> list[int]:
        """``num_pages`` pages, at most ``num_available``."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            self._evict(missing)
            self.evicted += missing
        return self.pool.take(num_pages)

    def release(self, pages: Sequence[int], shared: CachedPage) -> None:
        """Give up a sequence's pages: its own are free, those up to ``shared`` stay cached."""
        self.pool.give_back(pages[shared.depth :])
        self.let_go(shared)

    def clear(self) -> None:
        """Forget all pages; no request may be running."""
        assert self.num_unused == self.num_pages, "a request still uses the cache"
        self._evict(self.num_pages)

    def reset(self) -> None:
        """Begin anew: every page is free, whoever had it."""
        self.pool.reset()
        self._root = CachedPage()
        self._order.clear()
        self.num_pages = self.num_unused = 0
        self.changes += 1

    def num_shared_with_others(self, shared: CachedPage) -> int:
        """Tokens up to ``shared`` that another sequence holds too."""
        common = next((node for node in shared.path() if node.users > 1), self._root)
        return common.depth * self.pool.page_size

    def check(self, sequences: Iterable[tuple[Sequence[int], CachedPage]]) -> None:
        """Assert that every page is free, cached, or owned by one sequence.

        Args:
            sequences: the pages of each, and the last of them that the cache has.
        """
        owned, users = list[int](), dict[CachedPage, int]()
        for pages, shared in sequences:
            path = list(shared.path())[::-1]
            assert [node.page for node in path] == list(pages[: len(path)]), (pages, path)
            owned += pages[len(path) :]
            for node in path:
                users[node] = users.get(node, 0) + 1
        nodes = list(self._nodes())
        self.pool.check([*owned, *(node.page for node in nodes)])
        assert self.num_pages == len(nodes)
        assert self.num_unused == sum(not node.users for node in nodes)
        for node in nodes:
            assert node.users == users.get(node, 0), "a cached page has another number of users"
            assert node.parent is not None
            known = node.users or node.parent is self._root
            assert known or node.parent.last_used >= node.last_used, "evicted before its children"
            assert node.users or node.children or node.queued, "a cached page can never be evicted"

    def _key(self, tokens: Sequence[int], start: int, rotary_set: int) -> Key:
        own = tokens[start : start + self.pool.page_size + self.lookahead]
        return (rotary_set, *own) if rotary_set and not start else tuple(own)

    def _add(self, parent: CachedPage, key: Key, page: int) -> CachedPage:
        assert len(key) >= self.pool.page_size + self.lookahead, "a page that is not final"
        child = CachedPage(page=page, key=key, parent=parent, depth=parent.depth + 1)
        parent.children[key] = child
        self.num_pages += 1
        self.num_unused += 1
        return child

    def _use(self, node: CachedPage) -> None:
        self.num_unused -= not node.users
        node.users += 1
        node.last_used = self._clock

    def _queue(self, node: CachedPage) -> None:
        """Enter a page that nobody uses and nothing stands behind into the order of eviction."""
        if node.parent is not None and not (node.users or node.children or node.queued):
            heappush(self._order, (node.last_used, next(self._entries), node))
            node.queued = True

    def _evict(self, num_pages: int) -> None:
        """Free the least recently used of the unused pages, each path from its end."""
        while num_pages:
            when, _, node = heappop(self._order)
            node.queued = False
            if node.last_used != when or node.users or node.children:
                self._queue(node)  # used since it was entered: later, if at all
                continue
            assert node.parent is not None
            del node.parent.children[node.key]
            self.pool.give_back([node.page])
            self.num_pages -= 1
            self.num_unused -= 1
            num_pages -= 1
            self._queue(node.parent)

    def _nodes(self) -> Iterable[CachedPage]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack += node.children.values()
