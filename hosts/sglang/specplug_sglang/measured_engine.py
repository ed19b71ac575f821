"""SGLang's engine for ``specplug bench --engine sglang``."""

from __future__ import annotations

import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from multiprocessing.connection import Connection
from tempfile import TemporaryDirectory
from typing import Any

import attrs

from specplug import Completion, SamplingParams, SpecplugError, UsageError
from specplug.speculative.undrafted import paused_in, undrafted_in
from specplug_sglang.sglang_names import check_objects

_NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "seed": "sampling_seed",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
}
"""SGLang's name of each sampling setting that has the same meaning in specplug."""


@attrs.frozen
class Tokens:
    """specplug's ``Completion``: the output tokens of a prompt."""

    token_ids: Sequence[int]


@attrs.define
class DraftCounts:
    """SGLang's counts of drafts, summed over finished requests.

    Attributes:
        verifications: decode steps.
        taken: accepted draft tokens, without bonus tokens.
        lengths: verifications by the number of draft tokens that were accepted.
    """

    verifications: int = 0
    taken: int = 0
    lengths: list[int] = attrs.field(factory=list)

    def add(self, about: Mapping[str, Any]) -> None:
        """Add a finished request.

        Args:
            about: the ``meta_info`` of its reply.
        """
        self.verifications += about.get("spec_verify_ct", 0)
        self.taken += about.get("spec_num_correct_drafts", 0)
        found = about.get("spec_correct_drafts_histogram", ())
        self.lengths = [a + b for a, b in zip_longest(self.lengths, found, fillvalue=0)]

    def as_stats(self, paused: int = 0) -> dict[str, Any]:
        """Return the counts as ``MeasuredEngine.stats`` has them.

        SGLang does not report the length of each draft: every position that was ever accepted
        counts as drafted in each verification of one.

        Args:
            paused: verifications without a draft, because that was faster.
        """
        accepted = [sum(self.lengths[first:]) for first in range(1, len(self.lengths))]
        while accepted and not accepted[-1]:
            accepted.pop()
        return {
            "accepted": self.verifications + self.taken,  # each gives a bonus token, too
            "verifications": self.verifications,
            "drafted_by_position": [self.verifications - paused] * len(accepted),
            "accepted_by_position": accepted,
            "seconds": {},
            "prefill_seconds": 0.0,
        }


@attrs.frozen
class Facts:
    """The properties of an engine that has started.

    Attributes:
        config: ``MeasuredEngine.effective_config``.
        tokenizer: transformers' tokenizer.
        context_len: the most tokens of a request.
        is_seeded: whether sampled tokens depend on a request's seed, the position and the text
            alone.
    """

    config: Mapping[str, Any]
    tokenizer: Any
    context_len: int
    is_seeded: bool


class SglangEngine:
    """specplug's ``MeasuredEngine``: an engine of SGLang's, in a process of its own.

    A benchmark runs several engines at a time. SGLang's settings are global to a process: those of
    the engine that was made last.

    Args:
        arguments: the arguments of SGLang's command line.

    Raises:
        SpecplugError: SGLang does not take the arguments, or does not start.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        spawned = multiprocessing.get_context("spawn")
        self._connection, theirs = spawned.Pipe()
        self._process = spawned.Process(target=_run_engine, args=(theirs, list(arguments)))
        self._process.start()
        theirs.close()  # so that its end is noticed
        self._facts: Facts = self._received()
        self.reset_stats()

    @property
    def effective_config(self) -> Mapping[str, Any]:
        return self._facts.config

    @property
    def tokenizer(self) -> Any:
        return self._facts.tokenizer

    @property
    def context_len(self) -> int:
        return self._facts.context_len

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finished: Callable[[Any], None] | None = None,
    ) -> list[Completion]:
        each = [sampling_params] if isinstance(sampling_params, SamplingParams) else sampling_params
        wanted = [as_sglang_has_them(params) for params in each]
        highest = max(params.temperature for params in each)
        if highest and not self._facts.is_seeded:
            raise UsageError(
                f"temperature={highest}: SGLang's sampled tokens are others in "
                "every run; expected 0, or --enable-deterministic-inference after '--'"
            )
        tokenizer = self.tokenizer
        tokens = [tokenizer(p)["input_ids"] if isinstance(p, str) else list(p) for p in prompts]
        one_for_all = isinstance(sampling_params, SamplingParams)
        self._connection.send((tokens, wanted[0] if one_for_all else wanted))
        outputs: list[Completion] = []
        for token_ids, about in self._received():
            self._counts.add(about)
            outputs.append(Tokens(token_ids))
        return outputs

    def stats(self) -> dict[str, Any]:
        undrafted, paused = self._without_drafts()
        undrafted_before, paused_before = self._before
        counts = self._counts.as_stats(paused - paused_before)
        return {**counts, "undrafted": dict(undrafted - undrafted_before)}

    def reset_stats(self) -> None:
        self._counts = DraftCounts()
        self._before = self._without_drafts()

    def _without_drafts(self) -> tuple[Counter[str], int]:
        """Return the number of requests so far that were decoded without drafts, by reason, and of
        verifications without a draft because that was faster."""
        self._connection.send(None)
        undrafted, paused = self._received()
        return Counter(undrafted), paused

    def close(self) -> None:
        self._connection.close()  # which ends the process
        self._process.join(_PATIENCE)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def _received(self) -> Any:
        """Return the answer of the engine's process.

        Raises:
            SpecplugError: the process has ended, or refused the arguments.
        """
        try:
            error, answer = self._connection.recv()
        except EOFError:
            self._process.join()
            raise SpecplugError(
                f"SGLang's engine has ended with exit code {self._process.exitcode}; it says why "
                "on standard error"
            ) from None
        if error:
            self.close()
            raise UsageError(error)
        return answer


_PATIENCE = 30
"""Seconds to wait for the end of SGLang's processes."""


