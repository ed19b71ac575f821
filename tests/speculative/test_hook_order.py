"""The order of hooks, driven by a host of a few lines: no engine, no cache, a target by formula."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import click
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from specplug import (
    AlgorithmInfo,
    Batch,
    CommittedOutput,
    Draft,
    DraftChoices,
    DraftFiles,
    DraftInput,
    DraftPlan,
    ForeseenDrafts,
    FutureMap,
    HostCapabilities,
    RequestReport,
    Runtime,
    SpecConfig,
    StateTensor,
    StepReport,
    TargetOutput,
    Trainer,
    TrainingBatch,
    TrainingLoss,
    UsageError,
    VerifyOutput,
    hookimpl,
    verify_tree,
)
from specplug.contract import HOOKS, implemented_hooks
from specplug.registry import (
    Extension,
    ExtensionEntry,
    Registry,
    build_plugin_manager,
    register_commands,
    register_options,
)
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.hook_calls import HookCalls
from specplug.speculative.hook_order import (
    Chunks,
    Committed,
    Drafted,
    ForwardMode,
    Half,
    HookOrder,
    RequestView,
    Scheduled,
)
from specplug.speculative.planned_drafts import evolved
from specplug.speculative.verify import compact

CPU = torch.device("cpu")
VOCAB = 11


def ids(values: Sequence[int]) -> Tensor:
    """[n] int64."""
    return torch.tensor(values, dtype=torch.int64)


def following(tokens: Tensor) -> Tensor:
    """The target: what it generates after each token."""
    return (tokens * 7 + 3) % VOCAB


def plain(prompt: Sequence[int], count: int) -> list[int]:
    """What the target generates without speculation."""
    tokens = torch.tensor(prompt[-1])
    return [int(tokens := following(tokens)) for _ in range(count)]


class NoTrainer(Trainer):
    """Trains nothing."""

    def loss(self, batch: TrainingBatch) -> TrainingLoss:
        raise AssertionError

    def export(self) -> DraftFiles:
        raise AssertionError


class Everything:
    """Implements every hook, notes each call, and drafts two tokens, the second of them wrong for
    every other request."""

    def __init__(self, events: list[str], *, tree: bool = False) -> None:
        self.events = events
        self.tree = tree
        self.calls: defaultdict[str, list[tuple[Any, ...]]] = defaultdict(list)

    def _note(self, hook: str, *arguments: Any) -> None:
        self.events.append(hook)
        self.calls[hook].append(arguments)

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        self._note("describe")
        return AlgorithmInfo(name="EVERYTHING", summary="Every hook", api_version=1)

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        self._note("validate_config", config)
        return config.adjust("two tokens", num_steps=2, num_draft_tokens=4)

    @hookimpl
    def supports_target_verify_for_draft(self) -> bool:
        self._note("supports_target_verify_for_draft")
        return True

    @hookimpl
    def create_worker(self, runtime: Any) -> object:
        self._note("create_worker", runtime)
        return self

    def state_spec(self) -> dict[str, StateTensor]:
        return {"seen": StateTensor((), torch.int64)}

    @hookimpl
    def create_future_map(self, runtime: Any) -> FutureMap:
        self._note("create_future_map", runtime)
        events = self.events

        class Noting(FutureMap):
            def resolve(self, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
                events.append("resolve")
                return super().resolve(req_indices)

            def publish(self, rows: Tensor, seq_lens: Tensor, output: CommittedOutput) -> None:
                events.append("publish")
                super().publish(rows, seq_lens, output)

            def stash(self, rows: Tensor, draft_input: DraftInput) -> None:
                events.append("stash")
                super().stash(rows, draft_input)

        return Noting(runtime.req_table_size, runtime.device)

    @hookimpl
    def build_draft_input(
        self, runtime: Any, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
    ) -> DraftInput:
        self._note("build_draft_input", runtime, batch, target_output, future_map)
        assert torch.equal(following(target_output.own_tokens), target_output.per_node["after"])
        seen = {"seen": batch.seq_lens + target_output.accept_lens}
        state = seen if batch.drafts_follow else {}
        return DraftInput(bonus_tokens=target_output.bonus_tokens, state=state, host=seen)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Any, batch: Batch, last_tokens: Tensor, future_map: FutureMap
    ) -> DraftInput:
        self._note("build_disagg_draft_input", runtime, batch, last_tokens, future_map)
        return DraftInput(bonus_tokens=last_tokens, state={"seen": batch.seq_lens.clone()})

    @hookimpl
    def foresee_drafts(
        self, runtime: Any, requests: Sequence[RequestView]
    ) -> ForeseenDrafts | None:
        self._note("foresee_drafts", runtime, requests)
        return None

    @hookimpl
    def plan_drafts(self, runtime: Any, batch: Batch, choices: DraftChoices) -> DraftPlan | None:
        self._note("plan_drafts", runtime, batch, choices)
        return None

    @hookimpl
    def propose(self, runtime: Any, batch: Batch, draft_input: DraftInput) -> Draft:
        self._note("propose", runtime, batch, draft_input)
        assert torch.equal(draft_input["seen"], batch.seq_lens)
        roots = draft_input.bonus_tokens
        first, odd = following(roots), batch.req_indices % 2
        second = (following(first) + odd) % VOCAB
        if not self.tree:
            return Draft.chain(torch.stack((roots, first, second), dim=1))
        tokens = torch.stack((roots, (first + 1) % VOCAB, first, second), dim=1)
        parents = torch.tensor([-1, 0, 0, 2]).expand(batch.size, -1)
        return Draft.tree(tokens, parents, 2)

    @hookimpl
    def grow_draft(
        self, runtime: Any, batch: Batch, draft_input: DraftInput, draft: Draft
    ) -> Draft | None:
        self._note("grow_draft", runtime, batch, draft_input, draft)
        return None

    @hookimpl
    def verify(
        self, runtime: Any, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput | None:
        self._note("verify", runtime, batch, draft, target_output)
        return None

    @hookimpl
    def fixup_idle(self, runtime: Any, batch: Batch, draft_input: DraftInput) -> DraftInput | None:
        self._note("fixup_idle", runtime, batch, draft_input)
        return None

    @hookimpl
    def export_draft_state(
        self, runtime: Any, batch: Batch, future_map: FutureMap
    ) -> Mapping[str, Tensor | None] | None:
        self._note("export_draft_state", runtime, batch, future_map)
        return None

    @hookimpl
    def create_trainer(self, runtime: Any) -> Trainer:
        self._note("create_trainer", runtime)
        return NoTrainer()

    @hookimpl
    def on_host_tensors(
        self, runtime: Any, request_ids: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> None:
        self._note("on_host_tensors", runtime, request_ids, tensors)

    @hookimpl
    def on_step(self, runtime: Any, report: StepReport) -> None:
        self._note("on_step", runtime, report)

    @hookimpl
    def on_request_finished(self, runtime: Any, report: RequestReport) -> None:
        self._note("on_request_finished", runtime, report)

    @hookimpl
    def on_text_forgotten(self, runtime: Any, cache_salt: str | None) -> None:
        self._note("on_text_forgotten", runtime, cache_salt)

    @hookimpl
    def register_commands(self, cli: click.Group) -> None:
        self._note("register_commands", cli)

    @hookimpl
    def register_options(self, command: click.Command) -> None:
        self._note("register_options", command)


@attrs.frozen(kw_only=True)
class View:
    """A request as hooks see it."""

    request_id: str
    token_ids: Sequence[int]
    max_tokens: int = 100
    draft_state: Mapping[str, Tensor] = attrs.field(factory=dict)

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return self.token_ids


class ToyHost:
    """Prefills, receives and decodes requests by the order of hooks alone. A request's index is
    its row in the request table."""

    def __init__(self, *, tree: bool = False, plugin: Any = None, **gives: Any) -> None:
        self.events: list[str] = []
        self.plugin = plugin or Everything(self.events, tree=tree)
        self.generated: defaultdict[int, list[int]] = defaultdict(list)
        selected = Registry().select(self.plugin)
        self.hooks = HookCalls(build_plugin_manager(selected, (), CoreDefaults()), selected)
        config = self.hooks.validate_config(SpecConfig.resolve(selected.info))
        self.hooks.supports_target_verify_for_draft()
        self.runtime: Any = SimpleNamespace(
            host=HostCapabilities(**{"name": "a toy host", "verify": True, **gives}),
            config=config,
            device=CPU,
            vocab_size=VOCAB,
            req_table_size=9,
            worker=None,
        )
        self.runtime.worker = self.hooks.create_worker(self.runtime)
        self.future_map = self.hooks.create_future_map(self.runtime)
        self.order = HookOrder(self.runtime, self.hooks, self.future_map)

    def deliver(self, half: Half, output: CommittedOutput) -> None:
        """Hand out what is committed, before hooks may write to it."""
        rows = half.req_indices.tolist()
        if half.batch.is_prefill:
            for b, row in enumerate(rows):
                if half.batch.last_chunk[b]:
                    self.generated[row].append(int(output.bonus_tokens[b]))
            return
        paths = output.next_tokens.view(len(rows), -1).tolist()
        for row, path, count in zip(rows, paths, output.accept_lens.tolist(), strict=True):
            self.generated[row] += path[:count]

    def feed(self, half: Half, committed: Committed) -> None:
        self.deliver(half, committed.output)
        self.order.feed(half, committed)

    def prefill(
        self, prompts: Mapping[int, Sequence[int]], start: int = 0, end: int = 99
    ) -> Chunks:
        """Prefill the tokens of each prompt from ``start`` to ``end``."""
        tokens = [prompt[start:end] for prompt in prompts.values()]
        widths = tuple(map(len, tokens))
        seq_lens = torch.full((len(tokens),), start)
        batch = attrs.evolve(
            self._batch(ForwardMode.PREFILL, prompts, seq_lens),
            chunk_widths=widths,
            chunk_ends=tuple(start + width for width in widths),
            first_chunk=(start == 0,) * len(tokens),
            last_chunk=tuple(len(prompt) <= end for prompt in prompts.values()),
        )
        chunks = Chunks(
            req_indices=ids(list(prompts)),
            batch=batch,
            seq_lens=seq_lens,
            tokens=torch.tensor([token for chunk in tokens for token in chunk]),
            last_rows=torch.tensor([total - 1 for total in accumulate(widths)]),
        )
        predict = following(chunks.tokens[chunks.last_rows])
        per_node = {"after": following(chunks.tokens)}
        self.feed(chunks, self.order.commit_chunks(chunks, predict, per_node))
        return chunks

    def receive(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Take in prompts that another instance has prefilled."""
        seq_lens = ids([len(prompt) for prompt in prompts.values()])
        last_tokens = ids([prompt[-1] for prompt in prompts.values()])
        roots = following(last_tokens)
        for row, root in zip(prompts, roots.tolist(), strict=True):
            self.generated[row].append(root)
        batch = self._batch(ForwardMode.DECODE, prompts, seq_lens)
        half = Half(req_indices=ids(list(prompts)), batch=batch)
        self.order.receive(half, seq_lens, last_tokens, roots)

    def decode(self, rows: Sequence[int], max_draft_nodes: int = 4) -> None:
        """Take one decode step."""
        drafted = self.draft(rows, max_draft_nodes)
        predict, logits = following(drafted.tokens), torch.zeros(drafted.draft.total, VOCAB)
        verified = self.order.verify(drafted, predict, logits, {"after": predict})
        self.feed(drafted, self.order.commit(verified))

    def decode_verifying_itself(self, rows: Sequence[int]) -> None:
        """Take one decode step, the draft verified by the host."""
        self.verify_itself(self.draft(rows))

    def verify_itself(self, drafted: Drafted) -> None:
        verified = verify_tree(drafted.draft, following(drafted.tokens))
        output = compact(verified, drafted.tokens, {"after": following(drafted.tokens)})
        seq_lens = drafted.seq_lens + verified.accept_lens
        self.feed(drafted, self.order.publish(drafted, seq_lens, output))

    def draft(
        self, rows: Sequence[int], max_draft_nodes: int = 4, *, greedy: bool = True
    ) -> Drafted:
        return self.order.draft(
            Scheduled(
                req_indices=ids(rows),
                requests=[View(request_id=str(row), token_ids=()) for row in rows],
                max_draft_nodes=(max_draft_nodes,) * len(rows),
                greedy=greedy,
            )
        )

    def _batch(
        self, mode: ForwardMode, prompts: Mapping[int, Sequence[int]], seq_lens: Tensor
    ) -> Batch:
        return Batch(
            mode=mode,
            requests=[View(request_id=str(row), token_ids=p) for row, p in prompts.items()],
            req_indices=ids(list(prompts)),
            seq_lens=seq_lens.clone(),
        )


