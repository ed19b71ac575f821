"""Equal prefixes share pages, and the least recently used page is evicted first."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import attrs
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specplug.kv.page_allocator import PageAllocator
from specplug.kv.prefix_cache import CachedPage, PrefixCache

Tokens = tuple[int, ...]


@attrs.define(eq=False)
class Holder:
    """A sequence that holds pages, as a running request does."""

    cache: PrefixCache
    token_ids: list[int]
    pages: list[int]
    shared: CachedPage
    num_computed_tokens: int

    def keep(self) -> list[int]:
        """Insert what is final; the indices of the pages that were replaced."""
        self.shared, replaced = self.cache.insert(
            self.pages, self.shared, self.token_ids, self.num_computed_tokens
        )
        return replaced

    def release(self) -> None:
        """Insert what is final and give up all pages."""
        self.keep()
        self.cache.release(self.pages, self.shared)
        self.pages, self.shared = [], self.cache.root


def _begin(cache: PrefixCache, tokens: Sequence[int]) -> Holder:
    """A sequence that holds the cached prefix of ``tokens``, and pages for the rest."""
    node = cache.match(tokens, len(tokens))
    cache.lock(node)
    pages = [used.page for used in node.path()][::-1]
    pages += cache.take_pages(cache.pool.pages_for(len(tokens)) - node.depth)
    return Holder(cache, list(tokens), pages, node, node.depth * cache.pool.page_size)


def _check(cache: PrefixCache, holders: Iterable[Holder]) -> None:
    cache.check((holder.pages, holder.shared) for holder in holders)


def _nodes(node: CachedPage, before: Tokens, size: int) -> Iterator[tuple[Tokens, CachedPage]]:
    """Every cached page, by the tokens up to its end and those after it that it depends on."""
    for key, child in node.children.items():
        yield before + key, child
        yield from _nodes(child, before + key[:size], size)


@attrs.define
class Entry:
    """A cached page, as the naive model has it."""

    page: int
    users: int = 0
    used: int = 0


class PrefixCacheMachine(RuleBasedStateMachine):
    """The cache beside a dictionary of all cached prefixes that is searched from end to end."""

    @initialize(
        page_size=st.integers(1, 3),
        pages=st.integers(1, 14),
        lookahead=st.sampled_from([0, 1, 3]),
        enabled=st.sampled_from([True, True, True, False]),
    )
    def make(self, page_size: int, pages: int, lookahead: int, enabled: bool) -> None:
        self.cache = PrefixCache(PageAllocator(pages + 1, page_size), lookahead, enabled=enabled)
        self.size, self.lookahead, self.pages = page_size, lookahead, pages
        self.free = set(range(1, pages + 1))
        self.known: dict[Tokens, Entry] = {}
        self.requests: list[Holder] = []
        self.evicted = 0
        self.now = 0

    # The model

    def _prefixes(self, tokens: Sequence[int], most: int) -> list[Tokens]:
        """The pages of the first ``most`` tokens by key, as far as the tokens after are known."""
        most = min(most, len(tokens) - self.lookahead)
        ends = range(self.size, most + 1, self.size)
        return [tuple(tokens[: end + self.lookahead]) for end in ends]

    def _found(self, tokens: Sequence[int], most: int) -> list[Entry]:
        found = []
        for prefix in self._prefixes(tokens, most):
            if prefix not in self.known:
                break
            found.append(self.known[prefix])
        return found

    def _path(self, request: Holder) -> list[Entry]:
        return self._found(request.token_ids, request.shared.depth * self.size)

    def _use(self, entries: list[Entry], change: int) -> None:
        self.now += 1
        for entry in entries:
            entry.users += change
            entry.used = self.now

    def _take(self, count: int) -> list[int]:
        """Take pages of the cache and check which ones it gave."""
        evicted = self._evict(count - len(self.free))
        given = self.cache.take_pages(count)
        assert len(set(given)) == len(given) == count
        assert set(given) <= self.free
        assert evicted <= set(given), "free pages go first"
        self.free -= set(given)
        return given

    def _evict(self, count: int) -> set[int]:
        pages = set()
        for _ in range(count):
            leaves = [p for p, entry in self.known.items() if not entry.users and self._ends(p)]
            oldest = min(leaves, key=lambda p: self.known[p].used)
            pages.add(self.known.pop(oldest).page)
            self.evicted += 1
        self.free |= pages
        return pages

    def _ends(self, prefix: Tokens) -> bool:
        return not any(len(p) > len(prefix) and p[: len(prefix)] == prefix for p in self.known)

    def _keep(self, request: Holder) -> list[int]:
        final = min(request.num_computed_tokens, len(request.token_ids) - self.lookahead)
        prefixes, depth = self._prefixes(request.token_ids, final), request.shared.depth
        replaced = []
        if not self.cache.enabled:
            return []
        self.now += 1
        for index in range(depth, len(prefixes)):
            entry = self.known.get(prefixes[index])
            if entry is None:
                entry = self.known[prefixes[index]] = Entry(request.pages[index])
            else:
                self.free.add(request.pages[index])
                replaced.append(index)
            entry.users += 1
            entry.used = self.now
        return replaced

    # What happens

    @rule(
        tokens=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        spare=st.integers(0, 3),
        pages=st.integers(0, 6),
    )
    def begin(self, tokens: list[int], spare: int, pages: int) -> None:
        """A request comes, and is refused if there are no pages."""
        most = max(0, len(tokens) - spare)
        found = self._found(tokens, most)
        node = self.cache.match(tokens, most)
        assert [used.page for used in node.path()][::-1] == [entry.page for entry in found]
        assert node.depth == len(found)
        self.cache.lock(node)
        self._use(found, 1)
        if pages > self.cache.num_available:
            self.cache.unlock(node)
            self._use(found, -1)
            return
        own = [entry.page for entry in found] + self._take(pages)
        computed = len(found) * self.size
        self.requests.append(Holder(self.cache, list(tokens), own, node, computed))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 59), tokens=st.lists(st.integers(0, 1), max_size=5))
    def go_on(self, which: int, tokens: list[int]) -> None:
        """A request computes what its pages hold and generates more."""
        request = self.requests[which % len(self.requests)]
        request.num_computed_tokens = min(len(request.pages) * self.size, len(request.token_ids))
        request.token_ids += tokens

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 59), pages=st.integers(1, 5))
    def grow(self, which: int, pages: int) -> None:
        request = self.requests[which % len(self.requests)]
        request.pages += self._take(min(pages, self.cache.num_available))

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 59))
    def keep(self, which: int) -> None:
        request = self.requests[which % len(self.requests)]
        before, expected = list(request.pages), self._keep(request)
        assert request.keep() == expected
        assert [i for i, page in enumerate(request.pages) if page != before[i]] == expected
        assert request.pages[: request.shared.depth] == [e.page for e in self._path(request)]

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 59))
    def release(self, which: int) -> None:
        request = self.requests.pop(which % len(self.requests))
        own = request.pages[:]
        self._keep(request)
        final = min(request.num_computed_tokens, len(request.token_ids) - self.lookahead)
        path = self._found(request.token_ids, final) if self.cache.enabled else []
        self._use(path, -1)
        self.free |= set(own[len(path) :])
        request.release()
        assert (request.pages, request.shared) == ([], self.cache.root)

    @rule()
    def clear(self) -> None:
        self.cache.clear()
        self.free |= {entry.page for entry in self.known.values() if not entry.users}
        self.known = {prefix: entry for prefix, entry in self.known.items() if entry.users}
        assert self.requests or self.cache.pool.num_free == self.pages

    # What always holds

    @invariant()
    def it_is_as_the_model(self) -> None:
        if not hasattr(self, "cache"):
            return
        cache = self.cache
        _check(cache, self.requests)
        nodes = dict(_nodes(cache.root, (), self.size))
        found = {prefix: (node.page, node.users) for prefix, node in nodes.items()}
        assert found == {prefix: (e.page, e.users) for prefix, e in self.known.items()}
        assert cache.num_pages == len(self.known)
        assert cache.num_unused == sum(not entry.users for entry in self.known.values())
        assert cache.evicted == self.evicted
        assert cache.pool.num_free == len(self.free)
        assert cache.num_available == len(self.free) + cache.num_unused

    def teardown(self) -> None:
        """All go, then every page is evicted in the model's order."""
        if not hasattr(self, "cache"):
            return
        while self.requests:
            self.release(0)
            self.it_is_as_the_model()
        while self.cache.num_available:
            self._take(len(self.free) + 1 if self.known else len(self.free))
            nodes = dict(_nodes(self.cache.root, (), self.size))
            assert nodes.keys() == self.known.keys()
        assert not self.known