def _run_engine(connection: Connection, arguments: Sequence[str]) -> None:
    """Run an engine until the connection is closed."""
    with TemporaryDirectory() as folder:
        # The scheduler's process inherits this folder, and writes its Prometheus counters there.
        os.environ.setdefault(_COUNTED, folder)
        try:
            engine, settings = new_engine(arguments)
        except UsageError as error:
            connection.send((str(error), None))
            return
        try:
            connection.send(("", _facts(engine, settings)))
            while True:
                connection.send(("", _answer(engine, connection.recv())))
        except EOFError:
            engine.shutdown()


_COUNTED = "PROMETHEUS_MULTIPROC_DIR"


def _answer(engine: Any, asked: tuple[list[list[int]], Any] | None) -> Any:
    """Return the tokens and the ``meta_info`` of each prompt's reply; if ``asked`` is None, what
    was decoded without drafts: ``undrafted_in`` and ``paused_in``."""
    if asked is None:
        return undrafted_in(os.environ[_COUNTED]), paused_in(os.environ[_COUNTED])
    tokens, wanted = asked
    replies = engine.generate(input_ids=tokens, sampling_params=wanted)
    return [(reply["output_ids"], reply["meta_info"]) for reply in replies]


def _facts(engine: Any, settings: Any) -> Facts:
    manager = engine.tokenizer_manager
    model = manager.model_config
    return Facts(
        config={
            "model": settings.model_path,
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": settings.device,
            "max_running_requests": settings.max_running_requests,
            "context_len": model.context_len,
            "page_size": settings.page_size,
            "seed": settings.random_seed,
            "num_steps": settings.speculative_num_steps or 0,
            "topk": settings.speculative_eagle_topk or 1,
            "num_draft_tokens": settings.speculative_num_draft_tokens or 1,
        },
        tokenizer=manager.tokenizer,
        context_len=model.context_len,
        is_seeded=bool(settings.enable_deterministic_inference),
    )


def as_sglang_has_them(params: SamplingParams) -> dict[str, Any]:
    """Return sampling settings by SGLang's names.

    Raises:
        UsageError: a setting that is not measured in SGLang is set.
    """
    usual, known = SamplingParams(), {*_NAMES, "stop", "stop_token_ids"}
    fields = [name for name in attrs.fields_dict(SamplingParams) if name not in known]
    other = [name for name in fields if getattr(params, name) != getattr(usual, name)]
    if other:
        raise UsageError(f"{', '.join(other)}: not measured in SGLang; leave it out")
    found = {name: getattr(params, own) for own, name in _NAMES.items()}
    found |= {"stop": list(params.stop), "stop_token_ids": list(params.stop_token_ids)}
    if not params.top_k:
        found["top_k"] = -1  # all
    return found


def new_engine(arguments: Sequence[str]) -> tuple[Any, Any]:
    """Make an engine of SGLang's, and return it with its resolved settings.

    Args:
        arguments: the arguments of SGLang's command line.

    Raises:
        UsageError: SGLang refuses an argument.
    """
    from sglang import Engine
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    try:
        settings = prepare_server_args([*arguments])
    except SystemExit as error:  # of argparse, which has said why on standard error
        raise UsageError(
            f"SGLang's arguments {' '.join(arguments)}: refused; see python -m "
            "sglang.launch_server --help"
        ) from error
    engine = Engine(server_args=settings)
    check_objects(engine=engine)
    return engine, resolving_view(settings)
