"""The attention kernels: a row's bits depend on nothing but the row, and are those of plain
loops up to rounding. On the CPU through Triton's interpreter, which knows no bfloat16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specplug.kernels import attention_sums, card
from specplug.kernels import paged_attention_kernels as kernels
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.card import Card
from specplug.kernels.paged_attention_kernels import PagedAttention, PagedRows, path_orders
from specplug.kernels.prompt_attention_kernels import COPIED, PromptTile
from specplug.speculative.draft import ancestor_mask
from specplug.speculative.padding import Padding

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if ON_GPU else (torch.float16,)
SCALE = 0.3


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so short that a few keys make several of them, and folds of two at once: the
    interpreter takes its time for each."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "PART", 32)
    tails = tuple((*known, {**tails, "AT_ONCE": 2}) for *known, tails in kernels._TAILS)
    monkeypatch.setattr(kernels, "_TAILS", tails)


@attrs.frozen(eq=False)
class Pass:
    """A pass over requests, and the keys that each of its rows sees.

    Slots that are nobody's hold NaN.
    """

    q: Tensor
    keys: Tensor
    values: Tensor
    rows: PagedRows
    seen: list[Tensor]

    def expected(
        self, window: int | None = None, softcap: float | None = None, sinks: Tensor | None = None
    ) -> Tensor:
        """[R, H * D] float64, by plain loops."""
        heads, group = self.q.shape[1], self.q.shape[1] // self.keys.shape[1]
        found = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for row, slots in enumerate(self.seen):
            own = slots if window is None else slots[-window:]
            for head in range(heads):
                keys, values = (t[own, head // group].double() for t in (self.keys, self.values))
                scores = keys @ self.q[row, head].double() * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                found[row, head] = torch.softmax(scores, 0)[: len(own)] @ values
        return found.flatten(1)

    def attend(
        self,
        *,
        parts: int = 1 << 18,
        tiled_width: int = 1 << 30,
        tile: PromptTile | None = None,
        **how: Any,
    ) -> Tensor:
        """[R, H * D], with a poisoned workspace of so many numbers.

        Args:
            parts: 0: every row reads all its keys itself.
            tiled_width: chunks from this width on are read in tiles.
            tile: of these.
        """
        attention = PagedAttention(DEVICE, 4 * parts, tile)
        attention._workspace.fill_(float("nan"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_TILED_WIDTH", tiled_width)
            patch.setattr(kernels, "_COPIED_ROWS", 1)
            form = AttentionForm(SCALE, **how)
            return attention(self.q, self.keys, self.values, self.rows, form)


def make_pass(
    starts: tuple[int, ...],
    widths: tuple[int, ...],
    heads: tuple[int, int, int] = (2, 1, 16),
    dtype: torch.dtype = torch.float16,
    *,
    tree: bool = False,
    offset: int = 0,
) -> Pass:
    """Make a pass of requests of these committed lengths and widths.

    Args:
        heads: H, Hkv, D.
        tree: the rows of each request are a tree, else a chain.
        offset: of the first row after the committed length.
    """
    generator = torch.Generator().manual_seed(sum(starts) + len(widths))
    num_heads, kv_heads, dim = heads
    bs, width = len(starts), max(widths)
    used = [start + offset + width for start in starts]
    slots = torch.randperm(2 * sum(used), generator=generator) + 1
    table = torch.zeros(bs + 2, max(used) + 64, dtype=torch.int64)
    keys = torch.full((2, 2 * sum(used) + 1, kv_heads, dim), float("nan"), dtype=dtype)
    req_indices = torch.randperm(bs + 1, generator=generator)[:bs] + 1
    for row, count in zip(req_indices, used, strict=True):
        table[row, :count], slots = slots[:count], slots[count:]
        own = torch.randn(2, count, kv_heads, dim, generator=generator)
        keys[:, table[row, :count]] = own.to(dtype)
    parents = torch.tensor([[-1, *((i - 1) // 2 for i in range(1, width))]]).expand(bs, -1)
    mask = ancestor_mask(parents, width) if tree else torch.ones(1, width, width).tril_().bool()
    seen, positions = [], []
    for b, start in enumerate(starts):
        for i in range(widths[b]):
            path = mask[b % len(mask), i].nonzero()[:, 0] + start + offset
            positions.append(start + offset + int(mask[b % len(mask), i].sum()) - 1)
            before = torch.arange(start + offset)
            seen.append(table[req_indices[b], torch.cat((before, path))].to(DEVICE))
    order, counts = path_orders(mask.to(DEVICE)) if tree else (None, None)
    padding = Padding.of(widths, width, DEVICE)
    rows = PagedRows(
        table=table.to(DEVICE),
        req_indices=req_indices.to(DEVICE),
        starts=torch.tensor(starts, device=DEVICE),
        positions=torch.tensor(positions, device=DEVICE),
        offset=offset,
        width=width,
        order=order,
        counts=counts,
        flat_index=None if padding is None else padding.flat_index,
        padded_rows=None if padding is None else padding.padded_rows,
        length=max(used),
    )
    q = torch.randn(sum(widths), num_heads, dim, generator=generator).to(DEVICE, dtype)
    return Pass(q, *keys.to(DEVICE), rows, seen)


MAKERS: dict[str, Callable[..., Pass]] = {
    "one row": lambda **of: make_pass((5, 70), (1, 1), (4, 2, 16), **of),
    "chains": lambda **of: make_pass((31, 100), (3, 3), (4, 1, 16), **of),
    "trees": lambda **of: make_pass((0, 63), (6, 6), (2, 1, 24), tree=True, **of),
    "ragged trees": lambda **of: make_pass((0, 64), (6, 2), (2, 2, 16), tree=True, **of),
    "ragged chains": lambda **of: make_pass((300, 64, 40), (1, 8, 5), (3, 1, 16), **of),
    "ragged chunks": lambda **of: make_pass((0, 45), (18, 2), **of),
    "written again": lambda **of: make_pass((40, 33), (3, 3), offset=-3, **of),
    "sixteen heads a key head": lambda **of: make_pass((35,), (1,), (16, 1, 8), **of),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MAKERS)
def test_attention_is_that_of_plain_loops(name: str, dtype: torch.dtype) -> None:
    one = MAKERS[name](dtype=dtype)
    found = one.attend()
    tolerance = 2e-3 if dtype is torch.float16 else 2e-2
    torch.testing.assert_close(found.double(), one.expected(), rtol=0, atol=tolerance)
    assert torch.equal(one.attend(parts=0), found), "read by each row alone"
    assert torch.equal(one.attend(parts=32 * 20 * 6), found), "the workspace is short"
    if "tree" not in name:
        assert torch.equal(one.attend(tiled_width=1), found), "in tiles"


def test_tiles_without_a_row_are_left_out() -> None:
    one = MAKERS["ragged chains"]()
    attention = PagedAttention(DEVICE, 1 << 18)
    attention._workspace.fill_(float("nan"))
    attention(one.q, one.keys, one.values, one.rows, AttentionForm(SCALE))
    committed = [start // kernels.BLOCK * kernels.BLOCK for start in (300, 64, 40)]
    parts = [-(-end // kernels.PART) for end in committed]
    tiles = parts[0] + 2 * parts[1] + parts[2]  # of 16 rows of 3 heads: five nodes and a third
    written = int((~attention._workspace.isnan()).sum())
    assert written == tiles * 16 * (16 + 2)


@pytest.mark.parametrize("width", [1, 17])  # of one tile, and of two
def test_reserved_room_is_enough_for_a_full_pool(width: int) -> None:
    one = make_pass((48, 48), (width,) * 2, (4, 1, 16))
    large, reserved = PagedAttention(DEVICE, 1 << 22), PagedAttention(DEVICE, 0)
    reserved.reserve(num_slots=2 * 48, num_requests=2, kv_heads=1, dim=16, num_rows=4 * width)
    written, expected = [], one.attend(parts=0)
    for attention in (large, reserved):
        attention._workspace.fill_(float("nan"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_TILED_WIDTH", 1 << 30)
            found = attention(one.q, one.keys, one.values, one.rows, AttentionForm(SCALE))
        assert torch.equal(expected, found)
        written.append(int((~attention._workspace.isnan()).sum()))
    assert written[0] == written[1] > 0, "all parts are summed up for all rows together"


@pytest.mark.parametrize("tiled_width", [1, 1 << 30])
def test_form_of_chunks_changes_no_bit(tiled_width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start compiles chunks with padding, though all are as wide, for as many requests as may
    run."""
    monkeypatch.setattr(kernels, "_TILED_WIDTH", tiled_width)
    one = make_pass((31, 300), (5, 5), (4, 1, 16))
    places = torch.arange(10, device=DEVICE)
    padded = attrs.evolve(one.rows, flat_index=places, padded_rows=places)
    many = PagedAttention(DEVICE, 0)
    many.reserve(num_slots=400, num_requests=70, kv_heads=1, dim=16, num_rows=20)
    form = AttentionForm(SCALE)
    found = many(one.q, one.keys, one.values, padded, form)
    assert torch.equal(found, many(one.q, one.keys, one.values, one.rows, form))


