"""specplug's ``Runtime`` over a model runner of vLLM."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specplug import (
    Batch,
    HostCapabilities,
    PluginError,
    SpecConfig,
    UsageError,
)
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner, PassRunner
from specplug.speculative.host_kernels import DraftKernels, join_rows
from specplug.speculative.paged_plan import LentPlan, RequestSlots
from specplug.speculative.pass_arguments import BatchPadding
from specplug.speculative.runtime import RankInfo
from specplug.speculative.runtime_base import RuntimeBase
from specplug_vllm import vllm_names
from specplug_vllm.draft_cache import PREFIX, DraftCache, DraftLayer, SlotTable

if TYPE_CHECKING:
    from specplug_vllm.v2.seeded_noise import SamplingRows

_LM_HEAD_INPUT = "lm_head_input"


class VllmRuntime(RuntimeBase):
    """Implements ``Runtime``.

    Args:
        vllm_config: vLLM's.
        target: vLLM's model, loaded.
        device: of it.
        host: what vLLM gives.
        config: of the run's speculation.
        kernels: compute for draft models.
        records: whether the algorithm's passes can be recorded.

    Attributes:
        captures: the layers of each output that plugins capture, by its name; none: the last state.
        captured_layers: whose inputs the target is to return, in ascending order.
        has_draft_cache: whether a draft model keeps KV.
        sampling: what requests want of the sampler; None where its noise is not foreseeable.
    """

    sampling: SamplingRows | None = None

    def __init__(
        self,
        vllm_config: Any,
        target: Any,
        device: torch.device,
        host: HostCapabilities,
        config: SpecConfig,
        kernels: DraftKernels,
        *,
        records: bool,
    ) -> None:
        model, parallel = vllm_config.model_config, vllm_config.parallel_config
        scheduler = vllm_config.scheduler_config
        super().__init__(host, config)
        self.overlap = host.overlap
        self.device, self.dtype = device, model.dtype
        self.vocab_size = model.get_vocab_size()
        self.hidden_size = model.get_hidden_size()
        self.num_layers = model.get_total_num_hidden_layers()
        self.context_len = model.max_model_len
        self.model_path, self.tokenizer_path = model.model, model.tokenizer
        self.max_running_requests = scheduler.max_num_seqs
        self.req_table_size = self.max_running_requests + 1
        self.page_size = vllm_config.cache_config.block_size
        chunked = scheduler.enable_chunked_prefill
        self.chunked_prefill_size = scheduler.max_num_batched_tokens if chunked else None
        self.rank = RankInfo(
            rank=parallel.data_parallel_rank, world_size=parallel.data_parallel_size
        )
        self._vllm_config, self._target, self._kernels = vllm_config, target, kernels
        self.captures: dict[str, tuple[int, ...]] = {}
        self._caches: list[DraftCache] = []
        self._table: SlotTable | None = None
        # Where torch attends there would be a recording for each length of a context; and the
        # collectives of several ranks are vLLM's own to record.
        self._records = (
            records
            and kernels.attention is not None
            and parallel.world_size == 1
            and not model.enforce_eager
        )
        self._max_slots = 1

    # What plugins may use: ``Runtime`` says what each does

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        embeds: Tensor = self._target.embed_input_ids(token_ids)
        return embeds

    def lm_head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self._target.compute_logits(hidden)
        return logits

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        self.check_open("capture_layer_inputs")
        kind = type(self._target).__name__
        if not vllm_names.captures_layers(self._target):
            raise UsageError(
                f"{kind}: vLLM captures no hidden states of it, and {self.config.algorithm} reads "
                f"those before the layers {layer_ids}; expected a target that vLLM runs EAGLE-3 "
                "with"
            )
        for layer in layer_ids:
            if not 0 <= layer <= self.num_layers:
                raise UsageError(
                    f"capture of layer {layer}: expected 0 to {self.num_layers}, the layers of "
                    f"{kind} and their end"
                )
        name = "layer_inputs:" + ",".join(map(str, layer_ids))
        self.captures[name] = tuple(layer_ids)
        return name

    def capture_lm_head_input(self) -> str:
        self.check_open("capture_lm_head_input")
        self.captures[_LM_HEAD_INPUT] = ()
        return _LM_HEAD_INPUT

    def allocate_kv(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, own_lengths: int = 1
    ) -> DraftCache:
        self.check_open("allocate_kv")
        self.check_lengths(own_lengths)
        heads = self._vllm_config.model_config.get_num_attention_heads(
            self._vllm_config.parallel_config
        )
        known = self._vllm_config.compilation_config.static_forward_context
        first = self.num_layers + sum(len(cache.layers) for cache in self._caches)
        layers = []
        for index in range(first, first + num_layers):
            layer = DraftLayer(num_kv_heads, head_dim, self.dtype, heads)
            known[f"{PREFIX}layers.{index}.attn"] = layer
            layers.append(layer)
        self._caches.append(DraftCache(layers=layers))
        return self._caches[-1]

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
        if self._table is None:
            raise PluginError("plan_attention: there is no draft cache; allocate_kv() makes one")
        length = min(self._max_slots, self._table.slots.shape[1])
        return LentPlan.of(
            self._slots, length, batch.req_indices, starts, width, offset, positions, mask
        )

    def temperatures(self, batch: Batch) -> Tensor:
        if self.sampling is None:
            return torch.ones(batch.size, 1, device=self.device)
        return self.sampling.divisors(batch.req_indices)

    def gumbel_noise(self, batch: Batch, positions: Tensor, token_ids: Tensor) -> Tensor:
        if self.sampling is None:
            raise NotImplementedError("not called: this runner's noise is not foreseeable")
        return self.sampling.noise(batch.req_indices, positions, token_ids)

    # What the proposer uses

    def draft_pass(self, forward: Callable[..., Any]) -> PassRunner:
        if not self._records:
            return PassRunner(forward)
        recorder = GraphRecorder(beside_threads=True)  # vLLM's threads use it too
        return GraphRunner(forward, BatchPadding(), recorder)

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layers in self.captures.values() for layer in layers}))

    @property
    def draft_layer_names(self) -> set[str]:
        """The names by which vLLM knows the draft models' layers."""
        known = self._vllm_config.compilation_config.static_forward_context
        return {name for name in known if name.startswith(PREFIX)}

    @property
    def records_passes(self) -> bool:
        """Whether there are passes that are recorded when they first run."""
        return self._records and bool(self._draft_passes)

    @property
    def has_draft_cache(self) -> bool:
        return any(cache.layers for cache in self._caches)

    @property
    def table(self) -> SlotTable | None:
        """The slots of each request; None without a draft cache, and before the first step."""
        return self._table

    def bind(self, block_size: int) -> None:
        """View the caches, which vLLM has allocated by now in blocks of so many tokens."""
        for cache in self._caches:
            cache.view(block_size)
        lookahead = self.config.num_lookahead_slots
        self._table = table = SlotTable(
            self.req_table_size, self.context_len, lookahead, block_size, self.device
        )
        self._slots = RequestSlots(
            slots=table.slots,
            last_position=self.context_len - 1,
            floors=table.floors,
            kernels=self._kernels.attention,
            cpu_kernels=self._kernels.cpu,
            page_size=block_size,
        )

    def note_longest(self, tokens: int) -> None:
        """Note how many tokens the longest request of the step has."""
        assert self._table is not None
        size = self._table.block_size
        self._max_slots = -(-(tokens + self.config.num_lookahead_slots) // size) * size

    def per_node(
        self, rows: Tensor, hidden_states: Tensor, layer_inputs: Mapping[int, Tensor]
    ) -> dict[str, Tensor]:
        """Return what plugins captured of the target's pass.

        Args:
            rows: [R] int64, of the pass.
            hidden_states: [R or more, H].
            layer_inputs: by layer [R or more, H].
        """
        return {
            name: join_rows([layer_inputs[layer] for layer in layers] or [hidden_states], rows)
            for name, layers in self.captures.items()
        }
