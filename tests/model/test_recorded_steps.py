"""Steps of which all but the plugin's own part is recorded give what they give unrecorded.

On a GPU with its graphs; else with recordings of operations, which are replayed as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from recorded_operations import Operations, record_operations
from runs_again import RunsAgain
from shallow_target import ShallowTarget
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    StepReport,
    hookimpl,
    verify_tree,
)
from specplug.engine.engine_runtime import EngineRuntime
from specplug.engine.step import StepRunner
from specplug.errors import PluginError
from specplug.model import model_runner, pass_form
from specplug.model.model_runner import PassPart
from specplug.model.padded_rows import GivenParts, size_of
from specplug.model.pass_form import PassForm
from specplug.speculative import graph_recorder
from specplug.speculative.buckets import batch_bucket
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.paged_plan import PagedPlan, RequestSlots
from specplug.speculative.pass_arguments import BatchPadding, KeptTensors
from specplug.speculative.verify import compact

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
KINDS = ["greedy", "seeded", "truncated", "penalized", "penalized and sampled"]
Start = Callable[..., LLM]


@pytest.fixture(autouse=True)
def record(monkeypatch: pytest.MonkeyPatch) -> None:
    """Record on the CPU too."""
    if not ON_GPU:
        monkeypatch.setattr(graph_recorder, "record_graph", record_operations)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)


@pytest.fixture
def start(tiny_model: Path) -> Iterator[Start]:
    """``start(algorithm)``: an engine in float64 that records its passes, on the CPU too."""
    opened: list[LLM] = []

    def open_engine(algorithm: Any = "NONE", *, pads: bool = False, **settings: Any) -> LLM:
        llm = LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm, **settings)
        if not ON_GPU:
            llm.engine.steps.runner.record_graphs()
        for each in llm.engine.steps.runner.verify_passes.values():
            assert isinstance(each.pad, BatchPadding)
            each.pad.pads = pads  # as the kernels of half precision do
        opened.append(llm)
        return llm

    yield open_engine
    for llm in opened:
        llm.close()


@pytest.fixture
def followed(monkeypatch: pytest.MonkeyPatch) -> Counter[bool]:
    """How many steps were followed by a replay or a recording, and how many ran on unrecorded."""
    counts: Counter[bool] = Counter()
    run_epilogue = GraphRunner.run_epilogue

    def counted(self: GraphRunner, key: Any, epilogue: Any) -> Any:
        found = run_epilogue(self, key, epilogue)
        counts[found is not None] += 1
        return found

    monkeypatch.setattr(GraphRunner, "run_epilogue", counted)
    return counts


@pytest.fixture
def unverifying(scripted: Any) -> Any:
    """The scripted algorithm without a verify hook of its own."""

    class Unverifying(scripted):  # type: ignore[misc]
        verify = None

    return Unverifying


class Launches(TorchDispatchMode):
    """Names what is computed in its block outside of replays; views and new memory cost nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        returned = [each.alias_info for each in func._schema.returns]
        is_view = any(alias is not None and not alias.is_write for alias in returned)
        if not (is_view or Operations.replaying or func in MEMORY):
            self.found.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


MEMORY = torch.ops.aten.empty.memory_format, torch.ops.aten.detach_.default


def _silent(params: Any) -> list[SamplingParams]:
    """The settings without what is wanted beside tokens."""
    return [attrs.evolve(each, logprobs=None) for each in params]


