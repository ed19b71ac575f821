"""STANDALONE drafts what the draft model says, of any vocabulary; its tokens are NONE's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from default_completion import Completion
from drafted_tokens import (
    CONTEXT,
    HIDDEN,
    VOCAB,
    Tokens,
    check_shipped_weights,
    plain_tokens,
    save_llama,
    save_random,
    tokens_of,
)
from other_vocabularies import default_tokenizer, renumbered, with_vocabulary, without
from torch import Tensor

from specplug import (
    LLM,
    Batch,
    CheckpointError,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    UsageError,
    hookimpl,
)
from specplug_standalone import WEIGHTS, Standalone, algorithm

SHIPPED = WEIGHTS / "tiny_code"
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, seed=3)


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=3)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of two layers, whose embeddings are the target's: it is often right."""
    return save_llama(tmp_path_factory.mktemp("draft"), layers=2)


@pytest.fixture(scope="session")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Mistral that looks eight tokens back."""
    from transformers import MistralConfig

    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=CONTEXT,
        sliding_window=8,
        bos_token_id=None,
        eos_token_id=None,
    )
    return save_random(config, tmp_path_factory.mktemp("windowed"))


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


class Spy(Standalone):
    """Keeps what was proposed: (position of the root, tokens, parents), scores, rooms, noise."""

    def __init__(self) -> None:
        self.drafts: list[tuple[int, list[int], list[int]]] = []
        self.scores: list[Tensor | None] = []
        self.rooms: list[int] = []
        self.noise: list[Tensor] = []

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        width = draft.tokens.shape[1]
        parents = list(range(-1, width - 1)) if draft.parents is None else draft.parents[0].tolist()
        self.drafts.append((int(batch.seq_lens[0]), draft.tokens[0].tolist(), parents))
        self.scores.append(None if draft.scores is None else draft.scores[0].clone())
        self.rooms.append(batch.max_draft_nodes[0])
        ahead = batch.seq_lens.unsqueeze(1) + torch.arange(1, 1 + runtime.config.num_steps)
        ids = runtime.worker.token_ids
        self.noise.append(
            torch.zeros(ahead.shape[1], len(ids))
            if batch.greedy
            else runtime.gumbel_noise(batch, ahead, ids)[0]
        )
        return draft


class Reference:
    """The draft model as transformers runs it, over a whole sequence at a time."""

    def __init__(self, draft: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float64).eval()

    @torch.inference_mode()
    def log_probs(self, committed: list[int], path: Sequence[int]) -> Tensor:
        """Scores [V] of the token after ``path``, drafted on ``committed`` with its root."""
        tokens = torch.tensor([[*committed, *path]])
        return self.model(tokens, use_cache=False).logits[0, -1].log_softmax(-1)

    def chain(self, committed: list[int], steps: int) -> list[int]:
        path: list[int] = []
        for _ in range(steps):
            path.append(int(self.log_probs(committed, path).argmax()))
        return path

    def tree(
        self, committed: list[int], topk: int, steps: int, nodes: int, beam: int | None = None
    ) -> set[tuple[int, ...]]:
        """The paths of EAGLE-2's tree: expand the best, then keep the best of all candidates."""
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        candidates: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(steps):
            children = []
            for score, path in frontier:
                best = self.log_probs(committed, path).topk(topk)
                children += [
                    (score + float(value), (*path, int(index)))
                    for value, index in zip(best.values, best.indices, strict=True)
                ]
            candidates += children
            frontier = sorted(children, reverse=True)[: beam or topk]
        return {path for _, path in sorted(candidates, reverse=True)[: nodes - 1]}


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...]]:
    """The path to each node, the root's among them."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return found


def load(target: Path, draft: Path | None, plugin: Any = algorithm, **settings: Any) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=plugin,
        speculative_draft_model_path=draft,
        **settings,
    )


def run(
    target: Path, draft: Path, prompt: list[int], params: SamplingParams, **settings: Any
) -> tuple[Spy, list[int]]:
    """What was proposed for a prompt, and the prompt with its output."""
    spy = Spy()
    with load(target, draft, spy, disable_overlap_schedule=True, **settings) as llm:
        output = llm.generate([prompt], params)[0]
    return spy, [*prompt, *output.token_ids]


GREEDY = SamplingParams(max_tokens=24)


@pytest.mark.parametrize("model", ["draft", "windowed"])
@pytest.mark.parametrize(("chunk", "page_size"), [(None, 1), (8, 3), (1, 16)])
def test_chain_is_what_the_model_says(
    target: Path,
    prompts: list[list[int]],
    model: str,
    chunk: int | None,
    page_size: int,
    request: pytest.FixtureRequest,
) -> None:
    """From the prompt's first token on, and after paths of all lengths."""
    path = request.getfixturevalue(model)
    spy, tokens = run(
        target,
        path,
        prompts[2],
        GREEDY,
        speculative_num_steps=4,
        chunked_prefill_size=chunk,
        page_size=page_size,
    )
    reference = Reference(path)
    assert len(spy.drafts) >= 4
    for root, drafted, _ in spy.drafts:
        committed = tokens[: root + 1]
        assert drafted[0] == committed[-1]
        assert drafted[1:] == reference.chain(committed, 4)


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(2, 3, 6), (3, 2, 7), (3, 1, 3), (4, 4, 16)])
def test_tree_is_what_the_model_says(
    target: Path, draft: Path, prompts: list[list[int]], topk: int, steps: int, nodes: int
) -> None:
    spy, tokens = run(
        target,
        draft,
        prompts[1],
        GREEDY,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=3,
    )
    reference = Reference(draft)
    assert len(spy.drafts) >= 4
    for root, drafted, parents in spy.drafts[:5]:
        expected = reference.tree(tokens[: root + 1], topk, steps, nodes)
        assert set(paths(drafted, parents)[1:]) == expected


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 4, 5), (3, 3, 8)], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_scores_are_the_softmax_of_what_is_compared(
    target: Path,
    draft: Path,
    prompts: list[list[int]],
    shape: tuple[int, int, int],
    params: SamplingParams,
) -> None:
    """With the request's temperature and noise."""
    topk, steps, nodes = shape
    spy, tokens = run(
        target,
        draft,
        prompts[2],
        params,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    reference = Reference(draft)
    assert len(spy.drafts) >= 3
    for (root, drafted, parents), scores, noise in zip(
        spy.drafts, spy.scores, spy.noise, strict=True
    ):
        assert scores is not None
        expected = [0.0]
        for path in paths(drafted, parents)[1:]:
            logits = reference.log_probs(tokens[: root + 1], path[:-1])
            logits = logits / (params.temperature or 1.0) + noise[len(path) - 1].double()
            expected.append(float(logits.log_softmax(-1)[path[-1]]))
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert scores[1:].max() < 0


def test_tree_in_a_short_pool_is_expanded_within_it(
    target: Path, draft: Path, prompts: list[list[int]]
) -> None:
    """The root's keys take a slot, too. After a step without room the next one reads all that was
    accepted."""
    prompt, (topk, steps, nodes) = prompts[1], (3, 4, 10)
    spy, tokens = run(
        target,
        draft,
        prompt,
        SamplingParams(max_tokens=11),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=1,
        max_total_tokens=len(prompt) + 11,
    )
    reference = Reference(draft)
    seen = set()
    for (root, drafted, parents), room in zip(spy.drafts, spy.rooms, strict=True):
        width = min(nodes, room)
        depth = min(steps, width - 1)
        beam = min(topk, (room - 1) // (depth - 1)) if depth > 1 else topk
        seen.add(beam)
        expected = reference.tree(tokens[: root + 1], topk, depth, width, beam) if depth else set()
        assert set(paths(drafted, parents)[1:]) == expected
    assert len(seen) > 1, seen


def test_draft_of_a_shorter_context_drafts_on(
    target: Path, prompts: list[list[int]], expected: Tokens, tmp_path: Path
) -> None:
    """Positions after its last one are taken for that."""
    from transformers import LlamaConfig

    config = LlamaConfig.from_pretrained(target, num_hidden_layers=1, max_position_embeddings=32)
    with load(target, save_random(config, tmp_path)) as llm:
        assert tokens_of(llm, prompts) == expected


def test_trees_of_a_windowed_model_are_refused(target: Path, windowed: Path) -> None:
    with pytest.raises(UsageError, match=r"topk=2: layers of the draft model .* sliding window"):
        load(target, windowed, speculative_eagle_topk=2)


# Other vocabularies

TEXTS = ["def read(path):\n    with open(path) as file:\n", "class Stack:\n    def "]
WHOLE = SamplingParams(max_tokens=48, ignore_eos=True)


def proposals(draft: Path, **settings: Any) -> tuple[Spy, list[tuple[int, ...]], float]:
    """What was proposed for the default model, its tokens, and the accept length."""
    spy = Spy()
    with LLM(
        speculative_algorithm=spy,
        speculative_draft_model_path=draft,
        disable_overlap_schedule=True,
        **settings,
    ) as llm:
        outputs = llm.generate(TEXTS, WHOLE)
        return spy, [each.token_ids for each in outputs], llm.stats()["mean_accept_length"]


@pytest.fixture(scope="module")
def plain_outputs() -> list[tuple[int, ...]]:
    with LLM() as llm:
        return [each.token_ids for each in llm.generate(TEXTS, WHOLE)]


TREE = {
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 3,
    "speculative_num_draft_tokens": 9,
}


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_permuted_vocabulary_drafts_the_same(
    tmp_path: Path, plain_outputs: list[tuple[int, ...]], shape: dict[str, int]
) -> None:
    new_ids = torch.randperm(4096, generator=torch.Generator().manual_seed(0))
    tokenizer = renumbered(new_ids.tolist())
    permuted = with_vocabulary(SHIPPED, tmp_path, tokenizer, new_ids.argsort().tolist())
    own, _, length = proposals(SHIPPED, **shape)
    other, tokens, other_length = proposals(permuted, **shape)
    assert other.drafts == own.drafts
    assert tokens == plain_outputs
    assert other_length == length > 2.5


@pytest.mark.parametrize("shape", [{}, TREE], ids=["chain", "tree"])
def test_halved_vocabulary_drafts_shared_tokens(
    tmp_path: Path, plain_outputs: list[tuple[int, ...]], shape: dict[str, int]
) -> None:
    tokenizer, ids = without(lambda token, id_: id_ >= 2048)
    spy, tokens, length = proposals(with_vocabulary(SHIPPED, tmp_path, tokenizer, ids), **shape)
    assert tokens == plain_outputs
    drafted = {token for _, chain, _ in spy.drafts for token in chain[1:]}
    assert len(drafted) > 10
    assert drafted <= set(ids)
    assert not {token for each in tokens for token in each} <= set(ids)
    assert length > 2


def test_vocabulary_without_a_common_token_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"<<word {n}>>": n for n in range(8)}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))
    foreign = with_vocabulary(SHIPPED, tmp_path, tokenizer, range(8))
    with pytest.raises(CheckpointError, match="none of its 8 tokens is one of the target's 4096"):
        LLM(speculative_algorithm=algorithm, speculative_draft_model_path=foreign)


