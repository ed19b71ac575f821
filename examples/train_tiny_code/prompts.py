"""Held-out prompts: the beginnings of functions and classes of modules that nothing was trained on.

`python prompts.py --data DATA --model MODEL --out FILE` writes one JSON object
{"module": …, "prompt": …} a line, the same ones each time.
"""

from __future__ import annotations

import argparse
import ast
import json
import random
from collections.abc import Iterator
from pathlib import Path

from corpus import Document, read
from tokenizers import Tokenizer

SHORTEST, LONGEST = 40, 160  # tokens
MIN_LINES = 6  # of the function or class that a prompt ends in


def definitions(text: str) -> list[tuple[int, int]]:
    """(first line, last line), from 0, of each function and class of at least MIN_LINES lines."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)]
    spans = [(node.lineno - 1, (node.end_lineno or node.lineno) - 1) for node in found]
    return sorted((first, last) for first, last in spans if last - first + 1 >= MIN_LINES)


def prompts(document: Document, tokenizer: Tokenizer, rng: random.Random) -> Iterator[str]:
    """Endlessly: text that starts with a line and ends at a token inside a function or class."""
    text = document.text
    spans = definitions(text)
    lines = [0] + [i + 1 for i, character in enumerate(text) if character == "\n"]
    ends = [end for _, end in tokenizer.encode(text).offsets]
    while True:
        first, last = rng.choice(spans)
        inside = [end for end in ends if lines[first + 1] < end < lines[last]]
        cut = rng.choice(inside)
        size = rng.randint(SHORTEST, LONGEST)
        starts = [start for start in lines if start < cut]
        for start in reversed(starts):
            prompt = text[start:cut].lstrip()
            tokens = len(tokenizer.encode(prompt).ids)
            if tokens >= size or start == starts[0]:
                break
        if SHORTEST <= tokens <= LONGEST:
            yield prompt


def main() -> None:
    """The modules take turns until there are enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--model", type=Path, required=True, help="the tokenizer's folder")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=256)
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(arguments.model / "tokenizer.json"))
    documents = [d for d in read(arguments.data / "held_out.jsonl") if definitions(d.text)]
    sources = [prompts(d, tokenizer, random.Random(d.path)) for d in documents]
    written: dict[str, str] = {}
    while len(written) < arguments.count:
        for document, source in zip(documents, sources, strict=True):
            if len(written) < arguments.count:
                written.setdefault(next(source), document.path)
    with arguments.out.open("w") as lines:
        for prompt, path in written.items():
            module = path.removesuffix(".py").replace("/", ".")
            lines.write(json.dumps({"module": module, "prompt": prompt}) + "\n")
    print(f"{len(written)} prompts from {len(documents)} modules")


if __name__ == "__main__":
    main()
