"""``specplug list``: the installed algorithms, from metadata alone."""

from __future__ import annotations

from typing import Any

import attrs
import click

from specplug.cli.standard_output import reserve_standard_output
from specplug.cli.table import print_table
from specplug.registry import AlgorithmEntry, Registry
from specplug.sources import look


@click.command("list")
@click.option(
    "--check", is_flag=True, help="Import each algorithm and report what is wrong with it."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(check: bool, as_json: bool) -> None:
    """List the installed algorithms.

    Nothing is imported. The status is `installed`, `disabled`, or `broken: why` if the metadata or
    the source shows a problem. The summary is the algorithm's own if its source has it as a
    literal, else its distribution's.

    With --check each algorithm is imported: the status is `ok` or `broken: why`, the summary is
    the algorithm's own, and entry points that no listing finds are listed, too.
    """
    with reserve_standard_output() as out:
        registry = Registry()
        entries = [_seen(entry) for entry in registry.entries()]
        if check:
            entries = [*(_checked(registry, entry) for entry in entries), *registry.lost()]
        if as_json:
            import json

            listed = {"algorithms": [as_mapping(entry) for entry in entries]}
            click.echo(json.dumps(listed, indent=2), file=out)
            return
    if not entries:
        click.echo("no algorithm is installed; an algorithm is a pip package", err=True)
    else:
        columns = ("name", "status", "version", "distribution", "summary")
        print_table(columns, [[getattr(entry, c) for c in columns] for entry in entries])


def as_mapping(entry: AlgorithmEntry) -> dict[str, Any]:
    """Return what ``--json`` prints of an entry. Keys are only ever added."""
    return {
        "name": entry.name,
        "status": entry.status,
        "version": entry.version,
        "distribution": entry.distribution,
        "summary": entry.summary,
        "value": entry.value,
        "problems": [str(problem) for problem in entry.problems],
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


def _checked(registry: Registry, entry: AlgorithmEntry) -> AlgorithmEntry:
    if entry.disabled:
        return entry
    examined = registry.examine(entry)
    if examined.info is None or examined.entry.problems:
        return examined.entry
    return attrs.evolve(examined.entry, summary=examined.info.summary)
