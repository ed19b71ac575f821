"""Our algorithms inside vLLM on a GPU: the tokens of plain vLLM, and the speed of vLLM's own.

    python benchmarks/hosts/vllm_gpu.py identity --output DIR --seconds 200
    python benchmarks/hosts/vllm_gpu.py speed --models /dev/shm/m --output DIR --seconds 500
    python benchmarks/hosts/vllm_gpu.py ranks --models /dev/shm/m --output DIR --seconds 200

Each result is a line of ``DIR/results.jsonl`` as soon as it is there, and each process has a log
beside it. An engine that fails is a line too, and the next one goes on. Every part stops when its
seconds are over. ``--tiny`` tries a part out on a machine without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "gpu")]

from generation_times import random_prompts, token_times  # noqa: E402
from result_log import ResultLog  # noqa: E402
from turns import Alone, Turns  # noqa: E402

ALGORITHMS = ("EAGLE3", "NGRAM", "EAGLE", "MULTI_LAYER_EAGLE", "DFLASH")
NUM_TOKENS = 5
MARK = "RESULT "
VARIANTS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "invariant": {"dtype": "bfloat16", "attention_backend": "TRITON_ATTN"},
}
"""Arithmetic by name. ``invariant`` is bf16 with vLLM's batch invariance, and with the attention
that gives a row the same bits in a pass of one row of each request and of several."""

Row = dict[str, Any]


def environment(runner: int, **more: str) -> dict[str, str]:
    """Return a process's environment, for a version of vLLM's model runner."""
    quiet = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_USE_DEEP_GEMM": "0",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
        "PYTHONUNBUFFERED": "1",
        "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
    }
    return {**os.environ, **quiet, **more}


def rows_of(
    part: str, asked: Row, environ: dict[str, str], log: Path, seconds: float
) -> Iterator[Row]:
    """Run a part in a process of its own, and yield its rows; one more if it ends badly."""
    command = [sys.executable, __file__, part, "--asked", json.dumps(asked)]
    began = time.monotonic()
    with log.open("ab") as errors:
        process = subprocess.Popen(
            ["timeout", "-k", "5", f"{max(seconds, 1):.0f}", *command],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(MARK):
                yield json.loads(line.removeprefix(MARK))
            else:
                errors.write(line.encode())
                errors.flush()
        code = process.wait()
    if code:
        took = round(time.monotonic() - began, 1)
        last = log.read_text(errors="replace").splitlines()[-1:]
        yield {"kind": "process", "failed": code, "seconds": took, "last": last, "log": log.name}


def tell(**row: Any) -> None:
    """Hand a row to the starter."""
    print(MARK + json.dumps(row), flush=True)


def speculative(name: str, **more: Any) -> Row | None:
    """Return vLLM's ``speculative_config`` for one of our algorithms; None for plain decoding."""
    if name == "NONE":
        return None
    return {"model": f"specplug_vllm.{name}", "num_speculative_tokens": NUM_TOKENS, **more}


def counted(llm: Any) -> tuple[int, int]:
    """Return vLLM's counts of drafts, and of drafted tokens that were accepted."""
    found = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_accepted_tokens": 0}
    for metric in llm.get_metrics():
        if metric.name in found:
            found[metric.name] += int(metric.value)
    drafts, accepted = found.values()
    return drafts, accepted


def close(llm: Any) -> None:
    """Free an engine of this process."""
    import gc

    import torch

    llm.llm_engine.engine_core.shutdown()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


# Identity


