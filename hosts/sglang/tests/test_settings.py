"""Settings that are filled in, and those that are refused before anything starts, in one line."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path

import attrs
import pytest
from engines import MODEL, ON_CPU, environment, running

from specplug import PluginError, SpecConfig, SpecplugError
from specplug_sglang.settings import SglangSettings


def settings_of(algorithm, **settings):
    """Return SGLang's settings as it would use them."""
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    load_plugins()
    given = {**ON_CPU, "speculative_algorithm": f"SPECPLUG_{algorithm}", **settings}
    args = ServerArgs(**given)
    args.resolve_once()
    return resolving_view(args)


def test_algorithms_own_defaults_are_filled_in():
    found = settings_of("EAGLE3")
    assert (found.speculative_num_steps, found.speculative_num_draft_tokens) == (5, 6)
    assert (found.speculative_eagle_topk, found.max_running_requests) == (1, 48)
    tree = settings_of("EAGLE3", speculative_eagle_topk=4, max_running_requests=3)
    assert (tree.speculative_eagle_topk, tree.max_running_requests) == (4, 3)


def test_adjusted_setting_is_logged(caplog):
    with caplog.at_level(logging.WARNING):  # an engine of an earlier test has made it ERROR
        found = settings_of("MULTI_LAYER_EAGLE", speculative_num_steps=9)
    assert found.speculative_num_steps == 6
    assert "SPECPLUG_MULTI_LAYER_EAGLE: num_steps 9 -> 6: the draft model has one" in caplog.text


def test_worker_reads_the_settings_that_sglang_has_filled_in(tmp_path):
    log = tmp_path / "log"
    with (
        environment(LOG_FILE=str(log)),
        running("MULTI_LAYER_EAGLE", speculative_num_steps=9) as made,
    ):
        assert made.seen("run") == [[48, 1, 4096, True, 7]]
    assert "num_steps 9 -> 6" not in log.read_text()  # it is told where the settings are made


@pytest.mark.parametrize("changed", ["num_steps", "topk", "num_draft_tokens"])
def test_settled_configuration_that_changes_again_is_refused(changed):
    settings = SglangSettings(
        speculative_num_steps=3, speculative_eagle_topk=2, speculative_num_draft_tokens=7
    )
    config = SpecConfig(algorithm="GROWS", num_steps=3, topk=2, num_draft_tokens=7)
    settings.check_settled(config)
    grown = attrs.evolve(config, **{changed: getattr(config, changed) + 1})
    with pytest.raises(
        PluginError, match=rf"GROWS: validate_config\(\) changes {changed} \d to \d"
    ):
        settings.check_settled(grown)


def test_mixed_chunks_are_turned_off():
    assert not settings_of("NGRAM", enable_mixed_chunk=True).enable_mixed_chunk


@pytest.mark.parametrize(
    ("algorithm", "settings", "told"),
    [
        ("EAGLE3", {"tp_size": 2}, "EAGLE3: tp_size=2: expected 1, drafts are made on one rank"),
        ("NGRAM", {"pp_size": 2}, "NGRAM: pp_size=2: expected 1, drafts are made on one rank"),
        (
            "NGRAM",
            {"attention_backend": "fa3"},
            "NGRAM: attention_backend='fa3': expected 'triton', or 'torch_native' on a CPU: these "
            "can verify drafts; start SGLang with --attention-backend triton",
        ),
        (
            "EAGLE",
            {"enable_return_hidden_states": True},
            "EAGLE: enable_return_hidden_states=True: expected False, the hidden states of a pass "
            "are the algorithm's",
        ),
        (
            "SYNC",
            {},
            "SYNC needs the result of a step before the next one; start SGLang with",
        ),
        (
            "SYNC",
            {"disable_overlap_schedule": True},
            "SYNC cannot begin in the middle of a prompt; start SGLang with --disable-radix-cache",
        ),
        ("SPARSE_SELF", {}, "SPARSE_SELF drafts with the target's own layers, and SGLang"),
        ("EAGLE3", {"speculative_num_steps": 0}, "num_steps"),
    ],
)
def test_setting_that_cannot_be_given_is_refused(algorithm, settings, told):
    with pytest.raises(SpecplugError) as raised:
        settings_of(algorithm, **settings)
    assert told in str(raised.value)
    assert "\n" not in str(raised.value)


def test_unknown_time_to_draft_is_refused():
    told = "SPECPLUG_DRAFT_WHEN='never': expected 'faster' or 'always'"
    with environment(SPECPLUG_DRAFT_WHEN="never"), pytest.raises(SpecplugError, match=told):
        settings_of("NGRAM")


def test_draft_weights_that_are_not_shipped_are_asked_for(tmp_path):
    for file in MODEL.iterdir():
        (tmp_path / file.name).symlink_to(file)
    with pytest.raises(SpecplugError, match="EAGLE3 needs draft weights for this target"):
        settings_of("EAGLE3", model_path=str(tmp_path))


def shipped_weights(algorithm):
    package = importlib.import_module(f"specplug_{algorithm.lower()}")
    return Path(package.__file__).parent / "weights" / "tiny_code"


@pytest.mark.parametrize(
    "algorithm", ["EAGLE3", "EAGLE", "MULTI_LAYER_EAGLE", "DFLASH", "STANDALONE"]
)
def test_typed_folder_of_draft_weights_is_taken(algorithm):
    folder = str(shipped_weights(algorithm))
    found = settings_of(algorithm, speculative_draft_model_path=folder)
    assert found.speculative_draft_model_path == folder


@pytest.mark.parametrize("algorithm", ["DSPARK", "PEAGLE"])
def test_typed_folder_needs_a_model_type_of_transformers(algorithm, tmp_path, prompts, plain):
    """SGLang has transformers read the draft's configuration, whatever the algorithm."""
    shipped = shipped_weights(algorithm)
    with pytest.raises(ValueError, match="model_type"):
        settings_of(algorithm, speculative_draft_model_path=str(shipped))
    for file in shipped.iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((shipped / "config.json").read_text())
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with running(algorithm, speculative_draft_model_path=str(tmp_path)) as engine:
        made = engine.generate(prompts)
    assert made.tokens == plain
    assert made.steps < 240


def test_algorithm_without_overlap_runs_without_overlap(prompts, plain):
    settings = {"disable_overlap_schedule": True, "disable_radix_cache": True}
    with running("SYNC", **settings) as engine:
        assert engine.generate(prompts).tokens == plain