PrefixCacheMachine.TestCase.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    phases=[Phase.generate],
    deadline=None,
    derandomize=True,
    database=None,
)
TestPrefixCache = PrefixCacheMachine.TestCase


# One case each


def _cache(
    pages: int = 16, size: int = 2, lookahead: int = 0, *, enabled: bool = True
) -> PrefixCache:
    return PrefixCache(PageAllocator(pages + 1, size), lookahead, enabled=enabled)


def _leave(cache: PrefixCache, tokens: Sequence[int]) -> None:
    """A request comes, computes all its tokens, and goes."""
    request = _begin(cache, tokens)
    request.num_computed_tokens = len(tokens)
    request.release()


def _cached(cache: PrefixCache) -> set[Tokens]:
    return {prefix for prefix, _ in _nodes(cache.root, (), cache.pool.page_size)}


def _found(cache: PrefixCache, tokens: Sequence[int], most: int | None = None) -> int:
    return cache.match(tokens, len(tokens) if most is None else most).depth


def test_the_longest_prefix_of_whole_pages_is_found() -> None:
    cache = _cache()
    _leave(cache, [1, 2, 3, 4, 5])
    assert _cached(cache) == {(1, 2), (1, 2, 3, 4)}
    for tokens, pages in (
        ([1, 2, 3, 4, 5, 6], 2),
        ([1, 2, 3, 4], 2),
        ([1, 2, 3], 1),
        ([1, 2, 9, 4], 1),
        ([1], 0),
        ([9, 2, 3, 4], 0),
        ([3, 4], 0),
        ([], 0),
    ):
        assert _found(cache, tokens) == pages, tokens


