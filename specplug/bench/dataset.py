"""The prompts of a benchmark, and how rounds share them. No torch here."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import attrs

from specplug.errors import UsageError
from specplug.text_file import read_text

FEWEST = 4
"""The default number of prompts in a round: one prompt alone says little about the next."""


MOST = 1_000_000
"""The most prompts of all rounds together; more would take weeks."""


@attrs.frozen
class Prompt:
    """One prompt.

    Attributes:
        content: its text, or its token ids.
        line: its line in the file, from 1.
    """

    content: str | list[int]
    line: int


@attrs.frozen
class Deal:
    """The prompts that every variant completes, in batches.

    Attributes:
        warm_up: one batch that is not measured.
        rounds: the batches of each round.
        comes_again: whether prompts repeat, because the dataset is too small.
    """

    warm_up: Sequence[Prompt]
    rounds: Sequence[Sequence[Sequence[Prompt]]]
    comes_again: bool

    @property
    def num_prompts_per_round(self) -> int:
        """The number of prompts in a round."""
        return sum(map(len, self.rounds[0]))

    @property
    def num_prompts(self) -> int:
        """The number of prompts of a variant, with the warm-up."""
        return len(self.warm_up) + len(self.rounds) * self.num_prompts_per_round


def read_prompts(path: Path) -> list[Prompt]:
    """Read a JSON Lines file of ``{"prompt": …}``; ignore other keys and empty lines.

    Raises:
        UsageError: it cannot be read, has no prompt, or a line is not as expected.
    """
    lines = [line.strip() for line in read_text("dataset", path).split("\n")]
    prompts = [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line]
    if not prompts:
        raise UsageError(f'dataset {str(path)!r} has no prompt; expected {{"prompt": …}} per line')
    return prompts


def deal(
    prompts: Sequence[Prompt], batch_size: int, rounds: int, num_prompts: int | None = None
) -> Deal:
    """Distribute prompts over the rounds in order, each once as long as they last.

    Repeated prompts would favour an algorithm that learns from what it has seen.

    Args:
        batch_size: prompts that run together.
        rounds: number of rounds.
        num_prompts: in a round; None: at least ``FEWEST``, in full batches.

    Raises:
        UsageError: a round would not fill one batch, or there are too many of them.
    """
    count = num_prompts or batch_size * -(-FEWEST // batch_size)
    if count < batch_size:
        raise UsageError(
            f"num_prompts={count} does not fill a batch of {batch_size}; expected at least "
            f"{batch_size} prompts per round, or smaller batch sizes"
        )
    if batch_size + rounds * count > MOST:
        raise UsageError(
            f"{rounds} rounds of {count} prompts after a first batch of {batch_size}: expected at "
            f"most {MOST} in all; lower rounds, num_prompts or batch sizes"
        )
    endless = cycle(prompts)
    return Deal(
        warm_up=list(islice(endless, batch_size)),
        rounds=[_batches(list(islice(endless, count)), batch_size) for _ in range(rounds)],
        comes_again=batch_size + rounds * count > len(prompts),
    )


def _batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _prompt(path: Path, number: int, line: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_line(path, number, f"it is no JSON ({error})") from error
    if not isinstance(row, dict) or "prompt" not in row:
        raise _bad_line(path, number, "it has no prompt")
    content = row["prompt"]
    tokens = isinstance(content, list) and all(type(token) is int for token in content)
    if not (isinstance(content, str) or tokens):
        raise _bad_line(path, number, f"its prompt is {_shown(content)}")
    if not content:
        raise _bad_line(path, number, "its prompt is empty")
    return Prompt(content, number)


def _bad_line(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        f'dataset {str(path)!r}, line {number}: {why}; expected {{"prompt": "text"}}, or a list '
        "of token ids as the prompt"
    )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"
