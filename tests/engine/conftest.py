"""Small targets, and an algorithm whose drafts are right by script."""

from __future__ import annotations

import random
import string
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from torch import Tensor

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    RequestOutput,
    Runtime,
    SamplingParams,
    hookimpl,
)

VOCAB_SIZE = 96

BuildModel = Callable[..., Path]
Tokens = tuple[int, ...]


class Scripted:
    """Drafts whose every node is right with a given probability, in chains or random trees.

    It knows what NONE generates, so every acceptance pattern can be made to occur; and on the way
    it checks all that the engine hands to an algorithm: tokens, captured layer inputs, draft state
    and draft KV of every request, on each step.

    Args:
        references: prompt -> what NONE generates after it.
        tree: random trees; else chains.
        right: probability that a node is the target's own token at its parent.
        ragged: the requests of a batch draft differently many nodes.
        bare_embeddings: the target's first layer gets the tokens' embeddings and nothing else.
        seed: of the script.
        tolerance: of what is computed through attention.
    """

    def __init__(
        self,
        references: Mapping[Tokens, Tokens],
        *,
        tree: bool = False,
        right: float = 1.0,
        ragged: bool = False,
        bare_embeddings: bool = True,
        seed: int = 0,
        tolerance: float = 1e-9,
    ) -> None:
        self._known = {prompt: prompt + tokens for prompt, tokens in references.items()}
        self._tree = tree
        self._right = right
        self._ragged = ragged
        self._bare_embeddings = bare_embeddings
        self._tolerance = tolerance
        self._random = random.Random(seed)
        self.fail_next_propose: Exception | None = None
        self.finished: list[str] = []
        self.widths: dict[Tokens, list[int]] = {}

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="SCRIPTED",
            summary="Drafts that are right by script",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=4, num_draft_tokens=5),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Scripted:
        self._features = runtime.capture_layer_inputs((0, runtime.num_layers - 1))
        self._cache = runtime.allocate_kv(1, 1, 2)
        return self

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        features = target_output.per_node[self._features]
        lens = target_output.accept_lens.tolist()
        rows = len(target_output.tokens)
        columns = rows // batch.size
        firsts = (
            [0, *accumulate(lens)][:-1]
            if batch.is_prefill
            else [b * columns for b in range(batch.size)]
        )
        assert target_output.last_rows.tolist() == [
            f + n - 1 for f, n in zip(firsts, lens, strict=True)
        ]
        means = self._mean_of_draft_tokens(runtime, batch, target_output, columns)
        for b, (first, count) in enumerate(zip(firsts, lens, strict=True)):
            start = int(batch.seq_lens[b])
            known = self._tokens_of(batch.requests[b])
            for i in range(min(count, len(known) - start - 1)):
                row, position = first + i, start + i
                self._check_embedding(runtime, features[row], known[position])
                assert int(target_output.tokens[row]) == known[position + 1]
                after = known[1 : position + 2]
                assert abs(float(means[row]) - sum(after) / len(after)) < self._tolerance
            ends_prompt = not batch.is_prefill or batch.last_chunk[b]
            if ends_prompt and start + count < len(known):
                assert int(target_output.bonus_tokens[b]) == known[start + count]
        state = {
            "hidden_states": features[target_output.last_rows],
            "lengths": (batch.seq_lens + target_output.accept_lens).unsqueeze(1),
        }
        return DraftInput(bonus_tokens=target_output.bonus_tokens, state=state)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        if self.fail_next_propose is not None:
            error, self.fail_next_propose = self.fail_next_propose, None
            raise error
        assert draft_input["lengths"].squeeze(1).tolist() == batch.seq_lens.tolist()
        limit = runtime.config.num_draft_tokens
        steps = runtime.config.num_steps
        width = limit if self._tree else min(limit, steps + 1)
        tokens, parents, widths = [], [], []
        for b, request in enumerate(batch.requests):
            root, position = int(draft_input.bonus_tokens[b]), int(batch.seq_lens[b])
            known = self._tokens_of(request)
            if position < len(known):
                assert root == known[position]
                hidden = draft_input["hidden_states"][b]
                self._check_embedding(runtime, hidden, known[position - 1])
            widths.append(self._random.randint(1, width) if self._ragged else width)
            nodes, above = self._draw(root, known[position + 1 :], widths[-1], steps)
            tokens.append(nodes + [0] * (width - len(nodes)))
            parents.append(above + [0] * (width - len(nodes)))
        nodes_of_all = torch.tensor(tokens, device=runtime.device)
        if self._tree:
            above = torch.tensor(parents, device=runtime.device)
            return Draft.tree(nodes_of_all, above, steps, widths)
        return Draft.chain(nodes_of_all, widths)

    @hookimpl
    def verify(self, batch: Batch, draft: Draft) -> None:
        """Notes how wide each draft is when it is verified; the core verifies."""
        widths = draft.widths or (draft.width,) * batch.size
        for request, width in zip(batch.requests, widths, strict=True):
            self.widths.setdefault(tuple(request.prompt_token_ids), []).append(width)

    @hookimpl
    def on_request_finished(self, report: Any) -> None:
        self.finished.append(report.request_id)

    def _tokens_of(self, request: Any) -> Tokens:
        """What NONE gives, up to the request's end: behind it there are no slots to be right in."""
        most = len(request.prompt_token_ids) + request.max_tokens
        return self._known[tuple(request.prompt_token_ids)][:most]

    def _draw(
        self, root: int, future: Sequence[int], width: int, steps: int
    ) -> tuple[list[int], list[int]]:
        """``width`` nodes, each right with the script's probability if its parent is."""
        nodes, parents, depths = [root], [-1], [0]
        right = [True]
        for i in range(1, width):
            parent = i - 1
            if self._tree and (depths[-1] == steps or self._random.random() < 0.5):
                parent = self._random.choice([n for n in range(i) if depths[n] < steps])
            depth = depths[parent] + 1
            truth = future[depth - 1] if right[parent] and depth <= len(future) else None
            taken = {t for t, p in zip(nodes, parents, strict=True) if p == parent}
            is_right = (
                truth is not None and truth not in taken and self._random.random() < self._right
            )
            wrong = [t for t in range(VOCAB_SIZE) if t != truth and t not in taken]
            nodes.append(truth if is_right and truth is not None else self._random.choice(wrong))
            parents.append(parent)
            depths.append(depth)
            right.append(is_right)
        return nodes, parents

    def _mean_of_draft_tokens(
        self, runtime: Runtime, batch: Batch, output: CommittedOutput, columns: int
    ) -> Tensor:
        """Attention with equal scores over a draft cache of token numbers: their mean so far."""
        if batch.is_prefill:
            assert batch.attention is not None
            plan = batch.attention
        else:
            plan = runtime.plan_attention(batch, batch.seq_lens, columns)
        zeros = torch.zeros(len(output.tokens), 1, 2, dtype=runtime.dtype, device=runtime.device)
        values = output.tokens.to(runtime.dtype).view(-1, 1, 1).expand(-1, 1, 2)
        return plan.attend(self._cache, 0, zeros, zeros, values.contiguous())[:, 0]

    def _check_embedding(self, runtime: Runtime, features: Tensor, token: int) -> None:
        embedding = runtime.embed_tokens(torch.tensor([token], device=runtime.device))[0]
        assert features.shape == (2 * runtime.hidden_size,)
        assert not self._bare_embeddings or torch.equal(features[: len(embedding)], embedding)


