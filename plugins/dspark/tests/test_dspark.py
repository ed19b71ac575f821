"""DSPARK's checkpoints load, its heads draw what their mathematics says, its tokens are NONE's."""

from __future__ import annotations

import json
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
    tokens_of,
)
from safetensors.torch import save_file
from torch import Tensor

from specplug import LLM, Batch, CheckpointError, Runtime, SamplingParams, hookimpl
from specplug_dspark import DSpark, algorithm
from specplug_dspark.config import read_config
from specplug_dspark.worker import DSparkWorker

RANK, BLOCK, MASK, DRAFT_VOCAB = 6, 6, 96, 50
TYPES = ["vanilla", "gated", "rnn"]
DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_hidden_layers": 2,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
}
HEADS = {
    "markov_rank": RANK,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
FLAT = {
    **DECODER,
    **HEADS,
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "num_target_layers": 4,
    "target_layer_ids": [0, 2],
}
NESTED = {
    **HEADS,
    "speculators_model_type": "dspark",
    "aux_hidden_state_layer_ids": [1, 3],
    "block_size": BLOCK,
    "mask_token_id": MASK,
    "draft_vocab_size": DRAFT_VOCAB,
    "sample_from_anchor": False,
    "transformer_layer_config": {"model_type": "qwen3", **DECODER},
}


@pytest.fixture(scope="session")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("target"), layers=4)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    torch.manual_seed(2)
    return [torch.randint(0, VOCAB, (n,)).tolist() for n in (5, 17, 33, 1, 60)]


@pytest.fixture(scope="session")
def expected(target: Path, prompts: list[list[int]]) -> Tokens:
    return plain_tokens(target, prompts)


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, apart from the draft's vocabulary."""
    layer = {
        "self_attn.q_proj.weight": (32, HIDDEN),
        "self_attn.k_proj.weight": (16, HIDDEN),
        "self_attn.v_proj.weight": (16, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, 32),
        "self_attn.q_norm.weight": (8,),
        "self_attn.k_norm.weight": (8,),
        "mlp.gate_proj.weight": (48, HIDDEN),
        "mlp.up_proj.weight": (48, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, 48),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    heads: dict[str, tuple[int, ...]] = {}
    rank = config["markov_rank"]
    if rank:
        vocabulary = config.get("draft_vocab_size", VOCAB)
        heads |= {"markov_w1.weight": (VOCAB, rank), "markov_w2.weight": (vocabulary, rank)}
        if config["markov_head_type"] == "gated":
            heads |= {"gate_proj.weight": (rank, HIDDEN + rank), "gate_proj.bias": (rank,)}
        if config["markov_head_type"] == "rnn":
            joint = 3 * rank, HIDDEN + 2 * rank
            heads |= {"joint_proj.weight": joint, "joint_proj.bias": (3 * rank,)}
    heads = {f"markov_head.{name}": shape for name, shape in heads.items()}
    if config["enable_confidence_head"]:
        width = HIDDEN + (rank if config["confidence_head_with_markov"] else 0)
        heads |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    return {
        "fc.weight": (HIDDEN, 2 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in layer.items()},
        **heads,
    }


def write(folder: Path, layout: dict[str, Any], **changes: Any) -> dict[str, Tensor]:
    """Write a random checkpoint in float64 to a folder, and return its tensors."""
    config = {**layout, **changes}
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(shape, dtype=torch.float64) * 0.5
        for name, shape in shapes(config).items()
    }
    if "draft_vocab_size" in config:
        ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
        tensors["lm_head.weight"] = torch.randn(DRAFT_VOCAB, HIDDEN, dtype=torch.float64) * 0.5
        tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(target: Path, draft: Path, plugin: DSpark = algorithm, **settings: Any) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=plugin,
        speculative_draft_model_path=draft,
        **settings,
    )


@pytest.mark.parametrize("layout", [FLAT, NESTED], ids=["deepseek-ai", "speculators"])
@pytest.mark.parametrize("head", TYPES)
def test_published_layouts_load(
    target: Path, tmp_path: Path, layout: dict[str, Any], head: str
) -> None:
    tensors = write(tmp_path, layout, markov_head_type=head)
    with load(target, tmp_path) as llm:
        network = llm.engine.runtime.worker.network
        state = network.state_dict()
        assert state.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(state[name].cpu(), tensor), name
        assert network.config.feature_layers == (1, 3)
        assert network.config.sample_from_anchor is (layout is FLAT)
        assert network.config.most_steps == (6 if layout is FLAT else 5)


