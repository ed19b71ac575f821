"""The prompts of a benchmark, and how rounds share them. No torch here."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import attrs

from specplug.errors import FallbackWarning, UsageError
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
        line: its line in the file, or its place in the file's array, from 1.
        is_chat: it is a user's message, which a model with a chat template gets in that.
        temperature: instead of the run's; None: the run's.
    """

    content: str | list[int]
    line: int
    is_chat: bool = False
    temperature: float | None = None


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
    """Read the prompts of a dataset: JSON Lines, or one array of JSON.

    A row is ``{"prompt": …}``; or a chat, whose first message of the user is the prompt: of
    Spec-Bench and SPEED-Bench (``turns``, texts), of ShareGPT (``conversations``, of ``from`` and
    ``value``), or ``messages`` of ``role`` and ``content``. Other keys and empty lines are ignored.
    Chats that have no text of a user are left out, with a ``FallbackWarning``.

    Raises:
        UsageError: it cannot be read, has no prompt, or a row is not as expected.
    """
    rows = list(_rows(path, read_text("dataset", path)))
    found = [_prompt(path, number, row) for number, row in rows]
    prompts = [prompt for prompt in found if prompt is not None]
    if not prompts:
        raise UsageError(f'dataset {str(path)!r} has no prompt; expected {{"prompt": …}} per line')
    if len(prompts) < len(found):
        warnings.warn(
            f"dataset {str(path)!r}: {len(found) - len(prompts)} of {len(found)} rows are left "
            "out: they have no text of a user, or stand for one that is to be fetched",
            FallbackWarning,
            stacklevel=2,
        )
    return prompts


def _rows(path: Path, text: str) -> Iterator[tuple[int, Any]]:
    """Yield the rows of a file, each with its place."""
    if text.lstrip().startswith("["):
        yield from enumerate(_parsed(path, 1, text), 1)
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield number, _parsed(path, number, line.strip())


def _parsed(path: Path, number: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad_line(path, number, f"it is no JSON ({error})") from error


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
    count = _per_round(batch_size, num_prompts)
    if count < batch_size:
        raise UsageError(
            f"num_prompts={count} does not fill a batch of {batch_size}; expected at least "
            f"{batch_size} prompts per round, or smaller batch sizes"
        )
    if num_dealt(batch_size, rounds, num_prompts) > MOST:
        raise UsageError(
            f"{rounds} rounds of {count} prompts after a first batch of {batch_size}: expected at "
            f"most {MOST} in all; lower rounds, num_prompts or batch sizes"
        )
    endless = cycle(prompts)
    return Deal(
        warm_up=list(islice(endless, batch_size)),
        rounds=[_batches(list(islice(endless, count)), batch_size) for _ in range(rounds)],
        comes_again=num_dealt(batch_size, rounds, num_prompts) > len(prompts),
    )


def num_dealt(batch_size: int, rounds: int, num_prompts: int | None = None) -> int:
    """Return how many prompts ``deal`` takes, the warm-up included."""
    return batch_size + rounds * _per_round(batch_size, num_prompts)


def _per_round(batch_size: int, num_prompts: int | None) -> int:
    return num_prompts or batch_size * -(-FEWEST // batch_size)


def _batches(prompts: Sequence[Prompt], size: int) -> list[Sequence[Prompt]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def _prompt(path: Path, number: int, row: Any) -> Prompt | None:
    """Return the prompt of a row; None if it is a chat without one."""
    if isinstance(row, dict) and "prompt" not in row:
        for key, first in _FIRST_OF_CHAT.items():
            if isinstance(row.get(key), list):
                try:
                    said = first(row[key])
                except (AttributeError, KeyError, TypeError) as error:
                    why = f"its {key} are {_shown(row[key])}"
                    raise _bad_line(path, number, why) from error
                _check_unicode(path, number, said)
                return Prompt(said, number, is_chat=True) if said else None
    if not isinstance(row, dict) or "prompt" not in row:
        raise _bad_line(path, number, "it has no prompt")
    content = row["prompt"]
    tokens = isinstance(content, list) and all(type(token) is int for token in content)
    if not (isinstance(content, str) or tokens):
        raise _bad_line(path, number, f"its prompt is {_shown(content)}")
    if not content:
        raise _bad_line(path, number, "its prompt is empty")
    if isinstance(content, str):
        _check_unicode(path, number, content)
    return Prompt(content, number)


def _check_unicode(path: Path, number: int, text: str) -> None:
    """Refuse a lone surrogate, which JSON can have as an escape, and no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        why = f"its prompt has a lone surrogate as character {error.start + 1}"
        raise _bad_line(path, number, why) from error


def _first_turn(turns: Sequence[str]) -> str:
    said = turns[0].strip() if turns else ""
    return "" if said.startswith(_TO_BE_FETCHED) else said


def _first_of(whose: str, what: str) -> Callable[[Sequence[Mapping[str, str]]], str]:
    """Return what finds the user's first message in a list of mappings, by these keys."""

    def first(messages: Sequence[Mapping[str, str]]) -> str:
        said = (each[what] for each in messages if each[whose] in ("human", "user"))
        return _first_turn([*islice(said, 1)])

    return first


_TO_BE_FETCHED = "FULL BENCHMARK DATA SHOULD BE FETCHED"
"""SPEED-Bench has this where it may not publish another's text; its own script puts that in."""

_FIRST_OF_CHAT: Mapping[str, Callable[[Any], str]] = {
    "turns": _first_turn,
    "conversations": _first_of("from", "value"),
    "messages": _first_of("role", "content"),
}
"""What finds the user's first message, by the key of a row."""


def _bad_line(path: Path, number: int, why: str) -> UsageError:
    return UsageError(
        f'dataset {str(path)!r}, line {number}: {why}; expected {{"prompt": "text"}}, a list of '
        "token ids as the prompt, or a chat: turns, conversations or messages"
    )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 40 else f"{text[:39]}…"
