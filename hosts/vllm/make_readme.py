"""Write README.md's tables from the code, without vLLM: ``python hosts/vllm/make_readme.py``."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from specplug.settings import settings_of
from specplug_vllm import vllm_names
from specplug_vllm.patches import PATCHES
from specplug_vllm.settings import Settings
from specplug_vllm.v1 import names as v1_names
from specplug_vllm.v2 import names as v2_names
from specplug_vllm.versions import TESTED

PAGE = Path(__file__).with_name("README.md")
UPSTREAM = "../../docs/hosts.md"
NAMES = {"V1, V2": vllm_names.NAMES, "V1": v1_names.NAMES, "V2": v2_names.NAMES}


def with_tables(text: str) -> str:
    """Return the page with its tables made anew, each between the comments of its name."""
    for name, lines in {"settings": _settings(), "patches": _patches()}.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        made = begin + "\n".join(lines) + "\n" + end
        text = re.sub(f"{begin}.*?{end}", lambda found, made=made: made, text, flags=re.DOTALL)
    return text


def anchor(heading: str) -> str:
    """Return GitHub's name of a heading in a link."""
    return re.sub(r"[^\w-]", "", heading.lower().replace(" ", "-"))


def _settings() -> Iterator[str]:
    yield from _head("setting", "what it is", "without it")
    for name, about in settings_of(Settings).items():
        yield _row(f"`{name}`", about.help, about.unset or "none")


def _patches() -> Iterator[str]:
    yield from _head("vLLM's", "runner", "why", "how it is checked", "what would end it")
    for patch in PATCHES:
        versions = "" if patch.versions == TESTED else f", {', '.join(patch.versions)}"
        file, _, test = patch.test.partition("::")
        yield _row(
            f"`{patch.place.rpartition(':')[2]}`, wrapped",
            patch.runner + versions,
            patch.why,
            f"parameters at start; [{test}]({file})",
            _upstream(patch.upstream, patch.section),
        )
    for runner, names in NAMES.items():
        for name, written in names.written.items():
            yield _row(
                f"`GPUModelRunner.{name}`, set",
                runner,
                written.why,
                "that it is there, at start",
                _upstream(written.upstream, written.section),
            )


def _upstream(change: str, section: str) -> str:
    return f"[{change}]({UPSTREAM}#{anchor(section)})"


def _head(*columns: str) -> Iterator[str]:
    yield _row(*columns)
    yield _row(*("---" for _ in columns))


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
