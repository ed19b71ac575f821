"""What an algorithm that grows another's drafts adds, on edits and on completions.

    python benchmarks/growth.py [--algorithms EAGLE3 DFLASH] [--batch 1 8] [--rounds 3]

An edit repeats a text with changes. The default model is too small to copy what it has read, so it
is dictated what it writes: the token after each node is that of a given text. The prompt is a piece
of a held-out module of the standard library. What follows is that piece with one name changed
everywhere, and some lines left out or added. A completion is a held-out prompt of ``specplug
bench``; there the model says what it will.

For each proposer, NGRAM and both together the table has the accept length (tokens a verification)
and tokens a second, and for both together how they compare with the better of the two. All run in
turns, in one process, over the same prompts, greedy; their outputs are the same, which is checked.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch
from measurement import head, in_turns, line
from torch import Tensor

from specplug import HELD_OUT_PROMPTS, LLM, SamplingParams
from specplug.speculative.hook_order import Chunks, Drafted, Half, HookOrder

GROWER = "NGRAM"
NOTES = ("the caller has checked this", "see the notes", "slow, but seldom used", "as before")
PIECE, WRITTEN = 240, 128
"""Most tokens of a piece of text, and of a completion."""


@attrs.frozen
class Task:
    """What is written after a prompt.

    Attributes:
        prompt: the tokens before.
        text: the tokens that are written; None: what the model says.
    """

    prompt: list[int]
    text: list[int] | None = None

    @property
    def params(self) -> SamplingParams:
        """Its sampling parameters."""
        length = WRITTEN if self.text is None else len(self.text)
        return SamplingParams(max_tokens=length, ignore_eos=True)


@contextmanager
def dictated(tasks: Sequence[Task]) -> Iterator[None]:
    """Let the target's token after each node be what the request's task says."""
    texts = {tuple(t.prompt): torch.tensor([*t.prompt, *t.text, 0]) for t in tasks if t.text}
    verify, commit = HookOrder.verify, HookOrder.commit_chunks

    def after(half: Half, positions: Tensor) -> Tensor:
        """The tokens after the positions [bs, N] of each request."""
        rows = []
        for request, row in zip(half.batch.requests, positions, strict=True):
            text = texts[tuple(request.prompt_token_ids)]
            rows.append(text[(row + 1).clamp(max=len(text) - 1)])
        return torch.stack(rows)

    def verify_dictated(self: HookOrder, drafted: Drafted, predict: Tensor, *rest: Any) -> Any:
        draft = drafted.draft
        said = after(drafted, drafted.seq_lens.unsqueeze(1) + draft.depths)
        return verify(self, drafted, draft.flatten(said), *rest)

    def commit_dictated(self: HookOrder, chunks: Chunks, predict: Tensor, *rest: Any) -> Any:
        ends = torch.tensor(chunks.batch.chunk_ends).unsqueeze(1) - 1
        return commit(self, chunks, after(chunks, ends).squeeze(1), *rest)

    if texts:
        HookOrder.verify, HookOrder.commit_chunks = verify_dictated, commit_dictated  # type: ignore
    try:
        yield
    finally:
        HookOrder.verify, HookOrder.commit_chunks = verify, commit  # type: ignore[method-assign]


@attrs.frozen
class Round:
    """What a run has done.

    Attributes:
        outputs: the tokens of each prompt.
        accept_length: tokens a verification.
        speed: tokens a second.
    """

    outputs: Sequence[Sequence[int]]
    accept_length: float
    speed: float


def edits(count: int, tokenizer: Any) -> list[Task]:
    """Return edits, one of each held-out module that has a fitting piece."""
    stdlib, tasks = Path(sysconfig.get_paths()["stdlib"]), []
    rows = [json.loads(row) for row in HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    for module in dict.fromkeys(row["module"] for row in rows):
        file = stdlib / f"{module.replace('.', '/')}.py"
        if file.exists():
            text = file.read_text(encoding="utf-8")
            begin = text.find("\ndef ", len(text) // 3)
            piece = tokenizer.decode(tokenizer.encode(text[begin + 1 : begin + 4000])[:PIECE])
            prompt = tokenizer.encode(f"{piece.rpartition(chr(10))[0]}\n\n\n")
            tasks.append(Task(prompt, tokenizer.encode(edited(piece, module))))
    assert len(tasks) >= count, f"{len(tasks)} pieces; expected {count}"
    return tasks[:count]


def edited(piece: str, seed: str) -> str:
    """Return a piece with its most frequent long name changed, and one line of eight left out, or
    with another one before it."""
    chance = random.Random(seed)
    (name, _), *_ = Counter(re.findall(r"\b[a-z_]{4,}\b", piece)).most_common(1)
    lines: list[str] = []
    for number, each in enumerate(piece.splitlines()[:-1]):
        if number and chance.random() < 0.0625:
            continue
        if number and chance.random() < 0.0625:
            lines.append(f"{' ' * (len(each) - len(each.lstrip()))}# {chance.choice(NOTES)}")
        lines.append(re.sub(rf"\b{name}\b", f"{name}2", each))
    return "\n".join(lines) + "\n"


def write(llm: LLM, tasks: Sequence[Task], batch: int) -> Round:
    """Write what tasks ask for, ``batch`` of them at a time."""
    llm.reset_stats()
    outputs: list[Sequence[int]] = []
    began = time.perf_counter()
    for start in range(0, len(tasks), batch):
        some = tasks[start : start + batch]
        found = llm.generate([t.prompt for t in some], [t.params for t in some])
        outputs += [output.token_ids for output in found]
    seconds, stats = time.perf_counter() - began, llm.stats()
    tokens = sum(map(len, outputs))
    return Round(outputs, stats["accepted"] / stats["verifications"], tokens / seconds)


def compare(proposer: str, kind: str, tasks: Sequence[Task], batch: int, rounds: int) -> None:
    """Print the rows of a proposer on a task."""
    names = [proposer, GROWER, f"{proposer}+{GROWER}"]

    def run(name: str) -> Round:
        # A new engine each time: an index that has read the prompts' outputs would know them.
        with LLM(speculative_algorithm=name, max_running_requests=batch) as llm, dictated(tasks):
            return write(llm, tasks, batch)

    found = in_turns({name: lambda name=name: run(name) for name in names}, rounds)  # type: ignore[misc]
    assert all(each.outputs == found[proposer][0].outputs for r in found.values() for each in r)
    lengths = {name: statistics.median(r.accept_length for r in found[name]) for name in names}
    speeds = {name: statistics.median(r.speed for r in found[name]) for name in names}
    for name in names:
        cells = [kind, batch, name, f"{lengths[name]:.3f}", f"{speeds[name]:.1f}"]
        for measured in (lengths, speeds):
            best = max(measured[each] for each in names[:2])
            cells.append(f"{measured[name] / best:.3f}" if name is names[-1] else "")
        print(line(cells), flush=True)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--algorithms", nargs="+", default=["EAGLE3", "DFLASH"])
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    rows = [json.loads(row) for row in HELD_OUT_PROMPTS.read_text(encoding="utf-8").splitlines()]
    with LLM() as llm:
        changed = edits(arguments.prompts, llm.tokenizer)
    some = rows[:: len(rows) // arguments.prompts][: arguments.prompts]
    plain = [Task(row["prompt"]) for row in some]
    print(
        head(
            "task",
            "batch",
            "algorithm",
            "accept length",
            "tokens/s",
            "of the better",
            "speed of it",
        )
    )
    for proposer in arguments.algorithms:
        for batch in arguments.batch:
            for kind, tasks in (("edits", changed), ("completion", plain)):
                compare(proposer, kind, tasks, batch, arguments.rounds)


if __name__ == "__main__":
    main()
