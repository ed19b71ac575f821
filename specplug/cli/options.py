"""Options that commands share: what is told to ``LLM`` and to ``SamplingParams``. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from specplug.algorithm import DEFAULT_MODEL, AlgorithmInfo, SpecConfig
from specplug.bounds import MAX_SECONDS, bound_of, shown


def _no_limit(ctx: click.Context, option: click.Parameter, value: int) -> int | None:
    if value == -1:
        return None
    if value < 1:
        raise click.BadParameter(f"{value} is neither at least 1 nor -1 (no limit).")
    return value


def _text_or_file(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    file = Path(value[1:])
    try:
        return file.read_bytes().decode("utf-8-sig")
    except OSError as error:
        why = error.strerror or error
        raise click.BadParameter(f"file {str(file)!r} cannot be read: {why}.") from error
    except UnicodeDecodeError as error:
        raise click.BadParameter(
            f"file {str(file)!r} is not UTF-8 (byte {error.start}); expected UTF-8 text."
        ) from error


COUNT = click.IntRange(min=1)


class Bounded(click.IntRange):
    """An integer of at least 1 and within the bound of a setting.

    Args:
        setting: whose bound (``specplug.bounds``).
    """

    def __init__(self, setting: str) -> None:
        super().__init__(min=1)
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The integer, or a usage error that says why it is none or too large."""
        number: int = super().convert(value, param, ctx)
        bound = bound_of(self._setting)
        if bound is not None and number > bound.most:
            self.fail(f"{shown(number)}: expected at most {bound.most}, {bound.why}.", param, ctx)
        return number


