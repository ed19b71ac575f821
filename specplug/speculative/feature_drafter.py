"""Drafting token by token from the target's features: what all EAGLE-like algorithms share.

One network reads (token, feature) and predicts the next feature and, through it, the next token:
Li et al., EAGLE (arXiv 2401.15077), with the dynamic trees of EAGLE-2 (arXiv 2406.16858).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from contextlib import suppress

import attrs
import torch
from torch import Tensor

from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor, received_state
from specplug.speculative.drafter import Drafter, precise
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.hindsight import LastTokens
from specplug.speculative.hook_order import Batch
from specplug.speculative.host_copy import upload
from specplug.speculative.last_rows import LastRows, WantedRows, Written
from specplug.speculative.late_feed import single_rows
from specplug.speculative.layers import Attend, PagedAttend
from specplug.speculative.runtime import AttentionPlan, Runtime
from specplug.speculative.verify import CommittedOutput

_SINGLE_ROWS = 256
"""Rows of chunks or of several steps that each are a request of its own for a recorded pass: a
chunk's pass is launched kernel by kernel, which takes ten times as long, and keeps the host from
the next step. Each row reads its context."""
_MOST_SINGLE_ROWS = 8 * _SINGLE_ROWS
"""Rows of several steps that are read so at most: of 16 requests whose 128 rows each are too many
to wait an H200 takes 5 ms so, and 8 ms for a chunk."""
_MOST_KEYS = 1 << 18
"""Keys that rows of chunks may read so, as 256 rows that see 1,024 each: a chunk's pass reads a key
once for many rows."""

_WORTH_CUTTING = 32
"""Rows that leave only keys and values, from which on the last layer is run for the others alone:
that is more launches, or calls, than a layer for all."""


class FeatureDrafter(Drafter):
    """A worker that drafts with a network going from one position to the next.

    A subclass says what the network reads (``features``), one pass of it (``forward``) and its
    head (``logits``); extending the draft's cache with what the target accepted, chains and trees
    are here. Between steps a request's state is ``hidden_states`` [bs, H], the network's result at
    the last committed position, and the K best next tokens, ``tokens`` and ``scores`` [bs, K].

    Raises:
        UsageError: ``topk`` is greater than the draft's vocabulary.

    Args:
        runtime: the engine's.
        hidden_size: H, width of the network's hidden states.
        token_ids: [V_draft] int64, the network's vocabulary in the target's ids.
        num_layers, num_kv_heads, head_dim: of the draft's KV cache.
    """

    def __init__(
        self,
        runtime: Runtime,
        *,
        hidden_size: int,
        token_ids: Tensor,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> None:
        super().__init__(runtime, token_ids=token_ids, lead=0)
        self._hidden_size = hidden_size
        self._cache = runtime.allocate_kv(num_layers, num_kv_heads, head_dim)
        # Each is one graph where the host records: the whole chain or tree, not a step of it.
        self._draft_chain = runtime.record_draft(self.chain)
        self._draft_tree = runtime.record_draft(self.tree)
        self._extend_paths = runtime.record_draft(self._extend)
        self._write_paths = runtime.record_draft(self._write)
        self._last_layer = num_layers - 1

    @abstractmethod
    def features(self, output: CommittedOutput) -> Tensor:
        """Return what the target computed for the committed rows, as the network reads it."""

    @abstractmethod
    def forward(self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Run one pass: at position p, the token at p + 1 and the feature of p.

        Args:
            tokens: [R] int64 target ids.
            hidden: [R, H], ``features`` or this method's own result of the position before.
            positions: [R] int64.
            attend: see ``specplug.layers.Attend``.

        Returns:
            [R, H], the feature of position p + 1.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of the token at p + 2, [R, V_draft], for a result of ``forward``
        [R, H]."""

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries: hidden states as wide as the network's own."""
        of_scores = precise(self.runtime.dtype)
        return {
            "hidden_states": StateTensor((self._hidden_size,), self.runtime.dtype),
            "tokens": StateTensor((self.topk,), torch.int64, kept="first"),
            "scores": StateTensor((self.topk,), of_scores, kept="first"),
        }

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Run the committed rows, of a prefill chunk or an accepted path, through the network and
        choose what follows the last of each. Where no draft follows, only write their keys. Of
        several steps, tell what would have been right meanwhile."""
        is_single, last = self._reads_single_rows(batch, output), None
        # Of many single rows without a draft after them, keys are written alone.
        tells = batch.drafts_follow or not is_single or len(output.next_tokens) <= _SINGLE_ROWS
        if batch.is_prefill and not batch.chunk_ends and tells:  # of several steps
            last = LastTokens.of(batch.chunk_widths, output.next_tokens.device)
        if is_single:
            state, hindsight = self._read_single_rows(batch, output, last)
        elif batch.is_prefill and (batch.drafts_follow or last is not None):
            state, hindsight = self._extend_chunks(batch, output, last)
        elif batch.drafts_follow:
            state, hindsight = self._extend_paths(batch, output), None
        else:
            write = self._write if batch.is_prefill else self._write_paths
            state, hindsight = {}, None
            write(batch, output)
        return DraftInput(
            bonus_tokens=output.bonus_tokens,
            state=state if batch.drafts_follow else {},
            hindsight=hindsight,
        )

    def _read_single_rows(
        self, batch: Batch, output: CommittedOutput, last: LastTokens | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Read rows as so many requests; return the state that they leave, and whether the drafts
        of those before the last ones would have been right."""
        parts = single_rows(batch, output, _SINGLE_ROWS)
        if not batch.drafts_follow and last is None:
            for part in parts:
                self._write_paths(*part)
            return {}, None
        read = [self._extend_paths(*part) for part in parts]
        of_rows = read[0]
        if len(read) > 1:
            of_rows = {name: torch.cat([each[name] for each in read]) for name in of_rows}
        state = {name: rows[output.last_rows] for name, rows in of_rows.items()}
        if last is None:
            return state, None
        return state, last.right(of_rows["tokens"][last.index, 0], output.next_tokens)

    def _reads_single_rows(self, batch: Batch, output: CommittedOutput) -> bool:
        """Return whether the rows of chunks, or what several steps have left, are read as so many
        requests of one row."""
        if not (batch.is_prefill and isinstance(self._extend_paths, GraphRunner)):
            return False
        rows = len(output.next_tokens)
        if not batch.chunk_ends:  # of several steps
            return rows <= _MOST_SINGLE_ROWS
        each = zip(batch.chunk_widths, batch.chunk_ends, strict=True)
        keys = sum(width * end for width, end in each)
        return rows <= _SINGLE_ROWS and keys <= _MOST_KEYS

    def _plan(self, batch: Batch, output: CommittedOutput) -> AttentionPlan:
        """Return the plan of the rows of a prefill chunk or an accepted path."""
        if batch.is_prefill:
            assert batch.attention is not None
            return batch.attention
        width = output.next_tokens.shape[0] // batch.size
        return self.runtime.plan_attention(batch, batch.seq_lens, width)

    def _write(self, batch: Batch, output: CommittedOutput) -> tuple[()]:
        """Write the keys and values of the committed rows."""
        with suppress(Written):
            self._run(output, self._plan(batch, output), wanted=None)
        return ()

    def _extend(self, batch: Batch, output: CommittedOutput) -> dict[str, Tensor]:
        """Return the state that ``extend`` leaves."""
        plan, last = self._plan(batch, output), output.last_rows
        hidden = self._hidden(
            plan, output, last, lambda: self.runtime.plan_attention(batch, plan.positions[last], 1)
        )
        # The bonus token stands one after the last row, what is drafted first two after it.
        terms = batch.seq_lens.unsqueeze(1), output.accept_lens.unsqueeze(1)
        tokens, scores = self.likeliest(batch, self.logits(hidden), *terms, 1)
        return {"hidden_states": hidden, "tokens": tokens, "scores": scores}

    def _extend_chunks(
        self, batch: Batch, output: CommittedOutput, last: LastTokens | None
    ) -> tuple[dict[str, Tensor], Tensor | None]:
        """Return the state that chunks leave, and whether the drafts after the rows before their
        ``last`` ones would have been right."""
        if last is None:
            return self._extend(batch, output), None
        starts = batch.seq_lens + output.accept_lens - upload(last.counts, self.runtime.device)
        hidden = self._hidden(
            self._plan(batch, output),
            output,
            last.index,
            lambda: self.runtime.plan_attention(batch, starts, last.counts),
        )
        logits = self.logits(hidden)
        if batch.greedy:
            tokens, scores = self.likeliest(batch, logits)
        else:
            owner, rows = self._part(batch, last.owners)
            terms = rows.seq_lens.unsqueeze(1), output.accept_lens[owner].unsqueeze(1)
            tokens, scores = self.likeliest(rows, logits, *terms, 1 - last.back.unsqueeze(1))
        of_rows = {"hidden_states": hidden, "tokens": tokens, "scores": scores}
        state = {name: each[last.ends] for name, each in of_rows.items()}
        return state, last.right(tokens[:, 0], output.next_tokens)

    def _hidden(
        self,
        plan: AttentionPlan,
        output: CommittedOutput,
        index: Tensor,
        plan_wanted: Callable[[], AttentionPlan],
    ) -> Tensor:
        """Run the committed rows and return what some of them leave, [n, H].

        Args:
            plan: of all rows.
            index: [n] int64, these.
            plan_wanted: makes their plan.
        """
        if len(output.next_tokens) - len(index) < _WORTH_CUTTING:
            return self._pass(output.next_tokens, self.features(output), plan)[index]
        hidden = self._run(output, plan, WantedRows(index, plan_wanted()))
        return hidden if len(hidden) == len(index) else hidden[index]

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests that another instance has prefilled. One that came without
        it is drafted from its last token alone: one pass of the network, the feature unknown. Of
        more branches than are kept here the best are taken; where there are fewer, they are chosen
        anew.

        Args:
            last_tokens: [bs] int64, the roots of the next step.
        """
        runtime = self.runtime
        received = received_state(batch, self.state_spec())
        state = received.tensors
        # A peer's word is not to be trusted.
        state["tokens"].clamp_(0, runtime.vocab_size - 1)
        state["scores"].nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0)
        if unknown := received.lacking("hidden_states"):
            index, part = self._part(batch, unknown)
            plan = runtime.plan_attention(part, part.seq_lens, 1, offset=-1)
            hidden = self._pass(last_tokens[index], state["hidden_states"][index], plan)
            state["hidden_states"].index_copy_(0, index, hidden)
        few = {*unknown, *received.lacking("tokens"), *received.lacking("scores")}
        if few:
            index, part = self._part(batch, sorted(few))
            hidden = state["hidden_states"][index]
            ends = part.seq_lens.unsqueeze(1)
            tokens, scores = self.likeliest(part, self.logits(hidden), ends, 1)
            state["tokens"].index_copy_(0, index, tokens)
            state["scores"].index_copy_(0, index, scores)
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def _part(self, batch: Batch, indices: list[int]) -> tuple[Tensor, Batch]:
        """Take some requests of a batch: return their indices [n] int64, and a batch of them."""
        index = upload(indices, self.runtime.device)
        part = attrs.evolve(
            batch,
            requests=[batch.requests[i] for i in indices],
            req_indices=batch.req_indices[index],
            seq_lens=batch.seq_lens[index],
        )
        return index, part

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain if ``topk`` is 1, else a dynamic tree, within ``batch.max_draft_nodes``."""
        nodes, steps = self.fit(batch)
        if nodes == 1:
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
        begin = (
            draft_input.bonus_tokens,
            draft_input["tokens"],
            draft_input["scores"],
            draft_input["hidden_states"],
        )
        return self._drafted(batch, begin, nodes, steps)

    def advance(
        self, tokens: Tensor, hidden: Tensor | None, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        """Run a pass over drafted tokens; its features are what each leaves."""
        assert hidden is not None
        following = self._pass(tokens, hidden, plan)
        return self.logits(following), following

    def _pass(self, tokens: Tensor, hidden: Tensor, plan: AttentionPlan) -> Tensor:
        return self.forward(tokens, hidden, plan.positions, PagedAttend(self._cache, plan))

    def _run(
        self, output: CommittedOutput, plan: AttentionPlan, wanted: WantedRows | None
    ) -> Tensor:
        """Run the committed rows, of whose last layer few are wanted, or none."""
        attend = LastRows(self._cache, plan, self._last_layer, wanted)
        return self.forward(output.next_tokens, self.features(output), plan.positions, attend)
