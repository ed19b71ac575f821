"""What NGRAM takes of the host: of a decode step, while the device waits, and as its history grows.

    python benchmarks/ngram.py step [--topk 4] [--plain] [--scope engine]
    python benchmarks/ngram.py growth
    python benchmarks/ngram.py scopes
    python benchmarks/ngram.py memory [--bytes 16777216]

step    microseconds a step by batch size. Each request has read a file of the standard library, in
        which one token of ten is another, and writes the file: its drafts are accepted as far as
        the file goes on like them. ``observe`` is the new tokens' way into the history once they
        have reached the host; ``propose`` is the drafting. The policy's costs are a GPU's.
growth  one request reads a million tokens, in which half of the passages repeat earlier ones. At
        each length the next tokens are added one by one, and before each a tree is drafted (by the
        reference in Python); both are timed singly. A history that keeps all, and one that forgets.
scopes  the accept length of the default model by the index's scope: held-out prompts, and edits of
        a file of which a part stands in the prompt. In the scope of tenants requests without a salt
        draft as in that of requests, and those of one salt as in that of the engine.
memory  thousands of requests of many tenants, one after the other and 16 at a time, of which each
        writes 100 to 8,000 tokens: the index's bytes, and the process's.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sysconfig
import time
from collections.abc import Iterator
from itertools import islice, product
from pathlib import Path

import attrs
import psutil
import torch
from measurement import head, line
from tokenizers import Tokenizer

from specplug import HELD_OUT_PROMPTS, LLM, Batch, Draft, DraftInput, SamplingParams
from specplug.algorithm import ASSETS
from specplug.bench.dataset import read_prompts
from specplug.speculative.hook_order import ForwardMode
from specplug_ngram.compiled_drafter import load_library
from specplug_ngram.config import ENGINE, REQUEST, SCOPES, NgramSettings
from specplug_ngram.draft_tree import Shape, draft_tree
from specplug_ngram.history import TOKEN_BYTES, Stream
from specplug_ngram.index import Index
from specplug_ngram.policy import GPU_COSTS, Novelty, StepCost
from specplug_ngram.worker import NgramWorker

# step

STEPS = 200
LENGTH = STEPS * 9


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
    cache_salt: str | None = None


def requests_of(count: int) -> list[Request]:
    """Return requests that write the standard library's first long files."""
    tokenizer = Tokenizer.from_file(str(ASSETS / "tiny_code" / "tokenizer.json"))
    found: list[Request] = []
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text = tokenizer.encode(path.read_text(errors="replace")).ids[:LENGTH]
        if len(text) == LENGTH and len(found) < count:
            draw = random.Random(len(set(text)))
            read = [draw.randrange(4096) if draw.random() < 0.1 else token for token in text]
            found.append(Request(str(len(found)), read, text))
    return found


def measure_step(
    bs: int, shape: Shape, settings: NgramSettings, plain: bool
) -> tuple[float, float, float]:
    """Return the median microseconds of ``observe`` and of ``propose``, and the mean length."""
    compiled = None if plain else load_library()
    worker = NgramWorker(shape, settings, compiled=compiled, costs=GPU_COSTS)
    requests, rows = requests_of(bs), torch.arange(1, bs + 1)
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
        worker.observe([request.request_id for request in requests], tokens, counts)
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


def accept_len(draft: Draft, row: int, came: list[int]) -> int:
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


# growth

CAPACITY = 1 << 20
LENGTHS = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
SMALL = 1 << 16
PASSAGE, WORDS = 50, 30_000


def text(seed: int) -> Iterator[int]:
    """Passages of words whose frequency falls as in language, every other one from before, but
    from no farther back than the smaller history reaches."""
    draw, reach = random.Random(seed), SMALL // (2 * PASSAGE)
    passages: list[list[int]] = []
    while True:
        passage = [int(WORDS ** draw.random()) for _ in range(PASSAGE)]
        passages.append(passage)
        yield from passage
        yield from passages[-draw.randint(1, min(reach, len(passages)))]


def measure_growth(capacity: int, samples: int, lengths: tuple[int, ...]) -> None:
    """Grow one history, and print a row for each length."""
    index = Index(capacity * TOKEN_BYTES)
    history, stream, novelty = index.open("owner"), Stream(), Novelty()
    assert history is not None
    tokens, least, shape = text(seed=0), StepCost(1).least, Shape(4, 7, 8)
    for length in lengths:
        while history.end < length:
            more = list(islice(tokens, min(1_000, length - history.end)))
            index.reserve(history, len(more))
            history.extend(stream, more)
        adding, drafting, nodes = [], [], 0
        for token in islice(tokens, samples):
            start = time.perf_counter_ns()
            tree = draft_tree(history, stream, novelty, shape, least)
            drafting.append(time.perf_counter_ns() - start)
            tree.learn(novelty, [token])
            start = time.perf_counter_ns()
            index.reserve(history, 1)
            history.extend(stream, [token])
            adding.append(time.perf_counter_ns() - start)
            nodes += len(tree.nodes)
        cells = [f"{capacity:,}", f"{length:,}"]
        for times in (adding, drafting):
            ordered = sorted(times)
            cells += [f"{ordered[int(q * (samples - 1))] / 1e3:.1f}" for q in (0.5, 0.99)]
        print(
            line([*cells, f"{nodes / samples:.1f}", f"{history.num_bytes / 1e6:.1f}"]), flush=True
        )


