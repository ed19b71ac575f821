"""``specplug doctor --bisect``: what makes a token wrong. torch loads when it runs."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from specplug.bench.bisection import KERNELS, RIGHT, ROUNDS, Bisection, Trial, bisect
from specplug.cli import check_working_directory
from specplug.cli.options import ENGINE, GRAMMAR, OWN, SAMPLING, check_algorithm, chosen
from specplug.cli.progress import loading_bars, told
from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.config import EngineConfig
from specplug.errors import UsageError
from specplug.printable import printable
from specplug.registry import Registry
from specplug.text_file import decode_text

if TYPE_CHECKING:
    from specplug.bench.parting import Difference, Parting, TokenScore

_LINE = 100
"""The most characters of a text that is quoted."""


def bisect_prompt(options: Mapping[str, Any], *, as_json: bool) -> int:
    """Bisect and print the report.

    Args:
        options: all of the command's, by name.

    Returns:
        The exit code: 0 if the tokens agree, 1 if they differ.
    """
    from specplug.sampling_params import SamplingParams

    check_working_directory()
    model, text = options["bisect"]
    engine = [option for option in ENGINE if option.name != "model"]
    config = EngineConfig(model=model, **chosen((*engine, OWN), options))
    params = SamplingParams(**chosen((*SAMPLING, *GRAMMAR), options))
    registry = Registry()
    check_algorithm(registry, config)
    registry.check_extensions(config.disable_extensions)
    prompt = _prompt(text)
    with told(verbose=options["verbose"]), reserve_standard_output() as out:
        found = _bisect(config, prompt, params)
        if as_json:
            import json

            click.echo(json.dumps(as_mapping(found), indent=2), file=out)
    if not as_json:
        print_bisection(found)
    return 0 if found.round is None else 1


def _prompt(text: str) -> str:
    prompt = decode_text("standard input", sys.stdin.buffer.read()) if text == "-" else text
    if not prompt:
        where = "standard input is empty" if text == "-" else "--bisect: the prompt is ''"
        raise UsageError(f"{where}; expected a prompt, or - for standard input")
    return prompt


def _bisect(config: EngineConfig, prompt: str, params: Any) -> Bisection:
    """Run the bisection, with a progress bar on standard error if that is a terminal."""
    with loading_bars("looking for a wrong token") as bar:
        from specplug.llm import LLM
        from specplug.model.loading import silence_libraries

        silence_libraries()

        def report(what: str, done: int, most: int) -> None:
            bar("", f"run {done + 1} of at most {most}, {what}", done, most)

        return bisect(config, prompt, params, LLM, report)


def as_mapping(found: Bisection) -> dict[str, Any]:
    """Return what ``--json`` prints. Keys are only ever added."""
    outputs = {"reference": found.reference.outputs[0], "run": _run_output(found)}
    return {
        "equal": found.round is None,
        "tokens_compared": len(found.reference.outputs[0].token_ids),
        "prompt_tokens": len(found.reference.outputs[0].prompt_token_ids),
        "round": None if found.round is None else ROUNDS[found.round],
        "culprits": [dict(suspect.changes) for suspect in found.culprits],
        "tried": [
            {
                "part": verdict.suspect.part,
                "changes": dict(verdict.suspect.changes),
                "status": verdict.status,
                "note": verdict.note,
            }
            for verdict in found.verdicts
        ],
        "parting": None if found.parting is None else _finite(attrs.asdict(found.parting)),
        "token_ids": {name: list(output.token_ids) for name, output in outputs.items()},
        "texts": {name: output.text for name, output in outputs.items()},
        "config": {name: _plain(found.run.effective[name]) for name in found.run.effective},
        "reference_config": {
            name: _plain(found.reference.effective[name]) for name in found.reference.effective
        },
    }


def _run_output(found: Bisection) -> Any:
    return found.run.outputs[found.round or 0]


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def _finite(value: Any) -> Any:
    """Return a value for JSON: None in the place of a number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def print_bisection(found: Bisection) -> None:
    """Print the report for a reader."""
    output, effective = found.reference.outputs[0], found.run.effective
    drafts = ", ".join(
        f"{name} {effective[name]}" for name in ("num_steps", "topk", "num_draft_tokens")
    )
    print_table(
        ("run", "settings"),
        [
            ("as it is", f"{effective['algorithm']} with {drafts}; {_state(found.run)}"),
            ("reference", f"NONE; {_state(found.reference)}"),
        ],
    )
    click.echo()
    count = f"{len(output.token_ids)} tokens after a prompt of {len(output.prompt_token_ids)}"
    if found.parting is None:
        rounds = "with an empty prefix cache and again with the prompt in it"
        click.secho(f"equal: {count}, {rounds}", fg="green", bold=True)
        return
    rows = [(v.suspect.part, v.suspect.setting, v.status, v.note) for v in found.verdicts]
    print_table(("without", "setting", "tokens", "why not tried"), rows)
    click.echo()
    for line in lines_of_parting(found.parting, again=found.round == 1):
        click.echo(printable(line))
    click.echo()
    click.secho(printable(_blame(found)), fg="red", bold=True)


