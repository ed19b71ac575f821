"""The compiled drafter does what the plain one does, bit by bit."""

from __future__ import annotations

import ctypes
import math
import random
import shlex
import subprocess
import sys
from collections.abc import Sequence
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
from specplug_ngram.history import GROWTH, History

shapes = st.builds(Shape, st.integers(1, 4), st.integers(1, 7), st.integers(1, 12))
LIVING = 4
"""Requests at a time; the next one has ended."""


@pytest.fixture(scope="module", autouse=True)
def compiled() -> ctypes.PyDLL:
    found = load_library()
    if found is None:
        pytest.skip("there is no C compiler")
    return found


def _pair(capacity: int, shape: Shape) -> tuple[list[History], list[Drafter]]:
    compiled = load_library()
    assert compiled is not None
    histories = [History(capacity) for _ in range(2)]
    plain = PlainDrafter(histories[0], shape)
    return histories, [plain, CompiledDrafter(compiled, histories[1], shape)]


def _tables(history: History) -> list[list[int]]:
    history.reserve(history.capacity)  # either may have grown before the other
    tables = (history._tokens, history._before, history._after, *history._same, *history._heads)
    return [table.tolist() for table in tables]


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
    capacity=st.sampled_from([1, 2, 8, 32, 128, 1 << 14]),
    words=st.integers(1, 4),
    least=st.sampled_from([0.0, 0.0, 0.1]),
)
def test_drafter_compiled_does_what_the_plain_one_does(
    seed: int, shape: Shape, capacity: int, words: int, least: float
) -> None:
    draw = random.Random(seed)
    histories, drafters = _pair(capacity, shape)
    requests = [[*(drafter.request() for _ in range(LIVING)), None] for drafter in drafters]
    for _ in range(30):
        which = draw.sample(range(LIVING + 1), draw.randint(1, LIVING + 1))
        rooms = [draw.randint(1, 12) for _ in which]
        counts = torch.tensor([draw.randint(0, 8) for _ in which])
        came = torch.tensor([[draw.randrange(words) for _ in range(8)] for _ in which])
        reader, ended = draw.randrange(LIVING), draw.randrange(LIVING)
        prompt = [draw.randrange(words) for _ in range(draw.choice([0, 0, 0, 20]))]
        ends, is_proposed = draw.random() < 0.1, draw.random() < 0.8
        found = []
        for drafter, own in zip(drafters, requests, strict=True):
            own[ended] = drafter.request() if ends else own[ended]
            drafter.read(own[reader], prompt)
            batch = [own[n] for n in which]
            found.append(_drafted(drafter, batch, rooms, least) if is_proposed else None)
            drafter.observe(batch, came, counts)
        assert found[0] == found[1]
    assert histories[0].end == histories[1].end
    assert _tables(histories[0]) == _tables(histories[1])
    novelties = [[request.novelty.log for request in own[:LIVING]] for own in requests]
    assert novelties[0] == novelties[1]


def test_drafter_compiled_lets_its_tables_grow() -> None:
    histories, drafters = _pair(GROWTH * 4, Shape(1, 7, 8))
    text = [n * n % 997 for n in range(GROWTH + 500)]
    for drafter in drafters:
        one, other = drafter.request(), drafter.request()
        for part in (text[:10], text[10:], text[:3000]):
            drafter.read(one, part)
            drafter.read(other, part[:5])
    assert _tables(histories[0]) == _tables(histories[1])


def test_novelty_compiled_stays_within_its_bounds() -> None:
    _, drafters = _pair(256, Shape(1, 7, 8))
    for drafter in drafters:
        request = drafter.request()
        drafter.read(request, [1, 2, 3] * 5)
        for came in (*[1, 2, 3] * 40, *[7, 8] * 40):
            drafter.draft([request], [8], 0.0)
            drafter.observe([request], torch.tensor([[came]]), torch.tensor([1]))
        assert math.isfinite(request.novelty.log)


def test_counts_beyond_the_tokens_are_not_read() -> None:
    histories, drafters = _pair(256, Shape(1, 7, 8))
    for drafter in drafters:
        drafter.observe([drafter.request()], torch.tensor([[1, 2]]), torch.tensor([9]))
    assert [history.end for history in histories] == [2, 2]


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
