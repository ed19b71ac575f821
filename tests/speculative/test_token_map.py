"""Tokens of two vocabularies are mapped by the bytes that they stand for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from other_vocabularies import default_tokenizer, renumbered, without
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from specplug import CheckpointError, TokenMap

V = 4096


def between(target: Any, draft: Any, sizes: tuple[int, int] = (V, V)) -> TokenMap:
    return TokenMap.between(
        target, draft, vocab_size=sizes[0], draft_vocab_size=sizes[1], name="the/draft"
    )


def words(*tokens: str, decoder: Any = None, **special: str) -> PreTrainedTokenizerFast:
    """A vocabulary of these tokens, in order."""
    vocab = {token: id_ for id_, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=tokens[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def pairs(found: TokenMap) -> list[tuple[int, int]]:
    return list(zip(found.target_ids.tolist(), found.draft_ids.tolist(), strict=True))


SENTENCEPIECE = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback()])


def test_equal_vocabularies_are_mapped_by_identity() -> None:
    found = between(default_tokenizer(), default_tokenizer())
    assert found.is_identity
    assert found.kind == "identical ids"
    assert found.reads.tolist() == found.draft_ids.tolist() == list(range(V))


def test_renumbered_vocabulary_is_a_permutation() -> None:
    new_ids = torch.randperm(V, generator=torch.Generator().manual_seed(0))
    found = between(default_tokenizer(), renumbered(new_ids.tolist()))
    assert found.kind == "a permutation"
    assert not found.is_identity
    assert torch.equal(found.draft_ids, new_ids)
    assert torch.equal(found.reads, new_ids)
    # What the draft says of each token is found at the target's id of it.
    logits = torch.randn(3, V)
    permuted = torch.empty_like(logits).index_copy_(1, new_ids, logits)
    assert torch.equal(found.shared(permuted), logits)


def test_smaller_vocabulary_is_an_intersection() -> None:
    draft, kept = without(lambda token, id_: id_ % 2 == 1)
    found = between(default_tokenizer(), draft, (V, len(kept)))
    assert 500 < len(kept) < V // 2
    assert found.kind == f"an intersection of {len(kept)} tokens"
    assert found.target_ids.tolist() == kept
    assert found.draft_ids.tolist() == list(range(len(kept)))
    assert found.shared(torch.zeros(2, len(kept))).shape == (2, len(kept))


def test_token_that_cannot_be_spelled_is_read_as_token_0() -> None:
    """The draft's vocabulary of words has no unknown token: its tokenizer fails at such a text."""
    known = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"other": 0, "cat": 1}))
    )
    target = words("dog", "cat", "other")
    found = between(target, known, (3, 2))
    assert pairs(found) == [(1, 1), (2, 0)]
    assert found.reads.tolist() == [0, 1, 0]


def test_unknown_token_is_read_as_its_last_piece() -> None:
    target = default_tokenizer()
    draft, kept = without(lambda token, id_: id_ % 2 == 1)
    found = between(target, draft, (V, len(kept)))
    unknown = sorted({*range(V)} - {*kept})
    for id_ in unknown[::50]:
        piece, text = draft.decode([found.reads[id_]]), target.decode([id_])
        assert text.endswith(piece) or "\ufffd" in piece + text
        assert len(piece) < len(text) or "\ufffd" in piece + text


def test_pieces_are_all_that_the_tokenizer_makes() -> None:
    """Up to so many as nearly all unknown tokens have no more of; of those the last."""
    target = default_tokenizer()
    draft, kept = without(lambda token, id_: id_ >= V // 2)
    found = between(target, draft, (V, len(kept)))
    assert found.most_pieces == 3
    shared = found.num_pieces[found.target_ids]
    assert shared.eq(1).all()
    assert torch.equal(found.pieces[found.target_ids, 0], found.draft_ids)
    whole = 0
    for id_ in sorted({*range(V)} - {*kept})[::10]:
        count, text = int(found.num_pieces[id_]), target.decode([id_])
        pieces = found.pieces[id_, :count].tolist()
        assert pieces[-1] == found.reads[id_]
        if "\ufffd" not in text:
            assert text.endswith(draft.decode(pieces))
            whole += text == draft.decode(pieces)
    assert whole > 190


def test_one_vocabulary_has_one_piece_a_token() -> None:
    found = TokenMap.identity(5)
    assert found.most_pieces == 1
    assert found.pieces.tolist() == [[0], [1], [2], [3], [4]]
    assert found.num_pieces.tolist() == [1] * 5


def test_nothing_in_common_is_refused() -> None:
    told = (
        r"draft model the/draft: none of its 3 tokens is one of the target's 4 \('gamma' beside "
        r"'alpha'\); expected a draft model whose vocabulary shares tokens"
    )
    with pytest.raises(CheckpointError, match=told):
        between(words("alpha", "b", "c", "d"), words("gamma", "y", "z"), (4, 3))


def test_spellings_of_bytes_are_those_of_the_decoders() -> None:
    """A space is ``Ġ`` to the one and ``▁`` to the other, a line's end ``Ċ`` and ``<0x0A>``."""
    byte_level = words("?", "Ġhello", "Ċ", "Ã©", "▁", decoder=decoders.ByteLevel())
    pieces = words("é", "▁hello", "<0x0A>", "Ġhello", "<0xE2>", decoder=SENTENCEPIECE)
    assert pairs(between(byte_level, pieces, (5, 5))) == [(1, 1), (2, 2), (3, 0)]


def test_token_with_two_ids_is_mapped_once() -> None:
    target = words("?", "A", decoder=decoders.ByteLevel())
    draft = words("!", "<0x41>", "A", decoder=SENTENCEPIECE)
    assert pairs(between(target, draft, (2, 3))) == [(1, 2)]
    assert pairs(between(draft, target, (3, 2))) == [(2, 1)]


def test_special_tokens_are_mapped_by_name_or_role() -> None:
    target = words(
        "?", "<s>", "<end>", "<pad>", eos_token="<end>", bos_token="<s>", pad_token="<pad>"
    )
    draft = words("!", "<eot>", "<pad>", "<s>", eos_token="<eot>", pad_token="<pad>")
    # <s> is text to the draft: it begins nothing there.
    assert pairs(between(target, draft, (4, 4))) == [(2, 1), (3, 2)]


def test_ids_without_a_logit_are_no_tokens() -> None:
    """A tokenizer may know more tokens than the model gives logits for, or fewer."""
    tokenizer = words("a", "b", "c")
    assert pairs(between(tokenizer, tokenizer, (2, 3))) == [(0, 0), (1, 1)]
    wide = between(tokenizer, tokenizer, (8, 4))
    assert pairs(wide) == [(0, 0), (1, 1), (2, 2)]
    assert wide.reads.tolist() == [0, 1, 2, 0, 0, 0, 0, 0]
    assert wide.kind == "an intersection of 3 tokens"


def test_missing_tokenizer_needs_equal_sizes() -> None:
    tokenizer = words("a", "b")
    assert between(None, tokenizer, (2, 2)).is_identity
    assert between(tokenizer, None, (2, 2)).is_identity
    with pytest.raises(
        CheckpointError, match="a vocabulary of 3, the target's is 2, and it has no"
    ):
        between(tokenizer, None, (2, 3))
    with pytest.raises(CheckpointError, match="and the target has no tokenizer"):
        between(None, tokenizer, (3, 2))


def test_map_moves_with_all_its_tensors() -> None:
    found = between(*(words("a", "b"), words("b", "a")), (2, 2)).to(torch.device("meta"))
    assert {t.device.type for t in (found.target_ids, found.draft_ids, found.reads)} == {"meta"}
