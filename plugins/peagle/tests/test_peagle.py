"""PEAGLE's checkpoints load, its drafts are those of its mathematics, its tokens are NONE's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
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
from safetensors.torch import load_file, save_file
from torch import Tensor

from specplug import (
    LLM,
    Batch,
    CheckpointError,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug_peagle import PEagle, algorithm

DRAFT_VOCAB, MASK, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 50, 96, 3, 4, 2, 8
DECODER = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "num_hidden_layers": LAYERS,
    "vocab_size": VOCAB,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "max_position_embeddings": CONTEXT,
}
NESTED = {
    "architectures": ["PEagleSpeculator"],
    "speculators_model_type": "peagle",
    "draft_vocab_size": DRAFT_VOCAB,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [1, 2, 3],
    "mask_token_id": MASK,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "embed_requires_grad": True,
    "transformer_layer_config": {"model_type": "llama", **DECODER},
}
FLAT = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    **DECODER,
    "draft_vocab_size": DRAFT_VOCAB,
    "parallel_drafting": True,
    "ptd_token_id": MASK,
    "eagle_aux_hidden_state_layer_ids": [0, 1, 2],
}
LAYOUTS = {"speculators": NESTED, "vllm": FLAT}


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


def shapes(options: frozenset[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a checkpoint, as ``speculators`` saves them."""
    found: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "mask_hidden": (1, 1, 3 * HIDDEN),
        "norm.weight": (HIDDEN,),
        "lm_head.weight": (DRAFT_VOCAB, HIDDEN),
        "embed_tokens.weight": (VOCAB, HIDDEN),
        "layers.0.hidden_norm.weight": (HIDDEN,),
    }
    if "fc_norm" in options:
        found |= {f"fc_norm.{i}.weight": (HIDDEN,) for i in range(3)}
    if "norm_before_fc" in options:
        found["input_norm.weight"] = (3 * HIDDEN,)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    for index in range(LAYERS):
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_DIM),
            "mlp.gate_proj.weight": (48, HIDDEN),
            "mlp.up_proj.weight": (48, HIDDEN),
            "mlp.down_proj.weight": (HIDDEN, 48),
            "input_layernorm.weight": (HIDDEN,),
            "post_attention_layernorm.weight": (HIDDEN,),
        }
        for name, count in rows.items():
            layer[f"self_attn.{name}_proj.weight"] = (count, HIDDEN if index else 2 * HIDDEN)
            if "bias" in options:
                layer[f"self_attn.{name}_proj.bias"] = (count,)
        if "bias" in options:
            layer["self_attn.o_proj.bias"] = (HIDDEN,)
        if "qk_norm" in options:
            layer |= {f"self_attn.{name}_norm.weight": (HEAD_DIM,) for name in "qk"}
        found |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return found


def write(
    folder: Path, layout: dict[str, Any] = NESTED, *options: str, **changes: Any
) -> dict[str, Tensor]:
    """Write a random checkpoint in float64 to a folder, and return its tensors.

    Args:
        options: ``fc_norm``, ``norm_output``, ``norm_before_fc`` and ``norm_before_residual``, keys
            of the config; ``bias`` and ``qk_norm``, which the tensors tell.
    """
    norms = {name: True for name in options if name.startswith(("norm", "fc"))}
    config = {k: v for k, v in {**layout, **norms, **changes}.items() if v is not None}
    torch.manual_seed(1)
    tensors = {
        name: torch.randn(shape, dtype=torch.float64) * 0.3
        for name, shape in shapes(frozenset(options)).items()
    }
    ids = torch.randperm(VOCAB)[:DRAFT_VOCAB].sort().values
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return tensors


def load(target: Path, draft: Path, plugin: PEagle = algorithm, **settings: Any) -> LLM:
    return LLM(
        target,
        dtype="float64",
        speculative_algorithm=plugin,
        speculative_draft_model_path=draft,
        **settings,
    )


def assert_loaded(llm: LLM, tensors: dict[str, Tensor]) -> None:
    state = llm.engine.runtime.worker.network.state_dict()
    renamed = {name.replace("layers.0.", "midlayer."): t for name, t in tensors.items()}
    assert state.keys() == renamed.keys()
    for name, tensor in renamed.items():
        assert torch.equal(state[name].cpu(), tensor), name


@pytest.mark.parametrize("layout", LAYOUTS)
def test_published_layouts_load(target: Path, tmp_path: Path, layout: str) -> None:
    tensors = write(tmp_path, LAYOUTS[layout])
    with load(target, tmp_path) as llm:
        config = llm.engine.runtime.worker.network.config
        assert config.aux_layer_ids == (1, 2, 3)
        assert (config.num_hidden_layers, config.mask_token_id) == (LAYERS, MASK)
        assert_loaded(llm, tensors)


@pytest.mark.parametrize("key", ["mask_token_id", "pard_token", "ptd_token_id"])
def test_mask_token_has_three_names(target: Path, tmp_path: Path, key: str) -> None:
    """Also as a string, as some of them are published."""
    write(tmp_path, FLAT, **{"ptd_token_id": None, key: "41"})
    with load(target, tmp_path) as llm:
        assert llm.engine.runtime.worker.network.config.mask_token_id == 41


