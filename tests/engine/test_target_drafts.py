"""The target drafts with its own layers and over a part of its cache, and no token changes.

``examples/early_exit`` is the algorithm that uses the contract; the others here misuse it.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_targets import DEEPSEEK_V3, TINY_SHAPE, VOCAB_SIZE
from torch import Tensor

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    HostCapabilities,
    PluginError,
    Runtime,
    SamplingParams,
    SpecConfig,
    TargetDrafter,
    TargetPlan,
    UsageError,
    hookimpl,
)
from specplug.kernels.attention_form import AttentionForm
from specplug.model.layer_range import page_shares
from specplug.speculative.runtime_base import RuntimeBase

EXAMPLE = Path(__file__).parents[2] / "examples/early_exit/specplug_early_exit.py"
EarlyExit: Any = runpy.run_path(str(EXAMPLE))["EarlyExit"]
PROMPTS = [[5, 80, 33, 2, 61], [7] * 30, [90, 14, 55], [*range(3, 40)]]
PARAMS = [
    SamplingParams(max_tokens=24),
    SamplingParams(max_tokens=17, temperature=0.8, seed=3),
    SamplingParams(max_tokens=24, temperature=1.0, seed=4, repetition_penalty=1.2),
    SamplingParams(max_tokens=9),
]
Tokens = list[tuple[int, ...]]


def tokens_of(llm: LLM) -> Tokens:
    found = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    llm.check_pool()
    return found


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> Tokens:
    with LLM(tiny_model, dtype="float64") as llm:
        return tokens_of(llm)


# Early exit: some of the layers, over all that is committed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("page_size", "chunk", "slots", "mixed"),
    [(1, None, None, False), (16, 8, None, True), (3, 5, None, False), (1, None, 64, False)],
)
def test_early_exit_gives_the_tokens_of_none(
    tiny_model: Path,
    expected: Tokens,
    overlap: bool,
    page_size: int,
    chunk: int | None,
    slots: int | None,
    mixed: bool,
) -> None:
    """A pool of few slots retracts requests."""
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=EarlyExit(1),
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_mixed_chunk=mixed,
        max_running_requests=3,
        **({"max_total_tokens": slots} if slots else {}),
    ) as llm:
        assert tokens_of(llm) == expected
        assert bool(llm.stats()["retractions"]) is (slots is not None)
        assert llm.stats()["drafted"] > 0


def test_all_layers_draft_what_the_target_takes(tiny_model: Path) -> None:
    with LLM(tiny_model, dtype="float64", speculative_algorithm=EarlyExit(2)) as llm:
        llm.generate(PROMPTS[:3], SamplingParams(max_tokens=25))
        assert llm.stats()["mean_accept_length"] == 4


def test_early_exit_between_instances_gives_the_tokens_of_none(
    tiny_model: Path, expected: Tokens
) -> None:
    with LLM(
        tiny_model, dtype="float64", speculative_algorithm=EarlyExit(1), disaggregation="both"
    ) as llm:
        assert tokens_of(llm) == expected


KINDS: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "experts": (
        "Qwen3MoeConfig",
        {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
        (),
    ),
    "sliding windows": ("MistralConfig", {"sliding_window": 5}, ()),
    "latent attention": ("DeepseekV3Config", DEEPSEEK_V3, ("head_dim",)),
    "softcaps, windows, scaled embeddings": (
        "Gemma2Config",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "query_pre_attn_scalar": 10,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 5.0,
        },
        (),
    ),
    "sinks": (
        "GptOssConfig",
        {
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
        (),
    ),
    "learned positions": ("GPT2Config", {}, ("num_key_value_heads", "head_dim")),
    "scaled rotary": (
        "LlamaConfig",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
            "max_position_embeddings": 40,
        },
        (),
    ),
}


def build(build_model: Callable[..., Path], kind: str) -> Path:
    import transformers

    name, changes, without = KINDS[kind]
    shape = {**TINY_SHAPE, "num_hidden_layers": 4, "initializer_range": 0.3, **changes}
    config = {key: value for key, value in shape.items() if key not in without}
    return build_model(getattr(transformers, name)(**config), seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_targets_of_many_kinds_draft(build_model: Callable[..., Path], kind: str) -> None:
    """All layers of them give the drafts that the target takes, three of them the same tokens."""
    folder, params = build(build_model, kind), SamplingParams(max_tokens=21)
    found = []
    for algorithm in ("NONE", EarlyExit(3), EarlyExit(4)):
        with LLM(folder, dtype="float64", speculative_algorithm=algorithm) as llm:
            found.append([output.token_ids for output in llm.generate(PROMPTS, params)])
            llm.check_pool()
            stats = llm.stats()
    assert found[0] == found[1] == found[2]
    assert stats["mean_accept_length"] == 4


def test_layers_that_need_more_than_hidden_states_are_refused(
    build_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-2 adds positions to what its first layer is given: later layers do not run alone."""

    @hookimpl
    def create_worker(self: Any, runtime: Runtime) -> Any:
        return runtime.target_layers(2, 4)

    folder = build(build_model, "learned positions")
    monkeypatch.setattr(EarlyExit, "create_worker", create_worker)
    wanted = "layers 2 to 3 of GPT2LMHeadModel do not run by themselves for drafts"
    with pytest.raises(UsageError, match=wanted):
        LLM(folder, dtype="float64", speculative_algorithm=EarlyExit())


