"""A peer that registers as it should and then sends nonsense harms no request but in time.

The peer is a raw socket of ZeroMQ. A request that it spoils is done by a sound instance, or ends
with an error that says what came; the decode instance goes on.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
import zmq
from raw_peer import present
from shallow_target import shallow_target

from conftest import Plain, Site, check_whole, finish, step_until
from specplug import LLM, SamplingParams
from specplug.disagg.wire_message import MAGIC, WireMessage, decode, encode

PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=5)
Frames = list[Any]


class FalsePeer:
    """Registers, and answers each job by a script.

    Args:
        answer: (job's name, number of tokens, the site) -> the frames of its messages.
    """

    def __init__(self, site: Site, answer: Callable[[str, int, Site], list[Frames]]) -> None:
        self._site = site
        self._answer = answer
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        present(self._socket)
        self._socket.setsockopt(zmq.ROUTING_ID, uuid.uuid4().hex.encode())
        self._socket.connect(site.address)
        self.jobs = 0
        self.session: Any = 0
        before = site.llm.stats()["prefill_instances"]
        self.register()
        step_until(site.llm, lambda: site.llm.stats()["prefill_instances"] > before)

    def register(self) -> None:
        assert self._site.llm.decode_instance is not None
        identity = self._site.llm.decode_instance.identity.as_fields()
        self.say(encode(WireMessage("register", {"session": self.session, "identity": identity})))

    def say(self, frames: Frames) -> None:
        self._socket.send_multipart(frames)

    def step(self) -> None:
        """Answer what has come."""
        while self._socket.poll(0):
            frames = self._socket.recv_multipart()
            self.say([b"beat"])
            if frames != [b"beat"] and (message := decode(frames)).kind == "prefill":
                self.jobs += 1
                name, tokens = message.fields["job"], len(message.tensors["tokens"])
                for answer in self._answer(name, tokens, self._site):
                    self.say(answer)

    def close(self) -> None:
        self._socket.close()
        self._context.term()


def caches(site: Site, size: int) -> dict[str, Any]:
    assert site.llm.decode_instance is not None
    form = site.llm.decode_instance.form
    return {
        f"cache{number}": torch.zeros(
            shape.num_layers, 2, size, shape.num_kv_heads, shape.head_dim, dtype=form.dtype
        )
        for number, shape in enumerate(form.shapes)
    }


def part(job: Any, start: Any, end: Any, tensors: dict[str, Any], **fields: Any) -> Frames:
    return encode(WireMessage("part", {"job": job, "start": start, "end": end, **fields}, tensors))


def last(job: str, size: int, site: Site, **changes: Any) -> list[Frames]:
    """The one part that a prompt of ``size`` tokens could come in, but for the changes."""
    tensors = caches(site, size) | changes.pop("tensors", {})
    fields = {"token": 3, **changes}
    return [part(job, fields.pop("start", 0), fields.pop("end", size), tensors, **fields)]


def without_a_frame(job: str, size: int, site: Site) -> list[Frames]:
    return [last(job, size, site)[0][:-1]]


def cut_short(job: str, size: int, site: Site) -> list[Frames]:
    *frames, tensor = last(job, size, site)[0]
    return [[*frames, bytes(tensor)[:-5]]]


def garbage(job: str, size: int, site: Site) -> list[Frames]:
    return [[MAGIC, b"\xff{" + job.encode(), b"x" * size]]


def other_protocol(job: str, size: int, site: Site) -> list[Frames]:
    return [[b"specplug/2", *last(job, size, site)[0][1:]]]


def impossible_shape(job: str, size: int, site: Site) -> list[Frames]:
    tensors = [["cache0", "float64", [0, 2**70]]]
    header = {"kind": "part", "fields": {"job": job}, "tensors": tensors}
    return [[MAGIC, json.dumps(header).encode(), b""]]


def no_job(job: str, size: int, site: Site) -> list[Frames]:
    return [encode(WireMessage("part", {"start": 0, "end": size}))]


def wrong_kind(job: str, size: int, site: Site) -> list[Frames]:
    return [encode(WireMessage("received", {"job": job}))]


def wrong_shape(job: str, size: int, site: Site) -> list[Frames]:
    return last(job, size, site, tensors={"cache0": caches(site, size + 1)["cache0"]})


def wrong_dtype(job: str, size: int, site: Site) -> list[Frames]:
    return last(job, size, site, tensors={"cache0": caches(site, size)["cache0"].float()})


def no_draft_cache(job: str, size: int, site: Site) -> list[Frames]:
    tensors = {"cache0": caches(site, size)["cache0"]}
    return [part(job, 0, size, tensors, token=3)]


def out_of_order(job: str, size: int, site: Site) -> list[Frames]:
    whole = caches(site, size)
    ends = {name: tensor[:, :, size // 2 :] for name, tensor in whole.items()}
    starts = {name: tensor[:, :, : size // 2] for name, tensor in whole.items()}
    return [
        part(job, size // 2, size, ends, token=3),
        part(job, 0, size // 2, starts),
    ]


def too_much(job: str, size: int, site: Site) -> list[Frames]:
    return last(job, size + 1, site)


def too_little(job: str, size: int, site: Site) -> list[Frames]:
    return last(job, size - 1, site)


def wrong_token(token: Any) -> Callable[..., list[Frames]]:
    def answer(job: str, size: int, site: Site) -> list[Frames]:
        return last(job, size, site, token=token)

    answer.__name__ = f"token {token!r}"
    return answer


def output_of_nobody(job: str, size: int, site: Site) -> list[Frames]:
    return last(job, size, site, tensors={"output.colours": torch.zeros(size, 3)})


def failed(job: str, size: int, site: Site) -> list[Frames]:
    return [encode(WireMessage("failed", {"job": job, "error": "no will"}))]


SPOILS: list[tuple[Callable[..., list[Frames]], str]] = [
    (without_a_frame, "tensors; its header says"),
    (cut_short, "it was cut short"),
    (garbage, "header cannot be read"),
    (other_protocol, "expected b'specplug/1'"),
    (impossible_shape, "header cannot be read"),
    (no_job, "'part' message makes no sense: KeyError"),
    (wrong_kind, "expected register, part, .*leave"),
    (wrong_shape, "cache0 is .* expected"),
    (wrong_dtype, "cache0 is .*float32; expected .*float64"),
    (no_draft_cache, "KeyError.*cache1"),
    (out_of_order, "expected them from 0 on"),
    (too_much, "expected them from 0 on, up to"),
    (too_little, "the last part ends at"),
    (wrong_token(-1), "token -1; expected an integer from 0 to"),
    (wrong_token(4096), "token 4096; expected"),
    (wrong_token("3"), "token '3'; expected"),
    (wrong_token(True), "token True; expected"),
    (wrong_token(None), "token None; expected"),
    (output_of_nobody, r"the last part brings \['colours'\]; expected \[\]"),
    (failed, "the prefill instance said: no will"),
]


def open_site(stack: ExitStack, folder: Any) -> Site:
    options: dict[str, Any] = {**shallow_target().options("EAGLE3"), "dtype": "float64"}
    llm = LLM(
        disaggregation="decode",
        disaggregation_address="tcp://127.0.0.1:*",
        disaggregation_timeout=20,
        **options,
    )
    stack.enter_context(llm)
    return Site(llm, options, folder, stack)


@pytest.fixture(scope="module")
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A decode instance without a sound prefill instance."""
    with ExitStack() as stack:
        yield open_site(stack, tmp_path_factory.mktemp("lonely"))


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A decode instance with one."""
    with ExitStack() as stack:
        site = open_site(stack, tmp_path_factory.mktemp("served"))
        site.registered()
        yield site


def finish_with(site: Site, peer: FalsePeer) -> dict[str, Any]:
    """Step both until all requests have ended; their outputs by name."""
    ended = {}

    def step() -> bool:
        peer.step()
        return not site.llm.has_unfinished_requests

    for output in step_until(site.llm, step, "the end of all requests"):
        if output.finished:
            ended[output.request_id] = output
    return ended


def part_with(site: Site, peer: FalsePeer) -> None:
    """Have the peer take leave: that a connection is gone is noticed half a second later."""
    before = site.llm.stats()["prefill_instances"]
    peer.say(encode(WireMessage("leave", {})))
    step_until(site.llm, lambda: site.llm.stats()["prefill_instances"] < before, "the leave")
    peer.close()
    check_whole(site.llm)


@pytest.mark.parametrize(
    ("answer", "why"), SPOILS, ids=lambda value: getattr(value, "__name__", "")
)
def test_what_makes_no_sense_ends_with_what_it_was(
    lonely: Site, shallow_plain: Plain, answer: Callable[..., Any], why: str, caplog: Any
) -> None:
    peer = FalsePeer(lonely, answer)
    lonely.llm.add_request(shallow_plain.ids("import os\nimport re\n"), PARAMS)
    (output,) = finish_with(lonely, peer).values()
    assert output.finish_reason == "error"
    assert output.token_ids == ()
    with pytest.raises(AssertionError, match=f"prefill failed 3 times; the last time .*{why}"):
        raise AssertionError(output.error)
    assert peer.jobs == 3
    part_with(lonely, peer)


@pytest.mark.parametrize("answer", [cut_short, garbage, out_of_order, wrong_token(-1), failed])
def test_a_sound_instance_does_what_another_spoils(
    served: Site, shallow_plain: Plain, answer: Callable[..., Any]
) -> None:
    peer = FalsePeer(served, answer)
    prompts = [shallow_plain.ids(text) for text in ("import os\n", "class Stack:\n", "def f(x):\n")]
    before = served.transfers
    names = [served.llm.add_request(prompt, PARAMS) for prompt in prompts]
    outputs = finish_with(served, peer)
    for prompt, name in zip(prompts, names, strict=True):
        assert outputs[name].token_ids == shallow_plain.output(prompt, PARAMS).token_ids
    assert peer.jobs >= 1
    assert served.transfers["tries_again"] == before["tries_again"] + peer.jobs
    part_with(served, peer)


def test_a_peer_that_says_nothing_but_that_it_lives_is_given_up(
    shallow_plain: Plain, tmp_path: Any
) -> None:
    with ExitStack() as stack:
        site = open_site(stack, tmp_path)
        site.llm.decode_instance.timeout = 0.5
        peer = FalsePeer(site, lambda job, size, site: [])
        stack.callback(peer.close)
        site.llm.add_request(shallow_plain.ids("import os\n"), PARAMS)
        (output,) = finish_with(site, peer).values()
        assert output.error is not None
        assert "the prefill instance gave nothing for 0.5 s" in output.error


NONSENSE = [
    WireMessage("register"),
    WireMessage("register", {"session": "x", "identity": {}}),
    WireMessage("register", {"session": float("inf"), "identity": {}}),
    WireMessage("register", {"session": None, "identity": None}),
    WireMessage("register", {"session": 0, "identity": []}),
    WireMessage("register", {"session": 7, "identity": {"version": "?"}}),
    WireMessage("part"),
    WireMessage("part", {"job": []}),
    WireMessage("part", {"job": {}}),
    WireMessage("failed", {"job": None}),
    WireMessage("failed"),
    WireMessage("leave", {"job": 3}),
    WireMessage("cancel", {"job": "x"}),
    WireMessage(""),
]


@pytest.mark.parametrize("registered", [True, False])
def test_nonsense_about_nothing_is_let_pass(
    served: Site, shallow_plain: Plain, registered: bool
) -> None:
    """Before a peer has registered again after its leave, or each time after it has."""
    peer = FalsePeer(served, failed)
    for message in NONSENSE:
        if registered and message is not NONSENSE[0]:
            peer.register()
        peer.say(encode(message))
    peer.close()
    step_until(served.llm, lambda: served.llm.stats()["prefill_instances"] == 1, "its end")
    prompt = shallow_plain.ids("import os\n")
    served.llm.add_request(prompt, PARAMS)
    (output,) = finish(served.llm).values()
    assert output.token_ids == shallow_plain.output(prompt, PARAMS).token_ids
