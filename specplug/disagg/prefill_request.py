"""The request that a decode instance sends to a prefill instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import torch

from specplug.disagg.wire_message import WireMessage
from specplug.engine.request import Request
from specplug.sampling_params import SamplingParams


@attrs.frozen(kw_only=True)
class PrefillRequest:
    """A prompt to prefill, and the one token to sample after it.

    Attributes:
        name: between the two instances.
        token_ids: the prompt.
        params: all that the request was given, with the seed that it has got, and one token to
            sample.
        start: the first position whose KV is asked for.
        draft: whether the KV and the state of the draft are asked for too.
    """

    name: str
    token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int
    start: int
    draft: bool


def prefill_message(name: str, request: Request, start: int, draft: bool) -> WireMessage:
    """Return the message by which a decode instance asks for a request's prefill."""
    fields = {
        "job": name,
        "start": start,
        "draft": draft,
        "priority": request.priority,
        "params": request.params.as_json() | {"seed": request.seed},
    }
    tokens = torch.tensor(request.prompt_token_ids, dtype=torch.int64)
    return WireMessage("prefill", fields, {"tokens": tokens})


def read_prefill_request(message: WireMessage) -> PrefillRequest:
    """Return the job that a message asks for.

    Raises:
        KeyError, TypeError, ValueError: the message is not a job; UsageError is a ValueError.
    """
    fields: Mapping[str, Any] = message.fields
    token_ids = tuple(message.tensors["tokens"].tolist())
    settings = {field.name: fields["params"][field.name] for field in attrs.fields(SamplingParams)}
    start = fields["start"]
    if type(start) is not int or not 0 <= start <= len(token_ids):
        raise ValueError(f"start {start!r}; expected a position up to {len(token_ids)}")
    params = SamplingParams.from_json(settings).for_first_token()
    return PrefillRequest(
        name=str(fields["job"]),
        token_ids=token_ids,
        params=params,
        priority=fields["priority"],
        start=start,
        draft=bool(fields["draft"]),
    )
