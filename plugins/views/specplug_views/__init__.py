"""See a run draft: ``specplug generate --trace FILE --trees FILE``.

``Trace`` writes a timeline of the steps, for ui.perfetto.dev. ``Trees`` writes a page that shows
each draft on the text, and what the target took of it. Both are extensions of a run; in Python they
are given to ``LLM(extensions=[…])``. The installed extension takes no part in a run: it only adds
the two options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from specplug import hookimpl
from specplug_views.trace import Trace
from specplug_views.trees import Trees

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Trace", "Trees", "extension"]


class Views:
    """The hooks of ``VIEWS``: options that make a ``Trace`` or ``Trees``."""

    @hookimpl
    def register_options(self, command: click.Command) -> None:
        for name, kind, text in (
            (
                "--trace",
                Trace,
                "Write a timeline of the steps, for ui.perfetto.dev, to a JSON file.",
            ),
            ("--trees", Trees, "Write the drafts, step by step, to a page of HTML."),
        ):
            click.option(name, metavar="FILE", callback=_maker(kind), help=text)(command)


def _maker(
    kind: type[Trace | Trees],
) -> Callable[[click.Context, click.Parameter, str | None], Trace | Trees | None]:
    def made(ctx: click.Context, option: click.Parameter, file: str | None) -> Trace | Trees | None:
        return None if file is None else kind(file)

    return made


extension = Views()
