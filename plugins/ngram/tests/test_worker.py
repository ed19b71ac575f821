"""The drafter proposes what it knows, and nothing when it knows nothing."""

from __future__ import annotations

import attrs
import pytest
import torch

from specplug import Batch, CommittedOutput, DraftInput
from specplug.spec.batch import ForwardMode
from specplug_ngram.future_map import HostFutureMap
from specplug_ngram.worker import NgramWorker


@attrs.frozen
class Request:
    """What a hook sees of one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]


REPEATS = Request("repeats", (5, 6, 7, 8, 9, 1, 5, 6, 7))
KNOWS_NOTHING = Request("knows nothing", (1, 2, 3, 4))


def _batch(
    *requests: Request, mode: ForwardMode = ForwardMode.DECODE, last_chunk: tuple[bool, ...] = ()
) -> Batch:
    rows = torch.arange(1, len(requests) + 1)
    return Batch(mode=mode, requests=requests, rows=rows, seq_lens=rows, last_chunk=last_chunk)


def _input(*bonus_tokens: int) -> DraftInput:
    return DraftInput(bonus_tokens=torch.tensor(bonus_tokens))


def _output(tokens: list[list[int]], accept_lens: list[int]) -> CommittedOutput:
    columns = len(tokens[0])
    lens = torch.tensor(accept_lens)
    flat = torch.tensor(tokens).view(-1)
    last_rows = torch.arange(len(tokens)) * columns + lens - 1
    return CommittedOutput(
        tokens=flat, last_rows=last_rows, accept_lens=lens, bonus_tokens=flat[last_rows]
    )


@pytest.fixture
def worker() -> NgramWorker:
    return NgramWorker(num_draft_tokens=4)


def test_it_drafts_the_chain_behind_the_longest_suffix(worker: NgramWorker) -> None:
    worker.meet([REPEATS])
    worker.observe("repeats", [8])
    draft = worker.propose(_batch(REPEATS), _input(8))
    assert draft.is_chain
    assert draft.tokens.tolist() == [[8, 9, 1, 5]]


def test_it_proposes_the_root_alone_when_it_knows_nothing(worker: NgramWorker) -> None:
    worker.meet([KNOWS_NOTHING])
    worker.observe("knows nothing", [5])
    draft = worker.propose(_batch(KNOWS_NOTHING), _input(5))
    assert draft.tokens.tolist() == [[5]]
    assert draft.total == 1


def test_who_knows_nothing_costs_no_more_beside_one_who_does(worker: NgramWorker) -> None:
    worker.meet([REPEATS, KNOWS_NOTHING])
    draft = worker.propose(_batch(KNOWS_NOTHING, REPEATS), _input(4, 7))
    assert draft.widths == (1, 4)
    assert draft.flatten(draft.tokens).tolist() == [4, 7, 8, 9, 1]


def test_a_short_continuation_makes_a_short_chain(worker: NgramWorker) -> None:
    short = Request("short", (1, 2, 3, 9, 1, 2, 3))
    worker.meet([short, REPEATS])
    worker.observe("short", [9, 1, 2, 3])
    worker.observe("repeats", [8, 9, 1, 5, 6, 7])
    assert worker.propose(_batch(REPEATS, short), _input(7, 3)).widths is None
    alone = Request("alone", (4, 4, 4, 4))
    worker.meet([alone])
    assert worker.propose(_batch(alone, REPEATS), _input(4, 7)).widths == (2, 4)


def test_it_learns_from_requests_that_have_ended(worker: NgramWorker) -> None:
    worker.meet([KNOWS_NOTHING])
    worker.observe("knows nothing", [7, 8])
    worker.forget("knows nothing")
    other = Request("other", (2, 3, 4))
    worker.meet([other])
    assert worker.propose(_batch(other), _input(4)).tokens.tolist() == [[4, 7, 8]]
    assert "knows nothing" not in worker._histories


def test_its_own_history_comes_before_that_of_others(worker: NgramWorker) -> None:
    worker.meet([KNOWS_NOTHING])
    worker.forget("knows nothing")
    own = Request("own", (1, 2, 3, 8, 1, 2, 3))
    worker.meet([own])
    assert worker.propose(_batch(own), _input(3)).tokens.tolist() == [[3, 8, 1, 2]]


def test_tokens_and_the_end_of_an_unknown_request_are_ignored(worker: NgramWorker) -> None:
    worker.observe("never met", [1, 2])
    worker.forget("never met")
    draft = worker.propose(_batch(Request("never met", (1, 2))), _input(2))
    assert draft.tokens.tolist() == [[2]]


def test_meeting_a_request_again_keeps_its_history(worker: NgramWorker) -> None:
    worker.meet([REPEATS])
    worker.observe("repeats", [8])
    worker.meet([REPEATS])
    assert worker._histories["repeats"].tokens == [*REPEATS.prompt_token_ids, 8]


def test_accepted_tokens_reach_the_host_in_order() -> None:
    seen: list[tuple[str, list[int]]] = []
    future_map = HostFutureMap(4, torch.device("cpu"), lambda name, t: seen.append((name, [*t])))
    one, other = Request("one", (1, 2)), Request("other", (3,))
    prefill = _batch(one, other, mode=ForwardMode.PREFILL, last_chunk=(True, False))
    future_map.relay(prefill, _output([[11], [12]], [1, 1]))
    future_map.relay(_batch(one), _output([[13, 14, 99]], [2]))
    assert seen == []
    future_map.resolve(torch.tensor([1]))
    assert seen == [("one", [11]), ("other", []), ("one", [13, 14])]
    future_map.resolve(torch.tensor([1]))
    assert len(seen) == 3


def test_prefills_without_a_decode_step_do_not_pile_up() -> None:
    seen: list[str] = []
    future_map = HostFutureMap(4, torch.device("cpu"), lambda name, tokens: seen.append(name))
    for number in range(100):
        prefill = _batch(Request(str(number), (1,)), mode=ForwardMode.PREFILL, last_chunk=(True,))
        future_map.relay(prefill, _output([[11]], [1]))
    assert len(future_map._relayed) <= 2
    assert seen == [str(number) for number in range(98)]
