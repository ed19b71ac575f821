"""A ``TokenDrafter`` knows all that is committed, whatever happened since it drafted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import attrs
import pytest
import torch
from drafted_tokens import VOCAB, save_llama
from torch import Tensor

from specplug import (
    LLM,
    AlgorithmInfo,
    AttentionPlan,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    PagedModel,
    Runtime,
    SamplingParams,
    SpecConfig,
    TokenDrafter,
    UsageError,
    hookimpl,
    verify_tree,
)
from specplug.speculative.calibration import Calibration
from specplug.speculative.draft_cuts import cut_to_budget

PROMPT = [5, 17, 33, 60, 2, 9, 41, 7]
COUNT = 40


class Model(TokenDrafter):
    """A language model of the target's own vocabulary."""

    def __init__(self, runtime: Any) -> None:
        assert runtime.config.draft_model_path is not None
        self.model = PagedModel(runtime, runtime.config.draft_model_path)
        super().__init__(runtime, token_ids=torch.arange(VOCAB))

    def logits(self, tokens: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        return self.model.logits(tokens, plan, rows)


class Picky(Model):
    """Ends a chain before a token that it gives too low a score."""

    least = 0.0

    def keep(self, scores: Tensor, step: int) -> Tensor:
        assert scores.shape[1] == step
        return scores[:, -1] > self.least


class Algorithm:
    """Drafts by a ``TokenDrafter``.

    Attributes:
        drafts: (position of the root, tokens, scores) of each draft.
    """

    def __init__(self, worker: Callable[[Any], TokenDrafter] = Model) -> None:
        self.worker = worker
        self.drafts: list[tuple[int, list[int], list[float]]] = []

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="READER",
            summary="Drafts by a model",
            api_version=1,
            capabilities=Capabilities(branching=True, draft_model=True),
            defaults=Defaults(num_steps=4),
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.fit_token_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> TokenDrafter:
        return self.worker(runtime)

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        made: DraftInput = runtime.worker.extend(batch, target_output)
        return made

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft: Draft = runtime.worker.propose(batch, draft_input)
        self.keep(batch, draft)
        return draft

    def keep(self, batch: Batch, draft: Draft) -> None:
        """Keep the first request's draft."""
        if draft.width > 1:
            assert draft.scores is not None
            root, tokens = int(batch.seq_lens[0]), draft.tokens[0].tolist()
            self.drafts.append((root, tokens, draft.scores[0].tolist()))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("draft"), layers=2)


@pytest.fixture(scope="module")
def expected(target: Path) -> list[int]:
    """The prompt and NONE's tokens after it."""
    with LLM(target, dtype="float64") as llm:
        output = llm.generate([PROMPT], SamplingParams(max_tokens=COUNT))[0]
    return [*PROMPT, *output.token_ids]


def run(target: Path, draft: Path, algorithm: Algorithm, **settings: Any) -> tuple[list[int], Any]:
    """All tokens of a request, and the statistics."""
    with LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
        disable_overlap_schedule=True,
        **settings,
    ) as llm:
        output = llm.generate([PROMPT], SamplingParams(max_tokens=COUNT))[0]
        return [*PROMPT, *output.token_ids], llm.stats()


def chains_of(draft: Path, tokens: list[int], drafts: list[Any]) -> list[list[int]]:
    """What the model itself says after each root, as deep as was drafted."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float64).eval()
    found = []
    with torch.inference_mode():
        for root, drafted, _ in drafts:
            known = tokens[: root + 1]
            for _ in drafted[1:]:
                logits = model(torch.tensor([known]), use_cache=False).logits[0, -1]
                known = [*known, int(logits.argmax())]
            found.append(known[root:])
    return found


def test_after_a_pause_it_knows_what_was_decoded(
    target: Path, draft: Path, expected: list[int]
) -> None:
    """A host that stops drafting says so when it feeds what was accepted."""

    class Pausing(Algorithm):
        steps = 0

        @hookimpl
        def build_draft_input(
            self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
        ) -> DraftInput:
            self.steps += 1
            batch.drafts_follow = batch.is_prefill or not self.pauses()
            return super().build_draft_input(runtime, batch, target_output)

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            if self.steps > 1 and self.pauses():
                return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))
            return super().propose(runtime, batch, draft_input)

        def pauses(self) -> bool:
            return self.steps % 5 in (2, 3, 4)

    algorithm = Pausing()
    tokens, _ = run(target, draft, algorithm)
    assert tokens == expected
    assert len(algorithm.drafts) >= 4
    assert [each for _, each, _ in algorithm.drafts] == chains_of(draft, tokens, algorithm.drafts)


def test_after_steps_without_room_it_knows_what_was_decoded(
    target: Path, draft: Path, expected: list[int]
) -> None:
    """Where the KV pool has room for the root alone, ``propose`` only reads."""

    class Short(Algorithm):
        steps = 0

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            self.steps += 1
            if self.steps % 3:
                batch.max_draft_nodes = (1,)
            return super().propose(runtime, batch, draft_input)

    algorithm = Short()
    tokens, _ = run(target, draft, algorithm)
    assert tokens == expected
    assert len(algorithm.drafts) >= 4
    assert [each for _, each, _ in algorithm.drafts] == chains_of(draft, tokens, algorithm.drafts)


def test_path_deeper_than_its_own_drafts_is_read(
    target: Path, draft: Path, expected: list[int]
) -> None:
    """The draft of every other step is another algorithm's, which is right five tokens long."""

    class Shallow:
        """A runtime whose drafts are two tokens deep."""

        def __init__(self, runtime: Runtime) -> None:
            self._runtime = runtime
            self.config = attrs.evolve(runtime.config, num_steps=2, num_draft_tokens=3)

        def __getattr__(self, name: str) -> Any:
            return getattr(self._runtime, name)

    class Grown(Algorithm):
        steps = 0

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            draft = super().propose(runtime, batch, draft_input)
            self.steps += 1
            root = int(batch.seq_lens[0])
            if self.steps % 2 or root + 5 >= len(expected):
                return draft
            return Draft.chain(torch.tensor([expected[root : root + 5]]))

    algorithm = Grown(lambda runtime: Model(Shallow(runtime)))
    tokens, stats = run(target, draft, algorithm)
    assert tokens == expected
    assert stats["mean_accept_length"] > 2
    assert {len(each) for _, each, _ in algorithm.drafts} == {3}
    assert [each for _, each, _ in algorithm.drafts] == chains_of(draft, tokens, algorithm.drafts)


