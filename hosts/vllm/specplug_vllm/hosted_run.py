"""The algorithm of a run inside vLLM, whichever model runner drives it."""

from __future__ import annotations

from typing import Any

import torch

from specplug import PluginError, RequestReport
from specplug.speculative.hook_order import HookOrder
from specplug.speculative.host_kernels import DraftKernels
from specplug.speculative.undrafted import FailureLog, UndraftedRequests
from specplug_vllm import vllm_names
from specplug_vllm.run_settings import start_in_vllm
from specplug_vllm.runtime import VllmRuntime


class HostedRun:
    """The algorithm, its runtime and what goes wrong with it.

    Args:
        vllm_config: vLLM's.
        name: the algorithm's.

    Raises:
        SpecplugError: the version of vLLM, the algorithm or a setting does not fit.

    Attributes:
        config: of the run's speculation.
        undrafted: the requests that go on without drafts.
        runtime: the algorithm's; set by ``create_worker``.
    """

    runtime: VllmRuntime

    def __init__(self, vllm_config: Any, name: str) -> None:
        self._vllm_config = vllm_config
        self._host, self._algorithm = start_in_vllm(vllm_config, name)
        self.config = self._algorithm.config
        self.undrafted = UndraftedRequests(name, vllm_names.log_warning)
        self._failures = FailureLog(vllm_names.log_error)

    def create_worker(self, target: Any, device: torch.device) -> HookOrder:
        """Make the algorithm's worker for a target, and return the order of its hooks."""
        self.runtime = VllmRuntime(
            self._vllm_config,
            target,
            device,
            self._host,
            self.config,
            DraftKernels.of(device, self._vllm_config.model_config.dtype),
            records=self._algorithm.draft_verifies,
        )
        if self._host.foreseeable_noise:
            from specplug_vllm.v2.seeded_noise import SamplingRows  # it needs Triton

            self.runtime.sampling = SamplingRows(self.runtime.req_table_size, device)
        self._algorithm.create_worker(self.runtime)
        return self._algorithm.begin(self.runtime)

    def report_end(self, request_id: str) -> None:
        """Tell plugins of a request that has ended."""
        try:
            report = RequestReport(request_id=request_id)
            self._algorithm.hooks.on_request_finished(self.runtime, report)
        except PluginError as error:
            self.tell(error)

    def tell(self, error: PluginError) -> None:
        """Write a plugin's failure to vLLM's log, unless the same one was written before."""
        self._failures.tell(
            error, ". Requests of that step go on without drafts; their tokens are right."
        )