def test_a_flat_mask_without_own_embedding_loads(target: Path, tmp_path: Path) -> None:
    """``mask_hidden`` with two axes, names under ``model.``; the target embeds the mask."""
    tensors = write(tmp_path, FLAT)
    del tensors["embed_tokens.weight"]
    flat = {**tensors, "mask_hidden": tensors["mask_hidden"][0]}
    save_file({f"model.{n}": t for n, t in flat.items()}, tmp_path / "model.safetensors")
    with load(target, tmp_path) as llm:
        assert_loaded(llm, tensors)


def test_unfit_checkpoints_are_refused(target: Path, tmp_path: Path) -> None:
    write(tmp_path, NESTED, mask_token_id=VOCAB)
    with pytest.raises(CheckpointError, match="is 97; expected an id of the vocabulary of 97"):
        load(target, tmp_path)
    write(tmp_path, NESTED, mask_token_id=None)
    with pytest.raises(CheckpointError, match=r"\(mask_token_id, pard_token, ptd_token_id\) is No"):
        load(target, tmp_path)
    write(tmp_path, FLAT, ptd_token_id="none")
    with pytest.raises(CheckpointError, match="is 'none'; expected an id"):
        load(target, tmp_path)
    write(tmp_path, NESTED, speculators_model_type="eagle3")
    with pytest.raises(CheckpointError, match="'eagle3'; expected 'peagle'"):
        load(target, tmp_path)
    tensors = write(tmp_path, NESTED)
    del tensors["mask_hidden"], tensors["layers.2.mlp.up_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError) as error:
        load(target, tmp_path)
    assert "missing mask_hidden [1, 1, 96]" in str(error.value)
    assert "missing layers.2.mlp.up_proj.weight [48, 32]" in str(error.value)


class Spy(PEagle):
    """Keeps what it proposed: the root's position, the path to each node and the node's score, and
    the noise; and the rows of the passes that ``propose`` ran."""

    def __init__(self) -> None:
        self.drafts: list[tuple[int, dict[tuple[int, ...], float], Tensor]] = []
        self.passes: list[list[int]] = []

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker, rows = runtime.worker, []
        forward = worker.forward

        def counted(tokens: Tensor, *rest: Any) -> Tensor:
            rows.append(len(tokens))
            result: Tensor = forward(tokens, *rest)
            return result

        worker.forward = counted
        draft = super().propose(runtime, batch, draft_input)
        worker.forward = forward
        self.passes.append(rows)
        ids = torch.arange(DRAFT_VOCAB) + worker.network.d2t
        for i, start in enumerate(batch.seq_lens.tolist()):
            places = start + torch.arange(1, draft.depth + 1).expand(batch.size, -1)
            noise = runtime.gumbel_noise(batch, places, ids)[i]
            assert draft.scores is not None
            chain = range(-1, draft.width - 1)
            parents = chain if draft.parents is None else draft.parents[i].tolist()
            paths: list[tuple[int, ...]] = []
            for token, parent in zip(draft.tokens[i].tolist(), parents, strict=True):
                paths.append((*(paths[parent] if parent >= 0 else ()), token))
            scores = dict(zip(paths, draft.scores[i].tolist(), strict=True))
            self.drafts.append((int(start), scores, noise))
        return draft


class Reference:
    """The network written out again, over a whole sequence and the masks after it."""

    def __init__(self, draft: Path, target: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.w = load_file(draft / "model.safetensors")
        self.config = json.loads((draft / "config.json").read_text())
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float64).eval()
        self.ids = torch.arange(DRAFT_VOCAB) + self.w["d2t"]

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * self.w[f"{name}.weight"]

    def fuse(self, aux: Tensor) -> Tensor:
        if "input_norm.weight" in self.w:
            aux = self.norm(aux, "input_norm")
        if "fc_norm.0.weight" in self.w:
            parts = enumerate(aux.chunk(3, dim=1))
            aux = torch.cat([self.norm(part, f"fc_norm.{i}") for i, part in parts], dim=1)
        return aux @ self.w["fc.weight"].T

    def rotate(self, x: Tensor) -> Tensor:
        inverse = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * inverse
        left, right = x[..., : HEAD_DIM // 2], x[..., HEAD_DIM // 2 :]
        cos, sin = angle.cos(), angle.sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)

    def project(self, x: Tensor, name: str) -> Tensor:
        bias = self.w.get(f"{name}.bias", torch.zeros(1, dtype=torch.float64))
        return x @ self.w[f"{name}.weight"].T + bias

    def layer(self, name: str, x: Tensor, residual: Tensor) -> Tensor:
        n = len(x)
        q, k, v = (self.project(x, f"{name}.self_attn.{p}_proj") for p in "qkv")
        q, k, v = (each.view(n, -1, HEAD_DIM) for each in (q, k, v))
        if f"{name}.self_attn.q_norm.weight" in self.w:
            q, k = (self.norm(x, f"{name}.self_attn.{p}_norm") for x, p in ((q, "q"), (k, "k")))
        k, v = (each.repeat_interleave(HEADS // KV_HEADS, 1) for each in (self.rotate(k), v))
        scores = torch.einsum("qhd,khd->hqk", self.rotate(q), k) * HEAD_DIM**-0.5
        scores = scores.masked_fill(~torch.ones(n, n, dtype=torch.bool).tril(), -torch.inf)
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).reshape(n, -1)
        hidden = residual + self.project(mixed, f"{name}.self_attn.o_proj")
        y = self.norm(hidden, f"{name}.post_attention_layernorm")
        gate, up = (self.project(y, f"{name}.mlp.{part}_proj") for part in ("gate", "up"))
        return hidden + self.project(F.silu(gate) * up, f"{name}.mlp.down_proj")

    @torch.inference_mode()
    def logits(self, committed: list[int], steps: int) -> Tensor:
        """[steps, V_draft] of the tokens after ``committed``, whose last one is the root."""
        out = self.model(torch.tensor([committed[:-1]]), output_hidden_states=True, use_cache=False)
        aux = torch.cat([out.hidden_states[i][0] for i in (1, 2, 3)], dim=1)
        masks = self.w["mask_hidden"].view(1, -1).expand(steps - 1, -1)
        hidden = self.fuse(torch.cat((aux, masks)))
        table = self.w.get("embed_tokens.weight", self.model.get_input_embeddings().weight)
        embeds = table[torch.tensor([*committed[1:], *[MASK] * (steps - 1)])]
        normed = self.norm(hidden, "layers.0.hidden_norm")
        first = torch.cat((self.norm(embeds, "layers.0.input_layernorm"), normed), dim=1)
        residual = normed if self.config.get("norm_before_residual") else hidden
        hidden = self.layer("layers.0", first, residual)
        for index in range(1, LAYERS):
            name = f"layers.{index}"
            hidden = self.layer(name, self.norm(hidden, f"{name}.input_layernorm"), hidden)
        return self.norm(hidden, "norm")[-steps:] @ self.w["lm_head.weight"].T


OPTIONS = [
    (),
    ("qk_norm", "norm_before_residual"),
    ("bias", "norm_before_fc"),
    ("fc_norm", "norm_output"),
]


def best_paths(logs: Tensor, ids: Tensor, topk: int, nodes: int) -> dict[tuple[int, ...], float]:
    """The paths that survive most likely, and the last node's score, of log-probabilities
    [steps, V_draft] that depend on nothing before them."""
    level: list[tuple[float, tuple[int, ...], float]] = [(0.0, (), 0.0)]
    every = []
    for row in logs:
        best = row.topk(topk)
        pairs = list(zip(best.values.tolist(), ids[best.indices].tolist(), strict=True))
        level = [(s + score, (*p, token), score) for s, p, _ in level for score, token in pairs]
        every += level
    every.sort(key=lambda each: -each[0])
    return {path: score for _, path, score in every[: nodes - 1]}


@pytest.mark.parametrize("shape", [(1, 5), (2, 9), (3, 6)], ids=["chain", "tree", "narrow tree"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_are_those_of_the_plain_network(
    target: Path,
    prompts: list[list[int]],
    tmp_path: Path,
    options: tuple[str, ...],
    temperature: float,
    shape: tuple[int, int],
) -> None:
    write(tmp_path, NESTED, *options)
    spy, steps = Spy(), 4
    topk, nodes = shape
    settings = {
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": nodes,
        "disable_overlap_schedule": True,
        "chunked_prefill_size": 8,
    }
    with load(target, tmp_path, spy, speculative_num_steps=steps, **settings) as llm:
        spy.drafts.clear()
        spy.passes.clear()
        params = SamplingParams(max_tokens=8, temperature=temperature, seed=3)
        made = llm.generate([prompts[2]], params)[0]
    tokens = [*prompts[2], *made.token_ids]
    reference = Reference(tmp_path, target)
    assert len(spy.drafts) >= 2
    for start, scores, noise in spy.drafts:
        committed = tokens[: start + 1]
        logits = reference.logits(committed, steps)
        if temperature:
            logits = logits / temperature + noise
        expected = best_paths(logits.log_softmax(-1), reference.ids, topk, nodes)
        root = committed[-1:]
        wanted = {(*root, *path): score for path, score in expected.items()}
        assert scores == pytest.approx({tuple(root): 0.0, **wanted}, rel=1e-4, abs=1e-4)
    # One pass drafts all that the target has not seen.
    assert {tuple(rows) for rows in spy.passes} == {(steps - 1,)}


def test_nodes_may_be_fewer_than_steps(
    target: Path, prompts: list[list[int]], expected: Tokens, tmp_path: Path
) -> None:
    write(tmp_path)
    with load(
        target,
        tmp_path,
        speculative_num_steps=6,
        speculative_num_draft_tokens=3,
        max_running_requests=3,
    ) as llm:
        assert llm.effective_config["num_steps"] == 2
        assert tokens_of(llm, prompts) == expected


def test_shipped_weights_draft_for_the_default_model(default_completion: Completion) -> None:
    check_shipped_weights("PEAGLE", default_completion)
