"""What was foreseen, beside what came."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from specplug.speculative.choice.foresight import Foresight

NOT = (False,)


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
    drafts: Sequence[bool] = NOT,
    known: int | None = None,
) -> np.ndarray:
    """Foresee a chain of nodes of one chance each, in the place of up to 4; return survivals."""
    scores = np.full((1, 4), -np.inf, dtype=np.float32)
    scores[0, : len(tokens)] = np.log(chance)
    survival, bins = foresight.expect(scores)
    row = np.array([[*tokens, *[0] * (4 - len(tokens))]])
    foresight.wait([text], [known or len(text.token_ids)], row, bins, drafts)
    return np.array(survival[0])


def test_right_tokens_are_told_once_they_are_known() -> None:
    foresight, text = Foresight(), Text([1, 2])
    foresee(foresight, text, [3, 4, 5])
    text.token_ids += [3, 4]
    assert foresight.compare([text]) == ([], [])  # the third may be right
    text.token_ids += [6, 7]
    assert foresight.compare([text]) == (["a"], [2])
    assert foresight.compare([text]) == ([], [])


def test_all_right_and_nothing_foreseen_are_told() -> None:
    foresight, text = Foresight(), Text([1])
    foresee(foresight, text, [2, 3])
    text.token_ids += [2, 3]
    assert foresight.compare([text]) == (["a"], [2])
    foresee(foresight, text, [])
    assert foresight.compare([text]) == (["a"], [0])


def test_text_that_is_known_later_is_waited_for() -> None:
    foresight, text = Foresight(), Text([1])
    foresee(foresight, text, [4], known=3)  # what is foreseen follows a step in flight
    text.token_ids += [9]
    assert foresight.compare([text]) == ([], [])
    text.token_ids += [9, 4]
    assert foresight.compare([text]) == (["a"], [1])


def test_what_drafted_itself_is_learned_from_but_not_told() -> None:
    foresight, text = Foresight(), Text([1])
    first = foresee(foresight, text, [2, 3], drafts=(True,))
    text.token_ids += [8]
    assert foresight.compare([text]) == ([], [])
    assert (foresee(foresight, text, [2, 3])[:2] < first[:2]).all()


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


def test_one_request_is_expected_as_one_of_several() -> None:
    foresight = Foresight()
    scores = np.log(np.random.default_rng(0).uniform(0.2, 1, (40, 7))).astype(np.float32)
    scores[::3, 4:] = -np.inf
    survivals, bins = foresight.expect(scores)
    for row, survival, own in zip(scores, survivals, bins, strict=True):
        alone, single = foresight.expect(row[None])
        assert (list(alone[0]), list(single[0])) == (list(survival), list(own))


def test_many_requests_are_compared_in_turn() -> None:
    foresight = Foresight()
    texts = [Text([1], str(i)) for i in range(40)]
    told: list[str] = []
    for _ in range(6):
        _, bins = foresight.expect(np.full((40, 1), -0.1, dtype=np.float32))
        rows = np.full((40, 1), 2)
        told += foresight.compare(texts)[0]
        lengths = [len(text.token_ids) for text in texts]
        foresight.wait(texts, lengths, rows, bins, [False] * 40)
        for text in texts:
            text.token_ids.append(2)
    assert len(told) == 40
    assert len(set(told)) == 40
    foresight.forget("3")
    assert "3" not in foresight.compare(texts)[0]
