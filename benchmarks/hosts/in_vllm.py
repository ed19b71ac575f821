"""Our algorithms inside vLLM beside vLLM's own: same trained weights, same prompts, in turns.

    make .venv-vllm/.installed
    .venv-vllm/bin/python benchmarks/hosts/in_vllm.py
    .venv-vllm/bin/python benchmarks/hosts/in_vllm.py --rounds 16 --batch 1 eagle3

Each engine is a process of its own with as many threads: vLLM's plain decoding, vLLM's ``eagle3``
and ``ngram``, and our EAGLE3 and NGRAM in the same vLLM, drafting as many tokens. In each round all
of a batch size generate from the same held-out prompts, which none has seen, one after the other;
who begins changes from round to round; an engine that fails is told and left out. Greedy, with
prefill, scheduling and detokenizing: on a CPU in float32, with --gpu in bf16 and with CUDA graphs.
A ratio is the median over the rounds of the other's time over ours: above 1 we are faster.
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
from pathlib import Path
from typing import Any

import attrs

EAGLE_TOKENS, NGRAM_TOKENS = 5, 7
MODEL_LEN = 2048
# (our algorithm, vLLM's own)
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": (
        {"model": "specplug_vllm.EAGLE3", "num_speculative_tokens": EAGLE_TOKENS},
        {"method": "eagle3", "num_speculative_tokens": EAGLE_TOKENS},
    ),
    "ngram": (
        {"model": "specplug_vllm.NGRAM", "num_speculative_tokens": NGRAM_TOKENS},
        {
            "method": "ngram",
            "num_speculative_tokens": NGRAM_TOKENS,
            "prompt_lookup_min": 2,
            "prompt_lookup_max": 5,
        },
    ),
}


def on_cpu(settings: dict[str, Any]) -> dict[str, Any]:
    return {"dtype": "float32", "enforce_eager": not settings["compile"]}


def on_gpu(settings: dict[str, Any]) -> dict[str, Any]:
    """Return arguments with which several engines share a card."""
    speculative = settings["speculative"]
    width = 1 if speculative is None else 1 + speculative["num_speculative_tokens"]
    # With the usual sizes vLLM's eagle3 fails in cuBLAS where it is recorded. Ours stops drafting
    # where that is slower, so it needs those of plain decoding too.
    ours = speculative is not None and "method" not in speculative
    widths = {width, 1} if ours else {width}
    sizes = sorted({each * requests for each in widths for requests in (1, 2, 4, 8, 12, 16)})
    graphs: dict[str, Any] = {"cudagraph_capture_sizes": sizes}
    if settings["eager"]:
        graphs = {}
    elif not settings["compile"]:
        graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    return {
        "dtype": "bfloat16",
        "compilation_config": graphs,
        "enforce_eager": settings["eager"],
        "gpu_memory_utilization": 0.12,
        "attention_backend": settings["attention"],
        "kv_cache_memory_bytes": 1 << 30,
    }


def serve(settings: dict[str, Any], answers: Any) -> None:
    """Answer each line of prompts with the seconds of a clock, those of the processor, the tokens,
    and how many steps vLLM took."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=settings["model"],
        max_model_len=MODEL_LEN,
        max_num_seqs=16,
        speculative_config=settings["speculative"],
        **(on_gpu(settings) if settings["gpu"] else on_cpu(settings)),
    )
    params = SamplingParams(temperature=0, max_tokens=settings["max_tokens"], ignore_eos=True)
    if settings["profile"]:
        import cProfile

        profile = cProfile.Profile()
    core = llm.llm_engine.engine_core.engine_core
    steps, step = [0], core.step_fn

    def counted() -> Any:
        steps[0] += 1
        return step()

    core.step_fn = counted
    print("ready", file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        batch, prompts = json.loads(line)
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        steps[0] = 0
        if settings["profile"] and number:
            profile.enable()
        wall, processor = time.perf_counter(), time.process_time()
        groups = [given[i : i + batch] for i in range(0, len(given), batch)]
        outputs = [out for group in groups for out in llm.generate(group, params, use_tqdm=False)]
        seconds = time.perf_counter() - wall, time.process_time() - processor
        if settings["profile"]:
            profile.disable()
            profile.dump_stats(settings["profile"])
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps((*seconds, steps[0], tokens)), file=answers, flush=True)


@attrs.frozen
class Round:
    """What an engine did in a round."""

    seconds: float
    processor: float
    steps: int
    tokens: list[list[int]]


