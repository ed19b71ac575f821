"""Messages come out as they went in; what is no whole message is refused, and nothing is run."""

from __future__ import annotations

import json
import pickle
from typing import Any

import attrs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specplug.disagg import wire_message
from specplug.disagg.wire_message import _DTYPES, MAGIC, WireError, WireMessage, decode, encode

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(list(_DTYPES.values())))
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    raw = torch.randint(
        0, 2, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))
    )
    tensor = raw.to(dtype)
    if len(shape) > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)  # not contiguous
    return tensor


MESSAGES = st.builds(
    WireMessage,
    st.text(max_size=12),
    st.dictionaries(st.text(max_size=6), JSON, max_size=3),
    st.dictionaries(st.text(max_size=6), tensors(), max_size=3),
)


def as_sent(message: WireMessage) -> list[bytes]:
    return [bytes(frame) for frame in encode(message)]


SOUND = WireMessage(
    "part",
    {"job": "a-1", "start": 0, "end": 3},
    {"cache0": torch.arange(12.0).view(2, 2, 3), "state.tokens": torch.tensor([3, 4])},
)


@settings(max_examples=60, deadline=None)
@given(MESSAGES)
def test_a_message_comes_out_as_it_went_in(message: WireMessage) -> None:
    arrived = decode(as_sent(message))
    assert (arrived.kind, arrived.fields) == (message.kind, message.fields)
    assert list(arrived.tensors) == list(message.tensors)
    for name, tensor in message.tensors.items():
        other = arrived.tensors[name]
        assert other.dtype == tensor.dtype
        assert other.shape == tensor.shape
        assert torch.equal(other, tensor)


@pytest.mark.parametrize("most", [1, 7, 24, 48, 100])
def test_what_is_longer_than_a_frame_takes_several(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wire_message, "MOST_FRAME_BYTES", most)
    for length in range(most + 1):  # a header of whole frames among them
        message = attrs.evolve(SOUND, fields={"job": "x" * length})
        told, *frames = as_sent(message)
        assert told == MAGIC
        assert max(map(len, frames)) <= most
        arrived = decode([told, *frames])
        assert arrived.fields == message.fields
        for name, tensor in message.tensors.items():
            assert torch.equal(arrived.tensors[name], tensor)
        for number in range(len(frames)):
            with pytest.raises(WireError):
                decode([told, *frames[:number]])


def test_what_arrives_can_be_written_to() -> None:
    arrived = decode(as_sent(SOUND))
    arrived.tensors["cache0"].zero_()


@pytest.mark.parametrize("dtype", _DTYPES.values(), ids=str)
def test_every_bit_of_a_value_arrives(dtype: torch.dtype) -> None:
    bits = torch.arange(256, dtype=torch.uint8)
    tensor = bits.bool() if dtype == torch.bool else bits.view(dtype)
    arrived = decode(as_sent(WireMessage("part", {}, {"x": tensor}))).tensors["x"]
    assert torch.equal(arrived.view(torch.uint8), tensor.view(torch.uint8))


def test_a_message_cut_anywhere_is_refused() -> None:
    frames = as_sent(SOUND)
    for number in range(len(frames)):
        with pytest.raises(WireError):
            decode(frames[:number])
        for size in range(len(frames[number])):
            with pytest.raises(WireError):
                decode([*frames[:number], frames[number][:size], *frames[number + 1 :]])
    with pytest.raises(WireError, match=r"has 3 frames of tensors; its header says 2"):
        decode([*frames, b""])


def test_the_error_names_the_request_if_the_header_does() -> None:
    magic, told, cache, state = as_sent(SOUND)
    with pytest.raises(WireError, match=r"'cache0' of a 'part' message has 47 bytes.* 48") as e:
        decode([magic, told, cache[:-1], state])
    assert e.value.fields == SOUND.fields


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_corruption_gives_no_other_error(data: Any) -> None:
    frames = as_sent(SOUND)
    number = data.draw(st.integers(0, 1), label="frame")
    frame = bytearray(frames[number])
    for _ in range(data.draw(st.integers(1, 3), label="bytes")):
        frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[number] = bytes(frame)
    try:
        decode(frames)
    except WireError:
        assert True


@settings(max_examples=60, deadline=None)
@given(st.lists(st.binary(max_size=40), max_size=4))
def test_garbage_is_refused(frames: list[bytes]) -> None:
    with pytest.raises(WireError):
        decode(frames)


def header(**changes: Any) -> bytes:
    return json.dumps({"kind": "part", "fields": {}, "tensors": [], **changes}).encode()


@settings(max_examples=60, deadline=None)
@given(JSON, JSON, JSON)
def test_any_header_is_read_or_refused(kind: Any, fields: Any, forms: Any) -> None:
    frames = [MAGIC, header(kind=kind, fields=fields, tensors=forms)]
    try:
        assert decode(frames).kind == kind
    except WireError:
        assert not (isinstance(kind, str) and isinstance(fields, dict) and forms == [])


@pytest.mark.parametrize(
    "shape",
    [[-1], [True], [1.0], ["1"], "1", None, [2**70], [0, 2**70], [2**40, 2**40], [0, 1 << 63]],
    ids=str,
)
def test_a_shape_that_cannot_be_is_refused(shape: Any) -> None:
    with pytest.raises(WireError):
        decode([MAGIC, header(tensors=[["x", "float32", shape]]), b""])


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 10_000, "\ud800", "NaN", "{}", ""])
def test_a_header_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(WireError):
        decode([MAGIC, text.encode(errors="surrogatepass")])


def test_another_protocol_is_refused_by_name() -> None:
    with pytest.raises(WireError, match=r"begins with b'specplug/2'; expected b'specplug/1'"):
        decode([b"specplug/2", header()])


class Bomb:
    """Fails the test wherever it is unpickled."""

    def __reduce__(self) -> Any:
        return pytest.fail, ("it was unpickled",)


def test_nothing_is_unpickled() -> None:
    bomb = pickle.dumps(Bomb())
    with pytest.raises(WireError):
        decode([bomb])
    with pytest.raises(WireError):
        decode([MAGIC, bomb])
    with pytest.raises(WireError, match="cut short"):
        decode([MAGIC, header(tensors=[["x", "float32", [1]]]), bomb])
    size = [len(bomb)]
    arrived = decode([MAGIC, header(tensors=[["x", "uint8", size]]), bomb])
    assert bytes(arrived.tensors["x"].tolist()) == bomb
