"""``specplug bench``: algorithms beside plain decoding. torch loads inside the command."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specplug.algorithm import HELD_OUT_PROMPTS
from specplug.algorithm_names import SETTINGS
from specplug.bench.dataset import Deal, deal, num_dealt, read_prompts
from specplug.bench.variant import EVERY, Variant, parse_variants
from specplug.bench.workload import COMPLETION, NOISE, NOISE_TEMPERATURE, WORKLOADS, make_workload
from specplug.cli import say
from specplug.cli.engines import MORE, check_options, check_run, run_options
from specplug.cli.options import (
    COUNT,
    ENGINE,
    OWN,
    SAMPLING,
    VERBOSE,
    Bounded,
    GroupedCommand,
    check_speculation,
    chosen,
)
from specplug.cli.progress import Lines, told
from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.config import EngineConfig
from specplug.errors import SpecplugError, UsageError
from specplug.host import EngineOptions, HostPlugin, MeasuredEngine
from specplug.registry import Registry
from specplug.speculative.automatic import select_algorithm

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from specplug.bench.measurement import Observer, OpenEngine
    from specplug.bench.summary import Report, Summary
    from specplug.sampling_params import SamplingParams

REFRESH_SECONDS = 1.0
"""The least time between two drawings of the progress bar while something is measured."""


def _batch_sizes(ctx: click.Context, option: click.Parameter, value: str) -> list[int]:
    parts = [part.strip() for part in value.split(",") if part.strip()]
    if not parts or not all(part.isdecimal() and len(part) <= 18 and int(part) for part in parts):
        raise click.BadParameter(f"{value!r} is no list of integers of at least 1, as in 1,8.")
    size = Bounded("max_running_requests")
    return sorted({size.convert(part, option, ctx) for part in parts})


MEASUREMENT = (
    click.Option(
        ["--engine"],
        metavar="NAME",
        show_default="specplug's own",
        help="Another engine to measure in; its package must be installed.",
    ),
    click.Option(
        ["--speculative-algorithms"],
        multiple=True,
        default=(EVERY,),
        show_default=True,
        metavar="A,B,…",
        help="Installed algorithms, or all, or auto; NONE always runs. An algorithm may have "
        "settings of its own: NAME:steps=7,topk=4,tokens=16 (also draft=FOLDER). '[A,B]' is one "
        "variant: several algorithms in one run.",
    ),
    click.Option(
        ["--batch-sizes"],
        default="1,8",
        show_default=True,
        callback=_batch_sizes,
        metavar="B,…",
        help="Prompts that run together.",
    ),
    click.Option(
        ["--dataset"],
        type=click.Path(dir_okay=False, path_type=Path),
        show_default="Python that tiny-code never saw",
        help='JSON Lines file, {"prompt": …} per line; or one of SPEED-Bench, Spec-Bench or '
        "ShareGPT as they are published.",
    ),
    click.Option(
        ["--workload"],
        type=click.Choice(WORKLOADS),
        default=COMPLETION,
        show_default=True,
        help="What is made of the prompts: completion; editing, where most of a prompt comes "
        "again; agent, requests that share and repeat, with tool calls; noise, at temperature 4; "
        "mixed, all four in one batch.",
    ),
    click.Option(
        ["--rounds"],
        type=COUNT,
        default=5,
        show_default=True,
        metavar="N",
        help="Rounds that are measured.",
    ),
    click.Option(
        ["--num-prompts"],
        type=COUNT,
        metavar="N",
        show_default="the batch size, at least 4",
        help="Prompts per round; each round has others.",
    ),
    click.Option(
        ["--output"],
        type=click.Path(file_okay=False, path_type=Path),
        help="Folder for bench.json and plots: speedup.png, acceptance.png, nodes.png, "
        "time_split.png, reliability.png.",
    ),
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON instead of the tables."),
)

SPECULATION = tuple(option for option in ENGINE if option.name in SETTINGS.values())
"""Arguments of ``LLM`` for all variants but the baseline; a variant's own go before them."""

TOLD = frozenset(option.name or "" for option in (*MEASUREMENT, *SAMPLING, VERBOSE)) | {"seed"}
"""Options that have a meaning in every engine, beyond those of all commands."""

_OURS = "speculative_algorithm", "max_running_requests"
SHARED = tuple(
    option for option in ENGINE if option not in SPECULATION and option.name not in _OURS
)
"""Arguments of ``LLM`` that are the same for all variants."""


