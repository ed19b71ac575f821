"""vLLM beside us: a process of its own, which generates when it is asked to.

``decode_step.py --peer`` starts it with the Python and the packages of an environment that has
vLLM, and lets it take turns with our engine on the same card and the same weights. Alone:

    python benchmarks/gpu/peer_vllm.py FOLDER/llama-8b --algorithm none

prints the time of a decode step at each point. vLLM runs with full and piecewise CUDA graphs and
its prefix cache, as it comes.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from points import DRAFTED, PLAIN, Generation, Results, measured_commit, time_steps

MARK = "PEER "
"""Before each line of the process that is meant for its starter."""

NUM_STEPS = 5


class Peer:
    """A process of this module, over pipes.

    Args:
        base: what ``shapes.write_shape`` returned.
        algorithm: ``none``, or ``eagle3`` with a chain of 5.
        python: of an environment with vLLM.
        packages: a folder that is put on its ``PYTHONPATH``; None: the environment has all.
        log: where all that it prints goes.
        share: of the GPU's memory that it may use.
        dummy: let it draw weights of its own.
        batch_invariant: have it compute each row alike in any batch (``VLLM_BATCH_INVARIANT``).
        settings: more arguments of its ``LLM``, which JSON can hold.
    """

    def __init__(
        self,
        base: Path,
        algorithm: str,
        *,
        python: str = sys.executable,
        packages: Path | None = None,
        log: Path = Path(os.devnull),
        share: float = 0.34,
        dummy: bool = False,
        batch_invariant: bool = False,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        environment = dict(os.environ, VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
        environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        environment |= {"VLLM_HOST_IP": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}
        environment |= {"NCCL_SOCKET_IFNAME": "lo", "VLLM_USE_DEEP_GEMM": "0"}
        environment |= {"VLLM_USE_FLASHINFER_SAMPLER": "0", "PYTHONUNBUFFERED": "1"}
        environment |= {"VLLM_BATCH_INVARIANT": str(int(batch_invariant))}
        if packages is not None:
            environment["PYTHONPATH"] = str(packages)
        command = [python, __file__, str(base), "--algorithm", algorithm, "--serve"]
        command += ["--share", str(share), *(["--dummy"] if dummy else [])]
        command += ["--settings", json.dumps(dict(settings or {}))]
        self._log, self._path = log.open("ab"), log
        self._process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,
        )
        self._answers: queue.Queue[Any] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()
        self.about: dict[str, Any] = self._answer()

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        """Generate; see ``points.Generate``."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([prompts, max_tokens]) + "\n")
        self._process.stdin.flush()
        seconds, steps, tokens = self._answer()["generation"]
        return seconds, steps, tokens

    def close(self) -> None:
        """End the process and those that it started."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _read(self) -> None:
        """Sort what the process prints into answers and log, until it ends."""
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                self._answers.put(json.loads(line.removeprefix(MARK)))
            else:
                self._log.write(line.encode())
        self._answers.put(None)

    def _answer(self) -> Any:
        answer = self._answers.get()
        if answer is None:
            raise RuntimeError(f"the peer ended with {self._process.wait()}; see {self._path}")
        return answer


def _load(
    base: Path, algorithm: str, share: float, settings: Mapping[str, Any], *, dummy: bool
) -> Any:
    """Make vLLM's engine."""
    from vllm import LLM

    drafts: dict[str, Any] = {
        "none": None,
        "eagle3": {
            "method": "eagle3",
            "model": str(base / "eagle3"),
            "num_speculative_tokens": NUM_STEPS,
        },
    }
    rows = NUM_STEPS + 1 if drafts[algorithm] else 1
    given: dict[str, Any] = {
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "max_model_len": 16384,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 8192,
        "seed": 0,
        "disable_log_stats": drafts[algorithm] is None,
        "compilation_config": {
            "cudagraph_capture_sizes": [rows * n for n in (1, 2, 4, 8, 16, 24, 32)]
        },
    }
    return LLM(
        model=str(base / "target"),
        load_format="dummy" if dummy else "auto",
        gpu_memory_utilization=share,
        speculative_config=drafts[algorithm],
        **{**given, **settings},
    )


class _Engine:
    """vLLM, as ``points.time_steps`` calls an engine."""

    def __init__(self, llm: Any, *, drafting: bool) -> None:
        self._llm, self._drafting = llm, drafting

    def generate(self, prompts: list[list[int]], max_tokens: int) -> Generation:
        from vllm import SamplingParams

        params = SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        before, start = self._verifications(), time.perf_counter()
        outputs = self._llm.generate(
            [{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False
        )
        seconds = time.perf_counter() - start
        tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        if not self._drafting:
            return seconds, max_tokens - 1, tokens
        return seconds, (self._verifications() - before) // len(prompts), tokens

    def _verifications(self) -> int:
        if not self._drafting:
            return 0
        name = "vllm:spec_decode_num_drafts"
        found = [m.value for m in self._llm.get_metrics() if m.name == name]
        return int(sum(found))


def _serve(engine: _Engine) -> None:
    for line in sys.stdin:
        prompts, max_tokens = json.loads(line)
        print(MARK + json.dumps({"generation": engine.generate(prompts, max_tokens)}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base", type=Path, help="a shape's folder, as shapes.py writes it")
    parser.add_argument("--algorithm", default="none", choices=["none", "eagle3"])
    parser.add_argument("--share", type=float, default=0.85, help="of the GPU's memory")
    parser.add_argument("--dummy", action="store_true", help="weights of vLLM's own drawing")
    parser.add_argument(
        "--settings", type=json.loads, default={}, metavar="JSON", help="arguments of vLLM's LLM"
    )
    parser.add_argument("--serve", action="store_true", help="answer lines of standard input")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    began = time.monotonic()
    algorithm: str = arguments.algorithm
    settings: dict[str, Any] = arguments.settings
    llm = _load(arguments.base, algorithm, arguments.share, settings, dummy=arguments.dummy)
    engine = _Engine(llm, drafting=algorithm != "none")
    import torch
    import vllm

    about = {"vllm": vllm.__version__, "ready_s": round(time.monotonic() - began, 1)}
    if arguments.serve:
        print(MARK + json.dumps(about), flush=True)
        _serve(engine)
        return
    results = Results(arguments.output)
    results.begin(
        commit=measured_commit(),
        machine={"gpu": torch.cuda.get_device_name()},
        versions={"vllm": vllm.__version__, "torch": torch.__version__},
    )
    vocab_size = json.loads((arguments.base / "target/config.json").read_text())["vocab_size"]
    for point in PLAIN if algorithm == "none" else DRAFTED:
        prompts = point.prompts(vocab_size)
        engines = [("vllm", engine.generate)]
        found = time_steps(engines, prompts, rounds=arguments.rounds)["vllm"]
        results.add(
            "step",
            engine="vllm",
            variant="plain" if algorithm == "none" else algorithm,
            shape=arguments.base.name,
            batch=point.batch,
            context=point.context,
            ms=found.ms,
            median=found.median,
            rounds=found.rounds,
            accept_length=found.accept_length,
        )


if __name__ == "__main__":
    main()
