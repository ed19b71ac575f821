"""SPARSE_SELF sees the pages that the target looks at most, and its tokens are NONE's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from default_completion import Completion
from drafted_tokens import CONTEXT, VOCAB, Tokens, plain_tokens, save_llama, tokens_of
from recorded_operations import record_operations
from torch import Tensor

import specplug
from specplug import LLM, Batch, Draft, DraftInput, SamplingParams
from specplug.engine.engine_runtime import EngineRuntime
from specplug.speculative import graph_recorder
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.pass_arguments import BatchPadding
from specplug_sparse_self import SparseSelf, View
from specplug_sparse_self.worker import PAGES, SparseSelfWorker

SMALL = View(sinks=1, window=6, pages=2, page_size=4)
TEXT = Path(specplug.__file__).with_name("llm.py").read_text()


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


KINDS = "small", "last token", "pages", "window"
TREE = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 9}


@pytest.mark.parametrize(
    ("view", "overlap", "page_size", "chunk", "slots", "more"),
    [
        (SMALL, True, 1, None, 90, {}),
        (View(0, 1, 0, 1), False, 16, 8, None, {"enable_mixed_chunk": True}),
        (View(3, 0, 5, 1), True, 3, None, None, {"disaggregation": "both"}),
        (View(2, 20, 2, 16), False, 1, None, None, {}),
        (SMALL, True, 1, None, 90, TREE),
        (View(0, 1, 0, 1), True, 16, 8, None, {"enable_mixed_chunk": True, **TREE}),
        (View(3, 0, 5, 1), False, 3, None, None, {"disaggregation": "both", **TREE}),
        (View(2, 20, 2, 16), True, 1, None, None, TREE),
    ],
    ids=[f"{shape}, {view}" for shape in ("chain", "tree") for view in KINDS],
)
def test_tokens_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    expected: Tokens,
    view: View,
    overlap: bool,
    page_size: int,
    chunk: int | None,
    slots: int | None,
    more: dict[str, Any],
) -> None:
    """A pool of few slots retracts requests."""
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm=SparseSelf(view),
        speculative_num_steps=3,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=3,
        **({"max_total_tokens": slots} if slots else {}),
        **more,
    ) as llm:
        assert tokens_of(llm, prompts) == expected
        llm.check_pool()
        assert bool(llm.stats()["retractions"]) is (slots is not None)
        assert llm.stats()["drafted"] > 0


def test_view_of_all_drafts_what_the_target_takes(
    target: Path, prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By pages alone: the window is empty."""
    monkeypatch.setattr(SparseSelfWorker, "_drafts", lambda self, batch, soon=0: True)
    view = View(sinks=0, window=0, pages=CONTEXT // 4, page_size=4)
    with LLM(
        target, dtype="float64", speculative_algorithm=SparseSelf(view), speculative_num_steps=3
    ) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=25))
        assert llm.stats()["mean_accept_length"] == 4


def test_trees_take_more_of_what_is_drafted_than_chains(
    target: Path, prompts: list[list[int]]
) -> None:
    """Over a part of the context, where the likeliest draft is not always right."""
    lengths = []
    for tree in ({}, TREE):
        with LLM(
            target,
            dtype="float64",
            speculative_algorithm=SparseSelf(SMALL),
            speculative_num_steps=3,
            **tree,
        ) as llm:
            llm.generate(prompts, SamplingParams(max_tokens=25))
            lengths.append(llm.stats()["mean_accept_length"])
    assert lengths[1] > lengths[0]


def test_contexts_that_are_seen_whole_are_not_drafted(
    target: Path, prompts: list[list[int]]
) -> None:
    with LLM(target, dtype="float64", speculative_algorithm=SparseSelf(View(4, 150, 0, 1))) as llm:
        llm.generate(prompts, SamplingParams(max_tokens=20))
        assert llm.stats()["drafted"] == 0


def test_pages_are_those_of_the_greatest_shares() -> None:
    worker: Any = SparseSelfWorker.__new__(SparseSelfWorker)
    worker.view = View(sinks=2, window=4, pages=2, page_size=2)
    shares = torch.tensor(
        [[9.0, 1.0, 5.0, 2.0, 4.0, 8.0, 8.0], [0.0, 3.0, 9.0, 9.0, 9.0, 9.0, 9.0]]
    )
    # The first page holds the sinks, the last four tokens are the window, and no more is there.
    found = worker._best(shares, torch.tensor([14, 7]))
    assert found.tolist() == [[3, 5], [0, 2]]


