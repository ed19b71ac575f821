"""A specplug algorithm as SGLang's scheduler sees it."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from specplug_sglang.settings import MAX_RUNNING_REQUESTS, SglangSettings, start_in_sglang
from specplug_sglang.sglang_names import check_names
from specplug_sglang.versions import disagg_arguments

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from specplug_sglang.relay import SpecplugDraftInput
    from specplug_sglang.worker import SpecplugWorker

logger = logging.getLogger(__name__)

_OF_BUILTIN = vars(SpeculativeAlgorithm)


class SpecplugAlgorithm(CustomSpecAlgo):
    """One of the registered algorithms, in each of SGLang's processes.

    ``CustomSpecAlgo`` has the methods that begin with ``is_`` and ``supports_``. The scheduler
    calls further ones of its own algorithms, which are here.
    """

    algorithm: str
    worker: SpecplugWorker | None = None

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Fill in the algorithm's own defaults: SGLang sizes its pools by them.

        Raises:
            UsageError: SGLang cannot run the algorithm like that, or is not what was tested.
        """
        check_names()
        from sglang.srt.configs.model_config import ModelConfig

        target = ModelConfig.from_server_args(server_args).hf_config.to_dict()
        settings = SglangSettings.of(server_args, self.algorithm)
        config = start_in_sglang(self.algorithm, settings, target).config
        server_args.speculative_num_steps = config.num_steps
        server_args.speculative_eagle_topk = config.topk
        server_args.speculative_num_draft_tokens = config.num_draft_tokens
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
            logger.warning("%s: max_running_requests=%d", self.name, MAX_RUNNING_REQUESTS)
        # A step with prompts and decoding requests in one pass has no draft extend.
        server_args.enable_mixed_chunk = False

    def has_draft_kv(self) -> bool:
        """Whether each branch of a tree needs pages of its own: drafts stand in consecutive slots
        after the committed ones, whatever their shape."""
        return False

    def need_topk(self) -> bool:
        """Whether SGLang's map relays candidates: the draft state is in the algorithm's own."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Whether disaggregation sends hidden states."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Whether SGLang's graph runner may record the draft model, by the algorithm's own hook."""
        return self.worker is not None and self.worker.supports_target_verify_for_draft

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: ReqToTokenPool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """Return the map by which SGLang's scheduler learns how long the requests have become, and
        make the algorithm's, by its own hook."""
        assert self.worker is not None
        self.worker.begin()
        made: FutureMap = _OF_BUILTIN["create_future_map"](
            self, device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )
        return made

    def build_disagg_draft_input(
        self, batch: ScheduleBatch, *given: Any, **named: Any
    ) -> SpecplugDraftInput:
        """Begin requests that another instance has prefilled, by the algorithm's own hook."""
        assert self.worker is not None
        last_tokens, future_map = disagg_arguments(*given, *named.values())
        relayed = self.worker.receive(batch, last_tokens)
        if batch.enable_overlap:
            from sglang.srt.managers.overlap_utils import RelayPayload

            relayed.future_indices = batch.req_pool_indices
            future_map.publish(relayed.future_indices, batch.seq_lens)
            future_map.stash(relayed.future_indices, RelayPayload(bonus_tokens=last_tokens))
        return relayed


def register_algorithm(name: str, algorithm: str) -> None:
    """Register an installed algorithm in this process, once."""
    if get_spec(name) is not None:
        return

    class Algorithm(SpecplugAlgorithm):
        pass

    Algorithm.algorithm = algorithm

    def factory(server_args: ServerArgs) -> Any:
        from specplug_sglang.worker import SpecplugWorker

        return partial(SpecplugWorker, get_spec(name))

    register = SpeculativeAlgorithm.register(name, supports_overlap=True, spec_class=Algorithm)
    register(factory)
