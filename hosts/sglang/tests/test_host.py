"""SGLang from specplug's command line: list, doctor, bench, serve."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import openai
import pytest
from engines import MODEL

from specplug import SamplingParams, SpecplugError, UsageError
from specplug.host import EngineOptions, MeasuredEngine, ServerOptions
from specplug.speculative.undrafted import FAILED
from specplug_sglang.host import host
from specplug_sglang.measured_engine import DraftCounts, as_sglang_has_them
from specplug_sglang.versions import installed

ON_CPU = ["--device", "cpu", "--max-total-tokens", "4096", "--mem-fraction-static", "0.2"]


def specplug(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("specplug"), *arguments]
    return subprocess.run(
        command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240
    )


def test_list_says_which_algorithms_run():
    found = json.loads(specplug("list", "--engine", "sglang", "--json").stdout)
    assert found["engine"] == f"SGLang {installed()}"
    told = {each["name"]: each["obstacles"] for each in found["algorithms"]}
    assert told.pop("SPARSE_SELF") == [
        f"SPARSE_SELF drafts with the target's own layers, and SGLang {installed()} runs them for "
        "its own passes alone"
    ]
    drafting = {"DFLASH", "DSPARK", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "NGRAM", "PEAGLE"}
    drafting |= {"STANDALONE"}
    assert told == {
        name: [] for name in ("NONE", *drafting, "ECHO", "FRAGILE", "FRAGILE_TREE", "SYNC")
    }


def test_doctor_knows_the_versions():
    done = specplug("doctor", "--json")
    found = json.loads(done.stdout)
    (sglang,) = [each for each in found["hosts"] if each["name"] == "sglang"]
    assert not sglang["problems"]
    assert installed() in done.stdout


def test_server_command_has_the_typed_settings():
    options = ServerOptions(
        model="folder",
        algorithm="EAGLE3",
        num_steps=5,
        topk=4,
        num_draft_tokens=16,
        draft_model_path=Path("/weights"),
        served_model_name="tiny",
        more=("--tp", "1"),
    )
    _, *command = host.server_command(options)
    assert " ".join(command) == (
        "-m sglang.launch_server --model-path folder --dtype auto "
        "--speculative-algorithm SPECPLUG_EAGLE3 --attention-backend triton "
        "--speculative-num-steps 5 --speculative-eagle-topk 4 --speculative-num-draft-tokens 16 "
        "--speculative-draft-model-path /weights --host 127.0.0.1 --port 30000 "
        "--served-model-name tiny --tp 1"
    )
    on_cpu = attrs.evolve(options, more=("--device=cpu",))
    assert "--attention-backend torch_native" in " ".join(host.server_command(on_cpu))
    plain = attrs.evolve(options, algorithm="NONE")
    assert not any("speculative" in each for each in host.server_command(plain))


def test_cpu_without_its_variable_is_refused(monkeypatch):
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    for more in (("--device", "cpu"), ("--device=cpu",)):
        with pytest.raises(UsageError, match="SGLANG_USE_CPU_ENGINE from the environment; set it"):
            host.server_command(ServerOptions(model="folder", algorithm="NGRAM", more=more))


def test_draft_counts_are_those_of_sglang():
    counts = DraftCounts()
    counts.add({"spec_verify_ct": 3, "spec_num_correct_drafts": 5})
    counts.add(
        {
            "spec_verify_ct": 4,
            "spec_num_correct_drafts": 4,
            "spec_correct_drafts_histogram": [1, 2, 1, 0],
        }
    )
    counts.add({})  # of plain decoding
    assert counts.as_stats() == {
        "accepted": 16,
        "verifications": 7,
        "drafted_by_position": [7, 7],
        "accepted_by_position": [3, 1],
        "seconds": {},
        "prefill_seconds": 0.0,
    }
    assert counts.as_stats(paused=2)["drafted_by_position"] == [5, 5]


def test_sampling_settings_have_sglangs_names():
    found = as_sglang_has_them(SamplingParams(max_tokens=5, seed=3, stop="x", top_k=0))
    assert (found["max_new_tokens"], found["sampling_seed"]) == (5, 3)
    assert (found["stop"], found["top_k"]) == (["x"], -1)
    with pytest.raises(UsageError, match="logit_bias: not measured in SGLang; leave it out"):
        as_sglang_has_them(SamplingParams(logit_bias={1: 2.0}))


def test_unknown_argument_is_refused_in_one_line():
    options = EngineOptions(model=str(MODEL), algorithm="NGRAM", more=("--devize", "cpu"))
    with pytest.raises(UsageError, match="--devize cpu: refused; see python -m sglang") as raised:
        host.open_engine(options)
    assert "\n" not in str(raised.value)


def test_bench_compares_with_plain_decoding():
    wanted = ["--batch-sizes", "4", "--rounds", "1", "--max-new-tokens", "32", "--dtype", "float32"]
    algorithm = ["--speculative-algorithms", "EAGLE3:steps=5,topk=4,tokens=16"]
    done = specplug("bench", "--engine", "sglang", *algorithm, *wanted, "--json", "--", *ON_CPU)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    plain, made = found["results"]
    assert made["identical"]
    assert made["mean_accept_length"] > 2 > (plain["mean_accept_length"] or 1)
    assert (made["config"]["topk"], made["config"]["num_draft_tokens"]) == (4, 16)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Engines of FRAGILE, which are closed at the end."""
    opened: list[MeasuredEngine] = []

    def open_engine(fails: str) -> MeasuredEngine:
        monkeypatch.setenv("FRAGILE", fails)
        options = EngineOptions(model=str(MODEL), algorithm="FRAGILE", dtype="float32", more=ON_CPU)
        opened.append(host.open_engine(options))
        return opened[-1]

    yield open_engine
    for engine in opened:
        engine.close()


