"""``specplug doctor``: everything that is wrong with the installed plugins, and its fix; with
``--bisect`` what makes a token wrong."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs
import click
import importlib_metadata
from click.core import ParameterSource

from specplug.algorithm import API_VERSION
from specplug.cli import COMMANDS
from specplug.cli.options import ENGINE, GRAMMAR, SAMPLING, VERBOSE, GroupedCommand
from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.contract import Problem, error_line, let_ctrl_c_pass, outdated, plugin_traceback
from specplug.entries import (
    DISABLE,
    AlgorithmEntry,
    ExtensionEntry,
    HostEntry,
    PluginEntry,
    parse_value,
)
from specplug.errors import UsageError
from specplug.printable import printable
from specplug.registry import (
    Examination,
    Extension,
    Registry,
    register_commands,
    register_options,
)
from specplug.sources import heavy_imports, look

DISTRIBUTIONS = ("specplug", "torch", "triton", "transformers", "tokenizers", "safetensors")
"""Distributions whose versions a bug report needs. Metadata has them; none is imported."""

_MOST_SECONDS = 120
"""The time limit of the process that imports torch."""


RUN = (*(each for each in ENGINE if each.name != "model"), *SAMPLING, *GRAMMAR, VERBOSE)
"""Options of the run that ``--bisect`` examines."""

REPORT = (
    click.Option(["--json", "as_json"], is_flag=True, help="Print JSON."),
    click.Option(
        ["--bisect"],
        nargs=2,
        metavar="MODEL PROMPT",
        help="Find what makes a token of this prompt wrong. MODEL is a folder or a hub id; a dash "
        "reads the prompt from standard input. All further options are of that run.",
    ),
)


@click.command(cls=GroupedCommand, params=[*REPORT, *RUN], headings={"Report": REPORT})
@click.pass_context
def doctor(ctx: click.Context, /, as_json: bool, **options: Any) -> None:
    """Import every plugin and report every problem with its fix.

    Exits with 1 if any plugin is broken. Disabled algorithms are not imported. Of a host, a package
    that runs algorithms in another engine, it says which versions of that engine are installed, and
    whether algorithms can run there. At last it says which kernels run on this machine, and why.

    With --bisect it looks for a wrong token instead: it runs the prompt as the options say and by
    plain decoding. If the tokens differ it names the setting that is to blame, and the step, layer
    and row where the two runs part. Exits with 1 if they differ.
    """
    if options["bisect"] is not None:
        from specplug.cli.bisection import bisect_prompt

        ctx.exit(bisect_prompt(options, as_json=as_json))
    _check_no_run(ctx)
    with reserve_standard_output() as out:
        registry = Registry()
        algorithms = [_visit(registry, entry) for entry in registry.entries()]
        algorithms += [Visit(entry) for entry in registry.lost()]
        extensions = [_visit(registry, entry) for entry in registry.extension_entries()]
        hosts = [_visit(registry, entry) for entry in registry.host_entries()]
        visits = [*algorithms, *extensions, *hosts]
        kernels, unknown = _kernels()
        notes = [*_notes(registry, visits), *unknown]
        if as_json:
            report = {
                "versions": _versions(hosts),
                "algorithms": [visit.as_mapping() for visit in algorithms],
                "extensions": [visit.as_mapping() for visit in extensions],
                "hosts": [visit.as_mapping() for visit in hosts],
                "kernels": kernels,
                "notes": notes,
            }
            click.echo(json.dumps(report, indent=2), file=out)
    if not as_json:
        _print_report(visits, kernels, notes)
    ctx.exit(1 if any(visit.broken for visit in visits) else 0)


def _check_no_run(ctx: click.Context) -> None:
    """Refuse options of a run where there is none.

    Raises:
        UsageError: one was typed without ``--bisect``.
    """
    typed = [
        option.opts[-1]
        for option in RUN
        if ctx.get_parameter_source(option.name or "") is ParameterSource.COMMANDLINE
    ]
    if typed:
        raise UsageError(
            f"{', '.join(typed)} without --bisect: expected --bisect MODEL PROMPT with it, since "
            "the report on plugins runs no model"
        )


@attrs.frozen
class Visit:
    """The findings about one plugin.

    Attributes:
        entry: the plugin's entry, with its problems.
        file: of its module, or None.
        heavy: modules that its package imports at its top and should not, such as torch.
        commands: names of the commands that an extension adds.
        options: those that it adds to ``specplug generate``.
        engine: of a host, the installed versions of its engine, by distribution.
        runs: of a host, what its engine is called; or why no algorithm can run there.
        outdated: of an algorithm that was built for an older API version, a line that says so.
    """

    entry: PluginEntry
    file: Path | None = None
    heavy: Sequence[str] = ()
    commands: Sequence[str] = ()
    options: Sequence[str] = ()
    engine: Mapping[str, str | None] = attrs.field(factory=dict)
    runs: str = ""
    outdated: str | None = None

    @property
    def broken(self) -> bool:
        """Whether it has a problem, and is not disabled."""
        return bool(self.entry.problems) and not self.entry.disabled

    def as_mapping(self) -> dict[str, Any]:
        """Return what ``--json`` prints of a plugin. Keys are only ever added."""
        entry = self.entry
        found = {
            "name": entry.name,
            "status": entry.status,
            "distribution": entry.distribution,
            "version": entry.version,
            "value": entry.value,
            "file": None if self.file is None else str(self.file),
            "heavy_imports": list(self.heavy),
            "problems": [
                {
                    "message": str(problem),
                    "what": problem.what,
                    "expected": problem.expected,
                    "fix": problem.fix,
                    "traceback": problem.traceback,
                }
                for problem in entry.problems
            ],
        }
        own: dict[str, dict[str, Any]] = {
            "extension": {"commands": list(self.commands), "options": list(self.options)},
            "host": {"engine": dict(self.engine), "runs": self.runs},
        }
        return {**found, **own.get(entry.kind, {})}


def _visit(registry: Registry, entry: AlgorithmEntry | ExtensionEntry | HostEntry) -> Visit:
    """Import a plugin and examine it; do not import one that is disabled."""
    source = look(entry)
    if entry.disabled:
        return Visit(entry, source.file)
    if isinstance(entry, AlgorithmEntry):
        found = registry.examine(entry)
        old = None if found.info is None else outdated(found.info, entry.subject)
        return Visit(found.entry, source.file, _heavy(entry), outdated=old)
    if isinstance(entry, HostEntry):
        return _visit_host(registry.examine(entry), source.file)
    examined = registry.examine(entry)
    if examined.entry.problems:
        return Visit(examined.entry, source.file, _heavy(entry))
    group, command = click.Group("specplug"), click.Command("generate")
    extension = Extension(entry.name, examined.plugin, entry)
    problems = [
        *_adding(extension, "commands", lambda: register_commands(group, extension=extension)),
        *_adding(extension, "options", lambda: register_options(command, extension=extension)),
    ]
    return Visit(
        attrs.evolve(examined.entry, problems=(*examined.entry.problems, *problems)),
        source.file,
        _heavy(entry),
        commands=sorted(group.commands),
        options=sorted(option.opts[0] for option in command.params),
    )


def _visit_host(examined: Examination[HostEntry], file: Path | None) -> Visit:
    """Ask a host for its engine's versions, and whether algorithms can run there."""
    entry, host, heavy = examined.entry, examined.plugin, _heavy(examined.entry)
    if entry.problems:
        return Visit(entry, file, heavy)
    try:
        engine = dict(host.versions())
        try:
            runs = host.describe().name
        except UsageError as error:
            runs = f"no: {error}"
    except BaseException as error:
        let_ctrl_c_pass(error)
        what, trace = f"asking it raised {error_line(error)}", plugin_traceback(error)
        problem = entry.problem(what, "versions() and describe() of HostPlugin", "fix it", trace)
        return Visit(attrs.evolve(entry, problems=(problem,)), file, heavy)
    return Visit(entry, file, heavy, engine=engine, runs=runs)


