"""The embedded engine's ``Runtime``: what its plugins may use of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from specplug.algorithm import CAPTURES, SpecConfig
from specplug.config import EngineConfig
from specplug.errors import PluginError
from specplug.host import HostCapabilities
from specplug.kernels.kernel_table import compiles_triton
from specplug.kv.request_table import RequestTable
from specplug.kv.tensors import KVShape, drop_tensors, fill_cache
from specplug.model.hidden_states import AUX_HIDDEN_STATES, LM_HEAD_INPUT
from specplug.model.model_runner import ModelRunner
from specplug.model.rotary import FIXED
from specplug.model.sampler import Sampler
from specplug.speculative.batch import Batch
from specplug.speculative.draft import described
from specplug.speculative.graph_runner import GraphRunner, PassRunner
from specplug.speculative.output_kind import OutputKind, PerTokenOutput
from specplug.speculative.padding import Padding
from specplug.speculative.paged_plan import (
    LENGTH_STEP,
    LentPlan,
    PagedKVCache,
    PagedPlan,
    RequestSlots,
    round_up,
)
from specplug.speculative.runtime import RankInfo
from specplug.speculative.runtime_base import RuntimeBase

EMBEDDED = HostCapabilities(
    name="the embedded engine",
    draft_models=True,
    captures=CAPTURES,
    trees=True,
    verify=True,
    overlap=True,
    exact_sampling=True,
    foreseeable_noise=True,
    disaggregation=True,
)
"""What the embedded engine gives: all that there is."""

_SHORTEST_GRAPH = 256
"""Slots a request that the smallest graphs read."""


class EngineRuntime(RuntimeBase):
    """The ``Runtime`` of the embedded engine: the target, its KV cache and the sampler.

    Args:
        settings: of the run.
        config: of its speculation.
        runner: of the target.
        overlap: whether a step is launched before the last one's results are processed.
        draft_verifies: whether the draft's pass has the shape of a target verify, as the
            algorithm's ``supports_target_verify_for_draft`` says.
        outputs: what requests can get for each token, besides what plugins add.

    Attributes:
        outputs: what requests can get for each token, by name.
        pools: the tensors of the target's cache, then of the draft models', each
            [layers, 2, slots, Hkv, D].
    """

    def __init__(
        self,
        settings: EngineConfig,
        config: SpecConfig,
        runner: ModelRunner,
        *,
        overlap: bool,
        draft_verifies: bool = False,
        outputs: Iterable[OutputKind] = (),
    ) -> None:
        super().__init__(EMBEDDED, config)
        self._runner = runner
        self._target = target = runner.target
        self.device = target.device
        self.dtype = target.dtype
        self.vocab_size = target.vocab_size
        self.hidden_size = target.hidden_size
        self.num_layers = target.num_layers
        self.context_len = min(settings.max_model_len or target.context_len, target.context_len)
        self.max_running_requests = settings.max_running_requests
        self.req_table_size = settings.max_running_requests + 1
        self.page_size = settings.page_size
        self.chunked_prefill_size = settings.chunked_prefill_size
        self.overlap = overlap
        self.rank = RankInfo(rank=settings.dp_rank, world_size=settings.dp_size)
        self.outputs: dict[str, OutputKind] = {output.name: output for output in outputs}
        self.sampler = Sampler(self.req_table_size, self.vocab_size, self.device)
        self.table: RequestTable
        self._request_slots: RequestSlots
        self.max_slots = LENGTH_STEP
        self._draft_caches: list[tuple[PagedKVCache, KVShape]] = []
        self.pools: list[Tensor] = []
        # Passes of several ranks are recorded padded, which they are not where torch attends.
        self._graphs = (
            self.device.type == "cuda"
            and not settings.disable_cuda_graph
            and (settings.dp_size == 1 or target.kernels is not None)
        )
        self._num_lookahead_slots = config.num_lookahead_slots
        self.draft_verifies = draft_verifies
        if self._graphs:
            runner.record_graphs()

    # What plugins may use: ``Runtime`` says what each does

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self._target.embed_tokens(token_ids)
        return embeds

    def lm_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._target.lm_head(hidden)
        return logits

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        self.check_open("capture_layer_inputs")
        return self._target.capture.keep_layer_inputs(layer_ids)

    def capture_lm_head_input(self) -> str:
        self.check_open("capture_lm_head_input")
        return self._target.capture.keep_lm_head_input()

    def add_output(self, output: PerTokenOutput) -> None:
        self.check_open("add_output")
        if not isinstance(output, PerTokenOutput):
            raise PluginError(
                f"add_output: {described(output)}; expected a specplug.PerTokenOutput"
            )
        taken = {name for other in self.outputs.values() for name in other.tensor_names}
        if output.is_sampled:  # what algorithms read in the same container
            taken |= {AUX_HIDDEN_STATES, LM_HEAD_INPUT}
        if output.name in self.outputs or output.name in taken:
            raise PluginError(
                f"add_output: there is an output {output.name!r} already; expected another name"
            )
        self.outputs[output.name] = output

    def allocate_kv(self, num_layers: int, num_kv_heads: int, head_dim: int) -> PagedKVCache:
        self.check_open("allocate_kv")
        cache = PagedKVCache()
        self._draft_caches.append((cache, KVShape(num_layers, num_kv_heads, head_dim)))
        return cache

    def plan_attention(
        self,
        batch: Batch,
        starts: Tensor,
        width: int | Sequence[int],
        *,
        offset: int = 0,
        positions: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> LentPlan:
        width, padding = Padding.between(width, self.device)
        self._check_plan(batch, starts, width, offset, positions, mask)
        return LentPlan(
            self.make_plan(
                batch.req_indices,
                starts,
                width,
                offset=offset,
                given_positions=positions,
                mask=mask,
                padding=padding,
            )
        )

    def _check_plan(
        self,
        batch: Batch,
        starts: Tensor,
        width: int,
        offset: int,
        positions: Tensor | None,
        mask: Tensor | None,
    ) -> None:
        """Refuse a pass that would write outside the slots that are kept for drafts."""
        bs, most = batch.size, max(self._num_lookahead_slots, *batch.chunk_widths, 0)
        if not 1 <= width <= most - offset:
            raise PluginError(
                f"plan_attention: width {width} at offset {offset}; expected at least 1 and, with "
                f"the offset, at most {most} slots from starts on; plan less, or raise "
                "num_draft_slots in validate_config()"
            )
        span = offset + width
        for name, found, dtype, shapes in (
            ("starts", starts, torch.int64, [(bs,)]),
            ("positions", positions, torch.int64, [(bs, width), (1, width)]),
            ("mask", mask, torch.bool, [(bs, width, span), (1, width, span)]),
        ):
            if found is not None and (
                found.shape not in shapes
                or found.dtype != dtype
                or found.device != batch.seq_lens.device
            ):
                raise PluginError(
                    f"plan_attention: {name} {described(found)}; expected {list(shapes[0])} of "
                    f"{dtype} on {batch.seq_lens.device}, for {bs} requests of {width} rows at "
                    f"offset {offset}"
                )

    def temperatures(self, batch: Batch) -> Tensor:
        return self.sampler.temperatures(batch.req_indices)

    def gumbel_noise(self, batch: Batch, positions: Tensor, token_ids: Tensor) -> Tensor:
        bs, width = positions.shape
        req_indices = batch.req_indices.repeat_interleave(width, output_size=bs * width)
        noise = self.sampler.noise(req_indices, positions.reshape(-1), token_ids)
        return noise.view(bs, width, -1)

    # What the engine uses

    def draft_pass(self, forward: Callable[..., Any]) -> PassRunner:
        if not (self._graphs and self.draft_verifies):
            return PassRunner(forward)
        by_kernels = self._target.kernels is not None
        return GraphRunner(
            forward, pads=by_kernels, length=None if by_kernels else self._key_length
        )

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """The shapes of the target's cache and of the draft models', in the order of ``pools``."""
        return (self._target.kv_shape, *(shape for _, shape in self._draft_caches))

    @property
    def has_draft_cache(self) -> bool:
        """Whether a draft model has KV in the pool."""
        return bool(self._draft_caches)

    def bytes_per_slot(self) -> int:
        """Return the bytes of one slot in the caches of the target and all draft models."""
        return sum(shape.bytes_per_slot(self.dtype) for shape in self.kv_shapes)

    def allocate_pool(self, num_slots: int, table: RequestTable) -> None:
        """Allocate the tensors of all caches."""
        self.table = table
        self._request_slots = RequestSlots(
            slots=table.slots,
            last_position=self.context_len - 1,
            floors=table.floors,
            lengths=None if self._target.rotary.rule is FIXED else table.lengths,
            kernels=self._target.kernels,
            cpu_kernels=self._target.cpu_kernels,
            page_size=table.page_size,
        )
        caches = [(self._target.cache, self._target.kv_shape), *self._draft_caches]
        self.pools = [
            fill_cache(cache, shape, num_slots, self.dtype, self.device) for cache, shape in caches
        ]
        self._reserve_sums(num_slots)

    def _reserve_sums(self, num_slots: int) -> None:
        """Have the kernels make room for what attention over a full pool keeps of its parts. A
        draft model is taken to have as many query heads as the target."""
        kernels, heads = self._target.kernels, self._target.config.num_attention_heads
        if kernels is None:
            return
        for shape in self.kv_shapes:
            group = -(-heads // shape.num_kv_heads)
            kernels.reserve(
                num_slots,
                self.req_table_size,
                shape.num_kv_heads,
                shape.head_dim,
                num_rows=self.config.num_draft_tokens * group,
            )

    def make_plan(
        self, req_indices: Tensor, starts: Tensor, width: int, **layout: Any
    ) -> PagedPlan:
        """Plan a pass of the target or of a draft model, within the ``max_slots`` of the step."""
        return PagedPlan(
            requests=self._request_slots,
            req_indices=req_indices,
            starts=starts,
            width=width,
            length=self._key_length(),
            **layout,
        )

    def _key_length(self) -> int:
        """Return how many slots of each request a pass reads: all that are in use, rounded up to
        a few sizes."""
        used = self.max_slots
        if self._graphs:  # each size is a graph of its own
            used = max(_SHORTEST_GRAPH, 1 << (used - 1).bit_length())
        return min(round_up(used), self.table.slots.shape[1])

    @property
    def compiles(self) -> bool:
        """Whether kernels are compiled, or passes recorded, when they are first needed."""
        return self._graphs or compiles_triton(self.device)

    @property
    def cuda_graph(self) -> str:
        """Whether passes are replayed as CUDA graphs: "on", or "off: " and why."""
        if not self._graphs:
            if self.device.type == "cpu":
                return "off: there are none on the CPU"
            if self.rank.world_size > 1 and self._target.kernels is None:
                dtype = str(self.dtype).removeprefix("torch.")
                return f"off: data-parallel attention in {dtype}"
            return "off: disable_cuda_graph"
        recorders = [each.recorder for each in self._draft_passes]
        failures = [self._runner.graph_failure, *(r.failure for r in recorders if r is not None)]
        failed = next((f for f in failures if f is not None), None)
        return "on" if failed is None else f"off: {failed}"

    @property
    def recordings(self) -> tuple[int, float]:
        """How many forms of passes are recorded, and the seconds that took."""
        passes = [*self._runner.recorders, *self._draft_passes]
        recorders = [each.recorder for each in passes if each.recorder is not None]
        return sum(each.num_recordings for each in passes), sum(r.seconds for r in recorders)

    @property
    def cpu_kernels(self) -> str:
        """Whether passes compute with the CPU's kernels: "on", or "off: " and why."""
        return self._target.cpu_kernels_state

    @property
    def row_invariance(self) -> str:
        """Whether each row's bits depend on nothing but the row: "on", or "off: " and why."""
        return self._target.row_invariance

    def close(self) -> None:
        """Free the draft models and all caches, even while somebody still holds this object."""
        self.worker = None
        for runner in self._draft_passes:
            runner.close()
        for cache, _ in self._draft_caches:
            drop_tensors(cache)
        self._draft_passes.clear()
        self.pools.clear()
