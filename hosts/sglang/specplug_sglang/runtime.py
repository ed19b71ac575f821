"""specplug's ``Runtime`` over SGLang's model runner: all that a plugin can reach of SGLang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specplug import Batch, SpecConfig
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner, PassRunner
from specplug.speculative.host_kernels import DraftKernels, attention_kernels
from specplug.speculative.paged_plan import LentPlan, PagedKVCache
from specplug.speculative.pass_arguments import BatchPadding
from specplug.speculative.runtime_base import RuntimeBase
from specplug_sglang.captures import Captures
from specplug_sglang.sampling import SamplingRows
from specplug_sglang.settings import SglangSettings
from specplug_sglang.sglang_names import part_of
from specplug_sglang.step_slots import StepSlots

if TYPE_CHECKING:
    from sglang.srt.model_executor.model_runner import ModelRunner


class SglangRuntime(RuntimeBase):
    """specplug's ``Runtime``, which plugins get.

    Args:
        runner: SGLang's runner of the target, which is loaded. Its pools come later (``allocate``).
        settings: SGLang's settings.
        config: the run's speculation settings.

    Attributes:
        captures: the hidden states that the algorithm has asked for.
        table: the KV slots of the running step's requests.
        sampling: temperatures and seeds by row of the request table.
    """

    req_table_size: int
    table: StepSlots
    sampling: SamplingRows

    def __init__(self, runner: ModelRunner, settings: SglangSettings, config: SpecConfig) -> None:
        target = runner.model_config
        super().__init__(settings.capabilities(), config)
        self._runner = runner
        self.device = torch.device(runner.device)
        self.dtype = runner.dtype
        self.vocab_size = target.vocab_size
        self.hidden_size = target.hidden_size
        self.num_layers = target.num_hidden_layers
        self.context_len = target.context_len
        self.model_path = target.model_path
        self.tokenizer_path = runner.server_args.tokenizer_path
        self.max_running_requests = int(settings.max_running_requests or 0)
        self.page_size = settings.page_size or 1
        chunk = settings.chunked_prefill_size
        self.chunked_prefill_size = chunk if chunk is not None and chunk > 0 else None
        self.overlap = not settings.disable_overlap_schedule
        self.captures = Captures(runner.model, self.num_layers, self.hidden_size)
        self._draft_pools: list[tuple[PagedKVCache, tuple[int, int, int]]] = []
        self._kernels = DraftKernels(attention_kernels(self.device, self.dtype), cpu=None)
        # Where torch attends there would be a recording for each length of a context.
        self._records = self._kernels.attention is not None and records_graphs()

    def embed_tokens(self, token_ids: Tensor) -> Tensor:
        embedded: Tensor = part_of(self._runner.model, "model.embed_tokens")(token_ids)
        return embedded

    def lm_head(self, hidden: Tensor) -> Tensor:
        weight = part_of(self._runner.model, "lm_head.weight")
        # SGLang pads the vocabulary of its heads.
        return torch.nn.functional.linear(hidden, weight[: self.vocab_size])

    def capture_layer_inputs(self, layer_ids: tuple[int, ...]) -> str:
        self.check_open("capture_layer_inputs")
        return self.captures.layer_inputs(layer_ids)

    def capture_lm_head_input(self) -> str:
        self.check_open("capture_lm_head_input")
        return self.captures.lm_head_input()

    def allocate_kv(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, own_lengths: int = 1
    ) -> PagedKVCache:
        self.check_open("allocate_kv")
        self.check_lengths(own_lengths)
        pools = PagedKVCache()
        self._draft_pools.append((pools, (num_layers, num_kv_heads, head_dim)))
        return pools

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
        plan = self.table.plan(
            batch.req_indices, starts, width, offset=offset, positions=positions, mask=mask
        )
        return LentPlan(plan)

    def temperatures(self, batch: Batch) -> Tensor:
        return self.sampling.temperatures(batch.req_indices)

    def gumbel_noise(self, batch: Batch, positions: Tensor, token_ids: Tensor) -> Tensor:
        return self.sampling.noise(batch.req_indices, positions, token_ids)

    # For the worker

    def seal(self) -> None:
        """Refuse further captures and caches, and have the target return the captured states."""
        super().seal()
        self.captures.install()

    def draft_pass(self, forward: Callable[..., Any]) -> PassRunner:
        if not self._records:
            return PassRunner(forward)
        recorder = GraphRecorder(beside_threads=True)  # SGLang's threads use it too
        return GraphRunner(forward, BatchPadding(), recorder)

    def allocate(self, req_to_token: Tensor, num_slots: int) -> None:
        """Allocate the KV pools of draft models, which have the slots of the target's pool.

        Args:
            req_to_token: [rows, positions], SGLang's request table.
            num_slots: slots of the target's pool.
        """
        self.req_table_size = len(req_to_token)
        self.table = StepSlots(req_to_token, self.context_len, self._kernels)
        self.sampling = SamplingRows(self.req_table_size, self.device)
        for pools, (layers, heads, head_dim) in self._draft_pools:
            for tensors in (pools.keys, pools.values):
                tensors += [
                    torch.zeros(num_slots, heads, head_dim, dtype=self.dtype, device=self.device)
                    for _ in range(layers)
                ]

    def clear_drafts(self) -> None:
        """Zero the draft models' KV at the slots that the step's requests may write."""
        for pools, _ in self._draft_pools:
            for pool in (*pools.keys, *pools.values):
                pool[self.table.written] = 0


def records_graphs() -> bool:
    """Return whether SGLang records CUDA graphs of decode steps in this process."""
    from sglang.srt.model_executor.cuda_graph_config import (
        Backend,
        Phase,
        check_cuda_graph_backend,
    )

    return not check_cuda_graph_backend(Phase.DECODE, Backend.DISABLED)
