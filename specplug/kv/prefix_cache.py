"""The prefix cache: a radix tree of KV pages, and the allocator of all pages.

A cached page holds the KV of tokens of a prompt or an output, for the target and for the draft
model, which share their slots. A request with the same first tokens starts after them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from heapq import heapify, heappop, heappush
from itertools import count

import attrs

from specplug.kv.page_allocator import PageAllocator

Key = tuple[Hashable, ...]


@attrs.define(eq=False)
class CachedPage:
    """A node of the tree: a page of the pool, and the pages that follow it.

    Attributes:
        page: its number in the pool; 0 at the root.
        key: its tokens and the ``lookahead`` tokens after them. A first page's key begins with the
            ``kind``, unless that is 0.
        parent: the page before it; None at the root.
        depth: pages on the path to it, itself included.
        children: by key.
        users: running requests whose path goes through it.
        last_used: the clock's time of the last use. An unused page's is never before its child's.
        queued: whether it is in the order of eviction.
    """

    page: int = 0
    key: Key = ()
    parent: CachedPage | None = None
    depth: int = 0
    children: dict[Key, CachedPage] = attrs.field(factory=dict)
    users: int = 0
    last_used: int = 0
    queued: bool = False

    def path(self) -> Iterator[CachedPage]:
        """Yield the page and those before it, without the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent


