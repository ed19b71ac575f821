"""A training from its data to a network that drafts; resumed, and by several processes."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from drafted_tokens import save_random
from safetensors.torch import load_file
from torch import Tensor

from specplug import LLM, CheckpointError, FeatureTrainer, PluginError, SamplingParams, UsageError
from specplug.algorithm import find_model
from specplug.training import session as session_module
from specplug.training.saved_state import read_tensors, write_tensors
from specplug.training.session import TrainingSession, learning_rate
from specplug.training.settings import TrainingSettings
from specplug.training.target import FrozenRuntime
from specplug_eagle3.trainer import Eagle3Trainer

STEPS = 6
RESUMED = ["EAGLE3", "PEAGLE", "STANDALONE", "DFLASH", "DSPARK"]
"""Of the trainers that draw nothing at random, EAGLE3's resumes as the others do."""


class Interrupted(Exception):
    """The training is interrupted."""


@attrs.define
class Recorded:
    """Keeps what it is told, and interrupts the training after a step."""

    interrupt_after: int = 10**9
    lines: list[str] = attrs.field(factory=list)

    def __call__(self, part: str, done: int, total: int, told: str = "") -> None:
        if part == "training" and done > self.interrupt_after:
            raise Interrupted

    def say(self, line: str) -> None:
        self.lines.append(line)


def settings(target: Path, data: Path, out: Path, **changes: Any) -> TrainingSettings:
    given = {
        "algorithm": "EAGLE3",
        "model": str(target),
        "data": (data,),
        "out": out,
        "steps": STEPS,
        "rows": 2,
        "length": 24,
        "regenerate": 0,
        "num_steps": 3,
        "device": "cpu",
        "save_every": 3,
        "precision": "float32",
        "options": {"draft_vocab_size": "64", "intermediate_size": "48"},
    }
    return TrainingSettings(**{**given, **changes})


def trained(told: TrainingSettings, *, resume: bool = False) -> dict[str, Tensor]:
    """The weights of a training's network, unrounded."""
    session = TrainingSession(told, Recorded(), resume=resume)
    session.train()
    session.export()
    state = session.trainer.network.state_dict()
    return {name: tensor.clone() for name, tensor in state.items()}


@pytest.mark.parametrize("algorithm", RESUMED)
def test_resumed_training_has_the_same_weights(
    algorithm: str, target: Path, data: Path, tmp_path: Path
) -> None:
    given = {"algorithm": algorithm, "options": {"intermediate_size": "48"}}
    whole = trained(settings(target, data, tmp_path / "whole", **given))
    cut = settings(target, data, tmp_path / "cut", **given)
    with pytest.raises(Interrupted):
        TrainingSession(cut, Recorded(interrupt_after=4)).train()
    moved = (tmp_path / "cut").rename(tmp_path / "moved")
    # All but the folder is as it was begun.
    resumed = trained(TrainingSettings(algorithm=algorithm, out=moved), resume=True)
    assert resumed.keys() == whole.keys()
    assert [name for name in whole if not torch.equal(whole[name], resumed[name])] == []


@pytest.mark.parametrize(
    "algorithm",
    ["EAGLE3", "EAGLE", "MULTI_LAYER_EAGLE", "PEAGLE", "STANDALONE", "DFLASH", "DSPARK"],
)
def test_trained_network_drafts(algorithm: str, target: Path, data: Path, tmp_path: Path) -> None:
    told = settings(target, data, tmp_path, algorithm=algorithm, regenerate=4, steps=18)
    told = attrs.evolve(told, options={"intermediate_size": "48"})
    session = TrainingSession(told, Recorded())
    session.train()
    session.export()
    assert session.history[-1]["step"] == 18
    assert session.history[-1]["loss"] < session.history[0]["loss"]
    assert len(session.history[-1]["top-1"]) == (1 if algorithm == "STANDALONE" else 3)
    assert (tmp_path / "curves.png").stat().st_size > 1000
    prompt, params = [5, 6, 7, 8], SamplingParams(max_tokens=12)
    with LLM(target) as plain:
        expected = plain.generate([prompt], params)[0].token_ids
    drafts = {"speculative_draft_model_path": tmp_path, "speculative_num_steps": 3}
    with LLM(target, speculative_algorithm=algorithm, **drafts) as llm:
        assert llm.generate([prompt], params)[0].token_ids == expected
    assert set(session.measure()) == {0.0, 1.0}


