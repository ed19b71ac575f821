"""Write docs/settings.md from the code: ``python docs/make_settings.py``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import attrs

from specplug import EngineConfig, SamplingParams
from specplug.config import INSTANCES, RANKS
from specplug.settings import Setting, settings_of

PAGE = Path(__file__).with_name("settings.md")

INTRODUCTION = """\
# Settings

This page is made by `python docs/make_settings.py` from `specplug/config.py` and
`specplug/sampling_params.py`, where each setting is declared once: its default, its check, its
words. The options of `specplug generate`, `bench` and `serve`, the fields of a server's requests,
and what goes to other processes follow from these two files, too.

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
"""

REQUESTS = """\
Those that a server takes under the same name are marked; docs/serving.md says what OpenAI's own
fields mean.
"""

AGREE = {RANKS: "the ranks of a run", INSTANCES: "the two instances of a pair"}


def page() -> str:
    """The text of the page."""
    lines = [INTRODUCTION, "## Settings of a run: `EngineConfig`\n", *_tables(EngineConfig)]
    lines += ["## Settings of a request: `SamplingParams`\n", REQUESTS, *_tables(SamplingParams)]
    return "\n".join(lines)


def _tables(kind: type[attrs.AttrsInstance]) -> Iterator[str]:
    """A heading and a table for each group of a class."""
    settings, fields = settings_of(kind), attrs.fields_dict(kind)
    for group in dict.fromkeys(about.group for about in settings.values()):
        yield f"### {group}\n"
        yield "| setting | option | type | default | what it is |"
        yield "| --- | --- | --- | --- | --- |"
        for name, about in settings.items():
            if about.group == group:
                option = f"`{about.option}`" if about.option else ""
                kinds = "`" + str(fields[name].type).replace("|", "\\|") + "`"
                kinds += f", {about.unit}" if about.unit else ""
                default = _default(fields[name].default, about)
                yield f"| `{name}` | {option} | {kinds} | {default} | {_what(about)} |"
        yield ""


def _default(value: object, about: Setting) -> str:
    if isinstance(value, attrs.Factory):
        return "none"
    if value is None:
        return about.unset or "`None`"
    return f"`{json.dumps(value)}`" if isinstance(value, str) else f"`{value}`"


def _what(about: Setting) -> str:
    parts = [about.help]
    if about.agree:
        parts.append(f"The same for {' and '.join(AGREE[who] for who in about.agree)}.")
    if about.served:
        parts.append("Also of servers.")
    return " ".join(parts).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
