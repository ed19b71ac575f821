"""Drafts of another algorithm: their paths go on as the request's own text does."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch

from specplug import LLM, Batch, Draft, SamplingParams, append_nodes
from specplug.speculative.hook_order import ForwardMode
from specplug_ngram import growth
from specplug_ngram.device_texts import DeviceTexts
from specplug_ngram.growth import DraftGrower
from specplug_ngram.path_continuation import continue_paths, write_in_torch

CPU = torch.device("cpu")


def batch_of(texts: list[list[int]], ids: str) -> Batch:
    views: Any = [
        SimpleNamespace(request_id=name, token_ids=text)
        for name, text in zip(ids, texts, strict=True)
    ]
    lens = torch.tensor([len(text) for text in texts])
    return Batch(
        mode=ForwardMode.DECODE,
        requests=views,
        req_indices=torch.arange(len(texts)) + 1,
        seq_lens=lens,
        max_draft_nodes=(99,) * len(texts),
    )


def paths(draft: Draft, row: int = 0) -> dict[tuple[int, ...], float]:
    """The score of each path."""
    assert draft.parents is not None
    assert draft.scores is not None
    found: dict[int, tuple[int, ...]] = {0: ()}
    scores = {}
    for i in range(1, draft.width):
        parent = int(draft.parents[row, i])
        if parent in found:
            found[i] = (*found[parent], int(draft.tokens[row, i]))
            scores[found[i]] = float(draft.scores[row, i])
    return scores


def grown(text: list[int], chain: list[int], steps: int = 3, novelty: float = 1.0) -> Draft:
    """Continue a chain after a text, whose last token is the root."""
    draft = Draft.chain(torch.tensor([[text[-1], *chain]]))
    nothing = draft.tokens[:, :0]
    tree = append_nodes(draft, nothing, nothing, draft.depth)
    ends = torch.tensor([len(text) - 1])
    padded = torch.tensor([text + [0] * 9])
    return continue_paths(tree, padded, ends, torch.tensor([novelty]), steps, len(chain) + steps)


def test_path_goes_on_as_the_text_did() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    draft = grown(text, [3, 4])
    assert set(paths(draft)) == {(3,), (3, 4), (3, 4, 5), (3, 4, 5, 6), (3, 4, 5, 6, 7)}
    assert draft.depth == 5


def test_another_token_than_the_drafted_one_is_a_branch() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2]
    draft = grown(text, [7], steps=2)
    assert set(paths(draft)) == {(7,), (3,), (3, 4)}


def test_longest_match_counts_and_of_equal_ones_the_latest() -> None:
    text = [1, 2, 3, 9, 2, 3, 8, 1, 2]
    assert (3, 9) in paths(grown(text, [3], steps=1)), "after 1, 2, 3; not after 2, 3"
    text = [1, 2, 9, 1, 2, 8, 5, 5, 1, 2]
    assert set(paths(grown(text, [6], steps=1))) == {(6,), (8,)}


def test_one_token_alone_is_no_match() -> None:
    assert set(paths(grown([1, 2, 3, 4, 5], [2]))) == {(2,)}


def test_continuation_ends_where_the_text_does() -> None:
    text = [7, 8, 1, 2, 3, 1, 2]
    assert set(paths(grown(text, [9], steps=5))) == {(9,), (3,), (3, 1), (3, 1, 2)}


def test_scores_are_those_of_longer_matches_step_by_step() -> None:
    scores = paths(grown([1, 2, 3, 4, 5, 6, 9, 1, 2], [3], steps=2, novelty=2.0))
    expected = [1 / (1 + 2.0 / matched**1.5) for matched in (3, 4)]
    found = torch.tensor([scores[(3, 4)], scores[(3, 4, 5)]]).exp()
    assert found.tolist() == pytest.approx(expected)


def test_absent_nodes_do_not_go_on() -> None:
    draft = Draft.chain(torch.tensor([[2, 3, 4], [2, 3, 4]]), [3, 2])
    nothing = draft.tokens[:, :0]
    texts = torch.tensor([[1, 2, 3, 4, 5, 6, 1, 2]] * 2)
    tree = append_nodes(draft, nothing, nothing, 2)
    made = continue_paths(tree, texts, torch.tensor([7, 7]), torch.ones(2), 1, 3)
    assert set(paths(made, 0)) == {(3,), (3, 4), (3, 4, 5)}
    assert set(paths(made, 1)) == {(3,), (3, 4)}


def test_depth_of_continuations_is_bounded() -> None:
    draft = Draft.chain(torch.tensor([[2, 3, 4]]))
    nothing = draft.tokens[:, :0]
    tree = append_nodes(draft, nothing, nothing, 2)
    texts, ends = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2]]), torch.tensor([9])
    made = continue_paths(tree, texts, ends, torch.ones(1), 3, 4)
    assert max(map(len, paths(made))) == made.depth == 4


def test_nothing_stands_before_a_text() -> None:
    """Of a text of three tokens no more than three match."""
    text = [5, 5, 5]
    found = paths(grown(text, [6], steps=1))
    assert found[(5,)] == pytest.approx(-math.log1p(2**-1.5)), "two of them end before the root"


def test_texts_grow_by_what_is_accepted_whatever_came_after_it() -> None:
    texts = DeviceTexts(4, 50, CPU)
    batch = batch_of([[1, 2, 3], [4, 5]], "ab")
    texts.admit(batch)
    assert texts.tokens[1, :3].tolist() == [1, 2, 3]
    assert texts.tokens[2, :2].tolist() == [4, 5]
    write_in_torch(
        texts.tokens, torch.tensor([[10, 66], [12, 66]]), batch.req_indices, batch.seq_lens
    )
    texts.admit(batch)
    assert texts.tokens[1, :6].tolist() == [1, 2, 3, 0, 10, 66], "the root is written by growth"
    batch.seq_lens = torch.tensor([4, 3])
    write_in_torch(texts.tokens, torch.tensor([[11], [13]]), batch.req_indices, batch.seq_lens)
    assert texts.tokens[1, :6].tolist() == [1, 2, 3, 0, 10, 11]


def test_request_that_gets_another_row_has_its_text_there() -> None:
    texts = DeviceTexts(4, 50, CPU)
    batch = batch_of([[1, 2, 3]], "a")
    texts.admit(batch)
    texts.forget("a")
    batch.req_indices = torch.tensor([3])
    texts.admit(batch)
    assert texts.tokens[3, :3].tolist() == [1, 2, 3]
    texts.forget("never seen")


def test_requests_of_a_warm_up_are_not_known() -> None:
    texts = DeviceTexts(4, 50, CPU)
    batch = batch_of([[1, 2, 3]], "a")
    texts.admit(attrs.evolve(batch, is_warm_up=True))
    assert not texts.tokens.any()
    texts.admit(batch)
    assert texts.tokens[1, :3].tolist() == [1, 2, 3]


def test_what_lies_beyond_a_text_harms_nothing() -> None:
    texts = DeviceTexts(2, 4, CPU)
    batch = batch_of([[1, 2, 3, 4, 5, 6]], "a")
    texts.admit(batch)
    assert texts.tokens[1, :4].tolist() == [1, 2, 3, 4]
    write_in_torch(texts.tokens, torch.tensor([[7, 8]]), batch.req_indices, batch.seq_lens)
    assert texts.tokens[1, :4].tolist() == [1, 2, 3, 4]


PROMPTS = ["def f(x):\n    return x\n" * 4, "import os\nimport sys\nimport ", "x = [1, 2, 3, 4"]


@pytest.mark.parametrize("mode", ["torch", "triton"])
@pytest.mark.parametrize("proposer", ["EAGLE3", "NONE"])
def test_growth_to_few_widths_has_the_same_tokens(
    proposer: str, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: drafts have one of three widths, which the warm-up has too."""
    monkeypatch.setattr(growth, "runs_plugin_kernels", lambda device: mode == "triton")
    begin = DraftGrower.__init__

    def begin_as_on_a_gpu(self: DraftGrower, *arguments: Any) -> None:
        begin(self, *arguments)
        self._has_few_forms = True

    monkeypatch.setattr(DraftGrower, "__init__", begin_as_on_a_gpu)
    seen: dict[bool, set[tuple[int, int]]] = {True: set(), False: set()}
    grow = DraftGrower.grow

    def watched(self: DraftGrower, batch: Batch, draft: Draft, *forced: Any) -> Draft:
        found = grow(self, batch, draft, *forced)
        seen[batch.is_warm_up].add((found.width, found.depth))
        assert found.widths is None
        return found

    monkeypatch.setattr(DraftGrower, "grow", watched)

    def run(algorithm: str) -> tuple[list[Any], float]:
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        settings: Any = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
        settings |= {"warm_up": "on", "max_running_requests": 3}
        with LLM(speculative_algorithm=algorithm, **settings) as llm:
            tokens = [output.token_ids for output in llm.generate(PROMPTS, params)]
            stats = llm.stats()
        return tokens, stats["accepted"] / max(stats["verifications"], 1)

    plain, _ = run("NONE")
    alone, accept_length = run(proposer)
    both, found = run(f"{proposer}+NGRAM")
    assert plain == alone == both
    assert found > 1.2 * accept_length
    assert len(seen[True]) == 3
    assert len(seen[False]) > 1
    assert seen[False] <= seen[True], "no form is new when requests come"