def test_confidence_head_without_bias_loads(target: Path, tmp_path: Path) -> None:
    tensors = write(tmp_path, FLAT)
    del tensors["confidence_head.proj.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with load(target, tmp_path) as llm:
        assert llm.engine.runtime.worker.network.confidence_head.proj.bias.tolist() == [0]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"markov_head_type": "lstm"}, "markov_head_type='lstm' is not supported, expected one of"),
        ({"markov_rank": -1}, "markov_rank=-1, expected a number of at least 0"),
        ({"markov_rank": None}, "markov_rank=None, expected a number of at least 0"),
        ({"markov_rank": 0}, "confidence_head_with_markov=True and markov_rank=0, expected"),
        ({"block_size": 0}, "block_size=0, expected at least 1"),
    ],
)
def test_a_config_that_cannot_work_is_refused(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**FLAT, **changes}))
    with pytest.raises(CheckpointError, match=told):
        read_config(tmp_path)


class SpyWorker(DSparkWorker):
    """Keeps what the heads read, and what they chose."""

    seen: list[tuple[Tensor, ...]]
    rows: Tensor

    def _choose(self, batch: Batch, roots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        tokens, scores = super()._choose(batch, roots, hidden)
        noise = self._noise(batch, tokens.shape[1])
        self.seen.append(tuple(x.clone() for x in (roots, hidden, tokens, scores, noise)))
        return tokens, scores

    def _hidden(self, *arguments: Any) -> Tensor:
        self.rows = super()._hidden(*arguments)
        return self.rows

    def _tree(self, batch: Batch, roots: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
        drafted = super()._tree(batch, roots, *arguments)
        noise = self._noise(batch, self.rows.shape[1] - self._first_row)
        self.seen.append(tuple(x.clone() for x in (roots, self.rows, *drafted, noise)))
        return drafted

    def _noise(self, batch: Batch, steps: int) -> Tensor:
        if batch.greedy:
            return torch.zeros(1)
        ahead = torch.arange(1, steps + 1, device=batch.seq_lens.device)
        ids = torch.arange(VOCAB, device=ahead.device)
        return self._runtime.gumbel_noise(batch, batch.seq_lens.unsqueeze(1) + ahead, ids)


class Spy(DSpark):
    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, ...]] = []

    @hookimpl
    def create_worker(self, runtime: Runtime) -> DSparkWorker:
        worker = SpyWorker(runtime)
        worker.seen = self.seen
        return worker


