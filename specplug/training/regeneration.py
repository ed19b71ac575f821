"""Texts that the target writes: what a draft is to say is what the target would."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from specplug.config import EngineConfig
from specplug.llm import LLM
from specplug.sampling_params import SamplingParams
from specplug.training.corpus import Text

SHORTEST_PROMPT = 16
"""Tokens of a text that the target gets, at least, where it may go on anywhere."""

Progress = Callable[[int, int], None]
"""``(done, total)``."""


def choose_prompts(texts: Sequence[Text], count: int, length: int, seed: int) -> list[Text]:
    """Return beginnings for the target to go on from, at most ``length`` tokens and at least a
    quarter of ``length`` shorter than that. Long texts are chosen more often, as they have more
    places; a prompt's own response is none of it."""
    chance = random.Random(seed)
    weights = [len(text.token_ids) if text.cuts is None else 64 for text in texts]
    if not any(weights):
        return []
    chosen = chance.choices(texts, weights, k=count)
    return [prompt for text in chosen if (prompt := _prompt(text, length, chance)) is not None]


def _prompt(text: Text, length: int, chance: random.Random) -> Text | None:
    most = length - length // 4
    if text.cuts is None:
        size = min(chance.randint(SHORTEST_PROMPT, max(SHORTEST_PROMPT, length // 2)), most)
        end = chance.randint(min(size, len(text.token_ids)), len(text.token_ids))
        begin = max(0, end - size)
    elif text.cuts:
        end = chance.choice(text.cuts)
        begin = 0
        if end > most:
            return None  # a chat does not begin in its middle
    else:
        return None
    if end == begin:
        return None
    return Text(token_ids=text.token_ids[begin:end], learnt=text.learnt[begin:end])


def regenerate(
    config: EngineConfig, prompts: Sequence[Text], length: int, seed: int, progress: Progress
) -> list[Text]:
    """Have the target go on from prompts, up to ``length`` tokens: every other one greedily, the
    others sampled at temperature 1. All it writes is learnt.

    Args:
        config: of the run that writes.
        progress: is told how many texts are written.
    """
    written = []
    with LLM(config) as llm:
        params = [
            SamplingParams(
                temperature=float(index % 2),
                seed=seed + index,
                max_tokens=length - len(prompt.token_ids),
                ignore_eos=False,
            )
            for index, prompt in enumerate(prompts)
        ]
        done = 0

        def on_finished(output: object) -> None:
            nonlocal done
            done += 1
            progress(done, len(prompts))

        outputs = llm.generate(
            [list(prompt.token_ids) for prompt in prompts], params, on_finished=on_finished
        )
        for prompt, output in zip(prompts, outputs, strict=True):
            made = list(output.token_ids)
            written.append(
                Text(
                    token_ids=[*prompt.token_ids, *made],
                    learnt=[*prompt.learnt, *([True] * len(made))],
                )
            )
    return written
