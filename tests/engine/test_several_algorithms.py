"""Several algorithms in one run: in each step a request takes the drafts of one, or of none."""

from __future__ import annotations

from typing import Any

import pytest

from specplug import LLM, Registry, SamplingParams, UsageError

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [TEXT, TEXT + "area(width, height):\n", "import os\nimport "]
PARAMS = [
    SamplingParams(max_tokens=40, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=0.7, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=24, presence_penalty=0.4, ignore_eos=True),
]
SMALL = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024, "draft_choice": "first"}
LONG = SamplingParams(max_tokens=96, ignore_eos=True)


def generate(algorithm: Any, params: Any = PARAMS, **settings: Any) -> tuple[list[Any], Any]:
    with LLM(speculative_algorithm=algorithm, **{**SMALL, **settings}) as llm:
        outputs = llm.generate(PROMPTS, params)
        return [output.token_ids for output in outputs], llm.stats()


@pytest.mark.parametrize("algorithm", ["EAGLE3,NGRAM", ["NGRAM", "EAGLE3"], "NGRAM,EAGLE3+NGRAM"])
def test_tokens_are_those_of_plain_decoding(algorithm: Any) -> None:
    assert generate(algorithm)[0] == generate("NONE")[0]


@pytest.mark.parametrize("name", ["EAGLE3", "NGRAM"])
def test_first_one_drafts_as_if_it_were_alone(name: str) -> None:
    other = "NGRAM" if name == "EAGLE3" else "EAGLE3"
    _, alone = generate(name, LONG)
    _, found = generate(f"{name},{other}", LONG)
    for total in ("proposed", "drafted", "accepted", "verifications"):
        assert found[total] == alone[total]


# What users see of them


def test_room_is_that_of_the_greatest() -> None:
    with LLM(speculative_algorithm="ngram,eagle3:steps=3,topk=3,tokens=20", **SMALL) as llm:
        used = llm.effective_config
        ngram, eagle = llm.engine.runtime.worker.parts
    assert used["speculative_algorithm"] == "NGRAM,EAGLE3"
    assert (eagle.config.num_steps, eagle.config.topk, eagle.config.num_draft_tokens) == (3, 3, 20)
    assert used["num_draft_tokens"] == 20
    assert used["num_steps"] == max(3, ngram.config.num_steps)


def test_folder_of_weights_is_of_the_one_draft_model() -> None:
    folder = Registry().select("EAGLE3").info.weights["tiny-code"]
    for given in (
        {"speculative_algorithm": f"NGRAM,EAGLE3:draft={folder}"},
        {"speculative_algorithm": "NGRAM,EAGLE3", "speculative_draft_model_path": folder},
    ):
        with LLM(**given, **SMALL) as llm:
            _, eagle = llm.engine.runtime.worker.parts
            assert eagle.config.draft_model_path == folder
    with pytest.raises(UsageError, match="2 algorithms of EAGLE,EAGLE3 would take it; expected"):
        LLM(
            speculative_algorithm="EAGLE,EAGLE3", speculative_draft_model_path=folder, **SMALL
        )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"speculative_algorithm": "NGRAM,NGRAM"}, "NGRAM,NGRAM: expected each algorithm once"),
        ({"speculative_algorithm": "NGRAM,EAGLE4"}, "unknown algorithm 'EAGLE4': did you mean"),
        ({"speculative_algorithm": "NGRAM,EAGLE3:step=4"}, "did you mean steps"),
        ({"speculative_algorithm": []}, "expected names of algorithms, as in A,B"),
        (
            {"speculative_algorithm": "NGRAM,EAGLE3", "speculative_num_steps": 4},
            "num_steps=4: NGRAM,EAGLE3 are several algorithms; expected it by name",
        ),
    ],
)
def test_what_is_not_understood_is_refused(given: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LLM(**given, **SMALL)