@pytest.mark.parametrize("part", ["tensors", "settings"])
def test_rows_of_another_version_are_refused(
    part: str, target: Path, data: Path, tmp_path: Path
) -> None:
    told = settings(target, data, tmp_path)
    TrainingSession(told, Recorded())
    file = tmp_path / "training" / "rows.safetensors"
    tensors, values = read_tensors(file)
    if part == "tensors":
        del tensors["learnt"]
    else:
        values["settings"]["gone"] = values["settings"].pop("start")
    write_tensors(file, tensors, values)
    with pytest.raises(CheckpointError, match=rf"rows\.safetensors: {part}: .*; expected .*anew"):
        TrainingSession(told, Recorded(), resume=True)


def test_steps_of_minutes_are_saved(target: Path, data: Path, tmp_path: Path) -> None:
    told = settings(target, data, tmp_path, steps=None, minutes=0.05)
    session = TrainingSession(told, Recorded())
    session.train()
    resumed = TrainingSession(told, Recorded(), resume=True)
    resumed.train()  # has no step left
    assert resumed.history == session.history
    assert session.history


def test_several_processes_train_as_one(target: Path, data: Path, tmp_path: Path) -> None:
    one = settings(target, data, tmp_path / "one")
    trained(one)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "specplug", "train", "EAGLE3", "--target", str(target)]
    command += ["--data", str(data), "--out", str(tmp_path / "two"), "--steps", str(STEPS)]
    command += ["--rows", "2", "--length", "24", "--regenerate", "0", "--num-steps", "3"]
    command += ["--device", "cpu", "--precision", "float32", "--set", "draft_vocab_size=64"]
    command += ["--set", "intermediate_size=48", "--no-measure"]
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    environment |= {"WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            command,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=120)[1] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], told
    states = [load_file(tmp_path / n / "training" / "state.safetensors") for n in ("one", "two")]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        # Muon makes its steps in bfloat16, from momenta that agree closely.
        muon = name.replace("network.", "optimizer.") + ".momentum_buffer" in states[0]
        near = 2e-2 if muon else 2e-4
        torch.testing.assert_close(states[1][name], tensor, atol=near, rtol=1e-3, msg=name)


def test_algorithm_without_a_trainer_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    told = settings(target, data, tmp_path, algorithm="NGRAM", options={})
    with pytest.raises(UsageError, match=r"^NGRAM cannot be trained here: it has no create_train"):
        TrainingSession(told, Recorded())


def test_unknown_option_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    told = settings(target, data, tmp_path, options={"draft_vocab": "64"})
    with pytest.raises(UsageError, match=r"--set draft_vocab: .*draft_vocab_size"):
        TrainingSession(told, Recorded())


def test_hidden_states_are_those_of_the_target(target: Path, data: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    session = TrainingSession(settings(target, data, tmp_path / "out"), Recorded())
    session.export_hidden_states(tmp_path / "states")
    stored = load_file(tmp_path / "states" / "hidden_states" / "hs_0.safetensors")
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    kept: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda module, args: kept.append(args[0][0]))
    with torch.no_grad():
        states = model(stored["token_ids"][None], output_hidden_states=True).hidden_states
    # The inputs of layers 2, 2 and 1 of four, and what the final norm reads.
    expected = torch.stack([states[2][0], states[2][0], states[1][0], kept[0]], dim=1)
    torch.testing.assert_close(stored["hidden_states"], expected, atol=1e-4, rtol=1e-4)


def test_rate_rises_and_falls() -> None:
    rates = [learning_rate(step, 100, 1.0, 10) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9]
    assert rates[-1] < 0.02


TEXT = {"text": "def mean(values):\n    total = 0\n    for value in values:\n        total += v\n"}
PROMPT = {"prompt": "import os\nimport sys\n\n\nclass Reader:\n"}


def lines(folder: Path, *rows: dict[str, str]) -> Path:
    """A file of data."""
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def test_prompts_alone_are_data(target: Path, tmp_path: Path) -> None:
    told = settings(target, lines(tmp_path, *[PROMPT] * 4), tmp_path / "out", regenerate=4)
    assert TrainingSession(told, Recorded()).trainer


@pytest.mark.parametrize(("text", "regenerate"), [("a = 1", 0), ("", 0), ("", 4)])
def test_data_without_a_row_is_refused(
    text: str, regenerate: int, target: Path, tmp_path: Path
) -> None:
    data = lines(tmp_path, {"text": text}, {"text": text})
    told = settings(target, data, tmp_path / "out", regenerate=regenerate)
    with pytest.raises(UsageError, match=r"rows\.jsonl: \d texts, but no row to train on; expecte"):
        TrainingSession(told, Recorded())


def test_data_whose_prompts_are_too_long_is_data(target: Path, tmp_path: Path) -> None:
    row = {"prompt": PROMPT["prompt"] * 4, "response": "    def read(self):\n        return 1\n"}
    told = settings(target, lines(tmp_path, *[row] * 4), tmp_path / "out", regenerate=4)
    assert TrainingSession(told, Recorded()).trainer


def test_length_below_the_shortest_row_is_refused(target: Path, data: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--length 4: expected at least 8"):
        TrainingSession(settings(target, data, tmp_path, length=4), Recorded())


@pytest.mark.parametrize(
    "row", [{"text": ""}, {"prompt": "", "response": "x"}, {"prompt": PROMPT["prompt"] * 30}]
)
def test_odd_texts_are_no_prompts_to_measure_on(
    row: dict[str, str], target: Path, tmp_path: Path
) -> None:
    told = settings(target, lines(tmp_path, row, TEXT), tmp_path / "out", steps=1)
    session = TrainingSession(told, Recorded())
    session.train()
    session.export()
    assert set(session.measure()) == {0.0, 1.0}


@pytest.mark.parametrize("regenerate", [0, 4])
def test_rows_are_no_longer_than_the_context(regenerate: int, target: Path, tmp_path: Path) -> None:
    row = {"text": TEXT["text"] * 20}
    told = settings(target, lines(tmp_path, row, row), tmp_path / "out", length=384)
    recorded = Recorded()
    # The first step of four goes on from a row's last position, to those after the context.
    session = TrainingSession(attrs.evolve(told, regenerate=regenerate, steps=4), recorded)
    session.train()
    assert recorded.lines[0] == "rows of at most 160 tokens, the target's context"


def test_files_that_are_left_out_are_told(target: Path, data: Path, tmp_path: Path) -> None:
    folder, recorded = tmp_path / "data", Recorded()
    folder.mkdir()
    (folder / "b.png").write_bytes(b"\x89PNG\xff")
    (folder / data.name).write_bytes(data.read_bytes())
    TrainingSession(settings(target, folder, tmp_path / "out"), recorded)
    told = f"not UTF-8, so left out of the data: 1 file(s) ({folder / 'b.png'})"
    assert recorded.lines[0] == told


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda network: [network.norm.weight], r"\(32,\)"),
        (lambda network: [torch.nn.Parameter(torch.zeros(3, 3))], r"\(3, 3\)"),
        (lambda network: ["fc.weight"], "'fc.weight'"),
    ],
)
def test_orthogonal_that_is_no_matrix_names_the_plugin(
    returned: Callable[[Any], list[Any]],
    shown: str,
    target: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FeatureTrainer, "orthogonal", lambda trainer: returned(trainer.network))
    told = rf"EAGLE3 .*: orthogonal\(\) of its trainer returned {shown}; expected parameters of its"
    with pytest.raises(PluginError, match=told):
        TrainingSession(settings(target, data, tmp_path), Recorded())


