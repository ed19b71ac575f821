"""The default model on the CPU, beside vLLM's build for CPUs: same weights, same prompts, in turns.

    python benchmarks/vllm_cpu.py --vllm-python VENV/bin/python
    python benchmarks/vllm_cpu.py --vllm-python VENV/bin/python --rounds 16 EAGLE3:1

VENV has ``vllm-cpu``; how to make one is in benchmarks/README.md. Each case is an algorithm and a
batch size: EAGLE3 is our plugin with its own settings, a chain, and vLLM's ``eagle3`` of the same
depth with the same draft weights. Each engine is a process of its own and has as many threads. In
each round both generate from the same prompts, held-out ones that neither has seen, one after the
other; who begins changes from round to round. Greedy, float32, with prefill, scheduling and
detokenizing. The ratio is the median over the rounds of our time over vLLM's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

CASES = ("NONE:12", "EAGLE3:12", "NONE:1", "EAGLE3:1")
DRAFT_STEPS = 5
MOST_TOKENS = 2048

Generate = Callable[[list[list[int]]], list[list[int]]]
"""Prompts' token ids -> generated token ids."""


def start_ours(settings: dict[str, Any]) -> Generate:
    """Start our engine."""
    from specplug import LLM, SamplingParams

    speculation = {"speculative_num_steps": DRAFT_STEPS, "speculative_eagle_topk": 1}
    llm = LLM(
        device="cpu",
        dtype="float32",
        num_threads=settings["threads"],
        max_running_requests=16,
        speculative_algorithm=settings["algorithm"],
        disable_cpu_kernels=settings["disable_cpu_kernels"],
        **(speculation if settings["algorithm"] != "NONE" else {}),
    )
    params = SamplingParams(max_tokens=settings["max_tokens"], ignore_eos=True)
    return lambda prompts: [list(out.token_ids) for out in llm.generate(prompts, params)]


def start_vllm(settings: dict[str, Any]) -> Generate:
    """Start vLLM, whose import takes the threads and the memory from the environment."""
    from vllm import LLM, SamplingParams

    draft = None
    if settings["algorithm"] == "EAGLE3":
        draft = {"method": "eagle3", "model": settings["draft"]}
        draft["num_speculative_tokens"] = DRAFT_STEPS
    llm = LLM(
        model=settings["model"],
        dtype="float32",
        enforce_eager=not settings["vllm_compiles"],
        max_model_len=MOST_TOKENS,
        max_num_seqs=16,
        speculative_config=draft,
    )
    params = SamplingParams(temperature=0, max_tokens=settings["max_tokens"], ignore_eos=True)

    def generate(prompts: list[list[int]]) -> list[list[int]]:
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [
            list(out.outputs[0].token_ids) for out in llm.generate(given, params, use_tqdm=False)
        ]

    return generate


def serve(settings: dict[str, Any], answers: IO[str]) -> None:
    """Answer each line of prompts with the seconds it took, of a clock and of the processor."""
    start = {"ours": start_ours, "vllm": start_vllm}[settings["engine"]]
    generate = start(settings)
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        prompts = json.loads(line)
        wall, processor = time.perf_counter(), time.process_time()
        tokens = generate(prompts)
        seconds = time.perf_counter() - wall, time.process_time() - processor
        print(json.dumps((seconds, tokens)), file=answers, flush=True)


class Engine:
    """An engine in a process of its own."""

    def __init__(self, python: str, settings: dict[str, Any], log: Path) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(settings["threads"]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [python, __file__, "--serve", json.dumps(settings)]
        with log.open("w") as errors:
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._log = log
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the process ended: {self._log.read_text()[-2000:]}")
        return line

    def generate(self, prompts: Sequence[list[int]]) -> tuple[list[float], list[list[int]]]:
        """Return the seconds, of a clock and of the processor, and the tokens of each prompt."""
        assert self._process.stdin is not None
        print(json.dumps(prompts), file=self._process.stdin, flush=True)
        seconds, tokens = json.loads(self._read())
        return seconds, tokens

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def write_draft(source: Path, folder: Path) -> str:
    """Copy our EAGLE-3 weights as vLLM reads them: its ids are those of layers whose inputs are
    taken, ours of layers whose outputs are."""
    config = json.loads((source / "config.json").read_text())
    ids = [number + 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return str(folder)


def compare(
    case: str, arguments: argparse.Namespace, prompts: Sequence[list[int]], folder: Path
) -> str:
    """Return a row of the table."""
    import specplug_eagle3
    from specplug.algorithm import ASSETS

    algorithm, batch = case.split(":")
    size = int(batch)
    settings = {
        "algorithm": algorithm,
        "threads": arguments.threads,
        "max_tokens": arguments.max_tokens,
        "model": str(ASSETS / "tiny_code"),
        "vllm_compiles": arguments.vllm_compiles,
        "disable_cpu_kernels": arguments.disable_cpu_kernels,
    }
    if algorithm == "EAGLE3":
        weights = Path(specplug_eagle3.__file__).parent / "weights" / "tiny_code"
        (target := folder / case.replace(":", "-")).mkdir()
        settings["draft"] = write_draft(weights, target)
    pythons = {"ours": sys.executable, "vllm": arguments.vllm_python}
    engines = {
        name: Engine(python, {**settings, "engine": name}, folder / f"{case}-{name}.log")
        for name, python in pythons.items()
    }
    rounds = min(arguments.rounds, len(prompts) // size - 1)
    seconds: dict[str, list[list[float]]] = {name: [] for name in engines}
    same = 0
    for number in range(-1, rounds):  # the first one warms up
        asked = prompts[(number + 1) * size : (number + 2) * size]
        order = list(engines) if number % 2 else list(engines)[::-1]
        results = {name: engines[name].generate(asked) for name in order}
        if number >= 0:
            for name, (taken, _) in results.items():
                seconds[name].append(taken)
            (_, ours), (_, theirs) = results["ours"], results["vllm"]
            same += sum(a == b for a, b in zip(ours, theirs, strict=True))
    for engine in engines.values():
        engine.close()
    cells = [algorithm, str(size), str(rounds)]
    for kind in (0, 1):
        ours, theirs = ([taken[kind] for taken in seconds[name]] for name in ("ours", "vllm"))
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        low, _, high = statistics.quantiles(ratios, n=4)
        cells += [f"{statistics.median(ours):.2f}", f"{statistics.median(theirs):.2f}"]
        cells += [f"{statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})"]
    return "| " + " | ".join([*cells, f"{same} of {rounds * size}"]) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*", default=CASES, help="algorithm:batch size")
    parser.add_argument("--vllm-python", help="the Python of an environment with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--vllm-compiles", action="store_true", help="vLLM without enforce_eager, as it comes"
    )
    parser.add_argument(
        "--disable-cpu-kernels", action="store_true", help="ours as without a C compiler"
    )
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the log
        serve(arguments.serve, answers)
        return 0
    if not arguments.vllm_python:
        parser.error("--vllm-python is missing: the Python of an environment with vllm-cpu")

    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import HELD_OUT, read_prompts

    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    prompts = [tokenizer(prompt.content)["input_ids"] for prompt in read_prompts(HELD_OUT)]
    columns = ["algorithm", "batch", "rounds", "ours, s", "vLLM, s", "ratio (quartiles)"]
    columns += ["ours, processor s", "vLLM, processor s", "ratio (quartiles)", "same tokens"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    for case in arguments.cases:
        with tempfile.TemporaryDirectory() as folder:
            print(compare(case, arguments, prompts, Path(folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
