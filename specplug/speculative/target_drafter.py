"""Drafting with the target's own layers: a part of them, or over a part of what they have read.

Zhang et al. (Draft & Verify, arXiv 2309.08168); Chen et al. (MagicDec, arXiv 2408.11049).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from specplug.errors import PluginError
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor, received_state
from specplug.speculative.drafter import Drafter
from specplug.speculative.hook_order import Batch
from specplug.speculative.runtime import AttentionPlan, Runtime, TargetPlan
from specplug.speculative.verify import CommittedOutput


class TargetDrafter(Drafter):
    """A worker that drafts with the target's first layers, its final norm and its LM head.

    The first pass of a draft reads the roots, each further one the tokens drafted before it. So a
    draft of S tokens costs S passes. Nothing is kept between steps, unless a subclass drafts over a
    part of what is committed (``plan``) and has to know which (``state_spec``, ``extend``).

    The plugin declares ``Capabilities(target_drafts=True)``, with ``branching`` for trees, and its
    ``validate_config`` returns ``config.fit_target_draft()``.

    Args:
        runtime: the engine's.
        layers: how many of the target's draft; None: all.
    """

    def __init__(self, runtime: Runtime, *, layers: int | None = None) -> None:
        token_ids = torch.arange(runtime.vocab_size, device=runtime.device)
        super().__init__(runtime, token_ids=token_ids, lead=1)
        self._layers = runtime.target_layers(0, runtime.num_layers if layers is None else layers)
        self._seen: TargetPlan | None = None  # of the draft that is being made
        # Each is one graph where the host records: the whole chain or tree, not a step of it.
        self._draft_chain = runtime.record_draft(self._begin_chain)
        self._draft_tree = runtime.record_draft(self._begin_tree)

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries: nothing."""
        return {}

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Keep nothing: all that drafts read is in the target's own cache."""
        return DraftInput(bonus_tokens=output.bonus_tokens)

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Begin with requests that another instance has prefilled, with what it sent."""
        received = received_state(batch, self.state_spec())
        return DraftInput(bonus_tokens=last_tokens, state=received.tensors)

    def plan(self, batch: Batch, *state: Tensor) -> TargetPlan:
        """Plan the roots, a row for each request. A subclass that drafts over a part of what is
        committed plans that part here, with operations of the device alone.

        Args:
            state: what the draft input carries, in the order of ``state_spec``.
        """
        return self.runtime.plan_target(batch, batch.seq_lens, 1)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft a chain if ``topk`` is 1, else a dynamic tree, within ``batch.max_draft_nodes``."""
        nodes, steps = self.fit(batch)
        roots = draft_input.bonus_tokens
        if nodes == 1:
            return Draft.chain(roots.unsqueeze(1))
        begin = roots, *(draft_input[name] for name in self.state_spec())
        return self._drafted(batch, begin, nodes, steps)

    def advance(
        self, tokens: Tensor, hidden: Tensor | None, plan: AttentionPlan
    ) -> tuple[Tensor, None]:
        """Run a pass over tokens, which hands on nothing but keys."""
        runtime = self.runtime
        rows = self._layers(runtime.embed_tokens(tokens), cast("TargetPlan", plan))
        return runtime.lm_head(runtime.final_norm(rows)), None

    def _begin_chain(self, batch: Batch, roots: Tensor, *given: Any) -> tuple[Tensor, Tensor]:
        """Draft a chain, as ``chain`` returns it; given: the state and S."""
        *state, steps = given
        return self.chain(batch, roots, *self._first(batch, roots, state), None, steps)

    def _begin_tree(
        self, batch: Batch, roots: Tensor, *given: Any
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft a tree, as ``tree`` returns it; given: the state, F, N and S."""
        *state, beam, nodes, steps = given
        first = self._first(batch, roots, state)
        return self.tree(batch, roots, *first, None, beam, nodes, steps)

    def _first(self, batch: Batch, roots: Tensor, state: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Return the K likeliest tokens after each root, and their scores: [bs, K] each."""
        self._seen = self.plan(batch, *state)
        logits, _ = self.advance(roots, None, self._seen)
        return self.likeliest(batch, logits, batch.seq_lens.unsqueeze(1), 1)

    def _drafted_text(self, batch: Batch) -> tuple[Tensor, Callable[..., AttentionPlan]]:
        """Return where the text of the pass that drafts begins, and what plans passes over what
        the roots saw."""
        seen = self._seen
        if seen is None:
            raise PluginError("a TargetDrafter drafts by propose(), which plans what its rows see")

        def plan(batch: Batch, starts: Tensor, width: int, **where: Any) -> TargetPlan:
            return seen.rows(width, **where)  # its batch and starts are the roots'

        return batch.seq_lens, plan