def test_pages_follow_the_attention_of_watched_layers(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the last committed row, as the target's own attention has it after a prefill."""
    from transformers import AutoModelForCausalLM

    seen: list[Tensor] = []
    best = SparseSelfWorker._best

    def kept(self: SparseSelfWorker, shares: Tensor, ends: Tensor) -> Tensor:
        seen.append(shares.clone())
        return best(self, shares, ends)

    monkeypatch.setattr(SparseSelfWorker, "_best", kept)
    torch.manual_seed(5)
    prompt = torch.randint(0, VOCAB, (1, 50))
    with LLM(target, dtype="float64", speculative_algorithm=SparseSelf(SMALL, (1, 3))) as llm:
        seen.clear()
        llm.generate(prompt.tolist(), SamplingParams(max_tokens=1))
    model = AutoModelForCausalLM.from_pretrained(
        target, dtype=torch.float64, attn_implementation="eager"
    )
    own = model(prompt, output_attentions=True).attentions
    wanted = sum(own[layer][0, :, -1].mean(0) for layer in (1, 3))
    pages = torch.nn.functional.pad(wanted, (0, 2)).view(-1, 4).sum(1).float()
    torch.testing.assert_close(seen[0][0, : len(pages)], pages, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("tree", [{}, TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("pads", [True, False])
def test_recorded_drafts_are_those_that_are_not(
    target: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
    pads: bool,
    tree: dict[str, Any],
) -> None:
    """Of three requests, padded to four, then of fewer."""
    proposed: list[list[list[int]]] = []
    propose, runners = HookCalls.propose, []

    def kept(self: HookCalls, *given: Any, **named: Any) -> Draft:
        draft = propose(self, *given, **named)
        proposed.append(draft.tokens.tolist())
        return draft

    def draft_pass(self: EngineRuntime, forward: Any) -> GraphRunner:
        kv = self._kv
        padding = BatchPadding(pads=pads, length=lambda: kv.key_length)
        runners.append(GraphRunner(forward, padding, GraphRecorder()))
        return runners[-1]

    monkeypatch.setattr(graph_recorder, "record_graph", record_operations)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(HookCalls, "propose", kept)
    params = [SamplingParams(max_tokens=n) for n in (14, 9, 11)]
    sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=1)
    found = []
    for records in (True, False):
        with monkeypatch.context() as patch:
            if records:
                patch.setattr(EngineRuntime, "draft_pass", draft_pass)
            with LLM(
                target, dtype="float64", speculative_algorithm=SparseSelf(SMALL), **tree
            ) as llm:
                tokens = [
                    output.token_ids
                    for each in (params, [sampled, *params[1:]])
                    for output in llm.generate(prompts[1:3] + prompts[4:], each)
                ]
        found.append((tokens, proposed.copy()))
        proposed.clear()
    assert found[0] == found[1]
    assert any(runner.num_recordings for runner in runners)


@pytest.mark.parametrize("tokens", [1, 2, 7, 64, 500, 4096])
def test_views_of_so_many_tokens_see_no_more(tokens: int) -> None:
    view = View.of_tokens(tokens)
    assert view.tokens == tokens
    assert view.window >= tokens / 2
    assert min(view.sinks, view.pages) >= 0


def test_tokens_that_drafts_see_are_a_setting(
    target: Path, prompts: list[list[int]], expected: Tokens
) -> None:
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm="SPARSE_SELF",
        speculative_settings={"sparse_self_tokens": 19},
    ) as llm:
        assert llm.engine.runtime.worker.view.tokens == 19
        assert tokens_of(llm, prompts) == expected
        assert llm.stats()["drafted"] > 0


def test_usual_view_is_a_quarter_of_the_context() -> None:
    assert View.of_context(2048).tokens == 512
    assert View.of_context(1 << 20).tokens == 4096
    assert View.of_context(1).tokens == 1


def test_default_model_with_a_quarter_of_its_context(default_completion: Completion) -> None:
    """Its own text after a prompt of 1,500 tokens, and drafts that are mostly right."""
    with LLM() as llm:
        ids = llm.tokenizer(TEXT)["input_ids"][:1500]
        plain = llm.generate([ids], SamplingParams(max_tokens=100))[0].token_ids
        assert llm.context_len == 2048
    with LLM(speculative_algorithm="SPARSE_SELF") as llm:
        assert llm.generate([ids], SamplingParams(max_tokens=100))[0].token_ids == plain
        assert llm.stats()["mean_accept_length"] > 3
        short = llm.generate(default_completion.prompt, default_completion.params)[0]
        assert short.token_ids == default_completion.output.token_ids


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain loop"])
@pytest.mark.parametrize("length", range(SMALL.tokens - 6, SMALL.tokens + 2))
def test_first_draft_sees_chosen_pages(
    target: Path, length: int, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However far the prompt is from the length at which drafts begin."""
    chosen: list[Tensor] = []
    inner = SparseSelfWorker.propose

    def propose(self: SparseSelfWorker, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = inner(self, batch, draft_input)
        if draft.width > 1 and not batch.is_warm_up:
            chosen.append(draft_input[PAGES].clone())
        return draft

    monkeypatch.setattr(SparseSelfWorker, "propose", propose)
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm=SparseSelf(SMALL),
        disable_overlap_schedule=not overlap,
    ) as llm:
        llm.generate([list(range(length))], SamplingParams(max_tokens=12, ignore_eos=True))
    assert chosen[0].max() > 0
