"""What SGLang's scheduler asks of an algorithm besides steps: all of it by the plugins' hooks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from engines import TREE, environment, running

ALGORITHMS: dict[str, dict[str, int]] = {
    "EAGLE3": TREE,
    "EAGLE": {},
    "MULTI_LAYER_EAGLE": {},
    "DFLASH": {},
    "DSPARK": {},
    "PEAGLE": {},
    "STANDALONE": TREE,
    "NGRAM": {},
}
GREEDY = {"temperature": 0, "max_new_tokens": 24}
ENGINE_OF_A_PROCESS = """
import sys
import time

sys.path.insert(0, ".")
from engines import running

if __name__ == "__main__":
    with running() as engine:
        print(*(process.pid for process in engine.processes), flush=True)
        time.sleep(600)
"""


def received(algorithm, prompts, **settings):
    """Decode, in an instance that decodes alone, prompts whose KV SGLang's stand-in for a transfer
    leaves as it is: zeros, in a pool that is new."""
    decodes = {
        "disaggregation_mode": "decode",
        "disaggregation_transfer_backend": "fake",
        "disaggregation_decode_retraction_backup": "none",  # its usual one needs a GPU
    }
    with running(algorithm, **decodes, **settings) as engine:
        replies = engine.sglang.generate(
            prompts,
            GREEDY,
            rid=[f"request {number}" for number in range(len(prompts))],
            bootstrap_host=["2.2.2.2"] * len(prompts),
            bootstrap_room=list(range(len(prompts))),
        )
        return [reply["output_ids"] for reply in replies], engine.seen("received")


@pytest.fixture(scope="module")
def plainly_received(prompts):
    return received(None, prompts[:4])[0]


@pytest.mark.parametrize(
    ("algorithm", "overlap"), [*((name, True) for name in ALGORITHMS), ("EAGLE3", False)]
)
def test_received_prefills_keep_tokens(algorithm, overlap, prompts, plainly_received, tokenizer):
    settings = {"disable_overlap_schedule": not overlap, **ALGORITHMS[algorithm]}
    tokens, batches = received(algorithm, prompts[:4], **settings)
    assert tokens == plainly_received
    lengths = [length for _, lens in batches for length in lens]
    assert sorted(lengths) == sorted(len(tokenizer(prompt)["input_ids"]) for prompt in prompts[:4])
    assert all(prompt_lens == lens for prompt_lens, lens in batches)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_idle_steps_between_requests_keep_tokens(algorithm, prompts, plain):
    with environment(IDLE_STEPS="3"), running(algorithm, **ALGORITHMS[algorithm]) as engine:
        for number in range(3):
            assert engine.generate(prompts[number : number + 1]).tokens == [plain[number]]
        # Three run before each request; those after the last one may not have run yet.
        assert 9 <= len(engine.seen("idle")) <= 12, engine.witness.read_text()
        assert len(engine.seen("future_map")) == 1
        assert engine.seen("asked") == [True]


def test_two_replicas_of_an_engine_keep_tokens_and_steps(prompts, plain):
    threads = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}  # which cores each takes
    with environment(**threads), running("EAGLE3", dp_size=2, **TREE) as engine:
        made = engine.generate(prompts)
        assert made.tokens == plain
        assert made.steps == 177
        assert {about["dp_rank"] for about in made.about} == {0, 1}
        processes = engine.processes
        assert len(processes) >= 4  # replicas, what shares requests out, and a detokenizer
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_engine_ends_with_the_process_that_made_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(ENGINE_OF_A_PROCESS)
    made = subprocess.Popen(
        [sys.executable, script], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True
    )
    try:
        assert made.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in made.stdout.readline().split()]
        assert len(processes) == 2
    finally:
        made.kill()
        made.wait()
    assert not psutil.wait_procs(processes, timeout=20)[1]


def test_two_engines_in_one_process_take_turns(prompts, plain):
    """Both must speculate: SGLang keeps one engine's settings for all of a process, and its
    tokenizer manager looks for draft counts which plain decoding does not send."""
    with running("EAGLE3", **TREE) as first, running("NGRAM") as second:
        assert first.generate(prompts[:4]).tokens == plain[:4]
        assert second.generate(prompts[:4]).tokens == plain[:4]
        assert first.generate(prompts[4:8]).tokens == plain[4:8]
    with running() as after:
        assert after.generate(prompts[:4]).tokens == plain[:4]
