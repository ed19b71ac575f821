"""Instances end, hang and come back, connections are cut: no request is lost, and no page.

Each fault is caused for real, on processes and sockets. Where a request can go on, its tokens are
those of NONE; where it cannot, it ends with an error that says why.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import zmq
from child_instances import DEADLINE, Instance, check_whole, decode, prefill
from raw_peer import expect_no_key
from shallow_target import shallow_target

from conftest import Pair, Plain, Site, finish, step_until
from specplug import LLM, RequestOutput, SamplingParams
from specplug.disagg.backoff import Backoff
from specplug.disagg.wire_message import decode as read

PARAMS = SamplingParams(max_tokens=24, temperature=0.7, seed=5)
OpenSite = Callable[..., Site]


def one_and_a_half_parts(site: Site) -> int:
    """Bytes."""
    return site.llm.engine.steps.kv.bytes_per_slot * 12


def came(site: Site) -> int:
    """Positions that have come so far of the request that is away."""
    assert site.llm.decode_instance is not None
    return sum(incoming.end for incoming in site.llm.decode_instance.away.values())


def before(site: Site, prompt: tuple[int, ...], others: int = 0) -> None:
    """A prefill instance is gone with a request of which it has sent nothing."""
    instance = site.registered()  # the first one, which gets the request
    for _ in range(others):
        site.registered()
    instance.halt()
    site.llm.add_request(prompt, PARAMS)
    step_until(site.llm, lambda: site.transfers["sent"] == 1)
    assert came(site) == 0
    instance.kill()


def during(site: Site, prompt: tuple[int, ...], others: int = 0) -> None:
    """A prefill instance is gone with a request of which it has sent the first part and half of
    the second."""
    proxy = site.proxy()
    instance = site.registered(proxy.address)
    for _ in range(others):
        site.registered()
    proxy.hold(after=one_and_a_half_parts(site))
    site.llm.add_request(prompt, PARAMS)
    step_until(site.llm, lambda: site.transfers["sent"] == 1)
    proxy.wait_until_held(DEADLINE)
    step_until(site.llm, lambda: came(site) > 0, "the first part")
    instance.kill()
    proxy.cut()


Fault = Callable[..., None]
FAULTS = pytest.mark.parametrize("fault", [before, during])


def check_end(site: Site, shallow_plain: Plain, prompt: tuple[int, ...], began: float) -> None:
    """Wait for the one request's end; it is as it ought to be, and nothing is left behind."""
    (output,) = finish(site.llm).values()
    print(f"recovered in {time.monotonic() - began:.2f} s")
    assert output.error is None
    assert output.token_ids == shallow_plain.output(prompt, PARAMS).token_ids
    assert output.finish_reason == shallow_plain.output(prompt, PARAMS).finish_reason
    check_whole(site.llm)


@FAULTS
def test_a_lost_prefill_is_done_by_another_instance(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...], fault: Fault
) -> None:
    site = open_site()
    fault(site, long_prompt, others=1)
    check_end(site, shallow_plain, long_prompt, time.monotonic())
    assert site.transfers["tries_again"] == site.transfers["lost"] == 1


@FAULTS
def test_a_lost_prefill_waits_for_an_instance_that_comes(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...], fault: Fault
) -> None:
    site = open_site()
    fault(site, long_prompt)
    began = time.monotonic()
    step_until(site.llm, lambda: site.transfers["lost"] == 1, "the loss")
    assert site.llm.has_unfinished_requests
    newcomer = site.prefill()
    check_end(site, shallow_plain, long_prompt, began)
    assert site.transfers["tries_again"] == 1
    newcomer.hear()


@FAULTS
def test_a_lost_prefill_that_nobody_does_ends_with_the_reason(
    open_site: OpenSite, long_prompt: tuple[int, ...], fault: Fault
) -> None:
    site = open_site(timeout=1.5)
    fault(site, long_prompt)
    began = time.monotonic()
    (output,) = finish(site.llm).values()
    print(f"told in {time.monotonic() - began:.2f} s")
    assert output.finish_reason == "error"
    assert output.error is not None
    assert f"no prefill instance has registered at {site.address} for 1.5 s" in output.error
    assert "start one with --disaggregation-mode prefill" in output.error
    assert site.transfers["failed"] == 1
    check_whole(site.llm)


def test_request_without_an_instance_ends_with_the_reason(
    open_site: OpenSite,
) -> None:
    site = open_site(timeout=0.3)
    site.llm.add_request([3, 4, 5], PARAMS)
    (output,) = finish(site.llm).values()
    assert output.error is not None
    assert "no prefill instance has registered" in output.error


def test_instance_gone_after_the_transfer_is_not_missed(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...]
) -> None:
    site = open_site()
    instance = site.registered()
    site.llm.add_request(long_prompt, PARAMS)
    step_until(site.llm, lambda: site.transfers["received"] == 1, "the transfer")
    instance.kill()
    check_end(site, shallow_plain, long_prompt, time.monotonic())
    assert site.transfers["tries_again"] == 0
    step_until(site.llm, lambda: site.transfers["lost"] == 1, "the loss")
    assert site.llm.stats()["prefill_instances"] == 0


