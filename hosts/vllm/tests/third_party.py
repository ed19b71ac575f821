"""A third party's package, as a fixture that each folder of tests imports."""

from __future__ import annotations

import sys
from typing import Any

import pytest

ECHO = '''
"""A third party's algorithm: the last token again and again."""

import os
from collections import Counter

import specplug


class Echo:
    """Can be told to fail, and tells what it was asked."""

    def __init__(self):
        hook, _, call = os.environ.get("ECHO_FAILS", "").partition(" ")
        self.calls, self.fails = Counter(), {hook: int(call)} if hook else {}
        self.drafted, self.finished = [], []

    def fail(self, hook, call):
        """Fail in so many calls of a hook from now, once."""
        self.fails = {hook: self.calls[hook] + call}

    def called(self, hook):
        self.calls[hook] += 1
        if self.calls[hook] == self.fails.get(hook):
            raise ValueError("no more ideas")

    @specplug.hookimpl
    def describe(self):
        return specplug.AlgorithmInfo(name="ECHO", summary="The last token again", api_version=1)

    @specplug.hookimpl
    def create_worker(self, runtime):
        self.called("create_worker")
        return self

    @specplug.hookimpl
    def build_draft_input(self, runtime, batch, target_output, future_map):
        self.called("build_draft_input")
        return specplug.DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(self, runtime, batch, draft_input):
        self.called("propose")
        self.drafted.extend(request.request_id for request in batch.requests)
        width = min(runtime.config.num_draft_tokens, max(batch.max_draft_nodes))
        return specplug.Draft.chain(draft_input.bonus_tokens.unsqueeze(1).repeat(1, width))

    @specplug.hookimpl
    def on_request_finished(self, runtime, report):
        self.finished.append(report.request_id)


algorithm = Echo()
'''


@pytest.fixture(scope="session")
def third_party(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The algorithm ECHO, installed as a package of its own."""
    folder = tmp_path_factory.mktemp("third_party")
    (folder / "specplug_echo.py").write_text(ECHO)
    metadata = folder / "specplug_echo-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: specplug-echo\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[specplug.algorithms]\nECHO = specplug_echo:algorithm\n"
    )
    sys.path.insert(0, str(folder))
    import specplug_echo

    return specplug_echo.algorithm
