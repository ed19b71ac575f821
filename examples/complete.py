"""Completes held-out functions with the default model, plainly and under every algorithm.

Run it with ``make run``. It shows the first completion and a table of what each installed
algorithm gains over plain decoding, and exits with 1 if one of them changes a single token or is
broken. No prompt is given to an engine twice, since an algorithm may learn from what it has seen.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time

# Operations this small gain nothing from a second thread, and lose much if it has to wait for a
# core. torch reads this when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import attrs

from specplug import HELD_OUT_PROMPTS, LLM, RequestOutput, SamplingParams, SpecplugError
from specplug.cli.standard_output import print_table
from specplug.registry import Registry

BASELINE, AUTO = "NONE", "auto"
WARM_UP = 0
ROUNDS = range(26, 256, 50)
"""Lines of the prompt file, each of another module; all algorithms take turns at each."""
PARAMS = SamplingParams(max_tokens=128, ignore_eos=True)


@attrs.define
class Variant:
    """An installed algorithm, or several as ``auto``, its engine, and what it has generated; or why
    it could not."""

    name: str
    llm: LLM | None = None
    outputs: list[RequestOutput] = attrs.field(factory=list)
    seconds: list[float] = attrs.field(factory=list)
    problem: str = ""

    def load(self) -> None:
        """Make the engine."""
        try:
            self.llm = LLM(speculative_algorithm=self.name)
        except Exception as error:
            self._fail(error)

    def complete(self, prompt: str) -> None:
        """Complete a prompt and keep what came and how long it took."""
        if self.llm is None:
            return
        started = time.perf_counter()
        try:
            output = self.llm.generate(prompt, PARAMS)[0]
        except Exception as error:
            self._fail(error)
            return
        self.seconds.append(time.perf_counter() - started)
        self.outputs.append(output)

    def forget(self) -> None:
        """Start counting anew, after the warm-up."""
        self.outputs, self.seconds = [], []

    def identical(self, baseline: Variant) -> bool:
        """Whether every token is the baseline's."""
        mine = [output.token_ids for output in self.outputs]
        return mine == [output.token_ids for output in baseline.outputs]

    def row(self, baseline: Variant) -> list[str]:
        """Its line of the table; medians over the rounds."""
        if self.problem:
            return [self.name, "-", "-", "-", self.problem]
        pairs = list(zip(self.outputs, self.seconds, strict=True))
        rate = statistics.median(len(output.token_ids) / seconds for output, seconds in pairs)
        ratios = [b / s for b, s in zip(baseline.seconds, self.seconds, strict=True)]
        accepted = [n for output in self.outputs for n in output.accept_lens]
        return [
            self.name,
            f"{rate:.0f}",
            f"{statistics.median(ratios):.2f}",
            f"{statistics.mean(accepted):.2f}",
            "yes" if self.identical(baseline) else "no",
        ]

    def _fail(self, error: Exception) -> None:
        kind = "" if isinstance(error, SpecplugError) else f"{type(error).__name__}: "
        self.problem, self.llm = f"broken: {kind}{error}", None


def main() -> int:
    """Run, print, and say whether all is well: 0, or 1."""
    lines = HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [json.loads(lines[number]) for number in (WARM_UP, *ROUNDS)]
    names = [entry.name for entry in Registry().entries() if not entry.disabled]
    variants = [Variant(name) for name in [*sorted(names, key=lambda n: n != BASELINE), AUTO]]
    for variant in variants:
        variant.load()
    for number, prompt in enumerate(prompts):
        for variant in variants:
            variant.complete(prompt["prompt"])
            if number == 0:
                variant.forget()
    baseline = variants[0]
    if baseline.name != BASELINE or baseline.problem:
        print(f"error: {baseline.problem or BASELINE + ' is not installed'}", file=sys.stderr)
        return 1
    show(prompts[1]["module"], baseline.outputs[0])
    columns = "algorithm", "tokens/s", "speed-up", "mean accept length", "identical"
    print_table(columns, [variant.row(baseline) for variant in variants])
    print(f"{len(ROUNDS)} functions of {PARAMS.max_tokens} tokens, greedy, one at a time; medians")
    return 0 if all(c.identical(baseline) and not c.problem for c in variants) else 1


def show(module: str, output: RequestOutput) -> None:
    """Print a prompt (dim on a terminal) and its completion (highlighted)."""
    prompt, text = output.prompt or "", output.text or ""
    print(f"A function of {module}, which the model has never seen, and its completion:\n")
    if not sys.stdout.isatty():
        print(f"{prompt}{text}\n")
        return
    from rich.console import Console
    from rich.syntax import Syntax

    code = Syntax("", "python", theme="ansi_dark").highlight(prompt + text)
    code.stylize("dim", 0, len(prompt))
    Console().print(code)


if __name__ == "__main__":
    sys.exit(main())
