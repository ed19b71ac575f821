"""An engine in a process of its own, which generates when it is asked to.

A benchmark starts several on one machine, and has them take turns: our engine, transformers'
``generate()``, vLLM, or SGLang, the last two with an algorithm of ours or of their own. Each can
have its own Python. Seconds are those of the call in that process; for vLLM and SGLang they have
the way to the engine's own process and back, where it has one.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs

QUIET = {
    "CUDA_MODULE_LOADING": "LAZY",
    "DO_NOT_TRACK": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "PYTHONUNBUFFERED": "1",
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""The environment of every engine: nothing is downloaded, and nothing leaves the machine."""

Params = dict[str, Any]
"""``max_tokens``, and maybe ``temperature``, ``seed`` and ``top_k``, of a request."""


@attrs.frozen
class Generation:
    """What an engine did with a batch.

    Attributes:
        seconds, processor: of a clock, and of the process's processor time.
        steps: decode steps; None: the engine does not tell.
        drafts, accepted: verified drafts of all requests, and drafted tokens that were accepted.
        tokens: of each request.
    """

    seconds: float
    processor: float
    steps: int | None
    drafts: int
    accepted: int
    tokens: list[list[int]]

    @property
    def accept_length(self) -> float | None:
        """Mean tokens a request gained in a verification; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None


class EngineProcess:
    """An engine that is starting, or running.

    Args:
        kind: "specplug", "transformers", "vllm" or "sglang".
        settings: of the engine, which JSON can hold: arguments of its ``LLM`` or ``Engine``.
        log: where all that it prints goes.
        python: of an environment that has the engine.
        packages: a folder that is put on its ``PYTHONPATH``; None: the environment has all.
        environment: more variables.
    """

    def __init__(
        self,
        kind: str,
        settings: Mapping[str, Any],
        log: Path,
        *,
        python: str = sys.executable,
        packages: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        variables = {**os.environ, **QUIET, **(environment or {})}
        if packages is not None:
            variables["PYTHONPATH"] = str(packages)
        self._log = log
        with log.open("ab") as errors:
            self._process = subprocess.Popen(
                [python, __file__, kind, json.dumps(dict(settings))],
                env=variables,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )

    def wait(self) -> dict[str, Any]:
        """Wait until it is ready, and return its version and the seconds of its start.

        Raises:
            RuntimeError: it has ended.
        """
        about: dict[str, Any] = json.loads(self._read())
        return about

    def generate(
        self, prompts: Sequence[Sequence[int]], params: Params | Sequence[Params], at_once: int = 0
    ) -> Generation:
        """Generate for these prompts, ``at_once`` at a time; 0: all together.

        Raises:
            RuntimeError: the process has ended.
        """
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps((prompts, params, at_once)), file=self._process.stdin, flush=True)
        return Generation(**json.loads(self._read()))

    def kill(self) -> None:
        """End the process and those that it started."""
        with suppress(ProcessLookupError):  # all have ended
            os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Have it end, and wait."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=30)
        self.kill()
        self._process.wait()

    def _read(self) -> str:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline()
        if not answer:
            told = self._log.read_text(errors="replace").splitlines()
            cause = [each for each in told if "Error" in each][-1:] or told[-1:]
            code = self._process.wait()
            raise RuntimeError(f"the engine ended with {code}: {''.join(cause)}; see {self._log}")
        return answer


# What follows runs in the process.


class Specplug:
    """Our engine."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from specplug import LLM

        self._llm = LLM(**settings)

    def generate(self, prompts: list[list[int]], params: list[Params]) -> list[list[int]]:
        from specplug import SamplingParams

        given = [SamplingParams(**{"ignore_eos": True, **each}) for each in params]
        return [list(output.token_ids) for output in self._llm.generate(prompts, given)]

    def counts(self) -> tuple[int | None, int, int]:
        """Decode steps, drafts and accepted tokens so far."""
        stats = self._llm.stats()
        verified = stats["verifications"]
        return stats["decode_steps"], verified, stats["accepted"] - verified

    def close(self) -> None:
        self._llm.close()


