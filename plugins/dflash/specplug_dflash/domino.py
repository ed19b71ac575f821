"""Domino's head (arXiv 2605.29707): a state of the tokens drawn before corrects a block's rows."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specplug_dflash.drawing import State
from specplug_dflash.network import DFlashNetwork


class DominoDrawing:
    """A ``DrawingHead``.

    Args:
        network: with a ``prefix_gru``.
        embed: takes tokens [R], returns their embeddings [R, hidden].
    """

    def __init__(self, network: DFlashNetwork, embed: Callable[[Tensor], Tensor]) -> None:
        self._network = network
        self._embed = embed
        self._pure = network.config.pure_draft_prefix_len

    def begin(self, roots: Tensor, anchors: Tensor) -> State:
        return (self._network.read_token(self._embed(roots), None),)

    def correct(
        self, index: int, logits: Tensor, hidden: Tensor, state: State
    ) -> tuple[Tensor, State]:
        if index >= self._pure:
            logits = self._network.corrected(logits, hidden, state[0])
        return logits, state

    def read(self, tokens: Tensor, state: State) -> State:
        return (self._network.read_token(self._embed(tokens), state[0]),)
