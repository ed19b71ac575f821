"""A run with a view beside a witness of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest

from specplug import LLM, RequestOutput, SamplingParams, StepReport, hookimpl
from specplug_views import Trace, Trees

PROMPTS = [
    "def mean(values):\n    ",
    "class Stack:\n    def push(self, value):\n        self.values.append(value)\n\n    def ",
    "import ",
]


class Witness:
    """Keeps the reports of a run, and what its verification gets, as lists."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []
        self.drafts: list[dict[str, Any]] = []

    @hookimpl(wrapper=True)
    def verify(self, batch: Any, draft: Any, target_output: Any) -> Iterator[None]:
        parents = None if draft.parents is None else draft.parents.tolist()
        said = draft.pad(target_output.predict, fill=-1).tolist()
        self.drafts.append({"tokens": draft.tokens.tolist(), "parents": parents, "target": said})
        return (yield)

    @hookimpl
    def on_step(self, report: StepReport) -> None:
        self.reports.append(report)


@attrs.frozen
class Viewed:
    """A run that was looked at, and what the views wrote."""

    witness: Witness
    outputs: Sequence[RequestOutput]
    page: Path
    trace: Path

    @property
    def records(self) -> list[dict[str, Any]]:
        """What the page is made of."""
        return records_of(self.page)

    @property
    def events(self) -> list[dict[str, Any]]:
        """The trace's."""
        found: list[dict[str, Any]] = json.loads(self.trace.read_text())["traceEvents"]
        return found


def records_of(page: Path) -> list[dict[str, Any]]:
    """Return the records in a page."""
    text = page.read_text(encoding="utf-8")
    _, _, rest = text.partition('<script type="application/json" id="records">')
    found: list[dict[str, Any]] = json.loads(rest.partition("</script>")[0])
    return found


def view(
    folder: Path,
    algorithm: str = "EAGLE3",
    params: SamplingParams | None = None,
    prompts: Sequence[Any] = PROMPTS,
    **settings: Any,
) -> Viewed:
    """Run prompts on the default model with both views."""
    page, trace = folder / "trees.html", folder / "trace.json"
    witness = Witness()
    extensions = [Trees(page), Trace(trace), witness]
    with LLM(
        device="cpu", speculative_algorithm=algorithm, extensions=extensions, **settings
    ) as llm:
        outputs = llm.generate(prompts, params or SamplingParams(max_tokens=24))
    return Viewed(witness, outputs, page, trace)


TREE = {
    "speculative_num_steps": 4,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 10,
}


@pytest.fixture(scope="session")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Viewed:
    """A run with trees."""
    return view(tmp_path_factory.mktemp("tree"), **TREE)