@pytest.mark.parametrize(("most", "pages"), [(0, 0), (1, 0), (2, 1), (3, 1), (4, 2), (6, 2)])
def test_no_more_than_most_tokens_are_found(most: int, pages: int) -> None:
    cache = _cache()
    _leave(cache, [1, 2, 3, 4])
    assert _found(cache, [1, 2, 3, 4, 5, 6], most) == pages


def test_a_page_is_found_only_if_the_tokens_behind_it_agree() -> None:
    cache = _cache(lookahead=2)
    _leave(cache, [1, 2, 3, 4, 5, 6, 7])
    assert _cached(cache) == {(1, 2, 3, 4), (1, 2, 3, 4, 5, 6)}, "6 and 7 have nothing after them"
    assert _found(cache, [1, 2, 3, 4, 5, 6]) == 2
    assert _found(cache, [1, 2, 3, 4, 5, 9]) == 1
    assert _found(cache, [1, 2, 3, 4, 5]) == 1
    assert _found(cache, [1, 2, 3, 9]) == 0
    assert _found(cache, [1, 2, 3]) == 0, "the token after it is not known yet"


def test_match_with_a_lookahead_reaches_to_most() -> None:
    """The tokens after the last page are known, so they need not be within ``most``."""
    cache, tokens = _cache(lookahead=2), [1, 2, 3, 4, 5, 6, 7, 8]
    _leave(cache, tokens)
    assert [cache.match(tokens, most).depth for most in range(9)] == [0, 0, 1, 1, 2, 2, 3, 3, 3]


