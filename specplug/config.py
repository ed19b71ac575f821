"""``EngineConfig``: every setting of a run, declared once. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any, ParamSpec

import attrs

from specplug.algorithm import DEFAULT_MODEL
from specplug.errors import UsageError, shown
from specplug.settings import (
    MAX_PORT,
    Address,
    Anything,
    Choice,
    Flag,
    Integer,
    Seconds,
    Setting,
    Text,
    Texts,
    setting,
    settings_of,
)

_P = ParamSpec("_P")

_LONGEST_PATH = 4096
"""Characters, as on Linux. Messages that say what is wrong with a file give the whole path."""

_WHY_TWO = "for a prompt's token and one after it"
"""Why one token of context, or one slot, is too little for any request."""

DTYPES = ("auto", "float32", "bfloat16", "float16", "float64")
WARM_UPS = ("auto", "on", "off")
MEASURED, FIRST = "measured", "first"
DRAFT_CHOICES = (MEASURED, FIRST)
DISAGGREGATION_MODES = ("prefill", "decode", "both")

RANKS, INSTANCES = "ranks", "instances"
"""Which processes must agree on a setting: the ranks of a run; instances that prefill and decode
for each other. Of the model they compare what is in its files, not its path."""


def _model(value: Any) -> Any:
    return DEFAULT_MODEL if value is None else _path(value)


def _path(value: Any) -> Any:
    """A path as text; what is none stays, to be refused."""
    return str(value) if isinstance(value, Path) else value


def _listed(value: Any) -> Any:
    """A list as a tuple; the check refuses what is neither."""
    return tuple(value) if isinstance(value, Iterable) and not isinstance(value, str) else value


def _mapping(value: Any) -> Any:
    """Return a copy of a mapping; what is none stays, to be refused."""
    return dict(value) if isinstance(value, Mapping) else value


@attrs.frozen
class _OwnSettings:
    """Settings by name, which the algorithm checks."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what is no mapping of names."""
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{name}={shown(value)}: expected a mapping of names to values")


@attrs.frozen
class _Extensions:
    """A list of plugin objects, which the registry examines."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what is no list, and names, which are of installed ones."""
        if not isinstance(value, tuple) or any(isinstance(each, str) for each in value):
            raise UsageError(
                f"{name}={shown(value)}: expected a list of plugin objects; those that are "
                "installed take part without being named"
            )


def _algorithm(value: Any) -> Any:
    """A list as a tuple, which has a hash."""
    return tuple(value) if isinstance(value, list) else value


def _stripped(value: Any) -> Any:
    return value.strip() if isinstance(value, str) else value


