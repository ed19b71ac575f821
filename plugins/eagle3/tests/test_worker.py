"""What EAGLE3 proposes is what its mathematics says, computed plainly: unpaged, in float64."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from specplug import LLM, Batch, Draft, DraftInput, Runtime, SamplingParams, hookimpl
from specplug_eagle3 import Eagle3

HEADS, KV_HEADS, HEAD_DIM, EPS, THETA = 4, 2, 8, 1e-5, 1e4
GREEDY = SamplingParams(max_tokens=10)
SAMPLED = SamplingParams(max_tokens=10, temperature=0.8, seed=7)


class Spy(Eagle3):
    """EAGLE3 that keeps what it proposed: (tokens before the root, node tokens, parents).

    Attributes:
        scores: [N] of each draft.
        noise: [N - 1, V_draft] of the target, at the positions of a chain's tokens.
    """

    def __init__(self) -> None:
        self.drafts: list[tuple[int, list[int], list[int]]] = []
        self.rooms: list[int] = []
        self.passes: list[int] = []
        self.scores: list[Tensor | None] = []
        self.noise: list[Tensor] = []

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        forward, rows = runtime.worker.forward, []
        runtime.worker.forward = lambda *inputs: rows.append(len(inputs[0])) or forward(*inputs)
        draft = super().propose(runtime, batch, draft_input)
        runtime.worker.forward = forward
        self.rooms.append(batch.max_draft_nodes[0])
        self.passes.append(len(rows))
        width = draft.tokens.shape[1]
        parents = list(range(-1, width - 1)) if draft.parents is None else draft.parents[0].tolist()
        self.drafts.append((int(batch.seq_lens[0]), draft.tokens[0].tolist(), parents))
        self.scores.append(None if draft.scores is None else draft.scores[0].clone())
        ahead = batch.seq_lens.unsqueeze(1) + torch.arange(1, width)
        self.noise.append(runtime.gumbel_noise(batch, ahead, runtime.worker.token_ids)[0])
        return draft


class Reference:
    """The draft network written out again, over a whole sequence at a time."""

    def __init__(self, draft: Path, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        saved = load_file(draft / "model.safetensors")
        self.w = {name.replace("layers.0.", "midlayer."): t for name, t in saved.items()}
        config = json.loads((draft / "config.json").read_text())
        self.norm_before_residual = "speculators_version" in config
        self.norm_output = config.get("norm_output", False)
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.ids = torch.arange(len(self.w["d2t"])) + self.w["d2t"]

    @torch.inference_mode()
    def features(self, tokens: list[int]) -> Tensor:
        """[n, hidden] fused features of ``tokens``: outputs of layers 0, 1 and 2."""
        out = self.model(torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[i][0] for i in (1, 2, 3)], dim=-1)
        if "input_norm.weight" in self.w:
            aux = self.norm(aux, "input_norm")
        if "fc_norm.0.weight" in self.w:
            parts = enumerate(aux.chunk(3, dim=1))
            aux = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in parts], dim=1)
        return aux @ self.w["fc.weight"].T

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * self.w[f"{name}.weight"]

    def rotate(self, x: Tensor) -> Tensor:
        """[n, H, D] at positions 0 to n-1."""
        inverse = THETA ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
        left, right = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    @torch.inference_mode()
    def layer(self, tokens: list[int], hidden: Tensor) -> Tensor:
        """Rows p hold the embedding of ``tokens[p]`` and ``hidden[p]``; [n, hidden]."""
        n = len(tokens)
        embedding = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        embeds = embedding[torch.tensor(tokens)]
        x = torch.cat(
            (
                self.norm(embeds, "midlayer.input_layernorm"),
                self.norm(hidden, "midlayer.hidden_norm"),
            ),
            dim=-1,
        )
        q, k, v = (x @ self.w[f"midlayer.self_attn.{p}_proj.weight"].T for p in "qkv")
        q, k = q.view(n, HEADS, HEAD_DIM), k.view(n, KV_HEADS, HEAD_DIM)
        if "midlayer.self_attn.q_norm.weight" in self.w:
            q, k = (self.norm(x, f"midlayer.self_attn.{p}_norm") for x, p in ((q, "q"), (k, "k")))
        q, k = self.rotate(q), self.rotate(k).repeat_interleave(HEADS // KV_HEADS, 1)
        v = v.view(n, KV_HEADS, HEAD_DIM).repeat_interleave(HEADS // KV_HEADS, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        if self.norm_before_residual:
            hidden = self.norm(hidden, "midlayer.hidden_norm")
        hidden = hidden + mixed @ self.w["midlayer.self_attn.o_proj.weight"].T
        y = self.norm(hidden, "midlayer.post_attention_layernorm")
        gate, up = (y @ self.w[f"midlayer.mlp.{p}_proj.weight"].T for p in ("gate", "up"))
        return (
            hidden
            + (torch.nn.functional.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T
        )

    def log_probs(self, committed: list[int], path: list[int]) -> Tensor:
        """Scores [V_draft] of the token after ``path``, drafted on ``committed`` with its root."""
        hidden = self.features(committed[:-1])
        out = self.layer(committed[1:], hidden)
        for length in range(1, len(path) + 1):
            last = self.norm(out[-1:], "norm") if self.norm_output else out[-1:]
            hidden = torch.cat((hidden, last))
            out = self.layer([*committed[1:], *path[:length]], hidden)
        logits = self.norm(out[-1], "norm") @ self.w["lm_head.weight"].T
        return logits.log_softmax(-1)

    def chain(self, committed: list[int], steps: int) -> list[int]:
        path: list[int] = []
        for _ in range(steps):
            path.append(int(self.ids[self.log_probs(committed, path).argmax()]))
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
                best = self.log_probs(committed, list(path)).topk(topk)
                children += [
                    (score + float(value), (*path, int(self.ids[index])))
                    for value, index in zip(best.values, best.indices, strict=True)
                ]
            candidates += children
            frontier = sorted(children, reverse=True)[: beam or topk]
        return {path for _, path in sorted(candidates, reverse=True)[: nodes - 1]}


def paths(tokens: list[int], parents: list[int]) -> set[tuple[int, ...]]:
    """The path to each node but the root."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        found.append((*found[parent], token))
    return set(found[1:])


