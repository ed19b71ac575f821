"""The engine on a CUDA device: token identity in float32, bf16 beside it, and no waiting host.

    python benchmarks/cuda.py

Runs NONE and every other installed algorithm on held-out prompts at batch 1 and 8, greedy and
sampled, with chains and trees, without and with memory pressure (as ``exactness.py``). In float32
the tokens must be NONE's; a difference is judged in float64, as in ``exactness.py``. In bf16
equality is not asked: the share of identical prompts is printed. Steps run under
``torch.cuda.set_sync_debug_mode("error")``, so any host read of device data between resolve and
publish raises.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from exactness import PROMPTS, SAMPLINGS, Judge, Run, Setting, longest

from specplug import LLM, SamplingParams
from specplug.engine.step import StepRunner
from specplug.registry import Registry

COUNT, TOKENS = 24, 96


def forbid_waiting() -> None:
    """Make every launched step raise where the host would wait for the device."""
    launch = StepRunner.run

    def run(self: StepRunner, scheduled: object) -> object:
        # NGRAM drafts on the host: its future map waits, by design, in resolve.
        strict = self._runtime.config.algorithm != "NGRAM"
        torch.cuda.set_sync_debug_mode("error" if strict else "default")
        try:
            return launch(self, scheduled)  # type: ignore[arg-type]
        finally:
            torch.cuda.set_sync_debug_mode("default")

    StepRunner.run = run  # type: ignore[method-assign, assignment]


def complete(setting: Setting, dtype: str, prompts: list[str], graphs: bool = True) -> Run:
    """Complete all prompts on the device; the first time, which records the graphs, untimed."""
    llm = LLM(
        dtype=dtype,
        device="cuda",
        speculative_algorithm=setting.algorithm,
        speculative_eagle_topk=setting.topk,
        max_running_requests=setting.batch,
        page_size=setting.page_size,
        chunked_prefill_size=setting.chunk,
        disable_overlap_schedule=not setting.overlap,
        disable_cuda_graph=not graphs,
        enable_mixed_chunk=setting.pressed,
        disable_radix_cache=not setting.pressed,
        max_total_tokens=3 * (longest(prompts) + TOKENS) if setting.pressed else None,
    )
    temperature = SAMPLINGS[setting.sampling]
    params = [
        SamplingParams(max_tokens=TOKENS, temperature=temperature, seed=i)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, params)
    state = llm.effective_config["cuda_graph"]
    assert state == ("on" if graphs else "off: disable_cuda_graph"), state
    llm.reset_stats()
    start = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - start
    llm.check_pool()
    return Run(
        setting=setting,
        tokens=[output.token_ids for output in outputs],
        mean_accept_length=llm.stats()["mean_accept_length"],
        seconds=seconds,
        pool_whole=True,
    )


def main() -> int:
    forbid_waiting()
    lines = Path(PROMPTS).read_text().splitlines()[:COUNT]
    prompts = [json.loads(line)["prompt"] for line in lines]
    judge = Judge(prompts)
    failed = False
    names = [name for name in Registry().names() if name != "NONE"]
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {COUNT} x {TOKENS} tokens")
    for dtype in ("float32", "bfloat16"):
        for sampling in ("greedy", "temperature 0.8"):
            none = complete(Setting(algorithm="NONE", sampling=sampling, batch=8), dtype, prompts)
            _report(dtype, none, "")
            for name in names:
                for batch, topk, pressed in (
                    (1, None, False),
                    (8, None, False),
                    (8, None, True),
                    (8, 4, False),
                    (8, 4, True),
                ):
                    if topk and not Registry().select(name).info.capabilities.branching:
                        continue
                    setting = Setting(
                        algorithm=name,
                        sampling=sampling,
                        batch=batch,
                        page_size=1 if batch == 1 else 16,
                        overlap=batch == 8,
                        chunk=16,
                        topk=topk,
                        pressed=pressed,
                    )
                    done = complete(setting, dtype, prompts)
                    same = sum(a == b for a, b in zip(none.tokens, done.tokens, strict=True))
                    verdict = f"{same} of {COUNT} prompts identical"
                    if dtype == "float32":
                        found = judge.differences(none, done)
                        wrong = [d for d in found if not d.is_tie]
                        failed |= bool(wrong)
                        verdict += f", {len(found) - len(wrong)} ties, {len(wrong)} wrong"
                        for d in found:
                            print(f"    prompt {d.prompt} token {d.position}: gap {d.gap:.2e}")
                    _report(dtype, done, verdict)
    print("graphs off and on, float32, greedy, batch 8")
    for name in ["NONE", *names]:
        setting = Setting(algorithm=name, sampling="greedy", batch=8, overlap=True)
        for graphs in (False, True):
            done = complete(setting, "float32", prompts, graphs)
            _report("float32", done, "graphs on" if graphs else "graphs off")
    return 1 if failed else 0


def _report(dtype: str, done: Run, verdict: str) -> None:
    s = done.setting
    rate = sum(map(len, done.tokens)) / done.seconds
    print(
        f"{dtype:9} {s.sampling:15} {s.algorithm:17} batch {s.batch} topk {s.topk or '-'} "
        f"{'pressed' if s.pressed else '':7} {rate:8.1f} tokens/s "
        f"accept {done.mean_accept_length:.2f}  {verdict}",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
