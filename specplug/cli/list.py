"""``specplug list``: the installed algorithms, from metadata alone."""

from __future__ import annotations

from typing import Any

import attrs
import click

from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.contract import implemented_hooks
from specplug.host import HostCapabilities
from specplug.registry import AlgorithmEntry, Registry
from specplug.sources import look


@click.command("list")
@click.option(
    "--check", is_flag=True, help="Import each algorithm and report what is wrong with it."
)
@click.option(
    "--engine", metavar="NAME", help="Say which can run in this engine, and why not; checks them."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(check: bool, engine: str | None, as_json: bool) -> None:
    """List the installed algorithms.

    Nothing is imported. The status is `installed`, `disabled`, or `broken: why` if the metadata or
    the source shows a problem. The summary is the algorithm's own if its source has it as a
    literal, else its distribution's.

    With --check each algorithm is imported: the status is `ok` or `broken: why`, the summary is
    the algorithm's own, and entry points that no listing finds are listed, too.

    With --engine the status of an algorithm that cannot run in that engine is `cannot run: why`.
    The engine's package must be installed (specplug-NAME).
    """
    with reserve_standard_output() as out:
        registry = Registry()
        host = None if engine is None else registry.host(engine).describe()
        listed = [Listed(_seen(entry)) for entry in registry.entries()]
        if check or host:
            listed = [_examined(registry, each.entry, host) for each in listed]
        if check:
            listed += map(Listed, registry.lost())
        if as_json:
            import json

            found: dict[str, Any] = {} if host is None else {"engine": host.name}
            found["algorithms"] = [each.as_mapping() for each in listed]
            click.echo(json.dumps(found, indent=2), file=out)
            return
    if not listed:
        click.echo("no algorithm is installed; an algorithm is a pip package", err=True)
    else:
        columns = ("name", "status", "version", "distribution", "summary")
        print_table(columns, [each.row for each in listed])


@attrs.frozen
class Listed:
    """A line of the listing.

    Attributes:
        entry: the algorithm's.
        obstacles: why it cannot run in the engine that was asked for; None: none was.
    """

    entry: AlgorithmEntry
    obstacles: tuple[str, ...] | None = None

    @property
    def row(self) -> list[str]:
        """Return the line's cells."""
        entry, status = self.entry, self.entry.status
        if self.obstacles is not None and status == "ok":
            status = f"cannot run: {'; '.join(self.obstacles)}" if self.obstacles else "runs"
        return [entry.name, status, entry.version, entry.distribution, entry.summary]

    def as_mapping(self) -> dict[str, Any]:
        """Return what ``--json`` prints of it. Keys are only ever added."""
        entry = self.entry
        told = {} if self.obstacles is None else {"obstacles": list(self.obstacles)}
        return {
            "name": entry.name,
            "status": entry.status,
            "version": entry.version,
            "distribution": entry.distribution,
            "summary": entry.summary,
            "value": entry.value,
            "problems": [str(problem) for problem in entry.problems],
            **told,
        }


def _seen(entry: AlgorithmEntry) -> AlgorithmEntry:
    """Add to an entry the summary and the problem that its source shows."""
    source = look(entry)
    if source.summary is None and source.problem is None:
        return entry
    return attrs.evolve(
        entry,
        summary=entry.summary if source.summary is None else source.summary,
        problems=(*entry.problems, *([source.problem] if source.problem else [])),
    )


def _examined(registry: Registry, entry: AlgorithmEntry, host: HostCapabilities | None) -> Listed:
    """Import an algorithm, unless it is disabled, and judge it by what a host gives."""
    if entry.disabled:
        return Listed(entry)
    examined = registry.examine(entry)
    info = examined.info
    if info is None or examined.entry.problems:
        return Listed(examined.entry)
    found = attrs.evolve(examined.entry, summary=info.summary)
    if host is None:
        return Listed(found)
    own_verify = "verify" in implemented_hooks(examined.plugin)
    return Listed(found, tuple(host.obstacles(info, own_verify=own_verify)))
