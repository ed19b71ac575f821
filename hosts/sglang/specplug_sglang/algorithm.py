"""An algorithm of specplug's, as one that is registered with SGLang."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from specplug_sglang.settings import MAX_RUNNING_REQUESTS, SglangSettings, pauses, start_in_sglang
from specplug_sglang.sglang_names import check_names
from specplug_sglang.versions import disagg_arguments

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.overlap_utils import FutureMap
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
    from sglang.srt.server_args import ServerArgs

    from specplug_sglang.step_result import SpecplugDraftInput
    from specplug_sglang.worker import SpecplugWorker

logger = logging.getLogger(__name__)

_OF_BUILTIN = vars(SpeculativeAlgorithm)


class SpecplugAlgorithm(CustomSpecAlgo):
    """SGLang's ``CustomSpecAlgo`` of one of our algorithms, in each of SGLang's processes.

    All methods are SGLang's interface, those with the name of one of our hooks too.
    ``CustomSpecAlgo`` has the methods whose names begin with ``is_`` and ``supports_``; the
    scheduler also calls the other methods of SGLang's own algorithms, which are defined here.

    Attributes:
        algorithm: the name of the algorithm in specplug.
        worker: the worker of this process; set by ``SpecplugWorker``.
    """

    algorithm: str
    worker: SpecplugWorker | None = None

    def handle_server_args(self, server_args: ServerArgs) -> None:
        """Fill in the algorithm's defaults, by which SGLang sizes its pools.

        Raises:
            UsageError: SGLang cannot run the algorithm with these settings, or was not tested.
        """
        check_names()
        pauses()  # refused here, not in the scheduler's process
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
        """Return False: no branch of a tree needs pages of its own. The nodes of a draft have
        consecutive slots after the committed ones."""
        return False

    def need_topk(self) -> bool:
        """Return False: SGLang's map relays no candidates of drafts."""
        return False

    def carries_draft_hidden_states(self) -> bool:
        """Return False: disaggregation sends no hidden states."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Return the value of our hook of that name: whether the draft's pass has the shape of a
        target verify."""
        return self.worker is not None and self.worker.supports_target_verify_for_draft

    def create_future_map(
        self,
        device: torch.device,
        req_to_token_pool: ReqToTokenPool,
        needs_cpu_seq_lens: bool = True,
        needs_confidence_relay: bool = False,
    ) -> FutureMap:
        """Return SGLang's map, which relays lengths and roots to the scheduler. The algorithm's own
        map is made too, by our hook of that name."""
        assert self.worker is not None
        self.worker.begin()
        made: FutureMap = _OF_BUILTIN["create_future_map"](
            self, device, req_to_token_pool, needs_cpu_seq_lens, needs_confidence_relay
        )
        return made

    def build_disagg_draft_input(
        self, batch: ScheduleBatch, *given: Any, **named: Any
    ) -> SpecplugDraftInput:
        """Begin requests that another instance has prefilled, by our hook of that name."""
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
    """Register an installed algorithm with SGLang in this process, unless it is registered."""
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
