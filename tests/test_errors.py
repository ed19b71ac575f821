"""What errors and warnings quote of others cannot harm a terminal or a log."""

from __future__ import annotations

import json
import logging
import pickle
from pathlib import Path

import pytest

from specplug import LLM, CheckpointError, PluginError, SpecplugError, UsageError
from specplug.contract import PluginWarning
from specplug.disagg.wire_message import WireError
from specplug.errors import FallbackWarning, InstanceError, RankError, UnknownAlgorithm
from specplug.serve.api_errors import APIError

CONTROLS = "\x1b[31m\x07\x7f\x9b0m\u202e\u2066\u2028\ud800\x00\r\b"
"""ESC, BEL, DEL, C1, overrides of direction, a line separator, a lone surrogate, NUL, CR, BS."""

KINDS = (
    *(SpecplugError, UsageError, PluginError, CheckpointError, InstanceError, RankError),
    *(UnknownAlgorithm, WireError, FallbackWarning, PluginWarning),
)


@pytest.mark.parametrize("kind", KINDS)
def test_error_with_control_characters_is_printable(kind: type[Exception]) -> None:
    error = kind(f"model {CONTROLS}: found a\nfeigned line")
    assert str(error).isprintable()
    assert str(error).startswith(r"model \x1b[31m\x07\x7f\x9b0m\u202e\u2066")
    assert str(error).endswith("found a feigned line")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_error_in_any_script_is_told_as_it_is() -> None:
    told = "modèle 'λ–模型' «\u200d»; expected 3 µs"
    assert str(UsageError(told)) == told


def test_api_error_with_control_characters_is_printable() -> None:
    body = json.loads(APIError(400, f"a{CONTROLS}", param=f"b{CONTROLS}").body())["error"]
    assert body["message"].isprintable()
    assert body["param"].isprintable()


@pytest.mark.parametrize(
    "wrong",
    [
        {"quantization_config": {"quant_method": f"x{CONTROLS}"}},
        {"model_type": f"x{CONTROLS}"},
        {"architectures": [f"x{CONTROLS}"]},
        {"torch_dtype": f"x{CONTROLS}", "dtype": f"x{CONTROLS}"},
        {"hidden_act": f"x{CONTROLS}"},
        {"rope_scaling": {"rope_type": f"x{CONTROLS}", "factor": 2.0}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_model_folder_with_control_characters_is_told(
    wrong: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # transformers logs what it finds, and a worker of xdist cannot hand over a surrogate.
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)
    folder = tmp_path / "model\x1b[31m\u202e"
    folder.mkdir()
    config = {
        **{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 96},
        **{"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1},
        **{"num_attention_heads": 2},
    }
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(SpecplugError) as caught:
        LLM(folder)
    assert str(caught.value).isprintable(), str(caught.value)
