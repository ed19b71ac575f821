"""A job has every setting of its request, whichever there will be."""

from __future__ import annotations

import math
from typing import Any

import attrs
import pytest

from specplug import SamplingParams
from specplug.disagg.prefill_request import PrefillRequest, prefill_message, read_prefill_request
from specplug.disagg.wire_message import decode, encode
from specplug.engine.request import Request

VALUES: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 7,
    "min_p": 0.1,
    "repetition_penalty": 1.25,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "logit_bias": {3: 1.5, 4: -math.inf},
    "stop": ("\n", "\u00e4"),
    "stop_token_ids": (5, 6),
    "ignore_eos": True,
    "min_tokens": 1,
    "logprobs": 2,
    "skip_special_tokens": False,
    "return_routed_experts": True,
    "return_hidden_states": (2, 0),
    "token_outputs": ("entropy",),
    "json_schema": '{"type":"integer"}',
    "regex": "[a-z]+",
    "ebnf": 'root ::= "a"',
    "structural_tag": '{"type":"structural_tag","format":{"type":"any_text"}}',
    "cache_salt": "a secret",
    "speculative_algorithm": "NONE",
    "max_draft_tokens": 3,
}
"""Of each setting one that is not its default. A new one of ``SamplingParams`` needs one here."""

OF_THE_JOB = {
    "n": 1,
    "max_tokens": 1,
    "seed": 11,
    "speculative_algorithm": None,
    "max_draft_tokens": None,
}
"""Settings that a job has its own of: one output of one token, for which nothing is drafted, and
the seed that the request has got."""


def travelled(**settings: Any) -> PrefillRequest:
    """The job of a request with these settings, as a prefill instance reads it."""
    request = Request(
        request_id="1",
        prompt=None,
        prompt_token_ids=(3, 4),
        params=SamplingParams(**settings),
        max_tokens=9,
        seed=11,
    )
    message = prefill_message("a-1", request, 0, True)
    return read_prefill_request(decode([bytes(frame) for frame in encode(message)]))


@pytest.mark.parametrize("name", [field.name for field in attrs.fields(SamplingParams)])
def test_every_setting_travels(name: str) -> None:
    if name in OF_THE_JOB:
        assert getattr(travelled().params, name) == OF_THE_JOB[name]
        return
    wanted = SamplingParams(**{name: VALUES[name]})
    assert getattr(wanted, name) != getattr(SamplingParams(), name), "not the default"
    assert travelled(**{name: VALUES[name]}).params == attrs.evolve(wanted, **OF_THE_JOB)
