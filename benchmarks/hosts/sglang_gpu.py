"""Our algorithms inside SGLang on a GPU: the tokens of plain SGLang, and the speed of SGLang's own.

    python benchmarks/hosts/sglang_gpu.py identity --output DIR --seconds 200
    python benchmarks/hosts/sglang_gpu.py speed --models /dev/shm/m --output DIR --seconds 400

Each engine runs in a process of its own, with a time limit. Each result is a line of
``DIR/results.jsonl`` as soon as it is there. The end of the log of an engine that fails is printed,
and the next one goes on. ``--tiny`` tries a part out on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "gpu")]

from generation_times import random_prompts, token_times  # noqa: E402
from result_log import ResultLog  # noqa: E402

MARK = "RESULT "
NUM_STEPS = 5
TREE = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}
CHAIN = {
    "speculative_num_steps": NUM_STEPS,
    "speculative_eagle_topk": 1,
    "speculative_num_draft_tokens": NUM_STEPS + 1,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "float32 deterministic": {"dtype": "float32", "enable_deterministic_inference": True},
    "bfloat16 deterministic": {"dtype": "bfloat16", "enable_deterministic_inference": True},
}
"""Arithmetic by name. Tokens are also sampled by seeds where SGLang is deterministic. Its norms on
GPUs take float32 there alone."""

Row = dict[str, Any]


def _ours(name: str, **more: Any) -> Row:
    return {"speculative_algorithm": f"SPECPLUG_{name}", **more}


IDENTITY: dict[str, Row] = {
    "NONE": {},
    "EAGLE3": _ours("EAGLE3", **CHAIN),
    "EAGLE3 tree": _ours("EAGLE3", **TREE),
    "NGRAM": _ours("NGRAM"),
    "EAGLE": _ours("EAGLE"),
    "MULTI_LAYER_EAGLE": _ours("MULTI_LAYER_EAGLE"),
    "DFLASH": _ours("DFLASH"),
    "EAGLE3 tree, pages of 16": _ours("EAGLE3", page_size=16, **TREE),
    "EAGLE3 without graphs": _ours("EAGLE3", disable_decode_cuda_graph=True, **CHAIN),
    "EAGLE3 tree without graphs": _ours("EAGLE3", disable_decode_cuda_graph=True, **TREE),
}
"""Engines on the default model, by name."""

_LOOKUP = {"speculative_num_draft_tokens": NUM_STEPS + 1}
SPEED: dict[str, Row] = {
    "plain": {},
    "EAGLE3, SGLang's": {"speculative_algorithm": "EAGLE3", **CHAIN},
    "EAGLE3, ours": _ours("EAGLE3", **CHAIN),
    "NGRAM, SGLang's": {"speculative_algorithm": "NGRAM", **_LOOKUP},
    "NGRAM, ours": _ours("NGRAM", **_LOOKUP),
    "EAGLE3 tree, SGLang's": {"speculative_algorithm": "EAGLE3", **TREE},
    "EAGLE3 tree, ours": _ours("EAGLE3", **TREE),
}
"""Engines on the large target, by name."""

POINTS = (1, 128), (8, 1024), (32, 1024)
"""Batches, and tokens of each prompt."""


class Log(ResultLog):
    """The rows, and the logs of processes beside them."""

    def run(self, part: str, asked: Row, seconds: float) -> list[Row]:
        """Run a process and return its rows; what went wrong is printed."""
        name = f"{part}-{asked['name']}-{asked.get('variant', '')}"
        log = self.folder / ("".join(c if c.isalnum() else "-" for c in name) + ".log")
        began, rows = time.monotonic(), []
        command = [sys.executable, __file__, part, "--asked", json.dumps(asked)]
        with log.open("ab") as errors:
            process = subprocess.Popen(
                command,
                env=environment(asked),
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,
            )
            try:
                output, _ = process.communicate(timeout=max(seconds, 1))
            except subprocess.TimeoutExpired:
                errors.write(b"\nover its time\n")
                os.killpg(process.pid, signal.SIGKILL)  # SGLang's processes too
                output, _ = process.communicate()
            errors.write(output)
        about = {key: asked[key] for key in ("name", "variant") if key in asked}
        for line in output.decode(errors="replace").splitlines():
            if line.startswith(MARK):
                rows.append({"part": part, **about, **json.loads(line.removeprefix(MARK))})
        if not rows or rows[-1]["kind"] != "done":
            took = round(time.monotonic() - began, 1)
            code = process.returncode
            rows.append({"part": part, **about, "kind": "failed", "code": code, "seconds": took})
            last = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            print("\n".join(f"    {line[:200]}" for line in last[-40:]), flush=True)
        return rows


def environment(asked: Row) -> dict[str, str]:
    """Return a process's environment."""
    quiet = {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "TORCHDYNAMO_DISABLE": "1",  # the sampler's functions: half a minute to compile
        "TRITON_F32_DEFAULT": "ieee",  # else float32 is TF32 in the attention of several rows
    }
    if asked["tiny"]:
        quiet["SGLANG_USE_CPU_ENGINE"] = "1"
    return {**os.environ, **quiet}


