"""What vLLM does not give is refused at start, in a line with the names of both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hosted_engines import Engines

import specplug

PLUGIN = """
import specplug
import torch


class Algorithm:
    @specplug.hookimpl
    def describe(self):
        return specplug.AlgorithmInfo(name="{name}", summary="A test", api_version=1)

    @specplug.hookimpl
    def create_worker(self, runtime):
        {create}
        return self

    @specplug.hookimpl
    def build_draft_input(self, runtime, batch, target_output, future_map):
        return specplug.DraftInput(bonus_tokens=target_output.bonus_tokens)

    @specplug.hookimpl
    def propose(self, runtime, batch, draft_input):
        {propose}

    {more}


algorithm = Algorithm()
"""
ROOT = "return specplug.Draft.chain(draft_input.bonus_tokens.unsqueeze(1))"


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """Installs an algorithm as a package of its own."""

    def install(name: str, create: str = "pass", propose: str = ROOT, more: str = "pass") -> None:
        module = f"specplug_{name.lower()}"
        text = PLUGIN.format(name=name, create=create, propose=propose, more=more)
        (tmp_path / f"{module}.py").write_text(text)
        metadata = tmp_path / f"{module}-1.0.dist-info"
        metadata.mkdir()
        told = f"Metadata-Version: 2.1\nName: specplug-{name.lower()}\nVersion: 1.0\n"
        (metadata / "METADATA").write_text(told)
        group = f"[specplug.algorithms]\n{name} = {module}:algorithm\n"
        (metadata / "entry_points.txt").write_text(group)
        monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    return install


REFUSED = {
    "VERIFIES": (
        {"more": "@specplug.hookimpl\n    def verify(self, runtime, batch): return None"},
        r"VERIFIES has a verify\(\) of its own, and vLLM 0\.32\.0 \(model runner V1\) verifies by",
    ),
    "ADDS": (
        {"create": "runtime.add_output(specplug.PerTokenOutput(name='x', dtype=torch.int8))"},
        r"vLLM 0\.32\.0 \(model runner V1\) hands out its own outputs alone",
    ),
    "LAYERS": (
        {"create": "runtime.capture_layer_inputs((99,))"},
        "capture of layer 99: expected 0 to ",
    ),
    "RAISES": (
        {"create": "raise SystemExit(0)"},
        r"RAISES \(specplug-raises 1\.0.*create_worker\(\) raised SystemExit",
    ),
    "NOTHING": (
        {"create": "return None"},
        r"specplug-nothing 1\.0.*create_worker\(\) returned None",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_algorithm_that_needs_more_is_refused(name: str, install: object, engines: Engines) -> None:
    parts, told = REFUSED[name]
    install(name, **parts)  # type: ignore[operator]
    with pytest.raises((RuntimeError, specplug.SpecplugError), match=told):
        engines.make(name, 3)


@pytest.mark.parametrize(
    ("name", "propose"),
    [
        ("SHORT", "return specplug.Draft.chain(draft_input.bonus_tokens[:0].unsqueeze(1))"),
        ("FLOATS", "return specplug.Draft.chain(draft_input.bonus_tokens.unsqueeze(1).float())"),
        ("NUMBER", "return 7"),
        (
            "UNKNOWN",
            "return specplug.Draft.chain((draft_input.bonus_tokens + 99999).unsqueeze(1)"
            ".repeat(1, max(batch.max_draft_nodes)))",
        ),
        (
            "BRANCHES",
            "n = max(batch.max_draft_nodes); t = draft_input.bonus_tokens[:, None].repeat(1, n);"
            "return specplug.Draft(t, torch.zeros_like(t))",
        ),
        ("EXITS", "raise SystemExit(0)"),
    ],
)
def test_wrong_proposals_cost_no_token(
    name: str,
    propose: str,
    install: object,
    engines: Engines,
    prompts: list[str],
    plain: list[list[int]],
) -> None:
    install(name, propose=propose)  # type: ignore[operator]
    assert engines.make(name, 3).generate(prompts) == plain


def test_adaptive_verification_is_refused_where_v1_runs(engines: Engines) -> None:
    told = (
        "enable_adaptive_verification=True: model runner V1 verifies all that is drafted; set VLLM_"
    )
    with pytest.raises(ValueError, match=told):
        engines.make("NGRAM", 3, adaptive=True)
