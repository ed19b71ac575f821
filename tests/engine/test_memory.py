"""A closed LLM holds no memory: nothing waits for the garbage collector, which is off here."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch

from specplug import LLM, PluginError, Runtime, SamplingParams, UsageError, hookimpl
from specplug.registry import Registry

SLACK = 1 << 20
"""Bytes that caches of the process may keep: masks of trees, tables by size."""

WAYS: dict[str, dict[str, Any]] = {
    **{name: {"speculative_algorithm": name} for name in Registry().names()},
    "plain loop": {"disable_overlap_schedule": True},
    "warmed up": {"warm_up": "on", "max_running_requests": 2},
    "disaggregated": {"disaggregation": "both", "speculative_algorithm": "EAGLE3"},
}


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collector() -> Iterator[None]:
    """What is garbage before stays so, and counts before and after alike."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _tensor_bytes() -> int:
    """Of all tensors that Python knows, those in reference cycles too."""
    tensors = (each for each in gc.get_objects() if issubclass(type(each), torch.Tensor))
    storages = (tensor.untyped_storage() for tensor in tensors if tensor.device.type != "meta")
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _use(llm: LLM) -> None:
    """Generate, and leave a stream in the middle."""
    asked = SamplingParams(max_tokens=4, return_hidden_states=(0, 9), logprobs=1)
    llm.generate(["def f("], asked)
    with closing(llm.stream(["class A"], SamplingParams(max_tokens=20))) as stream:
        next(stream)


@pytest.mark.parametrize("way", WAYS)
def test_close_frees_weights_and_caches_at_once(way: str) -> None:
    before = _tensor_bytes()
    llm = LLM(max_total_tokens=1024, **WAYS[way])
    _use(llm)
    assert _tensor_bytes() - before > 30 * SLACK
    llm.close()
    assert _tensor_bytes() - before < SLACK


def test_steps_of_many_requests_free_their_plans() -> None:
    with LLM(max_total_tokens=2048) as llm:
        before = _tensor_bytes()
        prompts = [[7] * length for length in (300, 40, 350, 60, 320, 10)]
        llm.generate(prompts, SamplingParams(max_tokens=8, ignore_eos=True))
        assert _tensor_bytes() - before < SLACK


def test_an_llm_that_is_forgotten_leaves_no_memory() -> None:
    before = _tensor_bytes()
    _use(LLM(speculative_algorithm="EAGLE3", max_total_tokens=1024))
    assert _tensor_bytes() - before < SLACK


def test_close_frees_what_an_open_stream_uses() -> None:
    before = _tensor_bytes()
    llm = LLM(max_total_tokens=1024)
    stream = llm.stream(["def f(", "class A"], SamplingParams(max_tokens=20))
    next(stream)
    llm.close()
    assert _tensor_bytes() - before < SLACK
    stream.close()


def test_close_frees_what_a_failed_step_has_used(successors: Any) -> None:
    class Fails(successors):  # type: ignore[misc]
        @hookimpl
        def propose(self, runtime: Runtime) -> None:
            raise LookupError("no draft")

    before = _tensor_bytes()
    llm = LLM(speculative_algorithm=Fails(), max_total_tokens=1024)
    with pytest.raises(PluginError, match="LookupError: no ") as error:
        _use(llm)
    llm.close()
    assert _tensor_bytes() - before < SLACK
    assert error.tb is not None, "the frames of the step are still there"


def test_a_worker_that_fails_leaves_no_memory(successors: Any) -> None:
    class Fails(successors):  # type: ignore[misc]
        @hookimpl
        def create_worker(self, runtime: Runtime) -> None:
            runtime.capture_layer_inputs((1, runtime.num_layers))
            raise LookupError("no weights")

    before = _tensor_bytes()
    with pytest.raises(PluginError, match="LookupError: no ") as error:
        LLM(speculative_algorithm=Fails())
    assert _tensor_bytes() - before < SLACK
    assert error.tb is not None, "the frames of __init__ are still there"


def test_an_instance_that_cannot_bind_leaves_no_memory() -> None:
    before = _tensor_bytes()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="in use") as error:
            LLM(disaggregation="decode", disaggregation_address=address, max_total_tokens=1024)
    assert _tensor_bytes() - before < SLACK
    assert error.tb is not None, "the frames of __init__ are still there"
