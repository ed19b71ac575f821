"""A model's folder is data: no code in it runs, nothing asks for it, nothing is unpickled."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import specplug
from specplug import LLM, CheckpointError, FallbackWarning, UsageError
from specplug.algorithm import ASSETS
from specplug.cli import main

CODE = """
from pathlib import Path

Path(__file__).with_name("ran").touch()
Path("{marker}").touch()
from transformers import LlamaConfig as Config
from transformers import LlamaForCausalLM as Model
from transformers import PreTrainedTokenizerFast as Tokenizer
"""

Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Folder:
    """Write a copy of the default model that brings code; running that leaves a file ``ran``."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr("specplug.debug.DEBUG", False)

    def write(**files: dict[str, Any]) -> Path:
        path = tmp_path / "model"
        shutil.copytree(ASSETS / "tiny_code", path)
        (path / "foreign.py").write_text(CODE.format(marker=tmp_path / "ran"))
        for name, changes in files.items():
            file = path / f"{name}.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
        return path

    return write


def answered(model: Path) -> Result:
    """Run the command with "yes" as the answer to every question."""
    done = CliRunner().invoke(
        main, ["generate", "--max-new-tokens", "1", "--model", str(model), "x"], input="y\n" * 9
    )
    assert not (model.parent / "ran").exists()
    assert "trust_remote_code" not in done.output
    return done


def test_config_that_is_code_is_refused(folder: Folder) -> None:
    model = folder(config={"model_type": "foreign", "auto_map": {"AutoConfig": "foreign.Config"}})
    done = answered(model)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == (
        f"error: model '{model}': its config is code in its repository, which specplug never runs; "
        "expected an architecture that transformers has: choose another model\n"
    )


def test_model_that_is_code_is_refused(folder: Folder) -> None:
    config = {"model_type": "clip", "auto_map": {"AutoModelForCausalLM": "foreign.Model"}}
    model = folder(config=config)
    done = answered(model)
    assert (done.exit_code, done.stdout) == (1, "")
    assert "is code in its repository, which specplug never runs" in done.stderr


def test_tokenizer_that_is_code_is_left_out(folder: Folder) -> None:
    named = {"tokenizer_class": "Foreign", "auto_map": {"AutoTokenizer": ["foreign.Tokenizer"] * 2}}
    model = folder(tokenizer_config=named)
    done = answered(model)
    assert done.exit_code == 2
    assert "its tokenizer is code in its repository, which specplug never runs" in done.stderr
    assert "the model has no tokenizer: give the prompt as token ids" in done.stderr
    with pytest.warns(FallbackWarning, match="its tokenizer is code"), LLM(model) as llm:
        assert llm.tokenizer is None
    with pytest.raises(CheckpointError, match=r"^tokenizer '.*' is code in its repository"):
        LLM(tokenizer=model)


def test_code_beside_a_known_model_is_ignored(folder: Folder) -> None:
    auto_map = {"AutoConfig": "foreign.Config", "AutoModelForCausalLM": "foreign.Model"}
    done = answered(folder(config={"auto_map": auto_map}))
    assert (done.exit_code, bool(done.stdout)) == (0, True), done.stderr


class Evil:
    """Unpickled, it leaves a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("role", ["target", "draft"])
def test_pickled_code_is_refused(
    role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    source = ASSETS / "tiny_code"
    if role == "draft":
        import specplug_eagle

        source = specplug_eagle.algorithm.describe().weights["tiny-code"]
    model = tmp_path / "model"
    shutil.copytree(source, model)
    (model / "model.safetensors").unlink()
    torch.save({"x": Evil(tmp_path / "ran")}, model / "pytorch_model.bin")
    settings: dict[str, Any] = {"model": model}
    if role == "draft":
        settings = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": model}
    with pytest.raises((CheckpointError, UsageError), match="cannot be "):
        LLM(**settings)
    assert not (tmp_path / "ran").exists()


def test_all_that_loads_says_data_only() -> None:
    root = Path(specplug.__file__).parent.parent
    sources = [*root.glob("specplug/**/*.py"), *root.glob("plugins/*/specplug_*/**/*.py")]
    calls = [
        call
        for source in sources
        for call in re.findall(
            r"(?:from_pretrained|torch\.load)\((?:[^()]|\([^()]*\))*\)", source.read_text()
        )
    ]
    assert len(calls) >= 4
    for call in calls:
        assert "weights_only=True" in call if "torch.load" in call else "**DATA_ONLY" in call, call
