"""Which setting makes a token wrong: runs beside plain decoding, one setting changed at a time.

torch is imported when a run starts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import attrs

from specplug.bench.parting import Parting, Watched, parting_of, watch
from specplug.config import EngineConfig
from specplug.errors import FallbackWarning, SpecplugError, UsageError

if TYPE_CHECKING:
    from specplug.llm import LLM
    from specplug.outputs import RequestOutput
    from specplug.sampling_params import SamplingParams

ROUNDS = ("first", "again")
"""Each run completes the prompt twice: the second time its pages are in the prefix cache."""

RIGHT, WRONG, UNTRIED, IDLE, FAILED = "right", "wrong", "not tried", "not on", "cannot run"

_HALF = "bfloat16", "float16"

_NO_DRAFTS = {
    "speculative_algorithm": "NONE",
    "speculative_draft_model_path": None,
    "speculative_num_steps": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_settings": None,
}

KERNELS = "SPECPLUG_KERNELS"
"""The one setting that is no field of ``EngineConfig`` but of the process."""

OpenEngine = Callable[[EngineConfig], "LLM"]
Report = Callable[[str, int, int], None]
"""``(what runs, runs that are done, runs there are at most)``."""


@attrs.frozen
class Suspect:
    """A part that a run can go without.

    Attributes:
        part: what it is, in words.
        changes: what turns it off: fields of ``EngineConfig``, or ``KERNELS``.
        idle: why the run does not have it anyway; "" if it has it.
        is_arithmetic: without it sums round otherwise, so that near-ties can flip. The reference
            keeps it.
    """

    part: str
    changes: Mapping[str, Any]
    idle: str = ""
    is_arithmetic: bool = False

    @property
    def setting(self) -> str:
        """The settings as they are typed in Python, without those that are only reset."""
        shown = {k: v for k, v in self.changes.items() if v is not None or len(self.changes) == 1}
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


def suspects_of(
    config: EngineConfig,
    effective: Mapping[str, Any],
    extensions: Sequence[str],
    num_prompt: int,
    kernels: str,
) -> list[Suspect]:
    """Return what may be at fault, in the order in which it is tried.

    What changes least of a run comes first, so that the first that helps says most. Settings that
    move no arithmetic come before those that choose it, and speculation as a whole comes last.

    Args:
        config: of the run that is wrong.
        effective: its ``LLM.effective_config``.
        extensions: names of the extensions that it has.
        num_prompt: tokens of the prompt.
        kernels: the value of ``SPECPLUG_KERNELS``.
    """

    def state(name: str) -> str:
        found = str(effective[name])
        return "" if found == "on" else found

    chunk = config.chunked_prefill_size
    one_chunk = "" if chunk is not None and chunk < num_prompt else "the prompt is one chunk"
    drafts = effective["algorithm"] != "NONE"
    one_path = "" if drafts and effective["topk"] > 1 else "drafts have no branches"
    chain = {"speculative_eagle_topk": 1, "speculative_num_draft_tokens": None}
    in_c = "" if drafts and not config.disable_cpu_kernels else state("cpu_kernels")
    in_c = in_c if kernels == "auto" else f"off: {KERNELS}={kernels}"
    off = tuple(dict.fromkeys([*config.disable_extensions, *extensions]))
    # There torch's products of a row depend on how many rows a pass has.
    by_kernels_alone = effective["device"] != "cpu" and effective["dtype"] in _HALF
    return [
        Suspect(
            "extensions", {"disable_extensions": off}, "" if extensions else "none is installed"
        ),
        Suspect("warm-up", {"warm_up": "off"}, state("warm_up")),
        Suspect("overlap schedule", {"disable_overlap_schedule": True}, state("overlap")),
        Suspect("prefix cache", {"disable_radix_cache": True}, state("prefix_cache")),
        Suspect("mixed chunks", {"enable_mixed_chunk": False}, state("mixed_chunk")),
        Suspect("chunked prefill", {"chunked_prefill_size": None}, one_chunk),
        Suspect(
            "pages of several tokens",
            {"page_size": 1},
            "" if config.page_size > 1 else "a page has one token",
        ),
        Suspect("CUDA graphs", {"disable_cuda_graph": True}, state("cuda_graph")),
        Suspect(
            "kernels in C",
            {"disable_cpu_kernels": True},
            in_c,
        ),
        Suspect(
            "row-invariant arithmetic",
            {"disable_row_invariance": True},
            state("row_invariance"),
            is_arithmetic=True,
        ),
        Suspect(
            "all kernels",
            {KERNELS: "torch"},
            f"off: {KERNELS}=torch" if kernels == "torch" else "",
            is_arithmetic=by_kernels_alone,
        ),
        Suspect("draft trees", chain, one_path),
        Suspect("speculation", _NO_DRAFTS, "" if drafts else "nothing is drafted"),
    ]


@attrs.frozen
class Trial:
    """A run and its outputs.

    Attributes:
        kernels: the value of ``SPECPLUG_KERNELS`` that it ran with.
        outputs: of the prompt, one for each of ``ROUNDS``.
        effective: ``LLM.effective_config``.
    """

    kernels: str
    outputs: Sequence[RequestOutput]
    effective: Mapping[str, Any]

    def wrong_round(self, reference: Trial) -> int | None:
        """Return the first of ``ROUNDS`` whose tokens are not the reference's; None: all are."""
        right = reference.outputs[0]
        for number, output in enumerate(self.outputs):
            if output.token_ids != right.token_ids:
                return number
        return None


