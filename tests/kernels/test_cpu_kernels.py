"""The CPU's kernels: torch's results, a row's bits from nothing but the row, and none by default
where they cannot be had."""

from __future__ import annotations

import random
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import LLM
from specplug.kernels.attention_form import AttentionForm
from specplug.kernels.cpu_kernels import CPUKernels, CPURows, LayerWeights
from specplug.model.fused_norms import rms_norm

CONTEXT = 96
FORM = AttentionForm(0.2)


class Batch:
    """Requests whose slots stand anywhere in a pool; what is nobody's is NaN."""

    def __init__(self, starts: list[int], widths: list[int], heads: int, kv: int, size: int):
        self.generator = torch.Generator().manual_seed(len(starts))
        self.starts, self.widths = starts, widths
        slots = list(range(1, 1 + len(starts) * CONTEXT))
        random.Random(0).shuffle(slots)
        self.table = torch.zeros(len(starts) + 1, CONTEXT, dtype=torch.int64)
        self.keys, self.values = torch.full((2, len(slots) + 1, kv, size), float("nan"))
        self.keys[0] = self.values[0] = 0.0
        for b, (start, width) in enumerate(zip(starts, widths, strict=True)):
            own = torch.tensor(slots[b * CONTEXT : b * CONTEXT + start + width])
            self.table[b + 1, : len(own)] = own
            self.keys[own], self.values[own] = self.normal(2, len(own), kv, size)
        # Rows as they stand in a product with keys and values.
        self.q = self.normal(sum(widths), heads + 2 * kv, size)[:, :heads]

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def rows(self, mask: Tensor | None = None, offset: int = 0) -> CPURows:
        widths = torch.tensor([0, *self.widths])
        return CPURows(
            table=self.table,
            req_indices=torch.arange(1, len(self.starts) + 1),
            starts=torch.tensor(self.starts),
            first_rows=widths.cumsum(0),
            count=sum(self.widths),
            offset=offset,
            mask=mask,
        )

    def expected(self, window: int | None = None, mask: Tensor | None = None) -> Tensor:
        """By torch in float64, row by row."""
        out, row = [], 0
        for b, (start, width) in enumerate(zip(self.starts, self.widths, strict=True)):
            for i in range(width):
                seen = list(range(start + i + 1))
                if mask is not None:
                    seen = [j for j in range(start + width) if j < start or mask[b, i, j - start]]
                own = self.table[b + 1, seen[-(window or len(seen)) :]]
                k, v = self.keys[own].double(), self.values[own].double()
                q = self.q[row].double().unsqueeze(1)
                mixed = F.scaled_dot_product_attention(
                    q, k.transpose(0, 1), v.transpose(0, 1), scale=0.2, enable_gqa=True
                )
                out.append(mixed.flatten())
                row += 1
        return torch.stack(out)


@pytest.mark.parametrize("shape", [(4, 4, 32), (6, 2, 16), (2, 1, 48), (8, 1, 64)])
@pytest.mark.parametrize("window", [None, 1, 20])
def test_attention_is_torchs(
    cpu_kernels: CPUKernels, shape: tuple[int, int, int], window: int | None
) -> None:
    batch = Batch([0, 15, 16, 50, 3], [1, 1, 3, 5, 40], *shape)
    found = cpu_kernels.attend(
        batch.q, batch.keys, batch.values, batch.rows(), AttentionForm(0.2, window)
    )
    expected = batch.expected(window).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_attention_of_trees_is_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([0, 13, 31], [7, 7, 7], 4, 2, 32)
    mask = torch.rand(3, 7, 7, generator=batch.generator) < 0.5
    mask |= torch.eye(7, dtype=torch.bool)
    found = cpu_kernels.attend(batch.q, batch.keys, batch.values, batch.rows(mask), FORM)
    expected = batch.expected(mask=mask).float()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)


