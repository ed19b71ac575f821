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
    ahead: int | None = None,
) -> np.ndarray:
    """Foresee a chain of nodes of one chance each, in the place of up to 8; return survivals."""
    scores = np.full((1, 8), -np.inf, dtype=np.float32)
    scores[0, : len(tokens)] = np.log(chance)
    skipped = None if ahead is None else np.array([ahead])
    survival, bins = foresight.expect(scores, skipped)
    row = np.array([[*tokens, *[0] * (8 - len(tokens))]])
    known = len(text.token_ids) if known is None else known
    foresight.wait([text], [known], row, bins, skipped)
    return np.array(survival[0])


def survivals(foresight: Foresight, tokens: int, ahead: int | None = None) -> list[float]:
    """Return what is expected of so many nodes, without keeping anything."""
    scores = np.full((1, 8), -np.inf, dtype=np.float32)
    scores[0, :tokens] = np.log(0.9)
    skipped = None if ahead is None else np.array([ahead])
    return list(foresight.expect(scores, skipped)[0][0])


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
    assert survivals(foresight, 1) == [first[0], *[0] * 7]
    text.token_ids += [9, 4]
    foresight.compare([text])
    assert survivals(foresight, 1)[0] > first[0]


def test_next_draft_begins_after_what_the_running_step_commits() -> None:
    """Of six tokens that are foreseen it commits two, which are others, as where text that is
    copied differs: the last four are right in half of the steps."""
    foresight, text = Foresight(), Text([1])
    random = np.random.default_rng(0)
    for _ in range(400):
        foresee(foresight, text, [2] * 6, ahead=2)
        text.token_ids += [3, 3, *[2 if random.random() < 0.5 else 3] * 4]
        foresight.compare([text])
    found = survivals(foresight, 6, ahead=2)
    assert np.allclose(found[:4], 0.5, atol=0.1)
    assert found[4:] == [0] * 4  # a chain that ends
    assert survivals(foresight, 6, ahead=9) == [0] * 8
    assert np.count_nonzero(survivals(foresight, 6)) == 6


def test_chains_that_go_on_are_learned_from_as_often_as_others() -> None:
    """In half of all steps it is, and all is right that is foreseen; that is known late."""
    foresight, text = Foresight(), Text([1])
    random = np.random.default_rng(0)
    scores = np.full((1, 40), np.log(0.99), dtype=np.float32)
    for _ in range(300):
        token = random.integers(2, 4).item()
        for _ in range(8):
            foresight.compare([text])
            survival, bins = foresight.expect(scores)
            foresight.wait([text], [len(text.token_ids)], np.full((1, 40), 2), bins)
            text.token_ids += [token] * 5
    assert 0.4 < survival[0][0] < 0.65


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


@pytest.mark.parametrize("ahead", [None, 0, 3, 7])
def test_one_request_is_expected_as_one_of_several(ahead: int | None) -> None:
    foresight = Foresight()
    scores = np.log(np.random.default_rng(0).uniform(0.2, 1, (40, 7))).astype(np.float32)
    scores[::3, 4:] = -np.inf

    def skipped(size: int) -> np.ndarray | None:
        return None if ahead is None else np.full(size, ahead)

    found, bins = foresight.expect(scores, skipped(40))
    for row, survival, own in zip(scores, found, bins, strict=True):
        alone, single = foresight.expect(row[None], skipped(1))
        assert (list(alone[0]), list(single[0])) == (list(survival), list(own))


def test_many_requests_are_compared_in_turn() -> None:
    """40 requests, of whose single tokens those of the first 20 are right: each counts once in
    three steps, and all alike."""
    foresight = Foresight()
    texts = [Text([1], str(i)) for i in range(40)]
    for _ in range(60):
        _, bins = foresight.expect(np.full((40, 1), -0.1, dtype=np.float32))
        foresight.compare(texts)
        lengths = [len(text.token_ids) for text in texts]
        foresight.wait(texts, lengths, np.full((40, 1), 2), bins)
        for number, text in enumerate(texts):
            text.token_ids.append(2 if number < 20 else 3)
    (((survival,),), _) = foresight.expect(np.full((1, 1), -0.1, np.float32))
    assert 0.4 < survival < 0.6
    for text in texts:
        foresight.forget(text.request_id)