@pytest.mark.parametrize("method", ["loss", "export", "orthogonal"])
def test_trainer_that_raises_is_named(
    method: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> None:
        raise IndexError("out of range")

    monkeypatch.setattr(Eagle3Trainer, method, failing)
    told = rf"EAGLE3 .*: Eagle3Trainer\.{method}\(\) raised IndexError: out of range.*; expected it"
    with pytest.raises(PluginError, match=told):
        trained(settings(target, data, tmp_path))


@pytest.mark.parametrize("method", ["loss", "export"])
def test_trainer_that_returns_nothing_is_named(
    method: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eagle3Trainer, method, lambda *_: None)
    told = rf"Eagle3Trainer\.{method}\(\) returned None; expected a specplug\."
    with pytest.raises(PluginError, match=told):
        trained(settings(target, data, tmp_path))


def test_orthogonal_of_a_matrix_twice_steps_it_once(
    target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = trained(settings(target, data, tmp_path / "once"))
    inner = FeatureTrainer.orthogonal
    monkeypatch.setattr(FeatureTrainer, "orthogonal", lambda self: [*inner(self)] * 2)
    found = trained(settings(target, data, tmp_path / "twice"))
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


def odd_target(folder: Path, kind: str) -> Path:
    """A random target whose config has other names than Llama's, or whose scores are capped."""
    from transformers import Gemma2Config, GPT2Config

    ends = {"vocab_size": 4096, "bos_token_id": None, "eos_token_id": None}
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 8}
    configs: dict[str, Callable[[], Any]] = {
        "gpt2": lambda: GPT2Config(n_embd=32, n_layer=4, n_head=4, n_positions=160, **ends),
        "gemma2": lambda: Gemma2Config(
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=160,
            sliding_window=16, **sizes, **ends,
        ),
    }  # fmt: skip
    save_random(configs[kind](), folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(find_model(None)) / name, folder)
    return folder


@pytest.mark.parametrize("kind", ["gpt2", "gemma2"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "DFLASH", "STANDALONE"])
def test_odd_target_is_trained_for(kind: str, algorithm: str, data: Path, tmp_path: Path) -> None:
    target, options = odd_target(tmp_path / "target", kind), {"intermediate_size": "48"}
    told = settings(target, data, tmp_path / "out", algorithm=algorithm, options=options, steps=2)
    session = TrainingSession(told, Recorded())
    session.train()
    session.export()
    assert set(session.measure()) == {0.0, 1.0}


TRAINED = ["DFLASH", "DSPARK", "EAGLE", "EAGLE3", "MULTI_LAYER_EAGLE", "PEAGLE", "STANDALONE"]


@pytest.mark.parametrize("algorithm", TRAINED)
def test_goal_is_the_targets_own_distribution(
    algorithm: str, target: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No trainer takes its goal from the bare head, which some targets cap."""
    inner, asked = FrozenRuntime.target_logits, []

    def target_logits(self: FrozenRuntime, hidden: Tensor) -> Tensor:
        asked.append(hidden.shape)
        return inner(self, hidden)

    monkeypatch.setattr(FrozenRuntime, "target_logits", target_logits)
    options = {"intermediate_size": "48"}
    trained(settings(target, data, tmp_path, algorithm=algorithm, steps=1, options=options))
    assert asked


@pytest.fixture
def all_written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many texts each session would have the target write; it writes none."""
    asked: list[int] = []

    def choose(texts: Any, count: int, *_: Any) -> list[Any]:
        asked.append(count)
        return []

    monkeypatch.setattr(session_module, "choose_prompts", choose)
    monkeypatch.setattr(session_module, "regenerate", lambda *_: [])
    return asked


TEXT = {"text": "def mean(values):\n    return sum(values) / len(values)\n"}


def test_texts_are_not_written_anew_on_a_cpu(
    all_written: list[int], target: Path, tmp_path: Path
) -> None:
    told = settings(target, lines(tmp_path, *[TEXT] * 4), tmp_path / "out", regenerate=None)
    TrainingSession(told, Recorded()).close()
    assert all_written == []


def test_prompts_are_answered_on_a_cpu_too(
    all_written: list[int], target: Path, tmp_path: Path
) -> None:
    told = settings(target, lines(tmp_path, *[TEXT] * 4, PROMPT), tmp_path / "out", regenerate=None)
    TrainingSession(told, Recorded()).close()
    assert all_written == [512]


@pytest.mark.parametrize(("repeat", "expected"), [(0.0, 3), (0.5, 4)])
def test_texts_limit_the_rows(repeat: float, expected: int, target: Path, tmp_path: Path) -> None:
    """Those that repeat are some of them."""
    told = settings(target, lines(tmp_path, *[TEXT] * 12), tmp_path / "out", texts=3, repeat=repeat)
    session = TrainingSession(told, Recorded())
    assert len(session._rows) == expected
    session.close()
