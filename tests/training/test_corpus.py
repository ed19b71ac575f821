"""The data of a training, and what is learnt of it."""

from __future__ import annotations

import json
import sysconfig
from pathlib import Path
from typing import Any

import pytest

from specplug import UsageError
from specplug.algorithm import find_model
from specplug.training.corpus import Text, read_texts, standard_library

TEMPLATE = Path(__file__).parents[1] / "serve" / "chat.jinja"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(find_model(None))
    tokenizer.chat_template = TEMPLATE.read_text()
    return tokenizer


def read(tmp_path: Path, tokenizer: Any, row: Any) -> Text:
    file = tmp_path / "data.jsonl"
    file.write_text(json.dumps(row) if not isinstance(row, str) else row)
    (text,) = read_texts([file], tokenizer)
    return text


def learnt(text: Text, tokenizer: Any) -> str:
    """The part of a text that is learnt."""
    pairs = zip(text.token_ids, text.learnt, strict=True)
    return str(tokenizer.decode([token for token, counts in pairs if counts]))


def test_all_of_a_text_is_learnt(tmp_path: Path, tokenizer: Any) -> None:
    text = read(tmp_path, tokenizer, {"text": "import os\n"})
    assert learnt(text, tokenizer) == "import os\n"
    assert text.cuts is None


def test_response_alone_is_learnt_of_a_prompt(tmp_path: Path, tokenizer: Any) -> None:
    text = read(tmp_path, tokenizer, {"prompt": "import os\n", "response": "x = os.getcwd()\n"})
    assert learnt(text, tokenizer) == "x = os.getcwd()\n"
    assert text.cuts is not None
    assert tokenizer.decode(text.token_ids[: text.cuts[0]]) == "import os\n"


def test_assistants_turns_alone_are_learnt_of_a_chat(tmp_path: Path, tokenizer: Any) -> None:
    turns = [("user", "add"), ("assistant", "a + b"), ("user", "and c"), ("assistant", "b + c")]
    messages = [{"role": role, "content": content} for role, content in turns]
    text = read(tmp_path, tokenizer, {"messages": messages})
    assert [line.strip() for line in learnt(text, tokenizer).splitlines()] == ["a + b", "b + c"]
    assert text.cuts is not None
    prompts = [tokenizer.decode(text.token_ids[:cut]) for cut in text.cuts]
    assert prompts[0].startswith("# user: add")
    assert "a + b" in prompts[1]
    assert "b + c" not in prompts[1]


def test_plain_file_is_one_text(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.py").write_text("import re\n")
    (tmp_path / "b.py").write_text("import sys\n")
    texts = read_texts([tmp_path], tokenizer)
    assert [learnt(text, tokenizer) for text in texts] == ["import re\n", "import sys\n"]


def test_folders_files_that_are_no_text_are_left_out(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "a.py").write_text("import re\n")
    picture = tmp_path / "b.png"
    picture.write_bytes(b"\x89PNG\xff")
    left_out: list[Path] = []
    texts = read_texts([tmp_path], tokenizer, left_out.append)
    assert [learnt(text, tokenizer) for text in texts] == ["import re\n"]
    assert left_out == [picture]
    # One that is named was meant.
    with pytest.raises(UsageError, match=r"b\.png' is not UTF-8 \(byte 0\); expected UTF-8 text"):
        read_texts([picture], tokenizer)


@pytest.mark.parametrize("line", ["{", '{"words": "a"}', '{"text": 3}', '{"messages": [{}]}'])
def test_bad_line_is_told_with_its_number(tmp_path: Path, tokenizer: Any, line: str) -> None:
    with pytest.raises(UsageError, match=r"data\.jsonl', line 2: .*expected"):
        read(tmp_path, tokenizer, f'{{"text": "a"}}\n{line}')


def test_data_without_a_text_is_refused(tmp_path: Path, tokenizer: Any) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    with pytest.raises(UsageError, match="no text in it"):
        read_texts([tmp_path / "empty.txt"], tokenizer)


def test_standard_library_is_less_the_held_out_modules() -> None:
    root = Path(sysconfig.get_path("stdlib"))
    named = {file.relative_to(root).as_posix() for file in standard_library()}
    assert {"ast.py", "json/__init__.py", "html/entities.py"} <= named
    assert named.isdisjoint({"json/decoder.py", "html/parser.py", "csv.py"})
    assert not any("site-packages" in name or name.startswith("test/") for name in named)
