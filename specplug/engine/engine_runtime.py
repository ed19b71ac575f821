"""The embedded engine's ``Runtime``: what its plugins may use of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from specplug.algorithm import CAPTURES, SpecConfig, find_model
from specplug.config import EngineConfig
from specplug.engine.cuda_graphs import CudaGraphs
from specplug.engine.grammars import Grammars
from specplug.engine.kv_pool import KVPool
from specplug.engine.target_drafts import DraftingLayers, TargetDrafts, WatchedLayer
from specplug.errors import PluginError
from specplug.host import HostCapabilities
from specplug.kv.tensors import KVShape
from specplug.model.hidden_states import AUX_HIDDEN_STATES, LM_HEAD_INPUT
from specplug.model.layer_range import LayerRange
from specplug.model.sampler import Sampler
from specplug.model.target import Target
from specplug.speculative.draft import described
from specplug.speculative.draft_plan import ForcedTokens
from specplug.speculative.graph_runner import PassRunner
from specplug.speculative.hook_order import Batch, RequestView
from specplug.speculative.output_kind import OutputKind, PerTokenOutput
from specplug.speculative.own_text import PagedOwnText
from specplug.speculative.paged_plan import LentPlan, PagedKVCache, check_rows
from specplug.speculative.runtime import KVCache, RankInfo
from specplug.speculative.runtime_base import RuntimeBase
from specplug.speculative.target_plan import LentTargetPlan, ViewShape

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
    target_drafts=True,
    parts=True,
    cache_salts=True,
    own_lengths=True,
    verify_budget=True,
)
"""What the embedded engine gives: all that there is."""


class EngineRuntime(RuntimeBase):
    """The ``Runtime`` of the embedded engine; ``Runtime`` says what each member is.

    Args:
        config: of the run.
        spec: of its speculation.
        target: of the run.
        tokenizer: of the target; None: it has none.
        kv: of the run. Draft models add their caches.
        sampler: of the target's tokens.
        grammars: of the requests.
        graphs: of the run. Draft models add their passes.
        overlap: whether a step is launched before the last one's results are processed.
        draft_verifies: whether the draft's pass has the shape of a target verify, as the
            algorithm's ``supports_target_verify_for_draft`` says. If False, no draft pass is
            recorded.
        outputs: what requests can get for each token, by name. Plugins add theirs.
    """

    def __init__(
        self,
        config: EngineConfig,
        spec: SpecConfig,
        target: Target,
        *,
        tokenizer: Any,
        kv: KVPool,
        sampler: Sampler,
        grammars: Grammars,
        graphs: CudaGraphs,
        overlap: bool,
        draft_verifies: bool,
        outputs: dict[str, OutputKind],
    ) -> None:
        super().__init__(EMBEDDED, spec)
        self._target = target
        self._kv = kv
        self._sampler = sampler
        self._grammars = grammars
        self._graphs = graphs
        self._draft_verifies = draft_verifies
        self._outputs = outputs
        self._target_drafts = TargetDrafts(target, kv)
        self._num_lookahead_slots = spec.num_lookahead_slots
        self.device = target.device
        self.dtype = target.dtype
        self.vocab_size = target.vocab_size
        self.hidden_size = target.hidden_size
        self.num_layers = target.num_layers
        self.context_len = kv.context_len
        self.model_path = find_model(config.model)
        self.tokenizer = tokenizer
        self.max_running_requests = config.max_running_requests
        self.req_table_size = kv.table.req_table_size
        self.page_size = config.page_size
        self.chunked_prefill_size = config.chunked_prefill_size
        self.overlap = overlap
        self.rank = RankInfo(rank=config.dp_rank, world_size=config.dp_size)

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
        taken = {name for other in self._outputs.values() for name in other.tensor_names}
        if output.is_sampled:  # what algorithms read in the same container
            taken.add(LM_HEAD_INPUT)
        is_captured = output.is_sampled and output.name.startswith(AUX_HIDDEN_STATES)
        if output.name in self._outputs or output.name in taken or is_captured:
            raise PluginError(
                f"add_output: there is an output {output.name!r} already; expected another name"
            )
        self._outputs[output.name] = output

    def allocate_kv(
        self, num_layers: int, num_kv_heads: int, head_dim: int, *, own_lengths: int = 1
    ) -> PagedKVCache:
        self.check_open("allocate_kv")
        self.check_lengths(own_lengths)
        return self._kv.add_cache(KVShape(num_layers, num_kv_heads, head_dim), own_lengths)

    def own_text(self, cache: KVCache) -> PagedOwnText:
        text = cache.text if isinstance(cache, PagedKVCache) else None
        if text is None:
            raise PluginError(
                f"own_text: {described(cache)}; expected what allocate_kv(own_lengths=2) or more "
                "returned"
            )
        return text

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
        most = width if isinstance(width, int) else max(width)
        self._check_plan(batch, starts, most, offset, positions, mask)
        kv = self._kv
        return LentPlan.of(
            kv.request_slots,
            kv.key_length,
            batch.req_indices,
            starts,
            width,
            offset,
            positions,
            mask,
        )

    def target_layers(self, first: int, last: int) -> DraftingLayers:
        self.check_open("target_layers")
        return DraftingLayers(self._kv, LayerRange(self._target, first, last))

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self._target_drafts.final_norm(hidden)

    def target_attention(self, layer: int, page_size: int) -> WatchedLayer:
        self.check_open("target_attention")
        if page_size < 1:
            raise PluginError(f"target_attention: page_size {page_size}; expected at least 1")
        return WatchedLayer(self._kv, LayerRange(self._target, layer, layer + 1), page_size)

    def plan_target(
        self,
        batch: Batch,
        starts: Tensor,
        width: int,
        *,
        offset: int = 0,
        sinks: int = 0,
        window: int | None = None,
        pages: Tensor | None = None,
        page_size: int | None = None,
    ) -> LentTargetPlan:
        self._check_plan(batch, starts, width, offset, None, None, method="plan_target")
        room, view = self._num_lookahead_slots, None
        if not 0 <= offset <= room - width:
            raise PluginError(
                f"plan_target: width {width} at offset {offset}; expected slots from starts on, at "
                f"most {room}; plan less, or raise num_draft_slots in validate_config()"
            )
        if window is not None:
            view = ViewShape(
                sinks=sinks, window=window, page_size=page_size or self.page_size, room=room
            )
        self._check_view(batch, sinks, window, pages, page_size)
        return self._target_drafts.plan(
            batch, starts, width, offset, view=view, pages=pages, room=room
        )

    def _check_view(
        self,
        batch: Batch,
        sinks: int,
        window: int | None,
        pages: Tensor | None,
        page_size: int | None,
    ) -> None:
        """Refuse what is no part of a context."""
        if window is None and (sinks or pages is not None):
            raise PluginError(
                "plan_target: sinks or pages without a window; expected window=, the last tokens "
                "that are seen: without one all are"
            )
        if sinks < 0 or (window or 0) < 0 or (page_size is not None and page_size < 1):
            raise PluginError(
                f"plan_target: sinks {sinks}, window {window}, page_size {page_size}; expected "
                "numbers of tokens"
            )
        if pages is not None and (
            pages.dim() != 2
            or len(pages) != batch.size
            or pages.dtype != torch.int64
            or pages.device != batch.seq_lens.device
        ):
            raise PluginError(
                f"plan_target: pages {described(pages)}; expected [{batch.size}, pages] of "
                f"torch.int64 on {batch.seq_lens.device}"
            )

    def _check_plan(
        self,
        batch: Batch,
        starts: Tensor,
        width: int,
        offset: int,
        positions: Tensor | None,
        mask: Tensor | None,
        *,
        method: str = "plan_attention",
    ) -> None:
        """Refuse a pass that would write outside the slots that are kept for drafts."""
        most = max(self._num_lookahead_slots, *batch.chunk_widths, 0)
        check_rows(method, batch.seq_lens, starts, width, offset, positions, mask, most=most)

    def temperatures(self, batch: Batch) -> Tensor:
        return self._sampler.temperatures(batch.req_indices)

    def gumbel_noise(self, batch: Batch, positions: Tensor, token_ids: Tensor) -> Tensor:
        bs, width = positions.shape
        req_indices = batch.req_indices.repeat_interleave(width, output_size=bs * width)
        noise = self._sampler.noise(req_indices, positions.reshape(-1), token_ids)
        return noise.view(bs, width, -1)

    def forced_tokens(
        self, requests: Sequence[RequestView], *, wait: bool = False
    ) -> Sequence[ForcedTokens | None]:
        request_ids = (request.request_id for request in requests)
        return self._grammars.forced_tokens(request_ids, wait=wait)

    def draft_pass(self, forward: Callable[..., Any]) -> PassRunner:
        # Ranks that draft with sharded layers agree on each pass, which no graph does.
        agrees = self._target.ranks is not None and self._target.draft_ranges
        if not self._draft_verifies or agrees:
            return super().draft_pass(forward)
        kv = self._kv
        return self._graphs.draft_pass(forward, lambda: kv.key_length)

    def close(self) -> None:
        """Free the draft models, even while a plugin still holds this object."""
        self.worker = None
        self.close_parts()
        for runner in self._draft_passes:
            runner.close()
        self._draft_passes.clear()
