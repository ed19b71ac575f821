"""What the drafts themselves show of a mistake, and its likely cause: told with a failure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from specplug import Checkpoint
from specplug.testing.laboratory import Drafted, Key, Laboratory, Observation, Recorder

SYMPTOMS: Mapping[str, str] = {
    "ids one too great": "each drafted id is one too great: the draft vocabulary's ids are shifted "
    "on their way to the target's; look at d2t (target id = draft id + d2t)",
    "ids one too small": "each drafted id is one too small: the draft vocabulary's ids are shifted "
    "on their way to the target's; look at d2t (target id = draft id + d2t)",
    "ids of the draft": "what is drafted are ids of the draft's own vocabulary: they are not "
    "mapped to the target's; look at d2t (target id = draft id + d2t)",
    "weights unread": "the checkpoint has weights that change no draft, so nothing reads them, "
    "such as a norm that is left out",
}
"""By what is seen, the likely cause."""

TELLING = 0.15
"""By how much more often first tokens must be right if ids are read so, for it to be told."""


def likely_cause(laboratory: Laboratory, found: Observation, prompts: Sequence[Any]) -> str:
    """Return the likely cause of drafts that are rarely right, as a sentence; "" if none is seen.

    Args:
        found: the run of these prompts.
    """
    ids = _vocabulary(laboratory)
    sign = "" if ids is None else _wrong_ids(found, ids)
    if sign:
        return f". Likely: {SYMPTOMS[sign]}"
    unread = unread_weights(laboratory, prompts[:2])
    if unread:
        named = ", ".join(unread[:4]) + (f" and {len(unread) - 4} more" if unread[4:] else "")
        return f". Likely: {SYMPTOMS['weights unread']}: {named}"
    return ""


def _vocabulary(laboratory: Laboratory) -> list[int] | None:
    """Return the target's ids of the draft's vocabulary, as the worker has them; None: it has none
    of its own."""
    with laboratory.engine() as llm:
        ids = getattr(llm.engine.runtime.worker, "token_ids", None)
        return ids.tolist() if isinstance(ids, Tensor) and ids.dim() == 1 else None


def _wrong_ids(found: Observation, ids: Sequence[int]) -> str:
    """Return the symptom that explains the first tokens better than they are; "" if none does."""
    pairs = list(_first_tokens(found))
    readings: Mapping[str, Callable[[int], int]] = {
        "ids one too great": lambda token: token - 1,
        "ids one too small": lambda token: token + 1,
        "ids of the draft": lambda token: ids[token] if token < len(ids) else -1,
    }
    if not pairs:
        return ""
    right = sum(token == wanted for token, wanted in pairs)
    shares = {
        sign: (sum(read(token) == wanted for token, wanted in pairs) - right) / len(pairs)
        for sign, read in readings.items()
    }
    best = max(shares, key=shares.__getitem__)
    return best if shares[best] > TELLING else ""


def _first_tokens(found: Observation) -> Iterator[tuple[int, int]]:
    """Yield what was drafted first after each root, and what the target has there."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in found.drafts))
    if len(prompts) != len(found.tokens):
        return
    outputs = dict(zip(prompts, found.tokens, strict=True))
    for (prompt, position), draft in found.drafts.items():
        place = position - len(prompt) + 1
        if draft and place < len(outputs[prompt]):
            yield draft.tokens[1], outputs[prompt][place]


def unread_weights(laboratory: Laboratory, prompts: Sequence[Any]) -> list[str]:
    """Return the tensors of the draft checkpoint that change no draft, whatever they are. Where
    nothing is drafted nothing is known of them."""
    names: list[str] = []
    expected = _drafts(laboratory, prompts, None, names)
    if not any(expected.values()):
        return []
    return [name for name in names if _drafts(laboratory, prompts, name, []) == expected]


def _drafts(
    laboratory: Laboratory, prompts: Sequence[Any], spoiled: str | None, names: list[str]
) -> Mapping[Key, Drafted]:
    """Return the drafts of a short run where one tensor is another; add all to the names."""
    recorder = Recorder()
    with _spoiling(spoiled, names), laboratory.engine(extensions=[recorder]) as llm:
        llm.generate(prompts, laboratory.params(len(prompts), sampled=False, max_tokens=8))
    return recorder.drafts


@contextmanager
def _spoiling(spoiled: str | None, names: list[str]) -> Iterator[None]:
    """Have checkpoints load one of their tensors with other values: before it is packed or cast."""
    inner = Checkpoint.load_into

    def load_into(self: Checkpoint, module: Any, **named: Any) -> None:
        inner(self, module, **named)
        weights = {name: each for name, each in module.named_parameters() if each.dim()}
        names.extend(name for name in weights if name not in names)
        if spoiled in weights:
            dice = torch.Generator().manual_seed(0)
            weight = weights[spoiled]
            with torch.no_grad():
                weight.copy_(torch.randn(weight.shape, generator=dice))

    Checkpoint.load_into = load_into  # type: ignore[method-assign]
    try:
        yield
    finally:
        Checkpoint.load_into = inner  # type: ignore[method-assign]