def tell(**row: Any) -> None:
    """Hand a row to the starter."""
    print("\n" + MARK + json.dumps(row), flush=True)


def new_engine(asked: Row, **settings: Any) -> Any:
    """Start an engine of SGLang's."""
    import sglang
    from sglang.srt.plugins import load_plugins

    load_plugins()
    on_gpu = {"attention_backend": "triton", "sampling_backend": "pytorch"}
    on_cpu = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32"}
    given = {"log_level": "info", "random_seed": 0, **settings, **asked["settings"]}
    if asked["tiny"]:
        given.pop("disable_decode_cuda_graph", None)
    else:
        given["disable_prefill_cuda_graph"] = True
    return sglang.Engine(**{**given, **(on_cpu if asked["tiny"] else on_gpu)})


def steps_of(replies: Sequence[Row]) -> int:
    """Return how often drafts were verified."""
    return sum(reply["meta_info"].get("spec_verify_ct") or 0 for reply in replies)


# Identity


def identity(arguments: argparse.Namespace, log: Log) -> None:
    """Compare tokens with plain decoding's, in each kind of arithmetic, several engines at once."""
    end = time.monotonic() + arguments.seconds
    plain: dict[str, Row] = {}

    def run(case: tuple[str, str]) -> None:
        variant, name = case
        settings = {**VARIANTS[variant], **IDENTITY[name]}
        asked = {"name": name, "variant": variant, "settings": settings, "tiny": arguments.tiny}
        for row in log.run("identity", asked, min(end - time.monotonic(), arguments.limit)):
            tokens = row.get("tokens")
            if tokens is not None and name == "NONE":
                plain.setdefault(variant, tokens)
            elif tokens is not None and variant in plain:
                row["same"] = {mode: _same(plain[variant][mode], tokens[mode]) for mode in tokens}
            if row["kind"] != "done":
                log.add({key: value for key, value in row.items() if key != "tokens"} | {"of": 12})

    with ThreadPoolExecutor(arguments.at_once) as pool:
        list(pool.map(run, [(variant, "NONE") for variant in arguments.variants]))
        names = [name for name in arguments.cases or IDENTITY if name != "NONE"]
        list(pool.map(run, [(v, name) for name in names for v in arguments.variants]))


def _same(plain: list[list[int]], found: list[list[int]]) -> Any:
    """Return how many requests have the same tokens, and where the others differ first."""
    pairs = list(zip(plain, found, strict=True))
    firsts = [
        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
        for a, b in pairs
        if a != b
    ]
    return {"same": sum(a == b for a, b in pairs), "differ_at": firsts}


def identity_process(asked: Row) -> None:
    import torch
    from transformers import AutoTokenizer

    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import HELD_OUT, read_prompts

    began = time.monotonic()
    model = str(ASSETS / "tiny_code")
    tokenizer = AutoTokenizer.from_pretrained(model)
    texts = [prompt.content for prompt in read_prompts(HELD_OUT)][:12]
    prompts = [tokenizer(text)["input_ids"][-300:] for text in texts]
    length = 16 if asked["tiny"] else 64
    engine = new_engine(
        asked,
        model_path=model,
        max_total_tokens=16384,
        max_running_requests=12,
        cuda_graph_bs_decode=[1, 2, 4, 8, 12],
        mem_fraction_static=0.5,
    )
    loaded = round(time.monotonic() - began, 1)
    greedy = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    modes: dict[str, Any] = {"greedy": greedy, "again": greedy}
    if asked["settings"].get("enable_deterministic_inference"):
        wanted = {**greedy, "temperature": 0.8}
        modes["seeded"] = [{**wanted, "sampling_seed": i} for i in range(len(prompts))]
        modes["cut"] = [{**wanted, "top_k": 50, "sampling_seed": i} for i in range(len(prompts))]
    tokens, steps = {}, {}
    for mode, params in modes.items():
        replies = engine.generate(input_ids=prompts, sampling_params=params)
        tokens[mode] = [list(reply["output_ids"]) for reply in replies]
        steps[mode] = steps_of(replies)
    alone = engine.generate(input_ids=prompts[0], sampling_params=greedy)
    tokens["alone"] = [list(alone["output_ids"])]
    seconds = round(time.monotonic() - began, 1)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    tell(
        kind="identity", steps=steps, loaded_s=loaded, total_s=seconds, tokens=tokens, **_about(gpu)
    )
    tell(kind="done")
    engine.shutdown()


