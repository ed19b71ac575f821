"""Algorithms made of others: one proposes, others grow its drafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    FutureMap,
    PluginError,
    Registry,
    Runtime,
    SamplingParams,
    SpecConfig,
    UsageError,
    append_nodes,
    hookimpl,
)
from specplug.host import HostCapabilities

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [TEXT, TEXT + "area(width, height):\n", "import os\nimport "]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, presence_penalty=0.4, ignore_eos=True),
]
SMALL = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
}


def generate(algorithm: Any, **settings: Any) -> tuple[list[Any], dict[str, Any]]:
    with LLM(speculative_algorithm=algorithm, **{**SMALL, **settings}) as llm:
        outputs = llm.generate(PROMPTS, PARAMS)
        return [output.token_ids for output in outputs], llm.stats()


@pytest.fixture(scope="module")
def plain() -> list[Any]:
    return generate("NONE")[0]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("EAGLE3+NGRAM", {}),
        ("EAGLE3+NGRAM", {"disable_overlap_schedule": True, "page_size": 1}),
        ("EAGLE3+NGRAM", {**TREE, "page_size": 4, "chunked_prefill_size": 8}),
        ("EAGLE+NGRAM", {**TREE, "max_total_tokens": 160, "page_size": 4}),
        ("DFLASH+NGRAM", {}),
        ("MULTI_LAYER_EAGLE+NGRAM", {"page_size": 4}),
        ("NONE+NGRAM", {}),
    ],
)
def test_tokens_are_those_of_plain_decoding(
    algorithm: str, settings: dict[str, Any], plain: list[Any]
) -> None:
    found, _ = generate(algorithm, **settings)
    assert found == plain


def test_grown_drafts_are_accepted_further() -> None:
    def accepted(algorithm: str) -> float:
        with LLM(speculative_algorithm=algorithm, **SMALL) as llm:
            llm.generate(4 * TEXT, SamplingParams(max_tokens=96, ignore_eos=True))
            stats = llm.stats()
        return float(stats["accepted"] / stats["verifications"])

    assert accepted("EAGLE3+NGRAM") > 1.05 * max(accepted("EAGLE3"), accepted("NGRAM"))


# What users see of one


def test_settings_are_the_proposers_and_room_is_for_both() -> None:
    with LLM(speculative_algorithm="eagle3+ngram", speculative_num_steps=3, **SMALL) as llm:
        used = llm.effective_config
    assert used["speculative_algorithm"] == "EAGLE3+NGRAM"
    # EAGLE-3's chain of 3, and 7 nodes of NGRAM, which may hang from its end.
    assert (used["num_steps"], used["num_draft_tokens"]) == (3 + 7, 4 + 7)


def test_own_settings_of_parts_come_to_the_parts() -> None:
    info = Registry().select("EAGLE3+NGRAM").info
    own = {"ngram_index_scope": "engine", "ngram_index_bytes": 1 << 20}
    assert info.setting_names == Registry().select("NGRAM").info.setting_names
    with LLM(speculative_algorithm="EAGLE3+NGRAM", **SMALL, speculative_settings=own) as llm:
        eagle, ngram = llm.engine.runtime.worker.parts
        assert eagle.config.settings is None
        assert ngram.config.settings.ngram_index_bytes == 1 << 20
        assert llm.spec_config.settings.ngram_index_scope == "engine"
    with pytest.raises(
        UsageError, match=r"'ngram_index' is no setting of EAGLE3\+NGRAM: it has ng"
    ):
        LLM(speculative_algorithm="EAGLE3+NGRAM", speculative_settings={"ngram_index": 1})


def test_joint_algorithm_declares_what_its_parts_need() -> None:
    selected = Registry().select("EAGLE3+NGRAM")
    able = selected.info.capabilities
    assert (able.draft_model, able.branching, able.parts) == (True, True, True)
    assert able.captures == {"layer_inputs"}
    assert "EAGLE3+NGRAM" in selected.entry.subject
    host = HostCapabilities(name="a host", draft_models=True, captures=able.captures)
    (why,) = host.obstacles(selected.info)
    assert why == "EAGLE3+NGRAM holds other algorithms, and a host runs one alone"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("NGRAM+EAGLE3", "EAGLE3 does not add to the drafts of others"),
        ("NGRAM+NGRAM", "each algorithm once"),
        ("EAGLE3+NGRAMM", "unknown algorithm 'NGRAMM': did you mean NGRAM"),
        ("EAGLE3+", "unknown algorithm ''"),
    ],
)
def test_what_cannot_be_joined_is_refused(name: str, why: str) -> None:
    with pytest.raises(UsageError, match=why.replace("+", r"\+")):
        Registry().select(name)


def test_more_nodes_than_a_draft_may_have_are_refused() -> None:
    with pytest.raises(UsageError, match="makes 1031 of it; expected at most 1024"):
        LLM(
            speculative_algorithm="EAGLE3+NGRAM", speculative_num_steps=1023,
            speculative_num_draft_tokens=1024, **SMALL,
        )  # fmt: skip


# What growers do wrong harms their own step alone


class Guessing:
    """Proposes a chain of one token, with a state; holds itself to nothing else."""

    name = "GUESSING"

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name=self.name,
            summary="Guesses",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=2, num_draft_tokens=3),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> object:
        return self

    @hookimpl
    def build_draft_input(
        self, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
    ) -> DraftInput:
        assert type(future_map) is FutureMap
        # What is written here must reach no other part.
        batch.seq_lens.fill_(-1)
        target_output.next_tokens.fill_(-1)
        tokens = target_output.bonus_tokens
        return DraftInput(bonus_tokens=tokens, state={"twice": 2 * tokens})

    @hookimpl
    def propose(self, draft_input: DraftInput) -> Draft:
        roots = draft_input.bonus_tokens
        assert torch.equal(draft_input["twice"], 2 * roots)
        return Draft.chain(roots.unsqueeze(1).expand(-1, 2).contiguous())


class Growing(Guessing):
    """Answers ``grow_draft`` by a function."""

    name = "GROWING"

    def __init__(self, answer: Callable[[Draft], Any], every: int = 1) -> None:
        self.answer, self.every, self.calls = answer, every, 0

    @hookimpl
    def grow_draft(self, batch: Batch, draft_input: DraftInput, draft: Draft) -> Any:
        assert list(draft_input.state) == ["twice"]
        self.calls += 1
        return self.answer(draft) if self.calls % self.every == 0 else None


class Holding(Guessing):
    """Holds parts, and grows the first one's drafts by the others."""

    name = "HOLDING"

    def __init__(self, *parts: Any, room: int = 8, **settings: Any) -> None:
        self.held, self.room, self.settings = parts, room, settings

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        return config.adjust("room", num_draft_tokens=self.room, num_steps=self.room - 1)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> object:
        return [runtime.part(part, **self.settings) for part in self.held]

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        state: dict[str, Any] = {}
        for part in runtime.worker:
            state |= part.build_draft_input(batch, target_output).state
        return DraftInput(bonus_tokens=target_output.bonus_tokens, state=state)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        first, *others = runtime.worker
        draft: Draft = first.propose(batch, draft_input)
        for part in others:
            draft = part.grow_draft(batch, draft_input, draft)
        return draft


