"""Ranks that step together give the tokens of one process, and never hang."""

from __future__ import annotations

import secrets
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from shallow_target import ShallowTarget
from tiny_targets import DEEPSEEK_V3
from warm_process import WarmProcess

from specplug import LLM, SamplingParams, UsageError

sys.path.insert(0, str(Path(__file__).parent))

import rank_worker

DEADLINE = 60.0
"""Seconds for whatever a rank is asked to do, on a busy machine."""

Job = tuple[int, Any, SamplingParams]


class Process:
    """A rank's process, and the connection to it."""

    def __init__(self) -> None:
        key = secrets.token_hex(8)
        with Listener(("127.0.0.1", 0), authkey=key.encode()) as listener:
            host, port = listener.address
            self.process = WarmProcess(rank_worker.main, host, port, key)
            self.line: Connection[Any, Any] = listener.accept()

    def ask(self, name: str, *arguments: Any, **settings: Any) -> None:
        """Begin a method of the worker."""
        self.line.send((name, arguments, settings))

    def answer(self, within: float = DEADLINE) -> Any:
        """What it returned; what it raised is an ``AssertionError`` here."""
        how, what = self.reply(within)
        assert how == "returned", what
        return what

    def error(self, within: float = DEADLINE) -> tuple[str, str]:
        """The type and text of what it raised."""
        how, what = self.reply(within)
        assert how == "raised", what
        return tuple(what)  # type: ignore[return-value]

    def reply(self, within: float) -> Any:
        assert self.line.poll(within), f"no answer in {within} s"
        return self.line.recv()

    def forget(self) -> bool:
        """Close its LLM; whether it did. What it still had to say is lost."""
        if self.process.poll() is None:
            self.ask("close")
            while self.line.poll(10.0):
                if self.line.recv() == ("returned", "closed"):
                    return True
        return False

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.line.close()


