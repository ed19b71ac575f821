"""Drafts of another algorithm: their paths go on as the request's own text does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug import LLM, Batch, Draft, SamplingParams, append_nodes
from specplug.speculative.hook_order import ForwardMode
from specplug_ngram.path_continuation import DeviceTexts, continue_paths

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
    return continue_paths(tree, padded, ends, torch.tensor([novelty]), steps)


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
    made = continue_paths(tree, texts, torch.tensor([7, 7]), torch.ones(2), 1)
    assert set(paths(made, 0)) == {(3,), (3, 4), (3, 4, 5)}
    assert set(paths(made, 1)) == {(3,), (3, 4)}


def test_texts_grow_by_what_is_accepted_whatever_came_after_it() -> None:
    texts = DeviceTexts(2, 50, CPU)
    batch = batch_of([[1, 2, 3], [4, 5]], "ab")
    found = texts.read(batch, torch.tensor([9, 8]))
    assert found[0, :4].tolist() == [1, 2, 3, 9]
    assert found[1, :3].tolist() == [4, 5, 8]
    texts.write(batch, torch.tensor([[10, 11, 66], [12, 66, 66]]))
    batch.seq_lens = torch.tensor([5, 3])  # two tokens of the first were accepted, one of the other
    found = texts.read(batch, torch.tensor([11, 12]))
    assert found[0, :6].tolist() == [1, 2, 3, 9, 10, 11]
    assert found[1, :4].tolist() == [4, 5, 8, 12]


def test_row_of_an_ended_request_is_used_again() -> None:
    texts = DeviceTexts(1, 50, CPU)
    texts.read(batch_of([[1, 2, 3]], "a"), torch.tensor([4]))
    texts.read(batch_of([[5, 6]], "b"), torch.tensor([7]))  # no row is free: it has no text
    texts.forget("a")
    found = texts.read(batch_of([[5, 6]], "b"), torch.tensor([7]))
    assert found[0, :3].tolist() == [5, 6, 7]
    texts.forget("never seen")


def test_what_lies_beyond_a_text_harms_nothing() -> None:
    texts = DeviceTexts(1, 4, CPU)
    batch = batch_of([[1, 2, 3, 4, 5, 6]], "a")
    found = texts.read(batch, torch.tensor([9]))
    assert found[0, :4].tolist() == [1, 2, 3, 4]
    texts.write(batch, torch.tensor([[7, 8]]))


def test_ended_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_DEBUG", "1")
    with LLM(speculative_algorithm="EAGLE3+NGRAM", device="cpu", max_total_tokens=512) as llm:
        llm.generate(["def f(x):\n" * 4] * 3, SamplingParams(max_tokens=20))
        worker = llm.engine.runtime.parts["NGRAM"].worker
        assert worker.grower is not None
        assert not worker.requests
        assert not worker.grower._texts._rows
