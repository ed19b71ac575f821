"""What DFLASH proposes is what its mathematics says, computed plainly: unpaged, in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from dflash_reference import MASK, Reference, Spy, run
from safetensors.torch import load_file
from torch import Tensor

from specplug import SamplingParams

CONTEXT = 160

Write = Callable[..., Path]
Second = tuple[dict[str, Tensor], dict[str, Any]]
Fixture = Callable[[], dict[str, Tensor]]


def assert_drafts(
    spy: Spy,
    texts: dict[tuple[int, ...], list[int]],
    reference: Reference,
    steps: int,
    temperature: float = 0.0,
) -> None:
    assert len(spy.drafts) >= 2 * len(texts)
    for prompt, root, drafted, noise, scores in spy.drafts:
        committed = texts[prompt][: root + 1]
        assert drafted[0] == committed[-1]
        logits = reference.logits(committed, steps)
        if temperature:
            logits = logits / temperature + noise[:, reference.ids]
        assert drafted[1:] == reference.ids[logits.argmax(-1)].tolist()
        assert scores[0] == 0
        expected = logits.log_softmax(-1).amax(-1).float()
        torch.testing.assert_close(scores[1:], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps", [1, 3, 7])
@pytest.mark.parametrize(("page_size", "chunk"), [(1, None), (16, 8)])
def test_blocks_are_those_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    steps: int,
    page_size: int,
    chunk: int | None,
) -> None:
    draft = write_draft()
    spy, texts = run(
        target,
        draft,
        prompts,
        SamplingParams(max_tokens=8),
        speculative_num_steps=steps,
        page_size=page_size,
        chunked_prefill_size=chunk,
    )
    assert_drafts(spy, texts, Reference(draft, target), steps)


def test_blocks_are_chosen_with_the_noise_of_the_target(
    target: Path, prompts: list[list[int]], write_draft: Write
) -> None:
    draft = write_draft()
    params = SamplingParams(max_tokens=8, temperature=0.8, seed=3)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=4)
    assert_drafts(spy, texts, Reference(draft, target), 4, temperature=0.8)


@pytest.mark.parametrize("hidden", [32, 24])
def test_a_checkpoint_with_its_own_head_drafts_by_it(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    speculators: Callable[..., dict[str, Any]],
    hidden: int,
) -> None:
    """``speculators``' layout; a draft of another width brings its embedding too."""
    tensors, layout = speculators(hidden)
    draft = write_draft(tensors, layout)
    spy, texts = run(
        target, draft, prompts[:2], SamplingParams(max_tokens=8), speculative_num_steps=5
    )
    assert_drafts(spy, texts, Reference(draft, target), 5)


def test_layers_with_a_window_are_causal_within_the_block(
    target: Path, prompts: list[list[int]], write_draft: Write
) -> None:
    kinds = ["sliding_attention", "full_attention"]
    draft = write_draft(layer_types=kinds, sliding_window=CONTEXT)
    params = SamplingParams(max_tokens=8)
    spy, texts = run(target, draft, prompts[:2], params, speculative_num_steps=5)
    assert_drafts(spy, texts, Reference(draft, target, causal=(True, False)), 5)


SWA = {"mask_token_id": MASK, "target_layer_ids": [0, 2], "use_swa": True}
SLIDING = ["sliding_attention", "full_attention"]


@pytest.mark.parametrize(
    ("config", "causal", "windows"),
    [
        ({"layer_types": None, "dflash_config": {**SWA, "swa_window_size": 6}}, (0, 0), (6, 6)),
        ({"dflash_config": {**SWA, "swa_window_size": 6}}, (0, 0), (6, 6)),
        ({"sliding_window": 9, "dflash_config": SWA}, (0, 0), (9, 9)),
        ({"layer_types": SLIDING, "sliding_window": 9}, (1, 0), (9, None)),
        (
            {
                "layer_types": SLIDING,
                "sliding_window": 9,
                "dflash_config": {**SWA, "causal": False},
            },
            (0, 0),
            (9, None),
        ),
        ({"dflash_config": {**SWA, "use_swa": False, "causal": True}}, (1, 1), (None, None)),
    ],
    ids=["no types", "all full", "top-level size", "layer types", "not causal", "causal"],
)
def test_blocks_with_windows_are_those_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    config: dict[str, Any],
    causal: tuple[bool, bool],
    windows: tuple[int | None, int | None],
) -> None:
    """Windows shorter than what is committed, and than a block."""
    draft = write_draft(**config)
    params = SamplingParams(max_tokens=8)
    spy, texts = run(target, draft, prompts[:4], params, speculative_num_steps=7)
    assert_drafts(spy, texts, Reference(draft, target, causal, windows), 7)


