"""Drafting token by token from tokens alone: what language models do that draft for another one.

Leviathan, Kalman and Matias (arXiv 2211.17192); Chen et al. (arXiv 2302.01318).
"""

from __future__ import annotations

from abc import abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.drafter import Drafter
from specplug.speculative.hook_order import Batch
from specplug.speculative.runtime import AttentionPlan, Runtime
from specplug.speculative.verify import CommittedOutput


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
    """

    def __init__(self, runtime: Runtime, *, token_ids: Tensor) -> None:
        super().__init__(runtime, token_ids=token_ids, lead=1)
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
            tokens: [R] int64 target ids.
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
            assert batch.attention is not None
            self.write(output.own_tokens, batch.attention)
            return self.receive(batch, output.bonus_tokens)
        own = output.own_tokens.view(batch.size, -1)
        room = self._pending - own.shape[1]
        if not batch.drafts_follow or room < 0:  # another algorithm may draft deeper
            self._write_paths(batch, output)
            return self.receive(batch, output.bonus_tokens)
        state = {"own_tokens": F.pad(own, (0, room)), "count": output.accept_lens}
        return DraftInput(bonus_tokens=output.bonus_tokens, state=state)

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests whose prompts are prefilled, here or by another instance:
        all keys are written.

        Args:
            last_tokens: [bs] int64, the roots of the next step.
        """
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
        tokens, plan, rows = self._pending_rows(batch, roots, own_tokens, count)
        logits = self.logits(tokens, plan, rows)
        return self.likeliest(batch, logits, batch.seq_lens.unsqueeze(1), 1)

    def _read_pending(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> tuple[()]:
        """Write the keys of the pending tokens and the root."""
        tokens, plan, _ = self._pending_rows(batch, roots, own_tokens, count)
        self.write(tokens, plan)
        return ()

    def _pending_rows(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> tuple[Tensor, AttentionPlan, Tensor]:
        """Return the tokens [bs * (S + 2)] of a pass over the pending tokens of each request and
        its root, its plan, and each root's row [bs].

        The rows after a root are padding: they stand in slots of the step, and what is drafted
        next is written over them.
        """
        width = self._pending + 1
        place = count.unsqueeze(1)
        root = roots.unsqueeze(1)
        tokens = torch.cat((own_tokens, root), dim=1).scatter_(1, place, root)
        plan = self.runtime.plan_attention(batch, batch.seq_lens - count, width)
        rows = torch.arange(0, batch.size * width, width, device=count.device) + count
        return tokens.view(-1), plan, rows

    def _write_path(self, batch: Batch, output: CommittedOutput) -> tuple[()]:
        """Write the keys of an accepted path."""
        self.write(output.own_tokens, self._path_plan(batch, output))
        return ()
