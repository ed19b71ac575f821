"""Write the README of each plugin from what it declares: ``python plugins/make_readmes.py``.

It is the page that a package index shows.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from pathlib import Path

from specplug import DEFAULT_MODEL, AlgorithmInfo, Registry, SpecConfig
from specplug.settings import settings_of

PLUGINS = Path(__file__).parent
PROMPT = '"def quicksort(items):"'


def algorithms() -> dict[Path, AlgorithmInfo]:
    """Return what the algorithms of this folder declare, by the folder of their distribution."""
    declared = {}
    for folder in sorted(path.parent for path in PLUGINS.glob("*/pyproject.toml")):
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        for name in project["entry-points"].get("specplug.algorithms", {}):
            declared[folder] = Registry().select(name).info
    return declared


def readme(info: AlgorithmInfo, distribution: str) -> str:
    """Return the text of a plugin's README."""
    run = f"specplug generate --speculative-algorithm {info.name} {PROMPT}"
    text = f"""\
# {distribution}

{info.summary}. A plugin for specplug, where an algorithm of
speculative decoding is a pip package. The output is that of plain decoding, token by token.

    pip install specplug {distribution}

```bash
{run}
```

| | |
| --- | --- |
"""
    rows = "".join(f"| {name} | {value} |\n" for name, value in facts(info))
    return text + rows + f"\n`specplug info {info.name}` says more.\n"


def facts(info: AlgorithmInfo) -> Iterator[tuple[str, str]]:
    """Yield what the table has, each with its name."""
    capabilities, config = info.capabilities, SpecConfig.resolve(info, model_name=DEFAULT_MODEL)
    yield "paper", f"<{info.paper}>"
    yield "drafts", "chains and trees" if capabilities.branching else "chains"
    steps, nodes = config.num_steps, config.num_draft_tokens
    yield "by default", f"{steps} steps, topk {config.topk}, {nodes} nodes with the root"
    if info.weights:
        yield "weights shipped for", ", ".join(sorted(info.weights))
    elif not capabilities.draft_model:
        yield "draft weights", "none are needed"
    own = () if info.settings is None else settings_of(info.settings)
    if own:
        yield "settings of its own", ", ".join(f"`{name}`" for name in own)
    yield "API version", str(info.api_version)


if __name__ == "__main__":
    for folder, info in algorithms().items():
        distribution = f"specplug-{folder.name.replace('_', '-')}"
        (folder / "README.md").write_text(readme(info, distribution), encoding="utf-8")
