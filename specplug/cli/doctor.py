"""``specplug doctor``: everything that is wrong with the installed plugins, and its mend."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import Any

import click
import importlib_metadata

from specplug.algorithm import API_VERSION
from specplug.cli.standard_output import reserve_standard_output
from specplug.cli.table import print_table
from specplug.entries import DISABLE, PluginEntry
from specplug.registry import Registry

DISTRIBUTIONS = ("specplug", "torch", "triton", "transformers", "tokenizers", "safetensors")
"""Whose versions a bug report needs; read from metadata, none is imported for it."""


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(ctx: click.Context, as_json: bool) -> None:
    """Import every plugin and report every problem with its mend.

    Exits with 1 if any plugin is broken. Disabled algorithms are not imported.
    """
    with reserve_standard_output() as out:
        registry = Registry()
        algorithms = [e if e.disabled else registry.examine(e).entry for e in registry.entries()]
        extensions = [registry.examine(entry).entry for entry in registry.extension_entries()]
        plugins: list[PluginEntry] = [*algorithms, *extensions]
        notes = _notes(registry)
        if as_json:
            import json

            report = {
                "versions": _versions(),
                "algorithms": [as_mapping(entry) for entry in algorithms],
                "extensions": [as_mapping(entry) for entry in extensions],
                "notes": notes,
            }
            click.echo(json.dumps(report, indent=2), file=out)
    if not as_json:
        _print_report(plugins, notes)
    ctx.exit(1 if any(_broken(entry) for entry in plugins) else 0)


def as_mapping(entry: PluginEntry) -> dict[str, Any]:
    """A plugin as ``--json`` prints it. Keys are only ever added."""
    return {
        "name": entry.name,
        "status": entry.status,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "problems": [
            {
                "message": str(problem),
                "what": problem.what,
                "expected": problem.expected,
                "mend": problem.mend,
                "traceback": problem.traceback,
            }
            for problem in entry.problems
        ],
    }


def _broken(entry: PluginEntry) -> bool:
    return bool(entry.problems) and not entry.disabled


def _versions() -> dict[str, str | None]:
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
    return versions


def _notes(registry: Registry) -> list[str]:
    known = {name.upper() for name in registry.names()}
    return [
        f"{DISABLE} names {name}, which is not installed"
        for name in sorted(registry.disabled - known)
    ]


def _print_report(plugins: Sequence[PluginEntry], notes: Sequence[str]) -> None:
    versions = _versions().items()
    print_table(("what", "version"), [(k, v or "not installed") for k, v in versions])
    click.echo()
    rows = [
        (e.name, e.status.partition(":")[0], e.kind, f"{e.distribution} {e.version}", e.value)
        for e in plugins
    ]
    print_table(("name", "status", "kind", "distribution", "entry point"), rows)
    for entry in plugins:
        _print_problems(entry)
    for note in notes:
        click.echo(f"\nnote: {note}")
    count = sum(map(_broken, plugins))
    verdict = f"{count} of {len(plugins)} plugins broken" if count else "all plugins are sound"
    click.secho(f"\n{verdict}", fg="red" if count else "green", bold=True)


def _print_problems(entry: PluginEntry) -> None:
    for problem in entry.problems:
        click.secho(f"\n{problem.subject}", bold=True)
        click.echo(f"  found     {click.style(problem.what, fg='red')}")
        click.echo(f"  expected  {problem.expected}")
        click.echo(f"  to do     {problem.mend}")
        for line in problem.traceback.splitlines():
            click.secho(f"    {line}", dim=True)