class Ranks:
    """Rank processes that are used again and again; who died is started anew."""

    def __init__(self) -> None:
        self.processes: list[Process] = []

    def __getitem__(self, rank: Any) -> Any:
        return self.processes[rank]

    def open(self, **settings: Any) -> list[dict[str, Any]]:
        """Have two processes make an LLM; what each uses."""
        self.begin({}, {}, **settings)
        return [process.answer() for process in self.processes]

    def begin(self, *own: dict[str, Any], **common: Any) -> None:
        """Begin to make an LLM in as many processes as there are settings of their own."""
        alive = [p for p in self.processes if p.process.poll() is None]
        started = [Process() for _ in range(len(own) - len(alive))]
        for process in started:
            assert process.reply(DEADLINE) == "ready"
        self.processes = alive + started
        where = f"127.0.0.1:{free_port()}"
        group = {"dp_size": len(own), "dp_address": where, "enable_dp_attention": True}
        for rank, (process, settings) in enumerate(zip(self.processes, own, strict=True)):
            process.ask("open", **{**common, **settings, **group, "dp_rank": rank})

    def all(self, name: str, *arguments: Any) -> list[Any]:
        """Have every process do something."""
        for process in self.processes:
            process.ask(name, *arguments)
        return [process.answer() for process in self.processes]

    def run(self, *loads: Sequence[Job]) -> list[Any]:
        """Have each process run its requests; see ``RankWorker.run``."""
        for process, jobs in zip(self.processes, loads, strict=True):
            process.ask("run", list(jobs))
        return [process.answer() for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
        self.processes = []


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def all_ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.kill()


@pytest.fixture
def ranks(all_ranks: Ranks) -> Iterator[Ranks]:
    """Rank processes; without an LLM afterwards, and without those that do not answer."""
    yield all_ranks
    for process in all_ranks.processes:
        if not process.forget():
            process.kill()


# The tokens are those of one process

TEXTS = (
    "def mean(values):\n    ",
    "class Stack:\n    def push(self, item):\n        ",
    "import os\nimport sys\n\n\ndef main():\n    parser = argparse.ArgumentParser()\n    parser.",
    "for i in range(10):\n    ",
    "0, ",
)
IDS = tuple(tuple(range(3, 3 + n)) for n in (11, 23, 37, 5, 3))
MAX_TOKENS = 12


def sampling(number: int) -> SamplingParams:
    temperature = 0.8 if number % 2 else 0.0
    return SamplingParams(max_tokens=MAX_TOKENS, temperature=temperature, seed=number)


class Target:
    """A model, prompts for it, and what plain decoding in one process gives for each."""

    def __init__(
        self, model: Path, prompts: Sequence[Any], shallow: ShallowTarget | None = None
    ) -> None:
        self.model = model
        self.prompts = prompts
        self._shallow = shallow
        params = [sampling(i) for i in range(len(prompts))]
        with LLM(model, dtype="float64", device="cpu", disable_overlap_schedule=True) as llm:
            self.tokens = [o.token_ids for o in llm.generate(prompts, params)]

    def options(self, algorithm: str) -> dict[str, Any]:
        """The arguments of an ``LLM`` of this model under an algorithm."""
        if self._shallow is not None:
            return self._shallow.options(algorithm)
        return {"model": self.model, "speculative_algorithm": algorithm}

    def jobs(self, numbers: Sequence[int], stagger: int = 0) -> list[Job]:
        """Requests for these prompts, ``stagger`` steps one after the other."""
        return [(k * stagger, self.prompts[i], sampling(i)) for k, i in enumerate(numbers)]

    def of(self, numbers: Sequence[int]) -> list[tuple[int, ...]]:
        return [self.tokens[i] for i in numbers]


@pytest.fixture(scope="module")
def with_drafts(shallow: ShallowTarget) -> Target:
    return Target(shallow.path, TEXTS, shallow)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> Target:
    return Target(tiny_model, IDS)


SETTINGS: dict[str, dict[str, Any]] = {
    "NONE": {},
    "NONE in chunks, plain": {"chunked_prefill_size": 16, "disable_overlap_schedule": True},
    "NGRAM tree": {"speculative_eagle_topk": 3, "chunked_prefill_size": 16},
    "NGRAM chain, mixed": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "EAGLE tree, plain": {
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 16,
        "enable_mixed_chunk": True,
        "page_size": 4,
    },
    "EAGLE3 chain": {
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 4,
        "chunked_prefill_size": 16,
    },
    "EAGLE3+NGRAM chains": {"chunked_prefill_size": 16},
    "MULTI_LAYER_EAGLE chain": {"max_total_tokens": 160},
    "MULTI_LAYER_EAGLE tree": {"speculative_eagle_topk": 3, "chunked_prefill_size": 16},
    "DSPARK chain": {"max_total_tokens": 160},
    "STANDALONE tree": {
        "speculative_eagle_topk": 3,
        "speculative_num_steps": 3,
        "speculative_num_draft_tokens": 8,
        "chunked_prefill_size": 16,
    },
    "PEAGLE chain": {"max_total_tokens": 160, "chunked_prefill_size": 16},
    "EARLY_EXIT": {"chunked_prefill_size": 16, "enable_mixed_chunk": True},
    "SPARSE_SELF, plain": {"disable_overlap_schedule": True, "max_total_tokens": 160},
    "DFLASH chain, plain": {"disable_overlap_schedule": True, "enable_mixed_chunk": True},
}
WITHOUT_WEIGHTS = "NONE", "NGRAM", "EARLY_EXIT", "SPARSE_SELF"


@pytest.mark.parametrize("setting", SETTINGS.items(), ids=SETTINGS)
def test_tokens_are_those_of_one_process(
    ranks: Ranks, request: pytest.FixtureRequest, setting: tuple[str, dict[str, Any]]
) -> None:
    algorithm, options = setting[0].split(",")[0].split()[0], setting[1]
    name = "tiny" if algorithm in WITHOUT_WEIGHTS else "with_drafts"
    target: Target = request.getfixturevalue(name)
    ranks.open(**target.options(algorithm), dtype="float64", **options)
    # One rank is idle from start to end: the first thing its relay ever sees is an idle step.
    done, (nothing, steps) = ranks.run(target.jobs((0, 1)), [])
    assert tokens(done) == target.of((0, 1))
    assert nothing == []
    assert set(steps) == {"idle"}
    # Unbalanced, requests come and go.
    many, few = ranks.run(target.jobs((0, 1, 2, 3, 4), stagger=2), target.jobs((2,)))
    assert tokens(many) == target.tokens
    assert tokens(few) == target.of((2,))
    assert few[1]["idle"] > 0
    # All requests of one rank end in the same step, and the other goes on.
    rest, same = ranks.run(target.jobs((1, 3, 0, 2), stagger=6), target.jobs((4, 4, 4)))
    assert tokens(rest) == target.of((1, 3, 0, 2))
    assert tokens(same) == target.of((4, 4, 4))
    assert len({step for _, _, step, _ in same[0]}) == 1
    assert same[1]["idle"] > 0


SEVERAL: dict[str, dict[str, Any]] = {
    "NGRAM,EAGLE3": {"chunked_prefill_size": 16},
    "NGRAM:topk=3,tokens=9,EAGLE3:steps=3,topk=3,tokens=12": {
        "page_size": 4,
        "disable_overlap_schedule": True,
        "enable_mixed_chunk": True,
    },
    "EAGLE3,STANDALONE": {"max_total_tokens": 160},
    "SPARSE_SELF,NGRAM": {},  # drafts by passes in which the other rank takes part
    "EAGLE3": {},
}


@pytest.mark.parametrize("choice", ["dice", "dice of rank 0", "measured"])
@pytest.mark.parametrize("algorithm", SEVERAL)
def test_whatever_each_rank_chooses_tokens_are_nones(
    ranks: Ranks, with_drafts: Target, algorithm: str, choice: str
) -> None:
    own = {"dice": [{"dice": 1}, {"dice": 2}], "dice of rank 0": [{"dice": 1}, {}]}
    settings = {**with_drafts.options(algorithm), "dtype": "float64", **SEVERAL[algorithm]}
    ranks.begin(*own.get(choice, [{}, {}]), **settings, draft_choice="measured")
    for process in ranks[:]:
        process.answer()
    for numbers in ((0, 1), ()), ((), (3, 1)):  # one rank is idle, then the other one
        for answer, own_numbers in zip(
            ranks.run(*(with_drafts.jobs(each) for each in numbers)), numbers, strict=True
        ):
            assert tokens(answer) == with_drafts.of(own_numbers)
            assert own_numbers or set(answer[1]) == {"idle"}
    many, few = ranks.run(with_drafts.jobs((0, 1, 2, 3, 4), stagger=2), with_drafts.jobs((2, 4)))
    assert tokens(many) == with_drafts.tokens
    assert tokens(few) == with_drafts.of((2, 4))
    if choice == "dice":
        names = {part.partition(":")[0] for part in algorithm.split(",") if part[0].isupper()}
        assert [set(each) for each in ranks.all("drafters")] == [names | {"NONE"}] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_ranks_learn_the_same_costs(ranks: Ranks, with_drafts: Target, deterministic: bool) -> None:
    """One that was idle from the beginning too: its clock, and that of others, says the same."""
    options = with_drafts.options("NGRAM,EAGLE3")
    ranks.open(**options, dtype="float64", deterministic_drafts=deterministic)
    for loads in ((0, 1), ()), ((0, 1, 2, 3, 4), (2, 4)):
        ranks.run(*(with_drafts.jobs(numbers, stagger=2) for numbers in loads))
        one, other = ranks.all("costs")
        assert one == other
        assert one[0] == (not deterministic)


def tokens(answer: Any) -> list[tuple[int, ...]]:
    """Of each request that ``RankWorker.run`` tells of; none has an error."""
    assert not any(error for _, error, _, _ in answer[0])
    return [tokens for tokens, *_ in answer[0]]


def test_routed_experts_are_those_of_the_own_rows(ranks: Ranks, moe_model: Path) -> None:
    """A router sees the rows of all ranks; a layer, and so its hidden states, the rank's alone."""
    prompts = [tuple(range(3, 3 + n)) for n in (1, 4, 11, 23)]
    params = [
        SamplingParams(
            max_tokens=12,
            temperature=0.8 * (i % 2),
            seed=i,
            return_routed_experts=True,
            return_hidden_states=(i, 3),
        )
        for i in range(4)
    ]
    with LLM(moe_model, dtype="float64", device="cpu") as llm:
        expected = llm.generate(prompts, params)
        whole = llm.engine.steps.runner.target.num_parameters
    ranks.open(model=moe_model, dtype="float64", chunked_prefill_size=8)
    assert all(parameters < 0.75 * whole for parameters in ranks.all("parameters"))
    (many, _), (one, _) = ranks.run(
        [(2 * i, prompts[i], params[i]) for i in (0, 1, 2)], [(1, prompts[3], params[3])]
    )
    for (tokens, error, _, outputs), output in zip((*many, *one), expected, strict=True):
        experts, states = outputs
        assert error is None
        assert tokens == output.token_ids
        assert experts == output.routed_experts.tolist()
        found = torch.tensor(states, dtype=torch.float64)
        torch.testing.assert_close(found, output.hidden_states, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        ("GPTNeoXConfig", {"num_attention_heads": 4}),  # biases: the down projection's counts once
        ("Gemma2Config", {"head_dim": 8, "num_attention_heads": 4, "num_key_value_heads": 2}),
        ("DeepseekV3Config", {"num_attention_heads": 4, **DEEPSEEK_V3}),
    ],
)
def test_other_families_can_be_cut(
    ranks: Ranks, build_model: Callable[..., Path], family: str, shape: dict[str, Any]
) -> None:
    import transformers

    common = {
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 45,  # no even number
        "num_hidden_layers": 2,
        "max_position_embeddings": 96,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    target = Target(build_model(getattr(transformers, family)(**common, **shape)), IDS)
    ranks.open(model=target.model, dtype="float64")
    answers = ranks.run(target.jobs((0, 1)), target.jobs((2, 3, 4), stagger=2))
    assert tokens(answers[0]) == target.of((0, 1))
    assert tokens(answers[1]) == target.of((2, 3, 4))


# Passes are padded to forms that all ranks agree on


@pytest.mark.parametrize("setting", ["NONE", "NONE, mixed", "WIDE", "EAGLE3 chain"])
def test_padded_ranks_give_the_tokens_of_one_process(
    ranks: Ranks, request: pytest.FixtureRequest, setting: str
) -> None:
    """Idle ranks replay the forms of others, and all replay the same number of passes."""
    algorithm, options = setting.split(",")[0].split()[0], SETTINGS.get(setting, {})
    if setting == "NONE, mixed":
        options = {"chunked_prefill_size": 16, "enable_mixed_chunk": True}
    name = "with_drafts" if algorithm == "EAGLE3" else "tiny"
    target: Target = request.getfixturevalue(name)
    ranks.open(**target.options(algorithm), dtype="float64", disable_radix_cache=True, **options)
    ranks.all("pad")
    for _ in range(2):
        done, (_, steps) = ranks.run(target.jobs((0, 1)), [])
        assert tokens(done) == target.of((0, 1))
        assert set(steps) == {"idle"}
        many, few = ranks.run(target.jobs((0, 1, 2, 3, 4), stagger=2), target.jobs((2,)))
        assert tokens(many) == target.tokens
        assert tokens(few) == target.of((2,))
    (recorded, replayed, failure), other = ranks.all("recorded")
    assert (recorded, replayed, failure) == other
    assert recorded > 0
    assert replayed > recorded
    assert failure is None


def test_padded_ranks_agree_on_the_points_they_read(ranks: Ranks, moe_model: Path) -> None:
    """One rank's requests want their experts and hidden states; the other's want neither."""
    prompts = [tuple(range(3, 3 + n)) for n in (4, 11)]
    plain = [SamplingParams(max_tokens=12, seed=i) for i in range(2)]
    asks = {"return_routed_experts": True, "return_hidden_states": (1, 3)}
    params = [attrs.evolve(each, **asks) for each in plain]
    with LLM(moe_model, dtype="float64", device="cpu") as llm:
        expected = llm.generate(prompts, params)
    ranks.open(model=moe_model, dtype="float64", disable_radix_cache=True)
    ranks.all("pad")
    loads = [[(0, *job) for job in zip(prompts, each, strict=True)] for each in (params, plain)]
    answers = ranks.run(*loads)
    for (token_ids, error, _, outputs), output in zip(answers[0][0], expected, strict=True):
        assert error is None
        assert token_ids == output.token_ids
        assert outputs[0] == output.routed_experts.tolist()
        found = torch.tensor(outputs[1], dtype=torch.float64)
        torch.testing.assert_close(found, output.hidden_states, rtol=0, atol=1e-9)
    assert tokens(answers[1]) == [output.token_ids for output in expected]
    assert len(set(ranks.all("recorded"))) == 1


def test_ranks_give_up_recording_together(ranks: Ranks, tiny: Target) -> None:
    ranks.open(model=tiny.model, dtype="float64")
    ranks[0].ask("pad")
    ranks[1].ask("pad", True)
    for process in ranks[:]:
        process.answer()
    for _ in range(2):
        answers = ranks.run(tiny.jobs((0, 1)), tiny.jobs((2,)))
        assert [tokens(answer) for answer in answers] == [tiny.of((0, 1)), tiny.of((2,))]
    (_, replayed, failure), (_, _, cause) = ranks.all("recorded")
    assert replayed == 0
    assert failure == "rank 1 does not record its passes"
    assert cause == "no memory for graphs"


# What an algorithm sees of idle steps


@pytest.mark.parametrize("overlap", [True, False])
def test_idle_inputs_are_rebuilt_as_the_worker_says(
    ranks: Ranks, tiny: Target, overlap: bool
) -> None:
    """Verify passes on no hidden states. The one fixup makes them as wide as the worker's, wider
    than the model's, and what is stashed has that width from the first step on."""
    ranks.open(
        model=tiny.model,
        dtype="float64",
        speculative_algorithm="WIDE",
        disable_overlap_schedule=not overlap,
    )
    ranks.run(tiny.jobs((0,)), [])
    answers = ranks.run(tiny.jobs((1, 2), stagger=20), tiny.jobs((4, 4)))
    assert [tokens(answer) for answer in answers] == [tiny.of((1, 2)), tiny.of((4, 4))]
    for seen, (_, steps) in zip(ranks.all("seen"), answers, strict=True):
        stashed = [what for what in seen if what[0] == "stash"]
        assert {what[2:] for what in stashed} == {(3 * 32, torch.float64)}
        idle = sum(size == 0 for _, size, *_ in stashed)
        assert seen.count(("verify", "idle", [])) == idle
        assert seen.count(("fixup_idle", "idle", None)) == idle
        assert idle >= steps.get("idle", 0)
    assert answers[1][1]["idle"] > 0


# Who must step


def test_a_rank_is_called_by_another_that_has_work(ranks: Ranks, tiny: Target) -> None:
    one, other = ranks.open(model=tiny.model, dtype="float64")
    assert one["dp_attention"] == "on"
    assert (one["dp_rank"], one["dp_size"]) == (0, 2)
    assert (other["dp_rank"], other["dp_size"]) == (1, 2)
    assert ranks.all("must_step") == [False, False]
    began = time.monotonic()
    assert ranks.all("step", 20) == [0, 0]  # returns, though the ranks do not step as often
    assert time.monotonic() - began < DEADLINE
    ranks[0].ask("run", tiny.jobs((0,)))
    ranks[1].ask("must_step", DEADLINE)
    assert ranks[1].answer()
    ranks[1].ask("run", [])
    assert tokens(ranks[0].answer()) == tiny.of((0,))
    assert ranks[1].answer()[1].keys() == {"idle"}


def test_ranks_warm_up_with_steps_of_their_own(ranks: Ranks, with_drafts: Target) -> None:
    few, many = {"max_running_requests": 1}, {"max_running_requests": 5}
    options = with_drafts.options("EAGLE3")
    ranks.begin(few, many, **options, dtype="float64", warm_up="on", chunked_prefill_size=16)
    assert [process.answer()["warm_up"] for process in ranks[:]] == ["on", "on"]
    answers = ranks.run(with_drafts.jobs((0,)), with_drafts.jobs((1, 2)))
    assert [tokens(answer) for answer in answers] == [with_drafts.of((0,)), with_drafts.of((1, 2))]


def test_a_bad_request_takes_nobody_down(ranks: Ranks, tiny: Target) -> None:
    ranks.open(model=tiny.model, dtype="float64")
    ranks[0].ask("run", [(0, (1, 2, 1000), sampling(0))])
    kind, text = ranks[0].error()
    assert kind == "UsageError"
    assert "1000" in text
    answers = ranks.run(tiny.jobs((0,)), tiny.jobs((1,)))
    assert [tokens(answer) for answer in answers] == [tiny.of((0,)), tiny.of((1,))]


def test_who_closes_early_is_named(ranks: Ranks, tiny: Target) -> None:
    ranks.open(model=tiny.model, dtype="float64")
    ranks[1].ask("close")
    ranks[1].answer()
    ranks[0].ask("step", 3)
    assert ranks[0].answer() == 0  # nothing to do, nothing lost
    ranks[0].ask("run", tiny.jobs((0,)))
    kind, text = ranks[0].error()
    assert kind == "RankError"
    assert text.startswith("rank 1 has closed, and rank 0 has work")


# A rank that fails or dies ends the others

QUICK = {"dtype": "float64", "speculative_algorithm": "WIDE", "dp_timeout": 3.0}


@pytest.mark.parametrize("idle", [True, False])
def test_an_error_of_one_rank_is_that_of_all(ranks: Ranks, tiny: Target, idle: bool) -> None:
    ranks.open(model=tiny.model, **QUICK)
    ranks[1].ask("harm", "raise", 3)
    ranks[1].answer()
    ranks[0].ask("run", [] if idle else tiny.jobs((0, 1)))
    ranks[1].ask("run", tiny.jobs((2,)))
    kind, text = ranks[1].error()
    assert kind == "PluginError"
    assert "propose() raised ValueError: a bug in a plugin" in text
    for _ in range(2):  # and so it stays
        assert ranks[0].error() == ("RankError", f"rank 1 failed: PluginError: {text}")
        ranks[0].ask("run", tiny.jobs((0,)))
    assert ranks[0].error()[0] == "RankError"


@pytest.mark.parametrize(
    ("dying", "how", "where", "told"),
    [
        (0, "SIGKILL", "before a pass", "died"),
        (1, "SIGKILL", "in a pass", "died"),
        (1, "SIGSTOP", "before a pass", "was not heard of for 3 s"),
        (1, "SIGSTOP", "in a pass", "was not heard of for 3 s"),
    ],
)
def test_a_rank_that_dies_ends_the_other(
    ranks: Ranks, tiny: Target, dying: int, how: str, where: str, told: str
) -> None:
    ranks.open(model=tiny.model, **QUICK)
    ranks[dying].ask("harm", how, 2, where == "in a pass")
    ranks[dying].answer()
    for rank in range(2):
        ranks[rank].ask("run", tiny.jobs((rank,)))
    began, other = time.monotonic(), ranks[1 - dying]
    kind, text = other.error(within=30.0)
    assert kind == "RankError"
    assert text.startswith(f"rank {dying} {told}")
    if how == "SIGSTOP":  # the process ends by itself, though a collective still hangs
        other.ask("exit")
        assert other.process.wait(30.0) == 0
    assert time.monotonic() - began < 30.0
    ranks[dying].kill()


# The same on GPUs, whose collectives no host waits for

CUDA = {"dtype": "float64", "speculative_algorithm": "WIDE", "dp_timeout": 5.0}
ON_EACH_GPU = {"device": "cuda:0"}, {"device": "cuda:1"}
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


@needs_two_gpus
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "NGRAM"])
def test_gpus_give_the_tokens_of_one_process(
    ranks: Ranks, with_drafts: Target, algorithm: str
) -> None:
    ranks.begin(*ON_EACH_GPU, **with_drafts.options(algorithm), dtype="float64")
    for process in ranks[:]:
        assert process.answer(180.0)["cuda_graph"] == "off: data-parallel attention in float64"
    done, (_, steps) = ranks.run(with_drafts.jobs((0, 1)), [])
    assert tokens(done) == with_drafts.of((0, 1))
    assert set(steps) == {"idle"}
    many, few = ranks.run(with_drafts.jobs((0, 1, 2, 3, 4), stagger=2), with_drafts.jobs((2,)))
    assert tokens(many) == with_drafts.tokens
    assert tokens(few) == with_drafts.of((2,))


