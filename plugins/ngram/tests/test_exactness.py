"""The tokens of NONE whatever the shape of the tree, the pages, the chunks and the loop.

The target is a small random model of few words, so that its output repeats itself and branches.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import LLM, SamplingParams
from specplug.outputs import RequestOutput
from specplug_ngram.config import ENGINE
from specplug_ngram.draft_tree import DraftTree
from specplug_ngram.policy import GPU_COSTS, Novelty, StepCost

VOCAB = 8
PARAMS = (
    SamplingParams(max_tokens=24, ignore_eos=True),
    SamplingParams(max_tokens=24, temperature=0.7, seed=5),
    SamplingParams(max_tokens=9, temperature=1.0, frequency_penalty=0.4, seed=6),
    SamplingParams(max_tokens=24, temperature=1.0, seed=7),
    SamplingParams(max_tokens=1),
)

Tokens = tuple[tuple[int, ...], ...]


def _prompts() -> list[list[int]]:
    words = random.Random(0)
    phrase = [words.randrange(VOCAB) for _ in range(7)]
    return [[*phrase, words.randrange(VOCAB), *phrase, *phrase[: n + 2]] for n in range(5)]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers with grouped heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(torch.float64)
    for name, parameter in model.named_parameters():
        # The next word depends on the last one above all, so the output runs in circles.
        torch.nn.init.normal_(parameter, std=0.6 if "embed" in name or "head" in name else 0.1)
    path = tmp_path_factory.mktemp("target")
    model.save_pretrained(path)
    return path


@pytest.fixture(autouse=True)
def _propose_all_that_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepCost, "least", 0.0)
    monkeypatch.setattr(StepCost, "pays", lambda cost, gain, nodes: True)


Generate = Callable[..., list[RequestOutput]]


@pytest.fixture(scope="module")
def generate(target: Path) -> Generate:
    """``generate(**settings)``: all prompts under NGRAM, or whatever the settings say."""

    def run(**settings: Any) -> list[RequestOutput]:
        settings.setdefault("speculative_algorithm", "NGRAM")
        with LLM(target, dtype="float64", device="cpu", **settings) as llm:
            outputs = llm.generate(_prompts(), PARAMS)
            llm.check_pool()
        return outputs

    return run


@pytest.fixture(scope="module")
def plain(generate: Generate) -> Tokens:
    """What NONE generates."""
    outputs = generate(speculative_algorithm="NONE", disable_overlap_schedule=True)
    return tuple(output.token_ids for output in outputs)


@pytest.mark.parametrize("nodes", [1, 2, 3, 6, 40])
@pytest.mark.parametrize("topk", [1, 4])
def test_any_number_of_nodes_will_do(
    topk: int, nodes: int, generate: Generate, plain: Tokens
) -> None:
    outputs = generate(
        speculative_eagle_topk=topk,
        speculative_num_steps=4,
        speculative_num_draft_tokens=nodes,
        page_size=3,
        chunked_prefill_size=5,
    )
    assert tuple(output.token_ids for output in outputs) == plain
    assert max(n for output in outputs for n in output.accept_lens) == min(nodes, 5)


@pytest.mark.parametrize("nodes", [5, 24])
@pytest.mark.parametrize("topk", [1, 4])
def test_what_a_gpu_drafts_will_do(
    topk: int, nodes: int, generate: Generate, plain: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug_ngram.policy.CPU_COSTS", GPU_COSTS)
    outputs = generate(
        speculative_eagle_topk=topk, speculative_num_steps=4, speculative_num_draft_tokens=nodes
    )
    assert tuple(output.token_ids for output in outputs) == plain
    assert max(n for output in outputs for n in output.accept_lens) == 5


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain loop"])
@pytest.mark.parametrize("chunk", [None, 3])
def test_the_history_is_the_prompt_and_then_the_output(
    target: Path, chunk: int | None, overlap: bool
) -> None:
    prompt = _prompts()[0]
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm="NGRAM",
        chunked_prefill_size=chunk,
        disable_overlap_schedule=not overlap,
        speculative_settings={"ngram_index_scope": ENGINE},
    ) as llm:
        output = llm.generate([prompt], PARAMS[0])[0].token_ids
        history = llm.engine.runtime.worker.index.history(ENGINE)
    entries = history.continuations(range(1, history.end + 1))
    by_entry = {entry: token for token, of in entries.items() for entry in of}
    written = [by_entry[entry] for entry in range(1, history.end + 1)]
    # The last steps' tokens may come after the request has ended, or go beyond its end.
    assert len(written) > len(prompt) + 1
    common = min(len(written), len(prompt) + len(output))
    assert written[:common] == [*prompt, *output][:common]


def test_branches_that_are_not_the_first_are_accepted(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []

    def learn(tree: DraftTree, novelty: Novelty, tokens: Sequence[int]) -> None:
        first = [node.token for node in tree.nodes if node.parent == 0]
        taken.extend(token for token in first[1:] if token == tokens[0])

    monkeypatch.setattr(DraftTree, "learn", learn)
    monkeypatch.setattr("specplug_ngram.compiled_drafter.load_library", lambda: None)
    params = [SamplingParams(max_tokens=150, temperature=1.2, seed=n) for n in range(4)]
    outputs = {}
    for name, topk in (("NONE", {}), ("NGRAM", {"speculative_eagle_topk": 4})):
        with LLM(target, dtype="float64", speculative_algorithm=name, **topk) as llm:
            outputs[name] = [o.token_ids for o in llm.generate(_prompts()[:4], params)]
    assert outputs["NGRAM"] == outputs["NONE"]
    assert taken