# scopes

PROMPTS, NEW_TOKENS = 32, 128


def edits() -> list[str]:
    """Parts of the standard library's files, each with the beginning of an edited copy."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    texts = [file.read_text(errors="replace") for file in files]
    parts = [text[1_500:2_700] for text in texts if len(text) > 4_000]
    return [f"# old\n{part}\n# new\n{part[:300]}" for part in parts[:PROMPTS]]


def measure_scopes() -> None:
    """Print the accept length of each scope."""
    sets = {
        "held-out": [prompt.content for prompt in read_prompts(HELD_OUT_PROMPTS)[:PROMPTS]],
        "edits": edits(),
    }
    print(head("prompts", "batch", "temperature", REQUEST, ENGINE))
    for (name, prompts), size, heat in product(sets.items(), (1, 8), (0.0, 1.0)):
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=heat, seed=3, ignore_eos=True)
        cells = []
        for scope in (REQUEST, ENGINE):
            own = {"ngram_index_scope": scope}
            options = {"speculative_algorithm": "NGRAM", "speculative_settings": own}
            with LLM(device="cpu", max_running_requests=size, **options) as llm:
                outputs = llm.generate(prompts, params)
            lengths = [length for output in outputs for length in output.accept_lens]
            cells.append(f"{statistics.mean(lengths):.3f}")
        print(line([name, size, heat, *cells]), flush=True)


# memory

REQUESTS, TENANTS, AT_A_TIME, EVERY = 4_000, 300, 16, 500


def measure_memory(most_bytes: int) -> None:
    """Print the index's bytes and the process's while requests come and go."""
    print(head("scope", "requests", "owners", "tokens", "index MB", "of at most", "RSS MB"))
    for scope in SCOPES:
        settings = NgramSettings(ngram_index_scope=scope, ngram_index_bytes=most_bytes)
        worker = NgramWorker(Shape(1, 7, 8), settings, compiled=load_library())
        draw, running, highest = random.Random(0), list[Request](), 0
        for number in range(1, REQUESTS + 1):
            prompt = [int(4_096 ** draw.random()) for _ in range(draw.choice((100, 1_000, 8_000)))]
            salt = f"tenant {int(TENANTS * draw.random() ** 3)}"
            running.append(Request(str(number), prompt, [], cache_salt=salt))
            worker.read_prompts(running[-1:], [len(prompt)])
            ids = [request.request_id for request in running]
            worker.observe(ids, torch.tensor(prompt[: len(ids) * 4]).view(-1, 4), FOUR[: len(ids)])
            if len(running) == AT_A_TIME:
                worker.forget(running.pop(draw.randrange(AT_A_TIME)).request_id)
            highest = max(highest, worker.index.num_bytes)
            assert highest <= most_bytes
            if number % EVERY == 0:
                index, rss = worker.index, psutil.Process().memory_info().rss
                sizes = (index.num_bytes, most_bytes, rss)
                megabytes = [f"{size / 1e6:.1f}" for size in sizes]
                counts = [f"{each:,}" for each in (number, len(index), index.num_tokens)]
                print(line([scope, *counts, *megabytes]), flush=True)


FOUR = torch.full((AT_A_TIME,), 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("what", choices=["step", "growth", "scopes", "memory"])
    add("--topk", type=int, default=1)
    add("--batches", type=int, nargs="+", default=(1, 8, 32, 64))
    add("--plain", action="store_true", help="step: draft in Python")
    add("--samples", type=int, default=4_000, help="growth: tokens timed at each length")
    add("--longest", type=int, default=LENGTHS[-1], help="growth: the last length")
    add("--scope", choices=SCOPES, default="tenant", help="step: of the index")
    add("--bytes", type=int, default=16 << 20, help="memory: the index's budget")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()  # a collection is no token's
    if arguments.what == "scopes":
        return measure_scopes()
    if arguments.what == "memory":
        return measure_memory(arguments.bytes)
    if arguments.what == "growth":
        print(head("kept at most", "history", "add µs", "p99", "draft µs", "p99", "nodes", "MB"))
        for capacity in (SMALL, CAPACITY):
            lengths = tuple(each for each in LENGTHS if each <= arguments.longest)
            measure_growth(capacity, arguments.samples, lengths)
        return
    print(head("batch", "observe µs", "propose µs", "step µs", "accept length"))
    for bs in arguments.batches:
        settings, shape = (
            NgramSettings(ngram_index_scope=arguments.scope),
            Shape(arguments.topk, 7, 8),
        )
        observe, propose, length = measure_step(bs, shape, settings, arguments.plain)
        numbers = (observe, propose, observe + propose)
        print(line([bs, *(f"{each:.0f}" for each in numbers), f"{length:.2f}"]), flush=True)


if __name__ == "__main__":
    main()
