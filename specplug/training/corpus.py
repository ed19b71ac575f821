"""The data of a training: texts, prompts and chats, as tokens with what is to be learnt of them."""

from __future__ import annotations

import json
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs

from specplug.algorithm import HELD_OUT_PROMPTS
from specplug.errors import UsageError, shown
from specplug.text_file import read_text

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3"}
"""Folders beside or in the standard library that are no source of modules in use."""

_EXPECTED = '{"text": …}, {"prompt": …} with or without a "response", or {"messages": […]}'


@attrs.frozen(kw_only=True)
class Text:
    """One text of the data.

    Attributes:
        token_ids: of all of it.
        learnt: for each token whether the draft is to learn to say it: all of a text, a response,
            an assistant's turns.
        cuts: where the target can go on writing: the number of tokens before a response or an
            assistant's turn; None: anywhere.
    """

    token_ids: Sequence[int]
    learnt: Sequence[bool]
    cuts: Sequence[int] | None = None


def read_texts(
    files: Sequence[Path], tokenizer: Any, left_out: Callable[[Path], None] = lambda file: None
) -> list[Text]:
    """Read files: JSON Lines (``.jsonl``), and plain text, each file one text.

    Args:
        files: of a folder, all files in it are read but those that are not UTF-8.
        tokenizer: the target's, of transformers.
        left_out: is told each file of a folder that is not read.

    Raises:
        UsageError: a file cannot be read, a line is not as expected, or there is no text at all.
    """
    if tokenizer is None:
        raise UsageError("the target has no tokenizer; expected one, to read the data with")
    texts = [text for file in _files(files, left_out) for text in _texts(file, tokenizer)]
    if not texts:
        named = ", ".join(map(str, files)) or "none"
        raise UsageError(f"data {named}: no text in it; expected one at least")
    return texts


def standard_library() -> tuple[Path, ...]:
    """Return the running Python's own source, sorted: what a training without data reads.

    Without packages that were installed, tests, and the modules that the default model's held-out
    prompts are from. Files that are not UTF-8 are left out.
    """
    root = Path(sysconfig.get_path("stdlib"))
    held_out = {
        json.loads(line)["module"] for line in HELD_OUT_PROMPTS.read_text("utf-8").splitlines()
    }
    return tuple(
        file
        for file in sorted(root.rglob("*.py"))
        if not _NOT_SOURCE & set(file.relative_to(root).parts)
        and _module_of(file.relative_to(root)) not in held_out
        and _is_utf8(file)
    )


def _module_of(file: Path) -> str:
    parts = file.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_utf8(file: Path) -> bool:
    try:
        file.read_text("utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return True


def _files(given: Sequence[Path], left_out: Callable[[Path], None]) -> Iterator[Path]:
    for path in given:
        if path.is_dir():
            for file in sorted(file for file in path.rglob("*") if file.is_file()):
                if _is_utf8(file):
                    yield file
                else:
                    left_out(file)
        else:
            yield path


def _texts(file: Path, tokenizer: Any) -> Iterator[Text]:
    content = read_text("data", file)
    if file.suffix != ".jsonl":
        if content.strip():
            yield _plain(content, tokenizer)
        return
    for number, line in enumerate(content.split("\n"), 1):
        if line.strip():
            try:
                yield _text_of(json.loads(line), tokenizer)
            except (ValueError, LookupError, TypeError, RecursionError) as error:
                raise UsageError(
                    f"data {str(file)!r}, line {number}: {shown(line)} ({error}); expected "
                    f"{_EXPECTED}"
                ) from error


def _text_of(row: Any, tokenizer: Any) -> Text:
    if "messages" in row:
        return _chat(row["messages"], tokenizer)
    if "text" in row:
        return _plain(row["text"], tokenizer)
    prompt = _encode(row["prompt"], tokenizer)
    response = _encode(row.get("response") or "", tokenizer, goes_on=True)
    return Text(
        token_ids=[*prompt, *response],
        learnt=[False] * len(prompt) + [True] * len(response),
        cuts=[len(prompt)],
    )


def _plain(text: str, tokenizer: Any) -> Text:
    token_ids = _encode(text, tokenizer)
    return Text(token_ids=token_ids, learnt=[True] * len(token_ids))


def _encode(text: str, tokenizer: Any, *, goes_on: bool = False) -> list[int]:
    if not isinstance(text, str):
        raise TypeError("it is no text")
    found: list[int] = tokenizer(text, add_special_tokens=not goes_on, verbose=False)["input_ids"]
    return found


def _chat(messages: Any, tokenizer: Any) -> Text:
    """Render a chat as the target's template has it. What stands between a prompt for the assistant
    and the end of its turn is learnt."""

    def rendered(turns: Any, *, prompt: bool = False) -> str:
        text: str = tokenizer.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=prompt
        )
        return text

    whole, spans = rendered(messages), []
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            # Templates may write a turn that is over in another way than one that begins.
            prompts = rendered(messages[:index], prompt=True), rendered(messages[: index + 1])
            start, end = (_num_common(whole, prompt) for prompt in prompts)
            if end > start:
                spans.append((start, end))
    if messages[-1]["role"] != "assistant":
        whole = rendered(messages, prompt=True)
        spans.append((len(whole), len(whole)))
    encoded = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    starts = [start for start, _ in encoded["offset_mapping"]]
    return Text(
        token_ids=encoded["input_ids"],
        learnt=[any(first <= at < last for first, last in spans) for at in starts],
        cuts=[sum(at < first for at in starts) for first, _ in spans],
    )


def _num_common(text: str, other: str) -> int:
    """Return with how many equal characters two texts begin."""
    pairs = enumerate(zip(text, other, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(text), len(other)))