@pytest.mark.parametrize("layers", [[3], [0, 3], [3, 1]], ids=str)
def test_last_target_layer_is_read_after_the_final_norm(
    target: Path, prompts: list[list[int]], write_draft: Write, layers: list[int]
) -> None:
    """transformers' last ``hidden_states`` is what leaves the norm."""
    tensors = load_file(write_draft() / "model.safetensors")
    shape = (32, 32 * len(layers))
    tensors["fc.weight"] = torch.randn(shape, dtype=torch.float64) * 0.5
    fused = {"mask_token_id": MASK, "target_layer_ids": layers}
    draft = write_draft(tensors, dflash_config=fused)
    params = SamplingParams(max_tokens=8)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=4)
    features = tuple(layer + 1 for layer in layers)
    assert_drafts(spy, texts, Reference(draft, target, features=features), 4)


@pytest.mark.parametrize("steps", [1, 3, 8])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_blocks_may_draft_from_their_anchor(
    target: Path, prompts: list[list[int]], write_draft: Write, steps: int, temperature: float
) -> None:
    """A block of 8 rows then drafts 8 tokens."""
    draft = write_draft(sample_from_anchor=True)
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=3)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=steps)
    assert_drafts(spy, texts, Reference(draft, target, anchor=True), steps, temperature)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("layout", ["z-lab", "speculators"])
