"""``Trees``: a page of HTML that shows each draft on the text, and what the target took of it."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs

from specplug import hookimpl
from specplug_views.growing_file import GrowingFile
from specplug_views.token_text import GrowingText, TokenText

if TYPE_CHECKING:
    from torch import Tensor
    from torch.cuda import Event

    from specplug import (
        Batch,
        CommittedOutput,
        Draft,
        DraftInput,
        RequestReport,
        RequestView,
        Runtime,
        StepReport,
        TargetOutput,
        VerifyOutput,
    )

Record = dict[str, Any]

_MARK = "/*RECORDS*/"
"""Where the records stand in ``page.html``."""


class Trees:
    """An extension that writes what its runs draft, and what the target says to it, to a page.

    The page has all that it needs. A browser opens it from the disk. While the run lasts it can be
    loaded again.

    Drafts are copied to the host while the step runs, and read when it has been processed. A run
    with this extension gives the same tokens; its verification is not recorded as a CUDA graph,
    since a plugin looks on.

    Args:
        path: of the page, which is whole after each step.

    Raises:
        UsageError: no file can be there.
    """

    def __init__(self, path: str | Path) -> None:
        page = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
        head, _, tail = page.partition(_MARK)
        self._file = GrowingFile(path, head, tail)
        self._runs: dict[int, _Run] = {}
        self._numbers = count()

    @hookimpl(wrapper=True)
    def create_worker(self, runtime: Runtime) -> Generator[None, object, object]:
        self._file.begin()
        worker = yield
        run = self._runs[id(runtime)] = _Run(next(self._numbers), runtime)
        self._file.add([run.settings(runtime)])
        return worker

    @hookimpl(wrapper=True)
    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> Generator[None, VerifyOutput, VerifyOutput]:
        found = yield
        if batch.size and not batch.is_warm_up:
            self._runs[id(runtime)].see_draft(batch, draft, target_output.predict, found)
        return found

    @hookimpl(wrapper=True)
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> Generator[None, DraftInput, DraftInput]:
        if batch.is_prefill and not batch.is_warm_up:
            self._runs[id(runtime)].see_prefill(batch, target_output.bonus_tokens)
        return (yield)

    @hookimpl
    def on_step(self, runtime: Runtime, report: StepReport) -> None:
        self._file.add(self._runs[id(runtime)].step(report))

    @hookimpl
    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        self._file.add([self._runs[id(runtime)].ended(report)])


@attrs.frozen(eq=False)
class Seen:
    """What the hooks of a step have seen, on its way to the host.

    Attributes:
        requests: of the step, in order.
        integers: [bs, …] int64: of a prefill the token after each chunk [bs, 1]; of a decode step
            tokens, parents and the target's tokens [bs, 3·N], the path [bs, C] and the root's
            position [bs, 1].
        scores: [bs, N] float32; None: the draft has none, or this is a prefill.
        arrived: recorded after the copies; None: they are there.
        nodes: N.
        most: nodes of each request's draft, at most, before a cut over the batch; None: there was
            no such cut, and the nodes that were verified stand first.
        is_tree: whether the parents count: else each node follows the one before.
    """

    requests: Sequence[RequestView]
    integers: Tensor
    scores: Tensor | None = None
    arrived: Event | None = None
    nodes: int = 0
    most: tuple[int, ...] | None = None
    is_tree: bool = False

    @property
    def ids(self) -> tuple[str, ...]:
        """The names of the requests."""
        return tuple(request.request_id for request in self.requests)


class _Run:
    """The records of one engine.

    Args:
        number: of the run, from 0 on.
        runtime: of the run.
    """

    def __init__(self, number: int, runtime: Runtime) -> None:
        self._number = number
        self._text = TokenText(runtime.tokenizer)
        self._requests: dict[str, GrowingText] = {}
        self._pieces: set[int] = set()
        self._drafts: deque[Seen] = deque()
        self._prefills: deque[Seen] = deque()

    def settings(self, runtime: Runtime) -> Record:
        """Return the record of the run itself."""
        config = runtime.config
        model = Path(runtime.model_path).name if runtime.model_path else "unknown model"
        return {
            "kind": "run",
            "run": self._number,
            "algorithm": config.algorithm,
            "model": model,
            "num_steps": config.num_steps,
            "topk": config.topk,
            "num_draft_tokens": config.num_draft_tokens,
        }

    # In a step

    def see_draft(
        self, batch: Batch, draft: Draft, predict: Tensor, verified: VerifyOutput
    ) -> None:
        """Start copying what was drafted, and what the target says to it."""
        import torch

        tokens = draft.tokens
        parents = torch.full_like(tokens, -1) if draft.parents is None else draft.parents
        index = verified.accept_index
        path = torch.where(index >= 0, index - draft.offsets.unsqueeze(1), -1)
        said = draft.pad(predict, fill=-1)
        values = torch.cat((tokens, parents, said, path, batch.seq_lens.unsqueeze(1)), dim=1)
        self._drafts.append(
            Seen(
                requests=tuple(batch.requests),
                integers=_to_host(values),
                scores=None if draft.scores is None else _to_host(draft.scores),
                arrived=_event(values),
                nodes=draft.width,
                most=None if draft.places is None else batch.max_draft_nodes,
                is_tree=not draft.is_chain,
            )
        )

    def see_prefill(self, batch: Batch, next_tokens: Tensor) -> None:
        """Start copying the tokens after the chunks of a prefill."""
        copied = _to_host(next_tokens.unsqueeze(1))
        self._prefills.append(Seen(tuple(batch.requests), copied, arrived=_event(next_tokens)))

    # After it

    def step(self, report: StepReport) -> Iterator[Record]:
        """Yield the records of a step that has been processed."""
        yield {
            "kind": "step",
            "run": self._number,
            "step": report.number,
            "mode": report.mode,
            "batch": len(report.decode_ids) + len(report.prefill_ids),
            "waiting": report.num_waiting,
            "ms": {part: round(s * 1e3, 3) for part, s in report.seconds.items()},
            **_choice(report),
        }
        if report.prefill_ids:
            yield from self._prefilled(report, _found(self._prefills, report.prefill_ids))
        if report.decode_ids:
            yield from self._decoded(report, _found(self._drafts, report.decode_ids))

    def _prefilled(self, report: StepReport, seen: Seen | None) -> Iterator[Record]:
        if seen is None:
            return
        following = seen.integers[:, 0].tolist()
        for i, request in enumerate(seen.requests):
            yield from self._begun(request)
            new = following[i : i + 1] if report.sampled[i] else []
            yield {
                "kind": "prefill",
                "request": self._key(request.request_id),
                "step": report.number,
                "read": report.prefill_tokens[i],
                "cached": report.cached_tokens[i],
                **self._new(request.request_id, new),
            }

    def _decoded(self, report: StepReport, seen: Seen | None) -> Iterator[Record]:
        if seen is None:
            return
        for i, request in enumerate(seen.requests):
            draft = _draft_of(seen, report, i)
            yield from self._begun(request, received=draft["tokens"][:1])
            used = {*draft["tokens"], *draft["target"]}
            yield from self._named(used)
            path, said = draft["path"], draft["target"]
            new = [said[node] for node in path][: report.kept[i]]
            yield {
                "kind": "decode",
                "request": self._key(request.request_id),
                "step": report.number,
                "drafter": report.drafters[i],
                "planned": report.planned[i],
                "proposed": report.proposed[i],
                "width": report.widths[i],
                **draft,
                **self._new(request.request_id, new),
            }

    def ended(self, report: RequestReport) -> Record:
        """Return the record of a request that has ended, maybe before the record of its last step,
        or without any."""
        key = self._key(report.request_id)
        return {"kind": "end", "request": key, "reason": report.finish_reason}

    def _key(self, request_id: str) -> str:
        """Return a request's name, unique in the file."""
        return f"{self._number}/{request_id}" if self._number else request_id

    def _begun(self, request: RequestView, received: Sequence[int] = ()) -> Iterator[Record]:
        """Yield the record of a request that is seen for the first time.

        Args:
            received: its first token, if another instance has prefilled it.
        """
        if request.request_id in self._requests:
            return
        prompt = list(request.prompt_token_ids)
        self._requests[request.request_id] = GrowingText(self._text, prompt)
        yield {
            "kind": "request",
            "request": self._key(request.request_id),
            "run": self._number,
            "tokens": len(prompt),
            "prompt": self._text.all(prompt),
            **self._new(request.request_id, received),
        }

    def _named(self, tokens: set[int]) -> Iterator[Record]:
        """Yield the text of tokens that no record had before."""
        new = sorted(token for token in tokens - self._pieces if token >= 0)
        self._pieces.update(new)
        if new:
            yield {"kind": "pieces", "pieces": {t: self._text.piece(t) for t in new}}

    def _new(self, request_id: str, tokens: Sequence[int]) -> Record:
        """Return the tokens that a request got, and the text that each adds."""
        growing = self._requests[request_id]
        return {"new": list(tokens), "text": [growing.add(token) for token in tokens]}


