"""Prefilled by one instance and decoded by another: the tokens of plain, single-process NONE.

One set of requests holds every kind of sampling and of ending. Each algorithm runs it under two
settings that share no value: page sizes, overlap, chunk size, chains and trees, and pressure.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
import torch
from child_instances import check_whole
from shallow_target import shallow_target

from conftest import TEXT, Plain
from specplug import LLM, RequestOutput, SamplingParams
from specplug.registry import Registry

NAMES = [*Registry().names(), "SUCCESSORS", "EAGLE3+NGRAM", "MULTI_LAYER_EAGLE+NGRAM"]
HEAD = "def total(values):\n    result = 0\n    for value in values:\n"
EOS = 0


@attrs.frozen(kw_only=True)
class Setting:
    """One pair of instances."""

    algorithm: str
    page_size: int
    overlap: bool
    chunk: int | None
    topk: int
    pressed: bool

    def __str__(self) -> str:
        loop = "overlap" if self.overlap else "plain"
        sizes = f"page{self.page_size}-chunk{self.chunk}-topk{self.topk}"
        return f"{self.algorithm}-{sizes}-{loop}{'-pressed' if self.pressed else ''}"

    def open(self, algorithm: Any, most: int) -> LLM:
        """Both sides. Pressed, the pool holds no more than the longest request."""
        return LLM(
            **shallow_target().options(algorithm),
            dtype="float64",
            speculative_eagle_topk=self.topk if self.topk > 1 else None,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            disable_overlap_schedule=not self.overlap,
            max_total_tokens=most if self.pressed else 2048,
            disaggregation="both",
        )


@pytest.fixture(scope="module")
def plain(shallow_plain: Plain) -> Plain:
    return shallow_plain


def branches(name: str) -> bool:
    return name != "SUCCESSORS" and Registry().select(name).info.capabilities.branching


SETTINGS = [
    Setting(
        algorithm=name,
        page_size=(1, 3, 16)[(i + j) % 3],
        overlap=(i + j) % 2 == 0,
        chunk=(2, None, 5)[(i // 2 + j) % 3],
        topk=3 if j and branches(name) else 1,
        pressed=(i // 3 + j) % 2 == 0,
    )
    for i, name in enumerate(NAMES)
    for j in range(2)
]

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (HEAD, {}),
    (HEAD + "        result += value\n", {"temperature": 0.8}),
    (HEAD + "        result *= value\n    return", {"temperature": 1.0, "top_p": 0.9, "top_k": 20}),
    (
        HEAD + "        if value is None:\n            continue\n",
        {"repetition_penalty": 1.3, "presence_penalty": 0.5, "temperature": 0.7, "min_p": 0.01},
    ),
    ("x", {"frequency_penalty": 0.9, "logit_bias": {50: 4.0, 60: -9.0}}),
    ("import ", {"logprobs": 3}),
    ("class Stack:\n    def ", {"logprobs": 0, "temperature": 0.8}),
    ("import os\nimport ", {"max_tokens": 1, "logprobs": 2, "temperature": 1.0}),
    ("return ", {"logit_bias": {EOS: 100.0}}),
    ("def f(x):\n    return", {"stop": ("f u",)}),
    ("name = ", {"regex": '"[a-z]{3,9}"'}),
    ("number = ", {"regex": "[0-9]{2,5}", "temperature": 1.0}),
    ("# one\n", {"stop": ("e", "a")}),
    (TEXT[:120] + "y", {}),
]


def requests(plain: Plain) -> list[tuple[tuple[int, ...], SamplingParams]]:
    assert plain.llm.tokenizer.eos_token_id == EOS
    common = {"max_tokens": 8}
    return [
        (plain.ids(text), SamplingParams(**{**common, "seed": i, **settings}))
        for i, (text, settings) in enumerate(REQUESTS)
    ]


def check(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.error is None
    for name in ("token_ids", "finish_reason", "stop_reason", "text"):
        assert getattr(output, name) == getattr(expected, name), name
    assert (output.logprobs is None) == (expected.logprobs is None)
    for ours, theirs in zip(output.logprobs or (), expected.logprobs or (), strict=True):
        assert list(ours) == list(theirs)
        for token, of in ours.items():
            assert (of.rank, of.decoded_token) == (theirs[token].rank, theirs[token].decoded_token)
            assert of.logprob == pytest.approx(theirs[token].logprob, abs=1e-9)


def settle(llm: LLM) -> None:
    """Let the prefill side hear of what has ended, and look for lost pages on both."""
    assert llm.partner is not None
    for _ in range(1000):
        llm.step()
        if not llm.partner.prefill_loop.instance.has_work and not llm.partner.engine.has_work:
            break
    for side in (llm, llm.partner):
        check_whole(side)
        side.flush_cache()
        assert side.occupancy["free"] == side.occupancy["total"]


def test_the_requests_end_in_every_way(plain: Plain) -> None:
    outputs = [plain.output(*request) for request in requests(plain)]
    assert outputs[8].token_ids == (EOS,)
    assert {o.finish_reason for o in outputs} == {"stop", "length"}
    assert len(outputs[7].token_ids) == 1
    assert outputs[9].stop_reason == "f u"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_tokens_are_those_of_none(plain: Plain, successors: Any, setting: Setting) -> None:
    algorithm = successors() if setting.algorithm == "SUCCESSORS" else setting.algorithm
    wanted = requests(plain)
    most = max(len(prompt) + (params.max_tokens or 0) for prompt, params in wanted)
    random = Random(str(setting))
    with setting.open(algorithm, most) as llm:
        rounds = 1 if setting.pressed else 2  # once more, from the cache
        for _ in range(rounds):
            order = random.sample(range(len(wanted)), len(wanted))
            priority = [random.randrange(3) for _ in order]
            if setting.pressed:  # the longest prompt comes twice, one after the other, at the end
                order += [len(wanted) - 1] * 2
                priority += [3, 3]
            outputs = llm.generate(
                [wanted[i][0] for i in order],
                [wanted[i][1] for i in order],
                priority=priority,
            )
            for i, output in zip(order, outputs, strict=True):
                check(output, plain.output(*wanted[i]))
        settle(llm)
        stats = llm.stats()
        assert stats["received"] == stats["transfers"]["received"] == len(outputs) * rounds
        assert stats["transfers"]["tries_again"] == stats["transfers"]["failed"] == 0
        assert stats["cached_tokens"]
        assert stats["evicted_pages"] or not setting.pressed, "there was no pressure"


@pytest.mark.parametrize("name", ["EAGLE3", "MULTI_LAYER_EAGLE"])
def test_what_is_retracted_is_prefilled_here(plain: Plain, name: str) -> None:
    """When memory runs short, as it does sooner or later, depending on what comes back when."""
    prompts = [plain.ids(text) for text in ("import ", "class ", "def ", "return ")]
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=3)
    with LLM(
        **shallow_target().options(name),
        dtype="float64",
        page_size=1,
        max_total_tokens=30 + 16,
        disaggregation="both",
    ) as llm:
        for _ in range(9):
            for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
                check(output, plain.output(prompt, params))
            if llm.stats()["retractions"]:
                break
            llm.flush_cache()
        assert llm.stats()["retractions"]
        assert llm.stats()["prompt_tokens"] > 0, "nothing was prefilled again"
        settle(llm)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_prefixes_that_are_lost_meanwhile_are_prefilled_here(plain: Plain, overlap: bool) -> None:
    """A received prefill that begins after what the cache has kept is of no use."""
    head = plain.ids(TEXT[:120])
    prompts = [(*head, 100 + i) for i in range(3)]
    others = [tuple(range(300 + 40 * i, 340 + 40 * i)) for i in range(3)]
    params = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
    with LLM(
        **shallow_target().options("EAGLE3"),
        dtype="float64",
        page_size=2,
        max_total_tokens=len(head) + 30,
        disable_overlap_schedule=not overlap,
        disaggregation="both",
    ) as llm:
        llm.generate([prompts[0]], params)
        wanted = [prompt for pair in zip(prompts, others, strict=True) for prompt in pair]
        for prompt, output in zip(wanted, llm.generate(wanted, params), strict=True):
            check(output, plain.output(prompt, params))
        assert llm.stats()["lost_prefixes"] > 0
        assert llm.stats()["cached_tokens"] > 0
        settle(llm)


@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_an_abort_at_any_moment_leaves_the_others_theirs(plain: Plain, overlap: bool) -> None:
    """Before it is sent, while it is away, received and waiting, and while it decodes."""
    long = [
        (plain.ids(text), SamplingParams(max_tokens=40, seed=7)) for text in (HEAD, "class ")
    ]  # that the parcels of others wait for
    wanted = long + [request for request in requests(plain)[:8] if request[1].max_tokens != 1]
    with LLM(
        **shallow_target().options("EAGLE"),
        dtype="float64",
        page_size=3,
        chunked_prefill_size=4,
        max_running_requests=2,
        disable_overlap_schedule=not overlap,
        disaggregation="both",
    ) as llm:
        left = Counter({"waiting": 1, "away": 2, "back": 2, "running": 1})
        names = {llm.add_request(*request): request for request in wanted}
        ended: dict[str, RequestOutput] = {}
        aborted: set[str] = set()
        while llm.has_unfinished_requests:
            for name in list(names)[2:]:
                if name in aborted or name in ended:
                    continue
                if left[where := _where(llm, name)]:
                    left[where] -= 1
                    aborted.add(name)
                    llm.abort(name)
            ended.update({o.request_id: o for o in llm.step() if o.finished})
        assert not left.total(), left
        for name, request in names.items():
            output, expected = ended[name], plain.output(*request)
            if name in aborted and output.finish_reason == "abort":
                assert output.token_ids == expected.token_ids[: len(output.token_ids)]
            else:
                check(output, expected)
        settle(llm)


def test_of_prompts_that_begin_alike_only_the_rest_is_written(plain: Plain) -> None:
    """What came for the first of them is in the cache when the others get their pages."""
    head = plain.ids(TEXT[:120])
    prompts = [head, head, (*head, 5, 6), (*head[:-3], 7)]
    params = SamplingParams(max_tokens=12)
    with LLM(
        **shallow_target().options("EAGLE3"),
        dtype="float64",
        page_size=4,
        disaggregation="both",
    ) as llm:
        for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
            check(output, plain.output(prompt, params))
        stats = llm.stats()
        assert stats["received"] == 4
        assert stats["received_tokens"] < 2 * len(head)
        assert stats["cached_tokens"] > 2 * len(head)
        settle(llm)


def _where(llm: LLM, name: str) -> str:
    remote, scheduler = llm.decode_instance, llm.engine.scheduler
    assert remote is not None
    if name in remote.away:
        return "away"
    if scheduler.waiting.get(name):
        return "back"
    return "running" if scheduler.find([name]) else "waiting"


def test_experts_arrive_with_the_prompt(moe_model: Path) -> None:
    prompts = [tuple(range(3, 3 + n)) for n in (1, 4, 11, 23, 2, 3)]
    params = [
        SamplingParams(max_tokens=24, temperature=t, seed=i, return_routed_experts=True)
        for i, t in enumerate((0.0, 0.8, 0.0, 0.8, 0.0, 0.8))
    ]
    with LLM(moe_model, dtype="float64", disable_overlap_schedule=True) as llm:
        expected = [llm.generate([p], s)[0] for p, s in zip(prompts, params, strict=True)]
    for page_size, pool in ((4, None), (1, 23 + 24)):
        with LLM(
            moe_model,
            dtype="float64",
            speculative_algorithm="NGRAM",
            page_size=page_size,
            chunked_prefill_size=5,
            max_total_tokens=pool,
            disaggregation="both",
        ) as llm:
            for _ in range(9):
                outputs = llm.generate(prompts, params)
                for output, other in zip(outputs, expected, strict=True):
                    assert output.token_ids == other.token_ids
                    assert torch.equal(output.routed_experts, other.routed_experts)
                if pool is None or llm.stats()["retractions"]:
                    break
            assert bool(llm.stats()["retractions"]) == (pool is not None)
            settle(llm)