PROMPTS = {2: (1, 2, 3, 4, 5), 5: (6, 0, 9), 4: (8, 8, 8, 10)}
DRAFT = ["on_host_tensors", "foresee_drafts", "plan_drafts", "resolve", "propose"]
FEED = ["build_draft_input", "publish", "stash"]


@pytest.fixture(params=[False, True], ids=["chain", "tree"])
def host(request: pytest.FixtureRequest) -> ToyHost:
    """A toy host whose run has begun; its events are forgotten."""
    host = ToyHost(tree=request.param)
    host.events.clear()
    return host


def test_host_generates_what_its_target_does(host: ToyHost) -> None:
    host.prefill({5: PROMPTS[5], 2: PROMPTS[2]}, end=3)
    host.prefill({2: PROMPTS[2]}, start=3)
    host.receive({4: PROMPTS[4]})
    host.decode([2, 4])
    host.decode([4, 5], max_draft_nodes=2)
    host.decode([5, 4, 2])
    host.decode_verifying_itself([5, 2])
    for row, prompt in PROMPTS.items():
        generated = host.generated[row]
        assert generated == plain(prompt, len(generated))
    # Even requests accept two drafted tokens a step, odd ones one.
    assert {row: len(tokens) for row, tokens in host.generated.items()} == {
        2: 1 + 3 + 3 + 3,
        4: 1 + 3 + (1 if host.plugin.tree else 2) + 3,
        5: 1 + (1 if host.plugin.tree else 2) + 2 + 2,
    }


