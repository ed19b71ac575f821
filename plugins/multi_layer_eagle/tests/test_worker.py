"""What MULTI_LAYER_EAGLE proposes is what its mathematics says, computed plainly: unpaged, over
the whole sequence each time, in float64."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    FutureMap,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug_multi_layer_eagle import MultiLayerEagle
from specplug_multi_layer_eagle.worker import MultiLayerEagleWorker

Write = Callable[..., Path]
DEPTH, EPS, THETA, HEAD_DIM = 3, 1e-5, 1e4, 8
GREEDY = SamplingParams(max_tokens=24)
SAMPLED = SamplingParams(max_tokens=24, temperature=0.8, seed=7)


@attrs.frozen
class Step:
    """What was proposed for one request.

    Attributes:
        prompt: of the request.
        root: position of the bonus token.
        chain: the bonus token and the drafted ones.
        noise: [S, V] of the target at the positions of the drafted tokens.
        scores: [S + 1] of the chain.
    """

    prompt: tuple[int, ...]
    root: int
    chain: tuple[int, ...]
    noise: Tensor
    scores: Tensor


class Spy(MultiLayerEagle):
    """Keeps what it drafted, and proposes what makes the target accept as many as it likes.

    ``truth`` is what the target generates: a random number of its tokens is proposed, then wrong
    ones. So accept lengths vary, however bad the layers are.
    """

    def __init__(self, truth: dict[tuple[int, ...], list[int]]) -> None:
        self.truth = truth
        self.steps: list[Step] = []
        self.accept_lens: set[int] = set()
        self.random = random.Random(0)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        tokens = draft.tokens
        assert draft.scores is not None
        ahead = torch.arange(1, tokens.shape[1], device=runtime.device)
        ids = torch.arange(runtime.vocab_size, device=runtime.device)
        noise = runtime.gumbel_noise(batch, batch.seq_lens.unsqueeze(1) + ahead, ids).cpu()
        for b, request in enumerate(batch.requests):
            prompt, root = tuple(request.prompt_token_ids), int(batch.seq_lens[b])
            chain = tuple(tokens[b].tolist())
            scores = draft.scores[b].cpu().clone()
            self.steps.append(Step(prompt, root, chain, noise[b].to(torch.float64), scores))
            true = [*prompt, *self.truth[prompt]][root + 1 : root + tokens.shape[1]]
            right = self.random.randrange(len(true) + 1)
            for at, token in enumerate(true):
                tokens[b, 1 + at] = token if at < right else (token + 1) % runtime.vocab_size
        return Draft.chain(tokens)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        if not batch.is_prefill:
            self.accept_lens.update(target_output.accept_lens.tolist())
        made = super().build_draft_input(runtime, batch, target_output, future_map)
        for name, declared in runtime.worker.state_spec().items():
            assert made[name].shape == (batch.size, *declared.shape)
            assert made[name].dtype == declared.dtype
        return made


class TreeSpy(MultiLayerEagle):
    """Keeps, for each request, what it proposed: prompt, the root's position, the path to each node
    but the root with the node's score, and the noise [S, V] of the target."""

    def __init__(self) -> None:
        self.trees: list[tuple[tuple[int, ...], int, dict[tuple[int, ...], float], Tensor]] = []

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        ahead = torch.arange(1, draft.depth + 1, device=runtime.device)
        ids = torch.arange(runtime.vocab_size, device=runtime.device)
        noise = runtime.gumbel_noise(batch, batch.seq_lens.unsqueeze(1) + ahead, ids)
        assert draft.parents is not None
        assert draft.scores is not None
        for b, request in enumerate(batch.requests):
            paths: list[tuple[int, ...]] = [()]
            pairs = zip(draft.tokens[b, 1:].tolist(), draft.parents[b, 1:].tolist(), strict=True)
            for token, parent in pairs:
                paths.append((*paths[parent], token))
            scores = dict(zip(paths[1:], draft.scores[b, 1:].tolist(), strict=True))
            prompt = tuple(request.prompt_token_ids)
            self.trees.append((prompt, int(batch.seq_lens[b]), scores, noise[b].double()))
        return draft