@pytest.mark.parametrize(("first", "last"), [(0, 3), (1, 1), (-1, 2), (2, 1)])
def test_layers_that_are_not_there_are_refused(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch, first: int, last: int
) -> None:
    @hookimpl
    def create_worker(self: Any, runtime: Runtime) -> Any:
        return runtime.target_layers(first, last)

    monkeypatch.setattr(EarlyExit, "create_worker", create_worker)
    with pytest.raises(UsageError, match="expected 0 <= first < last <= 2"):
        LLM(tiny_model, dtype="float64", speculative_algorithm=EarlyExit())


# What misuses it


class Misuse:
    """Drafts of nonsense, after target passes that would write where they must not.

    Args:
        misuse: makes the passes, in each hook of a step.
    """

    def __init__(self, misuse: Callable[[Misuse, Runtime, Batch], None]) -> None:
        self._misuse = misuse
        self.kept: list[Any] = []
        self.layers: Any = None

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="MISUSE",
            summary="Writes where it must not",
            api_version=1,
            capabilities=Capabilities(target_drafts=True),
            defaults=Defaults(num_steps=3, num_draft_tokens=4),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Misuse:
        self.layers = runtime.target_layers(0, runtime.num_layers)
        return self

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        self._misuse(self, runtime, batch)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        self._misuse(self, runtime, batch)
        root = draft_input.bonus_tokens.unsqueeze(1)
        return Draft.chain(torch.cat((root, (root + 1 + torch.arange(3)) % VOCAB_SIZE), 1))

    def run(self, runtime: Runtime, plan: Any) -> None:
        """Run all layers over nonsense."""
        rows = len(plan.positions)
        self.layers(torch.randn(rows, runtime.hidden_size, dtype=runtime.dtype), plan)


def low_starts(own: Misuse, runtime: Runtime, batch: Batch) -> None:
    for view in ({}, {"window": 4, "sinks": 1}):
        starts = (batch.seq_lens - 5).clamp(min=0)
        own.run(runtime, runtime.plan_target(batch, starts, 4, **view))


def kept_plans(own: Misuse, runtime: Runtime, batch: Batch) -> None:
    """Of earlier steps, whose slots are committed now."""
    for plan in own.kept:
        own.run(runtime, plan)
    made = [runtime.plan_target(batch, batch.seq_lens, 4, **v) for v in ({}, {"window": 4})]
    own.kept = [*own.kept[-4:], *made]


def written_lengths(own: Misuse, runtime: Runtime, batch: Batch) -> None:
    plan = runtime.plan_target(batch, batch.seq_lens, 4, window=6)
    batch.seq_lens.fill_(1)
    own.run(runtime, plan)
    own.run(runtime, runtime.plan_target(batch, batch.seq_lens, 4))


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("misuse", [low_starts, kept_plans, written_lengths])
def test_committed_keys_stay_whatever_a_plugin_plans(
    tiny_model: Path, expected: Tokens, misuse: Any, page_size: int
) -> None:
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=Misuse(misuse),
        chunked_prefill_size=8,
        page_size=page_size,
        max_running_requests=3,
    ) as llm:
        assert tokens_of(llm) == expected
        assert tokens_of(llm) == expected  # from the prefix cache


