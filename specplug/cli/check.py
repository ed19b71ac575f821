"""``specplug check NAME``: the conformance kit, without pytest. torch loads when it runs."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specplug.cli.progress import Lines, loading_bars
from specplug.cli.standard_output import print_table, reserve_standard_output
from specplug.errors import UsageError, shown
from specplug.printable import one_line, printable
from specplug.registry import Registry

if TYPE_CHECKING:
    from specplug.testing.verdict import Verdict

MARKS = {
    "passed": "ok",
    "failed": "FAILED",
    "not applicable": "-",
    "left out": "left out",
    "expected": "fails as declared",
    "passed unexpectedly": "FAILED",
}


MEASURED_WITH = "model", "draft", "accept_length", "reference", "seed"
"""Options with which a grade is earned, as ``specplug info`` shows."""


@click.command()
@click.argument("name")
@click.argument("more", nargs=-1, type=click.UNPROCESSED)
@click.option("--model", metavar="PATH", help="The target; the default model if not given.")
@click.option(
    "--draft", type=click.Path(path_type=Path), metavar="PATH", help="The draft model's folder."
)
@click.option(
    "--accept-length", type=float, metavar="N", help="Tokens a verification that it should reach."
)
@click.option(
    "--reference",
    metavar="NAME",
    help="An algorithm whose accept length it should reach, measured here with the same settings.",
)
@click.option(
    "--seed",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Chooses texts, budgets and what is sampled; accept lengths are always of the same texts.",
)
@click.option(
    "--host",
    "--engine",
    "host",
    metavar="NAME",
    help="Check it in another engine, whose package specplug-NAME is installed.",
)
@click.option(
    "--only",
    multiple=True,
    metavar="ID",
    help="A check, or all of a kind; may be given many times.",
)
@click.option(
    "--fails",
    multiple=True,
    callback=lambda ctx, parameter, given: declared(given),
    metavar="ID=REASON",
    help="A check that fails, and why; if it passes, that is a failure. May be given many times.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(ctx: click.Context, /, **options: Any) -> None:
    """Check the algorithm NAME by the conformance kit: that it is exact, and not blind.

    Exits with 1 if a check fails. docs/conformance.md explains each. Another engine's own arguments
    stand after "--".
    """
    Registry().select(options["name"])
    if options["host"] is not None:
        Registry().host(options["host"]).describe()
    elif options["more"]:
        raise UsageError(f"{shown(' '.join(options['more']))}: expected --host with them")
    if options["reference"] is not None:
        Registry().select(options["reference"])
    with reserve_standard_output() as out:
        verdicts = _run(options)
        if options["as_json"]:
            import json

            click.echo(json.dumps(as_mapping(options["name"], verdicts), indent=2), file=out)
    if not options["as_json"]:
        print_verdicts(verdicts, host=options["host"])
    _keep_grade(options, verdicts)
    ctx.exit(1 if any(each.is_wrong for each in verdicts) else 0)


def declared(given: Sequence[str]) -> dict[str, str]:
    """Return the reasons of ``--fails``, by the ids of checks.

    Raises:
        UsageError: one has no reason, or a check is declared twice.
    """
    reasons: dict[str, str] = {}
    for each in given:
        name, equals, reason = (part.strip() for part in each.partition("="))
        if not (name and equals and reason):
            raise UsageError(
                f"--fails {shown(each)}: expected a check and the reason why it fails, as "
                "gold.acceptance=untrained"
            )
        if name in reasons:
            raise UsageError(f"--fails {shown(each)}: {name} has a reason; expected one of each")
        reasons[name] = reason
    return reasons


def _run(options: dict[str, Any]) -> list[Verdict]:
    with loading_bars(f"checking {options['name']}") as bar:
        from specplug.testing.kit import all_checks, checks_named, refuse_unknown
        from specplug.testing.laboratory import Laboratory
        from specplug.testing.subject import Subject
        from specplug.testing.verdict import judge

        settings = {}
        if options["draft"] is not None:
            settings["speculative_draft_model_path"] = options["draft"]
        subject = Subject(
            algorithm=options["name"],
            model=options["model"],
            settings=settings,
            accept_length=options["accept_length"],
            reference=options["reference"],
            seed=options["seed"],
            host=options["host"],
            host_arguments=options["more"],
            expected_failures=options["fails"],
        )
        refuse_unknown(subject.known_failures)
        laboratory = Laboratory(subject)
        checks = checks_named(options["only"]) if options["only"] else all_checks()
        verdicts = []
        with nullcontext() if sys.stderr.isatty() else Lines(len(checks)) as lines:
            for done, each in enumerate(checks):
                bar("", each.id, done, len(checks))
                if lines is not None:
                    lines.say(f"{options['name']}, {each.id}")
                verdicts.append(judge(each, laboratory))
                if lines is not None:
                    lines.advance(1)
        return verdicts


def _keep_grade(options: dict[str, Any], verdicts: Sequence[Verdict]) -> None:
    """Write the grade for ``specplug info`` if all checks ran; say it if that cannot be done."""
    from specplug.testing.grades import EarnedGrade, Holder, keep
    from specplug.testing.verdict import checks_left_out, grade_of

    if checks_left_out(verdicts) or options["host"] is not None:
        return
    name = Registry().select(options["name"]).name
    given = {key: options[key] for key in MEASURED_WITH if options[key] not in (None, 0)}
    earned = EarnedGrade(
        grade=grade_of(verdicts),
        missed={v.check.id: v.status for v in verdicts if v.is_wrong or v.status == "expected"},
        holder=Holder.of(name),
        left_out=tuple(v.check.id for v in verdicts if v.status == "left out"),
        settings={key: str(value) for key, value in given.items()},
    )
    try:
        keep(name, earned)
    except OSError as error:
        click.echo(
            f"the grade is not kept for specplug info: {error}; expected a cache folder that can "
            "be written (XDG_CACHE_HOME)",
            err=True,
        )


def as_mapping(name: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Return what ``--json`` prints. Keys are only ever added."""
    from specplug.testing.check import KIT_VERSION
    from specplug.testing.verdict import checks_left_out, grade_of

    return {
        "algorithm": name,
        "kit_version": KIT_VERSION,
        "grade": grade_of(verdicts),
        "checks": [
            {
                "id": each.check.id,
                "grade": each.check.grade,
                "title": each.check.title,
                "status": each.status,
                "told": each.told,
                "seconds": round(each.seconds, 3),
            }
            for each in verdicts
        ],
        "checks_left_out": checks_left_out(verdicts),
    }


def print_verdicts(verdicts: Sequence[Verdict], *, host: str | None = None) -> None:
    """Print a table, what failed below it, and the grade, which the embedded engine alone gives."""
    from specplug.testing.verdict import told_grade

    rows = [
        (
            each.check.grade,
            each.check.id,
            MARKS[each.status],
            f"{each.seconds:.1f} s",
            each.check.title if each.is_wrong else one_line(each.told or each.check.title),
        )
        for each in verdicts
    ]
    print_table(("grade", "check", "", "time", ""), rows)
    for each in verdicts:
        if each.is_wrong:
            click.echo("\n" + told_in_lines(each.told), file=sys.stderr)
    if host is None:
        click.echo(f"\ngrade: {told_grade(verdicts)}")


def told_in_lines(told: str) -> str:
    """Return what a check tells, line by line; the lines within are indented, so that none looks
    like one of ours. The last one is the page."""
    *found, page = map(printable, told.split("\n"))
    return "\n".join([*found[:1], *(f"  {line}" for line in found[1:]), page])
