"""Write README.md's tables from the code, without SGLang: ``python make_readme.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import attrs

from specplug.settings import Choice, Setting, settings_of
from specplug_sglang.capabilities import TESTED
from specplug_sglang.patches import PATCHES, Patch
from specplug_sglang.settings import Only, SglangSettings

PAGE = Path(__file__).with_name("README.md")
UPSTREAM = "../../docs/hosts.md"


def with_tables(text: str) -> str:
    """Return the page with its tables made anew, each between the comments of its name."""
    for name, lines in {"settings": _settings(), "patches": _patches()}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        made = begin + "\n".join(lines) + "\n" + end
        text = re.sub(f"{begin}.*?{end}", lambda found, made=made: made, text, flags=re.DOTALL)
    return text


def _settings() -> Iterator[str]:
    yield from _head("SGLang's option", "default", "what it is")
    fields = attrs.fields_dict(SglangSettings)
    for name, about in settings_of(SglangSettings).items():
        default = fields[name].default
        shown = (
            "SGLang's" if default in (None, "") else "off" if default is False else f"`{default}`"
        )
        yield _row(f"`{about.option}`", about.unset or shown, _what(about))


def _what(about: Setting) -> str:
    match about.check:
        case Only(value=value, why=why):
            return f"{about.help}; must be `{value}`: {why}"
        case Choice(expected=expected):
            return f"{about.help}; must be {expected}"
    return about.help


def _patches() -> Iterator[str]:
    yield from _head("SGLang's function, wrapped", "why", "how it is checked", "what ends it")
    for patch in PATCHES:
        yield _row(_place(patch), patch.why, _test(patch), _upstream(patch))


def _place(patch: Patch) -> str:
    module, _, name = patch.place.partition(":")
    versions = "" if patch.versions == TESTED else f", only in {', '.join(patch.versions)}"
    return f"`{name}` of `{module.removeprefix('sglang.srt.')}`{versions}"


def _upstream(patch: Patch) -> str:
    anchor = patch.section.lower().replace(" ", "-")
    return f"[{patch.upstream}]({UPSTREAM}#{anchor})" if anchor else patch.upstream


def _test(patch: Patch) -> str:
    file, _, test = patch.test.partition("::")
    return f"parameters at start; [{test}]({file})"


def _head(*columns: str) -> Iterator[str]:
    yield _row(*columns)
    yield _row(*("---" for _ in columns))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
