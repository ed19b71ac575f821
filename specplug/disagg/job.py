"""What a decode instance asks of a prefill instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from specplug.disagg.message import Message
from specplug.engine.request import Request
from specplug.engine.sampling_params import SamplingParams

_OF_THE_FIRST_TOKEN = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logprobs",
    "return_routed_experts",
    "json_schema",
    "regex",
    "ebnf",
)
"""Settings on which the token behind the prompt depends, and what is told of it."""


@attrs.frozen(kw_only=True)
class Job:
    """A prompt to prefill, and the one token to sample behind it.

    Attributes:
        name: between the two instances.
        token_ids: the prompt.
        params: how to sample, its seed included.
        start: the first position whose KV is asked for.
        draft: whether the KV and the state of the draft are asked for too.
    """

    name: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    start: int
    draft: bool


def job_message(name: str, request: Request, start: int, draft: bool) -> Message:
    """The message by which a decode instance asks for a request's prefill."""
    params = request.params
    fields = {
        "job": name,
        "start": start,
        "draft": draft,
        "priority": request.priority,
        "seed": request.seed,
        "logit_bias": list(params.logit_bias.items()),
        "params": {setting: getattr(params, setting) for setting in _OF_THE_FIRST_TOKEN},
    }
    tokens = torch.tensor(request.prompt_token_ids, dtype=torch.int64)
    return Message("prefill", fields, {"tokens": tokens})


def read_job(message: Message) -> Job:
    """The job that a message asks for.

    Raises:
        KeyError, TypeError, ValueError: it is none; UsageError is a ValueError.
    """
    fields: Mapping[str, Any] = message.fields
    token_ids = tuple(message.tensors["tokens"].tolist())
    settings = {name: fields["params"][name] for name in _OF_THE_FIRST_TOKEN}
    start = fields["start"]
    if type(start) is not int or not 0 <= start <= len(token_ids):
        raise ValueError(f"start {start!r}; expected a position up to {len(token_ids)}")
    params = SamplingParams(
        max_tokens=1,
        ignore_eos=True,
        seed=fields["seed"],
        logit_bias=dict(fields["logit_bias"]),
        **settings,
    )
    return Job(
        name=str(fields["job"]),
        token_ids=token_ids,
        params=params,
        priority=fields["priority"],
        start=start,
        draft=bool(fields["draft"]),
    )
