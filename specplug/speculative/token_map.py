"""``TokenMap``: which tokens of a draft model's vocabulary are which of the target's.

Timor et al., "Accelerating LLM Inference with Lossless Speculative Decoding Algorithms for
Heterogeneous Vocabularies" (arXiv 2502.05202), call it token-level intersection (TLI): a draft of
another vocabulary chooses among the tokens that both know.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import torch
from torch import Tensor

from specplug.algorithm import DATA_ONLY
from specplug.errors import CheckpointError

if TYPE_CHECKING:
    from specplug.speculative.runtime import Runtime

_MOST_PIECES = 4
_SHARE_WHOLE = 0.95
"""M is the least number of pieces, up to the most, that so many of the tokens which the draft lacks
have no more of. Each takes a place in every slot of the draft's cache, and a row in its passes."""

_ROLES = ("bos_token_id", "eos_token_id")
"""Special tokens that mean the same whatever they are called."""


@attrs.frozen(eq=False)
class TokenMap:
    """A map of tokens between the target's vocabulary and a draft model's.

    A token of the one is that token of the other which stands for the same bytes. A token of the
    target that the draft lacks is read as the pieces that its tokenizer makes of it, or where texts
    are to keep their lengths (``reads``) as the last of these.

    Attributes:
        target_ids: [V_shared] int64, the tokens that both know, in the target's ids, ascending.
        draft_ids: [V_shared] int64, the same tokens in the draft's ids.
        pieces: [V, M] int64, for each token of the target those of the draft that are read in its
            place, then zeros: the same one where the draft knows it, else those that its tokenizer
            makes of the text. Of more than M the last.
        num_pieces: [V] int64, how many these are, at least 1.
        draft_vocab_size: of the draft model.
    """

    target_ids: Tensor
    draft_ids: Tensor
    pieces: Tensor
    num_pieces: Tensor
    draft_vocab_size: int

    @classmethod
    def between(
        cls, target: Any, draft: Any, *, vocab_size: int, draft_vocab_size: int, name: str
    ) -> TokenMap:
        """Map the tokens of two tokenizers of transformers, on the CPU.

        Without one of the tokenizers equal ids are taken to be equal tokens, if the vocabularies
        are of one size.

        Args:
            target, draft: tokenizers; None where a model has none.
            vocab_size, draft_vocab_size: of the models, whose logits may be wider than their
                tokenizers know tokens.
            name: of the draft model, for messages.

        Raises:
            CheckpointError: no token is in both vocabularies; or a tokenizer is missing, and the
                vocabularies differ in size.
        """
        if target is None or draft is None:
            if vocab_size != draft_vocab_size:
                lacking = "the target" if target is None else "it"
                raise CheckpointError(
                    f"draft model {name}: a vocabulary of {draft_vocab_size}, the target's is "
                    f"{vocab_size}, and {lacking} has no tokenizer to map the one to the other by; "
                    "expected tokenizers of both, or vocabularies of one size"
                )
            return cls.identity(vocab_size)
        known, own = _tokens_of(target, vocab_size), _tokens_of(draft, draft_vocab_size)
        if known == own and vocab_size == draft_vocab_size:
            return cls.identity(vocab_size)
        pairs = sorted((known[token], own[token]) for token in known.keys() & own.keys())
        pairs = _with_roles(pairs, target, draft)
        if not pairs:
            raise CheckpointError(
                f"draft model {name}: none of its {len(own)} tokens is one of the target's "
                f"{len(known)} ({_example(own)} beside {_example(known)}); expected a draft model "
                "whose vocabulary shares tokens with the target's: choose another one"
            )
        target_ids, draft_ids = torch.tensor(pairs).unbind(1)
        unknown = {id_: token for token, id_ in known.items() if token not in own}
        pieces = {id_: [draft_id] for id_, draft_id in pairs}
        for id_, found in zip(unknown, _pieces_of(draft, list(unknown.values())), strict=True):
            pieces.setdefault(id_, found)
        padded, counts = _padded(pieces, vocab_size)
        return cls(
            target_ids.contiguous(), draft_ids.contiguous(), padded, counts, draft_vocab_size
        )

    @classmethod
    def of_draft(cls, runtime: Runtime, path: str | Path, draft_vocab_size: int) -> TokenMap:
        """Map the tokens of a run's target and of a draft model, on the run's device.

        Args:
            runtime: the run's.
            path: the draft model's folder or hub id, where its tokenizer is.
            draft_vocab_size: of its logits.

        Raises:
            CheckpointError: as in ``between``.
        """
        return cls.between(
            runtime.tokenizer,
            find_tokenizer(str(path)),
            vocab_size=runtime.vocab_size,
            draft_vocab_size=draft_vocab_size,
            name=str(path),
        ).to(runtime.device)

    @classmethod
    def identity(cls, vocab_size: int) -> TokenMap:
        """Map each token to itself."""
        order = torch.arange(vocab_size)
        ones = torch.ones_like(order)
        return cls(order, order, order.unsqueeze(1), ones, vocab_size)

    @property
    def vocab_size(self) -> int:
        """V, of the target."""
        return len(self.pieces)

    @property
    def reads(self) -> Tensor:
        """[V] int64, for each token of the target the one token of the draft that is read in its
        place where texts are to keep their lengths: the last piece."""
        return self.pieces.gather(1, self.num_pieces.unsqueeze(1) - 1).squeeze(1)

    @property
    def most_pieces(self) -> int:
        """M, the most tokens of the draft that are read in the place of one of the target's."""
        return self.pieces.shape[1]

    @property
    def is_identity(self) -> bool:
        """Whether each token of the one is the token of the other with the same id."""
        sizes = {self.vocab_size, self.draft_vocab_size, len(self.target_ids)}
        return len(sizes) == 1 and torch.equal(self.target_ids, self.draft_ids)

    @property
    def kind(self) -> str:
        """ "identical ids", "a permutation" or "an intersection of N tokens", for people."""
        if self.is_identity:
            return "identical ids"
        if len(self.target_ids) == self.vocab_size == self.draft_vocab_size:
            return "a permutation"
        return f"an intersection of {len(self.target_ids)} tokens"

    def to(self, device: torch.device) -> TokenMap:
        """Return the map with its tensors on a device."""
        return attrs.evolve(
            self,
            target_ids=self.target_ids.to(device),
            draft_ids=self.draft_ids.to(device),
            pieces=self.pieces.to(device),
            num_pieces=self.num_pieces.to(device),
        )

    def shared(self, logits: Tensor) -> Tensor:
        """Take the draft's logits of the tokens that both know, in the order of ``target_ids``:
        [R, V_draft] -> [R, V_shared]. The others are masked: no draft can have them."""
        return logits.index_select(1, self.draft_ids)


