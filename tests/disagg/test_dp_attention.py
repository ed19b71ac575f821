"""Instances whose ranks share their MLPs: every rank has requests, peers and an address of its own,
and all step together."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from child_instances import Instance, decode, prefill
from shallow_target import shallow_target

from conftest import TEXT, Plain
from specplug import LLM, SamplingParams, UsageError

COMMON = {
    "device": "cpu",
    "dtype": "float64",
    "chunked_prefill_size": 8,
    "page_size": 4,
    "max_total_tokens": 2048,
    "dp_timeout": 60.0,
}
SETTINGS = {"max_tokens": 10, "temperature": 0.7, "seed": 3}
PROMPTS = [TEXT[start : start + length] for start, length in ((0, 90), (30, 40), (60, 130), (9, 3))]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@attrs.define(eq=False)
class Site:
    """Two decode ranks, and whoever prefills for them.

    Attributes:
        decode: the ranks' processes.
        addresses: where they wait, with a comma between.
    """

    folder: Path
    started: list[Instance] = attrs.field(factory=list)
    decode: list[Instance] = attrs.field(factory=list)
    addresses: str = ""

    def start(self, main: Callable[..., None], size: int, **own: Any) -> list[Instance]:
        """Processes of as many ranks."""
        ranks: dict[str, Any] = {}
        if size > 1:
            where = f"127.0.0.1:{free_port()}"
            ranks = {"dp_size": size, "dp_address": where, "enable_dp_attention": True}
        new = []
        for rank in range(size):
            log = self.folder / f"{main.__name__}{len(self.started)}.log"
            target = shallow_target().options("EAGLE3")
            new.append(Instance(main, log, **{**COMMON, **target, **ranks, **own, "dp_rank": rank}))
            self.started.append(new[-1])
        return new

    def prefill(self, size: int) -> list[Instance]:
        """Ranks that prefill for both decode ranks, when these have registered."""
        new = self.start(prefill, size, disaggregation_address=self.addresses)
        for instance in new:
            assert instance.hear() == "ready"
        return new

    def stats(self) -> list[dict[str, Any]]:
        """Of each decode rank."""
        return [self._ask(instance, None) for instance in self.decode]

    def _ask(self, instance: Instance, what: Any) -> Any:
        instance.pipe.send(what)
        return instance.hear()

    def begin(self, *loads: Sequence[tuple[int, ...]]) -> None:
        """Give each decode rank its prompts."""
        for instance, prompts in zip(self.decode, loads, strict=True):
            for prompt in prompts:
                instance.pipe.send((prompt, SETTINGS))

    def ended(self, *loads: Sequence[tuple[int, ...]]) -> list[list[Any]]:
        """What each rank's requests gave, in the order of their tokens; there is no other."""
        found = [
            [instance.hear() for _ in prompts]
            for instance, prompts in zip(self.decode, loads, strict=True)
        ]
        for outputs in found:
            assert [error for _, _, error in outputs] == [None] * len(outputs)
        return [sorted(tokens for tokens, _, _ in outputs) for outputs in found]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Two decode ranks."""
    site = Site(tmp_path_factory.mktemp("ranks"))
    site.decode = site.start(decode, 2, disaggregation_address="tcp://127.0.0.1:*")
    site.addresses = ",".join(instance.hear() for instance in site.decode)
    yield site
    for instance in site.started:
        instance.kill()


@pytest.fixture
def prompts(shallow_plain: Plain) -> list[tuple[int, ...]]:
    return [shallow_plain.ids(text) for text in PROMPTS]


def expected(
    shallow_plain: Plain, *loads: Sequence[tuple[int, ...]]
) -> list[list[tuple[int, ...]]]:
    params = SamplingParams(**SETTINGS)
    return [sorted(shallow_plain.output(p, params).token_ids for p in prompts) for prompts in loads]


def test_tokens_are_those_of_one_process(
    site: Site, shallow_plain: Plain, prompts: list[tuple[int, ...]]
) -> None:
    """One rank idle, then both busy and unlike; prefilled by two ranks, which idle too."""
    prefilling = site.prefill(2)
    for loads in ((prompts[:1], []), (prompts, prompts[1:2])):
        site.begin(*loads)
        assert site.ended(*loads) == expected(shallow_plain, *loads)
    busy, other = site.stats()
    assert (busy["received"], other["received"]) == (5, 1)
    assert busy["prompt_tokens"] == other["prompt_tokens"] == 0, "nothing is prefilled here"
    assert busy["stateless"] == 0
    assert other["steps"]["idle"] > 0
    assert [rank["prefill_instances"] for rank in (busy, other)] == [2, 2]
    for instance in prefilling:
        instance.pipe.send("end")
    assert [instance.wait() for instance in prefilling] == [0, 0]


def test_a_prefill_rank_that_dies_ends_the_other(
    site: Site, shallow_plain: Plain, prompts: list[tuple[int, ...]]
) -> None:
    """And no request: an instance that has all of its MLPs to itself does them."""
    first, second = site.prefill(2)
    second.halt()  # so that nothing can be done: its part of the first pass is waited for
    loads = prompts, prompts[:2]
    site.begin(*loads)
    while not all(rank["transfers"]["sent"] for rank in site.stats()):
        time.sleep(0.05)
    second.kill()
    assert first.wait() == 1
    assert "rank 1 died" in first.log.read_text()
    (alone,) = site.prefill(1)
    assert site.ended(*loads) == expected(shallow_plain, *loads)
    alone.pipe.send("end")
    assert alone.wait() == 0


def test_both_sides_in_one_rank_are_refused() -> None:
    with pytest.raises(UsageError, match="disaggregation='both' with enable_dp_attention"):
        LLM(
            disaggregation="both",
            dp_size=2,
            dp_address=f"127.0.0.1:{free_port()}",
            enable_dp_attention=True,
        )
