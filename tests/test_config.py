"""``EngineConfig``: what follows from its fields is the same everywhere."""

from __future__ import annotations

import inspect
import json
import runpy
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch

from specplug import LLM, EngineConfig, SamplingParams, UsageError
from specplug.cli.options import DISAGGREGATION, ENGINE, GRAMMAR, SAMPLING
from specplug.config import INSTANCES, agreeing
from specplug.disagg.identity import Identity
from specplug.settings import settings_of

DOCS = Path(__file__).parents[1] / "docs"
FIELDS = attrs.fields_dict(EngineConfig)
LONG = "x" * 1_000_000


def test_arguments_of_llm_are_the_fields() -> None:
    parameters = dict(inspect.signature(LLM.__init__).parameters)
    del parameters["self"]
    assert list(parameters) == list(FIELDS)
    for name, parameter in parameters.items():
        expected = str(FIELDS[name].type)
        if name == "model":  # or all settings at once
            expected = expected.replace("Path", "Path | EngineConfig")
        assert parameter.annotation == expected, name
        assert parameter.default == FIELDS[name].default, name


@pytest.mark.parametrize("kind", [EngineConfig, SamplingParams])
def test_every_field_is_a_setting_with_help(kind: type[attrs.AttrsInstance]) -> None:
    settings, fields = settings_of(kind), attrs.fields_dict(kind)
    assert list(settings) == list(fields)
    for name, about in settings.items():
        assert about.help.endswith("."), name
        assert bool(about.unset) == (fields[name].default is None), name


def test_config_imports_no_torch() -> None:
    script = "import sys, specplug.config, specplug.sampling_params; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "False\n"


def test_llm_takes_a_config_alone() -> None:
    config = EngineConfig(page_size=4, max_total_tokens=512, disable_radix_cache=True)
    params = SamplingParams(max_tokens=6)
    with LLM(config) as llm:
        (output,) = llm.generate("import os", params)
        effective = llm.effective_config
    with LLM(page_size=4, max_total_tokens=512, disable_radix_cache=True) as llm:
        assert llm.config == config
        assert llm.effective_config == effective
        assert llm.generate("import os", params)[0].token_ids == output.token_ids


@pytest.mark.parametrize("page_size", [8, 16])
def test_settings_beside_a_config_are_refused(page_size: int) -> None:
    assert FIELDS["page_size"].default == 16, "so that it is refused at its default, too"
    config, message = EngineConfig(page_size=4), f"an EngineConfig and page_size={page_size} are"
    with pytest.raises(UsageError, match=message):
        LLM(config, page_size=page_size)
    with pytest.raises(UsageError, match=message):
        LLM(model=config, page_size=page_size)


def test_effective_config_has_every_setting() -> None:
    with LLM(max_total_tokens=512) as llm:
        assert FIELDS.keys() <= llm.effective_config.keys()
        json.dumps({**llm.effective_config, "draft_model_path": None})


def test_config_survives_json() -> None:
    config = EngineConfig(
        model=Path("a/model"),
        seed=-(2**70),
        chunked_prefill_size=None,
        disable_extensions=["A", "B"],
        disaggregation="decode",
        disaggregation_timeout=0.5,
    )
    assert EngineConfig.from_json(json.loads(json.dumps(config.as_json()))) == config


def test_names_that_can_be_read_once_are_kept() -> None:
    config = EngineConfig(disable_extensions=(name for name in "AB"))
    assert config.disable_extensions == ("A", "B")
    assert json.loads(json.dumps(config.as_json()))["disable_extensions"] == ["A", "B"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"disable_radix_cache": "no"}, "disable_radix_cache='no': expected True or False"),
        ({"page_size": None}, "page_size=None: expected an integer of at least 1"),
        ({"device": 3}, "device=3: expected cpu, cuda or cuda:N"),
        ({"disaggregation": "all"}, "disaggregation='all': expected prefill, decode, both, or"),
        ({"dp_rank": 2, "dp_size": 2}, "dp_rank=2: expected 0 to 1, since dp_size=2"),
        ({"dp_rank": 0, "dp_size": 2}, "dp_size=2 without enable_dp_attention"),
        ({"model": True}, "model=True: expected a folder or a hub id"),
        ({"model": {"page_size": 8}}, "model={'page_size': 8}: expected a folder or a hub id"),
        ({"tokenizer": ["a"]}, r"tokenizer=\['a'\]: expected a folder or a hub id"),
        ({"dtype": torch.ones(2)}, r"dtype=tensor\(.*: expected auto"),
    ],
)
def test_config_that_cannot_be_used_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{message}"):
        EngineConfig(**settings)