class Heads:
    """The heads written out again, for one block at a time."""

    def __init__(self, tensors: dict[str, Tensor], target: Path, kind: str) -> None:
        from safetensors.torch import load_file

        stored = load_file(target / "model.safetensors")
        own = tensors.get("lm_head.weight")
        name = "lm_head.weight" if "lm_head.weight" in stored else "model.embed_tokens.weight"
        self.lm_head = stored[name] if own is None else own
        self.ids = torch.arange(len(self.lm_head)) + tensors.get("d2t", torch.zeros(1).long())
        self.w, self.kind = tensors, kind

    def latent(self, h: Tensor, e: Tensor, s: Tensor) -> tuple[Tensor, Tensor]:
        w = {n.removeprefix("markov_head."): t for n, t in self.w.items()}
        if self.kind == "vanilla":
            return e, s
        if self.kind == "gated":
            gate = w["gate_proj.weight"] @ torch.cat((h, e)) + w["gate_proj.bias"]
            return e / (1 + (-gate).exp()), s
        joint = w["joint_proj.weight"] @ torch.cat((s, e, h)) + w["joint_proj.bias"]
        keep = 1 / (1 + (-joint[:RANK]).exp())
        s = keep * s + (1 - keep) * joint[RANK : 2 * RANK].tanh()
        return joint[2 * RANK :].tanh(), s

    def draw(
        self, root: int, hidden: Tensor, first: int, temperature: float, noise: Tensor
    ) -> tuple[list[int], list[float], list[float]]:
        """Return tokens, their log-probabilities, and the logs of their confidences."""
        table = self.w["markov_head.markov_w1.weight"]
        before, state = root, torch.zeros(RANK, dtype=torch.float64)
        tokens, logs, sure = [], [], []
        for row, h in enumerate(hidden):
            e = table[before]
            z, state = self.latent(h, e, state)
            if row < first:
                continue
            logits = self.lm_head @ h + self.w["markov_head.markov_w2.weight"] @ z
            if temperature:
                logits = logits / temperature + noise[len(tokens), self.ids]
            best = int(logits.argmax())
            logs.append(float(logits[best] - logits.logsumexp(-1)))
            if "confidence_head.proj.weight" in self.w:
                weight = self.w["confidence_head.proj.weight"][0]
                read = torch.cat((h, e))[: len(weight)]
                logit = weight @ read + self.w["confidence_head.proj.bias"][0]
                sure.append(-float((1 + (-logit).exp()).log()))
            before = int(self.ids[best])
            tokens.append(before)
        return tokens, logs, sure

    def expand(
        self, root: int, hidden: Tensor, first: int, temperature: float, noise: Tensor, topk: int
    ) -> dict[tuple[int, ...], float]:
        """Return the paths that EAGLE-2 expands, and the logarithms of their probabilities."""
        table = self.w["markov_head.markov_w1.weight"]
        state = torch.zeros(RANK, dtype=torch.float64)
        if first:
            _, state = self.latent(hidden[0], table[root], state)
        level = [((), 0.0, state)]
        found: dict[tuple[int, ...], float] = {}
        for row, h in enumerate(hidden[first:]):
            children = []
            for path, total, state in level:
                before = path[-1] if path else root
                z, after = self.latent(h, table[before], state)
                logits = self.lm_head @ h + self.w["markov_head.markov_w2.weight"] @ z
                if temperature:
                    logits = logits / temperature + noise[row, self.ids]
                logs, best = logits.log_softmax(-1).topk(topk)
                for log, token in zip(logs.tolist(), self.ids[best].tolist(), strict=True):
                    children.append(((*path, token), total + log, after))
            found |= {path: total for path, total, _ in children}
            level = sorted(children, key=lambda child: -child[1])[:topk]
        return found


@pytest.mark.parametrize("confidence", [None, False, True], ids=["none", "hidden", "markov"])
@pytest.mark.parametrize("anchor", [False, True])
@pytest.mark.parametrize("head", TYPES)
@pytest.mark.parametrize(
    ("layout", "temperature"), [(FLAT, 0.0), (FLAT, 0.8), (NESTED, 0.0), (NESTED, 0.8)]
)
def test_blocks_are_those_of_the_plain_heads(
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    layout: dict[str, Any],
    temperature: float,
    head: str,
    anchor: bool,
    confidence: bool | None,
) -> None:
    changes = {
        "markov_head_type": head,
        "sample_from_anchor": anchor,
        "enable_confidence_head": confidence is not None,
        "confidence_head_with_markov": bool(confidence),
    }
    heads = Heads(write(tmp_path, layout, **changes), target, head)
    spy = Spy()
    with load(target, tmp_path, spy, speculative_num_steps=4) as llm:
        spy.seen.clear()
        params = SamplingParams(max_tokens=6, temperature=temperature, seed=3)
        llm.generate(prompts[:2], params)
    blocks = 0
    for roots, hidden, tokens, scores, noise in spy.seen:
        for i, root in enumerate(roots.tolist()):
            row = noise[i] if temperature else noise
            drawn, logs, sure = heads.draw(root, hidden[i], 0 if anchor else 1, temperature, row)
            assert tokens[i].tolist() == drawn
            wanted = logs if confidence is None else sure
            assert scores[i].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)
            blocks += 1
    assert blocks >= 4