@pytest.mark.parametrize("overlap", [True, False])
def test_texts_are_those_of_the_requests(overlap: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In chunks, from cached prefixes, and in other rows after requests were retracted."""
    seen: list[int] = []
    grow = DraftGrower.grow

    def watched(self: DraftGrower, batch: Batch, draft: Draft, *forced: Any) -> Draft:
        found = grow(self, batch, draft, *forced)
        places = batch.req_indices.tolist(), batch.seq_lens.tolist(), draft.tokens[:, 0].tolist()
        for view, row, end, root in zip(batch.requests, *places, strict=True):
            text = self._texts.tokens[row].tolist()
            known = list(view.token_ids[:end])
            assert text[: len(known)] == known
            if found is not draft:
                assert text[end] == root
            seen.append(row)
        return found

    monkeypatch.setattr(DraftGrower, "grow", watched)
    settings: Any = {"device": "cpu", "dtype": "float32", "max_total_tokens": 200, "page_size": 4}
    settings |= {"max_running_requests": 4, "chunked_prefill_size": 16}
    settings["disable_overlap_schedule"] = not overlap
    prompts = [PROMPTS[0] + str(number) for number in range(6)]
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    with LLM(speculative_algorithm="EAGLE3+NGRAM", **settings) as llm:
        outputs = llm.generate(prompts, params)
        assert llm.stats()["retractions"] > 0
    assert len(set(seen)) > 1
    assert len(outputs) == 6


def test_ended_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_DEBUG", "1")
    with LLM(speculative_algorithm="EAGLE3+NGRAM", device="cpu", max_total_tokens=512) as llm:
        llm.generate(["def f(x):\n" * 4] * 3, SamplingParams(max_tokens=20))
        worker = llm.engine.runtime.parts["NGRAM"].worker
        assert worker.grower is not None
        assert not worker.requests
        assert not worker.grower._texts._known