def test_an_instance_that_takes_leave_is_not_waited_for(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...]
) -> None:
    site = open_site()
    instance = site.registered()
    instance.pipe.send("leave")
    assert instance.wait() == 0
    step_until(site.llm, lambda: site.transfers["lost"] == 1, "its leave")
    site.llm.add_request(long_prompt, PARAMS)
    began = time.monotonic()
    site.prefill()
    check_end(site, shallow_plain, long_prompt, began)


def test_an_instance_that_hangs_is_given_up(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...]
) -> None:
    """The other one gets what it has, and it may come back."""
    site = open_site(timeout=1.0)
    first, _ = site.registered(), site.registered()
    first.halt()
    site.llm.add_request(long_prompt, PARAMS)
    began = time.monotonic()
    check_end(site, shallow_plain, long_prompt, began)
    assert site.transfers["tries_again"] == 1, "the one that hangs got it again"
    first.resume()
    step_until(site.llm, lambda: site.llm.stats()["prefill_instances"] == 2, "its return")


def test_connection_cut_in_a_message_costs_only_time(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...]
) -> None:
    """The same instance registers again and does it once more; nothing of the half is used.

    The proxy cuts where it counts the byte, however busy the machine is. Where that is so busy that
    signs of life come late, a connection is lost once more, and what was away is tried again.
    """
    site = open_site()
    proxy = site.proxy()
    instance = site.registered(proxy.address)
    for number, prompt in enumerate((long_prompt, long_prompt[1:]), 1):
        tries, lost = site.transfers["tries_again"], site.transfers["lost"]
        proxy.cut_after(one_and_a_half_parts(site))
        site.llm.add_request(prompt, PARAMS)
        check_end(site, shallow_plain, prompt, time.monotonic())
        proxy.wait_until_cut(0)
        assert site.transfers["tries_again"] > tries
        assert site.transfers["lost"] > lost
        assert site.transfers["sent"] == number + site.transfers["tries_again"]
        assert site.transfers["received"] == number
        assert site.transfers["failed"] == 0
    assert instance.hear() >= 1


def test_an_abort_while_away_gives_the_pages_back(
    open_site: OpenSite, shallow_plain: Plain, long_prompt: tuple[int, ...]
) -> None:
    site = open_site()
    instance = site.registered()
    prompt = long_prompt * 4
    name = site.llm.add_request(prompt, PARAMS)
    step_until(site.llm, lambda: came(site) > 0, "the first part")
    instance.halt()
    assert came(site) < len(prompt)
    site.llm.abort(name)
    output = finish(site.llm)[name]
    assert (output.finish_reason, output.token_ids) == ("abort", ())
    check_whole(site.llm)
    instance.resume()
    assert instance.hear() == 1, "its pages were looked at when it was idle"
    site.llm.add_request(long_prompt, PARAMS)
    check_end(site, shallow_plain, long_prompt, time.monotonic())


def test_an_abort_while_away_ends_the_prefill_too(long_prompt: tuple[int, ...]) -> None:
    with Pair.open({"chunked_prefill_size": 8}, decode="NONE", prefill="NONE") as pair:
        remote, loop = pair.decode.decode_instance, pair.prefill.prefill_loop
        assert remote is not None
        assert loop is not None
        prefilling = loop.instance
        name = pair.decode.add_request(long_prompt, PARAMS)
        while not any(incoming.end for incoming in remote.away.values()):
            pair.prefill.prefill_loop.step(wait=False)
            pair.decode.step()
        pair.decode.abort(name)
        finish(pair.decode)
        deadline = time.monotonic() + DEADLINE
        while prefilling.has_work:
            assert time.monotonic() < deadline, "it was not told"
            prefilling.receive(wait=True)
        while pair.prefill.has_unfinished_requests:
            pair.prefill.step()
        assert pair.prefill.stats()["requests"] == {"abort": 1}
        check_whole(pair.prefill)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def test_a_decode_instance_that_is_started_again_is_served(
    shallow_plain: Plain, long_prompt: tuple[int, ...], tmp_path: Path
) -> None:
    """Killed with a request away and one decoding: the prefill instance registers again by itself,
    and what it had been asked for holds no page there."""
    address = f"tcp://127.0.0.1:{free_port()}"
    options: dict[str, Any] = {
        **shallow_target().options("EAGLE3"),
        "dtype": "float64",
        "chunked_prefill_size": 8,
        "disaggregation_address": address,
    }
    settings = {"max_tokens": 24, "temperature": 0.7, "seed": 5}
    expected = shallow_plain.output(long_prompt, PARAMS)
    instances = []
    try:
        prefilling = Instance(prefill, tmp_path / "prefill.log", **options)
        instances.append(prefilling)
        for life in range(2):
            began = time.monotonic()
            decoding = Instance(decode, tmp_path / f"decode{life}.log", **options)
            instances.append(decoding)
            assert decoding.hear() == address
            decoding.pipe.send((long_prompt, settings))
            assert decoding.hear() == (expected.token_ids, expected.finish_reason, None)
            print(f"life {life}: start to first output in {time.monotonic() - began:.2f} s")
            decoding.pipe.send((long_prompt[3:] * 2, settings))
            decoding.pipe.send((long_prompt[9:] * 2, settings))
            decoding.kill()
        assert prefilling.hear() == "ready"
        assert prefilling.hear() >= 1, "its pages were looked at when it was idle"
    finally:
        for instance in instances:
            instance.kill()