@pytest.mark.parametrize("port", ["", "-1", "65536", "99999", "1" * 5000, "²", " 90", "http"])
def test_a_port_that_there_cannot_be_is_refused(port: str) -> None:
    one = f"tcp://127.0.0.1:{port}"
    for address in (one, f"tcp://127.0.0.1:9000,{one}"):
        with pytest.raises(
            UsageError, match=r"^disaggregation_address='tcp://127\.0\.0\.1:"
        ) as told:
            EngineConfig(disaggregation="prefill", disaggregation_address=address)
        assert "expected tcp://HOST:PORT, with a port of at most 65535" in str(told.value)
    with pytest.raises(UsageError, match=r"^dp_address='h:.*expected host:port of rank 0"):
        EngineConfig(dp_address=f"h:{port}")


@pytest.mark.parametrize("address", ["tcp://[::1]:65535", "tcp://a-b.c:1, tcp://*:*", "tcp://h:0"])
def test_ports_that_there_can_be_are_taken(address: str) -> None:
    EngineConfig(disaggregation="decode", disaggregation_address=address)
    assert EngineConfig(dp_address="::1:65535").dp_address == "::1:65535"


@pytest.mark.parametrize(
    "setting",
    [
        {"model": LONG},
        {"tokenizer": LONG},
        {"speculative_draft_model_path": LONG, "speculative_algorithm": "NONE"},
        {"speculative_algorithm": LONG},
        {"device": LONG},
        {"dtype": LONG},
        {"disaggregation": LONG},
        {"disaggregation_address": LONG},
        {"disaggregation_address": "tcp://h:1," * 100_000 + "tcp://h:1"},
        {"dp_address": LONG},
        {"disable_extensions": [LONG]},
        {"disable_extensions": LONG},
    ],
    ids=lambda setting: next(iter(setting)),
)
def test_messages_hold_no_more_than_a_bit_of_a_value(setting: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as told:
        LLM(**setting)
    assert len(str(told.value)) < 300


@pytest.mark.parametrize("key", ["", " ", "secret" * 1000, b"secret", ["secret"]])
def test_a_key_that_is_refused_is_not_shown(key: Any) -> None:
    message = "^disaggregation_key is no such value: expected a text"
    with pytest.raises(UsageError, match=message) as told:
        EngineConfig(disaggregation="decode", disaggregation_key=key)
    assert "secret" not in str(told.value)


def test_a_key_is_not_shown_and_goes_to_other_processes() -> None:
    config = EngineConfig(disaggregation="decode", disaggregation_key=" secret\n")
    assert "secret" not in repr(config)
    assert EngineConfig.from_json(config.as_json()).disaggregation_key == "secret"
    assert config.of_partner("tcp://127.0.0.1:9").disaggregation_key == "secret"
    with pytest.raises(UsageError, match="an EngineConfig and disaggregation_key=… are given"):
        LLM(config, disaggregation_key="secret")
    with pytest.raises(UsageError, match="disaggregation_key without disaggregation: expected"):
        EngineConfig(disaggregation_key="secret")


@pytest.mark.parametrize("value", [7, None])
def test_extensions_that_are_no_list_are_refused(value: Any) -> None:
    with pytest.raises(UsageError, match=f"^disable_extensions={value}: expected a list"):
        LLM(disable_extensions=value)


def test_settings_can_be_keys() -> None:
    one, same = (
        SamplingParams(logit_bias={3: 1.0}, stop=["a"], return_hidden_states=[0]) for _ in range(2)
    )
    assert {one: 1}[same] == 1
    assert one != attrs.evolve(one, logit_bias={3: 2.0})
    assert {EngineConfig(disable_extensions=["A"]): 1}[EngineConfig(disable_extensions=("A",))] == 1


def test_options_are_those_that_the_fields_name() -> None:
    options = {option.name: option.opts[0] for option in (*ENGINE, *DISAGGREGATION)}
    wanted = {name: about.option for name, about in settings_of(EngineConfig).items()}
    limits = {"max_model_len": "--max-model-len"}  # of servers
    assert {**options, **limits} == {name: flag for name, flag in wanted.items() if flag}


def test_sampling_options_are_those_that_the_fields_name() -> None:
    options = {option.name: option.opts[0] for option in (*SAMPLING, *GRAMMAR)}
    settings = settings_of(SamplingParams).items()
    assert options == {name: about.option for name, about in settings if about.option}


def test_instances_compare_what_they_must_agree_on() -> None:
    assert agreeing(INSTANCES).keys() <= attrs.fields_dict(Identity).keys()


def test_page_of_settings_is_that_of_the_code() -> None:
    page = runpy.run_path(str(DOCS / "make_settings.py"))["page"]()
    found = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert found == page, "run: python docs/make_settings.py"
