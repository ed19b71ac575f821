"""The tokenizer: byte-level BPE with 4096 tokens, trained on the training files alone.

`python tokenizer.py --data DATA --out MODEL` writes `tokenizer.json` and `tokenizer_config.json`,
which `transformers.AutoTokenizer` loads, prints how many characters a token holds, and leaves
the encoded files in DATA: `{train,held_out}.npy`, tokens [n] uint16, and
`{train,held_out}_starts.npy`, each document's first index [documents + 1] int64.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from corpus import END_OF_TEXT, encode, read
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
MAX_LENGTH = 2048
CUT_EVERY = 400  # characters; see corpus.encode

# What a token may hold at most, first match wins: a name with the space or dot before it; up to
# three digits; a run of punctuation with the space before it; line ends with the next line's
# indentation; other white space.
PIECES = r"[ .]?[^\W\d]\w*| ?\d{1,3}| ?[^\s\w]+|\n[ \n]*|[ ]+(?=[ ])|\s+"


def train(texts: list[str]) -> Tokenizer:
    """A byte-level BPE tokenizer whose decoding gives back every text exactly."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Tokenizer, out: Path) -> None:
    """Writes the two files in the layout that `AutoTokenizer.from_pretrained` reads."""
    out.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(out / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_LENGTH,
        "bos_token": None,
        "eos_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
    }
    (out / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def main() -> None:
    """Trains, saves, checks the round trip on the held-out files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="what corpus.py wrote")
    parser.add_argument("--out", type=Path, required=True, help="the model's folder")
    arguments = parser.parse_args()
    tokenizer = train([d.text for d in read(arguments.data / "train.jsonl")])
    save(tokenizer, arguments.out)
    for name in ("train", "held_out"):
        characters = tokens = 0
        documents = read(arguments.data / f"{name}.jsonl")
        for document in documents:
            ids = tokenizer.encode(document.text).ids
            assert tokenizer.decode(ids, skip_special_tokens=False) == document.text, document.path
            characters += len(document.text)
            tokens += len(ids)
        print(f"{name}: {tokens} tokens, {characters / tokens:.3f} characters a token")
        encoded, starts = encode(documents, tokenizer, CUT_EVERY if name == "train" else 0)
        np.save(arguments.data / f"{name}.npy", encoded)
        np.save(arguments.data / f"{name}_starts.npy", starts)


if __name__ == "__main__":
    main()