class Seconds(click.FloatRange):
    """A duration above 0, in seconds, and none that never ends."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=MAX_SECONDS)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; not a number is none, which no comparison would tell."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return number


ENGINE = (
    click.Option(
        ["--model"],
        default=DEFAULT_MODEL,
        show_default=True,
        help="Folder or hub id of a causal language model of transformers.",
    ),
    click.Option(
        ["--speculative-algorithm"],
        default="NONE",
        show_default=True,
        help="An installed algorithm (specplug list).",
    ),
    click.Option(["--speculative-draft-model-path"], help="Folder of its draft weights."),
    click.Option(["--speculative-num-steps"], type=Bounded("num_steps"), help="Draft depth S."),
    click.Option(
        ["--speculative-eagle-topk"], type=Bounded("topk"), help="Branches K kept a step."
    ),
    click.Option(
        ["--speculative-num-draft-tokens"],
        type=Bounded("num_draft_tokens"),
        help="Tokens N that the target verifies a step, root included.",
    ),
    click.Option(
        ["--page-size"],
        type=Bounded("page_size"),
        default=16,
        show_default=True,
        help="Tokens a KV page.",
    ),
    click.Option(
        ["--chunked-prefill-size"],
        type=int,
        default=512,
        show_default=True,
        callback=_no_limit,
        help="Token budget of a step: prompt tokens, and drafts if they share it; -1: no limit.",
    ),
    click.Option(
        ["--enable-mixed-chunk"],
        is_flag=True,
        help="Prompts and drafts share a step, so that a long prompt holds up nobody.",
    ),
    click.Option(
        ["--max-running-requests"],
        type=Bounded("max_running_requests"),
        default=8,
        show_default=True,
        help="Most prompts that run at a time.",
    ),
    click.Option(
        ["--max-total-tokens"],
        type=COUNT,
        help="Slots of the KV pool.  [default: what fits a memory budget]",
    ),
    click.Option(
        ["--disable-overlap-schedule"],
        is_flag=True,
        help="Process a step's results before the next step is launched.",
    ),
    click.Option(
        ["--disable-radix-cache"],
        is_flag=True,
        help="Do not keep the KV of prompts and outputs for others that begin alike.",
    ),
    click.Option(
        ["--disable-cuda-graph"],
        is_flag=True,
        help="Do not record passes as CUDA graphs.",
    ),
    click.Option(
        ["--skip-model-check"],
        is_flag=True,
        help="Do not prove at loading that the model gives its own logits here.",
    ),
    click.Option(
        ["--seed"],
        type=click.IntRange(0, 2**32 - 1),
        default=0,
        show_default=True,
        help="Of the sampling noise; each prompt derives its own from it.",
    ),
    click.Option(
        ["--dtype"],
        type=click.Choice(["auto", "float32", "bfloat16", "float16", "float64"]),
        default="auto",
        show_default=True,
        help="Of weights and activations; auto: float32 on the CPU, else the checkpoint's.",
    ),
    click.Option(
        ["--disable-extension", "disable_extensions"],
        multiple=True,
        metavar="NAME",
        help="An installed extension that this run goes without; may be given many times.",
    ),
    click.Option(["--device"], help="cpu, cuda or cuda:N.  [default: CUDA if there is one]"),
    click.Option(
        ["--num-threads"],
        type=Bounded("num_threads"),
        help="torch's on the CPU.  [default: one for a small model, else torch's choice]",
    ),
)
"""Options that are arguments of ``LLM``, under the same names and with the same defaults."""

DISAGGREGATION = (
    click.Option(
        ["--disaggregation-mode", "disaggregation"],
        type=click.Choice(["prefill", "decode"]),
        help="Prefill for decode instances, or have prompts prefilled by prefill instances.",
    ),
    click.Option(
        ["--disaggregation-address"],
        metavar="tcp://HOST:PORT",
        help="Where the decode instance waits for prefill instances; these may name several, with "
        "commas between them.  [default: port 30100 of this machine]",
    ),
    click.Option(
        ["--disaggregation-timeout"],
        type=Seconds(),
        default=30.0,
        show_default=True,
        help="Seconds without progress after which a request is prefilled elsewhere.",
    ),
)
"""Options that are arguments of ``LLM`` too, of servers alone."""

SAMPLING = (
    click.Option(
        ["--temperature"], type=float, default=0.0, show_default=True, help="0 is greedy."
    ),
    click.Option(
        ["--top-p"],
        type=float,
        default=1.0,
        show_default=True,
        help="Keep the smallest set of tokens that is this likely.",
    ),
    click.Option(
        ["--top-k"],
        type=int,
        default=0,
        show_default=True,
        help="Keep this many tokens; 0 or -1: all.",
    ),
    click.Option(
        ["--min-p"],
        type=float,
        default=0.0,
        show_default=True,
        help="Keep tokens this likely relative to the most likely one.",
    ),
    click.Option(
        ["--repetition-penalty"],
        type=float,
        default=1.0,
        show_default=True,
        help="On tokens of prompt and output; 1: none.",
    ),
    click.Option(
        ["--presence-penalty"],
        type=float,
        default=0.0,
        show_default=True,
        help="On tokens of the output, once.",
    ),
    click.Option(
        ["--frequency-penalty"],
        type=float,
        default=0.0,
        show_default=True,
        help="On tokens of the output, for each time.",
    ),
    click.Option(
        ["--max-new-tokens", "max_tokens"],
        type=COUNT,
        default=128,
        show_default=True,
        help="Most tokens to generate for a prompt.",
    ),
    click.Option(
        ["--stop"], multiple=True, help="String that ends the output; may be given many times."
    ),
    click.Option(["--ignore-eos"], is_flag=True, help="Go on after the end-of-sequence token."),
)
"""Options that are arguments of ``SamplingParams``."""

GRAMMAR = (
    click.Option(
        ["--json-schema"],
        metavar="TEXT|@FILE",
        callback=_text_or_file,
        help="JSON schema that the output must match; with @, the file it is in. "
        "Needs specplug[grammar], as the next two do.",
    ),
    click.Option(["--regex"], help="Regular expression that the whole output must match."),
    click.Option(
        ["--ebnf"],
        metavar="TEXT|@FILE",
        callback=_text_or_file,
        help="Grammar in GBNF that the output must match, from its rule root; with @, its file.",
    ),
)
"""Options that are arguments of ``SamplingParams`` too: what the output must look like."""


def chosen(group: Sequence[click.Parameter], options: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the options of ``group``, by name."""
    return {option.name: options[option.name] for option in group if option.name}


def check_speculation(info: AlgorithmInfo, engine: Mapping[str, Any]) -> None:
    """Refuse at once what ``LLM`` would refuse after torch has loaded.

    Args:
        engine: arguments of ``LLM``; those that are missing have their defaults.

    Raises:
        UsageError: the algorithm cannot run with these settings.
    """
    typed = engine.get("speculative_draft_model_path")
    # Whether weights are shipped depends on the model: that is for LLM to say.
    untold = Path(".") if info.capabilities.draft_model else None
    SpecConfig.resolve(
        info,
        num_steps=engine.get("speculative_num_steps"),
        topk=engine.get("speculative_eagle_topk"),
        num_draft_tokens=engine.get("speculative_num_draft_tokens"),
        draft_model_path=Path(typed) if typed else untold,
    )
