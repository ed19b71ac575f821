"""A small random target with the default model's tokenizer, and data for it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from drafted_tokens import save_llama

from specplug.algorithm import find_model

LINES = [
    {"text": "def mean(values):\n    total = 0\n    for value in values:\n        total += v\n"},
    {"prompt": "import os\nimport sys\n\n\nclass Reader:\n", "response": "    def read(self):\n"},
    {"text": "class Writer:\n    def write(self, text):\n        self.file.write(text)\n" * 4},
]


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of four layers with grouped heads and 4096 tokens."""
    folder = save_llama(tmp_path_factory.mktemp("target"), layers=4, vocab_size=4096)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(Path(find_model(None)) / name, folder)
    return folder


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A JSON Lines file of texts and prompts."""
    file = tmp_path_factory.mktemp("data") / "data.jsonl"
    file.write_text("\n".join(map(json.dumps, LINES)))
    return file
