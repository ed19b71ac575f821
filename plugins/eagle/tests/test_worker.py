"""What EAGLE proposes is what its mathematics says, computed plainly: unpaged, in float64."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specplug import LLM, Batch, Draft, DraftInput, Runtime, SamplingParams, hookimpl
from specplug_eagle import Eagle

HEADS, KV_HEADS, HEAD_DIM, EPS, THETA = 4, 2, 8, 1e-5, 1e4


class Spy(Eagle):
    """EAGLE that keeps what it proposed: (position of the root, node tokens, parents)."""

    def __init__(self) -> None:
        self.drafts: list[tuple[int, list[int], list[int]]] = []
        self.scores: list[Tensor | None] = []

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(runtime, batch, draft_input)
        width = draft.tokens.shape[1]
        parents = list(range(-1, width - 1)) if draft.parents is None else draft.parents[0].tolist()
        self.drafts.append((int(batch.seq_lens[0]), draft.tokens[0].tolist(), parents))
        self.scores.append(None if draft.scores is None else draft.scores[0].clone())
        return draft


class Reference:
    """The draft network written out again, over a whole sequence at a time."""

    def __init__(self, draft: Path, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.w = load_file(draft / "model.safetensors")
        self.layers = sum(name.endswith("o_proj.weight") for name in self.w)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()

    @torch.inference_mode()
    def features(self, tokens: list[int]) -> Tensor:
        """[n, hidden] of ``tokens``: what the target's LM head reads."""
        return self.model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def linear(self, x: Tensor, name: str) -> Tensor:
        return x @ self.w[f"{name}.weight"].T + self.w.get(f"{name}.bias", torch.zeros(()))

    def rotate(self, x: Tensor) -> Tensor:
        """[n, H, D] at positions 0 to n-1."""
        inverse = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
        left, right = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    @torch.inference_mode()
    def forward(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Row p reads the embedding of ``tokens[p]`` and ``hidden[p]``; [n, hidden]."""
        embeds = self.model.get_input_embeddings().weight[torch.tensor(tokens)]
        hidden = self.linear(torch.cat((embeds, hidden), dim=-1), "fc")
        for index in range(self.layers):
            hidden = self.layer(hidden, f"layers.{index}", normed=index > 0)
        return hidden

    def layer(self, hidden: Tensor, name: str, normed: bool) -> Tensor:
        n = len(hidden)
        x = self.norm(hidden, f"{name}.input_layernorm") if normed else hidden
        q, k, v = (
            self.linear(x, f"{name}.self_attn.{p}_proj").view(n, -1, HEAD_DIM) for p in "qkv"
        )
        k = self.rotate(k).repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", self.rotate(q), k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        hidden = hidden + self.linear(mixed, f"{name}.self_attn.o_proj")
        y = self.norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (self.linear(y, f"{name}.mlp.{p}_proj") for p in ("gate", "up"))
        return hidden + self.linear(torch.nn.functional.silu(gate) * up, f"{name}.mlp.down_proj")

    def log_probs(self, committed: list[int], path: list[int]) -> Tensor:
        """Scores [V] of the token after ``path``, drafted on ``committed`` with its root."""
        hidden = self.features(committed[:-1])
        out = self.forward(committed[1:], hidden)
        for length in range(1, len(path) + 1):
            hidden = torch.cat((hidden, out[-1:]))
            out = self.forward([*committed[1:], *path[:length]], hidden)
        with torch.inference_mode():
            return self.model.lm_head(out[-1]).log_softmax(-1)

    def chain(self, committed: list[int], steps: int) -> list[int]:
        path: list[int] = []
        for _ in range(steps):
            path.append(int(self.log_probs(committed, path).argmax()))
        return path

    def tree(self, committed: list[int], topk: int, steps: int, nodes: int) -> set[tuple[int, ...]]:
        """The paths of EAGLE-2's tree: expand the best, then keep the best of all candidates."""
        frontier: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        candidates: list[tuple[float, tuple[int, ...]]] = []
        for _ in range(steps):
            children = []
            for score, path in frontier:
                best = self.log_probs(committed, list(path)).topk(topk)
                children += [
                    (score + float(value), (*path, int(index)))
                    for value, index in zip(best.values, best.indices, strict=True)
                ]
            candidates += children
            frontier = sorted(children, reverse=True)[:topk]
        return {path for _, path in sorted(candidates, reverse=True)[: nodes - 1]}


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The path to each node but the root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def run(target: Path, draft: Path, prompt: list[int], **settings: object) -> tuple[Spy, list[int]]:
    spy = Spy()
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=spy,
        speculative_draft_model_path=draft,
        disable_overlap_schedule=True,
        **settings,
    )
    output = llm.generate([prompt], SamplingParams(max_tokens=10))[0]
    return spy, [*prompt, *output.token_ids]


@pytest.mark.parametrize("chunk", [None, 8])
@pytest.mark.parametrize(
    "shape", [{}, {"layers": 2}, {"fc_bias": False}, {"qkv_bias": True}], ids=str
)
def test_chain_is_that_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Callable[..., Path],
    shape: dict[str, int],
    chunk: int | None,
) -> None:
    draft = write_draft(shape=shape, num_hidden_layers=shape.get("layers", 1))
    spy, tokens = run(
        target, draft, prompts[2], speculative_num_steps=4, chunked_prefill_size=chunk
    )
    reference = Reference(draft, target)
    assert len(spy.drafts) >= 2
    for root, drafted, _ in spy.drafts:
        committed = tokens[: root + 1]
        assert drafted[0] == committed[-1]
        assert drafted[1:] == reference.chain(committed, 4)


def test_scores_of_a_chain_are_its_log_probabilities(
    target: Path, prompts: list[list[int]], write_draft: Callable[..., Path]
) -> None:
    draft = write_draft()
    spy, tokens = run(target, draft, prompts[2], speculative_num_steps=4)
    reference = Reference(draft, target)
    for (root, drafted, _), scores in zip(spy.drafts, spy.scores, strict=True):
        expected = [0.0]
        for depth, token in enumerate(drafted[1:], start=1):
            log_probs = reference.log_probs(tokens[: root + 1], drafted[1:depth])
            expected.append(float(log_probs[token]))
        assert scores is not None
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(2, 3, 6), (3, 2, 7), (3, 1, 3), (4, 4, 20)])
@pytest.mark.parametrize("page_size", [1, 3])
def test_tree_is_that_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Callable[..., Path],
    topk: int,
    steps: int,
    nodes: int,
    page_size: int,
) -> None:
    draft = write_draft()
    spy, tokens = run(
        target,
        draft,
        prompts[1],
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=page_size,
    )
    reference = Reference(draft, target)
    assert len(spy.drafts) >= 2
    for root, drafted, parents in spy.drafts[:4]:
        expected = reference.tree(tokens[: root + 1], topk, steps, nodes)
        assert paths(drafted, parents) == expected
