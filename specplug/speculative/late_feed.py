"""What a draft model that does not draft is not fed yet: the target's outputs of decode steps, and
those of short prompts where it has not drafted for long.

They wait until the algorithm is to draft for their requests, or until they are many. Then one pass
reads what several steps have committed, as it would read a prefill chunk. Nothing here reads the
device: how many tokens a step has accepted is told when the host knows it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence, Set
from functools import cached_property
from itertools import accumulate, chain, takewhile

import attrs
import numpy as np
import torch
from torch import Tensor

from specplug.speculative.hook_order import Batch, ForwardMode
from specplug.speculative.host_copy import upload
from specplug.speculative.planned_drafts import sub_batch
from specplug.speculative.verify import CommittedOutput

MOST_ROWS = 128
"""Rows of a request that wait at most, but for those of the last step and those that are not known
to be refused. Tokens that wait when a request ends are those that later requests cannot share."""
_ROWS_AT_LEAST = 32
"""The same where all that waits takes ``_MANY_BYTES``."""
_MANY_BYTES = 256 << 20
"""Bytes from which on less waits. A row takes two tokens and what was captured, refused nodes' too:
3 KiB for DSPARK beside the default model, 40 KiB beside an 8B model in bf16, of which 128 rows of
50 requests have as many."""
_SHORT = 64
"""Rows of a chunk from which on its stand-ins are powers of two alone."""
_MOST_STAND_IN_ROWS = 2048
"""Rows of a start's longest stand-in for what waits; ``_MANY_BYTES`` are fewer, mostly."""
_UNTOLD = 64
"""Steps whose accepted lengths are awaited at most."""


@attrs.define(eq=False, kw_only=True)
class _Step:
    """A decode step, or a prefill of whole prompts, some of whose requests wait.

    Attributes:
        request_ids: of all its requests.
        places: of those that wait: their places in the step.
        widths: the rows of each request, which follow each other: all C in a decode step.
        seq_lens: [bs] int64, committed tokens before it.
        output: what it has committed, a row for each token.
        lens: for each request how many of its rows count; None: the host does not know yet.
        begins: whether it is a prefill.
        nbytes: of ``output``, about; 0 of what does not wait.
    """

    request_ids: tuple[str, ...]
    places: dict[str, int]
    widths: Sequence[int]
    seq_lens: Tensor
    output: CommittedOutput
    lens: Sequence[int] | None
    begins: bool = False
    nbytes: int = 0

    @cached_property
    def firsts(self) -> Sequence[int]:
        """The first row of each request, and the number of all rows."""
        return [0, *accumulate(self.widths)]

    @property
    def known_rows(self) -> int:
        """The rows that wait and count; 0 if the host does not know."""
        lens = self.lens
        return 0 if lens is None else sum([lens[place] for place in self.places.values()])


@attrs.define(eq=False)
class _Rows:
    """Rows that steps have for requests, of k pairs of both, [k] int64 each.

    Attributes:
        requests: of each pair, numbered.
        firsts: its first row, among those of all steps one after the other.
        seq_lens: the place of its committed length before that step, among those of all steps.
        lens: how many rows it has.
    """

    requests: np.ndarray
    firsts: np.ndarray
    seq_lens: np.ndarray
    lens: np.ndarray

    def by_request(self) -> _Rows:
        """Return them in the order of requests, and for each in that of steps."""
        order = np.argsort(self.requests, kind="stable")
        every = self.requests, self.firsts, self.seq_lens, self.lens
        return _Rows(*(each[order] for each in every))

    @property
    def index(self) -> np.ndarray:
        """[R] int64, the rows, in the order of the pairs."""
        before = self.lens.cumsum() - self.lens
        index: np.ndarray = (self.firsts - before).repeat(self.lens) + np.arange(self.lens.sum())
        return index