@attrs.frozen
class Reference:
    """What NONE generates on its own: one request at a time, no chunks, no overlap."""

    prompts: tuple[Tokens, ...]
    params: Mapping[str, tuple[SamplingParams, ...]]
    outputs: Mapping[str, tuple[RequestOutput, ...]]

    def tokens(self, kinds: Sequence[str]) -> dict[Tokens, Tokens]:
        """Prompt i -> its tokens under ``kinds[i]``."""
        return {
            prompt: self.outputs[kind][i].token_ids
            for i, (prompt, kind) in enumerate(zip(self.prompts, kinds, strict=False))
        }


def _kinds(i: int) -> dict[str, SamplingParams]:
    truncated: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01}
    penalties: dict[str, Any] = {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.7,
        "frequency_penalty": 0.4,
    }
    bias = {7 * i + k: value for k, value in enumerate((4.0, 3.0, -50.0))}
    common: dict[str, Any] = {"max_tokens": 28, "logprobs": 3, "seed": 100 + i}
    return {
        "greedy": SamplingParams(**common),
        "seeded": SamplingParams(temperature=1.0, **common),
        "truncated": SamplingParams(**truncated, **common),
        "penalized": SamplingParams(**penalties, logit_bias=bias, **common),
        "penalized and sampled": SamplingParams(
            temperature=1.0, **penalties, logit_bias=bias, **common
        ),
    }


