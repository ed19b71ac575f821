"""Finds the step and the hook after which the states of two runs of the same texts part."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specplug import hookimpl
from specplug.testing.configuration import Configuration, simplest_alike
from specplug.testing.laboratory import Drafted, Key, Laboratory, drafted

if TYPE_CHECKING:
    from specplug import Batch, CommittedOutput, Draft, DraftInput

CLOSE = 1e-2
"""How far floats may differ, relative to the greatest: passes of other shapes round otherwise."""

MOST_AGREEING = 0.2
"""Share of the roots with equal drafts at which an integer tensor may differ, and still tell why
others part: some states hold the same in another way, such as tokens that are yet to be read."""

FED, RECEIVED = "build_draft_input", "build_disagg_draft_input"
DRAFTING = "propose", "grow_draft"

NEXT: Mapping[str, str] = {
    FED: "look at what it reads of its batch: tokens, features, positions, and the keys before "
    "them",
    RECEIVED: "look at what is exported, and at what a row is begun with",
    "propose": "what it got from the step before is the same, so look at what it reads besides: "
    "keys, text or counts that the worker keeps, rows, slots, lengths",
    "grow_draft": "what was proposed is the same, so look at what it adds",
}
"""Where to look, by the hook after which states part first."""


Left = Mapping[str, Tensor] | Drafted
"""What a hook leaves for a request: named tensors on the CPU, or a draft."""


class StateRecorder:
    """An extension that takes down what each hook leaves for each request.

    Attributes:
        left: by root and hook.
    """

    def __init__(self) -> None:
        self.left: dict[Key, dict[str, Left]] = {}

    @hookimpl(wrapper=True)
    def build_draft_input(
        self, batch: Batch, target_output: CommittedOutput
    ) -> Generator[None, DraftInput, DraftInput]:
        """Take down the state for the next root."""
        ends = (batch.seq_lens + target_output.accept_lens).tolist()
        made = yield
        self._state(FED, batch, ends, made)
        return made

    @hookimpl(wrapper=True)
    def build_disagg_draft_input(
        self, batch: Batch
    ) -> Generator[None, DraftInput | None, DraftInput | None]:
        """Take down the state for the first root."""
        ends = batch.seq_lens.tolist()
        made = yield
        if made is not None:
            self._state(RECEIVED, batch, ends, made)
        return made

    @hookimpl(wrapper=True)
    def propose(self, batch: Batch) -> Generator[None, Draft | None, Draft | None]:
        """Take down the draft."""
        ends = batch.seq_lens.tolist()
        draft = yield
        self._draft("propose", batch, ends, draft)
        return draft

    @hookimpl(wrapper=True)
    def grow_draft(self, batch: Batch) -> Generator[None, Draft | None, Draft | None]:
        """Take down what it has become."""
        ends = batch.seq_lens.tolist()
        draft = yield
        self._draft("grow_draft", batch, ends, draft)
        return draft

    def _state(self, hook: str, batch: Batch, ends: Sequence[int], made: DraftInput) -> None:
        for row, key in enumerate(_roots(batch, ends)):
            if batch.is_prefill and not batch.last_chunk[row]:
                continue
            state = {
                name: tensor[row].detach().cpu().clone()
                for name, tensor in made.state.items()
                if tensor is not None
            }
            # A retracted request is fed anew: what it had before counts no longer.
            self.left[key] = {hook: state}

    def _draft(self, hook: str, batch: Batch, ends: Sequence[int], draft: Draft | None) -> None:
        if draft is None:
            return
        for row, key in enumerate(_roots(batch, ends)):
            self.left.setdefault(key, {})[hook] = drafted(draft, row)


def _roots(batch: Batch, ends: Sequence[int]) -> list[Key]:
    """Return the root of each request; none of a warm-up."""
    if batch.is_warm_up:
        return []
    return [
        (tuple(request.prompt_token_ids), end)
        for request, end in zip(batch.requests, ends, strict=True)
    ]


@attrs.frozen
class Parting:
    """Where the states of two runs part first.

    Attributes:
        root: the prompt, and the position of the root that the step drafts at.
        hook: that left something else.
        name: of the tensor that differs; "" of a draft.
    """

    root: Key
    hook: str
    name: str

    @property
    def told(self) -> str:
        """The parting in words, and where to look."""
        prompt, position = self.root
        after = position - len(prompt)
        tokens = "1 token" if after == 1 else f"{after} tokens"
        when = f"{tokens} after the prompt" if after else "before the first draft"
        what = f"the state {self.name!r}" if self.name else "what is drafted"
        return (
            f"\nStates part after {self.hook}, {when} (root at position {position}): {what} is the "
            f"first to differ; {NEXT[self.hook]}."
        )


def part(
    expected: Mapping[Key, Mapping[str, Left]],
    found: Mapping[Key, Mapping[str, Left]],
    *,
    cut: bool = True,
) -> Parting | None:
    """Return where what was left at the same roots differs first; None: nowhere.

    Args:
        cut: whether a draft that has a part of the other's paths is the same.
    """
    steps = sorted(expected.keys() & found.keys(), key=lambda root: root[::-1])
    differing = {root: list(_differences(expected[root], found[root], cut)) for root in steps}
    agreeing = [r for r in steps if not any(hook in DRAFTING for hook, _ in differing[r])]
    usual = {
        name
        for name in {name for each in differing.values() for _, name in each if name}
        if sum(any(name == n for _, n in differing[r]) for r in agreeing)
        > MOST_AGREEING * len(agreeing)
    }
    for root in steps:
        for hook, name in differing[root]:
            if name not in usual or _is_float(found[root][hook], name):
                return Parting(root, hook, name)
    return None


def _differences(
    expected: Mapping[str, Left], found: Mapping[str, Left], cut: bool
) -> Iterator[tuple[str, str]]:
    """Yield the hooks that left something else, in their order, and the tensor."""
    state = next((expected[hook] for hook in (FED, RECEIVED) if hook in expected), {})
    for hook, made in found.items():
        other = expected.get(hook) if hook in DRAFTING else state
        if isinstance(made, Drafted):
            if isinstance(other, Drafted) and not (
                made.agrees(other) if cut else made.paths == other.paths
            ):
                yield hook, ""
        elif isinstance(other, Mapping):
            for name in made.keys() & other.keys():
                if not _are_close(other[name], made[name]):
                    yield hook, name


def _are_close(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or torch.equal(a, b):
        return a.shape == b.shape
    if not a.is_floating_point():
        return False
    a, b = a.double().nan_to_num(), b.double().nan_to_num()
    return bool((a - b).abs().max() <= CLOSE * a.abs().max())


def _is_float(left: Left, name: str) -> bool:
    return isinstance(left, Mapping) and left[name].is_floating_point()


def left_in(
    laboratory: Laboratory,
    configuration: Configuration,
    prompts: Sequence[Any],
    *,
    sampled: bool = False,
    max_tokens: int | None = None,
) -> dict[Key, dict[str, Left]]:
    """Run once more, as ``Laboratory.observe`` does, and return what each hook leaves."""
    recorder = StateRecorder()
    tokens = laboratory.max_tokens if max_tokens is None else max_tokens
    params = laboratory.params(
        len(prompts),
        sampled=sampled,
        max_tokens=tokens,
        structured=configuration["structured"],
    )
    with laboratory.engine(configuration, extensions=[recorder], texts=prompts) as llm:
        for _ in range(1 + configuration["cache"]):
            llm.generate(prompts, params)
    return recorder.left


def told_from_simplest(laboratory: Laboratory, configuration: Configuration) -> str:
    """Run twice more, and return as ``told_parting`` where the states of a configuration part from
    those of the simplest one that has the same requests, every other one sampled."""
    runs = (
        left_in(laboratory, each, laboratory.prompts(), sampled=True)
        for each in (simplest_alike(configuration), configuration)
    )
    return told_parting(*runs)


def told_parting(
    expected: Mapping[Key, Mapping[str, Left]], found: Mapping[Key, Mapping[str, Left]]
) -> str:
    """Return the step and the hook after which states part, as a line of its own; "" if none do."""
    parting = part(expected, found) or part(expected, found, cut=False)
    return "" if parting is None else parting.told