class LateFeed:
    """The steps that an algorithm was not fed, by request.

    Args:
        name: of the algorithm, as the run's plans know it.

    Attributes:
        name: as given.
        has_caught_up: whether several steps were fed at once since this was set to False.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.has_caught_up = False
        self._steps: list[_Step] = []
        self._rows: dict[str, int] = {}
        # The steps whose accepted lengths are awaited: their requests, and what waits of them.
        self._untold: deque[tuple[tuple[str, ...], _Step | None]] = deque(maxlen=_UNTOLD)
        self._nbytes = 0

    @property
    def waiting(self) -> Set[str]:
        """The requests that wait."""
        return self._rows.keys()

    def skip(self, batch: Batch) -> None:
        """Note a decode step of which nothing waits."""
        self._untold.append((tuple(request.request_id for request in batch.requests), None))

    def add(self, batch: Batch, output: CommittedOutput) -> bool:
        """Let a decode step wait, or a prefill of whole prompts, whose lengths and output are kept.

        Returns:
            Whether so many rows of a request wait that they are to be fed.
        """
        ids = tuple(request.request_id for request in batch.requests)
        count = len(output.next_tokens)
        widths = batch.chunk_widths or (count // len(ids),) * len(ids)
        captured = sum(tensor.nbytes for tensor in output.per_node.values())
        step = _Step(
            request_ids=ids,
            places=dict(zip(ids, range(len(ids)), strict=True)),
            widths=widths,
            seq_lens=batch.seq_lens,
            output=output,
            lens=widths if batch.is_prefill or count == len(ids) else None,
            begins=batch.is_prefill,
            nbytes=captured + 16 * count,
        )
        self._steps.append(step)
        if not step.begins:
            self._untold.append((ids, step))
        self._nbytes += step.nbytes
        rows = self._rows
        for each, width in zip(ids, widths, strict=True):
            rows[each] = rows.get(each, 0) + width
        most = MOST_ROWS if self._nbytes < _MANY_BYTES else _ROWS_AT_LEAST
        return max(map(rows.__getitem__, ids)) > most

    def learn(self, request_ids: Sequence[str], accept_lens: Sequence[int]) -> None:
        """Take how many rows of a decode step count. They are told in the order of ``add`` and
        ``skip``."""
        ids = tuple(request_ids)
        while self._untold:
            told, step = self._untold.popleft()
            if told != ids:
                continue  # it was lost
            if step is not None and step.lens is None:
                for each, place in step.places.items():
                    self._count_off(each, step.widths[place] - accept_lens[place])
                step.lens = accept_lens
            return

    def leave(self, request_id: str) -> int:
        """Forget what waits of a request; return how many tokens that is, as far as the host knows
        that they were accepted."""
        if self._rows.pop(request_id, None) is None:
            return 0
        tokens = self.lacking(request_id)
        for step in self._steps:
            step.places.pop(request_id, None)
        self._drop_empty()
        return tokens

    def lacking(self, request_id: str) -> int:
        """Return how many tokens wait of a request, as far as the host knows that they were
        accepted."""
        tokens = 0
        for step in self._steps:
            place = step.places.get(request_id)
            if place is not None and step.lens is not None:
                tokens += step.lens[place]
        return tokens

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        self._rows.clear()
        self._untold.clear()
        self._nbytes = 0

    def take(
        self, batch: Batch, *, drafts_follow: bool = True
    ) -> Iterator[tuple[Batch, CommittedOutput]]:
        """Yield what brings the requests of a batch up to date, in order: batches of some of them
        and what they are fed. It no longer waits then.

        Several steps make up a prefill chunk of known widths, ``last_chunk``, without
        ``chunk_ends`` or ``attention``, and so do prompts. A decode step by itself is fed as it
        was.

        Args:
            batch: of the present step.
            drafts_follow: whether the requests are drafted for now. Else their last step waits on,
                so that what they are drafted from is made when they are.
        """
        if not self._rows:
            return
        places, steps = self._waiting_of(batch)
        run: list[_Step] = []
        for step in steps if drafts_follow else steps[:-1]:
            if step.lens is not None:
                run.append(step)
                continue
            yield from self._joined(run, batch, places)
            yield from self._joined([step], batch, places)
            run = []
        yield from self._joined(run, batch, places)
        self._drop_empty()

    def take_known(self, batch: Batch, least: int) -> Iterator[tuple[Batch, CommittedOutput]]:
        """Yield what steps before the present one have left for its requests, as far as the host
        knows what counts of it: a chunk as in ``take``, after which no draft follows. Nothing if
        few rows wait of these steps.

        Args:
            batch: of the present step, which waits.
            least: rows that have to wait, of all requests.
        """
        places, steps = self._waiting_of(batch)
        known = list(takewhile(lambda step: step.lens is not None, steps[:-1]))
        if sum(step.known_rows for step in known) < least:
            return
        yield from self._joined(known, batch, places, is_known=True)
        self._drop_empty()

    def _waiting_of(self, batch: Batch) -> tuple[dict[str, int], list[_Step]]:
        """Return the requests of a batch that wait, with their places in it, and their steps."""
        places = {
            request.request_id: place
            for place, request in enumerate(batch.requests)
            if request.request_id in self._rows
        }
        return places, [s for s in self._steps if not places.keys().isdisjoint(s.places)]

    def _joined(
        self,
        steps: Sequence[_Step],
        batch: Batch,
        places: dict[str, int],
        *,
        is_known: bool = False,
    ) -> Iterator[tuple[Batch, CommittedOutput]]:
        """Yield what these steps, in order, have for the requests of a batch at ``places``; if
        ``is_known`` without refused nodes, though it is one step, and before the next draft: that
        takes no longer for it."""
        if not steps:
            return
        taken = self._take_rows(steps, places)
        those, taken.requests = np.unique(taken.requests, return_inverse=True)
        every = list(places.values())
        part = _part(batch, [every[each] for each in those.tolist()])
        if len(steps) == 1 and not (steps[0].begins or is_known):
            yield _path(part, steps[0], taken.seq_lens.tolist())
        else:
            self.has_caught_up |= not is_known
            yield _chunk(part, steps, taken)

    def _take_rows(self, steps: Sequence[_Step], places: dict[str, int]) -> _Rows:
        """Return the rows that steps have for requests, which wait no more, in the order of both.

        Args:
            places: has the requests.
        """
        order = {each: request for request, each in enumerate(places)}
        found = []
        first = first_request = 0
        for step in steps:
            own = step.places
            if own.keys() <= order.keys():
                step.places = {}
            else:
                own = {each: own[each] for each in own if each in order}
                step.places = {e: place for e, place in step.places.items() if e not in order}
            at = np.array(list(own.values()), dtype=np.int64)
            requests = np.array([order[each] for each in own], dtype=np.int64)
            lens = np.array(step.lens or step.widths, dtype=np.int64)[at]
            firsts = np.array(step.firsts, dtype=np.int64)[at] + first
            found.append((requests, firsts, at + first_request, lens))
            first += len(step.output.next_tokens)
            first_request += len(step.request_ids)
        rows = _Rows(*map(np.concatenate, zip(*found, strict=True)))
        counts = np.bincount(rows.requests, rows.lens, len(order)).astype(np.int64).tolist()
        for each, columns in zip(order, counts, strict=True):
            if columns:
                self._count_off(each, columns)
        return rows.by_request()

    def _count_off(self, request_id: str, columns: int) -> None:
        left = self._rows[request_id] - columns
        if left:
            self._rows[request_id] = left
        else:
            del self._rows[request_id]

    def _drop_empty(self) -> None:
        self._steps = [step for step in self._steps if step.places]
        self._nbytes = sum(step.nbytes for step in self._steps)


def stand_ins(
    batch: Batch, output: CommittedOutput, longest: int
) -> Iterator[tuple[Batch, CommittedOutput]]:
    """Yield what several steps make up, as if a decode step had come again and again, for a start
    that compiles what they launch: a kernel has other forms where chunks are longer, and where
    there are more rows. Every other request has a row less, or all but the first one row each.

    Args:
        longest: the rows of the longest chunk, at least 2.
    """
    ids = tuple(request.request_id for request in batch.requests)
    bs = len(ids)
    step = _Step(
        request_ids=ids,
        places={},
        widths=(len(output.next_tokens) // bs,) * bs,
        seq_lens=batch.seq_lens,
        output=output,
        lens=(1,) * bs,
    )
    for width in _stand_in_widths(longest):
        if width > 2 and width * bs > _MOST_STAND_IN_ROWS:
            return
        alike = [width - place % 2 for place in range(bs)]
        for widths in (alike, [width] + [1] * (bs - 1))[: 1 if width == 2 or bs == 1 else 2]:
            requests = np.arange(bs).repeat(widths)
            numbers = np.concatenate([np.arange(each) for each in widths])
            seq_lens = numbers * bs + requests
            firsts = numbers * len(step.output.next_tokens) + requests * step.widths[0]
            rows = _Rows(requests, firsts, seq_lens, np.ones_like(requests))
            chunk, joined = _chunk(batch, [step] * width, rows)
            chunk.is_warm_up = batch.is_warm_up
            yield chunk, joined


def single_rows(
    batch: Batch, output: CommittedOutput, most: int
) -> Iterator[tuple[Batch, CommittedOutput]]:
    """Yield what several steps have for requests as if each row were a request of its own, in the
    order of the rows: decode steps of so many requests, one row wide, whose passes are recorded.
    A row sees the keys of those before it, which are written first.

    Args:
        batch: of a chunk that ``LateFeed.take`` has yielded, R rows of all requests.
        most: rows of a step.
    """
    device = batch.req_indices.device
    own, order = upload(
        [
            [place for place, width in enumerate(batch.chunk_widths) for _ in range(width)],
            [row for width in batch.chunk_widths for row in range(width)],
        ],
        device,
    )
    requests = [
        request
        for request, width in zip(batch.requests, batch.chunk_widths, strict=True)
        for _ in range(width)
    ]
    req_indices, seq_lens = batch.req_indices[own], batch.seq_lens[own] + order
    for begin in range(0, len(own), most):
        some = slice(begin, begin + most)
        tokens = output.next_tokens[some]
        rows = torch.arange(len(tokens), device=device)
        single = Batch(
            mode=ForwardMode.DECODE,
            requests=requests[some],
            req_indices=req_indices[some],
            seq_lens=seq_lens[some],
            greedy=batch.greedy,
            drafts_follow=batch.drafts_follow,
        )
        yield (
            single,
            CommittedOutput(
                next_tokens=tokens,
                own_tokens=output.own_tokens[some],
                per_node={name: tensor[some] for name, tensor in output.per_node.items()},
                last_rows=rows,
                accept_lens=torch.ones_like(rows),
                bonus_tokens=tokens,
            ),
        )


def _stand_in_widths(longest: int) -> Iterator[int]:
    """Yield powers of two up to ``longest``, and what lies between two: a form depends on the width
    and on the rows of all requests together."""
    for power in range(1, longest.bit_length()):
        yield 1 << power
        between = 3 << (power - 1)
        if between < min(longest, _SHORT):
            yield between


def _part(batch: Batch, places: Sequence[int]) -> Batch:
    """Return a batch of some of the requests."""
    if len(places) == batch.size:
        return batch
    return sub_batch(batch, places, upload(places, batch.req_indices.device))


def _path(batch: Batch, step: _Step, places: Sequence[int]) -> tuple[Batch, CommittedOutput]:
    """Return what one step has for requests at these places of it."""
    output, columns = step.output, step.widths[0]
    own = Batch(
        mode=ForwardMode.DECODE,
        requests=batch.requests,
        req_indices=batch.req_indices.clone(),
        seq_lens=step.seq_lens,
        greedy=batch.greedy,
    )
    if list(places) == list(range(len(step.request_ids))):
        return own, output
    count = len(places)
    of_requests = [range(place * columns, (place + 1) * columns) for place in places]
    before = range(-1, count * columns - 1, columns)  # the first row of each
    # In one copy: a launch takes a host longer than a device.
    index = upload([*places, *chain.from_iterable(of_requests), *before], step.seq_lens.device)
    picked, rows, before_rows = torch.split(index, [count, count * columns, count])
    own.seq_lens = step.seq_lens[picked]
    accept_lens = output.accept_lens[picked]
    return own, CommittedOutput(
        next_tokens=output.next_tokens[rows],
        own_tokens=output.own_tokens[rows],
        per_node={name: tensor[rows] for name, tensor in output.per_node.items()},
        last_rows=before_rows + accept_lens,
        accept_lens=accept_lens,
        bonus_tokens=output.bonus_tokens[picked],
    )


def _chunk(batch: Batch, steps: Sequence[_Step], rows: _Rows) -> tuple[Batch, CommittedOutput]:
    """Return what several steps have for requests, whose accepted lengths are known.

    Args:
        rows: of each request of the batch, some, in their order.
    """
    assert all(step.lens is not None for step in steps)
    widths = np.bincount(rows.requests, rows.lens).astype(np.int64)
    device = batch.req_indices.device
    picked = upload(rows.index, device)
    begun = rows.seq_lens[np.searchsorted(rows.requests, np.arange(len(widths)))]
    last_rows, accept_lens, begins = upload(np.stack([widths.cumsum() - 1, widths, begun]), device)
    ends = np.cumsum([len(step.request_ids) for step in steps])
    firsts = [steps[number] for number in np.searchsorted(ends, begun, side="right")]
    outputs = [step.output for step in steps]
    next_tokens = torch.cat([output.next_tokens for output in outputs])[picked]
    own_batch = Batch(
        mode=ForwardMode.PREFILL,
        requests=batch.requests,
        req_indices=batch.req_indices.clone(),
        seq_lens=torch.cat([step.seq_lens for step in steps])[begins],
        chunk_widths=tuple(widths.tolist()),
        first_chunk=tuple(step.begins for step in firsts),
        last_chunk=(True,) * len(widths),
        greedy=batch.greedy,
    )
    return own_batch, CommittedOutput(
        next_tokens=next_tokens,
        own_tokens=torch.cat([output.own_tokens for output in outputs])[picked],
        per_node=_joined_outputs([output.per_node for output in outputs], picked),
        last_rows=last_rows,
        accept_lens=accept_lens,
        bonus_tokens=next_tokens[last_rows],
    )


def _joined_outputs(outputs: Sequence[Mapping[str, Tensor]], rows: Tensor) -> dict[str, Tensor]:
    """Return what several steps have of each row. What they have not alike is left out: what
    requests want, as log-probabilities, has as many columns as those of the step wanted."""
    first, *others = outputs
    return {
        name: torch.cat([each[name] for each in outputs])[rows]
        for name, tensor in first.items()
        if all(name in each and each[name].shape[1:] == tensor.shape[1:] for each in others)
    }