def _heavy(entry: PluginEntry) -> list[str]:
    place = parse_value(entry.value)
    return [] if place is None or place[0].startswith("specplug.") else heavy_imports(place[0])


def _adding(extension: Extension, what: str, add: Callable[[], None]) -> Iterator[Problem]:
    """Have an extension add its commands or options; yield why it cannot."""
    try:
        add()
    except BaseException as error:
        let_ctrl_c_pass(error)
        found = f"register_{what} raised {error_line(error)}"
        fix = f"fix it; its {what} are left out until then"
        yield extension.entry.problem(found, f"{what} of click", fix, plugin_traceback(error))


def _versions(hosts: Sequence[Visit]) -> dict[str, str | None]:
    """Return the versions of what a bug report needs, and of the hosts' engines."""
    versions: dict[str, str | None] = {
        "python": platform.python_version(),
        "platform": f"{sys.platform} {platform.machine()}",
        "api": str(API_VERSION),
    }
    for distribution in DISTRIBUTIONS:
        try:
            versions[distribution] = importlib_metadata.version(distribution)
        except Exception:  # not installed, or its metadata lacks the version
            versions[distribution] = None
    for host in hosts:
        versions.update(host.engine)
    return versions


def _notes(registry: Registry, visits: Sequence[Visit]) -> list[str]:
    known = {name.upper() for name in registry.names()}
    unknown = [
        f"{DISABLE} names {name}, which is not installed"
        for name in sorted(registry.disabled - known)
    ]
    slow = [
        f"{visit.entry.subject} imports {', '.join(visit.heavy)} at its top: expected that within "
        "create_worker, or every listing and every choice of an algorithm waits for it"
        for visit in visits
        if visit.heavy
    ]
    taken = [
        f"{visit.entry.subject} brings the command {name}, which is the core's own and stays that"
        for visit in visits
        for name in visit.commands
        if name in COMMANDS
    ]
    old = [visit.outdated for visit in visits if visit.outdated is not None]
    return [*unknown, *slow, *taken, *old]


