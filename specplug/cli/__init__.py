"""The ``specplug`` command line. A sub-command's module is imported when it is called.

Errors become one line on standard error in one place, ``CommandLine.main``.
"""

from __future__ import annotations

import errno
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

import click

from specplug import __version__, debug
from specplug.cli.standard_output import (
    check_standard_output,
    drop_standard_output,
    end_standard_output,
    open_closed_streams,
    reserve_standard_output,
)
from specplug.contract import PluginWarning, error_line, let_ctrl_c_pass
from specplug.errors import FallbackWarning, SpecplugError, UsageError
from specplug.printable import one_line

COMMANDS = {
    "list": "specplug.cli.list:list_algorithms",
    "info": "specplug.cli.info:info",
    "generate": "specplug.cli.generate:generate",
    "bench": "specplug.cli.bench:bench",
    "train": "specplug.cli.train:train",
    "serve": "specplug.cli.serve:serve",
    "doctor": "specplug.cli.doctor:doctor",
    "check": "specplug.cli.check:check",
    "new": "specplug.cli.new:new",
}
"""Sub-command -> the module and the click command in it."""

_ANYWHERE = {"list", "info", "doctor"}
"""Sub-commands that run no model, and so work in a folder that is gone."""


class CommandLine(click.Group):
    """The command group: the core's commands, loaded when called, and those of extensions."""

    _extended = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        self._load_extensions()
        return [*COMMANDS, *sorted(set(self.commands) - set(COMMANDS))]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name in COMMANDS:
            return _load(COMMANDS[cmd_name])
        self._load_extensions()
        return self.commands.get(cmd_name)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except EOFError as error:  # click takes it for Ctrl-D at a prompt, and says nothing
            raise SpecplugError(f"{error_line(error)}: a file or stream ended early") from error
        except Exception:
            raise
        except BaseException as error:
            let_ctrl_c_pass(error)
            if ctx.invoked_subcommand not in COMMANDS:  # an extension's own may end as it likes
                raise
            raise SpecplugError(
                f"{error_line(error)}: a plugin or a library has ended the command; expected it "
                "to return or to raise an error; SPECPLUG_DEBUG=1 shows where"
            ) from error

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = "specplug",
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run the command line. Unless ``standalone_mode`` is off, exits with 0, 1 for a failure,
        2 for bad usage, 130 for Ctrl-C."""
        run = super().main

        def call() -> Any:
            return run(args, prog_name, complete_var, standalone_mode=False, **extra)

        return _exit(call) if standalone_mode else call()

    def _load_extensions(self) -> None:
        """Have extensions add their commands, which only help and unknown commands need."""
        if self._extended:
            return
        self._extended = True
        from specplug.registry import Registry, register_commands

        registry = Registry()
        if not registry.extension_entries():
            return
        with reserve_standard_output():
            for extension in registry.extensions():
                try:
                    register_commands(self, extension=extension)
                except BaseException as error:
                    let_ctrl_c_pass(error)
                    subject = extension.entry.subject
                    message = f"{subject}: register_commands raised {error_line(error)}"
                    warnings.warn(message, PluginWarning, stacklevel=2)


@click.group(cls=CommandLine, invoke_without_command=True)
@click.version_option(__version__, prog_name="specplug", message="%(prog)s %(version)s")
@click.pass_context
def main(ctx: click.Context) -> None:
    """Speculative decoding in which an algorithm is a pip package."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
    elif ctx.invoked_subcommand not in _ANYWHERE:
        check_working_directory()


def _load(place: str) -> click.Command | None:
    """Import a sub-command; None if its module is not part of this installation."""
    module, _, function = place.partition(":")
    try:
        command: click.Command = getattr(import_module(module), function)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None
    return command


def _exit(call: Callable[[], Any]) -> NoReturn:
    """Run the command, and exit with the code of its result or error."""
    open_closed_streams()
    try:
        check_standard_output()
        with warnings.catch_warnings():
            warnings.showwarning = _warning_shower()
            result = call()
        end_standard_output()
        sys.exit(result if isinstance(result, int) else 0)
    except click.Abort as abort:
        sys.exit(130 if isinstance(abort.__cause__, KeyboardInterrupt) else 1)
    except click.ClickException as error:
        context = getattr(error, "ctx", None)
        path = context.command_path if context else "specplug"
        hint = f" ({path} --help)" if isinstance(error, click.UsageError) else ""
        say("error", f"{error.format_message()}{hint}")
        sys.exit(error.exit_code)
    except BrokenPipeError:
        drop_standard_output()
        sys.exit(1)
    except Exception as error:
        if debug.DEBUG:
            raise
        drop_standard_output()
        told = _of_the_system(error)
        if told is not None:
            say("error", told)
            sys.exit(1)
        ours = isinstance(error, SpecplugError)
        hint = "" if ours else " (this should not happen; SPECPLUG_DEBUG=1 shows where)"
        say("error", f"{error if ours else error_line(error)}{hint}")
        sys.exit(2 if isinstance(error, UsageError) else 1)


def _of_the_system(error: Exception) -> str | None:
    """Return what the system has refused to this process, and what to do; None for other errors."""
    if not isinstance(error, OSError):
        return None
    if error.filename is None and error.errno in (errno.ENOSPC, errno.EIO, errno.EDQUOT):
        why = f"{error.strerror}; expected a place with room"
        return f"standard output cannot be written: {why}; free some, or write elsewhere"
    return None


def check_working_directory() -> None:
    """Refuse to run a model in a folder that is gone: libraries of torch end the process there.

    Raises:
        SpecplugError: it is gone.
    """
    try:
        os.getcwd()
    except OSError as error:
        raise SpecplugError(
            f"the working directory cannot be found: {error.strerror}; expected one that exists; "
            "change to another (cd) and run the command again"
        ) from error


def _warning_shower() -> Callable[..., None]:
    show = warnings.showwarning

    def shower(message: Any, category: type[Warning], *place: Any, **more: Any) -> None:
        if issubclass(category, PluginWarning | FallbackWarning):
            say("warning", str(message))
        else:
            show(message, category, *place, **more)

    return shower


def say(kind: str, message: str) -> None:
    """Print an error or a warning as one line on standard error."""
    label = click.style(f"{kind}:", fg="red" if kind == "error" else "yellow", bold=True)
    click.echo(f"{label} {one_line(message)}", err=True)
