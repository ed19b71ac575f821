"""The corpus: the running Python's own standard library, split into training and held-out files.

`python corpus.py --out DATA` writes `train.jsonl` and `held_out.jsonl`, one JSON object
{"path": …, "text": …} a line, paths relative to the standard library's folder.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

HERE = Path(__file__).resolve().parent
NOT_SOURCE = {"site-packages", "dist-packages", "__pycache__"}
MIN_LETTERS = 0.3  # share of ASCII letters; below it a file is a table of codes, not a program
END_OF_TEXT = "<|endoftext|>"


class Document(NamedTuple):
    """One source file: its path relative to the standard library's folder, and its text."""

    path: str
    text: str


def held_out_modules() -> list[str]:
    """The dotted names of the modules that nothing is trained on."""
    return (HERE / "held_out.txt").read_text().split()


def is_held_out_source(path: str, modules: list[str]) -> bool:
    """Whether `path` is the source of one of the held-out `modules`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") in modules


def is_held_out_test(path: str, modules: list[str]) -> bool:
    """Whether `path` is a test of one of the held-out `modules` (`json.decoder`: of `json`)."""
    names = {f"test_{part}" for module in modules for part in (module, module.split(".")[0])}
    # html.parser: test_htmlparser
    names |= {f"test_{module.replace('.', '')}" for module in modules}
    names |= {"test_urlparse", "test_code_module", "test_zipfile64"}  # named otherwise
    parts = Path(path).with_suffix("").parts
    return any(part in names for part in parts)


def sources() -> Iterator[Document]:
    """Each different, decodable, parsable source file of the standard library, in path order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    seen: set[bytes] = set()
    for file in sorted(root.rglob("*.py")):
        relative = file.relative_to(root)
        if NOT_SOURCE & set(relative.parts):
            continue
        try:
            text = file.read_bytes().decode("utf-8").replace("\r\n", "\n")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                ast.parse(text)
        except (UnicodeDecodeError, SyntaxError, ValueError):
            continue
        digest = hashlib.sha256(text.encode()).digest()
        letters = sum(c.isascii() and c.isalpha() for c in text)
        if digest in seen or not text.strip() or letters < MIN_LETTERS * len(text):
            continue
        if END_OF_TEXT in text:
            continue
        seen.add(digest)
        yield Document(relative.as_posix(), text)


def split() -> tuple[list[Document], list[Document]]:
    """(training documents, held-out documents); the tests of held-out modules are in neither."""
    modules = held_out_modules()
    train, held_out = [], []
    for document in sources():
        if is_held_out_source(document.path, modules):
            held_out.append(document)
        elif not is_held_out_test(document.path, modules):
            train.append(document)
    return train, held_out


def write(documents: list[Document], file: Path) -> None:
    """One JSON object a line."""
    with file.open("w") as lines:
        for document in documents:
            lines.write(json.dumps(document._asdict()) + "\n")


def read(file: Path) -> list[Document]:
    """What `write` wrote."""
    with file.open() as lines:
        return [Document(**json.loads(line)) for line in lines]


def encode(
    documents: list[Document], tokenizer: Tokenizer, cut_every: int = 0, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(tokens [n] uint16, starts [documents + 1] int64): each document, then the end-of-text token.

    `cut_every` > 0 cuts each text at random places, that many characters apart on average, and
    encodes the pieces one by one. A prompt may end anywhere, so also between two characters that
    one token holds (a newline and the indentation after it); this is how the model learns to go
    on from there.
    """
    rng = random.Random(seed)
    end = tokenizer.token_to_id(END_OF_TEXT)
    tokens: list[int] = []
    starts = [0]
    for document in documents:
        pieces, at = [], 0
        while cut_every and at < len(document.text):
            size = 1 + int(rng.expovariate(1 / cut_every))
            pieces.append(document.text[at : at + size])
            at += size
        for encoding in tokenizer.encode_batch(pieces or [document.text]):
            tokens += encoding.ids
        tokens.append(end)
        starts.append(len(tokens))
    return np.array(tokens, dtype=np.uint16), np.array(starts, dtype=np.int64)


def main() -> None:
    """Writes the two files, and says how large they are."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the data")
    out: Path = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, documents in zip(("train", "held_out"), split(), strict=True):
        write(documents, out / f"{name}.jsonl")
        size = sum(len(d.text) for d in documents) / 1e6
        print(f"{name}: {len(documents)} files, {size:.2f} million characters")


if __name__ == "__main__":
    main()
