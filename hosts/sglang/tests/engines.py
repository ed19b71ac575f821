"""SGLang's engines on the default model: float32 on the CPU."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import psutil

import specplug

THIRD_PARTY = Path(__file__).parent / "third_party"
os.environ.update(
    SGLANG_USE_CPU_ENGINE="1",  # read when SGLang is imported
    HF_HUB_OFFLINE="1",
    OMP_NUM_THREADS="1",
    TORCHDYNAMO_DISABLE="1",  # SGLang compiles functions of its sampler
    SGLANG_CUDA_COREDUMP_BEFORE_CRASH="0",  # it waits for a minute
    SGLANG_PYSPY_DUMP_BEFORE_CRASH="0",
    SPECPLUG_DEBUG="1",  # what hooks return is checked by value
    SPECPLUG_DRAFT_WHEN="always",  # so that the clock changes no number of steps
    PYTHONPATH=os.pathsep.join(filter(None, (str(THIRD_PARTY), os.environ.get("PYTHONPATH")))),
)

ASSETS = Path(specplug.__file__).parent / "assets"
MODEL = ASSETS / "tiny_code"
TREE = {
    "speculative_num_steps": 5,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 16,
}
ON_CPU: dict[str, Any] = {
    "model_path": str(MODEL),
    "device": "cpu",
    "attention_backend": "torch_native",
    "dtype": "float32",
    "max_total_tokens": 4096,
    "mem_fraction_static": 0.2,
    "log_level": "error",
}


@attrs.frozen
class Generated:
    """Of a list of prompts: their output, SGLang's words on each, and all verify steps."""

    tokens: list[list[int]]
    about: list[dict[str, Any]]

    @property
    def steps(self) -> int:
        return sum(each.get("spec_verify_ct", 0) for each in self.about)


@attrs.frozen
class Engine:
    """One of SGLang's engines, and what plugins saw in it."""

    sglang: Any
    witness: Path

    def generate(
        self, prompts: Sequence[str], sampling: Any = None, max_tokens: int = 64
    ) -> Generated:
        """Generate for all prompts in one batch, greedy unless said otherwise."""
        wanted = {"temperature": 0, "max_new_tokens": max_tokens} if sampling is None else sampling
        replies = self.sglang.generate(list(prompts), wanted)
        tokens = [list(reply["output_ids"]) for reply in replies]
        return Generated(tokens, [reply["meta_info"] for reply in replies])

    def seen(self, kind: str) -> list[Any]:
        """Return what an extension was told of: prefill chunks, finished requests, idle steps."""
        events = [json.loads(line) for line in self.witness.read_text().splitlines()]
        return [event[kind] for event in events if kind in event]

    @property
    def processes(self) -> list[psutil.Process]:
        """Those that SGLang has started for it, and theirs."""
        watched = self.sglang.tokenizer_manager._subprocess_watchdog._processes
        found = [psutil.Process(process.pid) for process in watched]
        return [*found, *(child for each in found for child in each.children(recursive=True))]

    @property
    def chunks(self) -> list[tuple[str, int, int, bool, bool]]:
        """Of each chunk that was prefilled: whose it is, start, end, whether it is the first one
        of its request, and the last."""
        return [tuple(chunk) for step in self.seen("prefill") for chunk in step]


@contextmanager
def environment(**names: str) -> Iterator[None]:
    """Set environment variables, which SGLang's processes inherit."""
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(names)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def running(algorithm: str | None = None, **settings: Any) -> Iterator[Engine]:
    """Run an engine, with an algorithm by its own name, or with none."""
    from fast_start import FastEngine

    if algorithm is not None:
        settings["speculative_algorithm"] = f"SPECPLUG_{algorithm}"
    with tempfile.NamedTemporaryFile() as file, environment(WITNESS_FILE=file.name):
        engine = FastEngine(**{**ON_CPU, **settings})
        try:
            yield Engine(engine, Path(file.name))
        finally:
            engine.shutdown()
