"""A padded pass gives each row what the pass itself gives it, and its second one is recorded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from runs_again import RunsAgain
from torch import Tensor

from specplug import LLM, SamplingParams
from specplug.engine import warm_up as warm_up_steps
from specplug.engine.warm_up import WarmUp
from specplug.kernels import paged_attention_kernels as kernels
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.paged_attention_kernels import PagedAttention
from specplug.model import model_runner
from specplug.model.model_runner import PassPart
from specplug.model.padded_rows import GivenParts, size_of
from specplug.model.pass_form import PartSize, PassForm, PassSize
from specplug.speculative.buckets import row_buckets
from specplug.speculative.draft import Draft, ancestor_mask
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import JoinedPlan, PagedKVCache, PagedPlan, RequestSlots
from specplug.speculative.planned_drafts import warm_drafters

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
needs_cuda = pytest.mark.skipif(not ON_GPU, reason="graphs are CUDA's")

PassOutput = tuple[Tensor, dict[str, Tensor], dict[Any, Tensor]]


# One layer of attention: the bits of a row


class Layer:
    """A pass of one layer of attention over requests of its own. Slots of nobody hold NaN."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.rows = torch.randn(3, 64, 2, 16, generator=generator).to(DEVICE, torch.float16)
        table = torch.zeros(8, 112, dtype=torch.int64)
        table[1:] = 1 + torch.randperm(7 * 112, generator=generator).view(7, 112)
        self.slots = RequestSlots(
            slots=table.to(DEVICE), last_position=111, kernels=PagedAttention(DEVICE, 1 << 20)
        )
        self.pool = torch.full((2, 1 + 7 * 112, 1, 16), float("nan"))
        for request, committed in COMMITTED.items():
            own = torch.randn(2, committed, 1, 16, generator=generator)
            self.pool[:, table[request, :committed]] = own
        self.pool = self.pool.to(DEVICE, torch.float16)
        self.written: Tensor | None = None

    def forward(
        self, tokens: Tensor, plan: PagedPlan | JoinedPlan, logits_rows: Tensor | int, *_: Any
    ) -> PassOutput:
        """Attend: logits are the wanted rows of the result, which is captured whole."""
        pool = self.written = self.pool.clone()
        cache = PagedKVCache([pool[0]], [pool[1]])
        q, k, v = self.rows[:, tokens]
        out = plan.attend(cache, 0, q, k[:, :1], v[:, :1], AttentionForm(q.shape[2] ** -0.5))
        wanted = out if isinstance(logits_rows, int) else out[logits_rows]
        return wanted, {"all": out}, {}

    def part(
        self, requests: tuple[int, ...], widths: tuple[int, ...], how: str = "chunks"
    ) -> PassPart:
        """Make a part of a pass: chunks, or the nodes of chains or trees."""
        starts = torch.tensor([COMMITTED[r] for r in requests], device=DEVICE)
        width, mask, positions = max(widths), None, None
        if how == "trees":
            parents = torch.tensor([[-1, *((i - 1) // 2 for i in range(1, width))]])
            mask = ancestor_mask(parents.expand(len(requests), -1).to(DEVICE), width)
            positions = starts.unsqueeze(1) + mask.sum(-1) - 1
        plan = PagedPlan(
            requests=self.slots,
            req_indices=torch.tensor(requests, device=DEVICE),
            starts=starts,
            width=width,
            length=112,
            mask=mask,
            given_positions=positions,
            padding=Padding.of(widths, width, DEVICE),
        )
        if how == "chunks":
            tokens = torch.arange(sum(widths), device=DEVICE) % 61 + len(requests)
            return PassPart(tokens, plan, torch.tensor(widths, device=DEVICE).cumsum(0) - 1)
        tokens = torch.arange(len(requests) * width, device=DEVICE).view(-1, width) % 61
        draft = Draft(tokens=tokens + len(requests), parents=None, widths=widths, depth=width - 1)
        return PassPart(draft, plan)

    def expected(self, *parts: PassPart | None) -> list[PassOutput | None]:
        """What each part gets in a pass of its own."""
        found: list[PassOutput | None] = []
        for part in parts:
            if part is None:
                found.append(None)
                continue
            rows = 0 if part.last_rows is None else part.last_rows
            found.append(self.forward(part.tokens, part.plan, rows))
        return found

    def assert_left_alone(self, parts: tuple[PassPart | None, PassPart | None]) -> None:
        """Check that the last pass wrote to new slots of its parts' requests, and to slot 0."""
        if self.written is None:
            return  # it was replayed
        may_change = {0}
        for part in filter(None, parts):
            plan = part.plan
            for row, start, width in zip(plan.req_indices, plan.starts, plan.widths, strict=True):
                may_change |= set(self.slots.slots[row, start : start + width].tolist())
        before, after = self.pool.view(torch.int16), self.written.view(torch.int16)
        changed = (before != after).any(-1).any(-1).any(0).nonzero()[:, 0].tolist()
        assert set(changed) <= may_change


COMMITTED = {1: 0, 2: 45, 3: 70, 4: 33, 5: 16, 6: 1}


def form_of(*passes: tuple[PassPart | None, PassPart | None]) -> PassForm:
    form = PassForm.of([size_of(*parts, frozenset()) for parts in passes])
    assert form is not None
    return form


def padded_pass(
    forward: Callable[..., PassOutput], recorder: GraphRecorder, *, waits: bool = False
) -> GraphRunner:
    return GraphRunner(forward, GivenParts, recorder, warms_up=False, waits=waits)


def assert_same(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert torch.equal(one[0], other[0])
            assert torch.equal(one[1]["all"], other[1]["all"])


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts so short that a few keys make several of them."""
    monkeypatch.setattr(kernels, "BLOCK", 16)
    monkeypatch.setattr(kernels, "PART", 32)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # of numpy, in the interpreter
@pytest.mark.parametrize("case", ["chunks", "mixed", "ragged trees", "others' forms"])
def test_padded_rows_have_the_bits_of_the_pass(case: str) -> None:
    """Each pass follows a larger one of its form, whose rows must not be seen any more."""
    layer = Layer()
    passes: list[tuple[PassPart | None, PassPart | None]] = {
        "chunks": [
            (layer.part((2, 1), (37, 6)), None),
            (layer.part((3,), (35,)), None),
        ],
        "mixed": [
            (layer.part((2, 1), (7, 5)), layer.part((3, 4, 5), (1, 1, 1), "chains")),
            (layer.part((1,), (8,)), layer.part((6, 3), (2, 1), "chains")),
        ],
        "ragged trees": [
            (None, layer.part((3, 2, 4), (6, 2, 1), "trees")),
            (None, layer.part((5, 3), (1, 5), "trees")),
        ],
        "others' forms": [
            (layer.part((2,), (3,)), layer.part((3, 4), (4, 6), "trees")),
            (None, layer.part((6, 3), (2, 1), "chains")),
            (layer.part((1,), (2,)), None),
            (None, None),
        ],
    }[case]
    form = form_of(*passes)
    padded = padded_pass(layer.forward, GraphRecorder() if ON_GPU else RunsAgain())
    like = layer.part((1,), (1,)).plan
    for parts in passes * (3 if ON_GPU else 1):  # as it is, recorded, replayed
        layer.written = None
        found = padded(form, *parts, like)
        layer.assert_left_alone(parts)
        assert_same(found, layer.expected(*parts))
    assert padded.recorder.failure is None
    assert padded.num_recordings == 1


# When a form is recorded


def counts_of(waits: bool) -> list[tuple[int, int]]:
    def forward(tokens: Tensor, plan: Any, *_: Any) -> PassOutput:
        return tokens.unsqueeze(1), {}, {}

    recorder = RunsAgain()
    padded = padded_pass(forward, recorder, waits=waits)
    layer = Layer()
    counts = []
    for width in (9, 10, 11, 20, 12):
        part = layer.part((1,), (width,), "chains")
        found = padded(form_of((None, part)), None, part, part.plan)[1]
        assert found is not None
        assert torch.equal(found[0][:, 0], part.tokens)
        counts.append((recorder.recorded, recorder.replayed))
    assert padded.num_recordings == 1
    return counts


def test_form_is_recorded_when_it_comes_again() -> None:
    assert counts_of(waits=False) == [(0, 0), (1, 1), (1, 2), (1, 2), (1, 3)]


def test_form_of_ranks_is_replayed_one_pass_later() -> None:
    assert counts_of(waits=True) == [(0, 0), (1, 0), (1, 1), (1, 1), (1, 2)]


def test_failed_recording_ends_all_padding() -> None:
    padded = padded_pass(lambda tokens, *_: (tokens, {}, {}), RunsAgain("no memory"))
    part = Layer().part((1,), (9,), "chains")
    form = form_of((None, part))
    for _ in range(2):
        assert padded.takes(form)
        with warnings.catch_warnings(record=True) as told:
            found = padded(form, None, part, part.plan)[1]
        assert found is not None
        assert torch.equal(found[0], part.tokens)
    assert [str(each.message) for each in told] == ["cuda_graph is off: no memory"]
    assert padded.recorder.failure == "no memory"
    assert not padded.takes(form)


# In the engine


@pytest.mark.parametrize("algorithm", ["chains", "none"])
def test_padded_steps_give_the_same_tokens(
    algorithm: str, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    known = reference.tokens(["greedy"] * 7)
    drafts = scripted(known, right=0.7, ragged=True) if algorithm == "chains" else "NONE"
    recorder = RunsAgain()
    with LLM(
        tiny_model,
        device="cpu",
        dtype="float64",
        speculative_algorithm=drafts,
        enable_mixed_chunk=True,
        chunked_prefill_size=24,
        disable_radix_cache=True,
    ) as llm:
        runner = llm.engine.steps.runner
        runner.pad_passes(recorder)
        params = [
            attrs.evolve(each, return_hidden_states=True) for each in reference.params["greedy"]
        ]
        for _ in range(2):
            outputs = llm.generate(reference.prompts, params)
            assert [output.token_ids for output in outputs] == list(known.values())
        assert runner.padded_pass.num_recordings == recorder.recorded
        assert recorder.replayed > 0
        llm.check_pool()


def test_pass_of_equal_widths_takes_a_form_of_fewer_rows(
    tiny_model: Path, reference: Any, scripted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """7 requests of 9 nodes are padded to 8, 72 rows: their form has 64."""
    known = reference.tokens(["greedy"] * 7)
    recorder = RunsAgain()
    with LLM(
        tiny_model,
        device="cpu",
        dtype="float64",
        speculative_algorithm=scripted(known, right=0.7),
        speculative_num_steps=8,
        disable_radix_cache=True,
    ) as llm:
        runner = llm.engine.steps.runner
        runner.pad_passes(recorder)
        seen = []
        of_fewer, none = runner.forms.of_fewer_rows, lambda size, rows: None
        for is_dense, of_fewer_rows in (
            (lambda plan: False, none),  # their form is recorded
            (model_runner._is_dense, none),
            (model_runner._is_dense, of_fewer),
        ):
            monkeypatch.setattr(model_runner, "_is_dense", is_dense)
            runner.forms.of_fewer_rows = of_fewer_rows
            before = recorder.replayed
            outputs = llm.generate(reference.prompts, reference.params["greedy"])
            assert [output.token_ids for output in outputs] == list(known.values())
            seen.append(recorder.replayed - before)
        llm.check_pool()
    assert seen[1] < seen[2]


@pytest.mark.parametrize("budget", [8, 11])
@pytest.mark.parametrize("mixed", [False, True])
def test_padded_steps_of_a_budget_give_the_same_tokens(
    mixed: bool, budget: int, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """The forms of passes whose widths the device alone knows are replayed."""
    known = reference.tokens(["greedy"] * 7)
    recorder = RunsAgain()
    with LLM(
        tiny_model,
        device="cpu",
        dtype="float64",
        speculative_algorithm=scripted(known, right=0.7, ragged=True),
        verify_budget=budget,
        enable_mixed_chunk=mixed,
        chunked_prefill_size=24,
        disable_radix_cache=True,
    ) as llm:
        llm.engine.steps.runner.pad_passes(recorder)
        for _ in range(2):
            outputs = llm.generate(reference.prompts, reference.params["greedy"])
            assert [output.token_ids for output in outputs] == list(known.values())
        stats = llm.stats()
        llm.check_pool()
    assert recorder.replayed > 0
    assert stats["accepted"] > 1.1 * stats["verifications"], "drafts were not accepted"


@needs_cuda
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalized and sampled"])
def test_recorded_mixed_steps_give_the_same_tokens(
    kind: str, tree: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """In bfloat16, exactly: chunks, drafts of differing widths, both in a step, all twice."""
    settings: dict[str, Any] = {
        "device": "cuda",
        "dtype": "bfloat16",
        "enable_mixed_chunk": True,
        "chunked_prefill_size": 24,
        "disable_radix_cache": True,
    }
    prompts, params = reference.prompts, reference.params[kind]
    with LLM(tiny_model, **settings, disable_cuda_graph=True) as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    known = dict(zip(prompts, expected, strict=True))
    shape: dict[str, Any] = {"tree": tree, "right": 0.7, "tolerance": 0.5}
    # Without a ``verify`` of its own, so that what follows a pass is recorded too.
    unverifying = type("Unverifying", (scripted,), {"verify": None})
    algorithms = [
        kind(known, ragged=ragged, **shape)
        for kind in (scripted, unverifying)
        for ragged in (True, False)
    ]
    for algorithm in ["NONE", *algorithms]:
        with LLM(tiny_model, **settings, speculative_algorithm=algorithm) as llm:
            for _ in range(2):
                found = [output.token_ids for output in llm.generate(prompts, params)]
                assert found == expected
            assert llm.effective_config["cuda_graph"] == "on"
            assert llm.engine.steps.runner.padded_pass.num_recordings > 0


@needs_cuda
def test_warm_up_records_the_forms_of_prompts(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cuda", dtype="bfloat16", chunked_prefill_size=64) as llm:
        recorded = llm.engine.steps.runner.padded_pass.num_recordings
        assert recorded >= len(row_buckets(64))
        llm.generate([[7] * 50], SamplingParams(max_tokens=2))
        assert llm.engine.steps.runner.padded_pass.num_recordings == recorded


def test_passes_of_any_widths_are_replayed_after_a_warm_up(tiny_model: Path) -> None:
    """Each of their forms seldom comes: those of the warm-up stand in for it."""
    recorder, limits = RunsAgain(), {"max_running_requests": 8, "chunked_prefill_size": 128}
    pattern = [[7 + i, 3, 9 + i, 4] * 9 for i in range(8)]
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(
        tiny_model, device="cpu", dtype="float64", speculative_algorithm="NGRAM", **limits
    ) as llm:
        expected = [output.token_ids for output in llm.generate(pattern, params)]
    with LLM(
        tiny_model, device="cpu", dtype="float64", speculative_algorithm="NGRAM", **limits
    ) as llm:
        core, runner = llm.engine, llm.engine.steps.runner
        runner.pad_passes(recorder)
        drafters = warm_drafters(core.runtime, plans=False, has_draft_cache=False)
        warm_up = WarmUp(
            core.steps, core.hooks, core.scheduler.config, decodes=True, drafters=drafters,
            ranks=None,
        )  # fmt: skip
        warm_up.run(lambda done, of: None)
        assert runner.forms.stands_in
        recorded = recorder.recorded
        outputs = llm.generate(pattern, params)
        assert [output.token_ids for output in outputs] == expected
        assert recorder.replayed > 8
        llm.generate([each[: 5 + 3 * i] for i, each in enumerate(pattern)], params)
        llm.check_pool()
        assert recorder.recorded == recorded


def test_warm_up_runs_as_many_nodes_as_products_are_padded_to(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(warm_up_steps, "MANY_ROWS", 16)
    monkeypatch.setattr(warm_up_steps, "PRODUCT_STEP", 4)
    limits = {"max_running_requests": 8, "chunked_prefill_size": 16}
    with LLM(
        tiny_model, device="cpu", dtype="float64", speculative_algorithm="NGRAM", **limits
    ) as llm:
        core = llm.engine
        drafters = warm_drafters(core.runtime, plans=False, has_draft_cache=False)
        warm_up = WarmUp(
            core.steps, core.hooks, core.scheduler.config, decodes=True, drafters=drafters,
            ranks=None,
        )  # fmt: skip
        most = 8 * drafters[0].num_draft_tokens
        assert not _rows_of_nodes(warm_up) >= set(range(20, most, 4)), "nothing is padded"
        core.steps.runner.pad_passes(RunsAgain())
        found = _rows_of_nodes(warm_up)
        assert found >= set(range(20, most, 4))
        assert found >= {rows for rows in row_buckets(most - 1) if rows > 8}


@pytest.mark.parametrize(
    ("running", "widths"),
    [
        *((96, each) for each in [(60, 41, 9), (33,) * 11, (1, 70), (100,) * 7, (90,) * 4]),
        *((256, each) for each in [(33,) * 11, (50,) * 15, (60,) * 16, (45,) * 20]),
    ],
    ids=str,
)
def test_prompts_together_have_a_recorded_form_of_few_places(
    running: int, widths: tuple[int, ...], tiny_model: Path
) -> None:
    limits = {"max_running_requests": running, "chunked_prefill_size": 1024}
    with LLM(tiny_model, device="cpu", dtype="float64", **limits) as llm:
        core = llm.engine
        core.steps.runner.pad_passes(RunsAgain())
        warm_up = WarmUp(
            core.steps, core.hooks, core.scheduler.config, decodes=True, drafters=[], ranks=None
        )
        steps = [step.prefill for step in warm_up.steps() if step.prefill is not None]
    recorded = [form_of_chunks([chunk.end for chunk in step.chunks])[1] for step in steps]
    size, own = form_of_chunks(widths)
    places = [
        form.tiled
        for form in recorded
        if form.holds(own, [size]) and form.rows <= max(64, 1.5 * own.rows)
    ]
    assert min(places) <= own.tiled + 8192


def form_of_chunks(widths: Sequence[int]) -> tuple[PassSize, PassForm]:
    """Return the size of a prefill of chunks of these widths, and its form."""
    size = PassSize(prefill=PartSize(len(widths), sum(widths), max(widths)))
    form = PassForm.of([size])
    assert form is not None
    return size, form


def _rows_of_nodes(warm_up: WarmUp) -> set[int]:
    """Return the rows of the decode steps of a warm-up."""
    return {sum(step.decode.max_draft_nodes) for step in warm_up.steps() if step.decode is not None}
