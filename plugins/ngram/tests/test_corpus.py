"""A corpus is read whole, and a file that is none is refused by its name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from specplug import LLM, SamplingParams, UsageError
from specplug.startup import startup_reported
from specplug_ngram import corpus
from specplug_ngram.corpus import read_corpus


class Characters:
    """A tokenizer of code points."""

    def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
        assert options["add_special_tokens"] is False
        return {"input_ids": [ord(character) for character in text]}


def _texts(*files: Path) -> Iterator[str]:
    for tokens in read_corpus([str(file) for file in files], Characters()):
        yield "".join(map(chr, tokens))


def test_texts_of_all_forms_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus, "_PART", 4)
    plain, lines, empty = (tmp_path / name for name in ("a.txt", "b.JSONL", "c.txt"))
    plain.write_text("\ufeffone\ntwo é\n\nthree", encoding="utf-8")
    lines.write_text(
        '"four"\n\n{"text": "five", "id": 3}\r\n{"prompt": "si", "completion": "x\u2028"}\n""\n',
        encoding="utf-8",
    )
    empty.write_text("")
    found = list(_texts(plain, lines, empty))
    assert found == ["one\ntwo é\n\nthree", "four", "five", "six\u2028"]


@pytest.mark.parametrize(
    "line", ["{", "3", "{}", '{"text": 3}', '["a"]', '"\\ud800"', "[" * 99_999]
)
def test_line_without_a_text_is_named(line: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text(f'"good"\n{line}\n')
    with pytest.raises(UsageError, match=r"ngram_corpus '.*a.jsonl', line 2: expected a JSON"):
        list(_texts(file))


def test_file_that_cannot_be_read_is_named_at_once(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    for path, why in (
        (latin, r"latin.txt' is not UTF-8 \(byte 3\)"),
        (tmp_path, "cannot be read: Is a directory"),
        (tmp_path / "gone", "gone' cannot be read: No such file"),
    ):
        with pytest.raises(UsageError, match=why):
            LLM(speculative_algorithm="NGRAM", speculative_settings={"ngram_corpus": path})


@pytest.mark.parametrize("value", [3, [3], [""], ["a", None]])
def test_corpus_that_is_no_path_is_refused(value: object) -> None:
    with pytest.raises(UsageError, match=r"ngram_corpus=.*expected the path of a file"):
        LLM(speculative_algorithm="NGRAM", speculative_settings={"ngram_corpus": value})


def test_model_without_a_tokenizer_has_no_corpus(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="ngram_corpus='a' needs a tokenizer"):
        list(read_corpus(["a"], None))


def test_corpus_is_accepted_from_and_its_bar_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus, "_PART", 30)
    prompt = "def mean(values):\n    return sum(values)"
    reports: list[tuple[str, int, int]] = []
    lengths = []
    with LLM() as plain:
        expected = plain.generate(prompt, SamplingParams(max_tokens=40))[0]
    file = tmp_path / "corpus.txt"
    file.write_text(f"{prompt}{expected.text}")
    for own in ({}, {"ngram_corpus": file}):
        with startup_reported(lambda *report: reports.append(report)):
            llm = LLM(speculative_algorithm="NGRAM", speculative_settings=own)
        with llm:
            output = llm.generate(prompt, SamplingParams(max_tokens=40))[0]
        assert output.token_ids == expected.token_ids
        lengths.append(len(output.accept_lens))
    assert lengths[1] < lengths[0], lengths
    moved = [(done, total) for part, done, total in reports if part == "loading the draft"]
    assert len(moved) > 2
    assert moved[-1][0] == moved[-1][1] == len(file.read_text())