def test_bits_of_a_row_are_its_own(cpu_kernels: CPUKernels) -> None:
    batch = Batch([5, 0, 40, 17], [6, 33, 1, 6], 4, 2, 32)
    together = cpu_kernels.attend(batch.q, batch.keys, batch.values, batch.rows(), FORM)
    assert together is not None
    chains = torch.ones(1, 6, 6, dtype=torch.bool).tril()
    row = 0
    for b, (start, width) in enumerate(zip(batch.starts, batch.widths, strict=True)):
        q = batch.q[row : row + width]
        if width == 6:
            tree = CPURows(
                table=batch.table,
                req_indices=torch.tensor([b + 1]),
                starts=torch.tensor([start]),
                first_rows=torch.tensor([0, width]),
                count=width,
                mask=chains,
            )
            found = cpu_kernels.attend(q, batch.keys, batch.values, tree, FORM)
            assert found is not None
            assert torch.equal(found, together[row : row + width])
        for i in range(width):
            alone = CPURows(
                table=batch.table,
                req_indices=torch.tensor([b + 1]),
                starts=torch.tensor([start]),
                first_rows=torch.tensor([0, 1]),
                count=1,
                offset=i,
            )
            found = cpu_kernels.attend(q[i : i + 1], batch.keys, batch.values, alone, FORM)
            assert found is not None
            assert torch.equal(found[0], together[row + i])
        row += width


def test_what_attention_does_not_know_is_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([3], [2], 4, 2, 32)
    q, keys, values, rows = batch.q, batch.keys, batch.values, batch.rows()
    attend = partial(cpu_kernels.attend, form=FORM)
    assert attend(q, keys, values, rows) is not None
    assert attend(q, keys, values, rows, form=AttentionForm(0.2, softcap=5.0)) is None
    assert attend(q, keys, values, rows, form=AttentionForm(0.2, sinks=torch.zeros(4))) is None
    for other in (
        q.double(),
        q[:1],
        q.to("meta"),
        q[..., :31],
        q[..., ::2],
        q[:, 0],
        q.to_sparse(),
    ):
        assert attend(other, keys, values, rows) is None
    for other in (keys.double(), keys[:, :, ::2], keys.transpose(1, 2), keys[:, 0], keys[1:]):
        assert attend(q, other, values, rows) is None
    assert attend(q, keys.to("meta"), values.to("meta"), rows) is None
    assert attend(q, keys[..., :0], values[..., :0], rows) is None
    tree = batch.rows(torch.ones(1, 2, 2, dtype=torch.bool))
    assert attend(q, keys, values, tree, form=AttentionForm(0.2, 4)) is None


def test_indices_in_no_memory_are_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([3], [2], 4, 2, 32)
    attend = partial(cpu_kernels.attend, batch.q, batch.keys, batch.values, form=FORM)
    for name in ("table", "req_indices", "starts", "first_rows"):
        rows = batch.rows()
        own = getattr(rows, name)
        for other in (own.to("meta"), own.int(), own.unsqueeze(0), own.to_sparse()):
            assert attend(rows=attrs.evolve(rows, **{name: other})) is None
    mask = torch.ones(1, 2, 2, dtype=torch.bool)
    for other in (mask.to("meta"), mask.int(), mask[0], mask.expand(2, 2, 2)):
        assert attend(rows=batch.rows(other)) is None


@pytest.mark.parametrize(
    ("name", "value"),
    [("table", -1), ("table", 1 << 40), ("req_indices", 2), ("req_indices", -1), ("first_rows", 1)],
)
def test_attention_by_an_index_outside_is_refused(
    cpu_kernels: CPUKernels, name: str, value: int
) -> None:
    batch = Batch([3], [2], 4, 2, 32)
    rows = batch.rows()
    getattr(rows, name).view(-1)[-1 if name != "table" else CONTEXT + 2] = value
    with pytest.raises(IndexError, match="outside"):
        cpu_kernels.attend(batch.q, batch.keys, batch.values, rows, FORM)


def test_attention_by_a_mask_of_fewer_rows_is_refused(cpu_kernels: CPUKernels) -> None:
    batch = Batch([3], [2], 4, 2, 32)
    rows = batch.rows(torch.ones(1, 1, 2, dtype=torch.bool))
    with pytest.raises(IndexError, match="outside"):
        cpu_kernels.attend(batch.q, batch.keys, batch.values, rows, FORM)


@pytest.mark.parametrize("start", [15, 1 << 40, -(1 << 40)])
def test_rows_past_the_table_write_nothing_there(cpu_kernels: CPUKernels, start: int) -> None:
    """Of a sliding window; a plugin's committed lengths may be anything."""
    batch = Batch([0], [40], 5, 1, 80)
    rows = attrs.evolve(batch.rows(), table=batch.table[:, :17].contiguous())
    rows.starts.fill_(start)
    found = cpu_kernels.attend(batch.q, batch.keys, batch.values, rows, AttentionForm(0.2, 6))
    assert found is not None
    assert found.isfinite().all()