@needs_two_gpus
@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "NGRAM"])
def test_recorded_ranks_give_the_tokens_of_others(
    ranks: Ranks, with_drafts: Target, algorithm: str
) -> None:
    """In bfloat16, exactly. Prints what a step takes (``-s`` shows it)."""
    found, seconds = [], []
    for graphs in (False, True):
        ranks.begin(
            *ON_EACH_GPU,
            **with_drafts.options(algorithm),
            dtype="bfloat16",
            enable_mixed_chunk=True,
            disable_radix_cache=True,
            disable_cuda_graph=not graphs,
        )
        for process in ranks[:]:
            state = process.answer(300.0)["cuda_graph"]
            assert state == ("on" if graphs else "off: disable_cuda_graph")
        for _ in range(3 if graphs else 1):  # eager, recorded, replayed
            answers = ranks.run(with_drafts.jobs((0, 1, 2, 3, 4), 2), with_drafts.jobs((2,)))
            found.append([tokens(answer) for answer in answers])
            answers = ranks.run([], with_drafts.jobs((3, 1)))
            assert set(answers[0][1]) == {"idle"}
            found[-1].append(tokens(answers[1]))
        longer = [
            (at, prompt, attrs.evolve(params, max_tokens=96))
            for at, prompt, params in with_drafts.jobs((0, 1, 2, 3))
        ]
        *_, timed = (ranks.all("timed", longer) for _ in range(3))
        seconds.append(max(timed))
        (recorded, _, failure), other = ranks.all("recorded")
        assert (recorded, failure) == (other[0], other[2])
        assert failure is None
        assert (recorded > 0) == graphs
        ranks.all("close")
    assert all(each == found[0] for each in found)
    eager, replayed = (f"{1000 * each:.2f}" for each in seconds)
    print(f"\n{algorithm}: {eager} ms a step, {replayed} ms recorded")