def run(
    target: Path,
    draft: Path,
    prompt: list[int],
    params: SamplingParams = GREEDY,
    *,
    spy: Spy | None = None,
    **settings: object,
) -> tuple[Spy, list[int]]:
    spy = spy or Spy()
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=spy,
        speculative_draft_model_path=draft,
        disable_overlap_schedule=True,
        **settings,
    )
    output = llm.generate([prompt], params)[0]
    return spy, [*prompt, *output.token_ids]


@pytest.mark.parametrize("chunk", [None, 8])
def test_chain_is_that_of_the_plain_network(
    target: Path, prompts: list[list[int]], write_draft: Callable[..., Path], chunk: int | None
) -> None:
    draft = write_draft()
    spy, tokens = run(
        target, draft, prompts[2], speculative_num_steps=4, chunked_prefill_size=chunk
    )
    reference = Reference(draft, target)
    assert len(spy.drafts) >= 2
    for root, drafted, _ in spy.drafts:
        committed = tokens[: root + 1]
        assert drafted[0] == committed[-1]
        assert drafted[1:] == reference.chain(committed, 4)


class LayerSpy(Spy):
    """It keeps how many rows the feed-forward part of the draft's layer had in each pass.

    Args:
        knows: whether the layer sees which ``Attend`` it has.
    """

    def __init__(self, knows: bool) -> None:
        super().__init__()
        self.knows = knows
        self.rows: list[int] = []

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        worker = super().create_worker(runtime)
        layer, run = worker.network.midlayer, worker.network.midlayer.run
        layer.mlp.register_forward_pre_hook(lambda _, given: self.rows.append(len(given[0])))
        if not self.knows:

            def run_unaware(*given: Any) -> Tensor:
                *others, attend = given
                return run(*others, lambda *own: attend(*own))

            layer.run = run_unaware
        return worker