def _kernels() -> tuple[Mapping[str, Any] | None, list[str]]:
    """Return which kernels run on this machine, or None; and notes. Another process finds out: that
    takes torch, which may be what is broken."""
    command = [sys.executable, "-P", "-m", "specplug.kernels.kernel_table"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_MOST_SECONDS
        )
        lines = done.stderr.splitlines() or [f"it ended with {done.returncode}"]
        if done.returncode == 0:
            return json.loads(done.stdout), []
    except subprocess.TimeoutExpired as error:
        lines = [str(error)]
    return None, [f"which kernels run is not known: {lines[-1]}"]


def _print_report(
    visits: Sequence[Visit], kernels: Mapping[str, Any] | None, notes: Sequence[str]
) -> None:
    versions = _versions(visits).items()
    print_table(("what", "version"), [(k, v or "not installed") for k, v in versions])
    click.echo()
    rows = [
        (
            visit.entry.name,
            visit.entry.status.partition(":")[0],
            visit.entry.kind,
            f"{visit.entry.distribution} {visit.entry.version}",
            visit.entry.value,
            "-" if visit.file is None else str(visit.file),
        )
        for visit in visits
    ]
    print_table(("name", "status", "kind", "distribution", "entry point", "file"), rows)
    for visit in visits:
        if visit.commands:
            names = ", ".join(visit.commands)
            click.echo(printable(f"commands of {visit.entry.name}: {names}"))
        if visit.options:
            names = ", ".join(visit.options)
            click.echo(printable(f"options of {visit.entry.name} for generate: {names}"))
        if visit.runs:
            click.echo(printable(f"algorithms run in {visit.entry.name}: {visit.runs}"))
        _print_problems(visit.entry)
    if kernels is not None:
        click.echo(f"\nkernels on {kernels['device']}, SPECPLUG_KERNELS={kernels['mode']}")
        print_table(("operation", "dtype", "by", "why"), kernels["table"])
    for note in notes:
        click.echo(f"\nnote: {printable(note)}")
    count = sum(visit.broken for visit in visits)
    verdict = f"{count} of {len(visits)} plugins broken" if count else "all plugins are sound"
    click.secho(f"\n{verdict}", fg="red" if count else "green", bold=True)


def _print_problems(entry: PluginEntry) -> None:
    for problem in entry.problems:
        click.secho(f"\n{printable(problem.subject)}", bold=True)
        click.echo(f"  found     {click.style(printable(problem.what), fg='red')}")
        click.echo(f"  expected  {printable(problem.expected)}")
        click.echo(f"  to do     {printable(problem.fix)}")
        for line in problem.traceback.splitlines():
            click.secho(f"    {printable(line)}", dim=True)