def _about(gpu: str) -> Row:
    from importlib.metadata import version

    return {"sglang": version("sglang"), "torch": version("torch"), "gpu": gpu}


# Speed


def speed(arguments: argparse.Namespace, log: Log) -> None:
    """Time engines one after the other."""
    import torch
    from shapes import write_shape

    end = time.monotonic() + arguments.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = write_shape(arguments.models, arguments.shape, ["eagle3"], device)
    torch.cuda.empty_cache()
    log.add({"part": "speed", "kind": "weights", "left_s": round(end - time.monotonic())})
    for name in arguments.cases or SPEED:
        asked = {
            "name": name,
            "settings": SPEED[name],
            "base": str(base),
            "tiny": arguments.tiny,
            "rounds": arguments.rounds,
        }
        left = end - time.monotonic()
        if left < 15:
            log.add({"part": "speed", "kind": "skipped", "name": name})
            continue
        for row in log.run("speed", asked, min(left, arguments.limit)):
            log.add(row)


def speed_process(asked: Row) -> None:
    began = time.monotonic()
    base, tiny = Path(asked["base"]), asked["tiny"]
    if "EAGLE3" in asked["settings"].get("speculative_algorithm", ""):
        asked["settings"]["speculative_draft_model_path"] = str(base / "eagle3")
    engine = new_engine(
        asked,
        model_path=str(base / "target"),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        context_length=512 if tiny else 4096,
        max_total_tokens=4096 if tiny else 80000,
        max_running_requests=32,
        chunked_prefill_size=512 if tiny else 8192,
        cuda_graph_bs_decode=[1, 8, 32],
        mem_fraction_static=0.2 if tiny else 0.8,
    )
    tell(kind="ready", seconds=round(time.monotonic() - began, 1))
    vocabulary = json.loads((base / "target/config.json").read_text())["vocab_size"]
    for batch, context in ((1, 16), (2, 32)) if tiny else POINTS:
        again = "NGRAM" not in asked["settings"].get("speculative_algorithm", "")
        prompts = random_prompts(batch, context, vocabulary, again=again)
        row = _time(engine, prompts, asked["rounds"], long=24 if tiny else 96)
        tell(kind="step", batch=batch, context=context, **row)
    tell(kind="done", seconds=round(time.monotonic() - began, 1))
    engine.shutdown()


def _generate(engine: Any, prompts: list[list[int]], length: int) -> tuple[float, list[Row]]:
    wanted = {"temperature": 0, "max_new_tokens": length, "ignore_eos": True}
    began = time.perf_counter()
    replies = engine.generate(input_ids=prompts, sampling_params=wanted)
    return time.perf_counter() - began, replies


def _time(engine: Any, prompts: Iterator[list[list[int]]], rounds: int, *, long: int) -> Row:
    """Time the tokens from ``short`` to ``long``: the prefill falls out."""
    short = 16
    _generate(engine, next(prompts), long + 8)
    batch = len(_generate(engine, next(prompts), short)[1])
    shorts, longs, steps = [], [], 0
    for _ in range(rounds):
        shorts.append(_generate(engine, next(prompts), short)[0])
        seconds, replies = _generate(engine, next(prompts), long)
        longs.append(seconds)
        steps = steps_of(replies)
    return {
        **token_times(shorts, longs, batch, long - short),
        "accept_length": round(batch * (long - 1) / steps, 3) if steps else None,
    }


PARTS = {"identity": identity, "speed": speed}
PROCESSES = {"identity": identity_process, "speed": speed_process}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, default=Path("sglang-gpu"))
    parser.add_argument("--seconds", type=float, default=400)
    parser.add_argument("--limit", type=float, default=120, help="seconds of an engine")
    parser.add_argument("--at-once", type=int, default=4, help="engines, for identity")
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/m"), help="for weights")
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS)[1:], choices=VARIANTS)
    parser.add_argument("--cases", nargs="+", choices=[*IDENTITY, *SPEED], help="engines by name")
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="on a CPU, a minute an engine")
    parser.add_argument("--asked", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.asked is not None:
        PROCESSES[arguments.part](arguments.asked)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        arguments.shape, arguments.at_once = "llama-small", 1
    PARTS[arguments.part](arguments, Log(arguments.output, "sglang"))


if __name__ == "__main__":
    main()