def test_engine_whose_plugin_fails_counts_the_requests(fragile):
    engine = fragile("propose 3")
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=16))
    assert engine.stats()["undrafted"] == {FAILED: 1}
    engine.reset_stats()
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8))
    engine.generate([[5, 6, 7]], SamplingParams(max_tokens=8, repetition_penalty=1.5))
    assert engine.stats()["undrafted"] == {"penalties": 1}


def test_engine_whose_plugin_does_not_start_says_so(fragile):
    with pytest.raises(SpecplugError, match="SGLang's engine has ended with exit code"):
        fragile("create_future_map 1")


def test_engine_whose_settings_change_twice_is_refused(fragile, capfd):
    with pytest.raises(SpecplugError, match="SGLang's engine has ended with exit code"):
        fragile("validate_config")
    assert "FRAGILE: validate_config() changes num_draft_tokens 5 to 6" in capfd.readouterr().err


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """SGLang's server, started by specplug's command line."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    log = tmp_path_factory.mktemp("serve") / "log"
    command = [str(Path(sys.executable).with_name("specplug")), "serve", "--engine", "sglang"]
    command += ["--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "5"]
    command += ["--model", str(MODEL), "--served-model-name", "tiny", "--dtype", "float32"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--", *ON_CPU]
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
    try:
        found = f"http://127.0.0.1:{port}"
        for _ in range(240):
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


def is_up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health_generate", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def test_streams_through_the_openai_client_are_plain(address, prompts, plain, tokenizer):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
    streams = [
        client.completions.create(
            model="tiny", prompt=prompt, max_tokens=64, temperature=0, stream=True
        )
        for prompt in prompts
    ]
    pieces = [[chunk.choices[0].text for chunk in stream if chunk.choices] for stream in streams]
    assert ["".join(each) for each in pieces] == [tokenizer.decode(each) for each in plain]
    assert 12 < sum(map(len, pieces)) < 12 * 40  # several tokens a step
