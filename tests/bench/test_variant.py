"""What ``--speculative-algorithms`` may say."""

from __future__ import annotations

import pytest

from specplug.bench.variant import parse_variants
from specplug.errors import UsageError

INSTALLED = ["EAGLE3", "NGRAM", "NONE"]


def labels(*texts: str) -> list[str]:
    return [variant.label for variant in parse_variants(texts, INSTALLED)]


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (["all"], ["NONE", "EAGLE3", "NGRAM"]),
        (["ngram"], ["NONE", "NGRAM"]),
        (["NGRAM, EAGLE3,NGRAM,", "none"], ["NONE", "NGRAM", "EAGLE3"]),
        (["EAGLE3:steps=7, topk=4 ,NGRAM"], ["NONE", "EAGLE3:steps=7,topk=4", "NGRAM"]),
        (["EAGLE3:topk=4,steps=7", "EAGLE3:steps=07,topk=4"], ["NONE", "EAGLE3:steps=7,topk=4"]),
        (["EAGLE3:draft=a/b:c,tokens=9"], ["NONE", "EAGLE3:tokens=9,draft=a/b:c"]),
        (["All,ngram:steps=3"], ["NONE", "EAGLE3", "NGRAM", "NGRAM:steps=3"]),
        (["Auto,[ngram,EAGLE3]"], ["NONE", "auto", "[NGRAM,EAGLE3]"]),
        (
            ["X:steps=2, [a:steps=3,topk=2,B:draft=f] ,NGRAM,topk=1"],
            ["NONE", "X:steps=2", "[A:steps=3,topk=2,B:draft=f]", "NGRAM:topk=1"],
        ),
    ],
)
def test_labels(texts, expected):
    assert labels(*texts) == expected


def test_settings_are_arguments_of_the_engine():
    _, mine = parse_variants(["X:steps=2,topk=3,tokens=4,draft=d"], INSTALLED)
    assert mine.own == {
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 3,
        "speculative_num_draft_tokens": 4,
        "speculative_draft_model_path": "d",
    }


def test_several_are_one_algorithm_of_the_engine():
    _, mine, auto = parse_variants(["[a:steps=3,B],auto"], INSTALLED)
    assert (mine.algorithm, mine.own, mine.named) == ("A:steps=3,B", {}, True)
    assert (auto.algorithm, auto.own, auto.named) == ("auto", {}, True)
    assert mine.is_several
    assert auto.is_several


def test_its_own_settings_go_before_those_for_all():
    plain, mine = parse_variants(["X:steps=2"], INSTALLED)
    common = {"speculative_num_steps": 9, "speculative_eagle_topk": 3}
    assert mine.with_common(common).arguments == {**common, "speculative_num_steps": 2}
    assert plain.with_common(common).arguments == {}
    assert mine.with_common(common).label == "X:steps=2"


def test_who_was_named_must_not_be_left_out():
    named = {c.label: c.named for c in parse_variants(["all,NGRAM"], INSTALLED)}
    assert named == {"NONE": True, "EAGLE3": False, "NGRAM": True}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no algorithm was named; expected all, or names as in A,B:steps=5,C"),
        (" , ", "no algorithm was named"),
        ("steps=3,NGRAM", "'steps=3' stands before any algorithm; expected NAME:steps=3"),
        ("NGRAM:step=3", "NGRAM:step=3: did you mean steps? expected steps=…, topk=…, tokens=…"),
        ("NGRAM:steps", "NGRAM:steps: expected an integer of at least 1"),
        ("NGRAM:steps=0", "NGRAM:steps=0: expected an integer of at least 1"),
        ("NGRAM:topk=-1", "NGRAM:topk=-1: expected an integer of at least 1"),
        ("NGRAM:tokens=²", "NGRAM:tokens=²: expected an integer of at least 1"),
        ("EAGLE3:draft=", "EAGLE3:draft=: expected the folder of draft weights"),
        ("NONE:steps=2", "NONE:steps=2: plain decoding has no settings; leave it out"),
        ("auto:steps=2", "auto:steps=2: expected auto alone"),
        ("[NGRAM]", "[NGRAM]: expected several algorithms, as in [A,B:steps=5]"),
        ("[]", "[]: expected several algorithms"),
        ("[A,B", "'[A,B': expected brackets around names alone, as in A,[B,C:steps=5],D"),
        ("[A,B]:steps=2", "'[A,B]:steps=2': expected brackets around names alone"),
        ("[A,B],steps=2", "'steps=2' stands before any algorithm"),
        ("[A,B:step=2]", "B:step=2: did you mean steps?"),
        ("all:steps=2", "all:steps=2: expected all alone; --speculative-num-steps and"),
    ],
)
def test_bad_usage(text, message):
    with pytest.raises(UsageError) as caught:
        labels(text)
    assert str(caught.value).startswith(message)