@attrs.frozen(kw_only=True)
class EngineConfig:
    """The settings of a run. ``LLM`` takes one, or its fields as keyword arguments.

    docs/settings.md shows all fields with their defaults, and which options of the command line
    they are. Paths are kept as text.

    Raises:
        UsageError: a value cannot be used, or two of them not together.
    """

    model: str | Path | None = setting(
        None,
        Text(expected="a folder or a hub id", most=_LONGEST_PATH),
        "Folder or hub id of a causal language model of transformers.",
        group="Model",
        unset=DEFAULT_MODEL,
        metavar="FOLDER|ID",
        converter=_model,
    )
    tokenizer: str | Path | None = setting(
        None,
        Text(expected="a folder or a hub id", most=_LONGEST_PATH),
        "Folder or hub id of the tokenizer. Where there is none, prompts are token ids and outputs "
        "have no text.",
        group="Model",
        unset="the model's own",
        option="",
        converter=_path,
    )
    dtype: str = setting(
        "auto",
        Choice(DTYPES, f"auto, {', '.join(DTYPES[1:])}"),
        "Number format of the weights and activations; auto: float32 on the CPU, else the "
        "checkpoint's.",
        group="Model",
        agree=(RANKS, INSTANCES),
    )
    device: str | None = setting(
        None,
        Text(expected="cpu, cuda or cuda:N"),
        "Where the model runs: cpu, cuda or cuda:N.",
        group="Model",
        unset="CUDA if there is one",
        metavar="DEVICE",
    )
    seed: int = setting(
        0,
        Integer(least=None),
        "Seed of the sampling noise; each request without a seed derives its own from it.",
        group="Model",
    )
    speculative_algorithm: str | object = setting(
        "NONE",
        Anything(),
        "An installed algorithm (specplug list). Of several, as EAGLE3+NGRAM, the first proposes "
        "and the others add to its drafts; of several, as NGRAM,EAGLE3, each drafts for some "
        "requests: settings by name, NGRAM,EAGLE3:steps=5,draft=FOLDER; auto: all installed ones "
        "that suit the model, with one draft model (specplug info auto). In Python a list and a "
        "plugin object, too.",
        group="Speculation",
        option_help="An installed algorithm (specplug list), several that draft together: "
        "EAGLE3+NGRAM, several of which each drafts for some requests: "
        "NGRAM,EAGLE3:steps=5,draft=FOLDER, or auto: all that suit the model.",
        metavar="NAME",
        converter=_algorithm,
    )
    speculative_draft_model_path: str | Path | None = setting(
        None,
        Text(expected="a folder", most=_LONGEST_PATH),
        "Folder of the algorithm's draft weights.",
        group="Speculation",
        unset="those shipped for the model",
        metavar="FOLDER",
        converter=_path,
    )
    speculative_num_steps: int | None = setting(
        None,
        Integer(bound="num_steps"),
        "Draft depth S.",
        group="Speculation",
        unset="the algorithm's",
    )
    speculative_eagle_topk: int | None = setting(
        None,
        Integer(bound="topk"),
        "Branches K kept per step.",
        group="Speculation",
        unset="the algorithm's",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        Integer(bound="num_draft_tokens"),
        "Tokens N that the target verifies per step for each request, root included.",
        group="Speculation",
        unset="the algorithm's",
    )
    speculative_settings: Mapping[str, Any] | None = setting(
        None,
        _OwnSettings(),
        "The algorithm's own settings, by name. On the command line each is an option: "
        "--speculative-algorithm NAME --help shows them.",
        group="Speculation",
        unset="the algorithm's",
        hash=False,  # a mapping has none
        option="",
        converter=_mapping,
    )
    page_size: int = setting(
        16,
        Integer(bound="page_size"),
        "Tokens per KV page.",
        group="Engine",
        unit="tokens",
        agree=(INSTANCES,),
    )
    chunked_prefill_size: int | None = setting(
        512,
        Integer(),
        "Most tokens in a step: prompt tokens, and with mixed chunks the nodes of drafts too; "
        "None: no limit.",
        group="Engine",
        unit="tokens",
        option_help="Most tokens in a step: prompt tokens, and with --enable-mixed-chunk the "
        "nodes of drafts too; -1: no limit.",
        unlimited=True,
    )
    max_running_requests: int = setting(
        8,
        Integer(bound="max_running_requests"),
        "Most requests that run at a time; more wait.",
        group="Engine",
        unit="requests",
    )
    max_total_tokens: int | None = setting(
        None,
        Integer(),
        "Slots of the KV pool, one per token.",
        group="Engine",
        unit="tokens",
        unset="what fits a memory budget",
    )
    max_model_len: int | None = setting(
        None,
        Integer(least=2, expected=f"an integer of at least 2, {_WHY_TWO}"),
        "Most tokens of a request, prompt and output; at least 2.",
        group="Limits",
        unit="tokens",
        unset="the model's context",
    )
    enable_mixed_chunk: bool = setting(
        False,
        Flag(),
        "Let prompts and drafts share steps, so that a long prompt holds up no other request. "
        "Otherwise prompts go first, in steps of their own.",
        group="Engine",
    )
    verify_budget: int | None = setting(
        None,
        Integer(),
        "Most drafted tokens that a step verifies, of all requests together and with their last "
        "tokens. What is least likely to be accepted is left out.",
        group="Speculation",
        unit="tokens",
        unset="all that are drafted",
    )
    draft_choice: str | None = setting(
        None,
        Choice(DRAFT_CHOICES, f"{', '.join(DRAFT_CHOICES)}, or None"),
        "Who drafts for each request of a step, and how much. measured: whatever gives the most "
        "tokens a second, by what was accepted and by how long steps take. first: the first "
        "algorithm that the request allows, as much as it can.",
        group="Speculation",
        unset="measured for several algorithms, first for one",
        agree=(RANKS,),
    )
    deterministic_drafts: bool = setting(
        False,
        Flag(),
        "Choose drafts by declared costs instead of by measured time, so that the steps of a run "
        "repeat one by one. No choice changes a token.",
        group="Speculation",
        agree=(RANKS,),
    )
    disable_overlap_schedule: bool = setting(
        False,
        Flag(),
        "Process a step's results before the next step is launched.",
        group="Engine",
    )
    disable_radix_cache: bool = setting(
        False,
        Flag(),
        "Do not keep the KV of prompts and outputs for requests that begin alike.",
        group="Engine",
    )
    disable_cuda_graph: bool = setting(
        False,
        Flag(),
        "Do not record forward passes as CUDA graphs. The CPU has no such graphs.",
        group="Engine",
        agree=(RANKS,),
    )
    disable_row_invariance: bool = setting(
        False,
        Flag(),
        "In bfloat16 or float16, let products and norms round as is fastest for the rows "
        "of a pass. A long prompt is then read somewhat faster, and a request's tokens may depend "
        "on the other requests of its batch, and on the algorithm.",
        group="Engine",
        agree=(RANKS,),
    )
    warm_up: str = setting(
        "auto",
        Choice(WARM_UPS, ", ".join(WARM_UPS)),
        "Whether the engine runs its steps once when it starts, so that no request waits while "
        "kernels are compiled and passes are recorded. auto: only on a GPU, which has both.",
        group="Engine",
        agree=(RANKS,),
    )
    disable_cpu_kernels: bool = setting(
        False,
        Flag(),
        "On the CPU, do not compile kernels with the machine's C compiler. torch computes then, as "
        "it does where there is no compiler, more than one thread or another dtype than float32. "
        "The algorithms' own C code is not compiled either, on any device.",
        group="Engine",
    )
    disable_extensions: Sequence[str] = setting(
        (),
        Texts(),
        "Installed extensions that this run goes without, by name.",
        group="Engine",
        option="--disable-extension",
        option_help="An installed extension that this run goes without; may be given many times.",
        metavar="NAME",
        converter=_listed,
    )
    extensions: Sequence[object] = setting(
        (),
        _Extensions(),
        "Plugin objects with hooks that take part in this run beside the installed extensions. In "
        "Python alone.",
        group="Engine",
        option="",
        converter=_listed,
    )
    skip_model_check: bool = setting(
        False,
        Flag(),
        "Skip the proof, at loading, that the engine gives the model's own logits. A model that "
        "fails it then runs, and its tokens may be wrong.",
        group="Model",
        agree=(RANKS,),
    )
    disaggregation: str | None = setting(
        None,
        Choice(
            DISAGGREGATION_MODES,
            f"{', '.join(DISAGGREGATION_MODES)}, or None",
            ("prefill", "decode"),
        ),
        "prefill: prefill for the decode instances at the address; decode: have prompts prefilled "
        "by the instances that register there; both: the two sides in this process, with a "
        "transfer between them (Python only).",
        group="Disaggregation",
        unset="one engine does both",
        option="--disaggregation-mode",
        option_help="Prefill for decode instances, or have prompts prefilled by prefill instances.",
    )
    disaggregation_address: str | None = setting(
        None,
        Address(
            form=r"tcp://[^/,]+:(\d{1,5}|\*)|ipc://.+",
            expected=f"tcp://HOST:PORT, with a port of at most {MAX_PORT}",
            several=True,
        ),
        "Where the decode instance waits for prefill instances. A prefill instance may name "
        "several, with commas between them.",
        group="Disaggregation",
        unset="port 30100 of this machine",
        metavar="tcp://HOST:PORT",
    )
    disaggregation_key: str | None = setting(
        None,
        Text(expected="a text that is not empty", most=4096, from_file=True, secret=True),
        "A secret that the two sides share. A prefill instance without it is refused before its "
        "first message. Spaces and line ends around it do not count.",
        group="Disaggregation",
        unset="any process may connect",
        option_help="A secret that the two sides share. @FILE is the text in a file, which does "
        "not stand in the list of processes.",
        metavar="@FILE",
        converter=_stripped,
    )
    disaggregation_timeout: float = setting(
        30.0,
        Seconds(),
        "Time without progress after which a request is given to another prefill instance, or "
        "ends with an error if there is none.",
        group="Disaggregation",
        unit="seconds",
    )
    num_threads: int | None = setting(
        None,
        Integer(bound="num_threads"),
        "torch's threads on the CPU, which are the whole process's. The operations of a small "
        "model, of under 50 million parameters, are too short to share.",
        group="Model",
        unset="one for a small model, else torch's choice",
        option_help="torch's threads on the CPU.",
    )
    dp_rank: int = setting(
        0,
        Integer(least=0, bound="dp_rank"),
        "This process's number among the processes that share the work, from 0; each has one LLM.",
        group="Ranks",
        option="",
    )
    dp_size: int = setting(
        1,
        Integer(bound="dp_size"),
        "How many processes share the work.",
        group="Ranks",
        option="",
        agree=(RANKS,),
    )
    dp_address: str | None = setting(
        None,
        Address(
            form=r"[^/,]+:([1-9]\d{0,4})",
            expected=f"host:port of rank 0, with a port from 1 to {MAX_PORT}",
        ),
        "host:port at which rank 0 listens for the others.",
        group="Ranks",
        unset="none",
        option="",
    )
    dp_timeout: float = setting(
        15.0,
        Seconds(),
        "Time of silence after which another rank is taken for dead.",
        group="Ranks",
        unit="seconds",
        option="",
    )
    enable_dp_attention: bool = setting(
        False,
        Flag(),
        "Give each rank its own requests and KV, and a part of every MLP. All ranks step together.",
        group="Ranks",
        option="",
    )

    def __attrs_post_init__(self) -> None:
        self._check_pool()
        self._check_disaggregation()
        self._check_ranks()

    def _check_pool(self) -> None:
        if self.max_total_tokens == self.page_size == 1:  # a larger page has room for two
            raise UsageError(
                f"max_total_tokens=1 with page_size=1: expected at least 2 slots, {_WHY_TWO}: "
                "raise max_total_tokens"
            )

    def _check_disaggregation(self) -> None:
        mode, address = self.disaggregation, self.disaggregation_address
        if mode is None and address is not None:
            raise UsageError(
                f"disaggregation_address={shown(address)} without disaggregation: expected one of "
                f"{', '.join(DISAGGREGATION_MODES)} with it"
            )
        if mode is None and self.disaggregation_key is not None:
            raise UsageError(
                "disaggregation_key without disaggregation: expected one of "
                f"{', '.join(DISAGGREGATION_MODES)} with it"
            )
        if mode == "both" and self.enable_dp_attention and self.dp_size != 1:
            raise UsageError(
                "disaggregation='both' with enable_dp_attention: the two sides of a process take "
                "turns, and would wait for those of another that take them the other way round; "
                "expected prefill or decode, with ranks of their own for each side"
            )

    def _check_ranks(self) -> None:
        rank, size = self.dp_rank, self.dp_size
        if rank >= size:
            raise UsageError(f"dp_rank={rank}: expected 0 to {size - 1}, since dp_size={size}")
        if size == 1:
            return
        if not self.enable_dp_attention:
            raise UsageError(
                f"dp_size={size} without enable_dp_attention: such ranks share nothing: make an "
                "LLM of its own for each, or enable_dp_attention=True"
            )
        if self.dp_address is None:
            raise UsageError(f"dp_size={size}: expected dp_address, host:port of rank 0, too")

    def agreed(self, by: str) -> dict[str, Any]:
        """Return the settings on which ``RANKS`` or ``INSTANCES`` must agree, by name."""
        return {name: getattr(self, name) for name in agreeing(by)}

    def of_partner(self, address: str) -> EngineConfig:
        """Return those of the prefill instance in the same process (``disaggregation="both"``).

        Args:
            address: of the decode instance.
        """
        return attrs.evolve(self, disaggregation="prefill", disaggregation_address=address)

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for ``from_json`` in another process. The algorithm must be a name."""
        return attrs.asdict(self, recurse=False)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> EngineConfig:
        """Return the settings that ``as_json`` gave, also after they were JSON text."""
        return cls(**fields)


def agreeing(by: str) -> dict[str, Setting]:
    """Return the settings on which ``RANKS`` or ``INSTANCES`` must agree."""
    return {name: about for name, about in settings_of(EngineConfig).items() if by in about.agree}


def one_way(function: Callable[_P, None]) -> Callable[_P, None]:
    """Wrap a method that takes an ``EngineConfig`` as ``model``, or settings: have it refuse both.

    The method itself cannot tell a setting that is given its default value from one that is not
    given.

    Raises:
        UsageError: they are given both ways.
    """

    @wraps(function)
    def checked(*args: _P.args, **settings: _P.kwargs) -> None:
        model = settings.get("model", args[1] if len(args) > 1 else None)
        more = [name for name in settings if name != "model"]
        if isinstance(model, EngineConfig) and more:
            about = settings_of(EngineConfig).get(more[0])
            value = "…" if about and about.is_secret else shown(settings[more[0]])
            raise UsageError(
                f"an EngineConfig and {more[0]}={value} are given: expected the "
                f"one or the others; attrs.evolve(config, {more[0]}=…) makes a changed one"
            )
        function(*args, **settings)

    return checked


def config_of(model: str | Path | EngineConfig | None, **settings: Any) -> EngineConfig:
    """The settings that are given one by one, or all of them as ``model``."""
    return model if isinstance(model, EngineConfig) else EngineConfig(model=model, **settings)