@pytest.mark.parametrize("size", [10, 160])
def test_norm_is_torchs(cpu_kernels: CPUKernels, size: int) -> None:
    x, weight = torch.randn(5, 2 * size)[:, :size], torch.rand(size)
    expected = rms_norm(x, weight, torch.tensor(1e-5))
    found = cpu_kernels.rms_norm(x, weight, 1e-5)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    for other in (x.double(), x.to("meta"), x[:, 1:], x[0], x.t()):
        assert cpu_kernels.rms_norm(other, weight, 1e-5) is None


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_rows_are_torchs(cpu_kernels: CPUKernels, normed: bool) -> None:
    heads, kv_heads, size = 4, 2, 10
    qkv, cos, sin = torch.randn(3, 8, size), torch.randn(3, 1, size), torch.randn(3, 1, size)
    norm = (torch.rand(6, size), torch.full((6, 1), 1e-5)) if normed else None
    turned = qkv[:, :6] if norm is None else rms_norm(qkv[:, :6], *norm)
    turned = turned * cos + turned.roll(size // 2, -1) * sin
    slots, v = torch.tensor([7, 2, 5]), qkv[:, 6:].clone()
    keys, values = torch.zeros(2, 9, kv_heads, size)
    before = qkv.clone()
    args = {"qkv": qkv, "cos": cos, "sin": sin, "slots": slots, "keys": keys, "values": values}
    for name, own in args.items():
        for other in (own.to("meta"), own[1:], own.half()):
            assert not cpu_kernels.rotate_and_write(**{**args, name: other}, norm=norm)
    for outside in (9, -1):
        args["slots"] = torch.tensor([7, 2, outside])
        with pytest.raises(IndexError, match="outside"):
            cpu_kernels.rotate_and_write(**args, norm=norm)
    assert torch.equal(qkv, before)
    assert not keys.any()
    assert not values.any()
    assert cpu_kernels.rotate_and_write(qkv, cos, sin, norm, slots, keys, values)
    torch.testing.assert_close(qkv[:, :heads], turned[:, :heads])
    torch.testing.assert_close(keys[slots], turned[:, heads:])
    assert torch.equal(values[slots], v)
    assert torch.equal(keys.any(-1).any(-1).nonzero().flatten(), slots.sort().values)


@pytest.mark.parametrize("size", [10, 416])
def test_gate_is_torchs(cpu_kernels: CPUKernels, size: int) -> None:
    both = torch.randn(3, 2 * size) * 30
    both[0, :4] = torch.tensor([-200.0, -88.0, 0.0, 200.0])
    expected = F.silu(both[:, :size]) * both[:, size:]
    torch.testing.assert_close(cpu_kernels.silu_and_mul(both), expected, rtol=1e-5, atol=1e-6)
    for other in (both.double(), both.to("meta"), both[:, 1:], both[0]):
        assert cpu_kernels.silu_and_mul(other) is None


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("shape", [(1, 5), (40, 16), (64, 96), (70, 33)])
def test_products_are_torchs(cpu_kernels: CPUKernels, shape: tuple[int, int], half: bool) -> None:
    outputs, inputs = shape
    wide, weight = torch.randn(29, 2 * inputs), torch.randn(outputs, inputs)
    weight = weight.bfloat16().float() if half else weight
    x, bias = wide[:, :inputs], torch.randn(outputs)
    residual = torch.randn(29, outputs + 3)[:, :outputs]
    panels = cpu_kernels.panels(weight)
    assert panels.half == half
    for own_bias, own_residual in ((None, None), (bias, None), (None, residual), (bias, residual)):
        expected = F.linear(x, weight, own_bias)
        expected = expected if own_residual is None else expected + own_residual
        found = cpu_kernels.linear(x, panels, own_bias, own_residual)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("half", [False, True])
def test_product_of_a_row_is_its_own(cpu_kernels: CPUKernels, half: bool) -> None:
    """From one row to more than have the weights made float first; and it is the same whether these
    are bfloat16 or float32 of the same value."""
    x, residual = torch.randn(53, 37), torch.randn(53, 45)
    weight, bias = torch.randn(45, 37).bfloat16().float(), torch.randn(45)
    panels = cpu_kernels.panels(weight)
    if not half:
        panels = attrs.evolve(panels, columns=panels.columns.float())
    assert panels.half == half
    exact = cpu_kernels.linear(x, cpu_kernels.panels(weight), bias, residual)
    whole = cpu_kernels.linear(x, panels, bias, residual)
    assert whole is not None
    assert exact is not None
    assert torch.equal(whole, exact)
    for rows in range(1, 53):
        first = cpu_kernels.linear(x[:rows], panels, bias, residual[:rows])
        last = cpu_kernels.linear(x[-rows:], panels, bias, residual[-rows:])
        assert first is not None
        assert last is not None
        assert torch.equal(first, whole[:rows])
        assert torch.equal(last, whole[-rows:])


def test_products_of_strange_tensors_are_torchs(cpu_kernels: CPUKernels) -> None:
    x, panels = torch.randn(3, 16), cpu_kernels.panels(torch.randn(8, 16))
    bias, residual = torch.randn(8), torch.randn(3, 8)
    for other in (x.double(), x.to("meta"), x[:, 1:], x[0], torch.randn(16, 16).t()[:3]):
        assert cpu_kernels.linear(other, panels) is None
    for other in (bias.double(), bias[1:], torch.randn(16)[::2]):
        assert cpu_kernels.linear(x, panels, other) is None
    for other in (residual.double(), residual[1:], torch.randn(8, 8).t()[:3]):
        assert cpu_kernels.linear(x, panels, bias, other) is None


def layer_weights(kernels: CPUKernels, batch: Batch, *, normed: bool) -> LayerWeights:
    """Of 4 heads on 2 of size 16, with every part or with none that may be left out."""
    parts: dict[str, Any] = {}
    if normed:
        parts = {
            "input_norm": (batch.normal(40), 1e-5),
            "head_norm": (batch.normal(6, 16), torch.full((6, 1), 1e-6)),
            "qkv_bias": batch.normal(128),
            "o_bias": batch.normal(24),
            "gate_up_bias": batch.normal(80),
            "down_bias": batch.normal(24),
        }
    return LayerWeights(
        qkv=kernels.panels(batch.normal(128, 40)),
        o=kernels.panels(batch.normal(24, 64)),
        mlp_norm=(batch.normal(24), 1e-4),
        gate_up=kernels.panels(batch.normal(80, 24)),
        down=kernels.panels(batch.normal(24, 40)),
        heads=4,
        kv_heads=2,
        **parts,
    )


def by_parts(kernels: Any, weights: LayerWeights, args: dict[str, Any]) -> Tensor:
    """Run a layer by one kernel after the other."""
    x = args["input"]
    if weights.input_norm is not None:
        x = kernels.rms_norm(x, *weights.input_norm)
    qkv = weights.qkv.linear(x, weights.qkv_bias).view(len(x), 8, 16)
    places = args["slots"], args["keys"], args["values"]
    assert kernels.rotate_and_write(qkv, args["cos"], args["sin"], weights.head_norm, *places)
    mixed = kernels.attend(qkv[:, :4], args["keys"], args["values"], args["rows"], args["form"])
    sums = weights.o.linear(mixed, weights.o_bias, args["residual"])
    both = weights.gate_up.linear(kernels.rms_norm(sums, *weights.mlp_norm), weights.gate_up_bias)
    out = weights.down.linear(kernels.silu_and_mul(both), weights.down_bias, sums)
    assert out is not None
    return out


def layer_arguments(batch: Batch, form: AttentionForm) -> dict[str, Any]:
    """Of a pass over 3 requests with some committed tokens each."""
    slots = [
        batch.table[b + 1, start : start + width]
        for b, (start, width) in enumerate(zip(batch.starts, batch.widths, strict=True))
    ]
    rows = sum(batch.widths)
    return {
        "rows": batch.rows(),
        "input": batch.normal(rows, 50)[:, :40],
        "residual": batch.normal(rows, 30)[:, :24],
        "cos": batch.normal(rows, 1, 16),
        "sin": batch.normal(rows, 1, 16),
        "slots": torch.cat(slots),
        "keys": batch.keys,
        "values": batch.values,
        "form": form,
    }


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("window", [None, 6])
def test_layer_has_the_bits_of_its_parts(
    cpu_kernels: CPUKernels, normed: bool, window: int | None
) -> None:
    batch = Batch([0, 13, 31], [9, 1, 14], 4, 2, 16)
    weights = layer_weights(cpu_kernels, batch, normed=normed)
    args = layer_arguments(batch, AttentionForm(0.2, window))
    own = {**args, "keys": batch.keys.clone(), "values": batch.values.clone()}
    expected = by_parts(cpu_kernels, weights, own)
    assert expected.isfinite().all()
    found = cpu_kernels.decoder_layer(weights, **args)
    assert found is not None
    assert torch.equal(found, expected)
    assert torch.equal(batch.keys.nan_to_num(), own["keys"].nan_to_num())
    assert torch.equal(batch.values.nan_to_num(), own["values"].nan_to_num())


def test_layer_of_strange_tensors_is_torchs(cpu_kernels: CPUKernels) -> None:
    batch = Batch([0, 13], [2, 3], 4, 2, 16)
    weights = layer_weights(cpu_kernels, batch, normed=True)
    args = layer_arguments(batch, FORM)
    for name in ("input", "residual", "cos", "sin", "slots", "keys", "values"):
        own = args[name]
        for other in (own.to("meta"), own[1:], own.half()):
            assert cpu_kernels.decoder_layer(weights, **{**args, name: other}) is None
    for form in (AttentionForm(0.2, softcap=3.0), AttentionForm(0.2, sinks=torch.zeros(4))):
        assert cpu_kernels.decoder_layer(weights, **{**args, "form": form}) is None
    for name in ("o_bias", "down_bias", "qkv_bias", "gate_up_bias"):
        other = attrs.evolve(weights, **{name: torch.zeros(7)})
        assert cpu_kernels.decoder_layer(other, **args) is None
    with pytest.raises(IndexError, match="outside"):
        cpu_kernels.decoder_layer(weights, **{**args, "slots": args["slots"] + 10**6})


STRANGE = """
import sys, torch
from specplug import AlgorithmInfo, Draft, DraftInput, LLM, SamplingParams, hookimpl

class Strange:
    def __init__(self, how): self.how, self.seen = how, 0
    @hookimpl
    def describe(self): return AlgorithmInfo(name="STRANGE", summary="s", api_version=1)
    @hookimpl
    def create_worker(self, runtime):
        self.cache = runtime.allocate_kv(1, 1, 16)
        return self
    @hookimpl
    def build_draft_input(self, runtime, batch, target_output):
        rows = len(target_output.next_tokens)
        q, k, v = torch.zeros(3, rows, 1, 16, device="cpu")
        starts = batch.seq_lens
        plan = batch.attention
        if not batch.is_prefill:
            if self.how == "starts":
                starts = starts.to("meta")
            plan = runtime.plan_attention(batch, starts, rows // batch.size)
        if not batch.is_warm_up:
            self.seen += 1
            if self.how == "queries":
                q = q.to("meta")
            if self.how == "default" and not batch.is_prefill:
                torch.set_default_device("meta")
        plan.attend(self.cache, 0, q, k, v)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)
    @hookimpl
    def propose(self, draft_input):
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))

for how in sys.argv[2:]:
    strange = Strange(how)
    try:
        with LLM(sys.argv[1], device="cpu", speculative_algorithm=strange) as llm:
            assert llm.effective_config["cpu_kernels"] == "on"
            llm.generate([[1, 2, 3]], SamplingParams(max_tokens=4, ignore_eos=True))
    except Exception as error:
        print(how, type(error).__name__, error)
    torch.set_default_device(None)
    assert strange.seen or how == "starts"
    print(how, "is survived", flush=True)
"""


@pytest.mark.usefixtures("cpu_kernels")
def test_strange_tensors_of_a_plugin_end_no_process(tiny_model: Path) -> None:
    """One process for all, as its start is most of the time; it says how far it came."""
    ways = "queries", "starts", "default"
    command = [sys.executable, "-c", STRANGE, str(tiny_model), *ways]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert all(f"{how} is survived" in ended.stdout for how in ways)
    assert "plan_attention: starts" in ended.stdout


def test_run_without_kernels_says_why() -> None:
    with LLM(max_running_requests=1, disable_cpu_kernels=True, device="cpu") as llm:
        assert llm.effective_config["cpu_kernels"] == "off: disable_cpu_kernels"
