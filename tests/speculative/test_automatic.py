"""``auto``: which algorithms it stands for."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
from importlib_metadata import EntryPoint

from specplug import (
    LLM,
    AlgorithmInfo,
    Capabilities,
    SamplingParams,
    SpecConfig,
    UsageError,
    hookimpl,
)
from specplug.config import EngineConfig
from specplug.host import HostCapabilities
from specplug.registry import Registry
from specplug.speculative.automatic import AutomaticChoice, choose_algorithms, select_algorithm

SHIPPED = {"tiny-code": Path(__file__).parent}


ABLE = "draft_model", "overlap", "target_drafts"


class Stub:
    """An algorithm with the required hooks, which declares what it is made with."""

    def __init__(self, name: str, **declared: Any) -> None:
        able = {k: v for k, v in declared.items() if k in ABLE}
        rest = {k: v for k, v in declared.items() if k not in able}
        self._info = AlgorithmInfo(
            name=name, summary="", api_version=1, capabilities=Capabilities(**able), **rest
        )

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return self._info

    @hookimpl
    def create_worker(self) -> object:
        return self

    @hookimpl
    def build_draft_input(self) -> None:
        return None

    @hookimpl
    def propose(self) -> None:
        return None


class Verifies(Stub):
    @hookimpl
    def verify(self) -> None:
        return None


class Refuses(Stub):
    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        raise UsageError("it takes no such target")


def drafting(name: str, speed_up: float | None) -> Stub:
    declared = {} if speed_up is None else {"tiny-code": speed_up}
    return Stub(name, draft_model=True, weights=SHIPPED, speed_ups=declared)


def registry(monkeypatch: pytest.MonkeyPatch, **plugins: object) -> Registry:
    """Plugins by name, and the core's own."""
    module: Any = types.ModuleType("stub_plugins")
    vars(module).update(plugins)
    monkeypatch.setitem(sys.modules, "stub_plugins", module)
    points = [EntryPoint(name, f"stub_plugins:{name}", "specplug.algorithms") for name in plugins]
    own = [each for each in Registry().entries() if each.distribution == "specplug"]
    found = Registry(points)
    found._algorithms = sorted([*found._algorithms, *own], key=lambda each: each.name)
    return found


def names(choice: AutomaticChoice) -> list[str]:
    return [each.name for each in choice.chosen]


def test_auto_takes_one_draft_model_by_its_speed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(
        monkeypatch,
        SLOW=drafting("SLOW", 1.5),
        FAST=drafting("FAST", 2.5),
        SILENT=drafting("SILENT", None),
        LOOKUP=Stub("LOOKUP"),
    )
    choice = choose_algorithms(found, None)
    assert names(choice) == ["LOOKUP", "FAST"]
    assert choice.line == (
        "auto is LOOKUP,FAST; left out are SILENT: it declares no speed-up for tiny-code, and one "
        "draft model is enough: FAST; SLOW: its speed-up of 1.50 is not more than the 2.50 of FAST"
    )


def test_auto_leaves_out_what_cannot_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_DISABLE", "OFF")
    found = registry(
        monkeypatch,
        BROKEN=object(),
        HOST_ONLY=Stub("HOST_ONLY", overlap=False),
        LOOKUP=Stub("LOOKUP"),
        OFF=Stub("OFF"),
        REFUSES=Refuses("REFUSES"),
        SELF=Stub("SELF", target_drafts=True),
        VERIFIES=Verifies("VERIFIES"),
        WEIGHTS=Stub("WEIGHTS", draft_model=True, weights={"tiny-code": Path("/not/there")}),
    )
    choice = choose_algorithms(found, None)
    assert names(choice) == ["LOOKUP"]
    told = dict(choice.left_out)
    assert told.pop("BROKEN").startswith("broken: the object object lacks the required hooks")
    assert told == {
        "HOST_ONLY": "it would turn overlap off for the others",
        "OFF": "disabled",
        "REFUSES": "it takes no such target",
        "SELF": "it drafts with the target's own layers, which pays in long contexts",
        "VERIFIES": "it has a verify() of its own, so it runs alone",
        "WEIGHTS": "no draft weights for tiny-code",
    }


def test_auto_for_another_model_needs_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(monkeypatch, FAST=drafting("FAST", 2.5), LOOKUP=Stub("LOOKUP"))
    choice = choose_algorithms(found, "some/model")
    assert names(choice) == ["LOOKUP"]
    assert choice.left_out == {"FAST": "no draft weights for some/model"}


def test_auto_without_any_is_plain_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(monkeypatch)
    config = EngineConfig(speculative_algorithm="AUTO")
    selected, choice = select_algorithm(found, config)
    assert selected.name == "NONE"
    assert choice is not None
    assert choice.line == "auto is no algorithm"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative_num_steps": 3}, "speculative_num_steps=3: auto chooses the algorithms"),
        ({"speculative_draft_model_path": "a"}, "speculative_draft_model_path='a': auto chooses"),
    ],
)
def test_auto_refuses_settings_of_one(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        select_algorithm(Registry(), EngineConfig(speculative_algorithm="auto", **settings))


def test_auto_in_a_host_of_one_algorithm_is_refused() -> None:
    host = HostCapabilities(name="vLLM 1.0", draft_models=True)
    with pytest.raises(UsageError, match=r"vLLM 1.0 runs one algorithm alone; expected the name"):
        select_algorithm(Registry(), EngineConfig(speculative_algorithm="auto"), host=host)


def test_auto_in_a_host_leaves_out_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(monkeypatch, FAST=drafting("FAST", 2.5), LOOKUP=Stub("LOOKUP"))
    host = HostCapabilities(name="Host 1.0", parts=True)
    choice = choose_algorithms(found, None, host=host)
    assert names(choice) == ["LOOKUP"]
    assert choice.left_out == {"FAST": "FAST has a draft model, and Host 1.0 runs none"}


def test_name_auto_is_refused_of_a_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    (entry, _) = registry(monkeypatch, AUTO=Stub("AUTO")).entries()
    assert entry.status.startswith("broken: AUTO is what users type for every algorithm")


def test_registry_alone_does_not_know_what_auto_is() -> None:
    with pytest.raises(UsageError, match="which algorithms these are depends on the model"):
        Registry().select("auto")


def test_run_of_auto_has_the_tokens_of_none(caplog: pytest.LogCaptureFixture) -> None:
    prompt, params = "def mean(values):\n    ", SamplingParams(max_tokens=40, ignore_eos=True)
    small = {"device": "cpu", "dtype": "float32", "max_total_tokens": 1024}
    with LLM(**small) as plain:
        expected = plain.generate(prompt, params)[0].token_ids
    with caplog.at_level("INFO", "specplug"), LLM(speculative_algorithm="auto", **small) as llm:
        assert llm.generate(prompt, params)[0].token_ids == expected
        algorithm = llm.effective_config["algorithm"]
    chosen = names(choose_algorithms(Registry(), None))
    assert algorithm == ",".join(chosen)
    assert len(chosen) > 1
    assert f"auto is {algorithm}; left out are " in caplog.text


def test_auto_of_one_algorithm_chooses_whether_to_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECPLUG_DISABLE", ",".join({*Registry().names()} - {"NGRAM", "NONE"}))
    noise = SamplingParams(max_tokens=60, temperature=4.0, seed=1, ignore_eos=True)
    with LLM(speculative_algorithm="auto", device="cpu", max_total_tokens=1024) as llm:
        assert llm.effective_config["algorithm"] == "NGRAM"
        llm.generate("x = 1\n" * 20, noise)
        assert llm.stats()["verifications_by_drafter"]["NONE"] > 20
