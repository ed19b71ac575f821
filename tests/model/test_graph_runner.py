"""A recorded pass gives what the pass itself gives. Graphs are CUDA's: elsewhere there is nothing
to record, and the engine says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from specplug import LLM, Batch, Draft, DraftInput, Runtime, hookimpl
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.pass_arguments import BatchPadding

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="graphs are CUDA's")


def test_on_the_cpu_nothing_is_recorded(tiny_model: Path, reference: Any, scripted: Any) -> None:
    class Recorded(scripted):  # type: ignore[misc]
        @hookimpl
        def supports_target_verify_for_draft(self) -> bool:
            return True

        @hookimpl
        def create_worker(self, runtime: Runtime) -> Any:
            assert runtime.record_draft(len)("pass") == 4
            return super().create_worker(runtime)

    algorithm = Recorded(reference.tokens(["greedy"] * 7))
    with LLM(tiny_model, device="cpu", speculative_algorithm=algorithm) as llm:
        assert llm.effective_config["cuda_graph"].startswith("off: ")


@needs_cuda
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("kind", ["greedy", "seeded", "penalized and sampled"])
def test_replays_give_the_same_tokens(
    kind: str, tree: bool, tiny_model: Path, reference: Any, scripted: Any
) -> None:
    known = reference.tokens([kind] * 7)
    for ragged in (False, True):
        algorithm = scripted(known, tree=tree, right=0.7, ragged=ragged)
        with LLM(
            tiny_model, device="cuda", dtype="float64", speculative_algorithm=algorithm
        ) as llm:
            outputs = llm.generate(reference.prompts, reference.params[kind])
            assert [o.token_ids for o in outputs] == list(known.values())
            assert llm.effective_config["cuda_graph"] == "on"
            recorded = llm.engine.steps.runner.verify_passes[frozenset()].num_recordings
            assert recorded or ragged, "passes of one width were recorded"


@needs_cuda
def test_replays_leave_the_hidden_states_of_any_layers(
    tiny_model: Path, reference: Any, scripted: Any
) -> None:
    """Whichever layers are asked for, a shape is recorded once with them, and once without."""
    prompts, greedy = reference.prompts[:3], reference.params["greedy"][:3]
    chosen: list[Any] = [(0, 1, 2), (1,), (2, 0), True, False]
    algorithm = scripted(reference.tokens(["greedy"] * 7), right=0.7)
    with LLM(tiny_model, device="cuda", dtype="float64", speculative_algorithm=algorithm) as llm:
        found = []
        for layers in chosen:
            asked = [attrs.evolve(each, return_hidden_states=layers) for each in greedy]
            found.append([output.hidden_states for output in llm.generate(prompts, asked)])
        assert llm.effective_config["cuda_graph"] == "on"
        recorded = llm.engine.steps.runner.verify_passes
        assert set(recorded) == {frozenset(), frozenset({"hidden_states"})}
        assert all(each.num_recordings for each in recorded.values())
    for layers, states in zip(chosen[1:4], found[1:4], strict=True):
        columns = [2] if layers is True else list(layers)
        for some, every in zip(states, found[0], strict=True):
            torch.testing.assert_close(some, every[:, columns], rtol=0, atol=1e-9)
    assert found[4] == [None] * 3


@needs_cuda
def test_a_draft_pass_is_recorded_if_the_hook_says_so(
    tiny_model: Path, reference: Any, scripted: Any
) -> None:
    class Recorded(scripted):  # type: ignore[misc]
        calls = 0

        @hookimpl
        def supports_target_verify_for_draft(self) -> bool:
            return True

        @hookimpl
        def create_worker(self, runtime: Runtime) -> Any:
            worker = super().create_worker(runtime)
            self._pass = runtime.record_draft(self._count)
            return worker

        def _count(self, roots: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            return roots * 2 + 1

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            roots = draft_input.bonus_tokens
            assert torch.equal(self._pass(roots), roots * 2 + 1)
            drafted: Draft = super().propose(runtime, batch, draft_input)
            return drafted

    algorithm = Recorded(reference.tokens(["greedy"] * 7))
    settings: dict[str, Any] = {"dtype": "float64", "warm_up": "off"}
    with LLM(tiny_model, device="cuda", speculative_algorithm=algorithm, **settings) as llm:
        outputs = llm.generate(reference.prompts[:2], reference.params["greedy"][:2])
    assert len(outputs) == 2
    assert algorithm.calls <= 4, "a warm-up and a recording for each of two batch sizes"


@needs_cuda
def test_a_pass_that_cannot_be_recorded_runs_as_it_is() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return x + x.sum().item()

    runner = GraphRunner(waits, BatchPadding(), GraphRecorder())
    x = torch.ones(3, device="cuda")
    stream = torch.cuda.current_stream()
    assert torch.equal(runner(x), x + 3)
    assert runner.recorder.failure
    assert torch.cuda.current_stream() == stream
    assert torch.equal(runner(x * 2), x * 2 + 6)
    assert torch.rand(3, device="cuda").shape == (3,), "the generator draws as before"