@needs_two_gpus
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize(
    ("how", "told"), [("SIGKILL", "died"), ("SIGSTOP", "was not heard of for 5 s")]
)
def test_a_rank_that_dies_ends_the_other_on_gpus(
    ranks: Ranks, tiny: Target, how: str, told: str, dtype: str
) -> None:
    """In float64 in a pass; in bfloat16 while it records one, and the other has a graph."""
    ranks.begin(*ON_EACH_GPU, model=tiny.model, **{**CUDA, "dtype": dtype}, warm_up="off")
    for process in ranks[:]:
        process.answer(180.0)
    ranks[1].ask("harm", how, 2, True)
    ranks[1].answer()
    for rank in range(2):
        ranks[rank].ask("run", tiny.jobs((rank,)))
    kind, text = ranks[0].error(within=60.0)
    assert kind == "RankError"
    assert text.startswith(f"rank 1 {told}")
    ranks[0].ask("exit")
    # torch's threads of an aborted group may end the process so when it exits.
    assert ranks[0].process.wait(30.0) in (0, -signal.SIGABRT)
    ranks[1].kill()


# What cannot be


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dp_size": 0}, "dp_size=0: expected an integer of at least 1"),
        ({"dp_rank": -1}, "dp_rank=-1: expected an integer of at least 0"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2: expected 0 to 1"),
        ({"dp_timeout": 0}, "dp_timeout=0: expected seconds"),
        ({"dp_size": 2}, "dp_size=2 without enable_dp_attention"),
        ({"dp_size": 2, "enable_dp_attention": True}, "expected dp_address"),
        (
            {"dp_size": 2, "enable_dp_attention": True, "dp_address": "here"},
            "dp_address='here': expected host:port",
        ),
    ],
)
def test_settings_that_do_not_go_together(
    tiny_model: Path, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        LLM(tiny_model, device="cpu", **settings)


def test_one_rank_alone_is_no_group(tiny_model: Path) -> None:
    with LLM(tiny_model, device="cpu", dp_size=1, enable_dp_attention=True) as llm:
        assert llm.effective_config["dp_attention"].startswith("off")
        assert len(llm.generate([IDS[0]], SamplingParams(max_tokens=3))[0].token_ids) == 3
        llm.wait_for_ranks()


def test_ranks_that_differ_are_told(ranks: Ranks, tiny_model: Path) -> None:
    ranks.begin({"dtype": "float64"}, {"dtype": "float32"}, model=tiny_model)
    for process, own, other in zip(ranks[:], ("64", "32"), ("32", "64"), strict=True):
        kind, text = process.error()
        assert kind == "UsageError"
        assert text.startswith(f"dtype: 'float{own}' in rank")
        assert f"'float{other}' in rank" in text


def test_a_rank_that_cannot_load_ends_the_other(ranks: Ranks, tiny_model: Path) -> None:
    nowhere = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": "/nowhere"}
    ranks.begin({}, nowhere, model=tiny_model)
    kind, _ = ranks[1].error()
    assert kind == "CheckpointError"
    how, what = ranks[0].reply(DEADLINE)
    if how == "returned":  # it was ready before it was told
        ranks[0].ask("run", [(0, IDS[0], sampling(0))])
        what = ranks[0].error()
    assert what[0] == "RankError"
    assert what[1].startswith("rank 1 failed: CheckpointError: ")


@pytest.mark.parametrize(
    ("family", "shape", "message"),
    [
        ("GPT2Config", {"n_embd": 32, "n_head": 4, "n_layer": 2}, "no plan to shard the MLPs of"),
        (
            "Phi3Config",
            {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4},
            "gate_up_proj is a Linear to be sharded 'colwise_gather_output'",
        ),
        (  # its shared expert is not in the plan, and would be added by every rank
            "Qwen2MoeConfig",
            {
                "hidden_size": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "moe_intermediate_size": 16,
                "shared_expert_intermediate_size": 24,
                "num_experts": 4,
                "num_experts_per_tok": 2,
            },
            "Qwen2MoeForCausalLM, layer 0: ",  # why depends on transformers' version
        ),
    ],
)
def test_models_that_cannot_be_cut(
    ranks: Ranks, build_model: Callable[..., Path], family: str, shape: dict[str, Any], message: str
) -> None:
    import transformers

    common = {"vocab_size": 96, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    ranks.begin({}, {}, model=build_model(getattr(transformers, family)(**common, **shape)))
    for process in ranks[:]:
        kind, text = process.error()
        assert kind == "UsageError"
        assert message in text
