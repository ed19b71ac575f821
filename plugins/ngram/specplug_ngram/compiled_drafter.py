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
from specplug_ngram.library import Candidate, Node, RequestStruct, Settings, Summary, Tables
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

    def __init__(self, num_draft_tokens: int) -> None:
        super().__init__()
        self._nodes = (Node * num_draft_tokens)()
        self.tree = ctypes.cast(self._nodes, ctypes.POINTER(Node))
        self.novelty.log = Novelty().log
        self.address = ctypes.addressof(self)


class CompiledDrafter:
    """``Drafter`` in C. It drafts the same tokens as ``PlainDrafter``, from the same tables.

    Args:
        compiled: the functions that ``load_library`` returns.
        history: the tables. Only this drafter writes to them.
        shape: the limits of a tree.
    """

    def __init__(self, compiled: ctypes.PyDLL, history: History, shape: Shape) -> None:
        self._extend, self._observe, self._draft = (
            compiled.extend,
            compiled.observe,
            compiled.draft,
        )
        self._history = history
        self._width = shape.num_draft_tokens
        self._tables = Tables(capacity=history.capacity)
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
        structures = (self._tables, self._settings, self._summary, self._heap)
        self._at = [ctypes.addressof(each) for each in structures]
        self._find_tables()

    def request(self) -> CompiledRequest:
        return CompiledRequest(self._width)

    def read(self, request: CompiledRequest, tokens: Sequence[int]) -> None:
        self._reserve(len(tokens))
        read = array("q", tokens)
        self._extend(self._at[0], request.address, read.buffer_info()[0], len(read))
        self._history.end = self._tables.end

    def observe(
        self, requests: Sequence[CompiledRequest | None], tokens: Tensor, counts: Tensor
    ) -> None:
        tokens, counts = _flat(tokens), _flat(counts)
        bs, width = tokens.shape
        assert len(requests) == bs == len(counts), (len(requests), tokens.shape, counts.shape)
        self._reserve(bs * width)
        tables, settings, _, _ = self._at
        rows = _addresses(requests)
        self._observe(
            *(tables, settings, rows.buffer_info()[0], tokens.data_ptr(), width),
            *(counts.data_ptr(), bs),
        )
        self._history.end = self._tables.end

    def draft(
        self, requests: Sequence[CompiledRequest | None], rooms: Sequence[int], least: float
    ) -> Drafts:
        bs = len(requests)
        assert bs == len(rooms), (bs, rooms)
        tables, settings, summed, heap = self._at
        rows, limits, widths = _addresses(requests), array("q", rooms), array("q", bytes(8 * bs))
        tokens, parents = torch.empty(2, bs, self._width, dtype=torch.int64).unbind()
        scores = torch.empty(bs, self._width, dtype=torch.float32)
        gains = array("d", bytes(8 * self._width))
        self._draft(
            *(tables, settings, rows.buffer_info()[0], limits.buffer_info()[0], bs, least, heap),
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

    def _reserve(self, count: int) -> None:
        if self._history.reserve(count):
            self._find_tables()

    def _find_tables(self) -> None:
        """Pass the addresses of the history's tables to C."""
        tables, at = self._tables, self._history.addresses
        tables.tokens, tables.before, tables.after = at[:3]
        tables.same[:], tables.heads[:] = at[3:5], at[5:]


def _addresses(requests: Sequence[CompiledRequest | None]) -> array[int]:
    return array("Q", [0 if request is None else request.address for request in requests])


def _flat(tensor: Tensor) -> Any:
    """Return the tensor in int64 and contiguous, as the C functions read it."""
    return tensor.to(torch.int64).contiguous()