@pytest.mark.parametrize("how", ["window", "softcap", "sinks"])
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_attention_of_other_kinds_is_that_of_loops(how: str, tree: bool) -> None:
    one = make_pass((70, 40), (3, 3), tree=tree)
    chosen: dict[str, object] = {
        "window": {"window": 37},
        "softcap": {"softcap": 2.0},
        "sinks": {"sinks": torch.linspace(-2, 2, 2, device=DEVICE).to(one.q.dtype)},
    }[how]
    found = one.attend(**chosen)
    expected = one.expected(**chosen)  # type: ignore[arg-type]
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-3)
    assert torch.equal(one.attend(parts=0, **chosen), found)
    if not tree:
        assert torch.equal(one.attend(tiled_width=1, **chosen), found)


def test_tiles_fitted_to_a_small_card_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_pass((45, 20), (18, 18), (4, 1, 16))
    tiles, parts = one.attend(tiled_width=1), one.attend()
    assert torch.equal(tiles, parts)
    monkeypatch.setattr(card, "assumed", Card(1, (8, 9)))  # room for no tile but the least
    assert torch.equal(one.attend(tiled_width=1), tiles)
    assert torch.equal(one.attend(), parts)


@pytest.mark.parametrize("name", ["ragged chunks", "written again", "window", "softcap"])
@pytest.mark.parametrize(
    "tile",
    [PromptTile(16), PromptTile(128, warps=8, stages=2), COPIED[torch.float16]],
    ids=["16 rows", "128 rows", "copied"],
)
def test_prompt_tile_of_any_kind_gives_the_same_bits(name: str, tile: PromptTile) -> None:
    how = {"window": {"window": 37}, "softcap": {"softcap": 2.0}}.get(name, {})
    one = MAKERS[name]() if name in MAKERS else make_pass((45, 70), (18, 18), (4, 2, 16))
    for dtype in DTYPES:
        one = attrs.evolve(one, q=one.q.to(dtype), keys=one.keys.to(dtype))
        one = attrs.evolve(one, values=one.values.to(dtype))
        assert torch.equal(one.attend(tiled_width=1, tile=tile, **how), one.attend(**how))