@pytest.mark.parametrize("foreseeable", [True, False])
@pytest.mark.parametrize("greedy", [True, False])
def test_drafts_are_greedy_where_noise_is_not_foreseen(foreseeable: bool, greedy: bool) -> None:
    host = ToyHost(foreseeable_noise=foreseeable)
    host.prefill(PROMPTS)
    drafted = host.draft([2, 5], greedy=greedy)
    assert drafted.batch.greedy is (greedy or not foreseeable)
    drafted.batch.greedy = greedy  # a host's batch for what it has verified by itself
    host.verify_itself(drafted)
    assert drafted.batch.greedy is (greedy or not foreseeable)


def test_host_that_verifies_refuses_a_verify_hook() -> None:
    with pytest.raises(UsageError, match=r"^EVERYTHING has a verify\(\) of its own"):
        ToyHost(verify=False)


def test_decode_step_calls_resolve_to_stash(host: ToyHost) -> None:
    host.prefill(PROMPTS)
    assert host.events == FEED
    host.events.clear()
    host.decode([2, 5])
    assert host.events == [*DRAFT, "verify", *FEED]


def test_host_that_verifies_calls_no_verify_hook(host: ToyHost) -> None:
    host.prefill(PROMPTS)
    host.events.clear()
    host.decode_verifying_itself([2, 5])
    assert host.events == [*DRAFT, *FEED]


