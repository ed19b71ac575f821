"""Choose the target's tokens over large vocabularies. The torch reference is ``model.sampler``.

A token is ``argmax(score + g(seed, position, token))``. Nothing of the noise is stored: each
program adds it to the scores that it has just read. A row's token depends on nothing but the row:
a maximum and sums of integers are the same however a row is split among programs, and of equal
values the first one wins, as in ``torch.argmax``.

Noise, sums and comparisons are those of the reference, in float64; divisions and products are
rounded one by one (no fused multiply-add). The same tokens come out, short of the last bit of a
logarithm: where two libraries differ in it, two best values less than 1e-14 apart may change
places, about once in 1e14 tokens. top-p alone is defined here anew: probabilities are summed as
integers, ``exp(score - greatest) * 2**40``, where the reference sums float32. They differ where a
cumulated probability is within some 1e-6 of top_p.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, NamedTuple

import attrs
import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 1024
"""Tokens that a program looks at together: 8 a thread."""

_WAVES = 6
"""Programs per multiprocessor among which the rows are split."""

_DIGIT_BITS = 11
_BINS = 1 << _DIGIT_BITS
"""Truncation finds its last token digit by digit, most significant first: a histogram each."""

_EXACT: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}

# A kernel is not compiled anew for what changes from step to step: these values, and where
# tensors of a number a row begin. Triton heeds these two lists for arguments alone and compiles
# anew for each value in a tuple. So what is the same all through a run is passed in tuples
# (``_Table``, ``Settings``, ``Cuts``), and what is not stays an argument of its own.
_kernel = triton.jit(
    do_not_specialize=[
        "parts", "rows", "num_enders", "path_width", "path_depth", "before", "shift", "by_mass",
        "width", "is_share", "is_last",
    ],
    do_not_specialize_on_alignment=[
        "best", "best_at", "sums", "cut", "req_indices", "positions", "random", "seeds", "masks",
        "path_tokens", "path_parents", "path_index", "chosen", "logs", "maxima", "most", "prefix",
        "target",
    ],
)  # fmt: skip


@attrs.frozen(eq=False, kw_only=True)
class Path:
    """The nodes whose scores the rows are, for penalties to count the tokens above each.

    Attributes:
        tokens: [bs, N] int64.
        parents: [bs, N] int64, -1 at the root; None for chains.
        flat_index: [T] int64, where each row stands among the bs·N nodes; None if all do.
        depth: the greatest distance of a node from its root.
    """

    tokens: Tensor
    parents: Tensor | None
    flat_index: Tensor | None
    depth: int


class Settings(NamedTuple):
    """What changes scores, by request row; None for what no row of the step needs.

    Attributes:
        seeds: [requests] int64.
        temperature, repetition, presence, frequency: [requests] float32, ``stride`` apart. No
            temperature: no row samples.
        enders: [settings, E] int64, tokens that a request must not choose before ``may_end_at``.
        may_end_at: [requests] int64 positions.
        bias: [settings, V] float32.
        counts: [settings, V] int32, how often each token stands in the output.
        in_prompt: [settings, V] uint8, whether each token stands in the prompt.
    """

    seeds: Tensor | None = None
    temperature: Tensor | None = None
    repetition: Tensor | None = None
    presence: Tensor | None = None
    frequency: Tensor | None = None
    stride: int = 0
    enders: Tensor | None = None
    may_end_at: Tensor | None = None
    bias: Tensor | None = None
    counts: Tensor | None = None
    in_prompt: Tensor | None = None


class Cuts(NamedTuple):
    """What truncates, by request row.

    Attributes:
        top_k, top_p: [requests] float32, ``stride`` apart.
        log_min_p: [requests] float32, ``min_p_stride`` apart, -inf where there is no min-p.
    """

    top_k: Tensor
    top_p: Tensor
    stride: int
    log_min_p: Tensor
    min_p_stride: int


class _Table(NamedTuple):
    """Scores [T, V], how far apart their rows stand, the bits of a token's index, and the tokens of
    a part: a multiple of ``_TILE``."""

    scores: Tensor
    stride: int
    vocab_size: int
    index_bits: int
    span: int


def choose_tokens(
    logits: Tensor,
    req_indices: Tensor,
    positions: Tensor,
    settings: Settings,
    *,
    random: Tensor | None = None,
    cuts: Cuts | None = None,
    masks: Tensor | None = None,
    path: Path | None = None,
) -> Tensor:
    """Choose a token for each row.

    Launches kernels alone: nothing is read on the host, shapes depend on T and V, so it can be
    recorded in a CUDA graph.

    Args:
        logits: [T, V] float16, bfloat16 or float32; copied unless the last dimension is dense.
        req_indices: [T] int64, the request of each row.
        positions: [T] int64 position of the token being chosen.
        random: [T] bool, the rows that sample; None if none does.
        cuts: None if no row has min-p, top-k or top-p.
        masks: [T, words] int32, the tokens that grammars allow, a bit each: V / 32 words, rounded
            up; None: all.
        path: counts as output beside ``settings.counts``.

    Returns:
        [T] int64; 0 for a row without a finite score.
    """
    cut, logits = None, _with_dense_rows(logits)
    rows = _rows(settings, req_indices, positions, random, masks, path)
    if cuts is not None and random is not None and len(logits):
        logits, cut = truncate_rows(logits, settings, cuts, rows)
        settings = Settings(seeds=settings.seeds)
        rows = _rows(settings, req_indices, positions, random)
    return _best(logits, cut, settings, rows)


def find_greatest(scores: Tensor, ids: Tensor | None = None) -> Tensor:
    """Return the index of each row's first greatest score: [T, V], as ``choose_tokens`` takes
    logits, to [T] int64.

    Args:
        ids: [V] int64 contiguous, what is returned for each index; None: itself.
    """
    rows = _rows(Settings(), None, None, None)
    return _best(_with_dense_rows(scores), None, Settings(), rows, ids)


def find_likeliest(scores: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return what ``find_greatest`` does, and the logarithm of its probability under the row's
    softmax: [T] float32, -inf for a row with NaN or inf, or without a finite score. Both come of
    one read of the scores. How a row is split may change the last bits of the logarithm.
    """
    logs = torch.empty(len(scores), dtype=torch.float32, device=scores.device)
    rows = _rows(Settings(), None, None, None)
    return _best(_with_dense_rows(scores), None, Settings(), rows, ids, logs), logs


