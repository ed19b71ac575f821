"""SGLang's engine, with processes that need not import it anew: that takes 13 of 15 seconds.

They are forked from one that has imported it. And an engine that is shut down ends its own
processes alone: SGLang's ends all children of the process, another engine's too, which that takes
for a crash of its own.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import multiprocessing
import os
from functools import partial
from typing import Any

from sglang.srt.entrypoints import engine as sglang_engine
from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
from sglang.srt.managers import data_parallel_controller
from sglang.srt.managers.tokenizer_manager import SignalHandler

from specplug.speculative.choice.draft_turns import DraftTurns

_IMPORTED = [
    "ends_with_tests",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.detokenizer_manager",
]


def _run(role: str, environment: dict[str, str], *arguments: Any) -> None:
    """Be a process of an engine's, with the environment that its engine was made in."""
    os.environ.clear()
    os.environ.update(environment)
    from sglang.srt.environ import envs
    from sglang.srt.managers import detokenizer_manager, scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()
    if os.environ.get("LOG_FILE"):
        log = logging.getLogger("specplug_sglang")
        log.addHandler(logging.FileHandler(os.environ["LOG_FILE"]))
        log.setLevel(logging.WARNING)
    if os.environ.get("IDLE_STEPS"):
        _idle_between_steps(scheduler.Scheduler)
    if os.environ.get("EVERY_OTHER"):
        _draft_every_other()
    if os.environ.get("TRACED_DRAFTS"):
        from traced_passes import trace_drafts

        trace_drafts()
    if role == "scheduler":
        scheduler.run_scheduler_process(*arguments)
    else:
        detokenizer_manager.run_detokenizer_process(*arguments)


def _run_controller(*arguments: Any, **named: Any) -> None:
    """Be the process that has an engine's replicas. They are started as SGLang does: children of
    this process end with it, while forked ones are those of a process that lives as long as they.
    """
    multiprocessing.set_start_method("spawn", force=True)
    data_parallel_controller.run_data_parallel_controller_process(*arguments, **named)


def _draft_every_other() -> None:
    """Draft in ``EVERY_OTHER`` steps, then not in as many; no clock is asked."""
    each, asked = int(os.environ["EVERY_OTHER"]), itertools.count()
    DraftTurns.drafts = lambda *of_step: next(asked) // each % 2 == 1


def _idle_between_steps(scheduler: Any) -> None:
    """Let the scheduler run ``IDLE_STEPS`` idle batches before its first request, and as many
    whenever it has nothing else to run, as a data-parallel rank does while others have requests:
    SGLang's own batch, in its own loop. A request waits until they have run, however soon it
    comes; so no request joins one that runs."""
    most = int(os.environ["IDLE_STEPS"])
    left = [most]
    choose = scheduler.get_next_batch_to_run

    def get_next_batch_to_run(self: Any, *arguments: Any, **named: Any) -> Any:
        held_back = []
        if left[0]:
            held_back = list(self.waiting_queue)
            self.waiting_queue.clear()
        plan = choose(self, *arguments, **named)
        self.waiting_queue.extend(held_back)
        if plan.batch_to_run is not None:
            left[0] = most
        elif left[0]:
            left[0] -= 1
            plan.batch_to_run = self.dp_attn_adapter.get_idle_batch()
        return plan

    scheduler.get_next_batch_to_run = get_next_batch_to_run
    RotaryEmbedding.forward_native = _rotated(RotaryEmbedding.forward_native)


def _rotated(forward: Any) -> Any:
    """SGLang's torch rotary embedding cannot rotate nothing, which its kernels can."""

    def forward_native(
        self: Any, positions: Any, query: Any, key: Any, *arguments: Any, **named: Any
    ) -> Any:
        if not len(positions):
            return query, key
        return forward(self, positions, query, key, *arguments, **named)

    return forward_native


def _cancel(handler: Any, *arguments: Any) -> None:
    """Fail what waits for an engine, one of whose processes has died. SGLang's own ends this
    process, and with it all tests."""
    for task in asyncio.all_tasks(handler.tokenizer_manager.event_loop):
        task.cancel("a process of the engine's has died; standard error says why")


def _go_on(*arguments: Any) -> None:
    """Let the engine's start fail by itself, in the place of ending this process."""


class FastEngine(sglang_engine.Engine):
    def __init__(self, **settings: Any) -> None:
        multiprocessing.set_start_method("forkserver", force=True)
        multiprocessing.set_forkserver_preload(_IMPORTED)
        sglang_engine.mp.set_start_method = lambda *arguments, **named: None
        environment = dict(os.environ)
        self.run_scheduler_process_func = partial(_run, "scheduler", environment)
        self.run_detokenizer_process_func = partial(_run, "detokenizer", environment)
        sglang_engine.run_data_parallel_controller_process = _run_controller
        SignalHandler.running_phase_sigquit_handler = _cancel
        super().__init__(custom_sigquit_handler=_go_on, **settings)

    def shutdown(self) -> None:
        atexit.unregister(self.shutdown)
        if self.tokenizer_manager is None:
            return
        watchdog = self.tokenizer_manager._subprocess_watchdog
        watchdog.stop()
        self.send_to_rpc.close(linger=0)
        for process in watchdog._processes:
            process.kill()
            process.join()