@pytest.fixture(scope="session")
def scripted() -> type[Scripted]:
    """The class of the scripted algorithm."""
    return Scripted


@pytest.fixture(scope="session")
def build_model(tmp_path_factory: pytest.TempPathFactory) -> BuildModel:
    """``build_model(config, seed=0)``: a folder with random float64 weights for a config."""
    from transformers import AutoModelForCausalLM

    def build(config: Any, seed: int = 0) -> Path:
        folder: Path = tmp_path_factory.mktemp("model")
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms and biases start as ones and zeros, which hide a slip
                parameter.data.add_(torch.randn_like(parameter) * 0.3)
        model.save_pretrained(folder)
        return folder

    return build


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Any]:
    """``tiny_config(**changes)``: two Llama layers, a vocabulary of 96, no EOS."""
    from transformers import LlamaConfig

    def config(**changes: Any) -> Any:
        shape: dict[str, Any] = {
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 96,
            "initializer_range": 0.3,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        return LlamaConfig(**{**shape, **changes})

    return config


@pytest.fixture(scope="session")
def tiny_model(build_model: BuildModel, tiny_config: Callable[..., Any]) -> Path:
    """A random Llama without a tokenizer and without EOS."""
    return build_model(tiny_config())


@pytest.fixture(scope="session")
def moe_model(build_model: BuildModel) -> Path:
    """Three layers of Qwen3-MoE, the middle one dense; two of five experts a token."""
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=5,
        num_experts_per_tok=2,
        mlp_only_layers=[1],
        norm_topk_prob=True,
        max_position_embeddings=96,
        initializer_range=0.3,
        bos_token_id=None,
        eos_token_id=None,
    )
    return build_model(config)


@pytest.fixture(scope="session")
def tiny_tokenizer() -> Any:
    """Bytes of printable ASCII and some pairs of letters, 96 tokens; ``<eos>`` is the last."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    singles = list(string.ascii_letters + string.digits + "Ġ.,;:!?()[]")
    merges = [("a", "b"), ("c", "d"), ("e", "f"), ("g", "h"), ("Ġ", "i")]
    pairs = [a + b for a, b in merges]
    rest = [f"<{i}>" for i in range(VOCAB_SIZE - 1 - len(singles) - len(pairs))]
    vocab = {token: i for i, token in enumerate([*singles, *pairs, *rest, "<eos>"])}
    assert len(vocab) == VOCAB_SIZE
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


@pytest.fixture(scope="session")
def text_model(
    build_model: BuildModel, tiny_config: Callable[..., Any], tiny_tokenizer: Any
) -> Path:
    """A random Llama with a tokenizer, whose EOS is its last token."""
    folder = build_model(tiny_config(eos_token_id=VOCAB_SIZE - 1), seed=1)
    tiny_tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def reference(tiny_model: Path) -> Reference:
    """Seven prompts of ``tiny_model`` under every kind of sampling, by NONE one at a time."""
    draw = random.Random(0)
    lengths = (1, 3, 5, 11, 16, 17, 33)
    prompts = tuple(tuple(draw.randrange(VOCAB_SIZE) for _ in range(n)) for n in lengths)
    kinds = [_kinds(i) for i in range(len(prompts))]
    params = {name: tuple(kind[name] for kind in kinds) for name in kinds[0]}
    with LLM(
        tiny_model, dtype="float64", chunked_prefill_size=None, disable_overlap_schedule=True
    ) as llm:
        outputs = {
            name: tuple(
                llm.generate(prompt, each)[0] for prompt, each in zip(prompts, of_kind, strict=True)
            )
            for name, of_kind in params.items()
        }
        llm.check_pool()
    return Reference(prompts, params, outputs)