def refused(call: Callable[[Runtime, Batch], object]) -> Misuse:
    def misuse(own: Misuse, runtime: Runtime, batch: Batch) -> None:
        if not batch.is_prefill:
            call(runtime, batch)

    return Misuse(misuse)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda r, b: r.plan_target(b, b.seq_lens, 5), "width 5 at offset 0"),
        (lambda r, b: r.plan_target(b, b.seq_lens, 2, offset=-1), "width 2 at offset -1"),
        (lambda r, b: r.plan_target(b, b.seq_lens, 1, sinks=2), "without a window"),
        (lambda r, b: r.plan_target(b, b.seq_lens, 1, window=-1), "window -1"),
        (
            lambda r, b: r.plan_target(b, b.seq_lens, 1, window=1, pages=b.seq_lens),
            r"pages .*; expected \[\d, pages\] of torch.int64",
        ),
        (lambda r, b: r.plan_target(b, b.seq_lens, 2).next().next(), "next.*expected at most 4"),
        (
            lambda r, b: r.worker.layers(
                torch.zeros(b.size, r.hidden_size), r.plan_attention(b, b.seq_lens, 1)
            ),
            "expected what plan_target",
        ),
        (lambda r, b: r.target_layers(0, 1), "called after create_worker"),
        (lambda r, b: r.target_attention(0, 1), "called after create_worker"),
    ],
)
def test_what_cannot_be_planned_is_refused(
    tiny_model: Path, call: Callable[[Runtime, Batch], object], told: str
) -> None:
    with (
        LLM(tiny_model, dtype="float64", speculative_algorithm=refused(call)) as llm,
        pytest.raises(PluginError, match=told),
    ):
        llm.generate(PROMPTS[:1], SamplingParams(max_tokens=4))


# The part of a context


class SeesPart(EarlyExit):  # type: ignore[misc]
    """Drafts with all layers over a view of what is committed."""

    def __init__(self, **view: Any) -> None:
        super().__init__()
        self.view = view

    @hookimpl
    def create_worker(self, runtime: Runtime) -> TargetDrafter:
        view = self.view

        class Drafter(TargetDrafter):
            def plan(self, batch: Batch, *state: Tensor) -> TargetPlan:
                return runtime.plan_target(batch, batch.seq_lens, 1, **view)

        return Drafter(runtime)


@pytest.mark.parametrize("topk", [1, 3])
def test_what_is_left_out_is_not_seen(tiny_model: Path, topk: int) -> None:
    """A view of everything drafts what the target takes, a view of nothing does not."""
    lengths = []
    for window in (96, 0):
        part = SeesPart(window=window, sinks=1 if window else 0)
        with LLM(
            tiny_model,
            dtype="float64",
            speculative_algorithm=part,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=4 if topk == 1 else 22,
        ) as llm:
            llm.generate(PROMPTS, SamplingParams(max_tokens=25))
            lengths.append(llm.stats()["mean_accept_length"])
    assert lengths[0] > 3.9  # the last step has fewer to give
    assert lengths[1] < 2.5


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("page_size", [1, 4])
def test_page_shares_are_those_of_attention(
    window: int | None, softcap: float | None, page_size: int
) -> None:
    torch.manual_seed(0)
    q, keys = torch.randn(3, 4, 8), torch.randn(3, 20, 2, 8)
    last = torch.tensor([0, 11, 19])
    found = page_shares(q, keys, last, AttentionForm(0.5, window, softcap), page_size)
    for b, end in enumerate(last.tolist()):
        first = 0 if window is None else max(0, end - window + 1)
        wanted = torch.zeros(20)
        for head in range(4):
            scores = keys[b, first : end + 1, head // 2] @ q[b, head] * 0.5
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            wanted[first : end + 1] += scores.softmax(0) / 4
        pages = wanted.view(-1, page_size).sum(1)
        torch.testing.assert_close(found[b], pages, atol=1e-6, rtol=1e-5)


# Hosts


def test_a_host_without_target_drafts_refuses_by_name() -> None:
    host = HostCapabilities(name="Small 1.0", draft_models=True)
    info = EarlyExit().describe()
    wanted = "EARLY_EXIT drafts with the target's own layers, and Small 1.0 runs them for its own"
    assert [line.startswith(wanted) for line in host.obstacles(info)] == [True]
    runtime = RuntimeBase(host, SpecConfig(algorithm="EARLY_EXIT"))
    calls: Sequence[Callable[[], Any]] = [
        lambda: runtime.target_layers(0, 1),
        lambda: runtime.final_norm(torch.zeros(1, 1)),
        lambda: runtime.plan_target(None, torch.zeros(1), 1, window=4),
        lambda: runtime.target_attention(0, 16),
    ]
    for call in calls:
        with pytest.raises(UsageError, match=r"Small 1\.0 runs the target's layers for its own"):
            call()