class Watched:
    """A runtime, watched: the last token of each look-up is kept in ``read``."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.read: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runtime, name)

    def embed_tokens(self, tokens: Tensor) -> Tensor:
        self.read.append(int(tokens[-1]))
        return self.runtime.embed_tokens(tokens)


class TailSpy(MultiLayerEagle):
    """Keeps, of chunks that do not end a prompt, the token that each layer reads at the last row:
    (end of the chunk, tokens)."""

    def __init__(self) -> None:
        self.tails: list[tuple[int, list[int]]] = []

    @hookimpl
    def create_worker(self, runtime: Runtime) -> MultiLayerEagleWorker:
        self.watched = Watched(runtime)
        return super().create_worker(self.watched)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        read = self.watched.read = []
        made = super().build_draft_input(runtime, batch, target_output, future_map)
        if batch.is_prefill and not batch.last_chunk[0]:
            self.tails.append((batch.chunk_ends[0], read))
        return made


class Reference:
    """The network written out again, by the names of DeepSeek-V3's checkpoints.

    Args:
        first: number of the first MTP layer.
    """

    masks_first = False

    def __init__(self, draft: Path, target: Path, first: int = DEPTH) -> None:
        from transformers import AutoModelForCausalLM

        self.w: dict[str, Tensor] = {}
        for file in sorted(draft.glob("*.safetensors")):
            self.w |= load_file(file)
        self.first = first
        self.model = AutoModelForCausalLM.from_pretrained(
            target, dtype=torch.float64, experts_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def target_hidden(self, tokens: list[int]) -> Tensor:
        """[n, hidden], what the LM head reads."""
        out = self.model.model(torch.tensor([tokens]), use_cache=False)
        return out.last_hidden_state[0]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        return y + self.w[f"{name}.bias"] if f"{name}.bias" in self.w else y

    def rotate(self, x: Tensor) -> Tensor:
        """[n, H, D] at positions 0 to n-1."""
        inverse = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
        left, right = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def block(self, x: Tensor, name: str) -> Tensor:
        """A Llama decoder layer over [n, hidden]."""
        n = len(x)
        y = self.norm(x, f"{name}.input_layernorm")
        q, k, v = (
            self.linear(y, f"{name}.self_attn.{p}_proj").view(n, -1, HEAD_DIM) for p in "qkv"
        )
        group = q.shape[1] // k.shape[1]
        q, k = self.rotate(q), self.rotate(k).repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        v = v.repeat_interleave(group, 1)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        x = x + self.linear(mixed, f"{name}.self_attn.o_proj")
        y = self.norm(x, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(y, f"{name}.mlp.{p}_proj") for p in ("gate", "up"))
        return x + self.linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def layer(self, k: int, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer k = 1, 2, …: (the next layer's hidden states, what the LM head reads)."""
        name = f"model.layers.{self.first + k - 1}"
        joined = (self.norm(embeds, f"{name}.enorm"), self.norm(hidden, f"{name}.hnorm"))
        made = self.block(self.linear(torch.cat(joined, -1), f"{name}.eh_proj"), name)
        return made, self.norm(made, f"{name}.shared_head.norm")

    def chain(
        self, committed: list[int], noise: Tensor, temperature: float
    ) -> tuple[list[int], Tensor]:
        """What is drafted after ``committed`` with its root, under ``noise`` [S, V], and the
        scores, the root's 0 first."""
        best = [logs.max(0) for logs in self.logs(committed, noise, temperature)]
        scores = [0.0, *(float(each.values) for each in best)]
        return [int(each.indices) for each in best], torch.tensor(scores)

    def tree(
        self, committed: list[int], noise: Tensor, temperature: float, topk: int, nodes: int
    ) -> dict[tuple[int, ...], float]:
        """The path to each node but the root, and the node's score: each layer's K likeliest, after
        the likeliest of the layers before it; of these the ones likeliest to be reached."""
        path: tuple[int, ...] = ()
        reached, found = 0.0, []
        for logs in self.logs(committed, noise, temperature):
            best = logs.topk(topk)
            for score, token in zip(best.values.tolist(), best.indices.tolist(), strict=True):
                found.append((reached + score, (*path, token), score))
            path, reached = (*path, int(best.indices[0])), reached + float(best.values[0])
        found.sort(key=lambda each: -each[0])
        return {way: score for _, way, score in found[: nodes - 1]}

    @torch.inference_mode()
    def logs(self, committed: list[int], noise: Tensor, temperature: float) -> list[Tensor]:
        """The log-probabilities [V] of each layer, which reads the likeliest tokens of those before
        it, under ``noise`` [S, V]."""
        embedding = self.model.get_input_embeddings().weight
        head = self.model.get_output_embeddings().weight
        rows = len(committed) - 1
        hidden = self.target_hidden(committed[:-1])
        known, found = list(committed), []
        for k in range(1, len(noise) + 1):
            embeds = embedding[torch.tensor(known[k : k + rows])].clone()
            if self.masks_first:
                embeds[:1] = 0
            hidden, out = self.layer(k, embeds, hidden)
            scores = (out[-1] @ head.T) / (temperature or 1.0) + noise[k - 1]
            known.append(int(scores.argmax()))
            found.append(scores.log_softmax(-1))
        return found