def test_a_page_stands_in_the_cache_once_for_each_continuation() -> None:
    cache = _cache(lookahead=1)
    _leave(cache, [1, 2, 3, 4, 5])
    _leave(cache, [1, 2, 9, 4, 5])
    _leave(cache, [1, 2, 3, 4, 5])
    assert _cached(cache) == {(1, 2, 3), (1, 2, 3, 4, 5), (1, 2, 9), (1, 2, 9, 4, 5)}


def test_keep_replaces_a_page_that_is_cached_already() -> None:
    cache = _cache()
    first, second = _begin(cache, [1, 2, 3, 4, 5]), _begin(cache, [1, 2, 3, 4, 6])
    own = list(second.pages)
    for request in (first, second):
        request.num_computed_tokens = 2
    assert first.keep() == []
    assert second.keep() == [0]
    assert second.pages == [first.pages[0], *own[1:]]
    assert second.keep() == [], "once"
    for request in (first, second):
        request.num_computed_tokens = 5
    assert second.keep() == []
    assert first.keep() == [1]
    assert first.pages[:2] == second.pages[:2]
    assert cache.pool.num_free == 16 - 4
    _check(cache, [first, second])


def test_pages_that_are_still_written_to_are_not_kept() -> None:
    cache = _cache(lookahead=1)
    request = _begin(cache, [1, 2, 3, 4])
    for num_computed_tokens, pages in ((0, 0), (1, 0), (2, 1), (3, 1), (4, 1)):
        request.num_computed_tokens = num_computed_tokens
        request.keep()
        assert request.shared.depth == cache.num_pages == pages, "what follows the 4 is not known"
    request.token_ids.append(5)
    request.keep()
    assert request.shared.depth == 2


def test_eviction_is_least_recent_first_from_path_ends() -> None:
    cache = _cache(pages=6)
    _leave(cache, [1, 1, 2, 2])
    _leave(cache, [3, 3, 4, 4])
    _leave(cache, [5, 5])
    cache.unlock(_hold(cache, [1, 1]))  # its end has not been used since
    cache.take_pages(2)
    assert _cached(cache) == {(1, 1), (3, 3), (3, 3, 4, 4), (5, 5)}
    assert cache.evicted == 1
    cache.take_pages(2)
    assert _cached(cache) == {(1, 1), (5, 5)}
    cache.take_pages(1)
    assert _cached(cache) == {(1, 1)}
    cache.take_pages(1)
    assert cache.num_available == 0
    assert cache.evicted == 5


def _hold(cache: PrefixCache, tokens: Sequence[int]) -> CachedPage:
    node = cache.match(tokens, len(tokens))
    cache.lock(node)
    return node


def test_what_is_used_again_while_it_waits_for_its_end_stays() -> None:
    cache = _cache(pages=3)
    for token in (1, 2, 3):
        _leave(cache, [token, token])
    node = _hold(cache, [1, 1])
    cache.take_pages(2)
    assert _cached(cache) == {(1, 1)}
    assert cache.num_available == 0
    cache.unlock(node)
    assert cache.num_available == 1


def test_free_pages_go_before_cached_ones() -> None:
    cache = _cache(pages=4)
    _leave(cache, [1, 1, 2, 2])
    cache.take_pages(2)
    assert (cache.evicted, cache.num_pages) == (0, 2)
    cache.take_pages(1)
    assert (cache.evicted, cache.num_pages) == (1, 1)