def test_vocabularies_of_two_sizes_need_tokenizers(target: Path, tmp_path: Path) -> None:
    other = save_llama(tmp_path, layers=1, vocab_size=VOCAB - 1)
    with pytest.raises(CheckpointError, match="a vocabulary of 96, the target's is 97"):
        load(target, other)


def test_topk_is_at_most_the_shared_tokens(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {"a": 0, "b": 1, "<<word>>": 2}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words)))
    with pytest.raises(UsageError, match="topk=3: the draft model knows 2 tokens"):
        LLM(
            speculative_algorithm=algorithm,
            speculative_draft_model_path=with_vocabulary(SHIPPED, tmp_path, tokenizer, range(3)),
            speculative_eagle_topk=3,
        )


# Tokens of which the draft reads all pieces, in a text of its own

TEXT = (
    "def unregister_callback(environment, timestamp):\n    transport = "
    "environment.connection_transport\n    transport.abort()\n    raise RuntimeError(timestamp)\n"
)
READ = SamplingParams(max_tokens=24, ignore_eos=True)


class OwnReference(Reference):
    """The draft model over the own tokens of a whole text, whose tokens are the target's."""

    def __init__(self, draft: Path) -> None:
        from transformers import AutoTokenizer

        super().__init__(draft)
        self._target, self._own = default_tokenizer(), AutoTokenizer.from_pretrained(draft)
        known, own = self._target.get_vocab(), self._own.get_vocab().items()
        self._shared = {id_: known[text] for text, id_ in own}
        self._ids = {target: own for own, target in self._shared.items()}

    def pieces(self, tokens: list[int]) -> list[int]:
        """The own tokens of a text; of those that one token has the last three."""
        found: list[int] = []
        for token in tokens:
            if token in self._ids:
                found.append(self._ids[token])
            else:
                text = self._target.decode([token])
                found += self._own(text, add_special_tokens=False)["input_ids"][-3:]
        return found

    def log_probs(self, committed: list[int], path: tuple[int, ...] | list[int]) -> Tensor:
        """Scores [V] of the token after ``path``, of the tokens that both know."""
        own = super().log_probs(self.pieces(committed), self.pieces(list(path)))
        scores = torch.full((len(self._target),), float("-inf"), dtype=own.dtype)
        columns = list(self._shared)
        scores[list(self._shared.values())] = own[columns].log_softmax(-1)
        return scores