def _with_dense_rows(logits: Tensor) -> Tensor:
    """Return logits [T, V] as the kernels read them: the tokens of a row stand side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _best(
    logits: Tensor,
    cut: Tensor | None,
    settings: Settings,
    rows: tuple[Any, ...],
    ids: Tensor | None = None,
    logs: Tensor | None = None,
) -> Tensor:
    """Launch the search for the best token of each row, whose tokens stand side by side: [T]
    int64. ``logs`` [T] float32 gets the logarithm of its probability, where no row samples."""
    count, vocab_size = logits.shape
    chosen = torch.empty(count, dtype=torch.int64, device=logits.device)
    if not count:
        return chosen
    parts, span = _split(count, vocab_size, logits.device)
    table = _Table(logits, logits.stride(0), vocab_size, _index_bits(vocab_size), span)
    best = torch.empty(count, parts, dtype=torch.float64, device=logits.device)
    best_at = torch.empty(count, parts, dtype=torch.int32, device=logits.device)
    sums = None if logs is None else torch.empty(count, parts, device=logs.device)
    _best_of_parts[(parts, count)](
        table, best, best_at, sums, cut, settings, *rows, TILE=_TILE, **_EXACT
    )
    _best_of_rows[(count,)](
        best, best_at, sums, ids, chosen, logs, parts, vocab_size,
        PARTS=_most_parts(vocab_size), num_warps=1,
    )  # fmt: skip
    return chosen


def order_reference(scores: Tensor) -> Tensor:
    """Return each token's place in its row's order, [T, V] float32 to [T, V] int64. The reference.

    By falling score, of equal ones by rising index, as a stable sort orders them. Places are not
    consecutive.
    """
    vocab_size = scores.shape[1]
    signed = torch.where(scores == 0, 0.0, scores).view(torch.int32).to(torch.int64)
    rising = signed ^ ((signed >> 31) & 0x7FFFFFFF)
    index = torch.arange(vocab_size, device=scores.device)
    return ((0x7FFFFFFF - rising) << _index_bits(vocab_size)) | index


def gumbel_noise(seeds: Tensor, random: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return g(seed, position, token) as float32, 0 where not ``random``.

    Args:
        seeds: [n] int64.
        random: [n] bool.
        positions: [n] int64.
        token_ids: [V] int64.

    Returns:
        [n, V] float32.
    """
    rows, columns = len(seeds), len(token_ids)
    noise = torch.empty(rows, columns, dtype=torch.float32, device=seeds.device)
    if noise.numel():
        _noise[(triton.cdiv(columns, _TILE), rows)](
            seeds.contiguous(), random.view(torch.uint8), positions.contiguous(),
            token_ids.contiguous(), noise, columns,
            TILE=_TILE, num_warps=4,
        )  # fmt: skip
    return noise


