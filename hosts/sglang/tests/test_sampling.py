"""Sampled tokens are those of plain decoding where SGLang has seeds, and so are log-probabilities;
what cannot be told of a node is decoded plainly."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from engines import running
from sglang.srt.sampling.sampling_params import SamplingParams

from specplug.speculative.calibration import RequestKind
from specplug_sglang.sampling import kind_of

PLAIN = [{"temperature": 0.8, "max_new_tokens": 32, "sampling_seed": seed} for seed in range(6)]
FILTERED = [{**each, "top_p": 0.9, "top_k": 50} for each in PLAIN]
GREEDY = {"temperature": 0, "max_new_tokens": 32}
PENALIZED = [
    {**GREEDY, "frequency_penalty": 0.5},
    {**GREEDY, "presence_penalty": 0.5},
    {**GREEDY, "repetition_penalty": 1.2},
    GREEDY,
    {**GREEDY, "logit_bias": {"10": 3.0}},
    {**GREEDY, "min_new_tokens": 16},
]
WANTED = {"plain": PLAIN, "filtered": FILTERED, "penalized": PENALIZED}


@pytest.fixture(scope="module")
def replies(prompts):
    """Tokens and log-probabilities of each list of wishes, without speculation and with it."""

    def answers(algorithm):
        # With overlap SGLang counts a token for penalties a step late.
        settings = {"enable_deterministic_inference": True, "disable_overlap_schedule": True}
        with running(algorithm, **settings) as engine:
            return {
                name: engine.sglang.generate(
                    prompts[:6], wanted, return_logprob=True, top_logprobs_num=2
                )
                for name, wanted in WANTED.items()
            }

    return answers(None), answers("EAGLE3")


@pytest.mark.parametrize("wanted", WANTED)
def test_sampled_tokens_are_those_of_plain_decoding(wanted, replies):
    plain, made = (engine[wanted] for engine in replies)
    assert [each["output_ids"] for each in made] == [each["output_ids"] for each in plain]


@pytest.mark.parametrize("wanted", ["plain", "filtered"])
def test_sampled_tokens_take_fewer_steps(wanted, replies):
    made = replies[1][wanted]
    assert sum(each["meta_info"]["spec_verify_ct"] for each in made) < 6 * 31 * 0.75


def test_penalized_requests_draft_nothing(replies):
    made = replies[1]["penalized"]
    assert [each["meta_info"]["spec_verify_ct"] == 31 for each in made] == [
        True,
        True,
        True,
        False,
        False,
        True,
    ]


def test_requests_with_a_grammar_are_those_of_plain_decoding(prompts):
    """SGLang ends such a request before the step that it has planned for it runs."""
    regex = {**GREEDY, "regex": "[a-z ]{5,20}"}
    found = []
    for algorithm in (None, "EAGLE3"):
        with running(algorithm) as engine:
            alone = engine.generate(prompts[:1], regex)
            mixed = engine.generate(prompts[:4], [regex, GREEDY, regex, GREEDY])
            found.append((alone.tokens, mixed.tokens))
    assert found[0] == found[1]


def test_log_probabilities_are_those_of_plain_decoding(replies):
    plain, made = (engine["plain"] for engine in replies)
    for ours, theirs in zip(made, plain, strict=True):
        values = [
            [value for value, *_ in each["meta_info"]["output_token_logprobs"]]
            for each in (ours, theirs)
        ]
        assert values[0] == pytest.approx(values[1], abs=1e-4)


@pytest.mark.parametrize(
    ("wanted", "kind"),
    [
        ({"temperature": 0}, RequestKind.GREEDY),
        ({"temperature": 0.8}, RequestKind.SAMPLED),
        ({"temperature": 0.8, "top_k": 40}, RequestKind.SAMPLED),
        ({"temperature": 0, "logit_bias": {"3": 2.0}}, RequestKind.CONSTRAINED),
        ({"temperature": 0.8, "presence_penalty": 0.5}, RequestKind.CONSTRAINED),
    ],
)
def test_kind_of_a_request_follows_from_its_settings(wanted, kind):
    params = SamplingParams(**wanted)
    params.normalize(None)
    request = SimpleNamespace(sampling_params=params, grammar=None, custom_logit_processor=None)
    assert kind_of(request) is kind
