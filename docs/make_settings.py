"""Write docs/settings.md from the code: ``python docs/make_settings.py``."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

import attrs
import click

from specplug import EngineConfig, Registry, SamplingParams
from specplug.cli.bench import bench
from specplug.cli.generate import generate
from specplug.cli.options import VERBOSE, SettingOption
from specplug.cli.serve import LIMITS, SERVER, serve
from specplug.config import INSTANCES, RANKS
from specplug.serve.protocol import ChatRequest, CompletionRequest
from specplug.settings import Setting, settings_of

PAGE = Path(__file__).with_name("settings.md")

INTRODUCTION = """\
# Settings

This page is made by `python docs/make_settings.py` from `specplug/config.py` and
`specplug/sampling_params.py`, where each setting is declared once: its default, its check, its
help. The options of `specplug generate`, `bench` and `serve`, the fields of a server's requests,
and the messages to other processes follow from these two files, too.

A run takes its settings one by one, or as an `EngineConfig`:

```python
import attrs

from specplug import LLM, EngineConfig, SamplingParams

config = EngineConfig(speculative_algorithm="NGRAM", max_running_requests=2)
params = SamplingParams(max_tokens=8)
with LLM(config) as llm, LLM(attrs.evolve(config, page_size=4)) as other:
    (output,), (same,) = llm.generate("import os", params), other.generate("import os", params)
    assert output.token_ids == same.token_ids
    print(llm.effective_config["overlap"], llm.effective_config["max_total_tokens"])
```

`LLM.effective_config` says what a run really uses. The ranks of a run, and instances that prefill
and decode for each other, must also have the same model; they compare its files, not its path.

Each group of settings says which commands have its options. The unit of a number stands beside its
type.
"""

ALGORITHMS = """\
Some algorithms have settings of their own. In Python they stand in `speculative_settings`, by name:

```python
from specplug import LLM

own = {"ngram_index_scope": "engine"}
with LLM(speculative_algorithm="NGRAM", speculative_settings=own) as llm:
    print(llm.spec_config.settings)
```

On the command line each is an option of `specplug generate`, `bench` and `serve`, where that
algorithm is named: `specplug generate --speculative-algorithm NGRAM --help` shows NGRAM's.
"""

REQUESTS = """\
The column *server* says which are fields of a request to `specplug serve`, too. "yes": with the
same name and meaning; "OpenAI's": with OpenAI's meaning or default, see
[serving.md](serving.md).
"""

OPTIONS_OF_SERVE = """\
These are options of `specplug serve` alone, beside those of `EngineConfig` above.
"""

GROUPS = {
    "Ranks": "Python only: for programs that start a process for each rank "
    "([data_parallel.md](data_parallel.md)). `specplug serve` sets them from its own `--dp-size` "
    "and `--enable-dp-attention`.",
    "Limits": "An option of `specplug serve`; in Python a setting of every run.",
}
"""What there is to say of a group beyond its commands."""

COMMANDS = (generate, bench, serve)
AGREE = {RANKS: "the ranks of a run", INSTANCES: "the two instances of a pair"}
REQUEST_FIELDS = {*CompletionRequest.model_fields, *ChatRequest.model_fields}


def page() -> str:
    """The text of the page."""
    lines = [INTRODUCTION, "## Settings of a run: `EngineConfig`\n", *_tables(EngineConfig)]
    lines += ["## Settings of an algorithm\n", ALGORITHMS, *_algorithms()]
    lines += ["## Settings of a request: `SamplingParams`\n", REQUESTS, *_tables(SamplingParams)]
    lines += ["## Settings of a server\n", OPTIONS_OF_SERVE, *_options(SERVER, LIMITS)]
    return "\n".join(lines)


def _algorithms() -> Iterator[str]:
    """A table for each installed algorithm that has settings of its own."""
    registry = Registry()
    for entry in registry.entries():
        kind = registry.select(entry.name).info.settings
        if kind is not None:
            yield from _tables(kind)


def _tables(kind: type[attrs.AttrsInstance]) -> Iterator[str]:
    """A heading and a table for each group of a class."""
    settings, fields = settings_of(kind), attrs.fields_dict(kind)
    more = ("server",) if kind is SamplingParams else ()
    for group in dict.fromkeys(about.group for about in settings.values()):
        members = {name: about for name, about in settings.items() if about.group == group}
        yield f"### {group}\n"
        commands = _commands_of(*members.values())
        is_own = kind not in (EngineConfig, SamplingParams)
        told = "Options where it is named." if is_own else _options_of(commands)
        yield f"{GROUPS.get(group) or told}\n"
        yield from _head("setting", "option", *more, "type", "default", "what it is")
        for name, about in members.items():
            option = f"`{about.option}`" if about.option else ""
            cells = [f"`{name}`", option, *([_of_server(name, about)] if more else [])]
            kinds = "`" + str(fields[name].type) + "`" + (f", {about.unit}" if about.unit else "")
            what = _what(about, missing=commands - _commands_of(about))
            yield _row(*cells, kinds, _default(fields[name].default, about), what)
        yield ""


def _options(*groups: Sequence[click.Parameter]) -> Iterator[str]:
    """A table of the options that are no settings."""
    yield from _head("option", "default", "what it is")
    for option in (each for group in groups for each in group):
        if not isinstance(option, click.Option) or isinstance(option, SettingOption):
            continue
        if option is not VERBOSE:
            yield _row(f"`{option.opts[-1]}`", _default_of(option), option.help or "")
    yield ""


def _default_of(option: click.Option) -> str:
    if isinstance(option.show_default, str):
        return option.show_default
    if option.is_flag:
        return "off"
    return f"`{option.default}`" if isinstance(option.default, str | int | float) else "none"


def _head(*columns: str) -> Iterator[str]:
    yield _row(*columns)
    yield _row(*("---" for _ in columns))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _commands_of(*settings: Setting) -> set[str]:
    """The names of the commands that have an option of any of these settings."""
    flags = {about.option for about in settings if about.option}
    return {c.name or "" for c in COMMANDS if flags & {o for p in c.params for o in p.opts}}


def _options_of(commands: Collection[str]) -> str:
    names = [f"`{c.name}`" for c in COMMANDS if c.name in commands]
    if not names:
        return "No options of the command line."
    first = names[0].replace("`", "`specplug ", 1)
    return "Options of " + " and ".join([", ".join([first, *names[1:-1]]), *names[1:][-1:]]) + "."


def _of_server(name: str, about: Setting) -> str:
    if about.served:
        return "yes"
    return "OpenAI's" if name in REQUEST_FIELDS else ""


def _default(value: object, about: Setting) -> str:
    if isinstance(value, attrs.Factory):
        return "none"
    if value is None or (value == () and about.unset):
        return about.unset or "`None`"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value}`"


def _what(about: Setting, missing: Collection[str]) -> str:
    """The help and what else there is to know.

    Args:
        missing: commands that have other options of the group, and not this one.
    """
    parts = [about.help]
    if about.option:
        parts += [f"Not an option of `{command}`." for command in sorted(missing)]
    if about.unlimited:
        parts.append(f"`{about.option} -1` is None.")
    if about.agree:
        parts.append(f"Must be the same for {' and '.join(AGREE[who] for who in about.agree)}.")
    return " ".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
