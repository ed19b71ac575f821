"""What goes between the server and its engines."""

from __future__ import annotations

from typing import Any

import pytest

from specplug.serve.messages import (
    Abort,
    Accepted,
    Add,
    AskStats,
    End,
    Failed,
    Flush,
    Flushed,
    Ready,
    Refused,
    Stats,
    Stepped,
    TokenLogprobs,
    Update,
    Warned,
    decode,
    encode,
)

LOGPROBS = TokenLogprobs(text="é", logprob=-0.5, top=[["é", -0.5], ["\ufffd", float("-inf")]])  # type: ignore[list-item]


@pytest.mark.parametrize(
    "message",
    [
        Add(id="1", prompts=["def", [1, 2]], params={"seed": -1, "n": 2}, priority=-3, echo=True),
        Add(id="2", messages=[{"role": "user", "content": "hi"}], template_options={"a": [1]}),
        Abort(id="1"),
        AskStats(),
        Flush(cache_salt="é"),
        Flushed(error="no"),
        End(),
        Ready(algorithm="NONE", config={"context_len": 8}, has_chat_template=False),
        Failed(message="no", usage=True),
        Warned(message="less"),
        Accepted(id="1", prompt_tokens=[3, 4], echo=["def", "x"]),
        Refused(id="1", message="no", error=True),
        Stepped(
            updates=[
                Update(id="1", index=0, text="a", token_ids=[5], logprobs=[LOGPROBS]),
                Update(id="1", index=1, finish_reason="stop", stop_reason="\n", cached_tokens=16),
            ]
        ),
        Stats(totals={"output_tokens": 1}, occupancy={"running": 0}),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_arrives_as_it_was(message: Any) -> None:
    assert decode(encode(message)) == message