def test_a_disabled_cache_finds_and_keeps_nothing() -> None:
    cache = _cache(enabled=False)
    request = _begin(cache, [1, 2, 3, 4])
    request.num_computed_tokens = 4
    assert request.keep() == []
    assert request.shared is cache.root
    _check(cache, [request])
    before = cache.changes
    request.release()
    assert cache.changes > before, "its pages have come back"
    assert (cache.num_pages, cache.pool.num_free, _found(cache, [1, 2, 3, 4])) == (0, 16, 0)


def test_cache_changes_when_pages_are_kept_or_let_go() -> None:
    cache = _cache()
    request = _begin(cache, [1, 2, 3, 4])
    before = cache.changes
    request.keep()
    assert cache.changes == before
    request.num_computed_tokens = 2
    request.keep()
    assert cache.changes > before
    before = cache.changes
    request.release()
    assert cache.changes > before


def test_clearing_forgets_the_kinds_that_are_wanted() -> None:
    cache = _cache(lookahead=1)
    tokens = [1, 2, 3, 4, 5]
    for kind in (0, (0, "a"), (1, "a"), (0, "b")):
        pages = cache.take_pages(3)
        shared, _ = cache.insert(pages, cache.root, tokens, len(tokens), kind)
        cache.release(pages, shared)
    cache.clear(lambda kind: kind in ((0, "a"), (1, "a")))
    _check(cache, [])
    found = [cache.match(tokens, 4, k).depth for k in (0, (0, "a"), (1, "a"), (0, "b"))]
    assert found == [2, 0, 0, 2]
    cache.clear(lambda kind: kind == 0)
    assert (cache.match(tokens, 4).depth, cache.match(tokens, 4, (0, "b")).depth) == (0, 2)


def test_clearing_forgets_all_but_not_under_a_running_request() -> None:
    cache = _cache()
    _leave(cache, [1, 2, 3, 4, 5, 6])
    node = _hold(cache, [1, 2])
    cache.clear()
    assert _found(cache, [1, 2, 3, 4, 5, 6]) == 1
    cache.unlock(node)
    cache.clear()
    assert (cache.num_pages, cache.num_unused, cache.pool.num_free) == (0, 0, 16)
    assert _found(cache, [1, 2]) == 0
    _check(cache, [])


def test_tokens_that_another_running_request_has_too() -> None:
    cache = _cache()
    first, second = _begin(cache, [1, 1, 2, 2, 3, 3]), _begin(cache, [1, 1, 2, 2, 4, 4])
    for request in (first, second):
        request.num_computed_tokens = 6
        assert cache.num_shared_with_others(request.shared) == 0
        request.keep()
    assert (
        cache.num_shared_with_others(first.shared)
        == cache.num_shared_with_others(second.shared)
        == 4
    )
    second.release()
    assert cache.num_shared_with_others(first.shared) == 0


def test_the_order_of_eviction_does_not_grow_with_use() -> None:
    cache = _cache()
    _leave(cache, [1, 1, 2, 2])
    _leave(cache, [1, 1, 3, 3])
    for _ in range(100):
        for tokens in ([1, 1], [1, 1, 2, 2], [1, 1, 3, 3]):
            cache.unlock(_hold(cache, tokens))
    _check(cache, [])
    assert cache.num_pages == 3


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        ("users", "another number of users"),
        ("order", "can never be evicted"),
        ("page", "a KV page leaked or has two owners"),
        ("time", "evicted before its children"),
    ],
)
def test_the_check_tells_what_is_wrong(harm: str, message: str) -> None:
    cache = _cache()
    _leave(cache, [1, 1, 2, 2, 3, 3])
    _check(cache, [])
    last = cache.match([1, 1, 2, 2, 3, 3], 6)
    middle = last.parent
    assert middle is not None
    if harm == "users":
        last.users += 1
        cache.num_unused -= 1
    elif harm == "order":
        last.queued = False
    elif harm == "page":
        last.page = middle.page
    else:
        middle.last_used -= 1
    with pytest.raises(AssertionError, match=message):
        _check(cache, [])
