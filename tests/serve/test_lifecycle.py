"""How a server starts, drains and ends, and what happens when an engine does."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from forked_engines import serve_here
from server_process import DEADLINE, ServerProcess, is_alive, wait_until
from warm_process import run_command

from specplug import LLM, SamplingParams, UsageError
from specplug.errors import SpecplugError
from specplug.serve.engine_client import _END_SECONDS
from specplug.serve.limits import Limits
from specplug.serve.server import _listen, _listener

LONG: dict[str, Any] = {"max_tokens": 2000, "ignore_eos": True}


def test_a_server_that_is_told_to_end_lets_requests_finish(serve: Any) -> None:
    server: ServerProcess = serve()
    (child,) = server.children()
    with LLM() as llm:
        (expected,) = llm.generate("def f(", SamplingParams(max_tokens=200, ignore_eos=True))
    with server.client as client, ThreadPoolExecutor(1) as others:
        fields: dict[str, Any] = {"prompt": "def f(", "model": "tiny-code", "temperature": 0}
        fields |= {"max_tokens": 200, "extra_body": {"ignore_eos": True}}
        whole = others.submit(client.completions.create, **fields)
        stream = client.completions.create(**fields, stream=True)
        text = next(iter(stream)).choices[0].text
        wait_until(lambda: server.metric("running_requests") == 2)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health").json() == {"status": "draining"})
        assert server.get("/health").status_code == 503
        refused = server.complete("x")
        assert (refused.status_code, "Retry-After" in refused.headers) == (503, True)
        assert "shutting down" in refused.json()["error"]["message"]
        text += "".join(chunk.choices[0].text for chunk in stream)
        assert text == expected.text
        assert whole.result().choices[0].text == expected.text
    assert server.wait() == 0
    assert not is_alive(child)
    assert server.errors == []


def test_what_does_not_finish_in_time_is_aborted(serve: Any) -> None:
    server: ServerProcess = serve(
        *("--shutdown-timeout", "1", "--speculative-algorithm", "EAGLE3"),
        *("--speculative-eagle-topk", "4", "--speculative-num-steps", "2"),
        *("--speculative-num-draft-tokens", "400"),
    )
    with ThreadPoolExecutor(2) as clients:
        whole = clients.submit(server.complete, **LONG)
        stream = clients.submit(server.complete, stream=True, **LONG)
        wait_until(lambda: server.metric("running_requests") == 2)
        server.signal(signal.SIGINT)
        assert whole.result().status_code == 503
        assert stream.result().status_code == 200
        *_, last = filter(None, stream.result().text.split("\n\n"))
        assert "the server is shutting down" in last
    assert server.wait() == 0
    (line,) = server.errors
    assert line.startswith("warning: EAGLE3: "), "an engine's warnings are the server's"


FAILS = """
from specplug import AlgorithmInfo, Defaults, Draft, DraftInput, hookimpl


class Algorithm:
    @hookimpl
    def describe(self):
        return AlgorithmInfo(
            name="NAME", summary="Fails", api_version=1, defaults=Defaults(num_steps=1)
        )

    @hookimpl
    def create_worker(self, runtime):
        return self

    @hookimpl
    def build_draft_input(self, runtime, batch, target_output):
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime, batch, draft_input):
        if any(len(request.token_ids) == 13 for request in batch.requests):
            raise RuntimeError("thirteen tokens")
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


algorithm = Algorithm()
"""


def test_a_step_that_fails_ends_its_requests_and_no_others(plugin_folder: Any, serve: Any) -> None:
    plugin_folder.write("FAILS", code=FAILS)
    path = plugin_folder.environment()["PYTHONPATH"]
    server: ServerProcess = serve("--speculative-algorithm", "FAILS", PYTHONPATH=path)
    for stream in (False, True):
        failed = server.complete([1] * 10, stream=stream, **LONG)
        assert failed.status_code == (200 if stream else 500)
        assert "RuntimeError: thirteen tokens" in failed.text
        assert '"type": "server_error"' in failed.text
    assert server.complete([1] * 20, max_tokens=4).status_code == 200
    wait_until(lambda: server.is_whole)
    assert any("thirteen tokens" in line for line in server.errors), "it is logged too"
    with ThreadPoolExecutor(1) as clients:
        running = clients.submit(server.complete, [1] * 20, **LONG)
        wait_until(lambda: server.metric("running_requests") == 1)
        server.signal(signal.SIGTERM)
        wait_until(lambda: server.get("/health").status_code == 503)
        (child,) = server.children()
        os.kill(child, signal.SIGSTOP)
        server.signal(signal.SIGTERM)
        began = time.monotonic()
        assert running.result().status_code == 503, "a second signal is not patient"
    assert server.wait() == 0
    assert time.monotonic() - began < _END_SECONDS, "nor does it wait for an engine that hangs"
    assert not is_alive(child)


def run(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a server that does not get as far as to listen."""
    environment = {**os.environ, "SPECPLUG_DEBUG": ""}
    return run_command(["serve", *arguments], environment, run=serve_here)


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        code, _, errors = run("--port", str(port))
    assert code == 1
    assert errors.startswith(f"error: cannot listen at 127.0.0.1:{port}: Address already in")
    assert len(errors.splitlines()) == 1