@click.command(
    cls=GroupedCommand,
    params=[*MEASUREMENT, *SPECULATION, *SHARED, *SAMPLING, VERBOSE, MORE],
    headings={"Measurement": MEASUREMENT},
)
@click.pass_context
def bench(ctx: click.Context, /, **options: Any) -> None:
    """Measure algorithms beside plain decoding.

    They take turns on the same prompts in one process, each loaded once and warmed up. Their
    outputs are compared with those of NONE: exits with 1 if any differs, as rounding in bfloat16 on
    a GPU can make it do.

    With --engine all of them run in another engine, NONE without specplug, if that engine's package
    is installed (specplug-NAME); its own arguments follow after `--`.
    """
    check_options(ctx, options["engine"], TOLD)
    with told(verbose=options["verbose"]), reserve_standard_output() as out:
        variants, problems = _variants(options)
        sizes, per_size = options["batch_sizes"], (options["rounds"], options["num_prompts"])
        prompts = make_workload(
            options["workload"],
            read_prompts(options["dataset"] or HELD_OUT_PROMPTS),
            most=max(num_dealt(size, *per_size) for size in sizes),
        )
        deals = {size: deal(prompts, size, *per_size) for size in sizes}
        _prepare(options["output"])
        from specplug.sampling_params import SamplingParams

        if options["workload"] == NOISE:
            options["temperature"] = NOISE_TEMPERATURE
        params = SamplingParams(**chosen(SAMPLING, options))
        report = _measure(variants, problems, deals, params, options)
        if options["as_json"]:
            import json

            click.echo(json.dumps(report.as_mapping(), indent=2), file=out)
    if not options["as_json"]:
        _print(report)
    _tell(report)
    if options["output"] is not None:
        _write(report, options["output"])
    ctx.exit(0 if report.sound else 1)


def _variants(options: Mapping[str, Any]) -> tuple[list[Variant], list[dict[str, Any]]]:
    """Return the variants to measure, and those that cannot run; one that was named must."""
    registry = Registry()
    registry.check_extensions(options["disable_extensions"])
    host = None if options["engine"] is None else registry.host(options["engine"])
    enabled = dict.fromkeys(entry.name for entry in registry.entries() if not entry.disabled)
    common = {k: v for k, v in chosen((*SPECULATION, OWN), options).items() if v is not None}
    found, problems = [], []
    for variant in parse_variants(options["speculative_algorithms"], list(enabled)):
        try:
            found.append(_fitted(variant, registry, options["model"], common, host))
        except SpecplugError as error:
            if variant.named:
                raise
            problem = {"variant": variant.label, "batch_size": None, "skipped": True}
            problems.append({**problem, "reason": str(error)})
    return found, problems


def _fitted(
    variant: Variant,
    registry: Registry,
    model: str | None,
    common: Mapping[str, Any],
    host: HostPlugin | None,
) -> Variant:
    """Return a variant under its settings.

    Args:
        model: the target's folder or id.
        common: the settings typed for all variants.

    Raises:
        SpecplugError: it cannot run like that.
    """
    asked = EngineConfig(model=model, speculative_algorithm=variant.algorithm, **common)
    able = None if host is None else host.describe()
    selected, _ = select_algorithm(registry, asked, host=able)
    fitting = dict(common)
    if not selected.info.capabilities.draft_model:
        fitting.pop("speculative_draft_model_path", None)
    own = selected.info.setting_names
    typed = {k: v for k, v in common["speculative_settings"].items() if k in own}
    fitting["speculative_settings"] = typed
    fitted = variant.with_common(fitting)
    config = EngineConfig(**fitted.arguments)
    if host is None:
        check_speculation(selected.info, config)
    else:
        check_run(host, selected, config)
    return fitted


def _prepare(output: Path | None) -> None:
    """Refuse before anything runs what would fail at its end."""
    if output is None:
        return
    if find_spec("matplotlib") is None:
        raise SpecplugError(
            '--output draws plots, which needs matplotlib: pip install "specplug[bench]"'
        )
    try:
        output.mkdir(parents=True, exist_ok=True)
        writable = os.access(output, os.W_OK | os.X_OK)
    except OSError as error:
        why = error.strerror or error
        raise UsageError(f"--output {str(output)!r} cannot be made: {why}") from error
    if not writable:
        raise UsageError(f"--output {str(output)!r}: nothing may be written there")


def _measure(
    variants: Sequence[Variant],
    problems: Sequence[Mapping[str, Any]],
    deals: Mapping[int, Deal],
    params: SamplingParams,
    options: Mapping[str, Any],
) -> Report:
    """Measure at each batch size in turn."""
    from specplug.bench.measurement import measure
    from specplug.bench.summary import summarize
    from specplug.model.loading import silence_libraries

    silence_libraries()
    open_engine = _opener(options)
    summaries, told = [], list(problems)
    count = len(variants) * sum(deal.num_prompts for deal in deals.values())
    with _progress(count) as observer:
        for size, dealt in deals.items():
            left = [c for c in variants if c.label not in {p["variant"] for p in told}]
            complete, failed = summarize(measure(left, size, dealt, params, open_engine, observer))
            summaries += complete
            told += failed
    return _report(summaries, told, deals, options)