@pytest.fixture(scope="module")
def halved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shipped model without half of its tokens, the others under other ids."""
    tokenizer, ids = without(lambda token, id_: id_ >= 2048)
    new_ids = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    own = [ids[i] for i in new_ids.argsort().tolist()]
    folder = tmp_path_factory.mktemp("halved")
    return with_vocabulary(SHIPPED, folder, renumbered(new_ids.tolist(), tokenizer), own)


def load_own(spy: Spy, draft: Path, **settings: object) -> LLM:
    return LLM(
        dtype="float64",
        speculative_algorithm=spy,
        speculative_draft_model_path=draft,
        disable_overlap_schedule=True,
        **settings,  # type: ignore[arg-type]
    )


def check_chains(spy: Spy, draft: Path, tokens: list[int], steps: int) -> None:
    """Each chain is what the model says of the own text up to its root."""
    reference = OwnReference(draft)
    text = reference.pieces(tokens)
    assert len(text) > len(tokens) + 8
    assert len(spy.drafts) >= 4
    for root, drafted, _ in spy.drafts:
        assert drafted[1:] == reference.chain(tokens[: root + 1], steps)


@pytest.mark.parametrize(
    ("chunk", "page_size", "steps"), [(None, 1, 4), (8, 3, 4), (1, 16, 2), (5, 4, 1)]
)
def test_chain_is_what_the_model_says_of_its_own_text(
    halved: Path, chunk: int | None, page_size: int, steps: int
) -> None:
    spy = Spy()
    settings = {"chunked_prefill_size": chunk, "page_size": page_size}
    with load_own(spy, halved, speculative_num_steps=steps, **settings) as llm:
        output = llm.generate([TEXT], READ)[0]
        assert llm.engine.runtime.worker.model.pieces.most == 3
    check_chains(spy, halved, [*output.prompt_token_ids, *output.token_ids], steps)


def test_tree_is_what_the_model_says_of_its_own_text(halved: Path) -> None:
    spy = Spy()
    with load_own(spy, halved, page_size=3, **TREE) as llm:
        output = llm.generate([TEXT], READ)[0]
    tokens = [*output.prompt_token_ids, *output.token_ids]
    reference = OwnReference(halved)
    for root, drafted, parents in spy.drafts[:6]:
        expected = reference.tree(tokens[: root + 1], 3, 3, 9)
        assert set(paths(drafted, parents)[1:]) == expected


def test_prefix_hit_is_read_as_it_was_written(halved: Path) -> None:
    """The last request finds the first one's pages, and its own tokens stand in them; its row was
    another's meanwhile."""
    spy = Spy()
    with load_own(spy, halved, page_size=4) as llm:
        first = llm.generate([TEXT], READ)[0]
        more = [*first.prompt_token_ids, *first.token_ids, *first.prompt_token_ids[:5]]
        llm.generate([TEXTS[1]], READ)
        spy.drafts.clear()
        output = llm.generate([more], READ)[0]
        assert output.num_cached_tokens >= 40
    check_chains(spy, halved, [*more, *output.token_ids], 4)


def test_retracted_request_is_read_again(halved: Path) -> None:
    """Of two requests in a pool for one and a half, the second is prefilled anew with its output;
    both go on as if alone."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    texts = [TEXT, "class Stack:\n    def "]
    lengths = []
    expected = []
    for pool in (None, 128):
        with LLM(
            speculative_algorithm="STANDALONE",
            speculative_draft_model_path=halved,
            max_total_tokens=pool,
            page_size=4,
        ) as llm:
            outputs = llm.generate(texts, params)
            stats = llm.stats()
            lengths.append(stats["mean_accept_length"])
            expected.append([output.token_ids for output in outputs])
    assert stats["retractions"] > 0
    assert expected[0] == expected[1]
    assert lengths[1] == pytest.approx(lengths[0], rel=0.1)


def test_shipped_tokenizer_is_the_targets() -> None:
    assert default_tokenizer().get_vocab() == _tokenizer_of(SHIPPED).get_vocab()


def _tokenizer_of(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("STANDALONE", default_completion)