def test_what_an_instance_cannot_do_ends_with_what_it_said(
    open_site: OpenSite, long_prompt: tuple[int, ...]
) -> None:
    site = open_site()
    site.registered(max_model_len=32)
    site.llm.add_request(long_prompt, PARAMS)
    site.llm.add_request([3, 4, 5], PARAMS)
    outputs = list(finish(site.llm).values())
    (failed,) = [output for output in outputs if output.error is not None]
    assert failed.prompt_token_ids == long_prompt
    assert "prefill failed 3 times" in failed.error
    assert "the prefill instance said: " in failed.error
    assert str(len(long_prompt)) in failed.error
    check_whole(site.llm)


def test_a_step_that_fails_at_the_prefill_instance_is_told(shallow_plain: Plain) -> None:
    """Its requests end there, the decode instance tries them again, and goes on."""
    failures = [RuntimeError("in the last layer")]

    def fail_once(module: Any, args: Any) -> None:
        if failures:
            raise failures.pop()

    options = shallow_target().options("NONE")
    with LLM(**options, dtype="float64", disaggregation="both") as llm:
        assert llm.partner is not None
        llm.partner.engine.steps.runner.target.capture.layers[-1].register_forward_pre_hook(
            fail_once
        )
        prompts = [shallow_plain.ids("import os\n"), shallow_plain.ids("class ")]
        began = time.monotonic()
        for prompt, output in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
            assert output.token_ids == shallow_plain.output(prompt, PARAMS).token_ids
        assert time.monotonic() - began < 25, "it was not told: the timeout did it"
        lost = llm.partner.stats()["requests"]["error"]  # those of the step: one, or both
        assert llm.stats()["transfers"]["tries_again"] == lost > 0
        check_whole(llm)
        check_whole(llm.partner)


def test_a_step_that_fails_here_ends_what_is_away_too(shallow_plain: Plain) -> None:
    with LLM(
        **shallow_target().options("NONE"),
        dtype="float64",
        max_running_requests=1,
        disaggregation="both",
        disable_cuda_graph=True,  # a failure while a graph is recorded is told, and survived
    ) as llm:
        failures = [RuntimeError("in the last layer")]

        def fail_once(module: Any, args: Any) -> None:
            if failures:
                raise failures.pop()

        llm.engine.steps.runner.target.capture.layers[-1].register_forward_pre_hook(fail_once)
        prompts = [shallow_plain.ids(text) for text in ("import os\n", "class ", "x")]
        names = {llm.add_request(prompt, PARAMS) for prompt in prompts}
        ended: dict[str, RequestOutput] = {}
        with pytest.raises(RuntimeError, match="in the last layer"):
            finish(llm)
        ended.update({o.request_id: o for o in llm.step() if o.finished})
        assert ended.keys() == names
        assert {o.error for o in ended.values()} == {"RuntimeError: in the last layer"}
        for prompt, output in zip(prompts, llm.generate(prompts, PARAMS), strict=True):
            assert output.token_ids == shallow_plain.output(prompt, PARAMS).token_ids
        check_whole(llm)
        check_whole(llm.partner)


def test_delays_grow_and_jitter() -> None:
    backoff = Backoff(first=0.1, greatest=5.0)
    delays = [backoff.next() for _ in range(60)]
    for number, delay in enumerate(delays):
        most = min(0.1 * 2**number, 5.0)
        assert most / 2 <= delay <= most
    assert len(set(delays)) == len(delays)
    assert [Backoff().next() for _ in range(3)] != [Backoff().next() for _ in range(3)]
    backoff.reset()
    assert backoff.next() <= 0.1


def test_unanswered_instance_registers_ever_more_seldom() -> None:
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    gate = expect_no_key(router)
    port = router.bind_to_random_port("tcp://127.0.0.1")
    times: list[float] = []
    with LLM(
        dtype="float64",
        disaggregation="prefill",
        disaggregation_address=f"tcp://127.0.0.1:{port}",
    ) as llm:
        deadline = time.monotonic() + DEADLINE
        while len(times) < 6:
            assert time.monotonic() < deadline
            llm.step()
            while router.poll(0):
                frames = router.recv_multipart()[1:]
                if frames != [b"beat"]:
                    assert read(frames).kind == "register"
                    times.append(time.monotonic())
        llm.prefill_loop.instance.links[0].transport.send("", read(frames))  # it still speaks
    gate.stop()
    router.close()
    context.term()
    gaps = [b - a for a, b in pairwise(times)]
    print("gaps", [round(gap, 2) for gap in gaps])
    for number, gap in enumerate(gaps[1:], 1):  # the first try was before the connection
        assert gap >= 0.1 * 2**number / 2 - 0.05
    assert gaps[-1] > gaps[0]
