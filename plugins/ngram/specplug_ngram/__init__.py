"""N-gram drafting for specplug: what followed the same words before. No draft model.

Prompt lookup decoding (Saxena 2023), and across requests as SuffixDecoding (arXiv 2411.04975).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specplug import AlgorithmInfo, Defaults, SpecConfig, hookimpl

if TYPE_CHECKING:
    from specplug import (
        Batch,
        CommittedOutput,
        Draft,
        DraftInput,
        FutureMap,
        RequestReport,
        Runtime,
    )
    from specplug_ngram.worker import NgramWorker


class Ngram:
    """The hooks; the work is ``NgramWorker``'s."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="NGRAM",
            summary="Longest suffix match over prompt, output and earlier requests; no draft model",
            api_version=1,
            defaults=Defaults(num_steps=7, topk=1, num_draft_tokens=8),
            paper="https://arxiv.org/abs/2411.04975",
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        steps, nodes = config.num_steps, config.num_draft_tokens
        if nodes != steps + 1:
            reason = f"num_draft_tokens {nodes} -> {steps + 1}: a chain of {steps} steps"
            return config.adjust(reason, num_draft_tokens=steps + 1)
        return config

    @hookimpl
    def create_worker(self, runtime: Runtime) -> NgramWorker:
        from specplug_ngram.worker import NgramWorker

        return NgramWorker(runtime.config.num_draft_tokens)

    @hookimpl
    def create_future_map(self, runtime: Runtime) -> FutureMap:
        from specplug_ngram.future_map import HostFutureMap

        worker: NgramWorker = runtime.worker
        return HostFutureMap(runtime.num_rows, runtime.device, worker.observe)

    @hookimpl
    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        from specplug import DraftInput
        from specplug_ngram.future_map import HostFutureMap

        worker: NgramWorker = runtime.worker
        assert isinstance(future_map, HostFutureMap)
        worker.meet(batch.requests)
        future_map.relay(batch, target_output)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker: NgramWorker = runtime.worker
        return worker.propose(batch, draft_input)

    @hookimpl
    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        worker: NgramWorker = runtime.worker
        worker.forget(report.request_id)


algorithm = Ngram()
