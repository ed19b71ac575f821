"""Write the reference in docs/hooks.md from the code: ``python docs/make_hooks.py``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

from specplug import hookspecs
from specplug.contract import HOOKS

PAGE = Path(__file__).with_name("hooks.md")
MARK = "<!-- What follows is made from specplug/hookspecs.py: python docs/make_hooks.py -->"
SECTIONS = {"Args": "It gets", "Returns": "It returns", "Raises": "It may raise"}
WIDTH = 79  # of a signature's line; a longer one has a line for each argument


def page() -> str:
    """The text of the page: its head as it stands, and the reference made anew."""
    head, mark, _ = PAGE.read_text(encoding="utf-8").partition(MARK)
    if not mark:
        raise ValueError(f"{PAGE} lacks the line {MARK}")
    return head + "\n\n".join((MARK, *_contract(), *_hooks())) + "\n"


def _contract() -> Iterator[str]:
    """What holds for all hooks: the module's own docstring, after its first line."""
    yield "## What holds for all of them"
    _, text = inspect.cleandoc(hookspecs.__doc__ or "").split("\n\n", 1)
    yield _markdown(text)


def _hooks() -> Iterator[str]:
    """A section for each hook, in the order of the code."""
    yield "## Each hook"
    for name in HOOKS:
        function = getattr(hookspecs, name)
        observer = "" if function.specplug_spec["firstresult"] else "  # an observer"
        yield f"### `{name}`"
        yield f"```py\n{_signature(name, inspect.signature(function))}{observer}\n```"
        yield from _docstring(inspect.getdoc(function) or "")


def _signature(name: str, signature: inspect.Signature) -> str:
    arguments = [f"{each.name}: {each.annotation}" for each in signature.parameters.values()]
    returns = signature.return_annotation
    line = f"{name}({', '.join(arguments)}) -> {returns}"
    if len(line) <= WIDTH:
        return line
    return "\n".join((f"{name}(", *(f"    {each}," for each in arguments), f") -> {returns}"))


def _docstring(text: str) -> Iterator[str]:
    """A docstring's text, then its sections as lists and paragraphs."""
    headings = "|".join(SECTIONS)
    body, *parts = re.split(rf"^({headings}):\n", text, flags=re.MULTILINE)
    yield _markdown(body)
    for heading, content in zip(parts[::2], parts[1::2], strict=True):
        inner = dedent(content).strip("\n")
        if heading == "Returns":
            yield f"**{SECTIONS[heading]}.** {_markdown(inner)}"
            continue
        yield f"**{SECTIONS[heading]}**"
        items = re.split(r"^(\w+): ", inner, flags=re.MULTILINE)[1:]
        rows = zip(items[::2], items[1::2], strict=True)
        yield "\n".join(f"- `{name}`: {_markdown(' '.join(what.split()))}" for name, what in rows)


def _markdown(text: str) -> str:
    """A docstring's text as Markdown: names in single marks, literal blocks between fences."""
    found: list[str] = []
    for part in text.strip("\n").split("\n\n"):
        if part.startswith("    ") and found and found[-1].endswith("::"):
            found[-1] = found[-1][:-1]
            found.append(f"```text\n{dedent(part)}\n```")
        else:
            found.append(part.replace("``", "`"))
    return "\n\n".join(found)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