def _opener(options: Mapping[str, Any]) -> OpenEngine:
    """Return what makes the engine of a variant: the embedded one, or another."""
    shared, engine = chosen(SHARED, options), options["engine"]

    def open_embedded(variant: Variant, size: int) -> MeasuredEngine:
        from specplug.bench.choices import WatchedLLM
        from specplug.llm import LLM

        make = WatchedLLM if variant.is_several else LLM
        return make(
            speculative_algorithm=variant.algorithm,
            **{**shared, **variant.arguments, "max_running_requests": size},
        )

    def open_other(variant: Variant, size: int) -> MeasuredEngine:
        config = EngineConfig(model=shared["model"], dtype=shared["dtype"], **variant.arguments)
        asked = run_options(config, variant.algorithm, options["more"])
        return (
            Registry()
            .host(engine)
            .open_engine(EngineOptions(**asked, max_running_requests=size, seed=shared["seed"]))
        )

    return open_embedded if engine is None else open_other


def _report(
    summaries: Sequence[Summary],
    problems: Sequence[Mapping[str, Any]],
    deals: Mapping[int, Deal],
    options: Mapping[str, Any],
) -> Report:
    from specplug.bench.machine import describe_machine, versions
    from specplug.bench.summary import Report

    config = summaries[0].series.config
    names = {name for summary in summaries for name in summary.algorithms}
    host = None if options["engine"] is None else Registry().host(options["engine"])
    others = {} if host is None else {k: v for k, v in host.versions().items() if v is not None}
    plugins = [entry.distribution for entry in Registry().entries() if entry.name in names]
    settings = {
        "in": None if host is None else host.describe().name,
        "model": EngineConfig(model=options["model"]).model,
        "dtype": config["dtype"],
        "device": config["device"],
        "dataset": "the built-in set" if options["dataset"] is None else str(options["dataset"]),
        "workload": options["workload"],
        "rounds": options["rounds"],
        "batch_sizes": list(deals),
        "num_prompts": [deal.num_prompts_per_round for deal in deals.values()],
        "engine": {
            **chosen([*SPECULATION, OWN, *SHARED], options),
            "page_size": config["page_size"],
        },
        "sampling": chosen(SAMPLING, options),
    }
    again = [str(size) for size, deal in deals.items() if deal.comes_again]
    notes = [
        f"at batch {' and '.join(again)} prompts came more than once: an algorithm that learns "
        "from earlier requests looks better than it is; use a larger dataset or fewer rounds"
    ]
    return Report(
        summaries=summaries,
        problems=problems,
        settings=settings,
        machine=describe_machine(config["device"]),
        versions={**versions(["specplug", "torch", "transformers", *plugins]), **others},
        notes=notes if again else [],
    )


@contextmanager
def _progress(count: int) -> Iterator[Observer]:
    """Show the progress on standard error: a bar on a terminal, elsewhere lines.

    The bar is drawn between the measured runs, and in there at most once in ``REFRESH_SECONDS``.
    """
    if not sys.stderr.isatty():
        from specplug.bench.measurement import Observer

        with Lines(count) as lines:
            yield Observer(
                begin=lines.begin, say=lines.say, advance=lines.advance, waiting=lines.finished
            )
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeRemainingColumn()
    bar = Progress(
        *columns,
        TextColumn("{task.description}", markup=False),
        console=Console(stderr=True),
        auto_refresh=False,
        speed_estimate_period=3600,
        transient=True,
    )
    with bar:
        yield _bar_observer(bar, bar.add_task("", total=count))


def _bar_observer(bar: Progress, task: TaskID) -> Observer:
    from specplug.bench.measurement import Observer

    drawn = time.monotonic()

    def show(text: str) -> None:
        nonlocal drawn
        bar.update(task, description=text, refresh=True)
        drawn = time.monotonic()

    def waiting(output: object) -> None:
        nonlocal drawn
        if time.monotonic() - drawn > REFRESH_SECONDS:
            bar.refresh()
            drawn = time.monotonic()

    return Observer(say=show, advance=lambda n: bar.advance(task, n), waiting=waiting)


def _print(report: Report) -> None:
    from specplug.bench.summary import benefits, caption, legend, tables

    for table in tables(report):
        print_table(table.columns, table.rows, table.right)
        click.echo()
    for line in (*benefits(report), *caption(report), *legend(report)):
        click.secho(line, dim=True)


def _tell(report: Report) -> None:
    """Print problems and notes on standard error, a line each."""
    from specplug.bench.summary import differences, undrafted

    for problem in report.problems:
        size = problem["batch_size"]
        where = "" if size is None else f", batch {size}"
        what = "left out" if problem["skipped"] else "failed"
        kind = "warning" if problem["skipped"] else "error"
        say(kind, f"{problem['variant']}{where}: {what}: {problem['reason']}")
    for line in (*report.notes, *undrafted(report)):
        say("warning", line)
    for line in differences(report):
        say("error", line)


def _write(report: Report, folder: Path) -> None:
    import json

    from specplug.bench.plots import save

    try:
        text = json.dumps(report.as_mapping(), indent=2)
        (folder / "bench.json").write_text(text + "\n", encoding="utf-8")
        plots = save(report, folder)
    except OSError as error:
        why = error.strerror or error
        raise SpecplugError(f"--output {str(folder)!r} cannot be written: {why}") from error
    click.secho(f"written to {folder}: bench.json, {', '.join(plots)}", dim=True, err=True)
