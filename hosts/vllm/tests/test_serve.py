"""vLLM's own server with an algorithm of specplug's: streams to the openai client."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest
from hosted_engines import MODEL
from test_readme import COMMANDS


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


@contextmanager
def served(log: Path, algorithm: str = "EAGLE3", **more_environment: str) -> Iterator[str]:
    """Run a server that is started by README.md's command, with its engine in a process."""
    port = free_port()
    more = ["--enforce-eager", "--num-gpu-blocks-override", "48"]
    (typed,) = (command for command in COMMANDS if command.startswith("specplug serve "))
    ours = ["--served-model-name", "tiny", "--dtype", "float32", "--port", str(port)]
    name, *words = shlex.split(typed.replace("TARGET", str(MODEL)).replace("EAGLE3", algorithm))
    split = words.index("--")
    command = [Path(sys.executable).with_name(name), *words[:split], *ours, *words[split:], *more]
    environment = {k: v for k, v in os.environ.items() if k != "VLLM_ENABLE_V1_MULTIPROCESSING"}
    environment |= more_environment
    with log.open("w") as output:
        server = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
    try:
        found = f"http://127.0.0.1:{port}"
        for _ in range(480):
            assert server.poll() is None, log.read_text()[-4000:]
            if is_up(found):
                break
            time.sleep(0.5)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield found
    finally:
        server.terminate()
        server.wait(60)


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served(tmp_path_factory.mktemp("serve") / "log") as address:
        yield address


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_streams_are_plain_through_the_openai_client(
    address: str, prompts: list[str], plain: list[list[int]], engines: object
) -> None:
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    streams = [
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=64, temperature=0, stream=True
        )
        for prompt in prompts
    ]
    texts = ["".join(chunk.choices[0].text for chunk in stream) for stream in streams]
    tokenizer = engines().llm.get_tokenizer()  # type: ignore[operator]
    assert texts == [tokenizer.decode(tokens) for tokens in plain]


def test_server_speculates(address: str) -> None:
    with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
        lines = reply.read().decode().splitlines()
    counters = {line.partition("{")[0]: line.rpartition(" ")[2] for line in lines}
    accepted = float(counters["vllm:spec_decode_num_accepted_tokens_total"])
    drafts = float(counters["vllm:spec_decode_num_drafts_total"])
    assert accepted / drafts > 2, json.dumps(counters, indent=1)[:2000]


def test_server_counts_requests_without_drafts(tmp_path: Path, third_party: object) -> None:
    installed = Path(sys.modules[type(third_party).__module__].__file__ or "").parent
    counts = tmp_path / "counts"
    counts.mkdir()
    environment = {"PYTHONPATH": str(installed), "ECHO_FAILS": "propose 2"}
    environment["PROMETHEUS_MULTIPROC_DIR"] = str(counts)
    with served(tmp_path / "log", "ECHO", **environment) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        for _ in range(2):
            client.completions.create(model="tiny", prompt="def", max_tokens=8, temperature=0)
        with urllib.request.urlopen(f"{address}/metrics", timeout=10) as reply:
            lines = reply.read().decode().splitlines()
    labels = '{algorithm="ECHO",reason="a plugin failed"}'
    assert f"specplug_undrafted_requests_total{labels} 1.0" in lines