class MiMoReference(Reference):
    """MiMo's names; hidden state before embedding, and normed from layer to layer."""

    masks_first = True

    def layer(self, k: int, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        name = f"model.mtp_layers.{k - 1}"
        joined = (
            self.norm(hidden, f"{name}.hidden_layernorm"),
            self.norm(embeds, f"{name}.token_layernorm"),
        )
        made = self.block(self.linear(torch.cat(joined, -1), f"{name}.input_proj"), name)
        made = self.norm(made, f"{name}.final_layernorm")
        return made, made


class FamilyReference(Reference):
    """transformers' own decoder layer, over the whole sequence with its own attention, between
    what vLLM's and SGLang's servers have around it: normed from layer to layer, and no embedding
    at position 0 (vLLM's)."""

    masks_first = True

    def __init__(self, draft: Path, target: Path, first: int, package: str, prefix: str) -> None:
        from importlib import import_module

        from transformers import AutoConfig

        super().__init__(draft, target, first)
        config = AutoConfig.from_pretrained(draft, attn_implementation="eager")
        module = import_module(f"transformers.models.{package}.modeling_{package}")
        self.rotary = getattr(module, f"{prefix}RotaryEmbedding")(config)
        self.make = lambda: getattr(module, f"{prefix}DecoderLayer")(config, 2).to(torch.float64)
        self.experts = config.n_routed_experts

    def layer(self, k: int, embeds: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        _, normed = super().layer(k, embeds, hidden)
        return normed, normed

    def expert(self, name: str, kind: str) -> Tensor:
        """[experts, …]"""
        names = (f"{name}.mlp.experts.{e}.{kind}_proj.weight" for e in range(self.experts))
        return torch.stack([self.w[n] for n in names])

    def block(self, x: Tensor, name: str) -> Tensor:
        layer, n = self.make(), len(x)
        state = {
            key: self.w[f"{name}.{key}"] for key in layer.state_dict() if ".experts." not in key
        }
        gate_up = torch.cat((self.expert(name, "gate"), self.expert(name, "up")), dim=1)
        state["mlp.experts.gate_up_proj"] = gate_up
        state["mlp.experts.down_proj"] = self.expert(name, "down")
        layer.load_state_dict(state)
        mask = torch.full((1, 1, n, n), float("-inf"), dtype=torch.float64).triu(1)
        turned = self.rotary(x, torch.arange(n).unsqueeze(0))
        return layer(x.unsqueeze(0), attention_mask=mask, position_embeddings=turned)[0]


TRUTHS: dict[Any, dict[tuple[int, ...], list[int]]] = {}


def truth_of(
    target: Path, prompts: list[list[int]], params: SamplingParams
) -> dict[tuple[int, ...], list[int]]:
    """What the target generates after each prompt, computed once."""
    key = target, str(prompts), str(params)
    if key not in TRUTHS:
        with LLM(target, dtype="float64") as llm:
            outputs = llm.generate(prompts, params)
        pairs = zip(prompts, outputs, strict=True)
        TRUTHS[key] = {tuple(prompt): list(output.token_ids) for prompt, output in pairs}
    return TRUTHS[key]


def load(target: Path, draft: Path, spy: MultiLayerEagle, **settings: Any) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=spy,
        speculative_draft_model_path=draft,
        **{"disable_overlap_schedule": True, "speculative_num_steps": 4, **settings},
    )


def run(
    target: Path,
    draft: Path,
    prompts: list[list[int]],
    params: SamplingParams = GREEDY,
    **settings: Any,
) -> Spy:
    spy = Spy(truth_of(target, prompts, params))
    llm = load(target, draft, spy, **settings)
    outputs = llm.generate(prompts, params)
    assert [list(o.token_ids) for o in outputs] == list(spy.truth.values())
    llm.check_pool()
    return spy


def assert_drafts(spy: Spy, reference: Reference, temperature: float) -> None:
    for step in spy.steps:
        committed = [*step.prompt, *spy.truth[step.prompt]][: step.root + 1]
        if len(committed) <= step.root:
            continue  # drafted after the last token, in a batch that went on
        assert step.chain[0] == committed[-1]
        expected, scores = reference.chain(committed, step.noise, temperature)
        assert list(step.chain[1:]) == expected, step
        torch.testing.assert_close(step.scores, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("chunk", "page_size", "params"),
    [
        (chunk, page_size, SAMPLED if (i + j) % 2 else GREEDY)
        for i, chunk in enumerate((None, 1, 3, 8))
        for j, page_size in enumerate((1, 16))
    ],
)
def test_drafts_are_those_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    chunk: int | None,
    page_size: int,
    params: SamplingParams,
) -> None:
    """Batches of ragged prompts; each step drafts from the state left by steps of all lengths."""
    draft = write_draft()
    spy = run(
        target,
        draft,
        prompts,
        params,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=4,
    )
    assert spy.accept_lens >= {1, 2, 3, 4, 5}
    assert_drafts(spy, Reference(draft, target), params.temperature)


