"""Checks of drafts by targets of which they must foresee every token."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
from torch import Tensor

from specplug import DEFAULT_MODEL, Batch, Runtime, TokenDrafter
from specplug.algorithm import find_model
from specplug.engine.engine_runtime import EngineRuntime
from specplug.testing.blindness import shown_draft
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST, Configuration, shown, smallest
from specplug.testing.laboratory import Laboratory, Recorder

PERFECT = 0.97
"""Share of drafts that a perfect drafter must foresee: two tokens may be as likely, and then
another rounding chooses."""

STRESSED: Sequence[Configuration] = (
    SIMPLEST,
    {**SIMPLEST, "batch": 3, "chunk": 5, "page_size": 4, "overlap": True, "cache": True},
    {**SIMPLEST, "batch": 8, "pressure": True, "shape": "wide", "budget": True, "overlap": True},
    {**SIMPLEST, "batch": 3, "transfer": True, "cache": True, "page_size": 4},
)


@check("blind.perfect", "silver", "the target as its own draft model foresees every token")
def perfect(laboratory: Laboratory) -> str:
    """Draft with the target itself, and look for drafts that leave what it generates."""
    with laboratory.engine(SIMPLEST) as llm:
        worker = llm.engine.runtime.worker
    if not isinstance(worker, TokenDrafter):
        raise NotApplicable("its worker is no TokenDrafter, whose draft model the target could be")
    stressed = [c for c in STRESSED if laboratory.transfers or not c["transfer"]]
    least = 1.0
    for configuration in stressed:
        share, _ = _foreseen(laboratory, configuration)
        least = min(least, share)
        if share < PERFECT:
            simplest = smallest(
                configuration, lambda other: _foreseen(laboratory, other)[0] < PERFECT
            )
            share, first = _foreseen(laboratory, simplest)
            raise Failure(
                f"{shown(simplest)}: with the target as its own draft model {100 * share:.0f} % of "
                f"the drafts are what it generates; expected {100 * PERFECT:.0f} %: keys, "
                f"positions or masks of the draft model are not those of the text. {first}"
            )
    told = f"{100 * least:.1f} % in the worst of {len(stressed)} configurations"
    return f"{told}{laboratory.told_without_transfer}"


def _foreseen(laboratory: Laboratory, configuration: Configuration) -> tuple[float, str]:
    """Return which share of drafts the target has followed to their ends, and the first one that it
    has not, in words."""
    recorder = Recorder()
    prompts = laboratory.prompts()[2:6]
    model = laboratory.subject.model or DEFAULT_MODEL
    params = laboratory.params(len(prompts), sampled=True, max_tokens=16)
    with laboratory.engine(
        configuration,
        extensions=[recorder],
        texts=prompts,
        speculative_draft_model_path=find_model(str(model)),
    ) as llm:
        for _ in range(1 + configuration["cache"]):
            outputs = llm.generate(prompts, params)
    texts = {tuple(o.prompt_token_ids): (*o.prompt_token_ids, *o.token_ids) for o in outputs}
    missed = [
        key for key, draft in recorder.drafts.items()
        if not draft.follows(texts[key[0]][key[1] + 1 :])
    ]  # fmt: skip
    share = 1 - len(missed) / max(1, len(recorder.drafts))
    if not missed:
        return share, ""
    prompt, position = min(missed, key=lambda key: key[1] - len(key[0]))
    return share, shown_draft(
        prompt, position, recorder.drafts[prompt, position], texts[prompt][position + 1 :]
    )


HOT = 100.0
"""A temperature at which tokens are as good as drawn by the noise alone."""


@attrs.define
class NoiseAsked:
    """What a run asks of ``Runtime.gumbel_noise``.

    Attributes:
        vocabulary: tokens of the draft's vocabulary; 0: noise was not asked for.
    """

    vocabulary: int = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Take note of the calls in this process."""
        inner: Callable[..., Tensor] = EngineRuntime.gumbel_noise

        def gumbel_noise(runtime: Runtime, batch: Batch, *given: Any, **named: Any) -> Tensor:
            found = inner(runtime, batch, *given, **named)
            self.vocabulary = found.shape[2]
            return found

        EngineRuntime.gumbel_noise = gumbel_noise  # type: ignore[assignment, method-assign]
        try:
            yield
        finally:
            EngineRuntime.gumbel_noise = inner  # type: ignore[method-assign]


@check("blind.noise", "silver", "drafts of sampled requests use the noise of their positions")
def noise(laboratory: Laboratory) -> str:
    """Sample so hot that the noise alone draws tokens: who has it draws the same ones."""
    asked, recorder, prompts = NoiseAsked(), Recorder(), laboratory.prompts()[-4:]
    params = [
        attrs.evolve(each, temperature=HOT)
        for each in laboratory.params(len(prompts), sampled=True, max_tokens=16)
    ]
    configuration = {**SIMPLEST, "batch": 3}
    with asked.watching(), laboratory.engine(configuration, extensions=[recorder]) as llm:
        outputs = llm.generate(prompts, params)
        vocab_size = llm.engine.runtime.vocab_size
    if not asked.vocabulary:
        raise NotApplicable("it does not ask for the noise, and so drafts what is likeliest")
    texts = {tuple(o.prompt_token_ids): (*o.prompt_token_ids, *o.token_ids) for o in outputs}
    right = {1: 0, 2: 0}
    seen = {1: 0, 2: 0}
    for (prompt, position), draft in recorder.drafts.items():
        chain = texts[prompt][position + 1 :]
        for depth in right:
            if (
                len(chain) < depth
                or draft.depth < depth
                or chain[: depth - 1] not in ((), *draft.paths)
            ):
                continue
            seen[depth] += 1
            right[depth] += chain[:depth] in draft.paths
    known = asked.vocabulary / vocab_size
    shares = {depth: right[depth] / seen[depth] for depth in seen if seen[depth] >= 8}
    for depth, share in shares.items():
        if share < 0.6 * known:
            raise Failure(
                f"at temperature {HOT:g}, where the noise alone chooses, {100 * share:.0f} % of "
                f"the tokens drafted {depth} after the root are those that the target draws; "
                f"expected {100 * known:.0f} %, its share of the vocabulary: the noise that is "
                "asked for is not that of the token's position (batch.seq_lens + depth), or is of "
                "other token ids"
            )
    if not shares:
        raise NotApplicable(f"{max(seen.values())} drafts whose texts the target took; it takes 8")
    shown_shares = ", ".join(f"{100 * share:.0f} %" for share in shares.values())
    return f"{shown_shares} drawn alike, of {100 * known:.0f} % that the draft's vocabulary has"