def _state(trial: Trial) -> str:
    effective = trial.effective
    shown = ("dtype", "device", "page_size", "chunked_prefill_size")
    on = ("overlap", "prefix_cache", "cuda_graph", "cpu_kernels", "row_invariance", "mixed_chunk")
    parts = [f"{name} {effective[name]}" for name in shown]
    parts += [name for name in on if effective[name] == "on"]
    return ", ".join([*parts, f"{KERNELS}={trial.kernels}"])


def lines_of_parting(parting: Parting, *, again: bool) -> list[str]:
    """Return lines that say where the runs part."""
    expected, found = parting.expected, parting.found
    lines = [
        f"first wrong token: position {parting.position}, number {parting.index} of the output"
        + (", when the prompt was in the prefix cache" if again else ""),
        f"  expected    {_token(expected)}",
        f"  found       {_token(found)}",
        f"  chosen in   {parting.place}",
    ]
    if parting.reference_gap is not None:
        tie = "a near-tie: rounding alone may flip it" if parting.is_near_tie else "no near-tie"
        lines.append(f"  gap         {parting.reference_gap:.6g} in the reference: {tie}")
    elif expected.token_id is not None and found.token_id is not None:
        lines.append("  gap         large: the token is not among the likely ones of the reference")
    if parting.run_gap is not None:
        lines.append(f"              {parting.run_gap:.6g} in the run, the other way round")
    return [*lines, *_layers(parting)]


def _layers(parting: Parting) -> list[str]:
    if not parting.is_seen:
        return [
            "hidden states: with these kept, the run gives the right tokens. It then computes the "
            "prompt whole, and replays nothing that follows a pass: look there"
        ]
    if parting.first is None:
        return [
            f"hidden states: equal in every bit at all {parting.num_rows} positions before it: "
            "look at sampling, grammar and verify, not at the target"
        ]
    beyond = parting.first_beyond_rounding
    lines = [f"hidden states: {parting.num_rows} positions before it are compared"]
    if beyond is None:
        lines.append("  wrong       nowhere: all differences are as small as rounding makes them")
    else:
        lines.append(f"  wrong from  {_difference(beyond)}")
    if parting.largest is not None:
        lines.append(f"  largest     {_difference(parting.largest)}")
    lines.append(f"  any bit     {_difference(parting.first)}")
    return lines


def _difference(found: Difference) -> str:
    layer = "the embedding" if found.layer < 0 else f"layer {found.layer}"
    return (
        f"position {found.position}, {layer}, {found.place}: differs by {found.largest:.3g}, "
        f"values up to {found.scale:.3g}"
    )


def _token(score: TokenScore) -> str:
    if score.token_id is None:
        return "nothing: the output ends before"
    return f"{score.token_id}" + ("" if score.text is None else f" {score.text[:_LINE]!r}")


def _blame(found: Bisection) -> str:
    """Return the sentence that names the setting."""
    settings = " and ".join(suspect.setting for suspect in found.culprits)
    parts = " and ".join(suspect.part for suspect in found.culprits)
    if not any(verdict.status == RIGHT for verdict in found.verdicts):
        return f"to blame: {parts} together; the tokens are right with {settings}"
    more = ", which chooses the arithmetic" if found.culprits[0].is_arithmetic else ""
    return f"to blame: {parts}{more}; the tokens are right with {settings}"
