"""Instances that do not fit are refused: they end and say both values, and the other serves on."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from shutil import copytree
from typing import Any

import attrs
import pytest
import torch
from child_instances import Instance, prefill_as
from safetensors.torch import load_file, save_file

import specplug
from conftest import Plain, Site, finish, step_until
from specplug import LLM, FallbackWarning, SamplingParams, UsageError
from specplug.algorithm import ASSETS
from specplug.disagg.identity import (
    HandshakeError,
    Identity,
    folder_fingerprint,
    model_fingerprint,
)
from specplug.model.checkpoint import weights_fingerprint

PARAMS = SamplingParams(max_tokens=8)
KEY = "open sesame"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A decode instance that a sound one prefills for."""
    options: dict[str, Any] = {"dtype": "float64", "disaggregation_key": KEY}
    with ExitStack() as stack:
        llm = LLM(disaggregation="decode", disaggregation_address="tcp://127.0.0.1:*", **options)
        stack.enter_context(llm)
        site = Site(llm, options, tmp_path_factory.mktemp("site"), stack)
        site.registered()
        yield site


@pytest.fixture(scope="module")
def other_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model, but for one of its norms."""
    folder = tmp_path_factory.mktemp("other") / "model"
    copytree(ASSETS / "tiny_code", folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = max(name for name in tensors if "norm" in name)
    tensors[name] = tensors[name] * 1.5
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def check_serves_on(site: Site, plain: Plain) -> None:
    prompt = plain.ids("import os\n")
    site.llm.add_request(prompt, PARAMS)
    (output,) = finish(site.llm).values()
    assert output.token_ids == plain.output(prompt, PARAMS).token_ids


def refused(site: Site) -> None:
    count = site.transfers["refused"]
    step_until(site.llm, lambda: site.transfers["refused"] > count, "the refusal")


@pytest.mark.parametrize("name", ["model", "dtype", "page_size"])
def test_an_instance_that_does_not_fit_ends_and_says_why(
    site: Site, plain: Plain, other_weights: Path, name: str
) -> None:
    value = {"model": other_weights, "dtype": "float32", "page_size": 8}[name]
    instance = site.prefill(**{name: value})
    refused(site)
    assert instance.wait() == 1
    said = instance.log.read_text()
    ours = site.llm.decode_instance.identity
    if name == "model":
        told = re.search(r"and '(LlamaForCausalLM [0-9a-f]{16})' at", said)
        assert told is not None, said
        theirs: Any = told[1]
        assert theirs != ours.model
    else:
        theirs = value
    assert f"HandshakeError: the decode instance at {site.address} refuses this one: " in said
    assert f"{name} is {getattr(ours, name)!r} at the decode instance and {theirs!r} at" in said
    assert f"expected the same: start both with the same --{name.replace('_', '-')}" in said
    assert site.llm.stats()["prefill_instances"] == 1
    check_serves_on(site, plain)


def test_an_instance_of_another_version_ends_and_says_why(
    site: Site, plain: Plain, tmp_path: Path
) -> None:
    log = tmp_path / "another.log"
    address = site.address
    other = Instance(
        prefill_as, log, version="0.0.7", disaggregation_address=address, **site.options
    )
    site.stack.callback(other.kill)
    refused(site)
    assert other.wait() == 1
    said = log.read_text()
    assert (
        f"version is {specplug.__version__!r} at the decode instance and '0.0.7' at the prefill "
        "instance; expected the same: install the same version" in said
    )
    check_serves_on(site, plain)


@pytest.mark.parametrize("key", ["shut sesame", None])
def test_an_instance_with_another_key_ends_and_says_why(
    site: Site, plain: Plain, key: str | None
) -> None:
    why = "the key differs, or only one of the two has one"
    instance = site.prefill(disaggregation_key=key)
    assert instance.wait() == 1
    said = instance.log.read_text()
    assert f"the decode instance at {site.address} refuses this one: {why}; expected the" in said
    assert "sesame" not in said
    assert site.llm.stats()["prefill_instances"] == 1
    check_serves_on(site, plain)


def test_the_key_is_shown_nowhere(site: Site) -> None:
    effective = site.llm.effective_config
    assert effective["disaggregation_key"] == "set"
    assert KEY not in f"{effective} {site.llm.config}"


@pytest.mark.parametrize("key", [None, KEY])
def test_a_port_that_anybody_reaches_is_warned_of_without_a_key(key: str | None) -> None:
    with warnings.catch_warnings(record=True) as told:
        LLM(
            disaggregation="decode",
            disaggregation_address="tcp://*:*",
            disaggregation_key=key,
            max_total_tokens=64,
        ).close()
    texts = [str(each.message) for each in told if each.category is FallbackWarning]
    assert len(texts) == (key is None)
    assert all("'tcp://*:*' without disaggregation_key: whoever reaches" in t for t in texts)


SOUND = Identity(model="M 1", dtype="float32", page_size=16, kv=(2, 4, 8), draft="NONE")


@pytest.mark.parametrize("name", [a.name for a in attrs.fields(Identity) if a.name != "draft"])
def test_every_difference_is_told_with_both_values(name: str) -> None:
    value: Any = {"page_size": 1, "kv": (2, 4, 9)}.get(name, "another")
    misfit = SOUND.misfit(attrs.evolve(SOUND, **{name: value}))
    assert misfit is not None
    assert f"{name} is {getattr(SOUND, name)!r} at the decode instance and {value!r} at" in misfit


def test_another_draft_fits() -> None:
    assert SOUND.misfit(attrs.evolve(SOUND, draft="EAGLE3")) is None


def test_an_identity_survives_its_way() -> None:
    fields = {**SOUND.as_fields(), "kv": list(SOUND.kv)}
    assert Identity.from_fields(fields) == SOUND


@pytest.mark.parametrize(
    "fields", [None, 3, [], {}, {"version": "9", "colour": "red"}, {**SOUND.as_fields(), "kv": 3}]
)
def test_what_is_no_identity_is_told(fields: Any) -> None:
    with pytest.raises(HandshakeError, match="expected"):
        Identity.from_fields(fields)


def test_a_fingerprint_sees_any_tensor() -> None:
    layer = torch.nn.Linear(300, 200)

    def fingerprint(**config: Any) -> str:
        return model_fingerprint(weights_fingerprint(layer), config)

    before = fingerprint(size=3, _name_or_path="a", dtype="float32")
    assert fingerprint(_name_or_path="b", size=3) == before
    assert fingerprint(size=4) != before
    layer.bias.data *= 2
    assert fingerprint(size=3) != before


def test_a_folder_s_fingerprint_sees_other_weights(tmp_path: Path) -> None:
    assert folder_fingerprint(None) == ""
    found = set()
    for seed in range(3):
        torch.manual_seed(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        save_file({"x": torch.randn(300, 300)}, folder / "model.safetensors")
        found.add(folder_fingerprint(folder))
        assert folder_fingerprint(folder) in found
    assert len(found) == 3


def test_a_prefill_instance_takes_no_requests() -> None:
    with LLM(
        dtype="float64",
        disaggregation="prefill",
        disaggregation_address="tcp://127.0.0.1:9",
    ) as llm:
        for ask in (llm.generate, llm.add_request):
            with pytest.raises(UsageError, match="takes its requests from decode instances"):
                ask([3, 4, 5], PARAMS)
        with pytest.raises(UsageError, match="takes its requests from decode instances"):
            next(llm.stream([[3, 4, 5]], PARAMS))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"disaggregation": "encode"}, "disaggregation='encode': expected prefill, decode, both"),
        ({"disaggregation_timeout": 0}, "disaggregation_timeout=0: expected seconds, above 0"),
        ({"disaggregation": "decode", "disaggregation_address": "here"}, "expected tcp://HOST"),
        ({"disaggregation": "prefill", "disaggregation_address": "a,b"}, "expected tcp://HOST"),
    ],
)
def test_a_setting_that_cannot_be_used_is_told(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        LLM(dtype="float64", **options)
