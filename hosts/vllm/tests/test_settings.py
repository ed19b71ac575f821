"""Settings that are taken, adjusted and refused, each with a line that says what to do."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest
from hosted_engines import MODEL, Engines

import specplug
import specplug_vllm
from specplug.registry import Registry
from specplug_vllm import host, patches, versions
from specplug_vllm.settings import Settings
from specplug_vllm.v1 import names as v1_names


def resolved(name: str, tokens: int = 5, target: str = str(MODEL), **given: Any) -> Any:
    settings = Settings.of({"specplug": given})
    info = Registry().select(name).info
    return settings.resolve(
        info, num_speculative_tokens=tokens, target=target, target_config={"vocab_size": 4096}
    )


def test_settings_default_to_num_speculative_tokens() -> None:
    config = resolved("EAGLE3", 7)
    assert (config.num_steps, config.topk, config.num_draft_tokens) == (7, 1, 8)
    assert config.draft_model_path.name == "tiny_code"


def test_settings_that_are_typed_are_taken(tmp_path: Any) -> None:
    config = resolved("EAGLE3", 7, num_steps=3, num_draft_tokens=4, draft_model_path=str(tmp_path))
    assert (config.num_steps, config.num_draft_tokens) == (3, 4)
    assert config.draft_model_path == tmp_path


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"num_step": 3}, "unknown setting 'num_step'; expected one of num_steps, topk"),
        ({"num_steps": "3"}, "specplug.num_steps='3': expected an integer"),
        ({"topk": True}, "specplug.topk=True: expected an integer"),
        ({"num_draft_tokens": 9}, "vLLM verifies at most 6 nodes with num_speculative_tokens=5"),
        ({"draft_model_path": 1}, "specplug.draft_model_path=1: expected the path of a folder"),
        ({"disable_extensions": "X"}, "disable_extensions='X': expected a list of extensions"),
    ],
)
def test_setting_that_is_wrong_is_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(specplug.UsageError, match=told):
        resolved("EAGLE3", **given)


def test_settings_that_are_no_mapping_are_refused() -> None:
    with pytest.raises(specplug.UsageError, match="expected a mapping of num_steps"):
        Settings.of({"specplug": ["topk"]})


def test_draft_weights_that_are_missing_are_told() -> None:
    with pytest.raises(specplug.UsageError, match="EAGLE3 needs draft weights for this target"):
        resolved("EAGLE3", target="meta-llama/Llama-3.1-8B")


def test_topk_over_one_names_both(engines: Engines) -> None:
    told = r"EAGLE3 with topk=4 drafts trees, and vLLM 0\.32\.0 \(model runner V1\) verifies chains"
    with pytest.raises(RuntimeError, match=told) as raised:
        engines("EAGLE3", settings={"topk": 4})
    assert isinstance(raised.value.__cause__, specplug.UsageError)


def test_unknown_algorithm_names_those_installed() -> None:
    with pytest.raises(specplug.UnknownAlgorithm, match="did you mean EAGLE3"):
        specplug_vllm.EAGLE33  # noqa: B018
    with pytest.raises(AttributeError):
        specplug_vllm.something  # noqa: B018


def test_adjusted_setting_is_told(engines: Engines) -> None:
    with pytest.warns(specplug.FallbackWarning, match="num_steps 9 -> 6: the draft model has one"):
        engines.make("MULTI_LAYER_EAGLE", 9)


def test_other_version_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch, engines: Engines, prompts: list[str], plain: list[list[int]]
) -> None:
    monkeypatch.setattr(versions, "TESTED", ("0.99.0",))
    with pytest.raises(specplug.UsageError, match=r"tested with 0\.99\.0; install one") as raised:
        patches.check(v1_names.NAMES, patches.When.V1)
    assert "\n" not in str(raised.value)
    specplug_vllm.register()  # does nothing, so that plain engines run
    assert engines().generate(prompts) == plain
    with pytest.raises(RuntimeError, match=r"vLLM 0\.32\.0; specplug-vllm was tested with 0\.99"):
        engines.make("NGRAM", 7)


def test_changed_form_of_a_patch_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    patches.check(v1_names.NAMES, patches.When.V1)
    changed = [
        attrs.evolve(each, parameters="self, batch")
        if each.place.endswith("propose_draft_token_ids")
        else each
        for each in patches.PATCHES
    ]
    monkeypatch.setattr(patches, "PATCHES", changed)
    with pytest.raises(specplug.UsageError, match=r"propose_draft_token_ids has \(self, sched"):
        patches.check(v1_names.NAMES, patches.When.V1)


def test_changed_field_is_refused_in_one_line() -> None:
    place = "vllm.v1.worker.gpu_input_batch:CachedRequestState"
    names = attrs.evolve(v1_names.NAMES, fields={place: "req_id, spirit"})
    told = r"CachedRequestState has \(req_id\), expected \(req_id, spirit\)"
    with pytest.raises(specplug.UsageError, match=told):
        patches.check(names, patches.When.V1)


def test_missing_attribute_of_a_runner_is_refused_in_one_line(engines: Engines) -> None:
    runner = engines("EAGLE3").runner
    v1_names.NAMES.check_runner(runner)
    told = r"Runner\.input_batch has \(req_ids\), expected \(req_ids, spirit\)"
    names = attrs.evolve(v1_names.NAMES, runner={"input_batch": "req_ids, spirit"})
    with pytest.raises(specplug.UsageError, match=told):
        names.check_runner(runner)


def test_server_command_has_the_typed_settings() -> None:
    options = specplug.host.ServerOptions(model="folder", algorithm="EAGLE3", num_steps=3)
    command = " ".join(host.host.server_command(options))
    assert '{"model": "specplug_vllm.EAGLE3", "num_speculative_tokens": 3}' in command
    assert '{"specplug": {"num_steps": 3}}' in command
    wider = attrs.evolve(options, num_steps=None, num_draft_tokens=9, more=("--seed", "1"))
    assert '"num_speculative_tokens": 8' in " ".join(host.host.server_command(wider))
    assert host.host.server_command(wider)[-2:] == ["--seed", "1"]


def test_settings_after_the_dashes_join_those_before() -> None:
    more = (
        "--seed",
        "1",
        "--additional-config",
        '{"specplug": {"draft_when": "always"}, "other": 2}',
        '--speculative-config={"num_speculative_tokens_per_batch_size": [[1, 4, 2]]}',
    )
    options = specplug.host.ServerOptions(model="m", algorithm="EAGLE3", num_steps=3, more=more)
    command = list(host.host.server_command(options))
    assert command[-2:] == ["--seed", "1"]
    additional = json.loads(command[command.index("--additional-config") + 1])
    assert additional == {"specplug": {"num_steps": 3, "draft_when": "always"}, "other": 2}
    speculative = json.loads(command[command.index("--speculative-config") + 1])
    assert speculative == {
        "model": "specplug_vllm.EAGLE3",
        "num_speculative_tokens": 3,
        "num_speculative_tokens_per_batch_size": [[1, 4, 2]],
    }
    assert command.count("--additional-config") == 1
    assert "--speculative-config" not in host.host.server_command(
        attrs.evolve(options, algorithm="NONE")
    )


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--additional-config", "always"], "--additional-config always: expected a JSON object"),
        (["--additional-config=[1]"], r"--additional-config \[1\]: expected a JSON object"),
        (
            ["--additional-config", '{"specplug": {"draft_when": "fastest"}}'],
            "specplug.draft_when='fastest': expected 'faster' or 'always'",
        ),
        (["--additional-config", '{"specplug": 3}'], "=3: expected a mapping of num_steps"),
        (["--speculative-config"], "-sc: expected one argument; give it a JSON object"),
    ],
)
def test_wrong_config_after_the_dashes_is_refused(more: list[str], told: str) -> None:
    options = specplug.host.ServerOptions(model="m", algorithm="EAGLE3", more=more)
    with pytest.raises(specplug.UsageError, match=told):
        host.host.server_command(options)
