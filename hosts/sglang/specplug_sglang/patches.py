"""The functions of SGLang that this package wraps: ``PATCHES`` says which, why, how each is checked
and what ends it.

``apply_patches`` runs from that list, and make_readme.py makes README.md's table of it. A wrapper
calls SGLang's function for SGLang's own algorithms, and for all arguments that the function can
take.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs
from torch import Tensor

from specplug.speculative.paged_plan import PagedPlan
from specplug_sglang.capabilities import TESTED
from specplug_sglang.versions import FIRST, installed

if TYPE_CHECKING:
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
    from sglang.srt.speculative.spec_info import SpecInput

    from specplug_sglang.verify_pass import SpecplugVerifyInput


@attrs.frozen(kw_only=True)
class Patch:
    """A function of SGLang that is wrapped. ``sglang_names`` lists its parameters, which are
    compared with SGLang's before a run begins.

    Attributes:
        place: ``module:name`` where SGLang looks the function up.
        wrapper: called in its place, with SGLang's function and then the arguments.
        why: what goes wrong without it.
        test: the test that fails without it.
        upstream: the change of SGLang that ends it.
        section: heading of docs/hosts.md with the code of that change; "" if SGLang has made it.
        versions: the versions of SGLang that need it.
    """

    place: str
    wrapper: Callable[..., Any]
    why: str
    test: str
    upstream: str
    section: str
    versions: tuple[str, ...] = TESTED


def _verify_by_plan(
    plain: Callable[..., Tensor],
    backend: TorchNativeAttnBackend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layer: RadixAttention,
    forward_batch: ForwardBatch,
    *more: Any,
    **named: Any,
) -> Tensor:
    verified: Any = forward_batch.spec_info
    if (
        isinstance(getattr(verified, "plan", None), PagedPlan)
        and forward_batch.forward_mode.is_target_verify()
    ):
        attended: Tensor = verified.attend(backend, q, k, v, layer, forward_batch)
        return attended
    return plain(backend, q, k, v, layer, forward_batch, *more, **named)


def _warm_up_input(
    plain: Callable[..., SpecInput | None], algorithm: Any, *more: Any, **named: Any
) -> SpecInput | None:
    mask = next((each for each in more if isinstance(each, Tensor)), None)
    made = _recorded_input(algorithm, mask)
    return plain(algorithm, *more, **named) if made is None else made


def _capture_input(
    plain: Callable[..., SpecInput | None], runner: DecodeCudaGraphRunner, num_tokens: int
) -> SpecInput | None:
    made = _recorded_input(runner.model_runner.spec_algorithm, runner.buffers.custom_mask)
    return plain(runner, num_tokens) if made is None else made


def _recorded_input(algorithm: Any, mask: Tensor | None) -> SpecplugVerifyInput | None:
    """Return the input of a verification that SGLang records; None for SGLang's algorithms."""
    worker = getattr(algorithm, "worker", None)
    if worker is None:
        return None
    from specplug_sglang.verify_pass import SpecplugVerifyInput

    return SpecplugVerifyInput(worker.num_draft_tokens, worker.captures, mask)


def _add_matrix(
    plain: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *more: Any,
    **named: Any,
) -> Tensor:
    added = bias if bias is not None and bias.dim() > 1 else None
    product = plain(a, b, bias if added is None else None, *more, **named)
    return product if added is None else product.add_(added)


def _no_draft_pool(plain: Callable[..., Any], *, draft_worker: Any, **named: Any) -> Any:
    if getattr(draft_worker, "draft_worker", None) is None:
        return None
    return plain(draft_worker=draft_worker, **named)


PATCHES = (
    Patch(
        place=(
            "sglang.srt.layers.attention.torch_native_backend:TorchNativeAttnBackend.forward_extend"
        ),
        wrapper=_verify_by_plan,
        why="torch attention computes a verification as a causal prefill: it reads no mask",
        test="tests/test_greedy.py::test_algorithm_keeps_tokens_and_steps",
        upstream="`TorchNativeAttnBackend` reads `spec_info.custom_mask`, as GPUs' backends do",
        section="Torch attention that verifies trees",
    ),
    Patch(
        place="sglang.srt.model_executor.runner.base_runner:create_dummy_verify_input",
        wrapper=_warm_up_input,
        why="it makes the input of warm-up passes for SGLang's own algorithms alone",
        test="tests/test_patches.py::test_recorded_verifications_get_our_input",
        upstream="it asks the algorithm: `spec_algorithm.create_dummy_verify_input(…)`",
        section="Recorded verifications",
    ),
    Patch(
        place=(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner:"
            "DecodeCudaGraphRunner.get_spec_info"
        ),
        wrapper=_capture_input,
        why="it makes the input of recorded passes for SGLang's own algorithms alone",
        test="tests/test_patches.py::test_recorded_verifications_get_our_input",
        upstream="it calls `create_dummy_verify_input`, and that asks the algorithm",
        section="Recorded verifications",
    ),
    Patch(
        place="sglang.srt.batch_invariant_ops.batch_invariant_ops:matmul_persistent",
        wrapper=_add_matrix,
        why=(
            "with `--enable-deterministic-inference` it computes every `aten::addmm` on a GPU, and "
            "adds a vector alone; draft models add a residual"
        ),
        test="tests/test_triton.py::test_batch_invariant_addmm_adds_a_matrix_or_a_vector",
        upstream="`addmm_batch_invariant` adds a matrix",
        section="Sums of matrices in deterministic inference",
    ),
    Patch(
        place="sglang.srt.mem_cache.kv_cache_builder:get_draft_kv_pool",
        wrapper=_no_draft_pool,
        why="it takes a KV pool from the draft worker of every algorithm but NGRAM",
        test="tests/test_patches.py::test_worker_without_a_draft_runner_has_no_draft_pool",
        upstream="SGLang 0.5.23, which has no such function",
        section="",
        versions=(FIRST,),
    ),
)


def apply_patches() -> None:
    """Wrap what ``PATCHES`` lists for the installed version. What is wrapped already stays."""
    for patch in PATCHES:
        if installed() in patch.versions:
            _apply(patch)


def _apply(patch: Patch) -> None:
    module, _, path = patch.place.partition(":")
    *owners, name = path.split(".")
    owner: Any = functools.reduce(getattr, owners, import_module(module))
    plain = getattr(owner, name)
    if getattr(plain, "specplug_patch", None) is patch:
        return

    @functools.wraps(plain)
    def wrapped(*given: Any, **named: Any) -> Any:
        return patch.wrapper(plain, *given, **named)

    wrapped.specplug_patch = patch  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)
