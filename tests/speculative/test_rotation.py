"""A draft model is fed the token after each position; a chunk's tail is the next prompt token."""

from __future__ import annotations

import attrs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug import Batch, chunk_tails, rotate_chunks
from specplug.speculative.hook_order import ForwardMode


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5))
def test_each_row_holds_the_token_after_it(lengths: list[int]) -> None:
    chunks, expected, tails, last_rows = [], [], [], []
    for b, length in enumerate(lengths):
        chunk = [100 * b + i for i in range(length)]
        chunks += chunk
        tails.append(100 * b + 99)
        expected += [*chunk[1:], tails[-1]]
        last_rows.append(len(chunks) - 1)
    tokens = torch.tensor(chunks)
    rotated = rotate_chunks(tokens, torch.tensor(last_rows), torch.tensor(tails))
    assert rotated.tolist() == expected
    assert tokens.tolist() == chunks


@attrs.frozen
class Prompt:
    request_id: str
    prompt_token_ids: tuple[int, ...]

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.prompt_token_ids


def prefill(chunks: list[tuple[int, int, int]]) -> Batch:
    """A batch of (prompt length, start, end); request b's prompt is 100b, 100b + 1, …"""
    nothing = torch.zeros(len(chunks), dtype=torch.int64)
    return Batch(
        mode=ForwardMode.PREFILL,
        requests=[
            Prompt(str(b), tuple(100 * b + i for i in range(n)))
            for b, (n, _, _) in enumerate(chunks)
        ],
        req_indices=nothing,
        seq_lens=nothing,
        chunk_widths=tuple(end - start for _, start, end in chunks),
        chunk_ends=tuple(end for _, _, end in chunks),
        last_chunk=tuple(end == n for n, _, end in chunks),
    )


@settings(max_examples=200, deadline=None, derandomize=True, database=None)
@given(
    chunks=st.lists(
        st.tuples(st.integers(1, 9), st.integers(0, 8), st.integers(1, 9)).filter(
            lambda c: c[1] < c[2] <= c[0]
        ),
        min_size=1,
        max_size=4,
    ),
    layers=st.integers(1, 5),
)
def test_each_layer_reads_one_token_further(
    chunks: list[tuple[int, int, int]], layers: int
) -> None:
    """Prompt tokens as far as the prompt reaches, for every layer; then what was generated."""
    batch = prefill(chunks)
    tokens = torch.tensor([100 * b + i for b, (_, s, e) in enumerate(chunks) for i in range(s, e)])
    widths = torch.tensor(batch.chunk_widths)
    last_rows = widths.cumsum(0) - 1
    for ahead in range(1, layers + 1):
        made = torch.tensor([-1000 * ahead - b for b in range(len(chunks))])
        tokens = rotate_chunks(tokens, last_rows, chunk_tails(batch, ahead, made))
        expected = []
        for b, (length, start, end) in enumerate(chunks):
            # After the prompt stands what layer 1, 2, … generated when it ran after this chunk.
            for at in range(start + ahead, end + ahead):
                expected.append(100 * b + at if at < length else -1000 * (at - end + 1) - b)
        assert tokens.tolist() == expected


def test_a_decode_step_has_no_prompt_left() -> None:
    batch = attrs.evolve(prefill([(4, 0, 2)]), mode=ForwardMode.DECODE, last_chunk=())
    assert chunk_tails(batch, 1, torch.tensor([7])).tolist() == [7]
