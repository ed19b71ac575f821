"""The thread whose turn it is has the engine's device as its current one."""

from __future__ import annotations

from pathlib import Path
from threading import Barrier, Thread, local
from typing import Any

import pytest
import torch

from specplug import LLM, CommittedOutput, Draft, DraftInput, Runtime, SamplingParams, hookimpl
from specplug.algorithm import AlgorithmInfo
from specplug.engine import turns
from specplug.engine.turns import Turns
from specplug.errors import UsageError
from specplug.model.loading import choose_device


class _Devices:
    """torch.cuda's current device of each thread, cuda:0 at first."""

    def __init__(self) -> None:
        self._of_thread = local()

    @property
    def current(self) -> int:
        return getattr(self._of_thread, "index", 0)

    def device(self, device: torch.device) -> Any:
        devices = self

        class Current:
            def __enter__(self) -> None:
                self.before = devices.current
                devices._of_thread.index = device.index

            def __exit__(self, *exc: object) -> None:
                devices._of_thread.index = self.before

        return Current()


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> _Devices:
    made = _Devices()
    monkeypatch.setattr(torch.cuda, "device", made.device)
    return made


def test_a_turn_may_be_taken_while_it_begins_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a stream without a reference, which the garbage collector closes then."""
    shared, taken = Turns(torch.device("cuda", 0)), []

    class Collecting:
        def __init__(self, device: torch.device) -> None:
            self._collect("made")

        def __enter__(self) -> None:
            self._collect("entered")

        def __exit__(self, *exc: object) -> None:
            self._collect("left")

        def _collect(self, when: str) -> None:
            with shared:
                taken.append(when)

    def run() -> None:
        for _ in range(2):
            with shared:
                taken.append("its own")

    monkeypatch.setattr(torch.cuda, "device", Collecting)
    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(5)
    assert taken == ["made", "entered", "its own", "left"] * 2


def test_turns_of_two_devices_in_two_threads_keep_apart(devices: _Devices) -> None:
    both, found = Barrier(2), {}

    def run(index: int) -> None:
        shared = Turns(torch.device("cuda", index))
        with shared, shared:
            both.wait()
            found[index] = devices.current
        found[-index] = devices.current

    threads = [Thread(target=run, args=(index,)) for index in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {1: 1, 2: 2, -1: 0, -2: 0}


def test_turn_on_a_device_that_fails_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(device: torch.device) -> Any:
        raise RuntimeError("invalid device ordinal")

    shared = Turns(torch.device("cuda", 1))
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "device", fail)
        for _ in range(2):
            with pytest.raises(RuntimeError, match="ordinal"), shared:
                pass


class _Watch:
    """An algorithm that notes the current device in each of its hooks."""

    def __init__(self, devices: _Devices) -> None:
        self._devices = devices
        self.found: dict[str, set[int]] = {}

    def _note(self, where: str) -> None:
        self.found.setdefault(where, set()).add(self._devices.current)

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="WATCH", summary="Notes the current device", api_version=1)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> _Watch:
        self._note("create_worker")
        return self

    @hookimpl
    def build_draft_input(self, target_output: CommittedOutput) -> DraftInput:
        self._note("build_draft_input")
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, draft_input: DraftInput) -> Draft:
        self._note("propose")
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


def test_engine_runs_on_its_device_in_every_thread(
    tiny_model: Path, devices: _Devices, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model on the CPU, whose turns are those of cuda:1: load, warm-up, steps, close."""
    real = Turns._make_current
    freed: list[int] = []

    def on_gpu(self: Turns) -> Any:
        self._device = self._device and torch.device("cuda", 1)
        return real(self)

    monkeypatch.setattr(turns.Turns, "_make_current", on_gpu)
    watch = _Watch(devices)
    llm = LLM(tiny_model, device="cpu", speculative_algorithm=watch, warm_up="on")
    llm.run.on_close(lambda: freed.append(devices.current))
    params = SamplingParams(max_tokens=4, ignore_eos=True)
    thread = Thread(target=lambda: [*llm.stream([[5, 6, 7]], params)])
    thread.start()
    thread.join()
    llm.add_request([5, 6, 7], params)
    while llm.has_unfinished_requests:
        llm.step()
    llm.close()
    hooks = "create_worker", "build_draft_input", "propose"
    assert watch.found == {hook: {1} for hook in hooks}
    assert freed == [1]
    assert devices.current == 0


def test_choose_device_names_the_gpu_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert choose_device("cuda") == torch.device("cuda", 1)
    assert choose_device("cuda:0") == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="expected cuda:0 to cuda:1 here"):
        choose_device("cuda:2")
