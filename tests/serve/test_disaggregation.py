"""A decode server and prefill servers: what a client gets, and what it gets when one is gone."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import requests
from server_process import DEADLINE, ServerProcess, free_port, wait_until
from warm_server import start_warm_server

from specplug import LLM, SamplingParams

PROMPTS = ["def mean(values):\n    ", "class Stack:\n    ", "import os\n" * 40, "for i in "]
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0.8, "seed": 7, "max_tokens": 24, "frequency_penalty": 0.5},
    {"temperature": 1.0, "seed": 3, "max_tokens": 1},
]
COMMON = "--page-size", "4", "--chunked-prefill-size", "24"


@contextmanager
def instances(
    algorithm: str, num_prefill: int, *more: str, ranks: int = 1
) -> Iterator[list[ServerProcess]]:
    """A decode server, then its prefill servers, all registered; of so many ranks each, whose ports
    follow one another."""
    port = free_port()
    addresses = [f"tcp://127.0.0.1:{port + rank}" for rank in range(ranks)]
    speculative = "--speculative-algorithm", algorithm
    modes = {"decode": addresses[0], "prefill": ",".join(addresses)}
    with ExitStack() as ends, ThreadPoolExecutor() as threads:
        starting = [
            threads.submit(
                start_warm_server,
                *("--disaggregation-mode", mode, "--disaggregation-address", modes[mode]),
                *speculative,
                *COMMON,
                *more,
            )
            for mode in ["decode", *["prefill"] * num_prefill]
        ]
        servers = [each.result() for each in starting]
        for server in servers:
            ends.callback(server.kill)
        wait_until(lambda: servers[0].metric("prefill_instances") == num_prefill * ranks**2)
        yield servers


def complete_all(server: ServerProcess) -> list[str]:
    """All prompts in all settings, at once."""
    cases = [(prompt, settings) for prompt in PROMPTS for settings in SETTINGS]
    with ThreadPoolExecutor(len(cases)) as threads:
        answers = list(threads.map(lambda case: server.complete(case[0], **case[1]), cases))
    return [answer.json()["choices"][0]["text"] for answer in answers]


@pytest.fixture(scope="module")
def expected() -> list[str]:
    """Plain decoding's texts."""
    params = [SamplingParams(**settings) for settings in SETTINGS]
    with LLM() as llm:
        outputs = llm.generate([p for p in PROMPTS for _ in params], params * len(PROMPTS))
    return [output.text or "" for output in outputs]


@pytest.fixture(scope="module")
def pair() -> Iterator[list[ServerProcess]]:
    """A decode server and a prefill server under EAGLE3."""
    with instances("EAGLE3", 1) as servers:
        yield servers


def test_clients_get_the_texts_of_plain_decoding(
    pair: list[ServerProcess], expected: list[str]
) -> None:
    decode, prefill = pair
    assert complete_all(decode) == expected
    assert complete_all(decode) == expected, "with the decode side's prefix cache"
    assert decode.metric("cached_tokens_total") > 0
    assert decode.metric("prompt_tokens_total") == 0, "all prompts came from the other side"
    assert decode.metric("received_bytes_total") > 0
    wait_until(lambda: decode.is_whole and prefill.is_whole)


def test_a_prefill_server_sends_clients_to_a_decode_server(pair: list[ServerProcess]) -> None:
    refusal = pair[1].complete()
    assert refusal.status_code == 400
    assert "prefill instance" in refusal.json()["error"]["message"]


def test_a_client_that_goes_away_ends_its_request_on_both_sides(pair: list[ServerProcess]) -> None:
    decode, prefill = pair
    with pytest.raises(requests.exceptions.ReadTimeout):
        requests.post(
            f"{decode.url}/v1/completions",
            json={"prompt": PROMPTS[2], "max_tokens": 200, "ignore_eos": True, "n": 8},
            timeout=0.2,
        )
    wait_until(lambda: decode.is_whole and prefill.is_whole)
    assert decode.metric("requests_total", finish_reason="abort") == 8


def test_ranks_that_share_their_mlps_serve_apart() -> None:
    """Two ranks that decode and two that prefill for both of them."""
    prompts, params = PROMPTS[:2] * 2, SamplingParams(max_tokens=16)
    with LLM(dtype="float64") as llm:
        expected = [output.text for output in llm.generate(prompts, params)]
    shared = "--dp-size", "2", "--enable-dp-attention", "--dtype", "float64"
    with instances("EAGLE3", 1, *shared, ranks=2) as (decode, prefill):
        with ThreadPoolExecutor(len(prompts)) as threads:
            fields = {"temperature": 0, "max_tokens": 16}
            answers = list(threads.map(lambda prompt: decode.complete(prompt, **fields), prompts))
        assert [answer.json()["choices"][0]["text"] for answer in answers] == expected
        assert decode.metric("prompt_tokens_total") == 0, "all prompts came from the other side"
        assert all(decode.metric("output_tokens_total", rank=rank) > 0 for rank in "01")
        wait_until(lambda: decode.is_whole and prefill.is_whole)


def test_requests_outlive_a_prefill_server(expected: list[str]) -> None:
    with instances("EAGLE3", 2) as (decode, first, second):
        with ThreadPoolExecutor() as threads:
            answers = threads.submit(complete_all, decode)
            wait_until(lambda: decode.metric("transfers_total", event="sent") > 0)
            first.kill()
            assert answers.result(DEADLINE) == expected
        wait_until(lambda: decode.metric("prefill_instances") == 1)
        wait_until(lambda: decode.is_whole and second.is_whole)


def test_request_without_a_prefill_server_ends_with_why() -> None:
    with instances("NONE", 0, "--disaggregation-timeout", "1") as (decode,):
        answer = decode.complete(max_tokens=4)
        assert answer.status_code == 500
        assert "prefill" in answer.json()["error"]["message"]
        wait_until(lambda: decode.is_whole)
        assert decode.get("/health").status_code == 200
