"""Both sides in the test's own process, in moments that are rare elsewhere."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from shutil import copytree
from typing import Any

import numpy as np
import pytest
import torch
from test_false_peers import FalsePeer, caches, finish_with, last, part_with

from conftest import Pair, Plain, Site, check_whole, finish, step_until
from specplug import LLM, PluginError, SamplingParams, UsageError, hookimpl
from specplug.algorithm import ASSETS
from specplug.disagg.identity import HandshakeError
from specplug.disagg.wire_message import WireError, WireMessage, decode, encode
from specplug.disagg.zmq_transport import ZmqTransport
from specplug.engine import kv_transfer
from specplug.speculative.plain import Plain as NoDraft

PARAMS = SamplingParams(max_tokens=12, temperature=0.7, seed=5)
ANY = {"disaggregation_address": "tcp://127.0.0.1:*", "dtype": "float64"}


@pytest.fixture
def lonely(tmp_path: Path) -> Iterator[Site]:
    """A decode instance without a prefill instance, under EAGLE3."""
    with LLM(disaggregation="decode", speculative_algorithm="EAGLE3", **ANY) as llm:
        yield Site(llm, {}, tmp_path, None)  # type: ignore[arg-type]


def test_a_large_prefill_travels_in_slices(
    plain: Plain, long_prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[WireMessage] = []
    send = ZmqTransport.send

    def note(self: ZmqTransport, peer: str, message: WireMessage) -> None:
        sent.append(message)
        send(self, peer, message)

    monkeypatch.setattr(ZmqTransport, "send", note)
    monkeypatch.setattr(kv_transfer, "_SLICE_BYTES", 200_000)
    settings = {"speculative_algorithm": "EAGLE3", "chunked_prefill_size": None}
    with LLM(disaggregation="both", dtype="float64", **settings) as llm:
        (output,) = llm.generate([long_prompt], PARAMS)
        assert output.token_ids == plain.output(long_prompt, PARAMS).token_ids
        check_whole(llm)
    parts = [message for message in sent if message.kind == "part"]
    assert len(parts) > 5
    sizes = [sum(t.numel() * t.element_size() for t in p.tensors.values()) for p in parts]
    assert max(sizes) < 300_000
    assert ["token" in part.fields for part in parts] == [False] * (len(parts) - 1) + [True]


def test_another_configuration_is_another_model(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    copytree(ASSETS / "tiny_code", folder)
    config = json.loads((folder / "config.json").read_text())
    config.setdefault("rope_parameters", {"rope_type": "default"})["rope_theta"] = 500.0
    (folder / "config.json").write_text(json.dumps({**config, "rope_theta": 500.0}))
    with LLM(disaggregation="decode", **ANY) as llm:
        address = llm.effective_config["disaggregation_address"]
        other = {"disaggregation": "prefill", "dtype": "float64"}
        with (
            LLM(folder, disaggregation_address=address, **other) as prefill,
            pytest.raises(HandshakeError, match="model is"),
        ):
            step_until(llm, lambda: prefill.step() != [])
        with LLM(disaggregation_address=address, **other) as prefill:  # the same is let in
            step_until(llm, lambda: bool(prefill.step() or llm.stats()["prefill_instances"]))


def test_a_hook_that_fails_loses_no_request_that_came_with_it(plain: Plain) -> None:
    class Failing(NoDraft):
        @hookimpl
        def on_request_finished(self, runtime: Any, report: Any) -> None:
            if report.finish_reason == "length":
                raise RuntimeError("a hook fails")

    prompts = [plain.ids(text) for text in ("import os\n", "class A:\n", "def f(x):\n", "for i")]
    with Pair.open({}, decode=Failing(), prefill="NONE") as pair:
        remote = pair.decode.decode_instance
        assert remote is not None
        names = [pair.decode.add_request(p, SamplingParams(max_tokens=1)) for p in prompts]
        deadline = time.monotonic() + 30
        while pair.prefill.stats()["requests"].get("length", 0) < len(prompts):
            assert time.monotonic() < deadline
            pair.prefill.prefill_loop.step(wait=False)
            if remote.transfers.sent < len(prompts):
                assert remote.poll(0, wait=True) == []
        time.sleep(0.2)  # so that all of them come with the same step
        ended: set[str] = set()
        while pair.decode.has_unfinished_requests:
            assert time.monotonic() < deadline
            with suppress(PluginError):
                ended |= {output.request_id for output in pair.decode.step() if output.finished}
        assert ended == set(names)
        check_whole(pair.decode)


def test_job_unknown_to_its_instance_is_sent_again(lonely: Site, plain: Plain) -> None:
    lonely.llm.decode_instance.timeout = 0.3
    peer = FalsePeer(lonely, lambda job, size, site: [])
    prompt = plain.ids("import os\n")
    lonely.llm.add_request(prompt, PARAMS)
    told = 0.0

    def working() -> bool:
        nonlocal told
        peer.step()
        if time.monotonic() - told > 0.05:
            told = time.monotonic()
            peer.say(encode(WireMessage("working", {"jobs": []})))
        return peer.jobs > 1

    step_until(lonely.llm, working, "the second try")
    assert lonely.transfers["tries_again"] == 1
    peer.close()


def test_an_instance_that_one_refuses_serves_the_others(plain: Plain, caplog: Any) -> None:
    with (
        LLM(disaggregation="decode", **ANY) as fitting,
        LLM(disaggregation="decode", page_size=8, **ANY) as other,
    ):
        addresses = [llm.effective_config["disaggregation_address"] for llm in (fitting, other)]
        where = {"disaggregation_address": ",".join(addresses), "dtype": "float64"}
        with LLM(disaggregation="prefill", **where) as prefill:
            prompt = plain.ids("import os\n")
            fitting.add_request(prompt, PARAMS)
            outputs = []

            def step() -> bool:
                other.step()
                prefill.step()
                refused = other.stats()["transfers"]["refused"] > 0
                return refused and not fitting.has_unfinished_requests

            outputs = step_until(fitting, step, "the refusal and the answer")
            assert outputs[-1].token_ids == plain.output(prompt, PARAMS).token_ids
    assert "page_size is 8 at the decode instance and 16 at the prefill instance" in caplog.text


def logprobs(*ids: int) -> dict[str, torch.Tensor]:
    return {
        "output.logprobs": torch.zeros(1, len(ids), dtype=torch.float64),
        "output.logprob_ids": torch.tensor([ids]),
        "output.logprob_ranks": torch.ones(1, len(ids), dtype=torch.int64),
    }


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({}, r"brings \[\]; expected \['logprob_ids', 'logprob_ranks', 'logprobs'\]"),
        ({"output.logprobs": logprobs(3, 4)["output.logprobs"]}, r"brings \['logprobs'\]; exp"),
        (logprobs(3), r"output logprobs is \(1, 1\) torch.float64; expected \(1, 2\) torch.float"),
        (logprobs(3, 4, 5), r"output logprobs is \(1, 3\) torch.float64; expected \(1, 2\)"),
        (logprobs(3, 4) | {"output.logprobs": torch.zeros(1, 2)}, r"\) torch.float32; expected"),
        (logprobs(4, 3), "the logprobs cannot be those of token 3"),
        (logprobs(3, -1), "the logprobs cannot be those of token 3"),
        (logprobs(3, 1 << 40), "the logprobs cannot be those of token 3"),
    ],
    ids=["none", "some", "fewer", "more", "dtype", "other token", "negative", "out of vocabulary"],
)
def test_outputs_of_a_false_form_end_the_request_alone(
    lonely: Site, plain: Plain, tensors: dict[str, torch.Tensor], why: str
) -> None:
    def answer(job: str, size: int, site: Site) -> list[Any]:
        return last(job, size, site, tensors=caches(site, size) | tensors)

    peer = FalsePeer(lonely, answer)
    wanted = SamplingParams(max_tokens=4, logprobs=1)
    lonely.llm.add_request(plain.ids("import os\n"), wanted)
    (output,) = finish_with(lonely, peer).values()
    assert re.search(why, output.error or ""), output.error
    part_with(lonely, peer)


def test_a_draft_state_out_of_the_vocabulary_changes_no_token(lonely: Site, plain: Plain) -> None:
    def answer(job: str, size: int, site: Site) -> list[Any]:
        spec = site.llm.engine.runtime.worker.state_spec()
        state = {
            "state.hidden_states": torch.zeros(spec["hidden_states"].shape, dtype=torch.float64),
            "state.tokens": torch.tensor([10**9]),
            "state.scores": torch.zeros(1, dtype=torch.float64),
        }
        return last(job, size, site, tensors=caches(site, size) | state)

    peer = FalsePeer(lonely, answer)
    lonely.llm.add_request(plain.ids("import os\n"), PARAMS)
    (output,) = finish_with(lonely, peer).values()
    assert output.finish_reason == "length"
    part_with(lonely, peer)


def test_what_cannot_be_told_ends_its_request_alone(plain: Plain) -> None:
    with pytest.raises(UsageError, match=r"return_routed_experts=.*expected True or False"):
        SamplingParams(return_routed_experts=np.False_)  # type: ignore[arg-type]
    with LLM(disaggregation="both", dtype="float64") as llm:
        (strange,) = llm.prepare(plain.ids("import os\n"), SamplingParams(max_tokens=4))
        object.__setattr__(strange.params, "temperature", np.float32(0.5))  # no type that JSON has
        llm.submit(strange)
        sound = llm.add_request(plain.ids("import os\n"), PARAMS)
        outputs = finish(llm)
        assert "cannot be told" in (outputs[strange.request_id].error or "")
        expected = plain.output(plain.ids("import os\n"), PARAMS)
        assert outputs[sound].token_ids == expected.token_ids


@pytest.mark.parametrize("shape", [[0, 2**32, 2**31], [0, *[2**31] * 3], [1] * 9, [2**31] * 8])
def test_a_shape_that_no_tensor_can_have_gives_no_other_error(shape: list[int]) -> None:
    header = {"kind": "part", "fields": {}, "tensors": [["cache0", "float64", shape]]}
    data = b"" if 0 in shape else b"x" * 8
    with suppress(WireError):
        assert (
            0 in decode([b"specplug/1", json.dumps(header).encode(), data]).tensors["cache0"].shape
        )


def test_a_closed_transport_lets_messages_pass() -> None:
    transport = ZmqTransport.bind("tcp://127.0.0.1:*")
    transport.close()
    transport.send("00", WireMessage("who"))
    transport.close()


def test_what_a_failed_start_has_opened_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(disaggregation="decode", **ANY) as llm:
        address = llm.effective_config["disaggregation_address"]
    where = {"disaggregation_address": address, "dtype": "float64", "disaggregation": "decode"}
    with monkeypatch.context() as broken:
        broken.setattr("specplug.run.Engine", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            LLM(**where)
    LLM(**where).close()
    with pytest.raises(UsageError, match="disaggregation_address='nowhere'"):
        LLM(disaggregation="prefill", disaggregation_address=f"{address},nowhere")
    with pytest.raises(UsageError, match="without disaggregation"):
        LLM(disaggregation_address=address)


def test_counts_begin_anew(plain: Plain) -> None:
    with LLM(disaggregation="both", dtype="float64") as llm:
        llm.generate([plain.ids("import os\n")], PARAMS)
        assert llm.stats()["transfers"]["received"] == 1
        llm.reset_stats()
        stats = llm.stats()
        assert stats["transfers"]["received"] == stats["received"] == 0
        assert stats["prefill_instances"] == 1
        llm.flush_cache()
        for side in (llm, llm.partner):
            assert side is not None
            assert side.occupancy["cached"] == 0
