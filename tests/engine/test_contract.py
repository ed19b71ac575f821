"""What the engine asks of an algorithm, and what it tells those who watch."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch

from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    FutureMap,
    PluginError,
    RequestReport,
    Runtime,
    SamplingParams,
    StepReport,
    TargetOutput,
    VerifyOutput,
    hookimpl,
    verify_tree,
)


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda roots: Draft.chain(roots.repeat(1, 6)), "6 nodes, 5 deep, for 7 requests"),
        (
            lambda roots: Draft.tree(
                torch.arange(7).expand(len(roots), -1), torch.tensor([[-1] + [0] * 6] * 7), 1
            ),
            "7 nodes, 1 deep, for 7 requests",
        ),
        (lambda roots: Draft.chain(roots[1:]), "1 nodes, 0 deep, for 6 requests"),
    ],
    ids=["too deep", "too many nodes", "too few requests"],
)
def test_draft_that_does_not_fit_is_told_and_engine_goes_on(
    make: Any, told: str, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    class Misfit(scripted):  # type: ignore[misc]
        broken = True

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            if self.broken:
                draft: Draft = make(draft_input.bonus_tokens.unsqueeze(1))
                return draft
            fitting: Draft = super().propose(runtime, batch, draft_input)
            return fitting

    algorithm = Misfit(reference.tokens(["greedy"] * 7))
    with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        with pytest.raises(
            PluginError, match=rf"^algorithm SCRIPTED .*: propose\(\) drafted {told}; expected"
        ):
            llm.generate(reference.prompts)
        algorithm.broken = False
        outputs = llm.generate(reference.prompts, reference.params["greedy"])
        llm.check_pool()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in reference.outputs["greedy"]]


@pytest.mark.parametrize("overlap", [True, False])
def test_the_runtime_shows_the_sizes_of_the_run(
    overlap: bool, tiny_model: Path, successors: Any
) -> None:
    shown: dict[str, Any] = {}

    class Looks(successors):  # type: ignore[misc]
        @hookimpl
        def create_worker(self, runtime: Runtime) -> object:
            names = ("page_size", "chunked_prefill_size", "overlap")
            shown.update({name: getattr(runtime, name) for name in names})
            return super().create_worker(runtime)

    for size in (7, None):
        LLM(
            tiny_model,
            page_size=5,
            chunked_prefill_size=size,
            disable_overlap_schedule=not overlap,
            speculative_algorithm=Looks(),
        ).close()
        assert shown == {"page_size": 5, "chunked_prefill_size": size, "overlap": overlap}


def test_all_hooks_of_a_run_get_the_same_runtime(tiny_model: Path, successors: Any) -> None:
    """A plugin may compare it with what it kept, and cache by it, weakly too."""
    tables: WeakKeyDictionary[Runtime, int] = WeakKeyDictionary()

    class Caches(successors):  # type: ignore[misc]
        @hookimpl
        def create_worker(self, runtime: Runtime) -> object:
            self.runtime = runtime
            return super().create_worker(runtime)

        @hookimpl
        def on_step(self, runtime: Runtime) -> None:
            assert runtime is self.runtime
            tables[runtime] = tables.get(runtime, 0) + 1

    with LLM(tiny_model, warm_up="off", speculative_algorithm=Caches()) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8))
        assert [steps > 1 for steps in tables.values()] == [True]


@pytest.mark.parametrize("overlap", [True, False])
def test_reports_add_up_to_the_outputs(
    overlap: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    steps: list[StepReport] = []
    ended: dict[str, RequestReport] = {}

    class Watched(scripted):  # type: ignore[misc]
        @hookimpl
        def on_step(self, report: StepReport) -> None:
            steps.append(report)

        @hookimpl
        def on_request_finished(self, report: RequestReport) -> None:
            assert report.request_id not in ended
            ended[report.request_id] = report

    algorithm = Watched(reference.tokens(["greedy"] * 7), tree=True, right=0.7, ragged=True)
    with LLM(
        tiny_model,
        dtype="float64",
        chunked_prefill_size=5,
        max_running_requests=3,
        disable_overlap_schedule=not overlap,
        speculative_algorithm=algorithm,
    ) as llm:
        params = [SamplingParams(max_tokens=3 + 4 * i) for i in range(7)]
        outputs = llm.generate(reference.prompts, params)
        stats = llm.stats()
    for output in outputs:
        report = ended[output.request_id]
        assert report.num_prompt_tokens == len(output.prompt_token_ids)
        assert report.num_output_tokens == len(output.token_ids)
        assert report.accept_lens == output.accept_lens
        assert report.finish_reason == output.finish_reason
        prefills = [
            (step.prefill_tokens[i], step.sampled[i])
            for step in steps
            for i, name in enumerate(step.prefill_ids)
            if name == output.request_id
        ]
        assert sum(tokens for tokens, _ in prefills) == len(output.prompt_token_ids)
        assert [sampled for _, sampled in prefills] == [False] * (len(prefills) - 1) + [True]
        decodes = [
            (step.widths[i], step.accept_lens[i], step.kept[i])
            for step in steps
            for i, name in enumerate(step.decode_ids)
            if name == output.request_id
        ]
        assert tuple(kept for _, _, kept in decodes if kept) == output.accept_lens
        assert all(1 <= width <= 5 and kept <= length <= width for width, length, kept in decodes)
    assert [step.number for step in steps] == list(range(1, len(steps) + 1))
    assert set(steps[-1].seconds) == {"propose", "target", "verify", "extend", "host"}
    assert stats["output_tokens"] == sum(len(output.token_ids) for output in outputs)
    assert stats["prompt_tokens"] == sum(map(len, reference.prompts))
    assert stats["requests"] == {"length": 7}
    assert stats["verifications"] == sum(len(output.accept_lens) for output in outputs)
    llm_counts = stats["accepted_by_length"]
    assert sum(llm_counts.values()) == stats["verifications"]
    assert sum(n * count for n, count in llm_counts.items()) == stats["accepted"]


@pytest.mark.parametrize("overlap", [True, False])
def test_a_plugin_relays_more_through_its_own_future_map(
    overlap: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """Its map is made once, for both loops, and every step publishes to it and resolves from it."""

    class Relaying(FutureMap):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.steps = torch.zeros_like(self.seq_lens)

        def publish(self, rows: Any, seq_lens: Any, output: CommittedOutput) -> None:
            super().publish(rows, seq_lens, output)
            self.steps[rows] += 1

        def resolve(self, rows: Any) -> Any:
            assert bool((self.steps[rows] > 0).all()), "a request that was never published"
            return super().resolve(rows)

    class Watched(scripted):  # type: ignore[misc]
        maps: tuple[Relaying, ...] = ()

        @hookimpl
        def create_future_map(self, runtime: Runtime) -> FutureMap:
            made = Relaying(runtime.req_table_size, runtime.device)
            self.maps = (*self.maps, made)
            return made

    algorithm = Watched(reference.tokens(["greedy"] * 7), tree=True, right=0.7)
    with LLM(
        tiny_model,
        dtype="float64",
        enable_mixed_chunk=True,
        chunked_prefill_size=6,
        disable_overlap_schedule=not overlap,
        speculative_algorithm=algorithm,
    ) as llm:
        outputs = llm.generate(reference.prompts, reference.params["greedy"])
        stats = llm.stats()
    assert [o.token_ids for o in outputs] == [o.token_ids for o in reference.outputs["greedy"]]
    (made,) = algorithm.maps
    assert int(made.steps.sum()) >= stats["verifications"] + len(reference.prompts)


def test_an_algorithms_own_verify_is_used(tiny_model: Path, reference: Any, scripted: Any) -> None:
    class RefusesAll(scripted):  # type: ignore[misc]
        @hookimpl
        def verify(self, draft: Draft, target_output: TargetOutput) -> VerifyOutput:
            found = verify_tree(draft, target_output.predict)
            index = found.accept_index.clone()
            index[:, 1:] = -1
            return VerifyOutput(
                predict=found.predict,
                accept_index=index,
                accept_lens=torch.ones_like(found.accept_lens),
                bonus_tokens=target_output.predict[index[:, 0]],
            )

    algorithm = RefusesAll(reference.tokens(["seeded"] * 7), right=1.0)
    with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        outputs = llm.generate(reference.prompts, reference.params["seeded"])
    for output, plain in zip(outputs, reference.outputs["seeded"], strict=True):
        assert output.token_ids == plain.token_ids
        assert set(output.accept_lens) == {1}


@pytest.mark.parametrize("kind", ["absent", "none", "changing"])
def test_a_draft_state_may_be_absent_or_change_its_width(
    kind: str, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    class Moody(scripted):  # type: ignore[misc]
        calls = 0

        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
        ) -> DraftInput:
            full: DraftInput = super().build_draft_input(runtime, batch, target_output)
            self.calls += 1
            extra: Any = torch.ones(batch.size, 1 + self.calls % 3, device=runtime.device)
            if kind == "changing":
                return DraftInput(
                    bonus_tokens=full.bonus_tokens, state={**full.state, "extra": extra}
                )
            if kind == "none" and self.calls % 2:
                extra = None
            state = {**full.state, "extra": extra}
            if kind == "absent" and self.calls % 2:
                del state["extra"]
            return DraftInput(bonus_tokens=full.bonus_tokens, state=state)

    algorithm = Moody(reference.tokens(["seeded"] * 7), tree=True, right=0.8)
    with LLM(
        tiny_model, dtype="float64", max_running_requests=3, speculative_algorithm=algorithm
    ) as llm:
        outputs = llm.generate(reference.prompts, reference.params["seeded"])
    assert [output.token_ids for output in outputs] == [
        output.token_ids for output in reference.outputs["seeded"]
    ]


def test_the_names_of_a_draft_state_may_be_an_enums(tiny_model: Path, successors: Any) -> None:
    class State(StrEnum):
        SEEN = "seen"

    read = []

    class Named(successors):  # type: ignore[misc]
        @hookimpl
        def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
            made: DraftInput = super().build_draft_input(batch, target_output)
            state = {State.SEEN: torch.full((batch.size, 1), 5)}
            return DraftInput(bonus_tokens=made.bonus_tokens, state=state)

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            read.append(int(draft_input[State.SEEN]))
            return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))

    with LLM(tiny_model, warm_up="off", speculative_algorithm=Named()) as llm:
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4))
    assert set(read) == {5}


def test_temperatures_and_noise_are_those_of_the_requests(
    tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """A drafter that takes the target's noise and distribution drafts the target's own token."""
    from specplug.speculative.noise import gumbel

    class Curious(scripted):  # type: ignore[misc]
        looked = 0

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            draft: Draft = super().propose(runtime, batch, draft_input)
            positions = batch.seq_lens.unsqueeze(1) + torch.arange(1, 3, device=runtime.device)
            some = torch.tensor([5, 0, 95], device=runtime.device)
            noise = runtime.gumbel_noise(batch, positions, some)
            temperatures = runtime.temperatures(batch)
            assert noise.shape == (batch.size, 2, 3)
            assert noise.dtype == temperatures.dtype == torch.float32
            own = [params[tuple(request.prompt_token_ids)] for request in batch.requests]
            assert batch.greedy == all(p.greedy for p in own)
            for b in range(batch.size):
                greedy = own[b].greedy
                assert float(temperatures[b]) == pytest.approx(own[b].temperature or 1.0)
                seeds = torch.tensor([own[b].seed] * 2, device=runtime.device)
                expected = gumbel(seeds, positions[b], some).to(torch.float32)
                assert torch.equal(noise[b], torch.zeros_like(expected) if greedy else expected)
                self.looked += 1
            return draft

    kinds = ["greedy", "seeded", "truncated", "greedy", "penalized", "seeded", "truncated"]
    wanted = [reference.params[kind][i] for i, kind in enumerate(kinds)]
    params = dict(zip(reference.prompts, wanted, strict=True))
    algorithm = Curious(reference.tokens(kinds), right=0.7)
    with LLM(
        tiny_model, dtype="float64", max_running_requests=3, speculative_algorithm=algorithm
    ) as llm:
        llm.generate(reference.prompts, wanted)
    assert algorithm.looked > 20


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_own_tokens_are_those_at_the_rows(
    tree: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """A request's own tokens, row by row over chunks and steps, are its prompt and its output."""
    own: dict[str, list[int]] = {}

    class Reads(scripted):  # type: ignore[misc]
        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
        ) -> DraftInput:
            widths = batch.chunk_widths
            if not batch.is_prefill:
                widths = (len(target_output.own_tokens) // batch.size,) * batch.size
            rows = target_output.own_tokens.split(widths)
            counts = target_output.accept_lens.tolist()
            for request, tokens, count in zip(batch.requests, rows, counts, strict=True):
                own.setdefault(request.request_id, []).extend(tokens[:count].tolist())
                assert batch.is_prefill or set(tokens[count:].tolist()) <= {int(tokens[0])}
            made: DraftInput = super().build_draft_input(runtime, batch, target_output)
            return made

    algorithm = Reads(reference.tokens(["seeded"] * 7), tree=tree, right=0.8, ragged=True)
    with LLM(
        tiny_model,
        dtype="float64",
        chunked_prefill_size=5,
        enable_mixed_chunk=True,
        speculative_algorithm=algorithm,
    ) as llm:
        outputs = llm.generate(reference.prompts, reference.params["seeded"])
    for output in outputs:
        known = [*output.prompt_token_ids, *output.token_ids]
        read = own[output.request_id]
        assert len(read) >= len(known) - 1  # the last token is never verified
        assert read[: len(known)] == known[: len(read)]


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_what_a_plugin_adds_to_the_nodes_is_compacted(
    tree: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    class Adds(scripted):  # type: ignore[misc]
        compared = 0

        @hookimpl
        def verify(self, batch: Batch, draft: Draft, target_output: TargetOutput) -> None:
            nodes = draft.flatten(draft.tokens)
            target_output.per_node["own"] = torch.stack((nodes, nodes * 2), dim=1)

        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
        ) -> DraftInput:
            if not batch.is_prefill:
                # The node at a row is the token that the row before it predicted.
                own = target_output.per_node["own"].view(batch.size, -1, 2)
                tokens = target_output.next_tokens.view(batch.size, -1)
                for b, count in enumerate(target_output.accept_lens.tolist()):
                    assert own[b, 1:count, 0].tolist() == tokens[b, : count - 1].tolist()
                    assert torch.equal(own[b, :, 1], own[b, :, 0] * 2)
                    self.compared += count - 1
            made: DraftInput = super().build_draft_input(runtime, batch, target_output)
            return made

    algorithm = Adds(reference.tokens(["greedy"] * 7), tree=tree, right=0.8, ragged=True)
    with LLM(tiny_model, dtype="float64", speculative_algorithm=algorithm) as llm:
        llm.generate(reference.prompts, reference.params["greedy"])
    assert algorithm.compared > 20