@pytest.mark.parametrize("shape", ["plain", "padded", "chain", "tree"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_give_the_same_tokens(
    kind: str, shape: str, start: Start, reference: Any, unverifying: Any, followed: Counter[bool]
) -> None:
    known, algorithm = reference.tokens([kind] * 7), "NONE"
    if shape in ("chain", "tree"):
        algorithm = unverifying(known, tree=shape == "tree", right=0.7)
    llm = start(algorithm, pads=shape == "padded", page_size=3)
    outputs = llm.generate(reference.prompts, _silent(reference.params[kind]))
    assert [output.token_ids for output in outputs] == list(known.values())
    assert followed[True] > 3
    assert not followed[False]
    llm.check_pool()


@pytest.mark.parametrize("budget", [None, 9], ids=["all", "a budget"])
@pytest.mark.parametrize("kind", KINDS)
def test_recorded_steps_of_any_widths_give_the_same_tokens(
    kind: str,
    budget: int | None,
    start: Start,
    reference: Any,
    unverifying: Any,
    followed: Counter[bool],
) -> None:
    known = reference.tokens([kind] * 7)
    llm = start(
        unverifying(known, right=0.7, ragged=True),
        page_size=3,
        verify_budget=budget,
        max_running_requests=5,
    )
    _record_forms(llm)
    for _ in range(2):
        outputs = llm.generate(reference.prompts, _silent(reference.params[kind]))
        assert [output.token_ids for output in outputs] == list(known.values())
        llm.check_pool()
    assert llm.engine.steps.runner.padded_pass.num_recordings
    assert followed[True] > 2 * followed[False]


@pytest.mark.parametrize("is_large", [True, False], ids=["large", "small"])
def test_many_nodes_of_differing_widths_are_not_filled_up(
    is_large: bool,
    start: Start,
    reference: Any,
    unverifying: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A step of more rows than any form replays equal widths only where that is not many more, or
    launching each kernel takes longer, as with a small target."""
    if is_large:
        monkeypatch.setattr(model_runner, "_LAUNCHED", 0.0)
    monkeypatch.setattr(pass_form, "MOST_ROWS", 8)
    monkeypatch.setattr(model_runner, "MANY_ROWS", 8)
    known = reference.tokens(["greedy"] * 7)
    llm = start(unverifying(known, right=0.7, ragged=True), max_running_requests=5)
    _record_forms(llm)
    runner = llm.engine.steps.runner
    run_nodes, forward = type(runner)._run_nodes, runner.target.forward
    ran: list[int] = []
    seen: Counter[tuple[bool, bool]] = Counter()

    def noted(self: Any, decode: PassPart, points: Any) -> Any:
        ran.clear()
        found = run_nodes(self, decode, points)
        draft, rows = decode.draft, len(decode.tokens)
        assert draft is not None
        if draft.padding is not None and rows > 8:
            has_more = batch_bucket(len(draft.tokens)) * draft.width > 1.25 * rows
            seen[has_more, ran == [rows]] += 1
        return found

    def counted(tokens: Tensor, *more: Any) -> Any:
        ran.append(len(tokens))
        return forward(tokens, *more)

    monkeypatch.setattr(type(runner), "_run_nodes", noted)
    monkeypatch.setattr(runner.target, "forward", counted)
    outputs = llm.generate(reference.prompts, reference.params["greedy"])
    assert [output.token_ids for output in outputs] == list(known.values())
    assert seen[True, is_large] > 2, "no step of many more rows"
    assert not seen[True, not is_large]
    llm.check_pool()


def _record_forms(llm: LLM) -> None:
    """Record each form of a pass that comes again. It runs again: torch attends by lengths that the
    host knows."""
    runner = llm.engine.steps.runner
    runner.pad_passes(RunsAgain())
    runner.forms.stands_in = False


def test_recorded_steps_count_the_scores_of_nodes(
    reference: Any,
    unverifying: Any,
    start: Start,
    monkeypatch: pytest.MonkeyPatch,
    followed: Counter[bool],
) -> None:
    """As those that are not recorded do; what is large stands in buffers of all forms."""

    class Scored(unverifying):  # type: ignore[misc]
        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            draft: Draft = super().propose(runtime, batch, draft_input)
            scores = -torch.arange(draft.tokens.numel(), dtype=torch.float32, device=DEVICE) / 40
            scores = scores.view(draft.tokens.shape)
            scores[:, 0] = 0
            return Draft.chain(draft.tokens, draft.widths, scores=scores)

    monkeypatch.setattr(model_runner, "_LARGE", 0)
    known = reference.tokens(["greedy"] * 7)
    found = []
    for records in (True, False):
        reports: list[StepReport] = []

        class Reports:
            @hookimpl
            def on_step(self, report: StepReport, reports: Any = reports) -> None:
                reports.append(report)

        llm = start(Scored(known, right=0.7, ragged=True), extensions=[Reports()])
        if records:
            _record_forms(llm)
        outputs = llm.generate(reference.prompts, _silent(reference.params["greedy"]))
        assert [output.token_ids for output in outputs] == list(known.values())
        chances = [
            [own[:width].tolist() for own, width in zip(r.chances, r.widths, strict=True)]
            for r in reports
            if r.chances is not None
        ]
        found.append((chances, [(report.widths, report.accept_lens) for report in reports]))
        assert llm.engine.steps.runner.padded_pass is None or followed[True] > 4
    assert found[0] == found[1]


def test_what_a_plugin_does_to_a_container_ends_with_the_step(
    start: Start, reference: Any, scripted: Any
) -> None:
    """The same fields are there in the next step, whatever a hook took away or put in."""

    class Careless(scripted):  # type: ignore[misc]
        verify = None

        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
        ) -> DraftInput:
            assert "own" not in target_output.per_node
            assert target_output.accept_lens.shape == (batch.size,)
            made: DraftInput = super().build_draft_input(runtime, batch, target_output)
            assert isinstance(target_output.per_node, dict)
            target_output.per_node.clear()
            target_output.per_node["own"] = target_output.next_tokens
            target_output.next_tokens = None  # type: ignore[assignment]
            batch.requests = ()
            target_output.accept_lens.unsqueeze_(0)
            return made

    known = reference.tokens(["greedy"] * 7)
    llm = start(Careless(known, right=0.7))
    outputs = llm.generate(reference.prompts, _silent(reference.params["greedy"]))
    assert [output.token_ids for output in outputs] == list(known.values())


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_settings_that_change_between_steps_each_hold(
    tree: bool, start: Start, reference: Any, unverifying: Any
) -> None:
    """Requests of every kind come and go, with log-probabilities and without."""
    kinds = [KINDS[i % len(KINDS)] for i in range(7)]
    known = reference.tokens(kinds)
    params = [reference.params[kind][i] for i, kind in enumerate(kinds)]
    for i in (0, 2, 3, 5):
        params[i] = attrs.evolve(params[i], logprobs=None)
    llm = start(unverifying(known, tree=tree, right=0.7), max_running_requests=3)
    outputs = llm.generate(reference.prompts, params)
    assert [output.token_ids for output in outputs] == list(known.values())


def test_a_recorded_step_follows_settings_that_grow(start: Start, tiny_model: Path) -> None:
    """The table of tokens that must not end an output is made anew for a request with more."""
    asked = [
        SamplingParams(max_tokens=8, min_tokens=8, stop_token_ids=list(range(0, count, 2)))
        for count in (4, 90, 4)
    ]
    prompt = [49, 5, 33]
    recorded, plain = start(), LLM(tiny_model, dtype="float64", disable_cuda_graph=True)
    with plain:
        for params in asked:
            expected = plain.generate(prompt, params)[0].token_ids
            assert recorded.generate(prompt, params)[0].token_ids == expected
    assert len({params.stop_token_ids for params in asked}) == 2


def _drafts(bs: int, width: int, is_tree: bool, generator: torch.Generator) -> Draft:
    """Drafts of three different tokens; of trees some parents stand after their children."""

    def numbers(least: int, most: int) -> Tensor:
        return torch.randint(least, most, (bs, width), generator=generator).to(DEVICE)

    if not is_tree:
        return Draft(tokens=numbers(0, 3), parents=None, widths=None, depth=width - 1)
    parents = torch.minimum(numbers(-1, width), torch.arange(width, device=DEVICE))
    parents[:, 0] = -1
    return Draft(tokens=numbers(0, 3), parents=parents, widths=None, depth=2)


@pytest.mark.parametrize("is_tree", [False, True], ids=["chain", "tree"])
def test_a_padded_batch_is_accepted_as_it_is(is_tree: bool) -> None:
    """At batch sizes that are padded and that are not, each with drafts that differ every time."""
    generator = torch.Generator().manual_seed(0)
    slots = RequestSlots(
        slots=torch.zeros(9, 20, dtype=torch.int64, device=DEVICE), last_position=9
    )

    def forward(draft: Draft, plan: PagedPlan) -> tuple[Tensor, dict[str, Tensor]]:
        tokens, positions = draft.flat_tokens, plan.of_nodes(draft).positions
        return (tokens * 5 + positions) % 3, {"own": tokens * 10 + positions}

    def accept(
        draft: Draft, plan: PagedPlan, output: tuple[Tensor, dict[str, Tensor]]
    ) -> tuple[Tensor, CommittedOutput]:
        predict, per_node = output
        verified = verify_tree(draft, predict)
        committed = compact(verified, draft.flat_tokens, per_node)
        return plan.starts + verified.accept_lens, committed

    padding = BatchPadding(is_written=False)
    runner = GraphRunner(forward, padding, GraphRecorder(), has_epilogue=True)
    lens = []
    for bs in (3, 4, 3, 5, 8, 1, 6, 3):
        draft = _drafts(bs, 6, is_tree, generator)
        plan = PagedPlan(
            requests=slots,
            req_indices=torch.arange(1, bs + 1, device=DEVICE),
            starts=torch.randint(0, 9, (bs,), generator=generator).to(DEVICE),
            width=6,
            length=20,
        )
        passed = runner(draft, plan)
        seq_lens, committed = runner.run_epilogue("accept", accept)
        expected_lens, expected = accept(draft, plan, forward(draft, plan))
        assert torch.equal(seq_lens, expected_lens)
        assert torch.equal(passed[0], forward(draft, plan)[0])
        for name in ("next_tokens", "own_tokens", "last_rows", "accept_lens", "bonus_tokens"):
            assert torch.equal(getattr(committed, name), getattr(expected, name)), name
        assert torch.equal(committed.per_node["own"], expected.per_node["own"])
        lens += committed.accept_lens.tolist()
    assert len(set(lens)) > 1, "some is accepted and some is not"
    assert runner.num_recordings == 3, "for 1, 4 and 8"


def _chains(bs: int, generator: torch.Generator, *, has_scores: bool, on_device: bool) -> Draft:
    """Chains of 1 to 5 nodes; ``on_device``: as after a cut over the batch."""
    widths = [1, 5, *torch.randint(1, 6, (bs - 2,), generator=generator).tolist()]
    tokens = _drafts(bs, 5, False, generator).tokens
    scores = torch.cat((torch.zeros(bs, 1, device=DEVICE), -tokens[:, 1:].float()), 1)
    draft = Draft.chain(tokens, widths, scores=scores if has_scores else None)
    if not on_device:
        return draft
    assert draft.padding is not None
    cut = attrs.evolve(draft, widths=None)
    cut.places = draft.padding.flat_index
    return cut


def _assert_committed_alike(found: CommittedOutput, expected: CommittedOutput) -> None:
    """Check what counts: rows after a path may repeat its root more often."""
    bs, rows, others = len(expected.accept_lens), found.last_rows, expected.last_rows
    for name in ("accept_lens", "bonus_tokens"):
        assert torch.equal(getattr(found, name), getattr(expected, name)), name
    for name in ("next_tokens", "own_tokens"):
        own, other = (getattr(each, name).view(bs, -1) for each in (found, expected))
        assert torch.equal(own[:, : other.shape[1]], other), name
    assert torch.equal(found.next_tokens[rows], found.bonus_tokens)
    assert torch.equal(found.per_node["own"][rows], expected.per_node["own"][others])


@pytest.mark.parametrize("has_scores", [False, True])
def test_padded_chains_of_any_widths_are_accepted_as_they_are(has_scores: bool) -> None:
    """Recorded and replayed with other widths each time, which the device may know alone."""
    generator = torch.Generator().manual_seed(0)
    slots = RequestSlots(
        slots=torch.zeros(20, 40, dtype=torch.int64, device=DEVICE), last_position=39
    )
    published = torch.zeros(2, 20, dtype=torch.int64, device=DEVICE)  # as it is, and padded

    def forward(tokens: Tensor, plan: PagedPlan, rows: Any, kinds: Any) -> Any:
        return tokens * 5 + plan.positions, {"own": tokens * 100 + plan.positions}, {}

    def accept(draft: Draft, plan: PagedPlan, output: Any) -> Any:
        logits, per_node, _ = output
        draft.depth = 4  # of the longest; forms have room for more
        predict = (logits + draft.spread(plan.req_indices) + plan.positions) % 3
        verified = verify_tree(draft, predict)
        own = torch.arange(5, device=DEVICE) < verified.accept_lens.unsqueeze(1)
        scores = own.sum(1) if draft.scores is None else (draft.scores[:, :5] * own).sum(1)
        seq_lens = plan.starts + verified.accept_lens
        published[int(len(seq_lens) > 7)].index_copy_(0, plan.req_indices, seq_lens)
        return seq_lens, scores, compact(verified, draft.flat_tokens, per_node)

    runner = GraphRunner(forward, GivenParts, GraphRecorder(), warms_up=False, has_epilogue=True)
    lens: list[int] = []
    for number in range(24):
        bs = (6, 7, 4)[number % 3]
        draft = _chains(bs, generator, has_scores=has_scores, on_device=number % 4 == 3)
        plan = PagedPlan(
            requests=slots,
            req_indices=torch.arange(1, bs + 1, device=DEVICE) + number % 5,
            starts=torch.randint(0, 9, (bs,), generator=generator).to(DEVICE),
            width=5,
            length=40,
            padding=draft.padding,
        )
        part = PassPart(draft, plan)
        form = PassForm.of([size_of(None, part, frozenset())])
        passed = runner(form, None, part, plan)[1]
        found = runner.run_epilogue(has_scores, accept)
        expected_pass = forward(draft.flat_tokens, plan, 0, None)
        expected = accept(draft, plan, expected_pass)
        assert torch.equal(passed[0], expected_pass[0])
        if found is None:
            published[1] = published[0]
            continue
        assert torch.equal(published[1, 1:], published[0, 1:]), "padding is row 0's"
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])
        _assert_committed_alike(found[2], expected[2])
        lens += expected[2].accept_lens.tolist()
    assert len(lens) > 60, "most are replayed"
    assert len(set(lens)) > 2, "some is accepted and some is not"


@pytest.mark.skipif(ON_GPU, reason="counts the operations of the CPU")
@pytest.mark.parametrize("kind", ["greedy", "truncated"])
def test_a_plain_step_launches_little_beside_its_recordings(
    kind: str, start: Start, reference: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both maps resolve, a copy into the recording's tensors, one to the host, the algorithm's map
    publishes. On a GPU there is the upload of the request rows besides."""
    launch, steps = StepRunner.launch, []

    def counted(self: StepRunner, step: Any) -> Any:
        with Launches() as launches:
            result = launch(self, step)
        steps.append(launches.found)
        return result

    monkeypatch.setattr(StepRunner, "launch", counted)
    llm = start(page_size=32)
    llm.generate(reference.prompts[:3], _silent(reference.params[kind][:3]))
    assert steps[-1] == [
        *("index_select", "index_select", "_foreach_copy_", "clone"),
        *("index_copy_", "index_copy_"),
    ]


@pytest.mark.parametrize(("name", "topk"), [("NONE", None), ("EAGLE3", 1), ("EAGLE3", 4)])
def test_requests_of_all_kinds_get_the_same_recorded_or_not(
    name: str, topk: int | None, shallow: ShallowTarget
) -> None:
    """Three at once and then fewer, in bfloat16 on a GPU, where batches are padded; one request has
    a grammar and one wants log-probabilities, while there the sampling is not recorded."""
    common: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True}
    asked = [
        SamplingParams(**common),
        SamplingParams(temperature=0.8, seed=1, **common),
        SamplingParams(temperature=0.9, top_p=0.9, top_k=40, seed=2, **common),
        SamplingParams(temperature=0.7, seed=3, repetition_penalty=1.2, **common),
        SamplingParams(max_tokens=9, logprobs=2, ignore_eos=True),
        SamplingParams(max_tokens=9, regex="[a-z ]{40}"),
    ]
    prompts = ["def f(x):\n    return ", "class Queue:\n    ", "import ", "x = 1\n", "for ", "if "]
    found = []
    for records in (True, False):
        with LLM(
            **shallow.options(name),
            dtype="bfloat16" if ON_GPU else "float32",
            disable_cpu_kernels=True,  # no operations of torch
            speculative_eagle_topk=topk,
            disable_cuda_graph=not records,
            max_running_requests=3,
        ) as llm:
            if records and not ON_GPU:
                llm.engine.steps.runner.record_graphs()
            found.append([output.token_ids for output in llm.generate(prompts, asked)])
            assert not records or llm.engine.steps.runner.verify_passes[frozenset()].num_recordings
    assert found[0] == found[1]


@pytest.mark.skipif(ON_GPU, reason="there drafts are recorded in all tests")
@pytest.mark.parametrize(
    ("name", "topk"),
    [
        ("EAGLE3", 1),
        ("EAGLE3", 4),
        ("MULTI_LAYER_EAGLE", 1),
        ("MULTI_LAYER_EAGLE", 3),
        ("PEAGLE", None),
        ("DFLASH", None),
    ],
)
def test_recorded_drafts_are_those_that_are_not(
    name: str, topk: int | None, shallow: ShallowTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of three requests, padded to four, then of fewer; all greedy, then with one that samples."""
    proposed: list[list[list[int]]] = []
    propose, runners = HookCalls.propose, []

    def kept(self: HookCalls, *given: Any, **named: Any) -> Draft:
        draft = propose(self, *given, **named)
        proposed.append(draft.tokens.tolist())
        return draft

    def draft_pass(self: EngineRuntime, forward: Callable[..., Any]) -> GraphRunner:
        # Positions before 0 see nothing, which leaves NaN where torch attends.
        pads = name != "MULTI_LAYER_EAGLE"
        kv = self._kv
        padding = BatchPadding(pads=pads, length=lambda: kv.key_length)
        runners.append(GraphRunner(forward, padding, GraphRecorder()))
        return runners[-1]

    monkeypatch.setattr(HookCalls, "propose", kept)
    asked = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (14, 9, 11)]
    sampled = SamplingParams(max_tokens=12, temperature=0.8, seed=1, ignore_eos=True)
    prompts = ["def f(x):\n    return ", "class Queue:\n    ", "import "]
    found = []
    for records in (True, False):
        with monkeypatch.context() as patch:
            if records:
                patch.setattr(EngineRuntime, "draft_pass", draft_pass)
            with LLM(
                **shallow.options(name),
                dtype="float32",
                disable_cpu_kernels=True,  # no operations of torch
                speculative_eagle_topk=topk,
            ) as llm:
                tokens = [
                    output.token_ids
                    for params in (asked, [sampled, *asked[1:]])
                    for output in llm.generate(prompts, params)
                ]
        found.append((tokens, proposed.copy()))
        proposed.clear()
    assert found[0] == found[1]
    assert any(runner.num_recordings for runner in runners)


def _plan(rows: Tensor) -> PagedPlan:
    """The plan of requests with one row each, in these rows of the request table [bs]."""
    table = torch.zeros(9, 20, dtype=torch.int64, device=DEVICE)
    slots = RequestSlots(slots=table, last_position=9)
    return PagedPlan(requests=slots, req_indices=rows, starts=rows, width=1, length=20)


def test_padding_that_a_pass_writes_to_begins_anew() -> None:
    """A draft that counts lengths up in place does not read further and further on."""

    def forward(plan: PagedPlan, lengths: Tensor) -> Tensor:
        lengths += 1
        return lengths.amax().expand(len(lengths)).clone()

    runner = GraphRunner(forward, BatchPadding(), GraphRecorder())
    rows = torch.arange(3, device=DEVICE)
    plan = _plan(rows)
    greatest = [runner(plan, torch.tensor([5, 3, 4], device=DEVICE)).tolist() for _ in range(9)]
    assert greatest == [[6, 6, 6]] * 9


class _Named(NamedTuple):
    tokens: Tensor
    rows: list[Tensor]


@pytest.mark.parametrize("bs", [3, 4])
def test_a_recorded_pass_returns_its_own_named_tuples(bs: int) -> None:
    def forward(plan: PagedPlan, given: Tensor) -> _Named:
        return _Named(given + 1, [given * 2])

    runner = GraphRunner(forward, BatchPadding(), GraphRecorder())
    rows = torch.arange(bs, device=DEVICE)
    plan = _plan(rows)
    for number in range(3):
        found = runner(plan, rows + number)
        assert torch.equal(found.tokens, rows + number + 1)
        assert torch.equal(found.rows.pop(), (rows + number) * 2)


def test_a_recorded_pass_takes_tensors_in_containers() -> None:
    """And returns drafts, cut to the batch."""

    def forward(plan: PagedPlan, given: list[Tensor], named: dict[str, Tensor]) -> Draft:
        return Draft.chain(torch.stack((*given, named["last"]), dim=1))

    runner = GraphRunner(forward, BatchPadding(), GraphRecorder())
    for bs in (3, 4, 3):
        rows = torch.arange(bs, device=DEVICE)
        plan = _plan(rows)
        draft = runner(plan, [rows, rows + bs], {"last": rows * bs})
        assert torch.equal(draft.tokens, torch.stack((rows, rows + bs, rows * bs), dim=1))
    assert runner.num_recordings == 1


def test_a_recorded_pass_takes_a_draft_input() -> None:
    """And a state that is absent: another form, whichever it is."""

    def forward(plan: PagedPlan, draft_input: DraftInput) -> Tensor:
        found = draft_input.bonus_tokens
        for sign, name in ((2, "own"), (3, "other")):
            if draft_input.state[name] is not None:
                found = found + sign * draft_input[name]
        return found

    runner = GraphRunner(forward, BatchPadding(), GraphRecorder())
    for bs in (3, 4, 2, 3):
        rows = torch.arange(bs, device=DEVICE)
        for own, other in ((rows + bs, None), (None, rows + bs)):
            draft_input = DraftInput(bonus_tokens=rows, state={"own": own, "other": other})
            expected = forward(_plan(rows), draft_input)
            assert torch.equal(runner(_plan(rows), draft_input), expected)
    assert runner.num_recordings == 4, "two for 2 requests, two for 4"


def test_a_recorded_pass_refuses_what_has_no_form() -> None:
    runner = GraphRunner(lambda plan, _: plan.positions, BatchPadding(), GraphRecorder())
    rows = torch.arange(3, device=DEVICE)
    with pytest.raises(PluginError, match="given unhashable type: 'set'; expected tensors, "):
        runner(_plan(rows), {1, 2})


def test_inputs_of_all_dtypes_are_copied_together() -> None:
    """Those that are dense and of whole words, in one launch; the others too, bit by bit."""

    def forward(plan: PagedPlan, *given: Tensor) -> list[Tensor]:
        return [tensor.clone() for tensor in given]

    runner = GraphRunner(forward, BatchPadding(), GraphRecorder())
    generator = torch.Generator().manual_seed(0)
    for bs in (3, 4, 2, 3):
        rows = torch.arange(bs, device=DEVICE)
        plan = _plan(rows)
        numbers = torch.randn(bs, 9, generator=generator).to(DEVICE)
        given = [numbers[:, :4].to(torch.bfloat16), numbers > 0, numbers.to(torch.float64)]
        given += [numbers[:, 2], numbers.half()[:, 1:], numbers[:, 0].contiguous()]
        with Launches() as launches:
            found = runner(plan, *given)
        for own, tensor in zip(found, given, strict=True):
            assert own.dtype == tensor.dtype
            assert torch.equal(own, tensor)
    filled = launches.found.count("_foreach_copy_")
    assert filled <= 4, "words, and three dtypes of what is none"


def test_lazily_conjugated_and_negated_inputs_are_copied() -> None:
    """Their memory holds other bits than they stand for, and is no sequence of words to torch."""
    numbers = torch.tensor([[1 + 2j, 3 - 4j], [5j, -6]], device=DEVICE)
    sources = [numbers.conj(), numbers.conj().imag, torch._neg_view(numbers.real.contiguous())]
    inputs = [torch.ones(4, 2, dtype=source.dtype, device=DEVICE) for source in sources]
    KeptTensors(inputs).fill(sources, clear=True)
    for kept, source in zip(inputs, sources, strict=True):
        assert torch.equal(kept[:2], source)
        assert not kept[2:].any()


@pytest.mark.parametrize("rows", [2, 3, 16, 17, 96])
def test_a_large_input_is_copied_by_many_blocks(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 64 Ki elements each, a launch would have 4 for 16 rows of five layers' hidden states. One
    launch takes 64 tensors."""
    copy, launches = torch._foreach_copy_, []

    def counted(targets: Any, sources: Any) -> None:
        launches.append([target.nbytes for target in targets])
        copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", counted)
    source = torch.randn(rows, 5 * 4096, device=DEVICE).to(torch.bfloat16)
    odd = torch.arange(rows * 3, device=DEVICE).to(torch.int8)
    inputs = [torch.full_like(source, -1), torch.full_like(odd, -1)]
    KeptTensors(inputs).fill([source, odd], clear=False)
    assert torch.equal(inputs[0], source)
    assert torch.equal(inputs[1], odd)
    (sizes,) = (each for each in launches if sum(each) >= source.nbytes)
    assert len(sizes) <= 33
    assert max(sizes) <= max(2 * source.nbytes / 32, 16 << 10)
