"""What was foreseen, beside what came."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import pytest

from specplug.speculative.choice.foresight import Foresight


@attrs.define
class Text:
    """A request whose text grows."""

    token_ids: list[int]
    request_id: str = "a"


def foresee(
    foresight: Foresight,
    text: Text,
    tokens: Sequence[int],
    chance: float = 0.9,
    known: int | None = None,
    *,
    is_current: bool = True,
) -> np.ndarray:
    """Foresee a chain of nodes of one chance each, in the place of up to 4; return survivals."""
    scores = np.full((1, 4), -np.inf, dtype=np.float32)
    scores[0, : len(tokens)] = np.log(chance)
    survival, bins = foresight.expect(scores, is_current=is_current)
    row = np.array([[*tokens, *[0] * (4 - len(tokens))]])
    known = len(text.token_ids) if known is None else known
    foresight.wait([text], [known], row, bins, is_current=is_current)
    return np.array(survival[0])


def survivals(foresight: Foresight, tokens: int, *, is_current: bool = True) -> list[float]:
    """Return what is expected of so many nodes, without keeping anything."""
    scores = np.full((1, 4), -np.inf, dtype=np.float32)
    scores[0, :tokens] = np.log(0.9)
    return list(foresight.expect(scores, is_current=is_current)[0][0])


def test_right_tokens_are_learned_once_they_are_known() -> None:
    foresight, text = Foresight(), Text([1, 2])
    first = foresee(foresight, text, [3, 4, 5])
    text.token_ids += [3, 4]
    foresight.compare([text])  # the third may be right
    assert survivals(foresight, 3) == list(first)
    text.token_ids += [6, 7]
    foresight.compare([text])
    learned = survivals(foresight, 3)
    assert learned[0] > first[0]
    assert learned[2] < first[2]
    foresight.compare([text])
    assert survivals(foresight, 3) == learned  # once


def test_text_that_is_known_later_is_waited_for() -> None:
    foresight, text = Foresight(), Text([1])
    first = foresee(foresight, text, [4], known=3)  # what is foreseen follows a step in flight
    text.token_ids += [9]
    foresight.compare([text])
    assert survivals(foresight, 1) == [first[0], 0, 0, 0]
    text.token_ids += [9, 4]
    foresight.compare([text])
    assert survivals(foresight, 1)[0] > first[0]


@pytest.mark.parametrize("rate", [0.2, 0.7])
def test_early_foresight_tells_of_the_next_draft(rate: float) -> None:
    """What is foreseen a step too early is right, and the draft that is made then is right as often
    as ``rate``; where nothing is foreseen early, nothing is expected."""
    foresight, text = Foresight(), Text([1])
    random = np.random.default_rng(0)
    for _ in range(600):
        foresee(foresight, text, [2, 2, 2, 2], is_current=False)
        text.token_ids += np.where(random.random(4) < rate, 2, 3).tolist()
        foresight.compare([text])
    found = survivals(foresight, 4, is_current=False)
    assert np.allclose(found, rate ** np.arange(1, 5), atol=0.12)
    assert survivals(foresight, 0, is_current=False) == [0, 0, 0, 0]


def test_draft_that_breaks_off_after_an_early_one_counts() -> None:
    """Early chains look long, and the drafts that come of them are empty every other step."""
    foresight, text = Foresight(), Text([1])
    for step in range(400):
        foresee(foresight, text, [2, 2, 2, 2] if step % 2 else [], is_current=False)
        text.token_ids += [2, 2, 2, 2] if step % 2 else [3]
        foresight.compare([text])
    assert survivals(foresight, 4, is_current=False)[0] < 0.1


def test_survival_is_what_came_of_such_scores() -> None:
    foresight, text = Foresight(), Text([1])
    random = np.random.default_rng(0)
    for _ in range(400):
        foresee(foresight, text, [2, 2, 2, 2], chance=0.9)
        text.token_ids += np.where(random.random(4) < 0.5, 2, 3).tolist()
        foresight.compare([text])
    found = foresee(foresight, text, [2, 2, 2], chance=0.9)
    assert np.allclose(found[:3], [0.5, 0.25, 0.125], atol=0.12)
    assert (np.diff(found) <= 0).all()
    assert found[3] == 0


@pytest.mark.parametrize("is_current", [True, False])
def test_one_request_is_expected_as_one_of_several(is_current: bool) -> None:
    foresight = Foresight()
    scores = np.log(np.random.default_rng(0).uniform(0.2, 1, (40, 7))).astype(np.float32)
    scores[::3, 4:] = -np.inf
    found, bins = foresight.expect(scores, is_current=is_current)
    for row, survival, own in zip(scores, found, bins, strict=True):
        alone, single = foresight.expect(row[None], is_current=is_current)
        assert (list(alone[0]), list(single[0])) == (list(survival), list(own))


def test_many_requests_are_compared_in_turn() -> None:
    """40 requests, of whose single tokens those of the first 20 are right: each counts once in
    three steps, and all alike."""
    foresight = Foresight()
    texts = [Text([1], str(i)) for i in range(40)]
    for _ in range(60):
        _, bins = foresight.expect(np.full((40, 1), -0.1, dtype=np.float32), is_current=True)
        foresight.compare(texts)
        lengths = [len(text.token_ids) for text in texts]
        foresight.wait(texts, lengths, np.full((40, 1), 2), bins, is_current=True)
        for number, text in enumerate(texts):
            text.token_ids.append(2 if number < 20 else 3)
    (((survival,),), _) = foresight.expect(np.full((1, 1), -0.1, np.float32), is_current=True)
    assert 0.4 < survival < 0.6
    for text in texts:
        foresight.forget(text.request_id)
