"""What NGRAM takes of the host in a decode step, while the device waits: microseconds a step.

    python benchmarks/ngram_step.py [--topk 4] [--plain]

Each request of a batch has read a file of Python's standard library, in which one token of ten is
another, and writes the file: its drafts are accepted as far as the file goes on like them.
``observe`` is the new tokens' way into the history once they have reached the host; ``propose`` is
the drafting. The policy's costs are those of a GPU, so that batches draft too.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import sysconfig
import time
from pathlib import Path

import attrs
import torch
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

import specplug
from specplug import Batch, DraftInput
from specplug.speculative.batch import ForwardMode
from specplug_ngram.compiled_drafter import load_library
from specplug_ngram.draft_tree import Shape
from specplug_ngram.future_map import HostFutureMap
from specplug_ngram.policy import GPU_COSTS
from specplug_ngram.worker import NgramWorker

BATCHES = (1, 8, 32, 64)
STEPS = 200
LENGTH = STEPS * 9
CHANGED = 0.1


@attrs.define
class Request:
    """One that writes a text.

    Attributes:
        prompt_token_ids: nearly the same text.
        written: tokens that it has written.
    """

    request_id: str
    prompt_token_ids: list[int]
    text: list[int]
    written: int = 0


def files(count: int) -> list[list[int]]:
    """Return the tokens of the standard library's first long files."""
    model = Path(specplug.__file__).parent / "assets" / "tiny_code"
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    found = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        ids = tokenizer.encode(path.read_text(errors="replace")).ids
        if len(ids) > LENGTH:
            found.append(ids[:LENGTH])
        if len(found) == count:
            break
    return found


def changed(text: list[int]) -> list[int]:
    """Return a text with some tokens changed."""
    draw = random.Random(len(set(text)))
    return [draw.randrange(4096) if draw.random() < CHANGED else token for token in text]


def measure(bs: int, shape: Shape, plain: bool) -> tuple[float, float, float]:
    """Return the median microseconds of ``observe`` and of ``propose``, and the mean length."""
    worker = NgramWorker(shape, compiled=None if plain else load_library(), costs=GPU_COSTS)
    future_map = HostFutureMap(bs + 1, torch.device("cpu"), worker.observe)
    requests = [Request(str(n), changed(text), text) for n, text in enumerate(files(bs))]
    rows = torch.arange(1, bs + 1)
    batch = Batch(
        mode=ForwardMode.DECODE,
        requests=tuple(requests),
        req_indices=rows,
        seq_lens=rows,
        max_draft_nodes=(shape.num_draft_tokens,) * bs,
    )
    worker.read_prompts(requests, [LENGTH] * bs)
    observing, proposing, accepted = [], [], 0
    counts, tokens = torch.ones(bs, dtype=torch.int64), torch.zeros(bs, 1, dtype=torch.int64)
    for row, request in enumerate(requests):
        tokens[row] = request.text[request.written]
        request.written += 1
    for step in range(STEPS):
        start = time.perf_counter_ns()
        future_map.relay(batch, tokens, counts)
        future_map._arrive(keep=0)
        observed = time.perf_counter_ns()
        draft = worker.propose(batch, DraftInput(bonus_tokens=tokens[:, 0]))
        proposed = time.perf_counter_ns()
        if step >= STEPS // 10:
            observing.append(observed - start)
            proposing.append(proposed - observed)
        tokens = torch.zeros(bs, draft.depth + 1, dtype=torch.int64)
        for row, request in enumerate(requests):
            came = request.text[request.written :][: draft.depth + 1]
            counts[row] = length = accept_len(draft, row, came)
            tokens[row, :length] = torch.tensor(came[:length])
            request.written += length
            accepted += length
    medians = (statistics.median(times) / 1e3 for times in (observing, proposing))
    return *medians, accepted / (STEPS * bs)


def accept_len(draft: specplug.Draft, row: int, came: list[int]) -> int:
    """Return how many of the tokens that ``came`` a step commits, the bonus token included."""
    drafted = draft.tokens[row].tolist()
    parents = range(-1, len(drafted) - 1) if draft.parents is None else draft.parents[row].tolist()
    width = len(drafted) if draft.widths is None else draft.widths[row]
    node, length = 0, 1
    while length < len(came):
        children = [n for n in range(1, width) if parents[n] == node]
        node = next((n for n in children if drafted[n] == came[length - 1]), 0)
        if not node:
            break
        length += 1
    return length


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--topk", type=int, default=1)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--plain", action="store_true", help="draft in Python")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    shape = Shape(arguments.topk, 7, 8)
    table = Table("batch", "observe µs", "propose µs", "step µs", "accept length")
    for bs in arguments.batches:
        observe, propose, length = measure(bs, shape, arguments.plain)
        numbers = (observe, propose, observe + propose)
        table.add_row(str(bs), *(f"{number:.0f}" for number in numbers), f"{length:.2f}")
    Console().print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