def test_plugins_map_hears_of_steps_that_no_draft_follows(host: ToyHost) -> None:
    host.prefill(PROMPTS)
    drafted = host.draft([2, 5])
    drafted.batch.drafts_follow = False
    host.events.clear()
    host.verify_itself(drafted)
    assert host.events == FEED


def test_propose_may_follow_the_draft_extend_at_once(host: ToyHost) -> None:
    """As where a step ends with the drafts of the next one, ended requests among them."""
    host.prefill(PROMPTS)
    for _ in range(3):
        host.decode_verifying_itself([2, 5, 4])
    assert host.generated[5] == plain(PROMPTS[5], 7)


def test_receive_makes_the_first_draft_input(host: ToyHost) -> None:
    host.receive(PROMPTS)
    assert host.events == ["build_disagg_draft_input", "publish", "stash"]
    host.decode([2])
    assert host.generated[2] == plain(PROMPTS[2], 4)


def test_receive_takes_an_empty_batch(host: ToyHost) -> None:
    host.receive({})
    assert host.events == ["build_disagg_draft_input", "publish", "stash"]


def test_idle_rank_verifies_and_fixes_up(host: ToyHost) -> None:
    host.order.idle(torch.zeros(0, VOCAB))
    assert host.events == ["verify", "fixup_idle", "publish", "stash"]
    ((_, batch, _),) = host.plugin.calls["fixup_idle"]
    assert (batch.mode, batch.size) == (ForwardMode.IDLE, 0)


