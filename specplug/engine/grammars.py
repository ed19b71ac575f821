"""The grammars of a run's requests, beside its steps: masks, forced text, and what drafts cannot
have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from specplug.engine.request import Request
from specplug.engine.step_values import StepResult
from specplug.grammar.masks import allocate_masks
from specplug.grammar.state import HostTree
from specplug.speculative.draft import Draft
from specplug.speculative.draft_cuts import narrow
from specplug.speculative.draft_plan import ForcedTokens


class Grammars:
    """Grammars live on the host. To know where they stand they need the tokens of the steps before.

    Args:
        vocab_size: V.
        device: of the target.
        overlap: whether a step is launched before the last one's result is processed.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, overlap: bool) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._is_behind = overlap and device.type != "cpu"
        self._unread: list[StepResult] = []
        self._requests: tuple[Request, ...] = ()

    def expect(self, result: StepResult) -> None:
        """Note a launched step of requests with grammars: these read its tokens before the next
        masks."""
        self._unread = [*(r for r in self._unread if not r.grammars_advanced), result]

    def _catch_up(self) -> None:
        """Wait for what was accepted in the steps before, and advance the grammars by it."""
        for result in self._unread:
            result.wait()
            result.advance_grammars()
        self._unread.clear()

    # Before the target's pass

    def begin(self, requests: Sequence[Request]) -> Callable[[Draft], Draft] | None:
        """Note the requests of a decode step, some of which have grammars, until ``masks`` is
        called for it. Return what prunes their drafts; None: the host would wait for them."""
        self._requests = tuple(requests)
        return self._prune if self._device.type == "cpu" else None

    def forced_tokens(
        self, request_ids: Iterable[str], *, wait: bool
    ) -> Sequence[ForcedTokens | None]:
        """Return what grammars force of requests of this step, as ``Runtime.forced_tokens``
        does."""
        if not self._requests:
            return ()
        if wait or not self._is_behind:
            self._catch_up()
        found = {request.request_id: request for request in self._requests}
        return [_forced_of(found[each]) if each in found else None for each in request_ids]

    def _prune(self, draft: Draft) -> Draft:
        """Return a draft of this step, on the CPU, without the nodes that grammars forbid, and all
        below them: they would cost rows, and are never accepted."""
        if draft.width == 1:
            return draft
        self._catch_up()
        bs, width = draft.tokens.shape
        order = torch.arange(width)
        parents = (order - 1).expand(bs, -1) if draft.parents is None else draft.parents
        ranks, widths = -order.float().repeat(bs, 1), list(draft.widths or (width,) * bs)
        for b, request in enumerate(self._requests):
            if request.grammar_state is not None and widths[b] > 1:
                nodes = draft.tokens[b, : widths[b]].tolist(), parents[b, : widths[b]].tolist()
                allowed = request.grammar_state.allows(*nodes)
                ranks[b, : widths[b]][~torch.tensor(allowed)] = -torch.inf
                widths[b] = sum(allowed)
        return narrow(draft, widths, ranks)

    # While the target's pass runs

    def masks(self, requests: Sequence[Request], tree: HostTree | None, num_rows: int) -> Tensor:
        """Return what the requests' grammars allow after each row, [num_rows, words] int32.

        The one wait between resolve and publish: for what was accepted and drafted, while the
        target's pass runs.

        Args:
            tree: of the drafts whose nodes the rows are; None: each request has one row.
        """
        self._catch_up()
        masks = allocate_masks(num_rows, self._vocab_size, pinned=self._device.type == "cuda")
        grammar_states = [request.grammar_state for request in requests]
        if tree is not None:
            tree.fill_masks(grammar_states, masks)
        else:
            for grammar_state, mask in zip(grammar_states, masks, strict=True):
                if grammar_state is not None:
                    grammar_state.fill_next(mask)
        self._requests = ()
        return masks.to(self._device, non_blocking=True)


def _forced_of(request: Request) -> ForcedTokens | None:
    if request.grammar_state is None:
        return None
    known = len(request.prompt_token_ids) + request.grammar_state.taken
    return ForcedTokens(known=known, tokens=request.grammar_state.forced())