class Engine:
    """An engine in a process of its own."""

    def __init__(self, settings: dict[str, Any], log: Path) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(settings["threads"]),
            "NUMBA_NUM_THREADS": str(settings["threads"]),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, __file__, "--serve", json.dumps(settings)]
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

    def wait(self) -> None:
        """Wait until it is ready.

        Raises:
            EOFError: it has ended.
        """
        self._read()

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            told = self._log.read_text()
            cause = [line for line in told.splitlines() if "Error" in line][-1:]
            raise EOFError(f"{' '.join(cause)}; the last lines: {told[-2000:]}")
        return line

    def generate(self, batch: int, prompts: list[list[int]]) -> Round:
        assert self._process.stdin is not None
        print(json.dumps((batch, prompts)), file=self._process.stdin, flush=True)
        return Round(*json.loads(self._read()))

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def write_draft(folder: Path) -> str:
    """Copy our EAGLE-3 weights as vLLM reads them: its ids are those of layers whose inputs are
    taken, ours of layers whose outputs are."""
    import specplug_eagle3

    source = Path(specplug_eagle3.__file__).parent / "weights" / "tiny_code"
    config = json.loads((source / "config.json").read_text())
    ids = [number + 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    config["eagle_aux_hidden_state_layer_ids"] = ids
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    return str(folder)


def start(arguments: argparse.Namespace) -> dict[str, Engine]:
    """Start the engines; return those that are ready."""
    from specplug.algorithm import ASSETS

    common = {
        "threads": arguments.threads,
        "max_tokens": arguments.max_tokens,
        "model": str(ASSETS / "tiny_code"),
        "compile": arguments.compile,
        "gpu": arguments.gpu,
        "eager": arguments.eager,
        "attention": arguments.attention_backend,
    }
    asked: dict[str, dict[str, Any] | None] = {} if arguments.no_plain else {"plain": None}
    folder = Path(tempfile.mkdtemp())
    for name in arguments.pairs:
        ours, theirs = PAIRS[name]
        if name == "eagle3":
            (target := folder / "draft").mkdir()
            theirs = {**theirs, "model": write_draft(target)}
        asked |= {f"{name}, ours": ours, f"{name}, vLLM's": theirs}
    started, engines = {}, {}
    for number, (name, speculative) in enumerate(asked.items()):
        profile = f"{arguments.profile}/{name}.prof" if arguments.profile else None
        settings = {**common, "speculative": speculative, "profile": profile}
        started[name] = Engine(settings, folder / f"{number}.log")
    for name, engine in started.items():
        try:
            engine.wait()
            engines[name] = engine
        except EOFError as error:
            print(f"{name}: {error}", file=sys.stderr, flush=True)
    return engines


def measure(
    engines: dict[str, Engine],
    prompts: list[list[int]],
    batch: int,
    rounds: int,
    size: int,
) -> list[str]:
    """Return rows of the table for a batch size.

    Args:
        size: prompts of a round.
    """
    found: dict[str, list[Round]] = {name: [] for name in engines}
    names = list(engines)
    for number in range(-1, rounds):  # the first one warms up
        given = [prompts[i % len(prompts)] for i in range((number + 1) * size, (number + 2) * size)]
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            result = engines[name].generate(batch, given)
            if number >= 0:
                found[name].append(result)
    return [_row(name, batch, found) for name in names]


def _row(name: str, batch: int, found: dict[str, list[Round]]) -> str:
    rounds = found[name]
    pairs = list(zip(found.get("plain", ()), rounds, strict=False))
    same = sum(a == b for x, y in pairs for a, b in zip(x.tokens, y.tokens, strict=True))
    cells = [
        name,
        str(batch),
        str(len(rounds)),
        f"{sum(r.steps for r in rounds) / len(rounds):.0f}",
    ]
    for kind in ("seconds", "processor"):
        cells.append(f"{statistics.median(getattr(r, kind) for r in rounds):.2f}")
        other = found.get(name.replace("ours", "vLLM's"))
        if other is None or "ours" not in name:
            cells.append("")
            continue
        ratios = [getattr(b, kind) / getattr(a, kind) for a, b in zip(rounds, other, strict=True)]
        low, _, high = statistics.quantiles(ratios, n=4)
        cells.append(f"{statistics.median(ratios):.2f} ({low:.2f}–{high:.2f})")
    cells.append(f"{same} of {sum(len(r.tokens) for r in rounds)}" if pairs else "")
    return "| " + " | ".join(cells) + " |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pairs", nargs="*", default=list(PAIRS), help=", ".join(PAIRS))
    parser.add_argument("--batch", type=int, action="append", help="12 and 1 if none is given")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=12, help="of a round")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--compile", action="store_true", help="as vLLM comes")
    parser.add_argument("--gpu", action="store_true", help="on a GPU, in bf16")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--attention-backend", help="of vLLM's, on a GPU")
    parser.add_argument("--no-plain", action="store_true", help="without plain decoding")
    parser.add_argument("--profile", help="a folder for profiles of Python's; the times are wrong")
    parser.add_argument("--serve", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # what libraries print goes to the log
        serve(arguments.serve, answers)
        return 0

    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import HELD_OUT, read_prompts

    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    prompts = [tokenizer(prompt.content)["input_ids"] for prompt in read_prompts(HELD_OUT)]
    columns = ["engine", "batch", "rounds", "vLLM's steps", "seconds", "vLLM's over ours"]
    columns += ["processor seconds", "vLLM's over ours", "tokens as plain"]
    print("| " + " | ".join(columns) + " |\n|" + " --- |" * len(columns))
    engines = start(arguments)
    for batch in arguments.batch or (12, 1):
        rows = measure(engines, prompts, batch, arguments.rounds, arguments.prompts)
        print("\n".join(rows), flush=True)
    for engine in engines.values():
        engine.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