class Transformers:
    """``generate()`` of transformers with its cache, greedy, a request at a time."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(settings.pop("num_threads", 1))
        self._model = AutoModelForCausalLM.from_pretrained(**settings).eval()

    def generate(self, prompts: list[list[int]], params: list[Params]) -> list[list[int]]:
        import torch

        found = []
        for prompt, each in zip(prompts, params, strict=True):
            ids, count = torch.tensor([prompt]), each["max_tokens"]
            with torch.inference_mode():
                tokens = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    min_new_tokens=count,
                    max_new_tokens=count,
                )
            found.append(tokens[0, len(prompt) :].tolist())
        return found

    def counts(self) -> tuple[int | None, int, int]:
        return None, 0, 0

    def close(self) -> None:
        pass


class VLLM:
    """vLLM. Its steps are counted where its core is in this process
    (``VLLM_ENABLE_V1_MULTIPROCESSING=0``)."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self._llm = LLM(**{"disable_log_stats": False, **settings})
        self._detokenizes = not settings.get("skip_tokenizer_init")
        core = getattr(self._llm.llm_engine.engine_core, "engine_core", None)
        self._steps: int | None = None
        if core is not None:
            self._steps, step = 0, core.step_fn

            def counted() -> Any:
                assert self._steps is not None
                self._steps += 1
                return step()

            core.step_fn = counted

    def generate(self, prompts: list[list[int]], params: list[Params]) -> list[list[int]]:
        from vllm import SamplingParams

        usual = {"temperature": 0, "ignore_eos": True, "detokenize": self._detokenizes}
        given = [SamplingParams(**{**usual, **each}) for each in params]
        ids = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(ids, given, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def counts(self) -> tuple[int | None, int, int]:
        found = {"vllm:spec_decode_num_drafts": 0, "vllm:spec_decode_num_accepted_tokens": 0}
        for metric in self._llm.get_metrics():
            if metric.name in found:
                found[metric.name] += int(metric.value)
        drafts, accepted = found.values()
        return self._steps, drafts, accepted

    def close(self) -> None:
        self._llm.llm_engine.engine_core.shutdown()


class SGLang:
    """SGLang, which tells with each reply how often drafts were verified."""

    def __init__(self, settings: dict[str, Any]) -> None:
        import sglang
        from sglang.srt.plugins import load_plugins

        load_plugins()
        self._engine = sglang.Engine(**settings)
        self._drafts = self._accepted = 0

    def generate(self, prompts: list[list[int]], params: list[Params]) -> list[list[int]]:
        names = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}
        given = [
            {"temperature": 0, "ignore_eos": True}
            | {names.get(name, name): value for name, value in each.items()}
            for each in params
        ]
        replies = self._engine.generate(input_ids=prompts, sampling_params=given)
        tokens = [list(reply["output_ids"]) for reply in replies]
        drafts = sum(reply["meta_info"].get("spec_verify_ct") or 0 for reply in replies)
        self._drafts += drafts
        # The first token is the prefill's, and each verification gives one of its own.
        self._accepted += sum(len(each) - 1 for each in tokens) - drafts if drafts else 0
        return tokens

    def counts(self) -> tuple[int | None, int, int]:
        return None, self._drafts, self._accepted

    def close(self) -> None:
        self._engine.shutdown()


KINDS: dict[str, Any] = {
    "specplug": Specplug,
    "transformers": Transformers,
    "vllm": VLLM,
    "sglang": SGLang,
}


def main() -> None:
    """Start the engine that the command line names, and answer each line of standard input."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print goes to the log
    kind, settings = sys.argv[1], json.loads(sys.argv[2])
    began = time.monotonic()
    engine = KINDS[kind](settings)
    about = {
        "version": sys.modules[kind].__version__,
        "ready_s": round(time.monotonic() - began, 1),
    }
    print(json.dumps(about), file=answers, flush=True)
    for request in sys.stdin:
        prompts, params, at_once = json.loads(request)
        params = [params] * len(prompts) if isinstance(params, dict) else params
        size = at_once or len(prompts)
        before, tokens = engine.counts(), []
        wall, processor = time.perf_counter(), time.process_time()
        for i in range(0, len(prompts), size):
            tokens += engine.generate(prompts[i : i + size], params[i : i + size])
        seconds, busy = time.perf_counter() - wall, time.process_time() - processor
        steps, drafts, accepted = (
            None if now is None else now - then
            for now, then in zip(engine.counts(), before, strict=True)
        )
        answer = Generation(seconds, busy, steps, drafts or 0, accepted or 0, tokens)
        print(json.dumps(attrs.asdict(answer)), file=answers, flush=True)
    engine.close()


if __name__ == "__main__":
    main()