@attrs.frozen
class Verdict:
    """A suspect, and the result of the run without it.

    Attributes:
        status: ``RIGHT``, ``WRONG``, ``UNTRIED``, ``IDLE`` or ``FAILED``.
        note: why it was not run, or failed.
    """

    suspect: Suspect
    status: str
    note: str = ""


@attrs.frozen
class Bisection:
    """The result of a bisection.

    Attributes:
        reference: the plain run.
        run: as the settings say.
        round: the first of ``ROUNDS`` whose tokens differ; None: they agree.
        verdicts: on each suspect, in order.
        culprits: without these the tokens are right, and none of them can be left out; () if the
            tokens agree.
        parting: of the two runs' tokens; None if they agree.
    """

    reference: Trial
    run: Trial
    round: int | None = None
    verdicts: Sequence[Verdict] = ()
    culprits: Sequence[Suspect] = ()
    parting: Parting | None = None


def bisect(
    config: EngineConfig,
    prompt: str | Sequence[int],
    params: SamplingParams,
    open_engine: OpenEngine,
    report: Report = lambda what, done, total: None,
) -> Bisection:
    """Compare a run with plain decoding, and find what of it makes the tokens differ.

    Args:
        config: of the run.
        prompt: text or token ids.
        params: of the request; one without a seed gets seed 0, so that all runs have the same.
        open_engine: makes an engine.
        report: is told of each run before it starts.

    Raises:
        UsageError: the prompt or a setting cannot be used.
        SpecplugError: the reference, or the run as it is, fails.
    """
    _check(config, params)
    if params.seed is None:
        params = attrs.evolve(params, seed=0)
    return _Search(config, prompt, params, open_engine, report).search()


@attrs.frozen
class _Setup:
    """What an engine is made with."""

    config: EngineConfig
    kernels: str