def find_tokenizer(path: str) -> Any:
    """Load the tokenizer of a folder or hub id, without running any code of it; None if there is
    none that can be loaded so."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path, **DATA_ONLY)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _tokens_of(tokenizer: Any, vocab_size: int) -> dict[tuple[bool, bytes], int]:
    """Return a tokenizer's ids below ``vocab_size``, by whether a token is special and its bytes;
    of several ids of one token that which is no single byte of a fallback, then the lowest."""
    special = set(tokenizer.all_special_ids)
    spelling = _spelling(tokenizer)
    found: dict[tuple[bool, bytes], int] = {}
    named = sorted(tokenizer.get_vocab().items(), key=lambda item: (_is_byte(item[0]), item[1]))
    for text, id_ in named:
        if id_ < vocab_size:
            is_special = id_ in special
            token = text.encode() if is_special else _bytes_of(text, spelling)
            found.setdefault((is_special, token), id_)
    return found


def _with_roles(pairs: list[tuple[int, int]], target: Any, draft: Any) -> list[tuple[int, int]]:
    """Add the special tokens of one role and two names to ``pairs`` (target id, draft id)."""
    mapped, taken = dict(pairs), {draft_id for _, draft_id in pairs}
    for role in _ROLES:
        known, own = getattr(target, role, None), getattr(draft, role, None)
        if known is None or own is None or known in mapped or own in taken:
            continue
        mapped[known] = own
        taken.add(own)
    return sorted(mapped.items())


def _padded(pieces: Mapping[int, list[int]], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Return the pieces of each token [V, M] and their numbers [V]. A token without any is read as
    token 0."""
    lengths = sorted(len(each) for each in pieces.values() if len(each) > 1)
    whole = lengths[int(_SHARE_WHOLE * (len(lengths) - 1))] if lengths else 1
    most = min(_MOST_PIECES, whole)
    kept = [pieces.get(id_, [0])[-most:] for id_ in range(vocab_size)]
    padded = torch.tensor([each + [0] * (most - len(each)) for each in kept])
    return padded, torch.tensor([len(each) for each in kept])