def test_a_port_that_another_takes_while_the_model_is_loaded() -> None:
    with _listener("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with _listener("127.0.0.1", port) as second:
            _listen(first, 8)
            where = f"cannot listen at 127.0.0.1:{port} any more: Address already in use"
            with pytest.raises(SpecplugError, match=f"^{where}: .*; give another --port$"):
                _listen(second, 8)


@pytest.mark.parametrize("key", ["", " ", "key "])
def test_a_key_that_no_client_can_send_or_all_do(key: str) -> None:
    with pytest.raises(UsageError, match=r"^api_key .*; expected a key that clients send"):
        Limits(api_key=key)


def test_an_engine_that_cannot_start(tmp_path: Path) -> None:
    code, output, errors = run("--port", "0", "--model", str(tmp_path))
    assert (code, output) == (1, "")
    assert errors.startswith("error: model ")
    assert len(errors.splitlines()) == 1
    code, output, errors = run("--port", "0", "--device", "abacus")
    assert (code, output) == (2, "")
    assert errors.startswith("error: device='abacus': expected cpu, cuda or cuda:N")


def test_two_engines_share_the_requests_and_their_end(serve: Any) -> None:
    server: ServerProcess = serve("--dp-size", "2", "--speculative-algorithm", "NGRAM")
    children = server.children()
    assert len(children) == 2
    prompts = [f"def {name}(" for name in ("total", "mean", "median", "mode")]
    with LLM() as llm:
        params = SamplingParams(max_tokens=24, temperature=0.8, seed=3)
        expected = [output.text for output in llm.generate(prompts, params)]
    with server.client as client, ThreadPoolExecutor(4) as clients:
        fields: dict[str, Any] = {"model": "tiny-code", "temperature": 0.8, "seed": 3}
        asked = [
            clients.submit(client.completions.create, prompt=p, max_tokens=24, **fields)
            for p in prompts
        ]
        assert [each.result().choices[0].text for each in asked] == expected
    for rank in ("0", "1"):
        assert server.metric("requests_total", rank=rank, finish_reason="length") >= 1
    assert server.metric("requests_total") == 4
    assert server.is_whole
    with ThreadPoolExecutor(4) as clients:
        wholes = [clients.submit(server.complete, **LONG) for _ in range(2)]
        streams = [clients.submit(server.complete, stream=True, **LONG) for _ in range(2)]
        wait_until(lambda: server.metric("running_requests") == 4)
        os.kill(children[1], signal.SIGKILL)
        answers = [each.result() for each in wholes + streams]
    assert {answer.status_code for answer in answers[:2]} <= {500, 503}
    assert {answer.status_code for answer in answers[2:]} == {200}
    assert all("its process ended with exit code -9" in answer.text for answer in answers)
    assert server.wait() == 1
    wait_until(lambda: server.errors)
    assert "has ended: its process ended with exit code -9" in server.errors[-1]
    assert not any(map(is_alive, children))


def test_a_server_that_is_told_to_end_while_it_loads() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "specplug", "serve", "--port", "0"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    server = ServerProcess(process, url="", errors=[])
    (child,) = wait_until(server.children)
    server.signal(signal.SIGTERM)
    assert process.communicate(timeout=DEADLINE) == ("", "")
    assert process.returncode == 0
    assert not is_alive(child)


def test_verbose_server_tells_how_its_engine_starts(serve: Any) -> None:
    server: ServerProcess = serve("--verbose", "--warm-up", "on", "--max-running-requests", "1")
    server.signal()
    assert server.wait() == 0
    parts = [
        line.partition(": ")[2].strip() for line in server.errors if line.startswith("loading")
    ]
    assert parts[:2] == ["reading the configuration", "loading weights"]
    assert parts[-2:] == ["allocating the KV pool", "warming up"]
    (times,) = [line for line in server.errors if "start: " in line]
    assert all(f"{part} " in times for part in parts)


@pytest.mark.parametrize(
    ("end", "told"),
    [
        ("_exit(7)", "7 at loading the draft; expected it to go on; what it wrote to standard"),
        ("kill(os.getpid(), 9)", "-9 (Killed) at loading the draft; the system's log says whether"),
    ],
)
def test_engine_that_dies_as_it_loads_is_told(plugin_folder: Any, end: str, told: str) -> None:
    # A process that ends at once may take with it what it has said last.
    code = f"import os, time\n{FAILS}".replace("return self", f"time.sleep(0.5); os.{end}")
    plugin_folder.write("DIES", code=code)
    arguments = "serve", "--port", "0", "--speculative-algorithm", "DIES"
    environment = {**os.environ, **plugin_folder.environment(), "SPECPLUG_DEBUG": ""}
    status, output, errors = run_command(arguments, environment, run=serve_here)
    assert (status, output) == (1, "")
    assert f"error: the engine has ended: its process ended with exit code {told}" in errors
