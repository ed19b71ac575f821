"""SGLang's Triton kernels with what we hand them, in Triton's interpreter: a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context

import pytest
import torch
from torch import Tensor

from specplug.kernels.attention_form import AttentionForm
from specplug.speculative.draft import Draft

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
NODES = 6
STARTS = (9, 4)
DRAFTED = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
PARENTS = torch.tensor([[-1, 0, 0, 1, 1], [-1, 0, 1, 1, 0]])


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Executor]:
    with pytest.MonkeyPatch.context() as changed:
        changed.setenv("TRITON_INTERPRET", "1")
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
            yield process


@pytest.mark.parametrize("case", ["tree", "trees of two sizes", "chains of two lengths"])
def test_triton_attention_sees_of_a_draft_what_our_plan_sees(case, interpreter):
    found, expected = interpreter.submit(attention, case).result()
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_batch_invariant_addmm_adds_a_matrix_or_a_vector(interpreter):
    sums = interpreter.submit(addmm).result()
    for found, expected in sums:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def _draft(case: str) -> Draft:
    if case == "tree":
        return Draft.tree(DRAFTED, PARENTS, 2)
    if case == "trees of two sizes":
        return Draft.tree(DRAFTED, PARENTS, 2, (5, 3))
    return Draft.chain(DRAFTED[:, :4], (4, 1))


def attention(case: str) -> tuple[Tensor, Tensor]:
    """Attend to a draft's nodes by SGLang's kernel, and by the core: [T, heads * head_dim] each."""
    from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd

    from specplug.speculative.host_kernels import DraftKernels
    from specplug.speculative.paged_plan import PagedKVCache
    from specplug_sglang.step_slots import StepSlots
    from specplug_sglang.verify_pass import drafted_nodes, padded_nodes

    torch.manual_seed(0)
    draft, starts, counts = _draft(case), torch.tensor(STARTS), [s + 2 * NODES for s in STARTS]
    table = torch.zeros(4, 40, dtype=torch.int32)
    table[[2, 1]] = (torch.randperm(100)[:80] + 1).view(2, 40).to(torch.int32)
    step = StepSlots(table, 64, DraftKernels(None, None))
    req_indices = torch.tensor([2, 1])
    step.begin(req_indices, counts)
    nodes = padded_nodes(draft, req_indices, starts, step, NODES, counts)
    rows = torch.arange(2 * NODES) if nodes.drafted is None else nodes.drafted

    q, k, v = [torch.randn(2 * NODES, heads, HEAD_DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    pools = [torch.randn(120, KV_HEADS, HEAD_DIM) for _ in range(2)]
    before = torch.cat([table[2, : STARTS[0]], table[1, : STARTS[1]]]).long()
    mask_starts = torch.tensor([0, *(NODES * (starts + NODES)).cumsum(0)])
    found = torch.empty_like(q)
    extend_attention_fwd(
        *(q, k, v, found, *pools),
        torch.arange(3, dtype=torch.int32) * NODES,
        torch.tensor([0, STARTS[0], sum(STARTS)], dtype=torch.int32),
        *(before, nodes.mask, True, mask_starts, NODES, 1.0, 1.0, HEAD_DIM**-0.5),
    )
    cache = PagedKVCache([pools[0]], [pools[1]])
    plan = drafted_nodes(draft, req_indices, starts, step)
    expected = plan.attend(cache, 0, q[rows], k[rows], v[rows], AttentionForm(q.shape[2] ** -0.5))
    return found.flatten(1)[rows], expected


def addmm() -> list[tuple[Tensor, Tensor]]:
    """Return sums by the product that SGLang puts in torch's place on GPUs, and by torch."""
    from sglang.srt.batch_invariant_ops import batch_invariant_ops as invariant

    from specplug.speculative.layers import linear
    from specplug_sglang.patches import apply_patches

    invariant.get_device_core_count = lambda: 2  # programs: SGLang counts a GPU's cores
    torch.manual_seed(0)
    x, weight = torch.randn(5, 24), torch.randn(40, 24)
    residual, bias = torch.randn(5, 40), torch.randn(40)
    expected = [residual + x @ weight.T, bias + x @ weight.T]
    replaced = torch.library.Library("aten", "IMPL")
    replaced.impl("aten::addmm", invariant.addmm_batch_invariant, "CPU")
    apply_patches()
    with torch.inference_mode():
        found = [linear(x, weight, None, residual), linear(x, weight, bias)]
    return [(one.clone(), other) for one, other in zip(found, expected, strict=True)]
