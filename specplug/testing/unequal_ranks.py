"""A check that an algorithm gives the tokens of plain decoding where ranks have uneven work."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import torch
from torch import distributed

from specplug.model.loading import choose_device
from specplug.sampling_params import SamplingParams
from specplug.testing.check import Failure, LeftOut, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.exactness import first_difference
from specplug.testing.laboratory import Laboratory
from specplug.testing.rank_processes import Job, RankAnswer, RankTask, Round, Unsendable, run_ranks

SIZE = 2
"""Ranks."""

STAGGER = 2
"""Steps between the requests of a rank."""

LATE = 4
"""Steps before a rank that was idle gets a request."""

MOST_TOKENS = 16
"""Of an output. A step of two ranks costs more than twice one of a single process."""

WIDE_DTYPES = ("float32", "float64")
"""In which a sum of shards is that of the whole, short of a tie between two tokens."""


@check(
    "exact.ranks",
    "bronze",
    "ranks with uneven work, some of them idle, give the tokens of plain decoding",
)
def ranks(laboratory: Laboratory) -> str:
    """Run rank processes, of which now one and now the other has few requests or none."""
    laboratory = _in_wide_dtype(laboratory)
    devices = _devices(laboratory)
    prompts, params = laboratory.prompts(), unequal_params(laboratory)
    rounds = uneven_rounds(len(prompts), quick=laboratory.subject.quick)
    task = RankTask(
        model=laboratory.subject.model,
        settings=laboratory.settings({**SIMPLEST, "batch": 3, "chunk": 8, "overlap": True}),
        devices=devices,
        prompts=prompts,
        params=params,
        rounds=rounds,
    )
    try:
        answers = run_ranks(task)
    except Unsendable as error:
        raise NotApplicable(
            f"it is an object that other processes cannot make ({error}), and ranks are processes; "
            "give its name, or an object of a module's own class, which pickle takes"
        ) from error
    _look_for_errors(answers)
    plain = laboratory.plain(sampled=True)
    expected = [tokens[: each.max_tokens] for tokens, each in zip(plain, params, strict=True)]
    for rank, answer in enumerate(answers):
        for jobs, found in zip((each[rank] for each in rounds), answer.tokens, strict=True):
            numbers = [number for _, number in jobs]
            told = first_difference([expected[i] for i in numbers], found, numbers)
            if told:
                raise Failure(
                    f"rank {rank} of {len(answers)}, {told} in one process: nothing may depend on "
                    "which rank it is, or on requests that are not its own; exact.tokens tells "
                    "whether one process is right"
                )
        assert 0 < answer.idle_steps < answer.steps, "the rounds leave each rank idle for a while"
    idle = " and ".join(f"{each.idle_steps} of {each.steps}" for each in answers)
    requests = sum(len(jobs) for each in rounds for jobs in each)
    return f"{requests} requests in {len(answers)} ranks, idle in {idle} steps"


def uneven_rounds(count: int, *, quick: bool = False) -> list[Round]:
    """Return which rank gets which prompts when, of so many.

    Rank 1 is idle from the start, so that its first step is an idle one. Then rank 0 has one short
    output and is idle while the other goes on. Then a rank that was idle gets a late request, while
    the other drafts. At the end rank 0 has none.
    """
    even, odd = list(range(0, count, 2)), list(range(1, count, 2))
    late: list[Job] = [(LATE, even[-1])]
    rounds: list[Round] = [(_staggered(even), ()), (_staggered(odd[:1]), _staggered([*odd, 0]))]
    if not quick:
        rounds.append((_staggered(odd), late))
        rounds.append(((), _staggered(even[:2])))
    return rounds


def _staggered(numbers: Sequence[int]) -> list[Job]:
    return [(STAGGER * place, number) for place, number in enumerate(numbers)]


def unequal_params(laboratory: Laboratory) -> list[SamplingParams]:
    """Return what is asked of each request, every other one sampled: outputs differ in length."""
    most = min(MOST_TOKENS, laboratory.max_tokens)
    params = laboratory.params(len(laboratory.prompts()), sampled=True, max_tokens=most)
    return [
        attrs.evolve(each, max_tokens=most - 5 * i % (most // 2)) for i, each in enumerate(params)
    ]


def _in_wide_dtype(laboratory: Laboratory) -> Laboratory:
    """Return a laboratory of the same subject, in float32 unless its dtype is wide enough."""
    subject = laboratory.subject
    device = choose_device(subject.settings.get("device"))
    dtype = subject.settings.get("dtype", "auto")
    if dtype in WIDE_DTYPES or (dtype == "auto" and device.type == "cpu"):
        return laboratory
    return Laboratory(attrs.evolve(subject, settings={**subject.settings, "dtype": "float32"}))


def _devices(laboratory: Laboratory) -> list[str | None]:
    """Return each rank's device.

    Raises:
        LeftOut: there are too few, or torch cannot join processes.
    """
    if not distributed.is_available():
        raise LeftOut("ranks need torch.distributed, which this build of torch does not have")
    device = choose_device(laboratory.subject.settings.get("device"))
    if device.type == "cpu":
        return ["cpu"] * SIZE
    there = torch.cuda.device_count()
    if there < SIZE:
        raise LeftOut(
            f"{SIZE} ranks need as many GPUs, and there is {there}; on the CPU they need none"
        )
    return [f"cuda:{rank}" for rank in range(SIZE)]


def _look_for_errors(answers: Sequence[RankAnswer]) -> None:
    """Tell of the rank that failed first.

    Raises:
        NotApplicable: the algorithm or the target refuses to run in ranks.
        Failure: a rank has failed.
    """
    wrong = [(answer.is_consequence, rank) for rank, answer in enumerate(answers) if answer.error]
    if not wrong:
        return
    rank = min(wrong)[1]
    answer = answers[rank]
    if answer.is_refusal:
        raise NotApplicable(f"it does not run in ranks: {answer.error}")
    raise Failure(
        f"rank {rank} of {len(answers)}: {answer.error}; expected each rank to go through steps "
        "with requests and without, as one process does: nothing may depend on which rank it is, "
        "or on requests that are not its own"
    )
