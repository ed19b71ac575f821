"""Several algorithms on both sides: each one's draft arrives, whoever drafts first."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from draft_dice import Dice
from shallow_target import shallow_target

from conftest import TEXT, Pair, Plain
from specplug import LLM, Batch, Draft, DraftChoices, DraftPlan, SamplingParams, hookimpl

PROMPTS = [TEXT[:110], "import os\nimport ", "x", TEXT[:60], TEXT[:110] + "y"]
PARAMS = [
    SamplingParams(max_tokens=14),
    SamplingParams(max_tokens=14, temperature=0.7, seed=1),
    SamplingParams(max_tokens=12, temperature=1.0, seed=2, frequency_penalty=0.4, logprobs=2),
    SamplingParams(max_tokens=10, regex="[a-z]{3,20}"),
    SamplingParams(max_tokens=14, stop=("e",)),
]
Proposals = dict[tuple[int, ...], list[int]]


@pytest.fixture(scope="module")
def plain(shallow_plain: Plain) -> Plain:
    return shallow_plain


class Only:
    """Has one algorithm draft, and keeps what it proposes."""

    def __init__(self, who: int) -> None:
        self.who = who
        self.proposals: Proposals = {}

    @hookimpl
    def plan_drafts(self, choices: DraftChoices) -> DraftPlan:
        return DraftPlan(who=(self.who,) * choices.size, most_nodes=choices.most_nodes)

    @hookimpl(wrapper=True)
    def propose(self, batch: Batch) -> Generator[None, Draft, Draft]:
        draft = yield
        widths = draft.widths or (draft.width,) * batch.size
        for b, request in enumerate(batch.requests):
            place = (*request.prompt_token_ids, int(batch.seq_lens[b]))
            self.proposals[place] = draft.tokens[b, : widths[b]].tolist()
        return draft


def check(pair: Pair, plain: Plain, params: Any = PARAMS) -> None:
    """All prompts, twice: the second time they are cached here."""
    prompts = [plain.ids(text) for text in PROMPTS]
    for _ in range(2):
        for output, prompt, each in zip(
            pair.generate(prompts, params), prompts, params, strict=True
        ):
            assert output.error is None
            assert output.token_ids == plain.output(prompt, each).token_ids


# Tokens


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {"page_size": 1}),
        (
            "NGRAM:topk=3,tokens=9,EAGLE3:steps=3,topk=3,tokens=12",
            {"page_size": 4, "chunked_prefill_size": 5, "disable_overlap_schedule": True},
        ),
        ("EAGLE3,NGRAM", {"page_size": 4, "max_total_tokens": 128, "chunked_prefill_size": 16}),
        ("MULTI_LAYER_EAGLE,EAGLE3+NGRAM,DFLASH", {"page_size": 3, "max_running_requests": 2}),
        ("STANDALONE,EAGLE", {"disable_radix_cache": True, "chunked_prefill_size": 8}),
        ("SPARSE_SELF,PEAGLE,DSPARK", {"page_size": 4, "enable_mixed_chunk": True}),
    ],
)
def test_tokens_are_nones_whatever_dice_choose(
    plain: Plain, algorithm: str, settings: dict[str, Any]
) -> None:
    dice = Dice()
    with Pair.open(settings, decode=algorithm, prefill=algorithm, watch=dice) as pair:
        check(pair, plain)
        stats = pair.decode.stats()
    assert stats["received"] == 2 * len(PROMPTS)
    assert stats["stateless"] == 0
    names = {part.partition(":")[0] for part in algorithm.split(",") if part[0].isupper()}
    assert set(dice.drafters) == names | {"NONE"}


@pytest.mark.parametrize("prefill", ["NONE", "EAGLE3", "EAGLE3,NGRAM", "EAGLE,NGRAM"])
def test_other_algorithms_of_the_prefill_change_no_token(plain: Plain, prefill: str) -> None:
    """What they have computed of a draft is not taken; that is counted."""
    dice = Dice()
    settings = {"page_size": 4, "chunked_prefill_size": 16}
    with Pair.open(settings, decode="NGRAM,EAGLE3", prefill=prefill, watch=dice) as pair:
        check(pair, plain)
        stats = pair.decode.stats()
    assert stats["stateless"] == stats["received"] == 2 * len(PROMPTS)
    assert set(dice.drafters) == {"NGRAM", "EAGLE3", "NONE"}


@pytest.mark.parametrize("prefill", ["NGRAM,EAGLE3", "NONE"])
def test_a_request_names_its_algorithm_whatever_prefills_it(plain: Plain, prefill: str) -> None:
    names = "EAGLE3", "NGRAM", "NONE", "EAGLE3", None
    params = [
        SamplingParams(max_tokens=12, temperature=0.7, seed=i, speculative_algorithm=name)
        for i, name in enumerate(names)
    ]
    with Pair.open({}, decode="NGRAM,EAGLE3", prefill=prefill, watch=Dice()) as pair:
        prompts = [plain.ids(text) for text in PROMPTS]
        for output, prompt, each in zip(
            pair.generate(prompts, params), prompts, params, strict=True
        ):
            bare = SamplingParams(max_tokens=12, temperature=0.7, seed=each.seed)
            assert output.error is None
            assert output.token_ids == plain.output(prompt, bare).token_ids


# What each one drafts from


@pytest.mark.parametrize(
    "algorithm", ["NGRAM,EAGLE3", "MULTI_LAYER_EAGLE,STANDALONE", "PEAGLE,DFLASH"]
)
@pytest.mark.parametrize("who", [0, 1])
@pytest.mark.parametrize(("page_size", "chunk"), [(3, 2), (16, None)])
def test_each_one_proposes_as_in_a_single_process(
    plain: Plain, algorithm: str, who: int, page_size: int, chunk: int | None
) -> None:
    """At every position, from the first on, though it shares its run."""
    options: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "disable_overlap_schedule": page_size == 16,
    }
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
    prompts = [plain.ids(TEXT[:110]), plain.ids("import "), (5,)]
    one, other = Only(who), Only(who)
    with LLM(
        **shallow_target().options(algorithm), dtype="float64", extensions=[one], **options
    ) as llm:
        for prompt in prompts:
            llm.generate([prompt], params)
    with Pair.open(options, decode=algorithm, prefill=algorithm, watch=other) as pair:
        for prompt in prompts:
            (output,) = pair.generate([prompt], params)
            assert output.token_ids == plain.output(prompt, params).token_ids
        assert pair.decode.stats()["stateless"] == 0
    assert len(one.proposals) > 5
    assert other.proposals == one.proposals


def test_other_weights_of_a_part_are_told(plain: Plain, tmp_path: Path) -> None:
    """They stand in no setting of the run's own; what they have computed is not taken."""
    weights = shallow_target().drafts["EAGLE3"]
    other = tmp_path / "other"
    shutil.copytree(weights, other)
    config = other / "config.json"
    config.write_text(config.read_text() + "\n")
    for folder, stateless in (weights, 0), (other, 1):
        with Pair.open({}, decode="NGRAM,EAGLE3", prefill=f"NGRAM,EAGLE3:draft={folder}") as pair:
            pair.generate([plain.ids("import ")], SamplingParams(max_tokens=4))
            assert pair.decode.stats()["stateless"] == stateless
