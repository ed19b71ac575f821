"""``specplug train NAME``: train an algorithm's draft network. torch loads when it runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from specplug.cli.options import COUNT, is_typed
from specplug.errors import UsageError, shown
from specplug.printable import printable
from specplug.training.settings import TrainingSettings

if TYPE_CHECKING:
    from specplug.training.progress import Progress

FILES = click.Path(path_type=Path, exists=True)


def _options_of(given: Sequence[str]) -> dict[str, str]:
    """Return the values of ``--set``, by name.

    Raises:
        UsageError: one is not NAME=VALUE.
    """
    pairs = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not (name and equals):
            raise UsageError(f"--set {shown(each)}: expected NAME=VALUE")
        pairs[name.strip()] = value.strip()
    return pairs


def _check_alone(ctx: click.Context) -> None:
    """Refuse what a training that goes on takes from where it began.

    Raises:
        UsageError: such a thing was typed.
    """
    allowed = {"resume", "out", "no_measure"}
    typed = [name for name in ctx.params if name not in allowed and is_typed(ctx, name)]
    if typed:
        raise UsageError(
            f"--resume with {', '.join(typed)}: expected --out alone, the rest is as the training "
            "was begun"
        )


@click.command()
@click.argument("name", required=False)
@click.option("--target", metavar="MODEL", help="The target; the default model if not given.")
@click.option(
    "--data",
    type=FILES,
    multiple=True,
    metavar="FILE",
    help='A text, JSON Lines of {"text"}, {"prompt"} or {"messages"}, or a folder of these; may be '
    "given many times. Without it, the source of Python's standard library.",
)
@click.option(
    "--out", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER", required=True,
    help="Where the network is written.",
)  # fmt: skip
@click.option("--steps", type=COUNT, metavar="N", help="Steps of the optimizer.")
@click.option(
    "--minutes", type=click.FloatRange(min=0.1), metavar="M",
    help="Of the whole training; the first steps tell how many fit. 15 if there are no --steps.",
)  # fmt: skip
@click.option(
    "--rows", type=COUNT, metavar="B",
    help="Texts of a step, in all processes together; the algorithm's own number if not given, 32 "
    "times as many on a GPU.",
)  # fmt: skip
@click.option(
    "--length", type=COUNT, default=384, show_default=True, metavar="L",
    help="The most tokens of a text.",
)  # fmt: skip
@click.option("--learning-rate", type=click.FloatRange(min=0, min_open=True), metavar="X")
@click.option(
    "--texts", type=COUNT, metavar="N",
    help="The most texts to train on; all if not given, on a CPU 9000: it sees each a few times, "
    "and keeps its features.",
)  # fmt: skip
@click.option(
    "--regenerate", type=click.IntRange(min=0), metavar="N",
    help="Texts that the target writes, from beginnings of the data's; 0: the data as they are. If "
    "not given 512, but 0 where a CPU trains on texts.",
)  # fmt: skip
@click.option(
    "--corpus", type=click.FloatRange(0, 1), default=0.75, show_default=True, metavar="X",
    help="The share of the data's own texts among the rows, where the target wrote some.",
)  # fmt: skip
@click.option(
    "--repeat", type=click.FloatRange(0, 1), default=0.33, show_default=True, metavar="X",
    help="The share of rows that say a piece of the data again and again: a draft learns to copy.",
)  # fmt: skip
@click.option(
    "--start", type=FILES, metavar="FOLDER", help="The network to go on from; a new one if none."
)
@click.option("--num-steps", type=COUNT, metavar="S", help="The depth of drafts to train for.")
@click.option(
    "--set", "options", multiple=True, metavar="NAME=VALUE",
    help="A setting of the algorithm's own trainer; may be given many times.",
)  # fmt: skip
@click.option("--prompts", type=FILES, metavar="FILE", help="Held-out prompts to measure on.")
@click.option("--seed", type=int, default=0, show_default=True)
@click.option("--device", metavar="DEVICE", help="cpu or cuda; CUDA if there is one.")
@click.option("--dtype", default="auto", show_default=True, help="Of the target.")
@click.option(
    "--precision", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto",
    show_default=True, help="Of the network's products.",
)  # fmt: skip
@click.option(
    "--save-every", type=COUNT, default=500, show_default=True, metavar="N",
    help="Steps between two states that --resume can go on from.",
)  # fmt: skip
@click.option(
    "--export-hidden-states", type=click.Path(path_type=Path, file_okay=False), metavar="FOLDER",
    help="Train nothing: write the target's hidden states, as speculators reads them.",
)  # fmt: skip
@click.option("--no-measure", is_flag=True, help="Leave out the accept lengths at the end.")
@click.option("--resume", is_flag=True, help="Go on with the training in --out, as it was begun.")
@click.pass_context
def train(ctx: click.Context, /, **options: Any) -> None:
    """Train the draft network of the algorithm NAME for a target.

    The target goes on from beginnings of the data's texts, and the network learns what it says
    there. Ends with the accept lengths on held-out prompts. docs/training.md explains it.
    """
    states, measures = options.pop("export_hidden_states"), not options.pop("no_measure")
    settings = TrainingSettings(
        algorithm=options["name"],
        model=options["target"],
        options=_options_of(options["options"]),
        **{
            name: value
            for name, value in options.items()
            if name not in ("name", "target", "options", "resume")
        },
    )
    if options["resume"]:
        _check_alone(ctx)
    elif settings.algorithm is None:
        raise UsageError("NAME is not given; expected an algorithm (specplug train --help)")
    with _shown() as progress:
        from specplug.training.session import TrainingSession

        session = TrainingSession(settings, progress, resume=options["resume"])
        if states is not None:
            session.export_hidden_states(states)
            session.close()
            return
        session.train()
        session.export()
        for temperature, length in session.measure().items() if measures else ():
            progress.say(f"accept length {length:.3f} at temperature {temperature:g}")
        if session.ranks.is_first:
            progress.say(f"written to {settings.out}")
        session.close()


@contextmanager
def _shown() -> Iterator[Progress]:
    """Yield what shows the progress on standard error: a bar on a terminal, else lines."""
    from specplug.training.progress import Lines

    def write(line: str) -> None:
        click.echo(printable(line), err=True)

    if not sys.stderr.isatty():
        yield Lines(write)
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars

    columns = TextColumn("{task.description}", markup=False), BarColumn(), TimeRemainingColumn()
    with Bars(*columns, console=Console(stderr=True), transient=True) as bars:
        yield _Bar(bars, write)


class _Bar:
    """Shows the progress as a bar."""

    def __init__(self, bars: Any, write: Callable[[str], None]) -> None:
        self._bars, self._task = bars, bars.add_task("", total=None)

    def __call__(self, part: str, done: int, total: int, told: str = "") -> None:
        """Show a report."""
        line = printable(f"{part}  {told}" if told else part)
        self._bars.update(self._task, description=line, completed=done, total=total or None)

    def say(self, line: str) -> None:
        """Print a line above the bar."""
        self._bars.console.print(printable(line), markup=False, highlight=False)
