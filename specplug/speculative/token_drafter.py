"""Drafting token by token from tokens alone: what language models do that draft for another one.

Leviathan, Kalman and Matias (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.drafter import Drafter
from specplug.speculative.hook_order import Batch
from specplug.speculative.host_copy import upload
from specplug.speculative.own_text import pack
from specplug.speculative.padding import Padding
from specplug.speculative.runtime import AttentionPlan, KVCache, OwnText, Runtime
from specplug.speculative.verify import CommittedOutput


@attrs.frozen(eq=False)
class TokenPieces:
    """What a network reads whose tokens are not the target's.

    Attributes:
        cache: its own, of ``Runtime.allocate_kv(own_lengths=M)``.
        ids: [V, M] int64, the network's tokens that stand for each token of the target, then
            padding.
        counts: [V] int64, how many they are, 1 to M; of a token of ``token_ids`` 1.
    """

    cache: KVCache
    ids: Tensor
    counts: Tensor

    @property
    def most(self) -> int:
        """M."""
        return self.ids.shape[1]


@attrs.frozen(eq=False)
class _Reading:
    """A pass over committed tokens.

    Attributes:
        tokens: [R] int64, as the network knows them.
        plan: where they stand and what they see.
        last: [bs] int64, the row of each request's last token.
        length: [bs] int64, own tokens before that one; None: the text is the target's.
    """

    tokens: Tensor
    plan: AttentionPlan
    last: Tensor
    length: Tensor | None = None


class TokenDrafter(Drafter):
    """A worker that drafts with a network which reads the token **at** each position.

    A subclass says what one pass of it gives (``logits``). At position p the network keeps the
    key of token p, so a prompt's first token is read, too. What the target has accepted waits for
    the next ``propose``: its first pass reads those tokens and the root together, and gives the
    first drafted token. So a draft of S tokens costs S passes. Between steps a request's state is
    ``own_tokens`` [bs, S + 1], the tokens whose keys are not written yet, and ``count`` [bs], how
    many these are; none after a prefill, which writes all.

    So the keys of the last S + 1 committed tokens may be missing when a request ends. The plugin's
    ``validate_config`` returns ``config.fit_token_draft()``, which keeps such pages from being
    shared.

    Args:
        runtime: the engine's.
        token_ids: [V_draft] int64, for each column of ``logits`` the target's id.
        pieces: what the network reads in the place of the target's tokens; None: these.

    Attributes:
        pieces: as given.
    """

    def __init__(
        self, runtime: Runtime, *, token_ids: Tensor, pieces: TokenPieces | None = None
    ) -> None:
        super().__init__(runtime, token_ids=token_ids, lead=1)
        self.pieces = pieces
        self._text: OwnText | None = None
        self._length: Tensor | None = None  # of the pass that drafts, before the root's last token
        if pieces is not None:
            self._text = runtime.own_text(pieces.cache)
        self._pending = self.num_steps + 1
        self._first_row = torch.zeros(1, dtype=torch.int64, device=runtime.device)
        # Each is one graph where the host records: the whole chain or tree, not a step of it.
        self._draft_chain = runtime.record_draft(self._begin_chain)
        self._draft_tree = runtime.record_draft(self._begin_tree)
        self._read_paths = runtime.record_draft(self._read_pending)
        self._write_paths = runtime.record_draft(self._write_path)

    @abstractmethod
    def logits(self, tokens: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Run a pass: write the keys of tokens, and return the logits of the token after each row.

        Args:
            tokens: [R] int64, the target's ids, or with ``pieces`` the network's own.
            plan: where they stand and what they see.
            rows: [M] int64, those whose logits are wanted; None: all R.

        Returns:
            [M, V_draft], in the order of ``token_ids``.
        """

    def write(self, tokens: Tensor, plan: AttentionPlan) -> None:
        """Write the keys of tokens [R], of which no logits are wanted."""
        self.logits(tokens, plan, self._first_row)

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries."""
        return {
            "own_tokens": StateTensor((self._pending,), torch.int64),
            "count": StateTensor((), torch.int64),
        }

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Write the keys of a prefill chunk; keep the tokens of an accepted path for the next
        draft, or write their keys, too, where none follows."""
        if batch.is_prefill:
            self._write_chunks(batch, output.own_tokens)
            return self._nothing_pending(output.bonus_tokens)
        own = output.own_tokens.view(batch.size, -1)
        room = self._pending - own.shape[1]
        if not batch.drafts_follow or room < 0:  # another algorithm may draft deeper
            self._write_paths(batch, output)
            return self._nothing_pending(output.bonus_tokens)
        state = {"own_tokens": F.pad(own, (0, room)), "count": output.accept_lens}
        return DraftInput(bonus_tokens=output.bonus_tokens, state=state)

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests whose prompts are prefilled, here or by another instance:
        all keys are written.

        Args:
            last_tokens: [bs] int64, the roots of the next step.
        """
        if self._text is not None:
            self._place_texts(batch, self._text, batch.seq_lens)
        return self._nothing_pending(last_tokens)

    def _nothing_pending(self, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests whose keys are all written."""
        nothing = torch.zeros(
            len(last_tokens), self._pending, dtype=torch.int64, device=last_tokens.device
        )
        state = {"own_tokens": nothing, "count": nothing[:, 0].clone()}
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain if ``topk`` is 1, else a dynamic tree, within ``batch.max_draft_nodes``."""
        nodes, steps = self.fit(batch)
        begin = draft_input.bonus_tokens, draft_input["own_tokens"], draft_input["count"]
        if nodes == 1:
            self._read_paths(batch, *begin)
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        return self._drafted(batch, begin, nodes, steps)

    def advance(
        self, tokens: Tensor, hidden: Tensor | None, plan: AttentionPlan
    ) -> tuple[Tensor, None]:
        """Run a pass over drafted tokens, which hands on nothing but keys."""
        if self.pieces is not None:
            tokens = self.pieces.ids[tokens, 0]
        return self.logits(tokens, plan), None

    def _begin_chain(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor, steps: int
    ) -> tuple[Tensor, Tensor]:
        """Draft a chain, as ``chain`` returns it."""
        first = self._first(batch, roots, own_tokens, count)
        return self.chain(batch, roots, *first, None, steps)

    def _begin_tree(
        self,
        batch: Batch,
        roots: Tensor,
        own_tokens: Tensor,
        count: Tensor,
        beam: int,
        nodes: int,
        steps: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft a tree, as ``tree`` returns it."""
        first = self._first(batch, roots, own_tokens, count)
        return self.tree(batch, roots, *first, None, beam, nodes, steps)

    def _first(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the K likeliest tokens after each root, and their scores: [bs, K] each."""
        read = self._pending_rows(batch, roots, own_tokens, count)
        self._length = read.length
        logits = self.logits(read.tokens, read.plan, read.last)
        return self.likeliest(batch, logits, batch.seq_lens.unsqueeze(1), 1)

    def _read_pending(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> tuple[()]:
        """Write the keys of the pending tokens and the root."""
        read = self._pending_rows(batch, roots, own_tokens, count)
        self.write(read.tokens, read.plan)
        return ()

    def _pending_rows(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> _Reading:
        """Return a pass over the pending tokens of each request and its root, S + 2 at most.

        The rows after a root are padding: they stand in slots of the step, and what is drafted
        next is written over them.
        """
        root = roots.unsqueeze(1)
        tokens = torch.cat((own_tokens, root), dim=1).scatter_(1, count.unsqueeze(1), root)
        return self._read(batch, tokens, batch.seq_lens - count, count + 1)

    def _read(self, batch: Batch, tokens: Tensor, starts: Tensor, count: Tensor) -> _Reading:
        """Return a pass over committed tokens.

        Args:
            tokens: [bs, w] int64 target ids, the first ``count`` [bs] of each request.
            starts: [bs] int64, the position of the first.
        """
        if self._text is not None:
            return self._read_own(batch, self._text, tokens, starts, count)
        width = tokens.shape[1]
        plan = self.runtime.plan_attention(batch, starts, width)
        first_rows = torch.arange(0, batch.size * width, width, device=tokens.device)
        return _Reading(tokens.reshape(-1), plan, first_rows + count - 1)

    def _write_path(self, batch: Batch, output: CommittedOutput) -> tuple[()]:
        """Write the keys of an accepted path."""
        own = output.own_tokens.view(batch.size, -1)
        read = self._read(batch, own, batch.seq_lens, output.accept_lens)
        self.write(read.tokens, read.plan)
        return ()

    def _write_chunks(self, batch: Batch, tokens: Tensor) -> None:
        """Write the keys of a prefill's tokens [R]."""
        if self._text is None:
            assert batch.attention is not None
            self.write(tokens, batch.attention)
            return
        widths = upload(batch.chunk_widths, tokens.device)
        starts = batch.seq_lens
        if any(batch.first_chunk):  # what the prefix cache had is placed again
            self._place_texts(batch, self._text, starts)
        width, padding = Padding.between(batch.chunk_widths, tokens.device)
        padded = tokens if padding is None else tokens[padding.padded_rows]
        read = self._read_own(batch, self._text, padded.view(batch.size, width), starts, widths)
        self.write(read.tokens, read.plan)

    # A text of the network's own

    def _place_texts(self, batch: Batch, text: OwnText, count: Tensor) -> None:
        """Place the first ``count`` [bs] tokens of texts that the host knows."""
        texts = [request.token_ids for request in batch.requests]
        longest = max(map(len, texts))
        tokens = upload([[*each, *[0] * (longest - len(each))] for each in texts], count.device)
        text.place(batch, torch.zeros_like(count), self._counts(tokens, count))

    def _counts(self, tokens: Tensor, count: Tensor) -> Tensor:
        """Return how many own tokens stand for each of the first ``count`` [bs] of tokens [bs, w],
        and 0 for the others."""
        assert self.pieces is not None
        order = torch.arange(tokens.shape[1], device=tokens.device)
        return torch.where(order < count.unsqueeze(1), self.pieces.counts[tokens], 0)

    def _read_own(
        self, batch: Batch, text: OwnText, tokens: Tensor, starts: Tensor, count: Tensor
    ) -> _Reading:
        """Return a pass over the own tokens of committed ones; the arguments as in ``_read``.

        Each request has M rows for each of its tokens. Its own tokens come first; then padding.
        """
        assert self.pieces is not None
        bs, width = tokens.shape
        counts = self._counts(tokens, count)
        text.place(batch, starts, counts)
        rows = self.pieces.most * width
        packed = pack(self.pieces.ids[tokens], counts, rows)
        begin, last = text.length(batch, starts), counts.sum(1) - 1
        plan = text.plan_attention(batch, begin, rows)
        first_rows = torch.arange(bs, device=tokens.device) * rows
        return _Reading(packed.reshape(-1), plan, first_rows + last, begin + last)

    def _drafted_text(self, batch: Batch) -> tuple[Tensor, Callable[..., AttentionPlan]]:
        """Return where the text of the pass that drafts begins, and what plans passes over it."""
        if self._text is None:
            return super()._drafted_text(batch)
        assert self._length is not None
        return self._length, self._text.plan_attention
