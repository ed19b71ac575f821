"""Options that commands share: what is told to ``LLM`` and to ``SamplingParams``. No torch here."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import click
from click.core import ParameterSource

from specplug.algorithm import AlgorithmInfo, SpecConfig
from specplug.algorithm_names import is_auto
from specplug.bounds import MAX_SECONDS, bound_of
from specplug.cli.standard_output import reserve_standard_output
from specplug.config import EngineConfig
from specplug.contract import PluginWarning, error_line, let_ctrl_c_pass
from specplug.errors import SpecplugError, UsageError, shown
from specplug.registry import Extension, Registry, register_options
from specplug.sampling_params import SamplingParams
from specplug.settings import (
    Choice,
    Flag,
    Integer,
    Number,
    Seconds,
    Setting,
    Text,
    Texts,
    settings_of,
)
from specplug.speculative.automatic import select_algorithm
from specplug.text_file import read_text


def _no_limit(ctx: click.Context, option: click.Parameter, value: int) -> int | None:
    if value == -1:
        return None
    if value < 1:
        raise click.BadParameter(f"{value} is neither at least 1 nor -1 (no limit).")
    return value


def _text_or_file(ctx: click.Context, option: click.Parameter, value: str | None) -> str | None:
    if value is None or not value.startswith("@"):
        return value
    try:
        return read_text("file", Path(value[1:]))
    except UsageError as error:
        raise click.BadParameter(f"{error}.") from error


COUNT = click.IntRange(min=1)


class Bounded(click.IntRange):
    """An integer of at least 1 and within the bound of a setting.

    Args:
        setting: whose bound (``specplug.bounds``).
    """

    def __init__(self, setting: str) -> None:
        super().__init__(min=1)
        self._setting = setting

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the integer; refuse what is none, or too large."""
        number: int = super().convert(value, param, ctx)
        bound = bound_of(self._setting)
        if bound is not None and number > bound.most:
            self.fail(f"{shown(number)}: expected at most {bound.most}, {bound.why}.", param, ctx)
        return number


class Duration(click.FloatRange):
    """A duration above 0, in seconds, and none that never ends."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=MAX_SECONDS)

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return the number; refuse NaN, which passes every comparison."""
        number: float = super().convert(value, param, ctx)
        if math.isnan(number):
            self.fail(f"{value!r} is not a number of seconds.", param, ctx)
        return number


_OWN_OPTIONS, _EXTENSION_OPTIONS = "specplug.own_options", "specplug.extension_options"
_OWN_SETTINGS = "speculative_settings"
OWN = click.Option([f"--{_OWN_SETTINGS}", _OWN_SETTINGS])
"""Stands for the algorithms' own settings in ``chosen``. It is an option of no command: each of the
settings has an option of its own."""
EXTENSIONS = click.Option(["--extensions", "extensions"])
"""Stands for the plugin objects of extensions' options in ``chosen``, as ``OWN`` does."""


def is_typed(ctx: click.Context, name: str) -> bool:
    """Return whether a parameter was typed, or stands in the environment."""
    source = ctx.get_parameter_source(name)
    return source in (ParameterSource.COMMANDLINE, ParameterSource.ENVIRONMENT)


class SettingOption(click.Option):
    """The option of a setting, with its group."""

    group = ""