@pytest.mark.parametrize("head", TYPES)
@pytest.mark.parametrize(
    ("layout", "temperature"), [(FLAT, 0.0), (FLAT, 0.8), (NESTED, 0.0), (NESTED, 0.8)]
)
def test_trees_have_the_likeliest_paths_of_the_plain_heads(
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    layout: dict[str, Any],
    temperature: float,
    head: str,
) -> None:
    """A head's state follows each path, also of nodes that are not the first child."""
    heads = Heads(write(tmp_path, layout, markov_head_type=head), target, head)
    first, topk, nodes = 0 if layout is FLAT else 1, 3, 12
    settings = {"speculative_eagle_topk": topk, "speculative_num_draft_tokens": nodes}
    spy = Spy()
    with load(target, tmp_path, spy, speculative_num_steps=4, **settings) as llm:
        spy.seen.clear()
        params = SamplingParams(max_tokens=6, temperature=temperature, seed=3)
        llm.generate(prompts[:2], params)
    ranks = set()
    assert len(spy.seen) >= 2
    for roots, hidden, tokens, parents, scores, noise in spy.seen:
        for i, root in enumerate(roots.tolist()):
            row = noise[i] if temperature else noise
            found = heads.expand(root, hidden[i], first, temperature, row, topk)
            best = sorted(found, key=lambda path: -found[path])[: nodes - 1]
            paths: list[tuple[int, ...]] = [()]
            drawn = zip(tokens[i, 1:], parents[i, 1:], scores[i, 1:], strict=True)
            for token, parent, score in drawn:
                above = paths[int(parent)]
                paths.append((*above, int(token)))
                wanted = found[paths[-1]] - found.get(above, 0.0)
                assert float(score) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
                ranks.add((len(above), int(parent)))
            assert set(paths[1:]) == set(best)
    assert len({parent for depth, parent in ranks if depth}) > 2, "all paths are one chain"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("confidence", [False, True])
def test_without_a_markov_head_blocks_are_dflashs(
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    confidence: bool,
    temperature: float,
) -> None:
    """Each token is the likeliest of its row, and a confidence head scores it all the same."""
    changes = {"enable_confidence_head": confidence, "confidence_head_with_markov": False}
    tensors = write(tmp_path, NESTED, markov_rank=0, **changes)
    zeros = {
        "markov_head.markov_w1.weight": torch.zeros(VOCAB, RANK, dtype=torch.float64),
        "markov_head.markov_w2.weight": torch.zeros(DRAFT_VOCAB, RANK, dtype=torch.float64),
    }
    heads = Heads(tensors | zeros, target, "vanilla")
    spy = Spy()
    with load(target, tmp_path, spy, speculative_num_steps=4) as llm:
        spy.seen.clear()
        llm.generate(prompts[:2], SamplingParams(max_tokens=6, temperature=temperature, seed=3))
    assert spy.seen
    for roots, hidden, tokens, scores, noise in spy.seen:
        for i, root in enumerate(roots.tolist()):
            row = noise[i] if temperature else noise
            drawn, logs, sure = heads.draw(root, hidden[i], 1, temperature, row)
            assert tokens[i].tolist() == drawn
            wanted = sure if confidence else logs
            assert scores[i].tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-5)


@pytest.mark.parametrize(
    ("head", "topk", "overlap", "page_size", "chunk", "slots"),
    [
        ("vanilla", 1, True, 16, 8, None),
        ("gated", 1, False, 1, None, 90),
        ("rnn", 1, True, 1, None, 90),
        ("rnn", 3, False, 16, 8, None),
    ],
)
def test_tokens_of_each_head_are_those_of_none(
    target: Path,
    prompts: list[list[int]],
    expected: Tokens,
    tmp_path: Path,
    head: str,
    topk: int,
    overlap: bool,
    page_size: int,
    chunk: int | None,
    slots: int | None,
) -> None:
    """A pool of few slots retracts requests."""
    write(tmp_path, NESTED if overlap else FLAT, markov_head_type=head)
    with load(
        target,
        tmp_path,
        speculative_num_steps=4,
        speculative_eagle_topk=topk,
        speculative_num_draft_tokens=5 if topk == 1 else 11,
        disable_overlap_schedule=not overlap,
        page_size=page_size,
        chunked_prefill_size=chunk,
        max_running_requests=3,
        **({"max_total_tokens": slots} if slots else {}),
    ) as llm:
        assert tokens_of(llm, prompts) == expected
        llm.check_pool()
        assert bool(llm.stats()["retractions"]) is (slots is not None)


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("DSPARK", default_completion)
