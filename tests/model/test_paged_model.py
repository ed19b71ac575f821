"""A ``PagedModel`` gives a causal LM's own logits, over the plans of any host."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from drafted_tokens import CONTEXT, HIDDEN, VOCAB, save_llama, save_random
from torch import Tensor

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CheckpointError,
    CommittedOutput,
    Draft,
    DraftInput,
    KVCache,
    PagedModel,
    PluginError,
    Runtime,
    SamplingParams,
    hookimpl,
)

PROMPT = [5, 17, 33, 60, 2, 9, 41, 7]
PARAMS = SamplingParams(max_tokens=12)


class ForeignCache(KVCache):
    """A handle of a host whose pools are laid out in a way of its own."""

    def __init__(self, inner: KVCache) -> None:
        self.inner = inner


@attrs.frozen(eq=False)
class ForeignPlan:
    """An ``AttentionPlan`` and nothing else."""

    inner: Any

    @property
    def positions(self) -> Tensor:
        positions: Tensor = self.inner.positions
        return positions

    def attend(
        self,
        cache: ForeignCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
    ) -> Tensor:
        out: Tensor = self.inner.attend(cache.inner, layer, q, k, v, scale, window)
        return out


class ForeignRuntime:
    """A runtime that has such caches alone."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def allocate_kv(self, *shape: int) -> ForeignCache:
        return ForeignCache(self._runtime.allocate_kv(*shape))


class Reader:
    """An algorithm that drafts nothing and reads all tokens, with the logits of each one."""

    def __init__(self, *, foreign: bool = False) -> None:
        self.foreign = foreign
        self.logits: dict[int, Tensor] = {}

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="READER",
            summary="Reads all",
            api_version=1,
            capabilities=Capabilities(draft_model=True),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> PagedModel:
        path = runtime.config.draft_model_path
        assert path is not None
        given: Any = ForeignRuntime(runtime) if self.foreign else runtime
        return PagedModel(given, path)

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        plan: Any = batch.attention
        if not batch.is_prefill:
            plan = runtime.plan_attention(batch, batch.seq_lens, 1)
        positions = plan.positions
        last = torch.arange(len(positions) - 1, -1, -2)
        plan = ForeignPlan(plan) if self.foreign else plan
        logits = runtime.worker.logits(target_output.own_tokens, plan)
        some = runtime.worker.logits(target_output.own_tokens, plan, last)
        torch.testing.assert_close(some, logits[last])
        self.logits.update(zip(positions.tolist(), logits.clone(), strict=True))
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, draft_input: DraftInput) -> Draft:
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=2)


def _gpt2(context: int = CONTEXT) -> Any:
    from transformers import GPT2Config

    return GPT2Config(
        vocab_size=VOCAB, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=context,
        bos_token_id=None, eos_token_id=None,
    )  # fmt: skip


def _gemma2() -> Any:
    from transformers import Gemma2Config

    return Gemma2Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, sliding_window=5,
        max_position_embeddings=CONTEXT, attn_logit_softcapping=20.0,
    )  # fmt: skip


def _llama(**changes: Any) -> Callable[[], Any]:
    from transformers import LlamaConfig

    return lambda: LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=48, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2,
        **{"max_position_embeddings": CONTEXT, **changes},
    )  # fmt: skip


def read(target: Path, draft: Path, reader: Reader, **settings: Any) -> list[int]:
    """All tokens of a request whose drafts ``reader`` makes."""
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm=reader,
        speculative_draft_model_path=draft,
        **settings,
    ) as llm:
        return [*PROMPT, *llm.generate([PROMPT], PARAMS)[0].token_ids]


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("chunk", [None, 3])
@pytest.mark.parametrize("make", [_llama(), _gpt2, _gemma2], ids=["llama", "gpt2", "gemma2"])
@torch.inference_mode()
def test_logits_are_the_models_own(
    target: Path, tmp_path: Path, make: Callable[[], Any], chunk: int | None, foreign: bool
) -> None:
    from transformers import AutoModelForCausalLM

    if foreign and make is _gemma2:
        pytest.skip("its scores have a softcap: refused")
    draft, reader = save_random(make(), tmp_path), Reader(foreign=foreign)
    tokens = read(target, draft, reader, chunked_prefill_size=chunk, page_size=2)
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float64).eval()
    own = model(torch.tensor([tokens]), use_cache=False).logits[0]
    assert len(reader.logits) >= len(tokens) - 1
    for position in range(len(tokens) - 1):
        torch.testing.assert_close(reader.logits[position], own[position], rtol=1e-5, atol=1e-6)


def test_softcap_over_foreign_plans_is_refused(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="its attention has a softcap"):
        read(target, save_random(_gemma2(), tmp_path), Reader(foreign=True))


def test_positions_after_its_context_are_its_last_one(target: Path, tmp_path: Path) -> None:
    """It has a row of weights for each position, and no more."""
    reader = Reader()
    tokens = read(target, save_random(_gpt2(9), tmp_path), reader)
    assert len(tokens) > 12
    assert len(reader.logits) >= len(tokens) - 1


def test_model_that_cannot_be_loaded_is_named(target: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=str(tmp_path)):
        read(target, tmp_path, Reader())


def test_cache_after_create_worker_is_refused(target: Path, tmp_path: Path) -> None:
    draft = save_random(_llama()(), tmp_path)
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm=Reader(),
        speculative_draft_model_path=draft,
    ) as llm, pytest.raises(PluginError, match="allocate_kv"):  # fmt: skip
        PagedModel(llm.engine.runtime, draft)


def test_weights_are_freed_by_close(target: Path, tmp_path: Path) -> None:
    """Nothing waits for the garbage collector."""
    draft = save_random(_llama()(), tmp_path)
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=Reader(),
        speculative_draft_model_path=draft,
    )
    weight = weakref.ref(llm.engine.runtime.worker.model.lm_head.weight)
    threads = torch.get_num_threads()
    gc.disable()
    try:
        llm.close()
        assert weight() is None
    finally:
        gc.enable()
    assert torch.get_num_threads() == threads