@pytest.mark.parametrize("knows", [True, False])
@pytest.mark.parametrize("chunk", [None, 40])
def test_last_layer_runs_for_rows_that_are_drafted_from(
    target: Path, write_draft: Callable[..., Path], chunk: int | None, knows: bool
) -> None:
    """Of a long prompt, and its drafts are those of the plain network; a layer that does not know
    of it runs for all rows."""
    draft, prompt = write_draft(), [(7 * i * i + i) % 90 + 3 for i in range(80)]
    steps = 3
    spy, tokens = run(
        target, draft, prompt, spy=LayerSpy(knows), speculative_num_steps=steps,
        chunked_prefill_size=chunk, warm_up="off",
    )  # fmt: skip
    chunks = [80] if chunk is None else [40, 40]
    assert isinstance(spy, LayerSpy)
    assert spy.rows[: len(chunks)] == ([1] * len(chunks) if knows else chunks)
    reference = Reference(draft, target)
    for (root, drafted, _), scores in zip(spy.drafts, spy.scores, strict=True):
        committed = tokens[: root + 1]
        assert drafted[1:] == reference.chain(committed, steps)
        first = reference.log_probs(committed, []).max()
        assert scores is not None
        torch.testing.assert_close(scores[1].double(), first, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qwen3": True},
        {"norms": ("norm_before_fc",)},
        {"norms": ("fc_norm",)},
        {"norms": ("norm_output",)},
        {"norms": ("fc_norm", "norm_output"), "qwen3": True},
    ],
    ids=str,
)
def test_a_speculator_is_that_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_speculator: Callable[..., tuple[Path, dict[str, Tensor]]],
    options: dict[str, Any],
) -> None:
    """Also with the norms of EAGLE-3.1: ``fc_norm`` and ``norm_output``."""
    draft, _ = write_speculator(**options)
    spy, tokens = run(target, draft, prompts[2], speculative_num_steps=3)
    reference = Reference(draft, target)
    for root, drafted, _ in spy.drafts:
        assert drafted[1:] == reference.chain(tokens[: root + 1], 3)


def test_safeailab_head_of_another_width_is_the_plain_one(
    target: Path, prompts: list[list[int]], write_draft: Callable[..., Path]
) -> None:
    """24 wide under a target of 32: it brings an embedding of its own width, which its attention
    reads beside the hidden state; features alone have the target's."""
    draft = write_draft(embedding=24)
    tensors = load_file(draft / "model.safetensors")
    assert tensors["midlayer.self_attn.q_proj.weight"].shape[1] == 48
    assert tensors["fc.weight"].shape == (24, 96)
    spy, tokens = run(target, draft, prompts[2], speculative_num_steps=3)
    reference = Reference(draft, target)
    for root, drafted, _ in spy.drafts:
        assert drafted[1:] == reference.chain(tokens[: root + 1], 3)


@pytest.mark.parametrize("shape", [(1, 2, 3), (1, 4, 5), (3, 3, 8)], ids=str)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_scores_are_the_softmax_of_what_is_compared(
    target: Path,
    prompts: list[list[int]],
    write_draft: Callable[..., Path],
    shape: tuple[int, int, int],
    params: SamplingParams,
) -> None:
    """Over the draft's own vocabulary, with the request's temperature and noise."""
    draft = write_draft()
    topk, steps, nodes = shape
    spy, tokens = run(
        target,
        draft,
        prompts[2],
        params,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=1,
        max_total_tokens=len(prompts[2]) + 10,  # the last drafts are narrow
    )
    reference = Reference(draft, target)
    columns = {int(token): column for column, token in enumerate(reference.ids)}
    widths = set()
    for (root, drafted, parents), scores, noise in zip(
        spy.drafts, spy.scores, spy.noise, strict=True
    ):
        widths.add(len(drafted))
        if len(drafted) == 1:
            continue
        assert scores is not None
        found: list[tuple[int, ...]] = [()]
        expected = [0.0]
        for token, parent in zip(drafted[1:], parents[1:], strict=True):
            path = found[parent]
            found.append((*path, token))
            logits = reference.log_probs(tokens[: root + 1], list(path))
            logits = logits / (params.temperature or 1.0) + noise[len(path)].double()
            expected.append(float(logits.log_softmax(-1)[columns[token]]))
        assert scores.dtype == torch.float32
        torch.testing.assert_close(scores, torch.tensor(expected), rtol=1e-5, atol=1e-5)
        assert scores[1:].max() < 0
    assert len(widths) > 1, widths