@pytest.mark.parametrize(("topk", "nodes"), [(3, 8), (2, 9), (4, 3)])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_trees_are_those_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    topk: int,
    nodes: int,
    params: SamplingParams,
) -> None:
    draft, spy, truth = write_draft(), TreeSpy(), truth_of(target, prompts, params)
    shape = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
    llm = load(target, draft, spy, chunked_prefill_size=8, **shape)
    outputs = llm.generate(prompts, params)
    assert [list(o.token_ids) for o in outputs] == list(truth.values())
    reference, seen = Reference(draft, target), 0
    for prompt, root, scores, noise in spy.trees:
        committed = [*prompt, *truth[prompt]][: root + 1]
        if len(committed) <= root:
            continue
        expected = reference.tree(committed, noise, params.temperature, topk, nodes)
        assert scores == pytest.approx(expected, rel=1e-4, abs=1e-4)
        seen += 1
    assert seen > 10


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_fewer_steps_than_layers(
    target: Path, prompts: list[list[int]], write_draft: Write, steps: int
) -> None:
    draft = write_draft()
    spy = run(target, draft, prompts, speculative_num_steps=steps)
    assert {len(step.chain) for step in spy.steps} == {steps + 1}
    assert_drafts(spy, Reference(draft, target), 0.0)


def test_overlap_drafts_the_same(
    target: Path, prompts: list[list[int]], write_draft: Write
) -> None:
    draft = write_draft()
    spy = run(target, draft, prompts, disable_overlap_schedule=False)
    assert_drafts(spy, Reference(draft, target), 0.0)


def test_tails_of_a_chunk_are_the_next_prompt_tokens(
    target: Path, prompts: list[list[int]], write_draft: Write
) -> None:
    """For every layer; only after the prompt's end are they drafted."""
    spy, prompt = TailSpy(), prompts[3]
    llm = load(target, write_draft(), spy, chunked_prefill_size=8)
    llm.generate([prompt], GREEDY)
    assert [end for end, _ in spy.tails] == [8, 16, 24, 32]
    for end, read in spy.tails:
        known = prompt[end : end + 4]
        assert read[: len(known)] == known
        assert len(read) == 4


def test_mimo_drafts_are_those_of_the_plain_network(mimo: Path, prompts: list[list[int]]) -> None:
    spy = run(mimo, mimo, prompts, SAMPLED, chunked_prefill_size=8)
    assert {len(step.chain) for step in spy.steps} == {3}
    assert_drafts(spy, MiMoReference(mimo, mimo), SAMPLED.temperature)


def test_glm_drafts_are_those_of_transformers(glm: Path, prompts: list[list[int]]) -> None:
    spy = run(glm, glm, prompts, chunked_prefill_size=8)
    assert {len(step.chain) for step in spy.steps} == {2}
    assert_drafts(spy, FamilyReference(glm, glm, 2, "glm4_moe", "Glm4Moe"), 0.0)


def test_deepseek_drafts_are_those_of_transformers(
    target: Path, deepseek: Path, prompts: list[list[int]]
) -> None:
    """Latent attention, whose keys and values differ in width."""
    spy = run(target, deepseek, prompts, chunked_prefill_size=8)
    assert {len(step.chain) for step in spy.steps} == {3}
    assert_drafts(spy, FamilyReference(deepseek, target, 0, "deepseek_v3", "DeepseekV3"), 0.0)
