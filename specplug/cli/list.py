"""``specplug list``: the installed algorithms, from metadata alone."""

from __future__ import annotations

from typing import Any

import attrs
import click

from specplug.cli.standard_output import reserve_standard_output
from specplug.cli.table import print_table
from specplug.registry import AlgorithmEntry, Registry


@click.command("list")
@click.option("--check", is_flag=True, help="Import each algorithm and say whether it is sound.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_algorithms(check: bool, as_json: bool) -> None:
    """List the installed algorithms.

    Nothing is imported, so the status is `installed`, `disabled` or, where the metadata shows it,
    `broken: why`. With --check it is `ok` or `broken: why`, and the summary is the algorithm's own.
    """
    with reserve_standard_output() as out:
        registry = Registry()
        entries = registry.entries()
        if check:
            entries = [_checked(registry, entry) for entry in entries]
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
    """An entry as ``--json`` prints it. Keys are only ever added."""
    return {
        "name": entry.name,
        "status": entry.status,
        "version": entry.version,
        "distribution": entry.distribution,
        "summary": entry.summary,
        "value": entry.value,
        "problems": [str(problem) for problem in entry.problems],
    }


def _checked(registry: Registry, entry: AlgorithmEntry) -> AlgorithmEntry:
    if entry.disabled:
        return entry
    examined = registry.examine(entry)
    if examined.info is None or examined.entry.problems:
        return examined.entry
    return attrs.evolve(examined.entry, summary=examined.info.summary)