def wide(draft: Draft) -> Draft:
    tokens = torch.zeros(len(draft.tokens), 3, dtype=torch.int64)
    return append_nodes(draft, tokens, tokens + torch.arange(3), 3)


def nonsense(draft: Draft) -> Draft:
    """A draft in which parents come after their children, and tokens are outside the vocabulary."""
    tokens = torch.full((len(draft.tokens), 4), 10**9)
    return Draft(
        tokens=tokens,
        parents=torch.full_like(tokens, 3),
        widths=None,
        depth=3,
        scores=torch.full(tokens.shape, float("nan")),
    )


def spoiling(draft: Draft) -> None:
    """Writes to what it is lent, and answers nothing."""
    draft.tokens.fill_(-7)


WRONG = [
    (wide, "grow_draft() drafted 5 nodes, 3 deep"),
    (lambda draft: 1 / 0, "grow_draft() raised ZeroDivisionError"),
    (lambda draft: draft.tokens, "grow_draft() returned a value"),
    (lambda draft: Draft.chain(draft.tokens[:0]), "grow_draft() drafted 2 nodes, 1 deep, for 0"),
]


@pytest.mark.parametrize(("answer", "told"), WRONG)
def test_wrong_growth_ends_its_own_step_alone(answer: Any, told: str, plain: list[Any]) -> None:
    grower = Growing(answer)
    with LLM(speculative_algorithm=Holding(Guessing(), grower), **SMALL) as llm:
        with pytest.raises(PluginError) as raised:
            llm.generate(PROMPTS, PARAMS)
        grower.answer = lambda draft: None
        found = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    message = str(raised.value)
    assert message.startswith("algorithm HOLDING (")
    assert "): propose(): algorithm GROWING (" in message
    assert f"): {told}" in message
    assert found == plain


@pytest.mark.parametrize("answer", [nonsense, spoiling])
def test_nonsense_of_a_grower_changes_no_token(
    answer: Any, plain: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    grower = Growing(answer)
    found, _ = generate(Holding(Guessing(), grower))
    assert grower.calls
    assert found == plain


def test_part_gets_its_own_state_settings_and_runtime() -> None:
    seen: list[Any] = []

    class Looking(Growing):
        @hookimpl
        def create_worker(self, runtime: Runtime) -> object:
            seen.append((runtime.config.algorithm, runtime.config.num_steps, runtime.worker))
            seen.append((runtime.vocab_size, runtime.overlap))
            return self

    with LLM(
        speculative_algorithm=Holding(Guessing(), Looking(lambda draft: None)), **SMALL
    ) as llm:
        runtime = llm.engine.runtime
        llm.generate(PROMPTS, PARAMS)
        assert seen == [("GROWING", 2, None), (runtime.vocab_size, runtime.overlap)]
        assert set(runtime.parts) == {"GUESSING", "GROWING"}
        assert runtime.parts["GROWING"].worker.calls
    assert not runtime.parts


def test_part_that_needs_more_slots_than_reserved_is_refused() -> None:
    with pytest.raises(PluginError, match="writes 3 slots while it drafts; expected at most the 2"):
        LLM(speculative_algorithm=Holding(Guessing(), room=2), **SMALL)


def test_part_is_made_once_and_before_the_run() -> None:
    with pytest.raises(PluginError, match="there is a part GUESSING already"):
        LLM(speculative_algorithm=Holding(Guessing(), Guessing()), **SMALL)

    with (
        LLM(speculative_algorithm=Holding(Guessing()), **SMALL) as llm,
        pytest.raises(PluginError, match=r"runtime.part\(\) was called after create_worker"),
    ):
        llm.engine.runtime.part("NGRAM")