def identity(arguments: argparse.Namespace, log: ResultLog) -> None:
    """Compare tokens, each kind of arithmetic and each runner in a process, all at once."""
    end = time.monotonic() + arguments.seconds
    cases = [(runner, variant) for runner in arguments.runners for variant in arguments.variants]

    def run(case: tuple[int, str]) -> None:
        runner, variant = case
        left = list(arguments.algorithms)
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if variant == "invariant":
            more["VLLM_BATCH_INVARIANT"] = "1"
        while left and time.monotonic() < end:
            asked = {"variant": variant, "algorithms": left, "tiny": arguments.tiny}
            file = log.folder / f"identity-v{runner}-{variant}.log"
            began = None
            for row in rows_of(
                "identity", asked, environment(runner, **more), file, end - time.monotonic()
            ):
                began = row.get("algorithm", began)
                log.add({"part": "identity", "runner": runner, "variant": variant, **row})
            # A process that has died goes on after the algorithm with which it died.
            left = left[left.index(began) + 1 :] if began in left else []

    with ThreadPoolExecutor(1 if arguments.tiny else len(cases)) as pool:
        list(pool.map(run, cases))


def identity_process(asked: Row) -> None:
    from transformers import AutoTokenizer
    from vllm import LLM, SamplingParams

    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import HELD_OUT, read_prompts

    tiny = asked["tiny"]
    model = str(ASSETS / "tiny_code")
    tokenizer = AutoTokenizer.from_pretrained(model)
    count, length = (4, 16) if tiny else (12, 64)
    texts = [prompt.content for prompt in read_prompts(HELD_OUT)][:count]
    prompts = [{"prompt_token_ids": tokenizer(text)["input_ids"][-300:]} for text in texts]
    greedy = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True)
    modes: dict[str, list[Any]] = {
        "greedy": [greedy] * count,
        "seeded": [
            SamplingParams(temperature=0.8, top_k=50, seed=i, max_tokens=length, ignore_eos=True)
            for i in range(count)
        ],
    }
    sizes = [1, 2, 4, 8, 16, 6, 12, 24, 48]
    graphs: Row = {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": sorted(sizes),
    }
    reference: dict[str, list[list[int]]] = {}
    for name in ("NONE", *asked["algorithms"]):
        tell(kind="begun", algorithm=name)
        began = time.monotonic()
        try:
            llm = LLM(
                model=model,
                max_model_len=512,
                max_num_seqs=8,
                max_num_batched_tokens=256,
                seed=0,
                speculative_config=speculative(name),
                disable_log_stats=False,
                **VARIANTS[asked["variant"]],
                **(
                    {"enforce_eager": True}
                    if tiny
                    else {"kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.15}
                ),
                **({} if tiny else {"compilation_config": graphs}),
            )
            loaded = time.monotonic() - began
            for mode, params in modes.items():
                before = counted(llm)
                outputs = llm.generate(prompts, params, use_tqdm=False)
                tokens = [list(output.outputs[0].token_ids) for output in outputs]
                drafts, accepted = (
                    now - then for now, then in zip(counted(llm), before, strict=True)
                )
                plain = reference.setdefault(mode, tokens)
                tell(
                    kind="identity",
                    algorithm=name,
                    mode=mode,
                    same=sum(a == b for a, b in zip(plain, tokens, strict=True)),
                    of=len(tokens),
                    first_difference=[
                        next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), -1)
                        for a, b in zip(plain, tokens, strict=True)
                    ],
                    accept_length=round(1 + accepted / drafts, 3) if drafts else None,
                    loaded_s=round(loaded, 1),
                    total_s=round(time.monotonic() - began, 1),
                    about=_about(llm),
                )
            close(llm)
            del llm
        except Exception as error:
            traceback.print_exc()
            tell(kind="failure", algorithm=name, error=f"{type(error).__name__}: {error}"[:500])
            if "CUDA error" in str(error) or name == "NONE":
                raise  # nothing runs on in this process


