"""A rank process for the tests of data-parallel attention, controlled over a connection.

Started by ``Ranks`` in ``test_dp_attention.py``. Each message is a method's name and its arguments;
each answer is what it returned, or the error's type and text.
"""

from __future__ import annotations

import os
import runpy
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import torch
from draft_dice import Dice
from runs_again import RunsAgain

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    FutureMap,
    Runtime,
    SamplingParams,
    StateTensor,
    TargetOutput,
    hookimpl,
)
from specplug_sparse_self import SparseSelf, View

EXAMPLE = Path(__file__).parents[2] / "examples/early_exit/specplug_early_exit.py"

Job = tuple[int, Any, SamplingParams]
"""A request: at which call of ``step`` it comes, its prompt and its settings."""

Ended = tuple[tuple[int, ...], "str | None", int, Any]
"""What became of one: its tokens, its error, at which call of ``step`` it ended, its experts."""


class Wide:
    """Repeats the last token. Its state is wider than the model, and it notes what idle steps are.

    Attributes:
        seen: (hook, what it saw) of each idle step, and (``stash``, rows, width) of each step.
        harm: called at a propose, given its number.
    """

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self.harm: Callable[[int], None] = lambda number: None
        self._proposed = 0

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="WIDE",
            summary="The last token again, and a wide state",
            api_version=1,
            defaults=Defaults(num_steps=2),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Wide:
        layers = (0, 1, runtime.num_layers)
        self._features = runtime.capture_layer_inputs(layers)
        self._width = len(layers) * runtime.hidden_size
        self._dtype = runtime.dtype
        return self

    def state_spec(self) -> dict[str, StateTensor]:
        return {"hidden_states": StateTensor((self._width,), self._dtype)}

    @hookimpl
    def create_future_map(self, runtime: Runtime) -> FutureMap:
        seen = self.seen

        class Noting(FutureMap):
            def stash(self, rows: Any, draft_input: DraftInput) -> None:
                hidden = draft_input["hidden_states"]
                assert len(hidden) == len(rows) == len(draft_input.bonus_tokens)
                seen.append(("stash", len(rows), hidden.shape[1], hidden.dtype))
                super().stash(rows, draft_input)

        return Noting(runtime.req_table_size, runtime.device)

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        assert batch.size, "an idle step has nothing to extend"
        hidden = target_output.per_node[self._features][target_output.last_rows]
        state = {"hidden_states": hidden}
        return DraftInput(bonus_tokens=target_output.bonus_tokens, state=state)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        assert draft_input["hidden_states"].shape == (batch.size, self._width)
        self._proposed += 1
        self.harm(self._proposed)
        roots = draft_input.bonus_tokens.unsqueeze(1)
        return Draft.chain(roots.repeat(1, runtime.config.num_draft_tokens))

    @hookimpl
    def verify(self, batch: Batch, target_output: TargetOutput) -> None:
        if not batch.size:
            self.seen.append(("verify", batch.mode.value, sorted(target_output.per_node)))

    @hookimpl
    def fixup_idle(self, batch: Batch, draft_input: DraftInput) -> None:
        hidden = draft_input.state.get("hidden_states")
        self.seen.append(("fixup_idle", batch.mode.value, hidden))