def _pieces_of(tokenizer: Any, tokens: Sequence[tuple[bool, bytes]]) -> list[list[int]]:
    """Return the tokens that a tokenizer makes of each token's text; where it makes none its
    unknown token, or token 0."""
    if not tokens:
        return []
    texts = [token.decode(errors="replace") for _, token in tokens]
    try:
        made = tokenizer(texts, add_special_tokens=False)["input_ids"]
    except Exception:  # some of them have no piece
        made = [_pieces(tokenizer, text) for text in texts]
    nothing = getattr(tokenizer, "unk_token_id", None) or 0
    return [ids or [nothing] for ids in made]


def _pieces(tokenizer: Any, text: str) -> list[int]:
    """Return the tokens of a text, none where a vocabulary without an unknown token, for which
    ``tokenizers`` raise a plain ``Exception``, has none for it."""
    try:
        pieces: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    except Exception:
        return []
    return pieces


# How vocabularies spell bytes

_BYTE_LEVEL = "byte level"
_SENTENCEPIECE = "sentencepiece"
_PLAIN = "plain"
_BLANK = "▁"
"""sentencepiece's space."""


def _spelling(tokenizer: Any) -> str:
    """Return how a tokenizer spells the bytes of its tokens, as its decoder says."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return _SENTENCEPIECE  # a library of its own, which has no decoder to ask
    if backend.decoder is None:
        return _PLAIN
    decoder = json.loads(backend.decoder.__getstate__())
    parts = decoder.get("decoders", [decoder])
    kinds = {part["type"] for part in parts}
    if "ByteLevel" in kinds:
        return _BYTE_LEVEL
    replaces = any(part.get("pattern", {}).get("String") == _BLANK for part in parts)
    return _SENTENCEPIECE if replaces or kinds & {"ByteFallback", "Metaspace"} else _PLAIN


def _bytes_of(text: str, spelling: str) -> bytes:
    """Return the bytes that a token stands for."""
    if spelling == _BYTE_LEVEL and all(character in _ALPHABET for character in text):
        return bytes(_ALPHABET[character] for character in text)
    if spelling == _SENTENCEPIECE:
        return bytes([int(text[3:5], 16)]) if _is_byte(text) else text.replace(_BLANK, " ").encode()
    return text.encode()


def _is_byte(text: str) -> bool:
    """Return whether a token is a byte of sentencepiece's fallback, ``<0x0A>``."""
    return re.fullmatch("<0x[0-9A-Fa-f]{2}>", text) is not None


def _alphabet() -> Mapping[str, int]:
    """Return the bytes by the characters that byte-level vocabularies spell them with: the
    printable ones of Latin-1 as themselves, the others from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = (byte for byte in range(256) if byte not in printable)
    spelled = {chr(byte): byte for byte in printable}
    return spelled | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _alphabet()


def _example(tokens: Mapping[tuple[bool, bytes], int]) -> str:
    """Return the longest token, to show what a vocabulary is like."""
    longest = max((token for _, token in tokens), key=len, default=b"")
    return repr(longest.decode(errors="replace"))[:40]
