"""Drafts of another algorithm: their paths go on as the request's own text does."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from runs_again import RunsAgain

from specplug import LLM, Batch, Draft, SamplingParams, append_nodes
from specplug.engine.engine_runtime import EngineRuntime
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.hook_order import ForwardMode
from specplug.speculative.pass_arguments import BatchPadding
from specplug_ngram.growth import DraftGrower
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


def read(texts: DeviceTexts, batch: Batch, roots: list[int]) -> torch.Tensor:
    """The texts of a batch, as a growth pass reads them."""
    length, rows = texts.admit(batch), texts.rows_of(batch)
    texts.write_roots(rows, batch.seq_lens, torch.tensor(roots))
    return texts.read(rows, length)


def test_texts_grow_by_what_is_accepted_whatever_came_after_it() -> None:
    texts = DeviceTexts(2, 50, CPU)
    batch = batch_of([[1, 2, 3], [4, 5]], "ab")
    found = read(texts, batch, [9, 8])
    assert found[0, :4].tolist() == [1, 2, 3, 9]
    assert found[1, :3].tolist() == [4, 5, 8]
    rows = texts.rows_of(batch)
    texts.write(rows, batch.seq_lens, torch.tensor([[10, 11, 66], [12, 66, 66]]))
    batch.seq_lens = torch.tensor([5, 3])  # two tokens of the first were accepted, one of the other
    found = read(texts, batch, [11, 12])
    assert found[0, :6].tolist() == [1, 2, 3, 9, 10, 11]
    assert found[1, :4].tolist() == [4, 5, 8, 12]


def test_requests_of_a_warm_up_take_no_row() -> None:
    texts = DeviceTexts(1, 600, CPU)
    batch = attrs.evolve(batch_of([[1] * 200], "a"), is_warm_up=True)
    assert texts.rounded(texts.admit(batch)) == 512
    assert texts.row_list(batch) == [0]
    assert not texts.has_any


def test_row_of_an_ended_request_is_used_again() -> None:
    texts = DeviceTexts(1, 50, CPU)
    read(texts, batch_of([[1, 2, 3]], "a"), [4])
    read(texts, batch_of([[5, 6]], "b"), [7])  # no row is free: it has no text
    texts.forget("a")
    found = read(texts, batch_of([[5, 6]], "b"), [7])
    assert found[0, :3].tolist() == [5, 6, 7]
    texts.forget("never seen")


def test_what_lies_beyond_a_text_harms_nothing() -> None:
    texts = DeviceTexts(1, 4, CPU)
    batch = batch_of([[1, 2, 3, 4, 5, 6]], "a")
    found = read(texts, batch, [9])
    assert found[0, :4].tolist() == [1, 2, 3, 4]
    texts.write(texts.rows_of(batch), batch.seq_lens, torch.tensor([[7, 8]]))


def test_depth_of_continuations_is_bounded() -> None:
    draft = Draft.chain(torch.tensor([[2, 3, 4]]))
    nothing = draft.tokens[:, :0]
    tree = append_nodes(draft, nothing, nothing, 2)
    texts, ends = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8, 1, 2]]), torch.tensor([9])
    made = continue_paths(tree, texts, ends, torch.ones(1), 3, 4)
    assert max(map(len, paths(made))) == made.depth == 4


PROMPTS = ["def f(x):\n    return x\n" * 4, "import os\nimport sys\nimport ", "x = [1, 2, 3, 4"]


@pytest.mark.parametrize("proposer", ["EAGLE3", "NONE"])
def test_recorded_growth_has_few_forms_and_the_same_tokens(
    proposer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU: the growth is padded and recorded, in forms that no step's drafts vary."""
    recorder, runners = RunsAgain(), []
    made = EngineRuntime.draft_pass

    def draft_pass(self: EngineRuntime, forward: Any) -> Any:
        if not isinstance(getattr(forward, "__self__", None), DraftGrower):
            return made(self, forward)
        forward.__self__._has_fixed_forms = True
        runners.append(GraphRunner(forward, BatchPadding(), recorder))
        return runners[-1]

    def run(algorithm: str) -> tuple[list[Any], float]:
        params = SamplingParams(max_tokens=60, ignore_eos=True)
        settings: Any = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
        with LLM(speculative_algorithm=algorithm, **settings) as llm:
            tokens = [output.token_ids for output in llm.generate(PROMPTS, params)]
            stats = llm.stats()
            if runners:
                growing, _ = runners
                assert growing.num_recordings <= 4, "batches of 1 to 3, texts of one length"
        return tokens, stats["accepted"] / max(stats["verifications"], 1)

    plain, _ = run("NONE")
    eager, accept_length = run(f"{proposer}+NGRAM")
    monkeypatch.setattr(EngineRuntime, "draft_pass", draft_pass)
    recorded, found = run(f"{proposer}+NGRAM")
    assert plain == eager == recorded
    assert recorder.replayed > 20
    assert found > 0.95 * accept_length, "wider drafts"


def test_ended_requests_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_DEBUG", "1")
    with LLM(speculative_algorithm="EAGLE3+NGRAM", device="cpu", max_total_tokens=512) as llm:
        llm.generate(["def f(x):\n" * 4] * 3, SamplingParams(max_tokens=20))
        worker = llm.engine.runtime.parts["NGRAM"].worker
        assert worker.grower._is_used
        assert not worker.requests
        assert not worker.grower._texts._rows