def _choice(report: StepReport) -> Record:
    """Return why drafts were chosen so, and what that choice expected; nothing if none was made."""
    if not report.reason:
        return {}
    tokens, seconds = report.expected_tokens, report.expected_seconds
    return {
        "reason": report.reason,
        "expected": None if tokens is None else round(tokens, 2),
        "expected_ms": None if seconds is None else round(seconds * 1e3, 3),
    }


def _draft_of(seen: Seen, report: StepReport, i: int) -> Record:
    """Return the draft of request ``i``: of its nodes their tokens, their parents unless it is a
    chain, their scores where they have some, and what the target said after each, -1 where it was
    not asked."""
    n = seen.nodes
    row: list[int] = seen.integers[i].tolist()
    said = row[2 * n : 3 * n]
    nodes = report.widths[i] if seen.most is None else min(n, report.proposed[i], seen.most[i])
    found: Record = {
        "position": row[-1],
        "tokens": row[:nodes],
        "target": said[:nodes],
        "path": row[3 * n :][: report.accept_lens[i]],
    }
    if seen.is_tree:
        found["parents"] = row[n : n + nodes]
    if seen.scores is not None:
        found["scores"] = _rounded(seen.scores[i, :nodes].tolist())
    if report.chances is not None:
        found["chances"] = _rounded(abs(report.chances[i, :nodes]).tolist())
    return found


def _rounded(values: Sequence[float]) -> list[float | None]:
    return [round(value, 3) if math.isfinite(value) else None for value in values]


def _found(pending: deque[Seen], ids: tuple[str, ...]) -> Seen | None:
    """Return what was seen of a step with these requests, when it has arrived. What was seen before
    it and is still here is of steps that have failed."""
    while pending:
        seen = pending.popleft()
        if seen.ids == ids:
            if seen.arrived is not None:
                seen.arrived.synchronize()
            return seen
    return None


def _to_host(tensor: Tensor) -> Tensor:
    """Start copying a tensor to the CPU; later writes to it do not matter."""
    if not tensor.is_cuda:
        return tensor.clone()
    import torch

    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _event(tensor: Tensor) -> Event | None:
    """Return an event after the copies that were started; None where they are done."""
    if not tensor.is_cuda:
        return None
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
