"""What a benchmark asks for: kinds of requests, each made from the same prompts. No torch here."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import chain

import attrs

from specplug.bench.dataset import Prompt
from specplug.errors import UsageError

COMPLETION = "completion"
NOISE = "noise"
MIXED = "mixed"

NOISE_TEMPERATURE = 4.0
"""So high that few drafted tokens are what is sampled."""

_CONVERSATIONS, _TURNS = 4, 3
"""Conversations of agents that run side by side and read the same files, and requests of each."""

_TOOLS = json.dumps(
    [
        {"name": "read_file", "parameters": {"path": "string"}},
        {"name": "edit_file", "parameters": {"path": "string", "old": "string", "new": "string"}},
    ]
)


def make_workload(name: str, prompts: Sequence[Prompt], most: int | None = None) -> list[Prompt]:
    """Make the requests of a workload, or the first of them.

    Args:
        name: one of ``WORKLOADS``.
        prompts: what they are made of.
        most: how many are wanted; there may be more, or fewer if the prompts do not suffice. None:
            all. Those of a large dataset take gigabytes.

    Raises:
        UsageError: a prompt is no text, and the workload needs one.
    """
    if most is not None:  # no workload makes fewer requests than there are prompts
        prompts = prompts[: -(-most // _CONVERSATIONS) * _CONVERSATIONS]
    return _MAKERS[name](prompts)


def _completion(prompts: Sequence[Prompt]) -> list[Prompt]:
    return list(prompts)


def _noise(prompts: Sequence[Prompt]) -> list[Prompt]:
    return [attrs.evolve(prompt, temperature=NOISE_TEMPERATURE) for prompt in prompts]


def _editing(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Make edits: a text comes again with its most frequent name changed."""
    return [attrs.evolve(prompt, content=_edit(prompt)) for prompt in prompts]


def _edit(prompt: Prompt) -> str:
    text = _text(prompt)
    names = Counter(re.findall(r"\b[a-z_]{4,}\b", text)).most_common(1)
    name = names[0][0] if names else ""
    if prompt.is_chat:
        change = f"with {name} renamed to {name}2 and nothing else changed" if name else "unchanged"
        return f"Write this text again, {change}:\n\n{text}"
    edited = re.sub(rf"\b{name}\b", f"{name}2", text) if name else text
    return f"# before\n{text}\n\n\n# after\n{edited[: len(edited) // 3]}"


def _agent(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Make conversations of agents. Each request has all of its conversation's last one, and one
    more file that was read; the others beside it read the same files in another order."""
    made = []
    for start in range(0, len(prompts), _CONVERSATIONS):
        files = prompts[start : start + _CONVERSATIONS]
        for turn in range(_TURNS):
            for first in range(len(files)):
                read = [files[(first + i) % len(files)] for i in range(turn + 1)]
                made.append(attrs.evolve(read[-1], content=_conversation(read)))
    return made


def _conversation(read: Sequence[Prompt]) -> str:
    """Return the text of a conversation in which these files were read."""
    ending = "Write the next tool call." if read[0].is_chat else '<tool_call>{"name": "'
    return f"Tools: {_TOOLS}\nTask: find the error.\n{''.join(map(_reading, read))}{ending}"


def _reading(prompt: Prompt) -> str:
    call = {"name": "read_file", "arguments": {"path": f"part_{prompt.line}.py"}}
    called = f"<tool_call>{json.dumps(call)}</tool_call>"
    return f"{called}\n<tool_response>\n{_text(prompt)}\n</tool_response>\n"


def _mixed(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Make the others in turn, so that a batch of four or more has requests of each."""
    kinds = [_MAKERS[name](prompts) for name in _MAKERS if name != MIXED]
    return list(chain.from_iterable(zip(*kinds, strict=False)))


def _text(prompt: Prompt) -> str:
    if isinstance(prompt.content, str):
        return prompt.content
    raise UsageError(
        f"dataset line {prompt.line}: its prompt is a list of token ids; expected a text, which "
        f"this workload changes, or --workload {COMPLETION} or {NOISE}"
    )


_MAKERS: Mapping[str, Callable[[Sequence[Prompt]], list[Prompt]]] = {
    COMPLETION: _completion,
    "editing": _editing,
    "agent": _agent,
    NOISE: _noise,
    MIXED: _mixed,
}

WORKLOADS = tuple(_MAKERS)
"""The names of all workloads."""
