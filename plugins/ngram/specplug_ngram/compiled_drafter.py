"""The drafter in C, which drafts for all requests of a step in two calls."""

from __future__ import annotations

import ctypes
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specplug import load_compiled
from specplug_ngram import library
from specplug_ngram.draft_tree import MAX_PLACES, Shape
from specplug_ngram.drafter import Drafts
from specplug_ngram.history import ORDERS, History
from specplug_ngram.index import Index
from specplug_ngram.library import Candidate, Node, RequestStruct, Settings, Summary
from specplug_ngram.policy import LEARNING_RATE, LEAST_NOVELTY, MOST_NOVELTY, Novelty

_SOURCE = Path(__file__).with_name("drafter.c")
assert (library.LONGEST, library.SHORTEST) == ORDERS
assert library.PLACES == MAX_PLACES


def load_library() -> ctypes.PyDLL | None:
    """Return the compiled functions; None if they cannot be compiled or loaded here."""
    trial = Path(library.__file__)
    return load_compiled(_SOURCE, trial, lambda path: library.open_library(str(path)))


class CompiledRequest(RequestStruct):
    """The state of a running request, and its memory address."""

    def __init__(self, history: History, num_draft_tokens: int) -> None:
        super().__init__()
        self.owned = history
        self.history = history.address
        self._nodes = (Node * num_draft_tokens)()
        self.tree = ctypes.addressof(self._nodes)
        self.novelty.log = Novelty().log
        self.address = ctypes.addressof(self)


class CompiledDrafter:
    """``Drafter`` in C. It drafts the same tokens as ``PlainDrafter``, from the same tables.

    Args:
        compiled: the functions that ``load_library`` returns.
        index: the histories. Only this drafter writes to them.
        shape: the limits of a tree.
    """

    def __init__(self, compiled: ctypes.PyDLL, index: Index, shape: Shape) -> None:
        self._extend, self._observe, self._draft = (
            compiled.extend,
            compiled.observe,
            compiled.draft,
        )
        self._index = index
        self._width = shape.num_draft_tokens
        self._settings = Settings(
            shape.topk,
            shape.num_steps,
            shape.num_draft_tokens,
            LEARNING_RATE,
            math.log(LEAST_NOVELTY),
            math.log(MOST_NOVELTY),
        )
        self._summary = Summary()
        self._heap = (Candidate * (MAX_PLACES * self._width))()
        structures = (self._settings, self._summary, self._heap)
        self._at = [ctypes.addressof(each) for each in structures]

    def request(self, history: History) -> CompiledRequest:
        return CompiledRequest(history, self._width)

    def read(self, request: CompiledRequest, tokens: Sequence[int]) -> None:
        self._index.reserve(request.owned, len(tokens))
        read = array("q", tokens)
        self._extend(request.address, read.buffer_info()[0], len(read))

    def observe(
        self, requests: Sequence[CompiledRequest | None], tokens: Tensor, counts: Tensor
    ) -> None:
        tokens, counts = _flat(tokens), _flat(counts)
        bs, width = tokens.shape
        assert len(requests) == bs == len(counts), (len(requests), tokens.shape, counts.shape)
        rows = _addresses(requests)
        step = (self._at[0], rows.buffer_info()[0], tokens.data_ptr(), width, counts.data_ptr(), bs)
        row = self._observe(*step, 0)
        while row < bs:
            request = requests[row]
            assert request is not None
            self._index.reserve(request.owned, min(int(counts[row]), width))
            row = self._observe(*step, row)

    def draft(
        self, requests: Sequence[CompiledRequest | None], rooms: Sequence[int], least: float
    ) -> Drafts:
        bs = len(requests)
        assert bs == len(rooms), (bs, rooms)
        settings, summed, heap = self._at
        corpus = None if self._index.corpus is None else self._index.corpus.address
        rows, limits, widths = _addresses(requests), array("q", rooms), array("q", bytes(8 * bs))
        tokens, parents = torch.empty(2, bs, self._width, dtype=torch.int64).unbind()
        scores = torch.empty(bs, self._width, dtype=torch.float32)
        gains = array("d", bytes(8 * self._width))
        self._draft(
            *(corpus, settings, rows.buffer_info()[0], limits.buffer_info()[0], bs, least, heap),
            *(tokens.data_ptr(), parents.data_ptr(), scores.data_ptr()),
            *(widths.buffer_info()[0], gains.buffer_info()[0], summed),
        )
        summary = self._summary
        return Drafts(
            tokens=tokens,
            parents=parents if summary.branches else None,
            scores=scores,
            widths=widths.tolist(),
            depth=summary.depth,
            nodes=summary.nodes,
            gains=gains,
        )


def _addresses(requests: Sequence[CompiledRequest | None]) -> array[int]:
    return array("Q", [0 if request is None else request.address for request in requests])


def _flat(tensor: Tensor) -> Any:
    """Return the tensor in int64 and contiguous, as the C functions read it."""
    if tensor.dtype == torch.int64 and tensor.is_contiguous():
        return tensor
    return tensor.to(torch.int64).contiguous()