class RankWorker:
    """The process's LLM, and what can be done with it."""

    def __init__(self) -> None:
        self._llm: LLM | None = None
        self._wide = Wide()
        self._dice = Dice()
        self._replays = 0

    @property
    def llm(self) -> LLM:
        assert self._llm is not None
        return self._llm

    def open(self, dice: int | None = None, **settings: Any) -> dict[str, Any]:
        """Make the LLM; its configuration.

        Args:
            dice: seed of the dice that choose who drafts; None: none do.
        """
        self._dice = Dice(dice or 0)
        if dice is not None:
            settings["extensions"] = [self._dice]
        if settings.get("speculative_algorithm") == "WIDE":
            settings["speculative_algorithm"] = self._wide = Wide()
        if settings.get("speculative_algorithm") == "EARLY_EXIT":
            settings["speculative_algorithm"] = runpy.run_path(str(EXAMPLE))["EarlyExit"](1)
        if settings.get("speculative_algorithm") == "SPARSE_SELF":
            settings["speculative_algorithm"] = SparseSelf(View(1, 4, 2, 2))
        self._llm = LLM(**{"device": "cpu", **settings})
        return self.llm.effective_config

    def run(self, jobs: Sequence[Job]) -> tuple[list[Ended], dict[str, int]]:
        """Run requests in a loop of ``step``, then wait for the other ranks.

        Returns:
            What became of each request, and how many steps of each mode there were.
        """
        self.llm.reset_stats()
        names: dict[str, int] = {}
        ended: dict[int, Ended] = {}
        waiting = list(enumerate(jobs))
        step = 0
        while waiting or self.llm.has_unfinished_requests:
            for number, job in [w for w in waiting if w[1][0] <= step]:
                names[self.llm.add_request(*job[1:])] = number
                waiting.remove((number, job))
            for output in self.llm.step():
                if output.finished:
                    outputs = output.routed_experts, output.hidden_states
                    found = [None if each is None else each.tolist() for each in outputs]
                    what = output.token_ids, output.error, step, found
                    ended[names[output.request_id]] = what
            step += 1
        self.llm.wait_for_ranks()
        self.llm.check_pool()
        return [ended[i] for i in range(len(jobs))], dict(self.llm.stats()["steps"])

    def pad(self, fails: bool = False) -> None:
        """Pad passes from now on. In the place of graphs, what is recorded runs again.

        Args:
            fails: nothing can be recorded here.
        """
        self._recorder = RunsAgain("no memory for graphs" if fails else None)
        self.llm.engine.steps.runner.pad_passes(self._recorder)

    def recorded(self) -> tuple[int, int, str | None]:
        """How many forms are recorded; how often stand-ins were replayed; why recording failed."""
        runner = self.llm.engine.steps.runner
        recorded = runner.padded_pass.num_recordings
        return recorded, self._recorder.replayed, runner.graph_failure

    def timed(self, jobs: Sequence[Job]) -> float:
        """Run requests, then wait for the other ranks; seconds a step, idle ones too."""
        began = time.perf_counter()
        _, steps = self.run(jobs)
        return (time.perf_counter() - began) / sum(steps.values())

    def seen(self) -> list[tuple[Any, ...]]:
        """What ``Wide`` has noted."""
        return self._wide.seen

    def drafters(self) -> Counter[str]:
        """How often each algorithm drafted for a request, as dice chose."""
        return self._dice.drafters

    def costs(self) -> tuple[bool, list[float], list[list[float]]]:
        """What the choice of drafts knows of a step's cost: whether it was measured, the target's
        seconds by rows, and the drafters'."""
        costs = self.llm.run.choice.costs
        return costs.is_measured, costs.curve(1, 0.0, 64).tolist(), costs.drafters.tolist()

    def parameters(self) -> int:
        """Of the target, as this rank has it."""
        return self.llm.engine.steps.runner.target.num_parameters

    def harm(self, how: str, number: int, in_pass: bool = False) -> None:
        """Have this process fail or die at its propose of that number, or in the middle of the
        pass that follows, between two collectives."""

        def harm(*_: Any) -> None:
            if how == "raise":
                raise ValueError("a bug in a plugin")
            os.kill(os.getpid(), getattr(signal, how))

        def at(proposed: int) -> None:
            if proposed == number and in_pass:
                self.llm.engine.steps.runner.target.capture.layers[1].register_forward_pre_hook(
                    harm
                )
            elif proposed == number:
                harm()

        self._wide.harm = at

    def step(self, count: int) -> int:
        """Call ``step`` so often; the outputs there were."""
        return sum(len(self.llm.step()) for _ in range(count))

    def add(self, prompt: Any, params: SamplingParams) -> str:
        """Queue a request."""
        return self.llm.add_request(prompt, params)

    def must_step(self, wait: float = 0.0) -> bool:
        """Whether the LLM must step, now or within ``wait`` seconds."""
        deadline = time.monotonic() + wait
        while not self.llm.must_step and time.monotonic() < deadline:
            time.sleep(0.005)
        return self.llm.must_step

    def close(self) -> str:
        """Close the LLM, if there is one: "closed"."""
        if self._llm is not None:
            self._llm.close()
        self._llm = None
        return "closed"


def main(host: str, port: int, key: str) -> None:
    """Run the methods that are called over the connection to this address, until the end."""
    torch.set_num_threads(1)
    worker = RankWorker()
    with Client((host, port), authkey=key.encode()) as line:
        line.send("ready")
        while True:
            try:
                name, arguments, settings = line.recv()
            except EOFError:
                return
            if name == "exit":
                return
            try:
                line.send(("returned", getattr(worker, name)(*arguments, **settings)))
            except Exception as error:
                line.send(("raised", (type(error).__name__, str(error))))