class _Search:
    """The runs of a bisection."""

    def __init__(
        self,
        config: EngineConfig,
        prompt: str | Sequence[int],
        params: SamplingParams,
        open_engine: OpenEngine,
        report: Report,
    ) -> None:
        from specplug.kernels.kernel_table import kernels_mode

        self._setup = _Setup(config, kernels_mode())
        self._prompt: Any = prompt
        self._params = params
        self._open = open_engine
        self._report = report
        self._done, self._most = 0, 2

    def search(self) -> Bisection:
        """Run all that is needed."""
        run = self._try(self._setup, "the run as it is")
        extensions = [each["name"] for each in run.effective["extensions"]]
        num_prompt = len(run.outputs[0].prompt_token_ids)
        suspects = suspects_of(
            self._setup.config, run.effective, extensions, num_prompt, self._setup.kernels
        )
        plain = self._without([s for s in suspects if not s.is_arithmetic])
        reference = self._try(plain, "plain decoding")
        number = run.wrong_round(reference)
        if number is None:
            return Bisection(reference, run)
        live = [suspect for suspect in suspects if not suspect.idle]
        self._most = 2 + len(live) + 2
        verdicts = self._verdicts(suspects, reference)
        helpful = [v.suspect for v in verdicts if v.status == RIGHT]
        culprits = helpful or self._least(live, reference)
        self._most = self._done + 2
        parting = self._part(plain, number, run.outputs[number])
        return Bisection(reference, run, number, verdicts, culprits, parting)

    def _verdicts(self, suspects: Sequence[Suspect], reference: Trial) -> list[Verdict]:
        """Try each suspect alone until one helps."""
        verdicts: list[Verdict] = []
        for suspect in suspects:
            if suspect.idle:
                verdicts.append(Verdict(suspect, IDLE, suspect.idle))
            elif any(verdict.status == RIGHT for verdict in verdicts):
                verdicts.append(Verdict(suspect, UNTRIED))
            else:
                verdicts.append(self._verdict(suspect, reference))
        return verdicts

    def _verdict(self, suspect: Suspect, reference: Trial) -> Verdict:
        try:
            trial = self._try(self._without([suspect]), suspect.setting)
        except SpecplugError as error:
            return Verdict(suspect, FAILED, str(error))
        return Verdict(suspect, RIGHT if trial.wrong_round(reference) is None else WRONG)

    def _least(self, live: Sequence[Suspect], reference: Trial) -> list[Suspect]:
        """Return suspects without which, together, the tokens are right: begin with all of them,
        which is the reference, and keep again each that is not needed, the widest first."""
        needed = [suspect for suspect in live if not suspect.is_arithmetic]
        self._most = self._done + len(needed) + 2
        for suspect in reversed(list(needed)):
            fewer = [each for each in needed if each is not suspect]
            if fewer and self._helps(fewer, reference):
                needed = fewer
        return needed

    def _helps(self, suspects: Sequence[Suspect], reference: Trial) -> bool:
        what = "; ".join(suspect.setting for suspect in suspects)
        try:
            return self._try(self._without(suspects), what).wrong_round(reference) is None
        except SpecplugError:
            return False

    def _without(self, suspects: Sequence[Suspect]) -> _Setup:
        changes = {name: value for each in suspects for name, value in each.changes.items()}
        changes |= _NO_DRAFTS if changes.get("speculative_algorithm") == "NONE" else {}
        kernels = changes.pop(KERNELS, self._setup.kernels)
        return _Setup(attrs.evolve(self._setup.config, **changes), kernels)

    def _part(self, plain: _Setup, number: int, wrong: RequestOutput) -> Parting:
        """Run both once more, with their hidden states kept, and say where they part."""
        expected = self._watch(plain, "plain decoding, watched", 0)
        found = self._watch(self._setup, "the run as it is, watched", number)
        return parting_of(expected, found, wrong)

    def _watch(self, setup: _Setup, what: str, number: int) -> Watched:
        with self._run(setup, what) as llm:
            return watch(llm, self._prompt, self._params, rounds=number + 1)

    def _try(self, setup: _Setup, what: str) -> Trial:
        """Complete the prompt in an engine of its own, once for each round.

        Raises:
            SpecplugError: it cannot be loaded, or the request ended with an error.
        """
        with self._run(setup, what) as llm:
            outputs = [llm.generate(self._prompt, self._params)[0] for _ in ROUNDS]
            effective = llm.effective_config
        for output in outputs:
            if output.finish_reason == "error":
                raise SpecplugError(f"{what}: {output.error}")
        return Trial(setup.kernels, outputs, effective)

    @contextmanager
    def _run(self, setup: _Setup, what: str) -> Iterator[LLM]:
        """Report a run and open its engine. Warnings of what is off are ignored: many runs would
        repeat them."""
        from specplug.kernels.kernel_table import kernels_used

        self._report(what, self._done, max(self._most, self._done + 1))
        self._done += 1
        with warnings.catch_warnings(), kernels_used(setup.kernels):
            warnings.simplefilter("ignore", FallbackWarning)
            with self._open(setup.config) as llm:
                yield llm


def _check(config: EngineConfig, params: SamplingParams) -> None:
    if config.dp_size > 1 or config.disaggregation in ("prefill", "decode"):
        what = f"dp_size={config.dp_size}, disaggregation={config.disaggregation!r}"
        raise UsageError(
            f"{what}: expected an engine of one process, since each run starts one of its own; "
            "leave these settings out"
        )
    if params.n != 1:
        raise UsageError(f"n={params.n}: expected 1, since one output is compared; give it a seed")
