"""Masks of what the grammars of a step's requests allow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specplug.engine.request import Request
from specplug.engine.step_result import StepResult
from specplug.grammar.masks import allocate_masks
from specplug.grammar.state import HostTree


class GrammarMasks:
    """Makes the masks of a step's rows. Grammars live on the host, so it waits for what they have
    to know: the tokens of the steps before.

    Args:
        vocab_size: V.
        device: of the masks.
    """

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._unread: list[StepResult] = []

    def expect(self, result: StepResult) -> None:
        """Note a step that was launched: if a request of it has a grammar, that reads its tokens
        before the next masks."""
        if any(request.grammar_state is not None for request in result.step.requests):
            self._unread = [*(r for r in self._unread if not r.grammars_advanced), result]

    def make(self, requests: Sequence[Request], tree: HostTree | None, num_rows: int) -> Tensor:
        """Return what the requests' grammars allow after each row, [num_rows, words] int32.

        The one wait between resolve and publish: for what was accepted and drafted, while the
        target's pass runs.

        Args:
            tree: of the drafts whose nodes the rows are; None: each request has one row.
        """
        for result in self._unread:
            result.wait()
            result.advance_grammars()
        self._unread.clear()
        masks = allocate_masks(num_rows, self._vocab_size, pinned=self._device.type == "cuda")
        grammar_states = [request.grammar_state for request in requests]
        if tree is not None:
            tree.fill_masks(grammar_states, masks)
        else:
            for grammar_state, mask in zip(grammar_states, masks, strict=True):
                if grammar_state is not None:
                    grammar_state.fill_next(mask)
        return masks.to(self._device, non_blocking=True)
