"""LiLiCorr's head scores as its paper says, written out again with torch's own attention."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import Reference, run
from drafted_tokens import plain_tokens, tokens_of
from safetensors.torch import load_file
from torch import Tensor, nn

from specplug import LLM, CheckpointError, SamplingParams
from specplug_dflash import algorithm

Make = Callable[..., tuple[dict[str, Tensor], dict[str, Any]]]
Write = Callable[..., Path]
TOP_K, HEADS, BLOCK, SCALE, EPS = 4, 2, 8, 8.0, 1e-5


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def linear(w: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]


def cosine(x: Tensor, y: Tensor) -> float:
    return float(torch.nn.functional.cosine_similarity(x, y, dim=0))


@torch.inference_mode()
def score(
    weights: dict[str, Tensor], embeds: Tensor, logs: Tensor, hidden: Tensor, anchor: Tensor
) -> list[list[list[float]]]:
    """For each position, each candidate before it (the root for all at the first) and each of its
    own: embeds [S, C, H], logs [S, C], hidden [S, H], anchor [H]."""
    w = {n.removeprefix("lilicorr."): t for n, t in weights.items() if n.startswith("lilicorr.")}
    steps, count = logs.shape
    rows = []
    for s in range(steps):
        for c in range(count):
            log = logs[s, c]
            known = [log, log.exp(), log - logs[s].max(), c / (count - 1), float(c == 0)]
            features = torch.tensor([float(x) for x in known], dtype=torch.float64)
            features = nn.functional.layer_norm(
                features, (5,), w["feature_norm.weight"], w["feature_norm.bias"]
            )
            inner = nn.functional.silu(linear(w, "feature_mlp.up_proj", features))
            token = embeds[s, c]
            if "token_proj.weight" in w:
                token = linear(w, "token_proj", token)
            row = token + linear(w, "pass_hidden_proj", hidden[s])
            row = row + linear(w, "feature_mlp.down_proj", inner)
            rows.append(row + w["slot_embedding"][0, 0, s, 0] + w["rank_embedding"][0, 0, 0, c])
    x = torch.stack(rows)
    slot = [i // count for i in range(len(x))]
    bias = torch.stack(
        [
            torch.stack(
                [
                    w["relative_slot_bias"][:, i - j + BLOCK - 1] + (i == j) * w["same_slot_bias"]
                    for j in slot
                ]
            )
            for i in slot
        ]
    ).permute(2, 0, 1)
    width = x.shape[1]
    for i in range(2):
        attention = nn.MultiheadAttention(width, HEADS, dtype=torch.float64)
        prefix = f"layers.{i}.attn."
        attention.load_state_dict(
            {n.removeprefix(prefix): t for n, t in w.items() if n.startswith(prefix)}
        )
        read = norm(x, w[f"layers.{i}.attn_norm.weight"])
        x = x + attention(read, read, read, attn_mask=bias, need_weights=False)[0]
        read = norm(x, w[f"layers.{i}.mlp_norm.weight"])
        inner = nn.functional.silu(linear(w, f"layers.{i}.mlp.up_proj", read))
        x = x + linear(w, f"layers.{i}.mlp.down_proj", inner)
    x = norm(x, w["output_norm.weight"])
    before = norm(linear(w, "context_proj", anchor), w["anchor_norm.weight"])
    joint = torch.cat((x, before.expand_as(x), x * before), dim=1)
    factors = nn.functional.silu(linear(w, "factor_input_proj", joint))
    out = linear(w, "out_head", factors).view(steps, count, -1)
    own = linear(w, "in_head", factors).view(steps, count, -1)
    root = linear(w, "anchor_out_head", before)
    return [
        [
            [SCALE * cosine(out[s - 1, p] if s else root, own[s, c]) for c in range(count)]
            for p in range(count)
        ]
        for s in range(steps)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("width", "steps"), [(16, 4), (0, 3), (16, 1)])
def test_drafts_are_the_path_expected_furthest(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    lilicorr: Make,
    temperature: float,
    width: int,
    steps: int,
) -> None:
    """The anchor is what the target left at the last committed position."""
    draft = write_draft(*lilicorr(width))
    params = SamplingParams(max_tokens=6, temperature=temperature, seed=3)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=steps)
    reference = Reference(draft, target)
    assert len(spy.drafts) >= 6
    for prompt, root, drafted, noise, scores in spy.drafts:
        committed = texts[prompt][: root + 1]
        hidden, logits = (f(committed, steps) for f in (reference.hidden, reference.logits))
        logs, best = logits.log_softmax(-1).topk(TOP_K)
        embeds = reference.embedding[best]
        anchor = reference.context(committed[:-1])[-1]
        pairs = torch.tensor(score(reference.w, embeds, logs, hidden, anchor))
        coupled = logits
        if temperature:
            coupled = logits / temperature + noise[:, reference.ids]
            seen = coupled.gather(1, best) - logits.gather(1, best) / temperature
            pairs = pairs / temperature + seen.unsqueeze(1)
        any_of = coupled.log_softmax(-1).gather(1, best).logsumexp(-1)
        pairs = pairs.log_softmax(-1) + any_of.view(-1, 1, 1)
        paths: list[tuple[float, float, list[int], list[float]]] = [(0.0, 0.0, [], [])]
        for s in range(steps):
            paths = [
                (expected + math.exp(total + own), total + own, [*ranks, c], [*each, own])
                for expected, total, ranks, each in paths
                for c, own in enumerate(pairs[s, ranks[-1] if ranks else 0].tolist())
            ]
        _, _, ranks, each = max(paths)
        assert drafted[1:] == [int(best[s, c]) for s, c in enumerate(ranks)]
        assert scores[1:].tolist() == pytest.approx(each, abs=1e-4)


@pytest.mark.parametrize(("topk", "overlap"), [(1, True), (3, False)])
def test_tokens_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    lilicorr: Make,
    topk: int,
    overlap: bool,
) -> None:
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=write_draft(*lilicorr(16)),
        speculative_num_steps=4,
        speculative_eagle_topk=topk,
        disable_overlap_schedule=not overlap,
        page_size=4,
        chunked_prefill_size=8,
        max_running_requests=3,
    )
    assert tokens_of(llm, prompts) == plain_tokens(target, prompts)
    llm.check_pool()


def test_older_exports_load(target: Path, write_draft: Write, lilicorr: Make) -> None:
    """They number the parts of an MLP."""
    tensors, layout = lilicorr(16)
    older = {}
    for name, tensor in tensors.items():
        renamed = name.replace("feature_norm", "feature_mlp.0")
        renamed = renamed.replace("feature_mlp.up_proj", "feature_mlp.1")
        renamed = renamed.replace("feature_mlp.down_proj", "feature_mlp.3")
        if name.startswith("lilicorr.layers"):
            renamed = renamed.replace("up_proj", "0").replace("down_proj", "2")
        older[renamed] = tensor
    draft = write_draft(older, layout)
    llm = LLM(
        target,
        dtype="float64",
        speculative_algorithm=algorithm,
        speculative_draft_model_path=draft,
    )
    assert load_file(draft / "model.safetensors").keys() != tensors.keys()
    state = llm.engine.runtime.worker.network.state_dict()
    assert state.keys() == tensors.keys()
    assert all(torch.equal(state[name].cpu(), tensor) for name, tensor in tensors.items())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"lilicorr_logit_scale": None}, "lilicorr_logit_scale=None, expected a number greater"),
        ({"lilicorr_num_layers": 0}, "lilicorr_num_layers=0, expected a number of at least 1"),
        ({"lilicorr_num_heads": 3}, "lilicorr_num_heads=3, expected a divisor of 16"),
        ({"selector_rank": 2, "selector_top_k": 2}, "a LiLiCorr head and another one"),
    ],
)
def test_wrong_sizes_are_refused(
    target: Path, write_draft: Write, lilicorr: Make, changes: dict[str, Any], reason: str
) -> None:
    draft = write_draft(*lilicorr(16, **changes))
    with pytest.raises(CheckpointError, match=reason):
        LLM(target, speculative_algorithm=algorithm, speculative_draft_model_path=draft)