def _about(llm: Any) -> Row:
    """Return what says which parts of vLLM and of ours ran."""
    import torch
    import vllm

    config = llm.llm_engine.vllm_config
    found = {
        "vllm": vllm.__version__,
        "v2": config.use_v2_model_runner,
        "async": config.scheduler_config.async_scheduling,
        "graphs": str(config.compilation_config.cudagraph_mode),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:
        return found
    runner = core.model_executor.driver_worker.worker.model_runner
    drafter = getattr(runner, "speculator", None) or getattr(runner, "drafter", None)
    if hasattr(drafter, "run"):
        found |= {
            "undrafted": drafter.undrafted,
            "recorded": drafter.run.runtime.num_recordings,
        }
    return found


# Speed


@attrs.frozen
class Case:
    """An engine to time.

    Attributes:
        runner: of vLLM.
        config: its ``speculative_config``; DRAFT stands for the folder of the EAGLE-3 draft.
        rows: of a request in a decode step.
        looks_up: whether it drafts what followed before: then no prompt comes twice.
        draft_when: of our settings.
    """

    runner: int
    config: Row | None
    rows: int
    looks_up: bool = False
    draft_when: str = "always"


_LOOKUP = {"prompt_lookup_max": 4, "prompt_lookup_min": 1, "num_speculative_tokens": NUM_TOKENS}
CASES = {
    "plain": Case(2, None, 1),
    "eagle3, vLLM's": Case(
        2,
        {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": NUM_TOKENS},
        NUM_TOKENS + 1,
    ),
    "EAGLE3, ours": Case(2, speculative("EAGLE3"), NUM_TOKENS + 1),
    "ngram, vLLM's": Case(1, {"method": "ngram", **_LOOKUP}, NUM_TOKENS + 1, looks_up=True),
    "NGRAM, ours": Case(2, speculative("NGRAM"), NUM_TOKENS + 1, looks_up=True),
    "EAGLE3 while faster, ours": Case(
        2, speculative("EAGLE3"), NUM_TOKENS + 1, draft_when="faster"
    ),
    "NGRAM while faster, ours": Case(
        2, speculative("NGRAM"), NUM_TOKENS + 1, looks_up=True, draft_when="faster"
    ),
    "EAGLE3 on V1, ours": Case(1, speculative("EAGLE3"), NUM_TOKENS + 1),
    "NGRAM on V1, ours": Case(1, speculative("NGRAM"), NUM_TOKENS + 1, looks_up=True),
}
FIRST = list(CASES)[:5]
POINTS = (1, 128), (8, 1024), (32, 1024)


def speed(arguments: argparse.Namespace, log: ResultLog) -> None:
    """Time engines one after the other, or in turns, each in a process of its own."""
    import torch
    from shapes import write_shape

    end = time.monotonic() + arguments.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = write_shape(arguments.models, arguments.shape, ["eagle3"], device)
    log.add({"part": "speed", "kind": "weights", "left_s": round(end - time.monotonic())})
    del torch

    def run(name: str) -> None:
        case = CASES[name]
        asked = {
            "name": name,
            "base": str(base),
            "tiny": arguments.tiny,
            "compile": arguments.compile,
            "rounds": arguments.rounds,
            "taken": arguments.taken,
            "turns": str(turns) if arguments.in_turns else None,
            "engines": len(cases),
        }
        more = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if arguments.in_process else {}
        file = log.folder / f"speed-{name.replace(' ', '-').replace(',', '')}.log"
        left = end - time.monotonic()
        if left < 20:
            log.add({"part": "speed", "kind": "skipped", "case": name})
            return
        for row in rows_of("speed", asked, environment(case.runner, **more), file, left):
            log.add({"part": "speed", "case": name, "runner": case.runner, **row})
        Turns(Path(turns), len(cases)).tick_off(name)  # it may have failed before it came

    cases = list(dict.fromkeys(arguments.cases))
    at_once = len(cases) if arguments.in_turns else 1
    with TemporaryDirectory() as turns, ThreadPoolExecutor(at_once) as pool:
        list(pool.map(run, cases))


def speed_process(asked: Row) -> None:
    from vllm import LLM

    began = time.monotonic()
    case, base, tiny = CASES[asked["name"]], Path(asked["base"]), asked["tiny"]
    config = None if case.config is None else dict(case.config)
    additional: Row = {}
    if config is not None and asked["taken"] is not None:
        config["rejection_sample_method"] = "synthetic"
        config["synthetic_acceptance_length"] = asked["taken"]
    if config is not None and config.get("model") == "DRAFT":
        config["model"] = str(base / "eagle3")
    elif config is not None and "specplug" in config.get("model", ""):
        settings = {"draft_when": case.draft_when} if case.runner == 2 else {}
        if config["model"].endswith("EAGLE3"):
            settings["draft_model_path"] = str(base / "eagle3")
        additional = {"specplug": settings}
    widths = {case.rows, 1} if case.draft_when == "faster" else {case.rows}
    compilation: Row = {
        "cudagraph_capture_sizes": sorted(
            {width * n for width in widths for n in (1, 2, 4, 8, 16, 24, 32)}
        )
    }
    if not asked["compile"]:
        compilation |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    turns: Turns | Alone = Alone()
    size: Row = {"gpu_memory_utilization": 0.85, "compilation_config": compilation}
    if asked["turns"]:
        turns = Turns(Path(asked["turns"]), asked["engines"])
        # They load at once, so what is free says nothing.
        size |= {"gpu_memory_utilization": 0.85 / asked["engines"]}
        size |= {"kv_cache_memory_bytes": 8 << 30}
    if tiny:
        size = {"enforce_eager": True}
    llm = LLM(
        model=str(base / "target"),
        skip_tokenizer_init=True,
        dtype="float32" if tiny else "bfloat16",
        max_model_len=512 if tiny else 4096,
        max_num_seqs=32,
        max_num_batched_tokens=512 if tiny else 8192,
        seed=0,
        speculative_config=config,
        additional_config=additional,
        disable_log_stats=False,
        **size,
    )
    tell(kind="ready", seconds=round(time.monotonic() - began, 1), about=_about(llm))
    vocabulary = json.loads((base / "target/config.json").read_text())["vocab_size"]
    turns.meet(asked["name"])
    for batch, context in ((1, 16), (2, 32)) if tiny else POINTS:
        prompts = random_prompts(batch, context, vocabulary, again=not case.looks_up)
        try:
            row = _time(llm, prompts, asked["rounds"], turns, long=24 if tiny else 96)
        except Exception as error:
            traceback.print_exc()
            tell(kind="failure", error=f"{type(error).__name__}: {error}"[:500])
            raise
        tell(kind="step", batch=batch, context=context, taken=asked["taken"], **row)
    tell(kind="done", seconds=round(time.monotonic() - began, 1), about=_about(llm))


def _generate(llm: Any, prompts: Sequence[list[int]], length: int) -> tuple[float, list[list[int]]]:
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
    given = [{"prompt_token_ids": prompt} for prompt in prompts]
    began = time.perf_counter()
    outputs = llm.generate(given, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return seconds, [list(output.outputs[0].token_ids) for output in outputs]


def _time(
    llm: Any,
    prompts: Iterator[list[list[int]]],
    rounds: int,
    turns: Turns | Alone,
    *,
    long: int,
) -> Row:
    """Time the tokens from ``short`` to ``long``: the prefill falls out."""
    short = 16
    with turns:
        _generate(llm, next(prompts), long + 8)
        batch = len(_generate(llm, next(prompts), short)[1])
    shorts, longs, drafts = [], [], []
    for _ in range(rounds):
        with turns:
            shorts.append(_generate(llm, next(prompts), short)[0])
            before = counted(llm)
            longs.append(_generate(llm, next(prompts), long)[0])
            drafts.append([now - then for now, then in zip(counted(llm), before, strict=True)])
    num_drafts, accepted = drafts[-1]
    return {
        **token_times(shorts, longs, batch, long - short),
        "drafts_per_request": round(num_drafts / batch, 1),
        "accept_length": round(1 + accepted / num_drafts, 3) if num_drafts else None,
    }


# Several ranks


def ranks(arguments: argparse.Namespace, log: ResultLog) -> None:
    """Compare tokens with tensor parallelism, of a small Llama with random weights."""
    import torch
    from shapes import write_shape

    end = time.monotonic() + arguments.seconds
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = write_shape(arguments.models, "llama-small", ["eagle3"], device)
    size = 1 if arguments.tiny else arguments.size
    for name in ("NONE", "EAGLE3", "NGRAM"):
        asked = {"name": name, "base": str(base), "size": size, "tiny": arguments.tiny}
        file = log.folder / f"ranks-{name}.log"
        left = end - time.monotonic()
        for row in rows_of("ranks", asked, environment(2), file, left):
            log.add({"part": "ranks", "size": size, **row})
    found = [json.loads(line) for line in (log.folder / "results.jsonl").read_text().splitlines()]
    tokens = {row["algorithm"]: row.pop("tokens") for row in found if row.get("kind") == "tokens"}
    for name, made in tokens.items():
        same = {
            m: sum(a == b for a, b in zip(tokens["NONE"][m], made[m], strict=True)) for m in made
        }
        log.add({"part": "ranks", "kind": "identity", "algorithm": name, "same": same, "of": 8})


def ranks_process(asked: Row) -> None:
    from vllm import LLM, SamplingParams

    base, tiny, name = Path(asked["base"]), asked["tiny"], asked["name"]
    additional = (
        {"specplug": {"draft_model_path": str(base / "eagle3")}} if name == "EAGLE3" else {}
    )
    began = time.monotonic()
    llm = LLM(
        model=str(base / "target"),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=8,
        tensor_parallel_size=asked["size"],
        seed=0,
        speculative_config=speculative(name),
        additional_config=additional,
        disable_log_stats=False,
        **({"enforce_eager": True} if tiny else {"gpu_memory_utilization": 0.3}),
        **(
            {}
            if tiny
            else {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
        ),
    )
    vocabulary = json.loads((base / "target/config.json").read_text())["vocab_size"]
    rng = random.Random(5)
    prompts = [
        {"prompt_token_ids": [rng.randrange(10, vocabulary - 10) for _ in range(40)]}
        for _ in range(8)
    ]
    length = 16 if tiny else 64
    modes = {
        "greedy": SamplingParams(temperature=0, max_tokens=length, detokenize=False),
        "seeded": SamplingParams(temperature=0.5, seed=7, max_tokens=length, detokenize=False),
    }
    tokens = {
        mode: [
            list(output.outputs[0].token_ids)
            for output in llm.generate(prompts, params, use_tqdm=False)
        ]
        for mode, params in modes.items()
    }
    drafts, accepted = counted(llm)
    tell(
        kind="tokens",
        algorithm=name,
        tokens=tokens,
        accept_length=round(1 + accepted / drafts, 3) if drafts else None,
        seconds=round(time.monotonic() - began, 1),
        about=_about(llm),
    )


PARTS = {"identity": identity, "speed": speed, "ranks": ranks}
PROCESSES = {"identity": identity_process, "speed": speed_process, "ranks": ranks_process}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", type=Path, default=Path("vllm-gpu"))
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--models", type=Path, default=Path("/dev/shm/m"), help="for weights")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--runners", nargs="+", type=int, default=[2, 1])
    parser.add_argument("--variants", nargs="+", default=["float32", "bfloat16"], choices=VARIANTS)
    parser.add_argument("--cases", nargs="+", default=FIRST, choices=CASES)
    parser.add_argument("--shape", default="llama-8b")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--taken", type=float, help="tokens a step gives, of drafts at random")
    parser.add_argument("--compile", action="store_true", help="as vLLM comes; 30 s an engine more")
    parser.add_argument("--in-process", action="store_true", help="no process for the engine core")
    parser.add_argument("--in-turns", action="store_true", help="all engines at once, by rounds")
    parser.add_argument("--size", type=int, default=2, help="ranks")
    parser.add_argument("--tiny", action="store_true", help="on a CPU, a minute")
    parser.add_argument("--asked", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.asked is not None:
        PROCESSES[arguments.part](arguments.asked)
        return
    arguments.output.mkdir(parents=True, exist_ok=True)
    if arguments.tiny:
        arguments.shape = "llama-small"
    PARTS[arguments.part](arguments, ResultLog(arguments.output, "vllm"))


if __name__ == "__main__":
    main()
