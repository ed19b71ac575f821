"""``specplug info NAME``: what one algorithm declares."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from specplug.algorithm import CAPTURES, DEFAULT_MODEL
from specplug.algorithm_names import AUTO, is_auto
from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.contract import HOOKS, OBSERVERS, implemented_hooks
from specplug.errors import UsageError
from specplug.registry import Registry, SelectedAlgorithm
from specplug.settings import settings_of
from specplug.speculative.automatic import choose_algorithms

if TYPE_CHECKING:
    from specplug.testing.grades import Standing


@click.command()
@click.argument("name")
@click.option(
    "--model", metavar="FOLDER|ID", show_default=DEFAULT_MODEL, help="The target, for `auto` alone."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def info(name: str, model: str | None, as_json: bool) -> None:
    """Show what the algorithm NAME declares, and the grade that specplug check has found.

    For `auto` it shows which algorithms these are for a model, and why not the others."""
    if is_auto(name):
        _show_automatic(model, as_json=as_json)
        return
    if model is not None:
        raise UsageError(f"--model {model!r}: expected {AUTO} with it; {name} is one algorithm")
    from specplug.testing.grades import Standing

    with reserve_standard_output() as out:
        selected = Registry().select(name)
        standing = Standing.of(selected.name)
        declared = describe(selected, standing)
        if as_json:
            import json

            click.echo(json.dumps(declared, indent=2), file=out)
            return
    rows = [*_rows(declared), ("grade", standing.line(selected.name))]
    print_table(("algorithm", declared["name"]), rows)


def _show_automatic(model: str | None, *, as_json: bool) -> None:
    with reserve_standard_output() as out:
        choice = choose_algorithms(Registry(), model)
        chosen = [each.name for each in choice.chosen]
        if as_json:
            import json

            found = {"name": AUTO, "chosen": chosen, "left_out": dict(choice.left_out)}
            click.echo(json.dumps(found, indent=2), file=out)
            return
    rows = [(name, "takes part") for name in chosen]
    rows += [(name, f"left out: {why}") for name, why in choice.left_out.items()]
    print_table(("algorithm", AUTO), rows)


def describe(selected: SelectedAlgorithm, standing: Standing) -> dict[str, Any]:
    """Return what ``--json`` prints of an algorithm. Keys are only ever added."""
    declared, entry = selected.info, selected.entry
    implemented = implemented_hooks(selected.plugin)
    return {
        "name": selected.name,
        "summary": declared.summary,
        "paper": declared.paper,
        "distribution": entry.distribution,
        "version": entry.version,
        "value": entry.value,
        "api_version": declared.api_version,
        "conformance": standing.as_mapping(),
        "capabilities": {
            **attrs.asdict(declared.capabilities),
            "captures": sorted(declared.capabilities.captures),
        },
        "defaults": attrs.asdict(declared.defaults),
        "draft_lookahead": declared.draft_lookahead,
        "accept_lengths": dict(declared.conformance.accept_lengths),
        "speed_ups": dict(declared.speed_ups),
        "settings": {
            name: {"option": about.option, "help": about.help}
            for name, about in (settings_of(declared.settings) if declared.settings else {}).items()
        },
        "hooks": {
            "implemented": implemented,
            "core_defaults": [h for h in HOOKS if h not in implemented and h not in OBSERVERS],
        },
        "weights": {model: _weights(Path(folder)) for model, folder in declared.weights.items()},
        "default_model": DEFAULT_MODEL,
    }


def _weights(folder: Path) -> dict[str, Any]:
    files = [file for file in folder.rglob("*") if file.is_file()] if folder.is_dir() else []
    return {
        "path": str(folder),
        "exists": bool(files),
        "bytes": sum(file.stat().st_size for file in files),
    }


def _rows(declared: dict[str, Any]) -> list[tuple[str, str]]:
    hooks, defaults = declared["hooks"], declared["defaults"]
    able = dict(declared["capabilities"])
    captures = able.pop("captures")
    return [
        ("summary", declared["summary"]),
        ("paper", declared["paper"] or "-"),
        ("distribution", f"{declared['distribution']} {declared['version']}"),
        ("entry point", declared["value"]),
        ("API version", str(declared["api_version"])),
        ("capabilities", ", ".join(f"{k}={'yes' if yes else 'no'}" for k, yes in able.items())),
        ("reads", "; ".join(CAPTURES[name] for name in captures) or "-"),
        ("settings", ", ".join(s["option"] for s in declared["settings"].values()) or "-"),
        ("defaults", ", ".join(f"{k}={_default(v)}" for k, v in defaults.items())),
        (
            "accept length",
            ", ".join(f"{n:.2f} ({model})" for model, n in declared["accept_lengths"].items())
            or "not declared",
        ),
        (
            "speed-up",
            ", ".join(f"{n:.2f} ({model})" for model, n in declared["speed_ups"].items())
            or "not declared",
        ),
        ("own hooks", ", ".join(hooks["implemented"])),
        ("core defaults", ", ".join(hooks["core_defaults"]) or "-"),
        *_weight_rows(declared),
    ]


def _default(value: int | None) -> str:
    return "from depth and width" if value is None else str(value)


def _weight_rows(declared: dict[str, Any]) -> list[tuple[str, str]]:
    if not declared["capabilities"]["draft_model"]:
        return [("weights", "needs none")]
    weights = dict(declared["weights"])
    rows = []
    for model in dict.fromkeys((DEFAULT_MODEL, *weights)):
        label = f"weights for {model}"
        shipped = weights.get(model)
        if shipped is None:
            rows.append((label, "none shipped"))
        elif not shipped["exists"]:
            rows.append((label, f"missing: {shipped['path']} is not there or empty"))
        else:
            rows.append((label, f"{shipped['path']} ({shipped['bytes'] / 2**20:.1f} MiB)"))
    return rows
