"""How much faster than plain decoding each algorithm completes text with the default model.

    OMP_NUM_THREADS=1 python benchmarks/speed_ups.py EAGLE3 DSPARK NGRAM,DSPARK auto [--batch 1 8]

What plugins declare as ``AlgorithmInfo.speed_ups`` is the table's ratio of processor times at batch
size 1. All run in turns, in one process, on the same held-out prompts. The processor's time of the
process says more than the wall's where other work shares the machine; both are in the table, each
the median of the ratios of the rounds, with quartiles.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import Counter
from functools import partial
from itertools import count

import attrs
from measurement import in_turns, ratio, table

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams

BASELINE = "NONE"
PARAMS = SamplingParams(max_tokens=96, ignore_eos=True)
WARM_UPS = 3


@attrs.frozen
class Round:
    """What a round took, and gave.

    Attributes:
        wall, processor: seconds.
        accept_lens: tokens of each verification.
        outputs: the tokens of each prompt.
    """

    wall: float
    processor: float
    accept_lens: list[int]
    outputs: list[list[int]]


class Completions:
    """An engine that completes other prompts in each round."""

    def __init__(self, algorithm: str, batch: int) -> None:
        self.llm = LLM(speculative_algorithm=algorithm, max_running_requests=batch)
        self._batch = batch
        self._numbers = count()
        lines = HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()
        self._prompts = [json.loads(line)["prompt"] for line in lines]

    def run(self) -> Round:
        """Complete the next prompts."""
        number = next(self._numbers) * self._batch
        prompts = [self._prompts[(number + i) % len(self._prompts)] for i in range(self._batch)]
        wall, processor = time.perf_counter(), time.process_time()
        outputs = self.llm.generate(prompts, PARAMS)
        return Round(
            time.perf_counter() - wall,
            time.process_time() - processor,
            [n for output in outputs for n in output.accept_lens],
            [output.token_ids for output in outputs],
        )


def measure(algorithms: list[str], batch: int, rounds: int) -> list[list[object]]:
    """Return the rows of a table."""
    engines = {name: Completions(name, batch) for name in (BASELINE, *algorithms)}
    found = in_turns(
        {name: partial(Completions.run, each) for name, each in engines.items()},
        rounds,
        warm_ups=WARM_UPS,
    )
    plain, rows = found[BASELINE], []
    for name, mine in found.items():
        assert [r.outputs for r in mine] == [r.outputs for r in plain], f"{name}: other tokens"
        drafters: Counter[str] = engines[name].llm.stats()["verifications_by_drafter"]
        total = sum(drafters.values())
        shares = (f"{who} {100 * n / total:.0f} %" for who, n in Counter(drafters).most_common())
        rows.append(
            [
                name,
                batch,
                ratio([r.processor for r in plain], [r.processor for r in mine]),
                ratio([r.wall for r in plain], [r.wall for r in mine]),
                f"{statistics.mean(n for r in mine for n in r.accept_lens):.2f}",
                ", ".join(shares),
            ]
        )
        engines[name].llm.close()
    return rows


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("algorithms", nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--rounds", type=int, default=40)
    options = parser.parse_args()
    rows = [
        row for batch in options.batch for row in measure(options.algorithms, batch, options.rounds)
    ]
    columns = "algorithm", "batch", "x NONE, processor", "x NONE, wall", "accept length", "who"
    print(table(columns, rows))


if __name__ == "__main__":
    main()