def _rows(
    settings: Settings,
    req_indices: Tensor | None,
    positions: Tensor | None,
    random: Tensor | None,
    masks: Tensor | None = None,
    path: Path | None = None,
) -> tuple[Any, ...]:
    """Return what the kernels read of each row, in their order, from ``req_indices`` on."""
    num_enders = 0 if settings.enders is None else settings.enders.shape[1]
    nodes: tuple[Any, ...] = (None, None, None, 0, 0)
    if path is not None and settings.counts is not None:
        tokens, parents = path.tokens.contiguous(), _dense(path.parents)
        nodes = tokens, parents, path.flat_index, tokens.shape[1], path.depth
    samples = None if random is None else random.view(torch.uint8)
    return _dense(req_indices), _dense(positions), samples, _dense(masks), num_enders, *nodes


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _index_bits(vocab_size: int) -> int:
    return max(vocab_size - 1, 1).bit_length()


def _most_parts(vocab_size: int) -> int:
    return int(triton.next_power_of_2(triton.cdiv(vocab_size, _TILE)))


def _split(rows: int, vocab_size: int, device: torch.device) -> tuple[int, int]:
    """Return into how many parts each row is split, and the tokens of a part."""
    tiles = triton.cdiv(vocab_size, _TILE)
    programs = 16
    if device.type == "cuda":
        programs = torch.cuda.get_device_properties(device).multi_processor_count * _WAVES
    span = triton.cdiv(tiles, max(programs // rows, 1))
    return triton.cdiv(tiles, span), span * _TILE


def truncate_rows(
    logits: Tensor, settings: Settings, cuts: Cuts, of_rows: tuple[Any, ...]
) -> tuple[Tensor, Tensor]:
    """Compute the scores, and the last token that min-p, top-k and top-p leave in each row.

    Each of the three keeps the first tokens of the row's order (``order_reference``). Rows that do
    not sample may keep more: their token is the first one.

    Args:
        logits: [T, V], the last dimension dense.
        of_rows: ``_rows``, with the rows that sample.

    Returns:
        Scores [T, V] float32 after temperature, and [T] int64: a row keeps the tokens whose place
        is at most this.
    """
    rows, vocab_size = logits.shape
    device = logits.device
    parts, span = _split(rows, vocab_size, device)
    table = _Table(logits, logits.stride(0), vocab_size, _index_bits(vocab_size), span)
    scores = torch.empty(rows, vocab_size, dtype=torch.float32, device=device)
    maxima = torch.empty(rows, parts, dtype=torch.float32, device=device)
    most = torch.empty(rows, dtype=torch.float32, device=device)
    bins = torch.empty(rows, _BINS, dtype=torch.int64, device=device)
    cut = torch.empty(rows, dtype=torch.int64, device=device)
    # Of top-k and of top-p: the digits found so far, -1 where there is nothing to find; and what
    # the tokens up to the last one are to sum to, of those that have these digits.
    prefix, target = torch.empty(2, 2, rows, dtype=torch.int64, device=device)
    grid = parts, rows
    _adjusted_scores[grid](
        table, scores, maxima, bins, settings, *of_rows, TILE=_TILE, BINS=_BINS, **_EXACT
    )
    table = table._replace(scores=scores, stride=vocab_size)
    _first_cut[(rows,)](
        maxima, parts, of_rows[0], of_rows[2], cuts, most, cut, prefix, target, rows,
        table.index_bits, PARTS=_most_parts(vocab_size), num_warps=1,
    )  # fmt: skip
    total_bits = 32 + table.index_bits
    shifts = [total_bits, *range(total_bits - _DIGIT_BITS, 0, -_DIGIT_BITS), 0]
    for by_mass in (0, 1):
        for level, (before, shift) in enumerate(pairwise(shifts)):
            _histogram[grid](
                table, most, cut, prefix[by_mass], bins, before, shift, by_mass,
                TILE=_TILE, BINS=_BINS, num_warps=4,
            )  # fmt: skip
            _digit[(rows,)](
                bins, prefix[by_mass], target[by_mass], cut, of_rows[0], cuts, before - shift,
                int(level == 0) * by_mass, int(shift == 0), BINS=_BINS, num_warps=4,
            )  # fmt: skip
    return scores, cut


@triton.jit
def _mix(x):
    """Apply SplitMix64's finalizer to uint64."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _key(seed, position):
    seed = seed.to(tl.uint64, bitcast=True)
    position = position.to(tl.uint64, bitcast=True)
    return _mix(_mix(seed * 0x9E3779B97F4A7C15 + 1) + position * 0x9E3779B97F4A7C15)


@triton.jit
def _bits(key, token):
    return _mix(key + token.to(tl.uint64) * 0x9E3779B97F4A7C15)


@triton.jit
def _gumbel(bits):
    """Return the noise of 64 random bits, float64."""
    uniform = ((bits >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16
    return -tl.log(-tl.log(uniform))


@triton.jit
def _gumbel_bound(bits):
    """Return a float32 that is greater than the noise of these bits, without a logarithm.

    With w = 1 - u, -log(-log(u)) < -log(w). The bits of a float32, read as an integer, are a lower
    bound of its log2. The last 1e-3 is for what is rounded here, less than 1e-4.
    """
    w = ((bits ^ 0xFFFFFFFFFFFFFFFF) >> 32).to(tl.uint32).to(tl.float32)  # times 2^-32
    log2 = w.to(tl.int32, bitcast=True).to(tl.float32) * 1.1920928955078125e-07
    return (159.0 - log2) * 0.6931471805599453 + 1e-3


@triton.jit
def _order(score, index, index_bits):
    """Return each token's place in its row's order, int64: by falling score, of equal ones by
    rising index."""
    score = tl.where(score == 0.0, 0.0, score)  # -0 equals 0
    signed = score.to(tl.int32, bitcast=True)
    rising = signed ^ ((signed >> 31) & 0x7FFFFFFF)
    falling = 0x7FFFFFFF - rising.to(tl.int64)
    return (falling << index_bits) | index.to(tl.int64)


@triton.jit
def _scores(table, row, request, tokens, settings, positions, masks, num_enders, path):
    """Return the scores of some tokens of a row, float32, -inf after the vocabulary's end."""
    path_tokens, path_parents, path_index, path_width, path_depth = path
    inside = tokens < table.vocab_size
    places = table.scores + row * table.stride + tokens
    scores = tl.load(places, mask=inside, other=float("-inf")).to(tl.float32)
    if masks is not None:
        words = (table.vocab_size + 31) // 32
        word = tl.load(masks + row * words + (tokens >> 5), mask=inside, other=0)
        scores = tl.where((word >> (tokens & 31)) & 1 == 1, scores, float("-inf"))
    if settings.enders is not None:
        is_early = tl.load(positions + row) < tl.load(settings.may_end_at + request)
        for i in range(num_enders):
            ender = tl.load(settings.enders + request * num_enders + i)
            scores = tl.where((tokens == ender) & is_early, float("-inf"), scores)
    if settings.bias is not None:
        of_request = settings.bias + request * table.vocab_size
        scores += tl.load(of_request + tokens, mask=inside, other=0.0)
    if settings.counts is not None:
        of_request = request * table.vocab_size + tokens
        count = tl.load(settings.counts + of_request, mask=inside, other=0)
        if path_tokens is not None:
            at = row
            if path_index is not None:
                at = tl.load(path_index + row)
            root = at // path_width * path_width
            for _ in range(path_depth + 1):
                ahead = at >= root
                token = tl.load(path_tokens + at, mask=ahead, other=-1)
                count += (tokens == token).to(tl.int32)
                above = at - 1
                if path_parents is not None:
                    parent = tl.load(path_parents + at, mask=ahead & (at > root), other=-1)
                    # A node that has lost its parent hangs from the root.
                    above = tl.where(at > root, root + tl.maximum(parent, 0), root - 1)
                at = tl.where(ahead, above, at)
        appeared = count > 0
        seen = appeared | (tl.load(settings.in_prompt + of_request, mask=inside, other=0) != 0)
        factor = tl.where(seen, tl.load(settings.repetition + request * settings.stride), 1.0)
        scores = tl.where(scores > 0, tl.div_rn(scores, factor), scores * factor)
        scores -= tl.load(settings.frequency + request * settings.stride) * count.to(tl.float32)
        scores -= tl.load(settings.presence + request * settings.stride) * appeared.to(tl.float32)
    if settings.temperature is not None:
        heat = tl.load(settings.temperature + request * settings.stride)
        if heat != 1.0:
            scores = tl.div_rn(scores, tl.zeros_like(scores) + heat)
    return tl.where(inside, scores, float("-inf"))


@_kernel
def _best_of_parts(
    table, best, best_at, sums, cut, settings, req_indices, positions, random, masks, num_enders,
    path_tokens, path_parents, path_index, path_width, path_depth, TILE: tl.constexpr,
):  # fmt: skip
    """Find the greatest of score + noise in each part of each row, and the first place of it; and
    the sum of exp(score - greatest), if there are ``sums``.

    A tile whose scores and bounds of the noise do not reach the best value yet is left out: mostly
    all but the first, so that there are few logarithms.
    """
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, vocab_size = part * table.span, table.vocab_size
    path = path_tokens, path_parents, path_index, path_width, path_depth
    request = row
    if req_indices is not None:
        request = tl.load(req_indices + row)
    greatest = tl.full((), float("-inf"), tl.float64)
    at = tl.minimum(first, vocab_size - 1)
    total = tl.full((), 0.0, tl.float32)
    samples = False
    if random is not None:
        samples = tl.load(random + row) != 0
        key = _key(tl.load(settings.seeds + request), tl.load(positions + row))
    if cut is not None:
        last = tl.load(cut + row)
    for start in range(first, tl.minimum(first + table.span, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        scores = _scores(table, row, request, tokens, settings, positions, masks, num_enders, path)
        if cut is not None:
            place = _order(scores, tokens, table.index_bits)
            scores = tl.where(place <= last, scores, float("-inf"))
        scores = tl.where(scores == scores, scores, float("inf"))  # torch.argmax finds NaN too
        inside = tokens < vocab_size
        scores = tl.where(inside, scores, float("-inf"))
        if random is not None:
            bits = _bits(key, tokens)
            bound = scores + tl.where(samples, _gumbel_bound(bits), 0.0)
            low = greatest.to(tl.float32)
            low -= tl.abs(low) * 2.384185791015625e-07  # not above ``greatest``
            if tl.max(bound) >= low:
                values = scores.to(tl.float64)
                if samples:
                    values += _gumbel(bits)
                value = tl.max(values)
                if value > greatest:
                    greatest = value
                    at = tl.min(tl.where(values == value, tokens, vocab_size))
        else:
            value = tl.max(scores).to(tl.float64)
            if sums is not None:
                most = tl.maximum(greatest, value).to(tl.float32)
                most = tl.where(most == float("-inf"), 0.0, most)  # the sum of nothing is 0
                total *= tl.exp(greatest.to(tl.float32) - most)
                total += tl.sum(tl.exp(scores - most))
            if value > greatest:
                greatest = value
                at = tl.min(tl.where(scores.to(tl.float64) == value, tokens, vocab_size))
    tl.store(best + row * tl.num_programs(0) + part, greatest)
    tl.store(best_at + row * tl.num_programs(0) + part, at)
    if sums is not None:
        tl.store(sums + row * tl.num_programs(0) + part, total)


@_kernel
def _best_of_rows(
    best, best_at, sums, ids, chosen, logs, parts, vocab_size, PARTS: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    values = tl.load(best + row * parts + part, mask=part < parts, other=float("-inf"))
    at = tl.load(best_at + row * parts + part, mask=part < parts, other=vocab_size)
    greatest = tl.max(values)
    first = tl.min(tl.where(values == greatest, at, vocab_size))
    if sums is not None:
        shares = tl.load(sums + row * parts + part, mask=part < parts, other=0.0)
        total = tl.sum(shares * tl.exp((values - greatest).to(tl.float32)))
        # The greatest's own share is 1; NaN and 0 are sums of no probabilities.
        tl.store(logs + row, tl.where(total >= 1.0, -tl.log(total), float("-inf")))
    found = tl.minimum(first, vocab_size - 1).to(tl.int64)
    if ids is not None:
        found = tl.load(ids + found)
    tl.store(chosen + row, found)


@_kernel
def _adjusted_scores(
    table, out, maxima, bins, settings, req_indices, positions, random, masks, num_enders,
    path_tokens, path_parents, path_index, path_width, path_depth,
    TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Write the scores and the greatest of each part, and clear the histograms."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    first, vocab_size = part * table.span, table.vocab_size
    path = path_tokens, path_parents, path_index, path_width, path_depth
    request = tl.load(req_indices + row)
    greatest = tl.full((TILE,), float("-inf"), tl.float32)
    for start in range(first, tl.minimum(first + table.span, vocab_size), TILE):
        tokens = start + tl.arange(0, TILE)
        scores = _scores(table, row, request, tokens, settings, positions, masks, num_enders, path)
        tl.store(out + row * vocab_size + tokens, scores, mask=tokens < vocab_size)
        greatest = tl.maximum(greatest, scores)
    tl.store(maxima + row * tl.num_programs(0) + part, tl.max(greatest))
    if part == 0:
        tl.store(bins + row * BINS + tl.arange(0, BINS), tl.zeros((BINS,), tl.int64))


@_kernel
def _first_cut(
    maxima, parts, req_indices, random, cuts, most, cut, prefix, target, rows, index_bits,
    PARTS: tl.constexpr,
):  # fmt: skip
    """Cut each row by min-p, and write what top-k and top-p are to find."""
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(req_indices + row)
    part = tl.arange(0, PARTS)
    known = part < parts
    greatest = tl.max(tl.load(maxima + row * parts + part, mask=known, other=float("-inf")))
    tl.store(most + row, greatest)
    samples = tl.load(random + row) != 0  # no cut changes the greatest score
    below = tl.load(cuts.log_min_p + request * cuts.min_p_stride)
    floor = tl.where(below == float("-inf"), below, greatest + below)
    none = (tl.full((), 1, tl.int64) << index_bits) - 1
    tl.store(cut + row, _order(floor, none, index_bits))
    k = tl.load(cuts.top_k + request * cuts.stride).to(tl.int64)
    tl.store(prefix + row, tl.where(samples & (k > 0), 0, -1).to(tl.int64))
    tl.store(target + row, k)
    p = tl.load(cuts.top_p + request * cuts.stride)
    tl.store(prefix + rows + row, tl.where(samples & (p < 1.0), 0, -1).to(tl.int64))


@_kernel
def _histogram(
    table, most, cut, prefix, bins, before, shift, by_mass,
    TILE: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count the tokens that have the digits found so far, or sum their probabilities, by the next
    digit."""
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    digits = tl.load(prefix + row)
    if digits >= 0:
        last, greatest = tl.load(cut + row), tl.load(most + row)
        first, vocab_size = part * table.span, table.vocab_size
        for start in range(first, tl.minimum(first + table.span, vocab_size), TILE):
            tokens = start + tl.arange(0, TILE)
            inside = tokens < vocab_size
            places = table.scores + row * table.stride + tokens
            score = tl.load(places, mask=inside, other=float("-inf"))
            order = _order(score, tokens, table.index_bits)
            held = inside & (order <= last) & ((order >> before) == digits)
            if tl.max(held.to(tl.int32)) > 0:  # few tiles, once the first digit is known
                weight = tl.full((TILE,), 1, tl.int64)
                if by_mass != 0:
                    mass = tl.exp(score - greatest) * 1099511627776.0
                    weight = tl.where(mass >= 1.0, mass, 0.0).to(tl.int64)
                digit = (order >> shift) - (digits << (before - shift))
                held = held & (weight > 0)
                tl.atomic_add(bins + row * BINS + digit, weight, mask=held, sem="relaxed")


@_kernel
def _digit(
    bins, prefix, target, cut, req_indices, cuts, width, is_share, is_last, BINS: tl.constexpr
):  # fmt: skip
    """Find the digit at which the sum reaches its target, and clear the histogram for the next.

    Args:
        is_share: whether the target is top_p of the sum; else it stands in ``target``.
        is_last: whether all digits are known now.
    """
    row = tl.program_id(0).to(tl.int64)
    digits = tl.load(prefix + row)
    if digits >= 0:
        digit = tl.arange(0, BINS)
        weights = tl.load(bins + row * BINS + digit)
        tl.store(bins + row * BINS + digit, tl.zeros((BINS,), tl.int64))
        wanted = tl.load(target + row)
        if is_share != 0:
            p = tl.load(cuts.top_p + tl.load(req_indices + row) * cuts.stride)
            share = p.to(tl.float64) * tl.sum(weights).to(tl.float64)
            # The first token always stays.
            wanted = tl.maximum(tl.ceil(share).to(tl.int64), 1)
        sums = tl.cumsum(weights)
        first = tl.min(tl.where(sums >= wanted, digit, BINS))
        below = tl.sum(tl.where(digit < first, weights, 0))
        found = (digits << width) | first
        if first == BINS:  # there are fewer tokens than that: all stay
            found = tl.full((), -1, tl.int64)
        tl.store(prefix + row, found)
        tl.store(target + row, wanted - below)
        if (is_last != 0) & (found >= 0):
            tl.store(cut + row, found)


@_kernel
def _noise(seeds, random, positions, token_ids, noise, columns, TILE: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = column < columns
    values = tl.zeros((TILE,), tl.float32)
    if tl.load(random + row) != 0:
        key = _key(tl.load(seeds + row), tl.load(positions + row))
        token = tl.load(token_ids + column, mask=inside, other=0)
        values = _gumbel(_bits(key, token)).to(tl.float32)
    tl.store(noise + row * columns + column, values, mask=inside)