@pytest.mark.parametrize(("topk", "steps", "nodes"), [(2, 3, 6), (3, 2, 7), (3, 1, 3)])
def test_tree_is_that_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Callable[..., Path],
    topk: int,
    steps: int,
    nodes: int,
) -> None:
    draft = write_draft()
    spy, tokens = run(
        target,
        draft,
        prompts[1],
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=3,
    )
    reference = Reference(draft, target)
    for root, drafted, parents in spy.drafts[:4]:
        expected = reference.tree(tokens[: root + 1], topk, steps, nodes)
        assert paths(drafted, parents) == expected


def test_tree_in_a_short_pool_is_expanded_within_it(
    target: Path, prompts: list[list[int]], write_draft: Callable[..., Path]
) -> None:
    """It is as narrow as its keys have slots for, as deep as it has nodes, and its nodes are the
    best there are."""
    draft = write_draft()
    prompt, (topk, steps, nodes) = prompts[1], (3, 4, 10)
    spy, tokens = run(
        target,
        draft,
        prompt,
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
        page_size=1,
        max_total_tokens=len(prompt) + 10,
    )
    reference = Reference(draft, target)
    seen = set()
    for (root, drafted, parents), room, passes in zip(
        spy.drafts, spy.rooms, spy.passes, strict=True
    ):
        width = min(nodes, room)
        depth = min(steps, width - 1)
        beam = min(topk, room // (depth - 1)) if depth > 1 else topk
        seen.add((width, depth, beam))
        assert passes == max(depth - 1, 0), "no pass for what would be cut"
        expected = reference.tree(tokens[: root + 1], topk, depth, width, beam) if depth else set()
        assert paths(drafted, parents) == expected
    assert {(10, 4, 3), (8, 4, 2), (5, 4, 1), (2, 1, 3)} <= seen, seen


def test_chain_in_a_short_pool_runs_no_pass_too_many(
    target: Path, prompts: list[list[int]], write_draft: Callable[..., Path]
) -> None:
    draft = write_draft()
    prompt = prompts[1]
    spy, tokens = run(
        target,
        draft,
        prompt,
        speculative_num_steps=5,
        page_size=1,
        max_total_tokens=len(prompt) + 10,
    )
    reference = Reference(draft, target)
    assert {2, 4} <= set(spy.rooms)
    for (root, drafted, _), room, passes in zip(spy.drafts, spy.rooms, spy.passes, strict=True):
        steps = min(5, room - 1)
        assert passes == max(steps - 1, 0)
        assert drafted[1:] == reference.chain(tokens[: root + 1], steps)


def test_tree_in_a_short_pool_is_no_worse_than_a_chain() -> None:
    """Four requests that share a pool for one and a half."""
    prompts = ["import os\n\ndef ", "class Stack:\n    def ", "for i in range(", "if value is "]
    found = {}
    for topk, nodes in ((1, 6), (8, 48)):
        with LLM(
            speculative_algorithm="EAGLE3",
            speculative_num_steps=5,
            speculative_eagle_topk=topk,
            speculative_num_draft_tokens=nodes,
            page_size=1,
            max_total_tokens=90,
        ) as llm:
            llm.generate(prompts, SamplingParams(max_tokens=24, ignore_eos=True))
            found[topk] = llm.stats()["mean_accept_length"]
    assert found[8] > found[1], found