class GroupedCommand(click.Command):
    """A command whose help has a heading over each group of options.

    Args:
        headings: heading -> options that are no settings; these stand under their group. The
            headings come in the order of the options.
        takes_extensions: whether installed extensions may add options (``register_options``).
    """

    def __init__(
        self,
        *args: Any,
        headings: Mapping[str, Sequence[click.Parameter]],
        takes_extensions: bool = False,
        **more: Any,
    ) -> None:
        super().__init__(*args, **more)
        self._takes_extensions = takes_extensions
        self._headings = {option: name for name, options in headings.items() for option in options}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the arguments, among them the options of the settings that the named algorithms
        have of their own, and those of extensions. The settings that were typed become one
        parameter, a mapping; the extensions' objects another one, a tuple."""
        registry = Registry()
        ctx.meta[_OWN_OPTIONS] = own = _own_options(registry, args)
        added = self._extension_options(ctx, registry, args) if self._takes_extensions else ()
        ctx.meta[_EXTENSION_OPTIONS] = added
        rest = super().parse_args(ctx, args)
        found = {option.name or "": ctx.params.pop(option.name or "", None) for option in own}
        ctx.params[_OWN_SETTINGS] = {k: v for k, v in found.items() if is_typed(ctx, k)}
        if self._takes_extensions:
            objects = [ctx.params.pop(option.name or "", None) for option in added]
            ctx.params["extensions"] = tuple(each for each in objects if each is not None)
        return rest

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return the options, those of the algorithms' own settings and of extensions too."""
        own, added = (ctx.meta.get(key, ()) for key in (_OWN_OPTIONS, _EXTENSION_OPTIONS))
        return [*own, *super().get_params(ctx), *added]

    def _extension_options(
        self, ctx: click.Context, registry: Registry, args: Sequence[str]
    ) -> tuple[click.Parameter, ...]:
        """Return the options that extensions add, but for those that this command has."""
        found: list[click.Parameter] = []
        for extension in _extensions_of(registry, args):
            subject = extension.entry.subject
            command = click.Command(ctx.info_name)
            try:
                with reserve_standard_output():
                    register_options(command, extension=extension)
            except BaseException as error:
                let_ctrl_c_pass(error)
                told = f"{subject}: register_options raised {error_line(error)}"
                warnings.warn(told, PluginWarning, stacklevel=2)
                continue
            for option in command.params:
                known = [*self.get_params(ctx), *found]
                if any(_alike(option, other) for other in known):
                    told = f"{subject}: {option.opts[0]} is left out: there is such an option"
                    warnings.warn(told, PluginWarning, stacklevel=2)
                else:
                    found.append(option)
        return tuple(found)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the groups, and last the options that are in none."""
        groups: dict[str, list[tuple[str, str]]] = {}
        added = ctx.meta.get(_EXTENSION_OPTIONS, ())
        for option in self.get_params(ctx):
            record = option.get_help_record(ctx) if isinstance(option, click.Option) else None
            if record is not None:
                own = option.group if isinstance(option, SettingOption) else "Other"
                own = "Extensions" if option in added else own
                groups.setdefault(self._headings.get(option, own), []).append(record)
        for name in sorted(groups, key=lambda name: name == "Other"):
            with formatter.section(name):
                formatter.write_dl(groups[name])


def options_of(kind: type[attrs.AttrsInstance], *groups: str) -> tuple[SettingOption, ...]:
    """Make the options of all settings of a class that have one, in the order of ``groups``."""
    fields = attrs.fields_dict(kind)
    return tuple(
        _option(fields[name], about)
        for group in groups
        for name, about in settings_of(kind).items()
        if about.group == group and about.option
    )


def _alike(option: click.Parameter, other: click.Parameter) -> bool:
    same = set(option.opts + option.secondary_opts) & set(other.opts + other.secondary_opts)
    return bool(same) or option.name == other.name


def _extensions_of(registry: Registry, args: Sequence[str]) -> list[Extension]:
    """Return the extensions that ``args`` do not disable. Of broken ones the run tells.

    Raises:
        UsageError: one that is disabled is not installed. None has been imported then.
    """
    named = [name for name in _values_of(args, "--disable-extension") if name]
    disabled = registry.check_extensions(named)
    with warnings.catch_warnings(), reserve_standard_output():
        warnings.simplefilter("ignore", PluginWarning)
        return registry.extensions(disabled)


def _own_options(registry: Registry, args: Sequence[str]) -> tuple[SettingOption, ...]:
    """Make the options of the settings that the algorithms named in ``args`` have of their own;
    for ``auto`` those of all. What a plugin prints when it is imported goes to standard error."""
    found = list[SettingOption]()
    named = list(_algorithms_in(args))
    if any(map(is_auto, named)):
        named += registry.names()
    for name in dict.fromkeys(named):
        with suppress(SpecplugError), reserve_standard_output():  # the command tells
            kind = registry.select(name).info.settings
            groups = () if kind is None else {each.group for each in settings_of(kind).values()}
            found += options_of(kind, *groups) if kind is not None else ()
    return tuple(found)


def _algorithms_in(args: Sequence[str]) -> Iterator[str]:
    """Yield the algorithms' names in ``--speculative-algorithm`` or ``--speculative-algorithms``:
    in ``A+B`` two, in ``A:steps=5,C`` two, and in ``[A,B]`` two."""
    for text in _values_of(args, "--speculative-algorithm", "--speculative-algorithms"):
        for part in re.split(r"[\[\],+]", text):
            name = part.partition(":")[0].strip()
            if name and "=" not in name:
                yield name


def _values_of(args: Sequence[str], *options: str) -> Iterator[str]:
    """Yield what was typed for options, before the arguments are parsed."""
    for place, argument in enumerate(args):
        if argument == "--":
            return
        option, is_joined, value = argument.partition("=")
        if option in options:
            yield value if is_joined else "".join(args[place + 1 : place + 2])


def _option(field: attrs.Attribute[Any], about: Setting) -> SettingOption:
    shown = field.default not in (None, ()) and field.default is not False
    unset = "" if about.unset == "none" else about.unset
    option = SettingOption(
        [about.option, field.name],
        default=field.default,
        show_default=unset or shown,
        help=about.option_help or about.help,
        metavar=about.metavar or _METAVARS.get(type(about.check)),
        callback=_callback(about),
        **_kind(about),
    )
    option.group = about.group
    return option


_METAVARS: dict[type, str] = {Integer: "N", Number: "X", Seconds: "SECONDS"}


def _kind(about: Setting) -> dict[str, Any]:
    """Return click's arguments for a setting's values."""
    match about.check:
        case Flag():
            return {"is_flag": True}
        case Texts():
            return {"multiple": True}
        case Choice(names=names, options=options):
            return {"type": click.Choice(options or names)}
        case Seconds():
            return {"type": Duration()}
        case Number():
            return {"type": float}
        case Integer(bound=bound) if bound:
            return {"type": Bounded(bound)}
        case Integer(least=int(least)) if least > 0 and not about.unlimited:
            return {"type": click.IntRange(min=least)}
        case Integer():
            return {"type": int}
        case _:
            return {"type": str}


def _callback(about: Setting) -> Callable[..., Any] | None:
    if about.unlimited:
        return _no_limit
    return _text_or_file if isinstance(about.check, Text) and about.check.from_file else None


ENGINE = options_of(EngineConfig, "Model", "Speculation", "Engine")
DISAGGREGATION = options_of(EngineConfig, "Disaggregation")
"""Options of servers alone; ``ENGINE`` are those of all commands that load a model."""

VERBOSE = click.Option(
    ["-v", "--verbose"],
    is_flag=True,
    help="Say on standard error what is loaded, and what memory it takes.",
)
SAMPLING = options_of(SamplingParams, "Sampling", "Stopping")
GRAMMAR = options_of(SamplingParams, "Structured output")


def chosen(group: Sequence[click.Parameter], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the options of ``group``, by name."""
    return {option.name: options[option.name] for option in group if option.name}


def check_algorithm(registry: Registry, config: EngineConfig) -> None:
    """Refuse at once an algorithm that ``LLM`` would refuse after torch has loaded.

    Raises:
        SpecplugError: it is not installed, is broken, or cannot run with these settings.
    """
    selected, _ = select_algorithm(registry, config)
    check_speculation(selected.info, config)


def check_speculation(info: AlgorithmInfo, config: EngineConfig) -> None:
    """Refuse at once what ``LLM`` would refuse after torch has loaded.

    Raises:
        UsageError: the algorithm cannot run with these settings.
    """
    typed = config.speculative_draft_model_path
    # Whether weights are shipped depends on the model: that is for LLM to say.
    untold = Path(".") if info.capabilities.draft_model else None
    SpecConfig.resolve(
        info,
        num_steps=config.speculative_num_steps,
        topk=config.speculative_eagle_topk,
        num_draft_tokens=config.speculative_num_draft_tokens,
        draft_model_path=Path(typed) if typed else untold,
        settings=config.speculative_settings,
    )