def test_trees_have_the_likeliest_paths_of_the_marginals(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    speculators: Callable[..., Any],
    temperature: float,
    layout: str,
) -> None:
    """Each node is likelier, with all above it, than any path that was left out: its next
    sibling, and its first child."""
    draft = write_draft(*speculators(32)) if layout == "speculators" else write_draft()
    steps, topk, nodes = 4, 3, 12
    spy, texts = run(
        target,
        draft,
        prompts[:3],
        SamplingParams(max_tokens=8, temperature=temperature, seed=3),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    reference = Reference(draft, target)
    assert len(spy.parents) == len(spy.drafts) >= 6
    for (prompt, root, tokens, noise, scores), parents in zip(spy.drafts, spy.parents, strict=True):
        logits = reference.logits(texts[prompt][: root + 1], steps)
        if temperature:
            logits = logits / temperature + noise[:, reference.ids]
        marginals, best = logits.log_softmax(-1).topk(topk, dim=-1)
        ids = reference.ids[best].tolist()
        paths: list[tuple[int, ...]] = [()]
        sums = [0.0]
        for token, parent, score in zip(tokens[1:], parents[1:], scores[1:].tolist(), strict=True):
            depth = len(paths[parent])
            rank = ids[depth].index(token)
            assert score == pytest.approx(float(marginals[depth, rank]), abs=1e-5)
            paths.append((*paths[parent], rank))
            sums.append(sums[parent] + score)
        left_out = {
            (*path, rank) for path in paths if len(path) < steps for rank in range(topk)
        } - set(paths)
        likeliest = max(
            sum(float(marginals[depth, rank]) for depth, rank in enumerate(path))
            for path in left_out
        )
        assert min(sums) >= likeliest - 1e-5
        assert sums == sorted(sums, reverse=True)


def conditional(
    reference: Reference, hidden: Tensor, logits: Tensor, before: int, temperature: float
) -> dict[int, float]:
    """The logarithms of the probabilities of a row's candidates after a token.

    Args:
        hidden: [hidden] of the row.
        logits: [V] of each token by itself, with the temperature and the noise.
    """
    top = logits.log_softmax(-1).topk(reference.keys["selector_top_k"])
    tokens = reference.ids[top.indices].tolist()
    pairs = torch.tensor([reference.pair(hidden, before, token) for token in tokens])
    scores = (top.values + pairs / (temperature or 1)).log_softmax(-1) + top.values.logsumexp(-1)
    return dict(zip(tokens, scores.tolist(), strict=True))


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("steps", [1, 4])
def test_selector_drafts_the_path_expected_furthest(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    second: Second,
    temperature: float,
    steps: int,
) -> None:
    """All paths through the candidates are compared."""
    draft = write_draft(*second)
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=3)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=steps)
    reference = Reference(draft, target)
    assert len(spy.drafts) >= 6
    for prompt, root, drafted, noise, scores in spy.drafts:
        committed = texts[prompt][: root + 1]
        hidden, logits = (f(committed, steps) for f in (reference.hidden, reference.logits))
        if temperature:
            logits = logits / temperature + noise[:, reference.ids]
        paths: list[tuple[float, float, list[int], list[float]]] = [(0.0, 0.0, [drafted[0]], [])]
        for row in range(steps):
            after = {
                before: conditional(reference, hidden[row], logits[row], before, temperature)
                for before in {path[2][-1] for path in paths}
            }
            paths = [
                (expected + math.exp(total + score), total + score, [*path, token], [*own, score])
                for expected, total, path, own in paths
                for token, score in after[path[-1]].items()
            ]
        _, _, path, own = max(paths)
        assert drafted == path
        assert scores[1:].tolist() == pytest.approx(own, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_selector_drafts_trees_of_its_candidates(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    second: Second,
    temperature: float,
) -> None:
    draft = write_draft(*second)
    steps, topk, nodes = 3, 2, 9
    spy, texts = run(
        target,
        draft,
        prompts[:3],
        SamplingParams(max_tokens=8, temperature=temperature, seed=3),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    reference = Reference(draft, target)
    for (prompt, root, tokens, noise, scores), parents in zip(spy.drafts, spy.parents, strict=True):
        committed = texts[prompt][: root + 1]
        hidden, logits = (f(committed, steps) for f in (reference.hidden, reference.logits))
        if temperature:
            logits = logits / temperature + noise[:, reference.ids]
        found = {(): 0.0}
        level = [((), 0.0)]
        for row in range(steps):
            level = [
                ((*path, token), total + score)
                for path, total in level
                for token, score in sorted(
                    conditional(
                        reference,
                        hidden[row],
                        logits[row],
                        path[-1] if path else tokens[0],
                        temperature,
                    ).items(),
                    key=lambda item: -item[1],
                )[:topk]
            ]
            found |= dict(level)
        best = sorted(found, key=lambda path: -found[path])[:nodes]
        paths: list[tuple[int, ...]] = [()]
        for token, parent, score in zip(tokens[1:], parents[1:], scores[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
            assert score == pytest.approx(found[paths[-1]] - found[paths[parent]], abs=1e-5)
        assert set(paths) == set(best)


def domino_head(reference: Reference, prefix: int) -> Callable[[Tensor, Tensor, list[int]], Tensor]:
    """Return what corrects a row's logits [V], by its hidden state [hidden] and by the root and the
    tokens drawn before it."""
    gru = torch.nn.GRU(32, 12, bias=False, dtype=torch.float64)
    gru.load_state_dict({n: reference.w[f"prefix_gru.{n}"] for n in gru.state_dict()})

    @torch.inference_mode()
    def correct(logits: Tensor, hidden: Tensor, before: list[int]) -> Tensor:
        if len(before) <= prefix:
            return logits
        _, state = gru(reference.embedding[torch.tensor(before)])
        joint = torch.cat((hidden, state[-1]))
        inner = torch.nn.functional.silu(reference.w["embed_proj.0.weight"] @ joint)
        return logits + reference.w["embed_proj.2.weight"] @ inner

    return correct


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_domino_trees_correct_each_path_by_its_own_tokens(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    domino: Callable[..., Second],
    temperature: float,
) -> None:
    steps, topk, nodes = 3, 2, 9
    spy, texts = run(
        target,
        write_draft(*domino()),
        prompts[:3],
        SamplingParams(max_tokens=8, temperature=temperature, seed=3),
        speculative_num_steps=steps,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=nodes,
    )
    reference = Reference(write_draft(*domino()), target, shift=True)
    correct = domino_head(reference, 1)
    assert len(spy.parents) == len(spy.drafts) >= 6
    for (prompt, root, tokens, noise, scores), parents in zip(spy.drafts, spy.parents, strict=True):
        committed = texts[prompt][: root + 1]
        hidden, logits = (f(committed, steps) for f in (reference.hidden, reference.logits))
        found: dict[tuple[int, ...], float] = {}
        level: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
        for row in range(steps):
            children = []
            for path, total in level:
                own = correct(logits[row], hidden[row], [tokens[0], *path])
                if temperature:
                    own = own / temperature + noise[row]
                best = own.log_softmax(-1).topk(topk)
                pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
                children += [((*path, token), total + log) for token, log in pairs]
            found |= dict(children)
            level = sorted(children, key=lambda child: -child[1])[:topk]
        paths: list[tuple[int, ...]] = [()]
        for token, parent, score in zip(tokens[1:], parents[1:], scores[1:].tolist(), strict=True):
            paths.append((*paths[parent], token))
            own_score = found[paths[-1]] - found.get(paths[parent], 0.0)
            assert score == pytest.approx(own_score, abs=1e-5)
        assert set(paths[1:]) == set(sorted(found, key=lambda path: -found[path])[: nodes - 1])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("shift", [True, False])
@pytest.mark.parametrize(("steps", "prefix"), [(1, 1), (7, 1), (4, 0)])
def test_domino_corrects_each_token_by_those_before(
    target: Path,
    prompts: list[list[int]],
    write_draft: Write,
    domino: Callable[..., Second],
    temperature: float,
    shift: bool,
    steps: int,
    prefix: int,
) -> None:
    draft = write_draft(*domino(shift_label=shift, pure_draft_prefix_len=prefix))
    params = SamplingParams(max_tokens=8, temperature=temperature, seed=3)
    spy, texts = run(target, draft, prompts[:3], params, speculative_num_steps=steps)
    reference = Reference(draft, target, shift=shift)
    correct = domino_head(reference, prefix)
    assert len(spy.drafts) >= 6
    for prompt, root, drafted, noise, scores in spy.drafts:
        committed = texts[prompt][: root + 1]
        hidden, logits = (f(committed, steps) for f in (reference.hidden, reference.logits))
        for row in range(steps):
            own = correct(logits[row], hidden[row], drafted[: row + 1])
            if temperature:
                own = own / temperature + noise[row]
            assert drafted[row + 1] == int(own.argmax())
            likeliest = float(own.log_softmax(-1).max())
            assert float(scores[row + 1]) == pytest.approx(likeliest, abs=1e-5)


def test_biases_are_used(target: Path, prompts: list[list[int]], write_draft: Write) -> None:
    draft = write_draft()
    tensors = load_file(draft / "model.safetensors")
    torch.manual_seed(5)
    for name in [n for n in tensors if "self_attn" in n and "proj" in n]:
        bias = torch.randn(len(tensors[name]), dtype=torch.float64)
        tensors[name.replace("weight", "bias")] = bias
    draft = write_draft(tensors, attention_bias=True)
    params = SamplingParams(max_tokens=8)
    spy, texts = run(target, draft, prompts[:2], params, speculative_num_steps=5)
    assert_drafts(spy, texts, Reference(draft, target), 5)


def test_a_root_alone_is_legal(target: Path, prompts: list[list[int]], write_draft: Write) -> None:
    params = SamplingParams(max_tokens=4, temperature=1.0, seed=1)
    spy, _ = run(target, write_draft(), prompts[:2], params, speculative_num_draft_tokens=1)
    assert [len(drafted) for _, _, drafted, *_ in spy.drafts] == [1] * 6


def test_the_config_of_both_layouts_means_the_same(
    write_draft: Write, speculators: Callable[..., Any]
) -> None:
    """The layers whose inputs are read come after z-lab's, whose outputs are read."""
    from specplug_dflash.config import read_config

    z_lab = read_config(write_draft())
    other = read_config(write_draft(*speculators(32)))
    assert z_lab.feature_layers == other.feature_layers == (1, 3)
    assert json.loads((write_draft() / "config.json").read_text())["num_target_layers"] == 4


def test_packing_changes_nothing(write_draft: Write) -> None:
    """Training runs the network unpacked, serving packed."""
    from specplug_dflash.config import read_config
    from specplug_dflash.network import DFlashNetwork

    draft = write_draft()
    network = DFlashNetwork(read_config(draft), 16).double()
    network.load_state_dict(load_file(draft / "model.safetensors"))
    torch.manual_seed(6)
    features, places = torch.randn(5, 64).double(), torch.arange(5)

    def mix(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Any function of all three will do."""
        return (q + (k + v).repeat_interleave(2, dim=1)).flatten(1)

    def results() -> list[Tensor]:
        context = network.fuse(features)
        block = network(context, places, mix, 5)
        return [block, *(x for pair in network.context_kv(context, places) for x in pair)]

    unpacked = results()
    network.pack()
    for before, after in zip(unpacked, results(), strict=True):
        torch.testing.assert_close(before, after)
