"""The compiled drafter does what the plain one does, bit by bit."""

from __future__ import annotations

import ctypes
import math
import random
import shlex
import subprocess
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.kernels.cpu_compiler import find_compiler
from specplug_ngram import library
from specplug_ngram.compiled_drafter import CompiledDrafter, load_library
from specplug_ngram.draft_tree import Shape
from specplug_ngram.drafter import Drafter, PlainDrafter
from specplug_ngram.history import TOKEN_BYTES, History
from specplug_ngram.index import FIRST_CAPACITY, Index

shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 7), st.integers(1, 12))
LIVING = 4
"""Requests at a time; the next one has ended."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> ctypes.PyDLL:
    found = load_library()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


MOST = 1 << 14
"""Tokens of an index that no test fills."""


def _pair(
    tokens: int, shape: Shape, first: int = FIRST_CAPACITY
) -> tuple[list[Index], list[Drafter]]:
    compiled = load_library()
    assert compiled is not None
    most = tokens * TOKEN_BYTES
    indices = [Index(most, None, first), Index(most, compiled.relink, first)]
    plain = PlainDrafter(indices[0], shape)
    return indices, [plain, CompiledDrafter(compiled, indices[1], shape)]


def _request(index: Index, drafter: Drafter, owner: Hashable) -> Any:
    history = index.open(owner)
    return None if history is None else drafter.request(history)


def _tables(history: History) -> list[list[int]]:
    tables = (history._tokens, history._before, history._after, *history._same, *history._heads)
    return [[history.end, history.oldest], *(table.tolist() for table in tables)]


def _all_tables(index: Index) -> list[Any]:
    return [(key, _tables(owner.history)) for key, owner in index._owners.items()]


def _drafted(drafter: Drafter, requests: Sequence[Any], rooms: list[int], least: float) -> Any:
    """Return drafts in a form that can be compared."""
    drafts = drafter.draft(requests, rooms, least)
    parents = None
    if drafts.parents is not None:  # those of padding nodes mean nothing
        rows = zip(drafts.parents.tolist(), drafts.widths, strict=True)
        parents = [row[:width] for row, width in rows]
    assert drafts.scores.dtype == torch.float32
    tokens, scores = drafts.tokens.tolist(), drafts.scores.tolist()
    return tokens, parents, scores, drafts.widths, drafts.depth, drafts.nodes, [*drafts.gains]


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    seed=st.integers(0, 1 << 32),
    shape=shapes,
    tokens=st.sampled_from([1, 2, 3, 5, MOST]),
    owners=st.sampled_from([1, 2, 100]),
    words=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.0, 0.1]),
    has_corpus=st.booleans(),
)
def test_drafter_compiled_does_what_the_plain_one_does(
    seed: int,
    shape: Shape,
    tokens: int,
    owners: int,
    words: int,
    least: float,
    has_corpus: bool,
) -> None:
    draw = random.Random(seed)
    first = draw.choice([1, 4, 16])
    indices, drafters = _pair(tokens * first * 4, shape, first)
    text = [draw.randrange(words) for _ in range(draw.randint(1, first * 3))]
    keys = [draw.randrange(owners) for _ in range(LIVING)]
    for index, drafter in zip(indices, drafters, strict=True):
        corpus = index.open_corpus(len(text)) if has_corpus else None
        if corpus is not None:
            drafter.read(drafter.request(corpus), text)
    requests = [
        [*(_request(index, drafter, key) for key in keys), None]
        for index, drafter in zip(indices, drafters, strict=True)
    ]
    for _ in range(30):
        which = draw.sample(range(LIVING + 1), draw.randint(1, LIVING + 1))
        rooms = [draw.randint(1, 12) for _ in which]
        counts = torch.tensor([draw.randint(0, 8) for _ in which])
        came = torch.tensor([[draw.randrange(words) for _ in range(8)] for _ in which])
        reader, ended = draw.randrange(LIVING), draw.randrange(LIVING)
        prompt = [draw.randrange(words) for _ in range(draw.choice([0, 0, 0, 20]))]
        ends, is_proposed = draw.random() < 0.1, draw.random() < 0.8
        keep, removed = draw.random() < 0.5, draw.randrange(40)
        old, keys[ended] = keys[ended], draw.randrange(owners) if ends else keys[ended]
        found = []
        for index, drafter, own in zip(indices, drafters, requests, strict=True):
            if ends:
                if own[ended] is not None:
                    index.close(old, keep=keep)
                own[ended] = _request(index, drafter, keys[ended])
            index.remove(removed)
            if own[reader] is not None:
                drafter.read(own[reader], prompt)
            batch = [own[n] for n in which]
            found.append(_drafted(drafter, batch, rooms, least) if is_proposed else None)
            drafter.observe(batch, came, counts)
            assert index.num_bytes <= index.most_bytes
        assert found[0] == found[1]
    assert _all_tables(indices[0]) == _all_tables(indices[1])
    of_each = [[None if r is None else r.novelty.log for r in own] for own in requests]
    assert of_each[0] == of_each[1]


def test_drafter_compiled_lets_its_tables_grow() -> None:
    indices, drafters = _pair(MOST, Shape(1, 7, 8))
    text = [n * n % 997 for n in range(FIRST_CAPACITY * 16 + 500)]
    for index, drafter in zip(indices, drafters, strict=True):
        one, other = (_request(index, drafter, "owner") for _ in range(2))
        for part in (text[:10], text[10:], text[:3000]):
            drafter.read(one, part)
            drafter.read(other, part[:5])
    assert _all_tables(indices[0]) == _all_tables(indices[1])
    assert len(indices[1]._owners["owner"].history) == len(text) + 3000 + 15


def test_novelty_compiled_stays_within_its_bounds() -> None:
    for index, drafter in zip(*_pair(MOST, Shape(1, 7, 8)), strict=True):
        request = _request(index, drafter, "owner")
        drafter.read(request, [1, 2, 3] * 5)
        for came in (*[1, 2, 3] * 40, *[7, 8] * 40):
            drafter.draft([request], [8], 0.0)
            drafter.observe([request], torch.tensor([[came]]), torch.tensor([1]))
        assert math.isfinite(request.novelty.log)


def test_counts_beyond_the_tokens_are_not_read() -> None:
    for index, drafter in zip(*_pair(MOST, Shape(1, 7, 8)), strict=True):
        request = _request(index, drafter, "owner")
        drafter.observe([request], torch.tensor([[1, 2]]), torch.tensor([9]))
        assert index.num_tokens == 2


def test_library_of_other_structures_is_refused(tmp_path: Path, compiled: ctypes.PyDLL) -> None:
    path = Path(library.__file__).with_name("drafter.c")
    field = "32_t token, parent, depth;"
    source = path.read_text().replace(f"int{field}", f"int{field}".replace("32", "64"))
    (tmp_path / "drafter.c").write_text(source)
    built = tmp_path / "drafter.so"
    compiler = find_compiler()
    assert compiler is not None
    options = ["-shared", "-fPIC", "-o", str(built), str(tmp_path / "drafter.c"), "-lm"]
    command = [*shlex.split(compiler), *options]
    subprocess.run(command, check=True)
    with pytest.raises(AttributeError, match="its structures are"):
        library.open_library(str(built))
    trial = [sys.executable, "-I", "-S", str(library.__file__), str(built)]
    assert subprocess.run(trial, capture_output=True).returncode