def test_prompt_of_one_token_is_read(target: Path, draft: Path) -> None:
    algorithm = Algorithm()
    with LLM(
        target, dtype="float64", speculative_algorithm=algorithm,
        speculative_draft_model_path=draft, disable_overlap_schedule=True,
    ) as llm:  # fmt: skip
        output = llm.generate([[42]], SamplingParams(max_tokens=12))[0]
    tokens = [42, *output.token_ids]
    assert [each for _, each, _ in algorithm.drafts] == chains_of(draft, tokens, algorithm.drafts)


def test_ended_chain_has_the_least_scores(
    target: Path, draft: Path, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, picky = Algorithm(), Algorithm(Picky)
    assert run(target, draft, plain)[0] == expected
    middle = median(score for _, _, scores in plain.drafts for score in scores[1:])
    monkeypatch.setattr(Picky, "least", middle)
    assert run(target, draft, picky)[0] == expected
    assert [each[:2] for each in picky.drafts] == [each[:2] for each in plain.drafts]
    ends = set()
    for (_, _, scores), (_, _, own) in zip(picky.drafts, plain.drafts, strict=True):
        low = (place for place in range(1, len(own)) if own[place] <= Picky.least)
        end = next(low, len(own))
        assert scores == own[:end] + [-float("inf")] * (len(own) - end)
        ends.add(end)
    assert len(ends) > 2, ends


def test_cut_drops_ended_chains_first() -> None:
    """Though the target has taken what such a drafter gave the least of probabilities."""
    low = torch.tensor([[0.0, -20.0, -20.0, -20.0]])
    chain = torch.tensor([[1, 2, 3, 4]])
    calibration = Calibration(4, torch.device("cpu"))
    draft = Draft.chain(chain, scores=low)
    taken = verify_tree(draft, torch.tensor([2, 3, 4, 5]))
    for _ in range(32):
        calibration.count_step()
        calibration.observe(draft, torch.tensor([1]), taken)
    ended = [0.0, -0.1, -torch.inf, -torch.inf]
    scores = torch.tensor([ended, [0.0, -19.0, -19.0, -19.0]])
    both = Draft.chain(chain.repeat(2, 1), scores=scores)
    survival = calibration.survival(both, torch.tensor([1, 2]))
    assert survival is not None
    assert survival[1].min() > -1  # it has learnt that
    assert cut_to_budget(both, 6, survival).counts.tolist() == [2, 4]
    assert cut_to_budget(both, 7, survival).counts.tolist() == [3, 4]


def test_settings_are_fitted_to_it() -> None:
    """Slots for the pass that reads what was accepted, and no page with missing keys is shared."""
    chain = SpecConfig(algorithm="A", num_steps=4, num_draft_tokens=5).fit_token_draft()
    assert (chain.num_draft_slots, chain.draft_lookahead, chain.num_draft_tokens) == (6, 5, 5)
    tree = SpecConfig(algorithm="A", num_steps=4, topk=4, num_draft_tokens=16).fit_token_draft()
    assert (tree.num_draft_slots, tree.draft_lookahead) == (13, 5)
    short = SpecConfig(algorithm="A", num_steps=8, num_draft_tokens=3).fit_token_draft()
    assert (short.num_steps, short.num_draft_slots, short.draft_lookahead) == (2, 4, 3)
    with pytest.raises(UsageError, match="num_draft_tokens=1"):
        SpecConfig(algorithm="A", topk=2, num_draft_tokens=1).fit_token_draft()
