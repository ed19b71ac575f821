"""The grammars of a step's requests: when they are known, and what is waited for."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch

from specplug import ForcedTokens
from specplug.engine.grammars import Grammars
from specplug.speculative.draft import Draft

CPU, GPU = torch.device("cpu"), torch.device("cuda")
VOCAB = 40


@attrs.define
class Grammar:
    """One that forces two tokens after those taken, and allows even ones."""

    taken: int = 1

    def forced(self) -> tuple[int, ...]:
        return self.taken, self.taken + 1

    def allows(self, tokens: list[int], parents: list[int]) -> list[bool]:
        found = [True]
        for token, parent in zip(tokens[1:], parents[1:], strict=True):
            found.append(found[parent] and token % 2 == 0)
        return found


@attrs.define
class Request:
    request_id: str
    grammar_state: Grammar | None
    prompt_token_ids: tuple[int, ...] = (1, 2, 3)


@attrs.define
class Result:
    """A launched step that has given each request one more token."""

    requests: list[Request]
    waits: int = 0
    grammars_advanced: bool = False

    @property
    def step(self) -> Result:
        return self

    def wait(self) -> None:
        self.waits += 1

    def advance_grammars(self) -> None:
        self.grammars_advanced = True
        for request in self.requests:
            if request.grammar_state is not None:
                request.grammar_state.taken += 1


def begun(device: torch.device, overlap: bool) -> tuple[Grammars, Any, Any]:
    """Grammars at a decode step of three requests, the step before, and what prunes drafts."""
    requests: Any = [Request("a", Grammar()), Request("b", None), Request("c", Grammar())]
    grammars, result = Grammars(VOCAB, device, overlap=overlap), Result(requests)
    grammars.expect(result)  # type: ignore[arg-type]
    return grammars, result, grammars.begin(requests)


@pytest.mark.parametrize(("device", "overlap"), [(CPU, True), (CPU, False), (GPU, False)])
def test_grammars_know_what_has_arrived(device: torch.device, overlap: bool) -> None:
    grammars, _, _ = begun(device, overlap)
    forced = ForcedTokens(known=5, tokens=(2, 3))
    assert grammars.forced_tokens(["c", "b"], wait=False) == [forced, None]


def test_grammars_of_a_gpu_wait_only_when_asked() -> None:
    grammars, result, _ = begun(GPU, overlap=True)
    before = ForcedTokens(known=4, tokens=(1, 2))
    assert grammars.forced_tokens(["a", "x"], wait=False) == [before, None]
    assert result.waits == 0
    assert grammars.forced_tokens(["a"], wait=True) == [ForcedTokens(known=5, tokens=(2, 3))]
    assert grammars.forced_tokens(["a"], wait=True) == [ForcedTokens(known=5, tokens=(2, 3))]
    assert result.waits == 1


def test_steps_without_grammars_wait_for_nothing() -> None:
    grammars, result, _ = begun(CPU, overlap=True)
    grammars.masks([], None, 0)  # of the step before, whose tokens have come
    assert result.waits == 1
    grammars.expect(result)
    assert grammars.forced_tokens(["a"], wait=True) == ()
    assert result.waits == 1


def test_drafts_of_a_device_are_not_pruned() -> None:
    assert begun(GPU, overlap=False)[2] is None


def test_prune_cuts_a_chain_at_what_is_forbidden() -> None:
    _, _, prune = begun(CPU, overlap=True)
    tokens = torch.tensor([[9, 2, 4, 5], [9, 1, 1, 1], [9, 1, 2, 2]])
    assert prune(Draft.chain(tokens)).widths == (3, 4, 1)
    pruned = prune(Draft.chain(tokens, [2, 3, 4]))
    assert pruned.widths == (2, 3, 1)
    assert pruned.flatten(pruned.tokens).tolist() == [9, 2, 9, 1, 1, 9]


@pytest.mark.parametrize("scores", [None, torch.tensor([[0.0, -3.0, -1.0, -0.5, -0.1]] * 3)])
def test_prune_keeps_the_rest_of_a_tree(scores: torch.Tensor | None) -> None:
    _, _, prune = begun(CPU, overlap=True)
    tokens = torch.tensor([[9, 1, 2, 4, 6], [9, 1, 2, 4, 6], [9, 2, 4, 1, 6]])
    parents = torch.tensor([[-1, 0, 0, 1, 2], [-1, 0, 0, 1, 2], [-1, 0, 0, 1, 3]])
    draft = prune(Draft.tree(tokens, parents, 3, scores=scores))
    assert draft.widths == (3, 5, 3)
    assert draft.parents is not None
    assert draft.tokens[0, :3].tolist() == [9, 2, 6]
    assert draft.parents[0, :3].tolist() == [-1, 0, 1]
    assert draft.tokens[1].equal(tokens[1])
    assert draft.parents[1].equal(parents[1])
    assert draft.tokens[2, :3].tolist() == [9, 2, 4]
    if scores is not None:
        assert draft.scores is not None
        assert draft.scores[0, :3].tolist() == scores[0, [0, 2, 4]].tolist()
