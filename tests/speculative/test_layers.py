"""The layers of draft networks are those of transformers' models, packed or not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from specplug import (
    LLM,
    AlgorithmInfo,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    hookimpl,
    layers,
)
from specplug.kernels.cpu_kernels import CPUKernels
from specplug.kernels.kernel_table import c_declined
from specplug.speculative.last_rows import LastRows, WantedRows, Written
from specplug.speculative.paged_plan import LentPlan, PagedKVCache, RequestSlots
from specplug.speculative.runtime import KVCache

H, HEADS, KV_HEADS, D, ROWS = 32, 4, 2, 8, 7


def fill(module: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize(
    "scaling",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        },
        {"rope_parameters": {"rope_type": "default", "rope_theta": 300.0}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
    ],
    ids=str,
)
def test_rotary_is_that_of_transformers(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    shape = {"hidden_size": D * HEADS, "num_attention_heads": HEADS, "head_dim": D}
    config = LlamaConfig(**shape, max_position_embeddings=64, **scaling)
    positions = torch.tensor([0, 1, 5, 63, 7])
    q = torch.randn(len(positions), HEADS, D)
    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    expected, _ = apply_rotary_pos_emb(*[q.transpose(0, 1).unsqueeze(0)] * 2, cos, sin)
    rotary = layers.Rotary({"max_position_embeddings": 64, **scaling}, D, 64)
    found = layers.rotate(q, *rotary(positions))
    torch.testing.assert_close(found, expected.squeeze(0).transpose(0, 1))


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "dynamic", "factor": 4.0},
        {
            "rope_type": "longrope",
            "short_factor": [1.0, 1.5, 2.0, 3.0],
            "long_factor": [4.0, 6.0, 8.0, 9.0],
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ],
    ids=lambda scaling: scaling["rope_type"],
)
def test_rotary_of_a_growing_sequence_is_that_of_each_length(scaling: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    trained = 16 if scaling["rope_type"] == "dynamic" else 64
    keys = {"max_position_embeddings": trained, "rope_scaling": scaling}
    module = LlamaRotaryEmbedding(
        LlamaConfig(hidden_size=D, num_attention_heads=1, head_dim=D, **keys)
    )
    cos, _ = layers.Rotary(keys, D, 64)(torch.arange(64))
    prompt, _ = module(torch.empty(0), torch.arange(9).unsqueeze(0))
    torch.testing.assert_close(cos[:9, 0], prompt[0])
    for position in range(9, 64):
        own, _ = module(torch.empty(0), torch.tensor([[position]]))
        torch.testing.assert_close(cos[position], own[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("norm_eps", [None, 1e-5])
def test_packing_changes_nothing(bias: bool, norm_eps: float | None) -> None:
    projection = layers.QKVProjection(2 * H, H, HEADS, KV_HEADS, D, bias=bias, norm_eps=norm_eps)
    mlp = layers.GatedMLP(H, 48, bias=bias)
    network = nn.ModuleList([projection, mlp]).to(torch.float64)
    fill(network)
    x, y = torch.randn(ROWS, 2 * H).double(), torch.randn(ROWS, H).double()
    cos, sin = layers.Rotary({}, D, ROWS).to(torch.float64)(torch.arange(ROWS))

    def results() -> list[Tensor]:
        return [*projection.qkv(x, cos, sin), mlp(y)]

    plain = results()
    assert [t.shape for t in plain[:3]] == [(ROWS, n, D) for n in (HEADS, KV_HEADS, KV_HEADS)]
    apart = projection.queries(x, cos, sin), *projection.kv(x, cos, sin)
    for found, expected in zip(apart, plain[:3], strict=True):
        assert torch.equal(found, expected)
    layers.pack(network)
    apart = projection.queries(x, cos, sin), *projection.kv(x, cos, sin)
    for found, expected in zip((*results(), *apart), (*plain, *plain[:3]), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_feed_forward_and_norm_are_those_of_llama() -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

    ours = layers.GatedMLP(H, 48), layers.RMSNorm(H, 1e-5)
    theirs = LlamaMLP(LlamaConfig(hidden_size=H, intermediate_size=48)), LlamaRMSNorm(H, 1e-5)
    for mine, other in zip(ours, theirs, strict=True):
        fill(other)
        mine.load_state_dict(other.state_dict())
        x = torch.randn(ROWS, H)
        torch.testing.assert_close(mine(x), other(x))


def test_packed_weights_are_not_kept_twice() -> None:
    layer = layers.DecoderLayer(32, 48, 4, 2, 8, 1e-6)
    layers.pack(layer)
    for module, parts in (
        (layer.self_attn, ("q_proj", "k_proj", "v_proj")),
        (layer.mlp, ("gate_proj", "up_proj")),
    ):
        storages = {getattr(module, part).weight.untyped_storage().data_ptr() for part in parts}
        assert storages == {module.packed[0].untyped_storage().data_ptr()}


def test_packed_weights_are_transposed_on_the_cpu() -> None:
    layer = layers.DecoderLayer(H, 48, HEADS, KV_HEADS, D, 1e-6)
    fill(layer)
    before = {name: parameter.clone() for name, parameter in layer.named_parameters()}
    layers.pack(layer)
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter, before[name])
        assert parameter.dim() == 1 or parameter.stride(0) == 1
    joint = layer.self_attn.q_proj.weight.untyped_storage().data_ptr()
    assert joint == layer.self_attn.v_proj.weight.untyped_storage().data_ptr()


def test_head_that_shares_an_embedding_stays() -> None:
    network = nn.ModuleDict({"embed": nn.Embedding(20, H), "head": nn.Linear(H, 20, bias=False)})
    network["head"].weight = network["embed"].weight
    layers.pack(network)
    assert network["embed"].weight.is_contiguous()


def test_weights_of_a_large_draft_are_not_kept_twice(
    cpu_kernels: CPUKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    for most, is_small in ((10**6, True), (1000, False)):
        monkeypatch.setattr("specplug.kernels.cpu_kernels._MOST_TWICE_BYTES", most)
        weight = torch.randn(20, H)
        layers.pack_weights([weight])
        assert hasattr(weight, "specplug_panels") == is_small
        x = torch.randn(3, H)
        torch.testing.assert_close(layers.linear(x, weight), x @ weight.t())
        torch.testing.assert_close(
            layers.linear(x.double(), weight.double()), x.double() @ weight.double().t()
        )


def test_products_of_many_rows_have_few_sizes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layers, "has_kernels", lambda x: True)
    sizes, plain = set(), nn.functional.linear

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.add(len(x))
        return plain(x, weight, bias)

    monkeypatch.setattr(nn.functional, "linear", counted)
    weight, bias = torch.randn(20, H), torch.randn(20)
    for rows in (65, 96, 97, 130, 2047, 2049):
        x, residual = torch.randn(rows, H), torch.randn(rows, 20)
        found = layers.linear(x, weight, bias, residual)
        torch.testing.assert_close(found, residual + (x @ weight.t() + bias))
    assert sizes == {96, 128, 192, 2048, 2049}


def packed_layer(kernels: CPUKernels | None) -> layers.DecoderLayer:
    layer = layers.DecoderLayer(H, 48, HEADS, KV_HEADS, D, 1e-6)
    fill(layer)
    with c_declined(kernels is None):
        layers.pack(layer)
    assert layer.mlp._kernels is kernels
    return layer


def test_layer_of_the_cpus_kernels_is_torchs(cpu_kernels: CPUKernels) -> None:
    results = []
    for used in (None, cpu_kernels):
        layer = packed_layer(used)
        torch.manual_seed(1)
        x, turn = torch.randn(ROWS, H), torch.randn(2, ROWS, 1, D)
        with torch.inference_mode():
            results.append(layer(x, (turn[0], turn[1]), 0, lambda _, q, k, v: q.flatten(1)))
    torch.testing.assert_close(*results)


@pytest.mark.parametrize("normed", [False, True])
def test_layer_as_one_kernel_is_its_parts(cpu_kernels: CPUKernels, normed: bool) -> None:
    """Over pages, with a window in its second layer; ``rows`` has it run part by part."""
    rows, heads, size = 6, 4, 16
    layer = layers.DecoderLayer(
        32, 48, heads, 2, size, 1e-6, bias=normed, output_bias=normed, qk_norm=normed,
        input_norm=normed,
    )  # fmt: skip
    fill(layer)
    layers.pack(layer)
    assert layer._weights is not None
    slots = RequestSlots(
        slots=torch.arange(1, 41).unsqueeze(0), last_position=39, cpu_kernels=cpu_kernels
    )
    req_indices, starts = torch.tensor([0]), torch.tensor([9])
    results = []
    with torch.inference_mode():
        x, (cos, sin) = torch.randn(rows, 32), torch.randn(2, rows, 1, size)
        for wanted in (None, torch.arange(rows)):
            torch.manual_seed(2)
            keys, values = torch.randn(2, 2, 41, 2, size).unbind(0)
            cache = PagedKVCache(list(keys.unbind(0)), list(values.unbind(0)))
            plan = LentPlan.of(slots, 40, req_indices, starts, rows, 0, None, None)
            attend = layers.PagedAttend(cache, [plan, plan], (None, 5))
            out = layer(layer(x, (cos, sin), 0, attend, wanted), (cos, sin), 1, attend, wanted)
            results.append((out, keys, values))
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("in_c", [False, True])
def test_last_rows_are_those_of_the_whole_layer(cpu_kernels: CPUKernels, in_c: bool) -> None:
    """And all rows leave their keys and values, also if none is wanted."""
    kernels = cpu_kernels if in_c else None
    layer = packed_layer(kernels)
    slots = RequestSlots(
        slots=torch.arange(1, 41).view(2, 20), last_position=19, cpu_kernels=kernels
    )
    requests, starts, widths = torch.tensor([0, 1]), torch.tensor([4, 9]), (5, 2)
    last = torch.tensor([4, 6])
    results = []
    with torch.inference_mode():
        x, (cos, sin) = torch.randn(ROWS, H), torch.randn(2, ROWS, 1, D)
        plan = LentPlan.of(slots, 20, requests, starts, widths, 0, None, None)
        ends = starts + torch.tensor(widths) - 1
        wanted = WantedRows(last, LentPlan.of(slots, 20, requests, ends, 1, 0, None, None))
        for kind in ("whole", "last", "none"):
            torch.manual_seed(2)
            keys, values = torch.randn(2, 41, KV_HEADS, D).unbind(0)
            cache, out = PagedKVCache([keys], [values]), None
            if kind == "whole":
                out = layer(x, (cos, sin), 0, layers.PagedAttend(cache, plan))[last]
            elif kind == "last":
                out = layer(x, (cos, sin), 0, LastRows(cache, plan, 0, wanted))
            else:
                with pytest.raises(Written):
                    layer(x, (cos, sin), 0, LastRows(cache, plan, 0, None))
            results.append((out, keys, values))
    whole, *others = results
    for found in others:
        for own, expected in zip(found, whole, strict=True):
            if own is not None:
                torch.testing.assert_close(own, expected, rtol=1e-5, atol=1e-4)


def test_parts_of_packed_heads_are_not_copied(cpu_kernels: CPUKernels) -> None:
    """Where they begin with a panel; else torch computes their product."""
    weight = torch.randn(3 * cpu_kernels._panel_columns, 8)
    whole = cpu_kernels.panels(weight)
    columns = cpu_kernels._panel_columns
    part = whole.of_outputs(columns, 3 * columns)
    assert part is not None
    assert part.columns.data_ptr() > whole.columns.data_ptr()
    x = torch.randn(2, 8)
    torch.testing.assert_close(part.linear(x), x @ weight[columns:].T)
    assert whole.of_outputs(columns // 2, 3 * columns) is None
    assert whole.of_outputs(0, columns // 2) is None


def test_paged_attend_takes_a_plan_for_all_layers() -> None:
    class Plan:
        def attend(self, *given: Any, window: int | None) -> Tensor:
            return given[2] if window is None else given[3]

    plan: Any = Plan()
    q, k, v = torch.zeros(3), torch.ones(3), torch.ones(3)
    assert layers.PagedAttend(KVCache(), plan)(7, q, k, v) is q
    assert layers.PagedAttend(KVCache(), [plan, plan], (None, 3))(1, q, k, v) is k
    assert packed_layer(None)._weights is None


def test_joined_norms_in_c_are_those_of_each(cpu_kernels: CPUKernels) -> None:
    norms = [layers.RMSNorm(H, 1e-5), layers.RMSNorm(2 * H, 1e-6)]
    inputs = [torch.randn(ROWS, 3 * H)[:, :H], torch.randn(ROWS, 2 * H)]
    for norm in norms:
        fill(norm)
    expected = torch.cat([norm(x) for norm, x in zip(norms, inputs, strict=True)], dim=1)
    for packed in norms:  # the second has none at first
        packed.pack()
        assert packed._kernels is cpu_kernels
        found = layers.joined_norms(*zip(norms, inputs, strict=True))
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_rows_that_the_cpus_kernels_know_not_are_torchs(cpu_kernels: CPUKernels) -> None:
    """Of more axes, and of a layer that was cast after it was packed."""
    plain, layer = packed_layer(None), packed_layer(cpu_kernels)
    rows = torch.randn(2, ROWS, H)
    torch.testing.assert_close(layer.mlp(rows), plain.mlp(rows))
    norm, own = layer.post_attention_layernorm, plain.post_attention_layernorm
    norm.double(), own.double()
    assert torch.equal(norm(rows[0].double()), own(rows[0].double()))
    with pytest.raises(RuntimeError):
        norm(torch.randn(ROWS, H - 1))


class Loading:
    """Packs a layer while its run loads the draft, after ``first`` was called."""

    def __init__(self, first: Callable[[], None]) -> None:
        self._first = first

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="LOADING", summary="Packs a layer", api_version=1)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Loading:
        self._first()
        self.layer = layers.DecoderLayer(H, 48, HEADS, KV_HEADS, D, 1e-6)
        layers.pack(self.layer)
        return self

    @hookimpl
    def build_draft_input(self, target_output: CommittedOutput) -> DraftInput:
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, draft_input: DraftInput) -> Draft:
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


def test_draft_has_the_kernels_of_its_run(cpu_kernels: CPUKernels, tiny_model: Path) -> None:
    """Whatever else runs in the process: another run is made in the midst of each."""
    made = {}
    for off in (True, False):

        def make_another(off: bool = off) -> None:
            LLM(tiny_model, device="cpu", disable_cpu_kernels=not off).close()

        draft = Loading(make_another)
        LLM(tiny_model, device="cpu", disable_cpu_kernels=off, speculative_algorithm=draft).close()
        made[off] = draft.layer.mlp._kernels
    assert made == {True: None, False: cpu_kernels}


@pytest.mark.parametrize("kernels", [False, True], ids=["torch", "kernels"])
def test_joined_norms_are_those_of_each(kernels: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    norms = [layers.RMSNorm(size, 1e-5) for size in (H, 3 * H)]
    monkeypatch.setattr(layers, "has_kernels", lambda x: kernels)
    with torch.no_grad():
        for norm in norms:
            fill(norm)
            norm.to(on, torch.float16)
        inputs = [torch.randn(ROWS, len(n.weight), device=on).half() for n in norms]
        parts = list(zip(norms, inputs, strict=True))
        expected = torch.cat([norm(x) for norm, x in parts], dim=1)
        assert torch.equal(layers.joined_norms(*parts), expected)


def test_rows_are_read_by_kernels_as_by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an embedding, and of rotary tables; rows that nobody reads have any positions."""
    on = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    embedding = layers.Embedding(11, H).to(on, torch.float16)
    rotary = layers.Rotary({}, D, ROWS).to(on, torch.float16)
    ids, positions = torch.tensor([[3, 0], [10, 3]], device=on), torch.arange(-2, ROWS, device=on)
    found = []
    for kernels in (False, True):
        monkeypatch.setattr(layers, "has_kernels", lambda x, on=kernels: on)
        with torch.no_grad():
            cos, sin = rotary(positions)
            found.append((embedding(ids), cos[2:], sin[2:]))
    for by_torch, by_kernels in zip(*found, strict=True):
        assert torch.equal(by_torch, by_kernels)
    assert found[1][0].shape == (2, 2, H)
