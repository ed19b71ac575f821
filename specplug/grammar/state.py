"""A request's position in its grammar, and the tokens that it allows after each drafted node."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING

import attrs
import torch
from torch import Tensor

from specplug.grammar.forced_text import ForcedText
from specplug.grammar.masks import mask_without, num_words
from specplug.sampling_params import BannedTokens
from specplug.speculative.draft import Draft
from specplug.speculative.host_copy import Arrival, to_host

if TYPE_CHECKING:
    import xgrammar

_log = logging.getLogger(__name__)

_STEP_SECONDS = 1.0
"""Processor time that a grammar may take in one step. Beyond it the request ends with an error."""


class GrammarState:
    """One request's position in its grammar.

    The grammar ends

    - by an end-of-sequence token, which is allowed where the output is a complete match;
    - where no token may follow: after a complete match if the vocabulary has no end-of-sequence
      token, and in a dead end, where the vocabulary cannot spell what the grammar demands;
    - with an error, where every allowed token is one that the request must not choose, unless the
      output is a complete match;
    - with an error, before a token that it does not allow, which happens only without masks.

    Args:
        matcher: xgrammar's, at the start.
        vocab_size: V.
        banned: tokens that the request must not choose.
        forced_text: finds what the grammar forces.
        on_slow: called if the grammar turns out to take too long.

    Attributes:
        taken: output tokens that it has been advanced by.
        error: why the grammar was given up, or None.
        ended_at: the number of output tokens at which the grammar ended, with the end-of-sequence
            token if it ended by one; None while it goes on. Later output must be dropped.
    """

    def __init__(
        self,
        matcher: xgrammar.GrammarMatcher,
        vocab_size: int,
        banned: BannedTokens,
        forced_text: ForcedText,
        on_slow: Callable[[], None] = lambda: None,
    ) -> None:
        self.ended_at: int | None = None
        self.error: str | None = None
        self._on_slow = on_slow
        self._matcher = matcher
        self._forced_text = forced_text
        self._forced: tuple[int, ...] = ()
        self._is_searched = True
        self.taken = 0
        self._next = torch.zeros(num_words(vocab_size), dtype=torch.int32)
        self._banned = banned
        self._vocab_size = vocab_size
        self._masks: dict[frozenset[int], Tensor] = {}
        self._look_ahead()

    @property
    def goes_on(self) -> bool:
        """Whether the grammar has not ended."""
        return self.ended_at is None

    def advance(self, tokens: Sequence[int]) -> None:
        """Take the request's next output tokens, in order, each once, over any number of calls.

        Tokens after the grammar's end are ignored.
        """
        if not self.goes_on or not tokens:
            return
        came, was_forced = tuple(tokens), self._forced[: len(tokens)]
        self._forced = self._forced[len(tokens) :] if was_forced == came else ()
        with self._in_time():
            self._advance(tokens)

    def _advance(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            # A banned token is chosen where no other was left.
            banned = token in self._banned.at(self.taken)
            # A matcher that has ended writes warnings when it is asked.
            if banned or not self._matcher.accept_token(token):
                self._look_ahead()
                if self.goes_on:  # else no token was allowed at all
                    self.error = f"token {token} was chosen, which the grammar does not allow"
                    self._end()
                return
            self.taken += 1
            if self._matcher.is_terminated():
                self._end()
                return
        self._look_ahead()

    def forced(self) -> tuple[int, ...]:
        """Return the tokens that the grammar forces next, spelled as the tokenizer does: to draft
        them, since the target may spell them otherwise. () if it forces none, or is too slow to be
        asked."""
        if not self.goes_on:
            return ()
        if not self._forced and self._is_searched:
            try:
                self._forced = self._forced_text.after(self._matcher, self._next)
            except Exception:  # it is not needed
                _log.debug("forced text is not looked for again", exc_info=True)
                self._is_searched = False
        return self._forced

    def allows(self, tokens: Sequence[int], parents: Sequence[int]) -> list[bool]:
        """Return for each node of a draft tree whether the grammar allows the path to it: what it
        forbids is never accepted. All True after the root if xgrammar fails.

        Args:
            tokens: of N nodes. Node 0 is the last token that this was advanced by.
            parents: each node's, before it; -1: it is never accepted.
        """
        if not self.goes_on:
            return [True, *[False] * (len(tokens) - 1)]
        reached: list[xgrammar.GrammarMatcher | None] = [self._matcher]
        try:
            for token, parent in zip(tokens[1:], parents[1:], strict=True):
                before = reached[parent] if parent >= 0 else None
                reached.append(None if before is None else self._after(before, token))
        except Exception:
            _log.debug("a draft was not compared with its grammar", exc_info=True)
            return [True] * len(tokens)
        return [each is not None for each in reached]

    def _after(
        self, matcher: xgrammar.GrammarMatcher, token: int
    ) -> xgrammar.GrammarMatcher | None:
        """Return the matcher after one more token; None if the grammar forbids that."""
        if matcher.is_terminated() or not self._forced_text.is_known(token):
            return None
        after = matcher.fork()
        return after if after.accept_token(token) else None

    def fill_next(self, mask: Tensor) -> None:
        """Write the mask of the next token.

        Args:
            mask: [words] int32 on the CPU; bit ``t % 32`` of word ``t // 32`` is token t. All ones
                if the grammar has ended.
        """
        mask.copy_(self._next)

    def fill_tree(
        self, tokens: Tensor, next_token: Tensor, next_sibling: Tensor, masks: Tensor
    ) -> None:
        """Write the mask of the token after each node of a draft tree, without advancing.

        Args:
            tokens: [N] int64 on the CPU. Node 0 is the last token that this was advanced by.
            next_token, next_sibling: [N] int64 on the CPU, this request's ``Draft.links``.
            masks: [N, words] int32 on the CPU, contiguous. Row i is for the token after the path
                from the root to node i. It is all ones where the grammar forbids the path or ends
                on it, so that no row bans every token: the target never chooses such a path, and
                what follows an end is dropped.
        """
        assert masks.is_contiguous(), masks.stride()
        masks.fill_(-1)
        if not self.goes_on:
            return
        # Rows of paths that end or are forbidden become 0; rows after them are not written.
        with self._in_time():
            self._matcher.traverse_draft_tree(next_token, next_sibling, tokens, masks)
        if self._banned.always:
            masks &= self._mask_without(self._banned.always)
        masks.masked_fill_((masks == 0).all(1, keepdim=True), -1)

    @contextmanager
    def _in_time(self) -> Iterator[None]:
        """Give the grammar up if the enclosed work takes too long: every request waits for it."""
        started = time.thread_time()  # a pause of the process is not the grammar's
        yield
        if self.goes_on and time.thread_time() - started > _STEP_SECONDS:
            self.error = (
                f"the grammar took more than {_STEP_SECONDS:.0f} s for one step: have fewer "
                "nested repetitions"
            )
            self._on_slow()
            self._end()

    def _look_ahead(self) -> None:
        self._matcher.fill_next_token_bitmask(self._next)
        banned = self._banned.at(self.taken)
        if banned:
            allowed = self._next.clone()
            self._next &= self._mask_without(banned)
            if allowed.any() and not self._next.any() and not self._is_match(allowed):
                place = f"after {self.taken} tokens" if self.taken else "at its start"
                self.error = (
                    f"{self._banned.setting_at(self.taken)} bans every token that the grammar "
                    f"allows {place}: ban fewer of them"
                )
        if not self._next.any():
            self._end()

    def _mask_without(self, tokens: frozenset[int]) -> Tensor:
        """Return the mask of all tokens but these, [words] int32."""
        if tokens not in self._masks:
            self._masks[tokens] = mask_without(tokens, self._vocab_size)
        return self._masks[tokens]

    def _is_match(self, allowed: Tensor) -> bool:
        """Return whether the output is a complete match: a token that ends it is allowed."""
        stops = self._matcher.stop_token_ids
        return any(bool(allowed[t // 32] >> (t % 32) & 1) for t in stops)

    def _end(self) -> None:
        self.ended_at = self.taken
        self._next.fill_(-1)


@attrs.frozen(eq=False)
class HostTree:
    """A batch's drafts, being copied to the host for the grammars.

    Attributes:
        nodes: [3, bs, N] int64 on the host: tokens, next token, next sibling (``Draft.links``).
        widths: nodes of each request; a tensor [bs] int64 where the device alone knew them.
        arrival: of ``nodes``.
    """

    nodes: Tensor
    widths: tuple[int, ...] | Tensor
    arrival: Arrival

    @classmethod
    def of(cls, draft: Draft) -> HostTree:
        """Start copying a draft to the host."""
        nodes = to_host(torch.stack((draft.tokens, *draft.links)))
        return cls(nodes, draft.host_counts(), Arrival(draft.tokens.device))

    def fill_masks(self, grammar_states: Sequence[GrammarState | None], masks: Tensor) -> None:
        """Wait for the nodes and write the mask after each of them.

        Args:
            grammar_states: of the requests; None for one without a grammar.
            masks: [T, words] int32 on the CPU, T the sum of the widths.
        """
        self.arrival.wait()
        widths = self.widths.tolist() if isinstance(self.widths, Tensor) else self.widths
        for b, (grammar_state, width, end) in enumerate(
            zip(grammar_states, widths, accumulate(widths), strict=True)
        ):
            if grammar_state is not None:
                tokens, next_token, next_sibling = self.nodes[:, b, :width]
                grammar_state.fill_tree(tokens, next_token, next_sibling, masks[end - width : end])