def test_exported_state_is_what_was_stashed(host: ToyHost) -> None:
    chunks = host.prefill(PROMPTS)
    state = host.order.export_draft_state(chunks)
    assert state["seen"] is not None
    assert state["seen"].tolist() == [5, 3, 4]
    assert host.events == [*FEED, "export_draft_state", "resolve"]


def test_wrong_roots_of_an_algorithm_are_not_verified(
    host: ToyHost, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is verified begins at the core's own roots and lengths."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    future_map = host.future_map
    host.prefill(PROMPTS)
    future_map.bonus_tokens.zero_()
    drafted = host.draft([2, 5])
    assert drafted.draft.tokens[:, 0].tolist() == [*plain(PROMPTS[2], 1), *plain(PROMPTS[5], 1)]
    future_map.seq_lens.add_(1)
    assert drafted.seq_lens.tolist() == [5, 3]


@pytest.fixture(scope="module")
def calls() -> Mapping[str, list[tuple[Any, ...]]]:
    """The calls of every hook in a run of the toy host, and outside of it."""
    host = ToyHost()
    plugin = host.plugin
    host.order.export_draft_state(host.prefill({2: PROMPTS[2]}))
    host.receive({4: PROMPTS[4]})
    host.decode([2, 4])
    draft = Draft.chain(roots := ids([1]).unsqueeze(1))
    batch, given = plugin.calls["propose"][0][1], DraftInput(bonus_tokens=roots[0])
    host.hooks.grow_draft(host.runtime, batch, given, draft, roots=roots[0])
    host.order.idle(torch.zeros(0, VOCAB))
    host.hooks.on_step(host.runtime, StepReport(number=1, mode="decode", seconds={}))
    report = RequestReport(
        request_id="2",
        finish_reason="stop",
        num_prompt_tokens=5,
        num_output_tokens=4,
        accept_lens=(3,),
    )
    host.hooks.on_request_finished(host.runtime, report)
    host.hooks.on_text_forgotten(host.runtime, "a")
    host.hooks.create_trainer(host.runtime)
    entry = ExtensionEntry(name="e", value="own:it", distribution="of-e", version="1.0")
    extension = Extension("e", plugin, entry)
    register_commands(click.Group("specplug"), extension=extension)
    register_options(click.Command("generate"), extension=extension)
    return plugin.calls


def test_report_of_a_host_may_have_the_id_alone() -> None:
    host = ToyHost()
    host.hooks.on_request_finished(host.runtime, report := RequestReport(request_id="2"))
    ((_, found),) = host.plugin.calls["on_request_finished"]
    assert found is report


def test_every_hook_has_an_implementation_here() -> None:
    assert implemented_hooks(Everything([])) == list(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_hook_is_called_with_all_its_arguments(
    hook: str, calls: Mapping[str, list[tuple[Any, ...]]]
) -> None:
    assert calls[hook], f"nothing here calls {hook}()"
    for arguments in calls[hook]:
        assert len(arguments) == len(HOOKS[hook])
        assert None not in arguments


def hosting_page(title: str) -> set[str]:
    """What the first column of the tables in a section of the page names."""
    page = Path(__file__).parents[2] / "docs" / "hosting.md"
    text = page.read_text(encoding="utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return {name for cell in cells for name in re.findall(r"`(\w+)", cell)}


def test_hosting_page_names_all_that_a_runtime_gives() -> None:
    members = {name for name in vars(Runtime) if not name.startswith("_")}
    assert hosting_page("What `Runtime` gives") == members | set(Runtime.__annotations__)


def test_hosting_page_names_every_call_of_a_step() -> None:
    assert hosting_page("A step") == {name for name in vars(HookOrder) if not name.startswith("_")}


class Scored(Everything):
    """Drafts chains with scores, of which the batch verifies a budget together."""

    SCORES = torch.tensor(
        [[0.0, -0.1, -2.0, -0.1], [0.0, -0.7, -0.1, -0.1], [0.0, -3.0, -0.1, -0.1]]
    )
    budget: int | None = None

    @hookimpl
    def plan_drafts(self, runtime: Any, batch: Batch, choices: DraftChoices) -> DraftPlan:
        return attrs.evolve(choices.default(), verify_budget=self.budget)

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.adjust("three tokens", num_steps=3, num_draft_tokens=4)

    @hookimpl
    def propose(self, runtime: Any, batch: Batch, draft_input: DraftInput) -> Draft:
        tokens = [draft_input.bonus_tokens]
        for _ in range(3):
            tokens.append(following(tokens[-1]))
        return Draft.chain(torch.stack(tokens, dim=1), scores=self.SCORES.clone())


class NoReads(TorchFunctionMode):
    """Refuses what would wait for a device."""

    READS = Tensor.item, Tensor.tolist, Tensor.cpu, Tensor.numpy, Tensor.__bool__, Tensor.__index__

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in self.READS, func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("heeds", [True, False])
@pytest.mark.parametrize("budget", [3, 4, 7, 9, 12, None])
def test_planned_budget_keeps_what_survives_best(
    budget: int | None, heeds: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)  # which reads values
    host = ToyHost(plugin=Scored([]), verify_budget=heeds)
    host.prefill(PROMPTS)
    host.plugin.budget = budget
    with NoReads():
        drafted = host.draft([2, 5, 4])
    draft, most = drafted.draft, 12 if budget is None or not heeds else budget
    assert draft.total == most
    survival = host.order.calibration.survival(
        Draft.chain(torch.zeros(3, 4, dtype=torch.int64), scores=Scored.SCORES),
        drafted.req_indices,
    )
    assert survival is not None
    survival[:, 0] = 2.0
    best = survival.view(-1).sort(descending=True, stable=True).indices[:most].tolist()
    counts = [sum(place // 4 == row for place in best) for row in range(3)]
    assert draft.counts.tolist() == counts
    assert drafted.proposed == (4, 4, 4)


def test_evolved_batch_has_all_fields_of_the_other() -> None:
    fields = [field.name for field in attrs.fields(Batch)]
    values: dict[str, Any] = {name: object() for name in fields}
    given = Batch(**values)
    for changes in ({}, {"drafters": (1,)}, {"seq_lens": None, "greedy": False}):
        made = evolved(given, **changes)
        assert {name: getattr(made, name) for name in fields} == {**values, **changes}
    assert given.drafters is values["drafters"]