class PrefixCache:
    """Shares the pages of equal prefixes, and hands out pages.

    It hands out free pages first, then cached ones that no request uses, least recently used first.

    A draft model's KV at a position may depend on later tokens: EAGLE's layer reads the next token,
    the k-th of several MTP layers the k-th next. So a page matches only if the ``lookahead`` tokens
    after it are equal too, and a hit gives the draft model the context that it would have computed.
    The ``kind`` must be equal too: other rotary frequencies give other keys, and requests of
    another ``cache_salt`` share no pages.

    Args:
        pool: of all pages.
        lookahead: tokens after a position on which its KV depends.
        enabled: False: nothing is cached, so nothing matches.

    Attributes:
        num_pages, num_unused: cached pages, and those of them that no request uses.
        evicted: pages evicted so far.
        changes: counts insertions and releases, so that a caller knows whether to match again.
    """

    def __init__(self, pool: PageAllocator, lookahead: int, *, enabled: bool = True) -> None:
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
        """The root of the tree: the empty prefix, which every request shares."""
        return self._root

    @property
    def num_available(self) -> int:
        """The pages that ``take_pages`` can give: free ones and unused cached ones."""
        return self.pool.num_free + self.num_unused

    def match(self, tokens: Sequence[int], most: int, kind: Hashable = 0) -> CachedPage:
        """Return the last page of the longest cached prefix, at most ``most`` tokens long."""
        node, size = self._root, self.pool.page_size
        if self.num_pages:
            for start in range(0, most - size + 1, size):
                child = node.children.get(self._key(tokens, start, kind))
                if child is None:
                    break
                node = child
        return node

    def lock(self, node: CachedPage) -> None:
        """Count a request as a user of the path to ``node``."""
        self._clock += 1
        for used in node.path():
            self._use(used)

    def unlock(self, node: CachedPage) -> None:
        """End a request's use of the path to ``node``."""
        self._clock += 1
        self.changes += 1
        for used in node.path():
            used.last_used = self._clock
            used.users -= 1
            self.num_unused += not used.users
        self._queue(node)

    def insert(
        self,
        pages: list[int],
        shared: CachedPage,
        token_ids: Sequence[int],
        num_computed_tokens: int,
        kind: Hashable = 0,
    ) -> tuple[CachedPage, list[int]]:
        """Insert the final pages of a sequence: computed ones whose ``lookahead`` tokens are known.

        Layers that read further ahead compute the last positions again and write the same values.
        If an equal page is cached already, it replaces the sequence's own in ``pages``.

        Args:
            pages: of the sequence, in order of position; those up to ``shared`` are cached.
            shared: the last page that the cache has and the sequence holds.
            token_ids: of the sequence.
            num_computed_tokens: of the sequence.
            kind: its ``Request.page_kind``.

        Returns:
            The last page that the cache has now, which the sequence holds with all before it, and
            the indices of the pages that were replaced.
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
                key = self._key(token_ids, index * size, kind)
                child = node.children.get(key)
                if child is None:
                    child = self._add(node, key, pages[index])
                else:
                    self.pool.free([pages[index]])
                    pages[index] = child.page
                    replaced.append(index)
                self._use(child)
                node = child
        return node, replaced

    def take_pages(self, num_pages: int) -> list[int]:
        """Take pages, at most ``num_available``; evict cached ones if too few are free."""
        missing = num_pages - self.pool.num_free
        if missing > 0:
            self._evict(missing)
            self.evicted += missing
        return self.pool.take(num_pages)

    def release(self, pages: Sequence[int], shared: CachedPage) -> None:
        """Free a sequence's own pages and end its use of those up to ``shared``."""
        self.pool.free(pages[shared.depth :])
        self.unlock(shared)

    def clear(self, is_wanted: Callable[[Hashable], bool] = lambda kind: True) -> None:
        """Free the pages of the kinds that are wanted, all but those that a request uses."""
        firsts = [node for node in self._root.children.values() if is_wanted(self._kind(node.key))]
        freed = [node for node in _with_children(firsts) if not node.users]
        for node in freed:
            assert node.parent is not None
            del node.parent.children[node.key]
        self.pool.free([node.page for node in freed])
        self.num_pages -= len(freed)
        self.num_unused -= len(freed)
        gone = set(freed)
        self._order = [entry for entry in self._order if entry[-1] not in gone]
        heapify(self._order)

    def reset(self) -> None:
        """Free every page, of the cache and of requests, and empty the tree."""
        self.pool.reset()
        self._root = CachedPage()
        self._order.clear()
        self.num_pages = self.num_unused = 0
        self.changes += 1

    def num_shared_with_others(self, shared: CachedPage) -> int:
        """Count the tokens up to ``shared`` that another sequence uses too."""
        common = next((node for node in shared.path() if node.users > 1), self._root)
        return common.depth * self.pool.page_size

    def check(self, sequences: Iterable[tuple[Sequence[int], CachedPage]]) -> None:
        """Assert that every page is free, cached, or owned by one sequence.

        Args:
            sequences: the pages of each, and the last one of them that is cached.
        """
        owned, users = list[int](), dict[CachedPage, int]()
        for pages, shared in sequences:
            path = list(shared.path())[::-1]
            assert [node.page for node in path] == list(pages[: len(path)]), (pages, path)
            owned += pages[len(path) :]
            for node in path:
                users[node] = users.get(node, 0) + 1
        nodes = list(_with_children(self._root.children.values()))
        self.pool.check([*owned, *(node.page for node in nodes)])
        assert self.num_pages == len(nodes)
        assert self.num_unused == sum(not node.users for node in nodes)
        for node in nodes:
            assert node.users == users.get(node, 0), "a cached page has another number of users"
            assert node.parent is not None
            known = node.users or node.parent is self._root
            assert known or node.parent.last_used >= node.last_used, "evicted before its children"
            assert node.users or node.children or node.queued, "a cached page can never be evicted"
        queued = sum(node.queued for node in nodes)
        assert len(self._order) == queued, "the order of eviction grows with use"

    def _key(self, tokens: Sequence[int], start: int, kind: Hashable) -> Key:
        own = tokens[start : start + self.pool.page_size + self.lookahead]
        return (kind, *own) if kind and not start else tuple(own)

    def _kind(self, key: Key) -> Hashable:
        """Return the kind of a first page's key."""
        return key[0] if len(key) > self.pool.page_size + self.lookahead else 0

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
        """Enter an unused leaf into the order of eviction."""
        if node.parent is not None and not (node.users or node.children or node.queued):
            heappush(self._order, (node.last_used, next(self._entries), node))
            node.queued = True

    def _evict(self, num_pages: int) -> None:
        """Free the least recently used of the unused pages, leaves first."""
        while num_pages:
            when, _, node = heappop(self._order)
            node.queued = False
            if node.last_used != when or node.users or node.children:
                self._queue(node)  # used since it was entered
                continue
            assert node.parent is not None
            del node.parent.children[node.key]
            self.pool.free([node.page])
            self.num_pages -= 1
            self.num_unused -= 1
            num_pages -= 1
            self._queue(node.parent)


def _with_children(nodes: Iterable[CachedPage]) -> Iterator[CachedPage]:
    """Yield the nodes and all below them, each before its children."""
    stack = list(nodes)
    while stack:
        node = stack.pop()
        yield node
        stack += node.children.values()