@pytest.mark.skipif(not ON_GPU, reason="the interpreter knows no bfloat16")
@pytest.mark.parametrize("name", ["ragged chunks", "written again"])
def test_two_blocks_at_once_give_the_same_bits(name: str) -> None:
    one = MAKERS[name](dtype=torch.bfloat16)
    tile = COPIED[torch.bfloat16]
    assert torch.equal(one.attend(tiled_width=1, tile=tile), one.attend())


def test_prompts_are_gathered_where_copies_have_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    one = make_pass((45, 70), (18, 18))
    expected = one.attend()
    launched = []
    monkeypatch.setattr(kernels._Call, "_copied", lambda *_: launched.append(1))
    for change in ({"parts": 8}, {"window": 1000}, {"rows": attrs.evolve(one.rows, length=0)}):
        rows, how = change.pop("rows", one.rows), {"parts": 1 << 18, **change}
        gathered = attrs.evolve(one, rows=rows)
        found = gathered.attend(tiled_width=1, tile=COPIED[torch.float16], **how)
        assert torch.equal(found, expected)
    assert not launched


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rounded_exponents_of_bfloat16_need_no_common_top(dtype: torch.dtype) -> None:
    """Why two blocks at once give the bits of one after the other, and not in float16."""
    scores = -20 * torch.rand(1 << 20, generator=torch.Generator().manual_seed(0))

    def chances(top: float, offset: float) -> Tensor:
        exponents = scores + offset - (top + offset)
        whole = exponents.ceil()  # a card's exp2 scales exactly, libm's need not
        chance = torch.exp2(exponents - whole) * torch.exp2(whole)
        return chance.to(dtype).float() * 2**top

    offset = attention_sums._OFFSET.value
    same = torch.equal(chances(0, offset), chances(7, offset))
    assert same == (dtype is torch.bfloat16)
    assert not torch.equal(chances(0, 0), chances(7, 0)), "exponents that are not rounded"


def test_row_has_the_bits_of_a_step_of_its_own() -> None:
    """A chunk's rows, and those of one step after another."""
    chunk = make_pass((30,), (20,))
    found = chunk.attend(tiled_width=1).view(1, 20, -1)
    for i in (0, 1, 17, 19):
        rows = attrs.evolve(
            chunk.rows,
            starts=chunk.rows.starts + i,
            positions=chunk.rows.starts + i,
            width=1,
        )
        q = chunk.q.view(1, 20, *chunk.q.shape[1:])[:, i].contiguous()
        step = attrs.evolve(chunk, q=q, rows=rows)
        assert torch.equal(step.attend(), found[:, i])


def test_branch_has_the_bits_of_a_chain() -> None:
    """A tree's longest branch, and the same tokens without the other branches."""
    tree = make_pass((45,), (6,), tree=True)
    branch = [0, 1, 3]  # parents (i - 1) // 2
    chain = attrs.evolve(
        tree,
        q=tree.q[branch],
        rows=attrs.evolve(
            tree.rows, width=3, order=None, counts=None, positions=tree.rows.positions[branch]
        ),
    )
    table = tree.rows.table.clone()
    row = tree.rows.req_indices
    table[row, 45:48] = table[row, 45 + torch.tensor(branch, device=DEVICE)]
    chain = attrs.evolve(chain, rows=attrs.evolve(chain.rows, table=table))
    assert torch.equal(chain.attend(), tree.attend()[branch])


def test_path_orders_lists_what_a_mask_shows() -> None:
    mask = torch.rand(2, 5, 9, generator=torch.Generator().manual_seed(0)) < 0.4
    order, counts = path_orders(mask.to(DEVICE))
    for b in range(2):
        for i in range(5):
            seen = mask[b, i].nonzero()[:, 0].tolist()
            assert order[b, i, : int(counts[b, i])].tolist() == seen


def test_no_rows_have_no_result() -> None:
    one = make_pass((5,), (1,))
    empty = attrs.evolve(one, q=one.q[:0])
    assert empty.attend().shape == (0, 32)
