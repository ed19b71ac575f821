"""Servers of several ranks: replicas, and ranks that share the model's MLPs."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from server_process import DEADLINE, ServerProcess, wait_until

from specplug import LLM, SamplingParams, UsageError
from specplug.config import EngineConfig
from specplug.serve.ranks import settings_of_ranks

PROMPTS = [f"def {name}(values):\n    " for name in ("mean", "total", "median", "mode", "spread")]
SHARED = "--dp-size", "2", "--enable-dp-attention"
DEADLINE_OF_THE_OTHERS = 30.0


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Plain decoding's texts, in float64: shards add up in another order."""
    with LLM(dtype="float64") as llm:
        params = SamplingParams(max_tokens=24)
        return [output.text or "" for output in llm.generate(PROMPTS, params)]


def test_ranks_share_the_load_and_change_no_text(
    serve: Callable[..., ServerProcess], expected: list[str]
) -> None:
    """Replicas do so in ``test_lifecycle.py``."""
    server = serve(*SHARED, "--speculative-algorithm", "EAGLE3", "--dtype", "float64")

    def text(prompt: str) -> str:
        answer = server.complete(prompt, temperature=0, max_tokens=24)
        found: str = answer.json()["choices"][0]["text"]
        return found

    assert text(PROMPTS[0]) == expected[0], "alone, while the other rank idles"
    with ThreadPoolExecutor(len(PROMPTS)) as threads:
        assert list(threads.map(text, PROMPTS)) == expected
    assert all(server.metric("output_tokens_total", rank=rank) > 0 for rank in "01")
    wait_until(lambda: server.is_whole)
    server.signal()
    assert server.wait() == 0


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_dies_ends_the_server(serve: Callable[..., ServerProcess], rank: int) -> None:
    server = serve(*SHARED)
    with ThreadPoolExecutor() as threads:
        fields = {"max_tokens": 250, "ignore_eos": True, "n": 4}
        answer = threads.submit(server.complete, PROMPTS[0], **fields)
        wait_until(lambda: server.metric("running_requests") > 0)
        os.kill(server.children()[rank], signal.SIGKILL)
        died = time.monotonic()
        assert server.wait() == 1
        assert time.monotonic() - died < DEADLINE_OF_THE_OTHERS
        error = answer.result(DEADLINE).json()["error"]["message"]
    assert f"rank {rank}" in error
    wait_until(lambda: f"rank {rank}" in "".join(server.errors))


def test_each_rank_has_a_gpu_and_a_port() -> None:
    config = EngineConfig(disaggregation="decode", disaggregation_address="tcp://0.0.0.0:9000")
    ranks = settings_of_ranks(config, 2, enable_dp_attention=False, num_gpus=2)
    assert [rank.device for rank in ranks] == ["cuda:0", "cuda:1"]
    addresses = [rank.disaggregation_address for rank in ranks]
    assert addresses == ["tcp://0.0.0.0:9000", "tcp://0.0.0.0:9001"]
    with pytest.raises(UsageError, match=r"dp_size=3.*2 GPUs"):
        settings_of_ranks(EngineConfig(), 3, enable_dp_attention=True, num_gpus=2)
    on_cpu = EngineConfig(device="cpu")
    ranks = settings_of_ranks(on_cpu, 3, enable_dp_attention=True, num_gpus=2)
    assert [rank.dp_rank for rank in ranks] == [0, 1, 2]
    assert {rank.device for rank in ranks} == {"cpu"}
    assert settings_of_ranks(config, 1, enable_dp_attention=False, num_gpus=1) == [config]
    for port in ("65535", "0", "*"):  # the last port, and two that stand for any
        config = EngineConfig(disaggregation="decode", disaggregation_address=f"tcp://h:{port}")
        with pytest.raises(UsageError, match="with several ranks each takes the next port"):
            settings_of_ranks(config, 2, enable_dp_attention=False, num_gpus=0)
    with pytest.raises(UsageError, match=r"dp_size=1 with enable_dp_attention.*2 or more"):
        settings_of_ranks(config, 1, enable_dp_attention=True, num_gpus=1)
