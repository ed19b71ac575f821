"""N-gram drafting for specplug: it drafts the tokens that followed the same tokens before.

There is no draft model. This is prompt lookup decoding (Saxena 2023), across the requests of an
owner, and with a tree by frequency after SuffixDecoding (arXiv 2411.04975). ``index`` says whose
text a request drafts from, within a budget. ``history`` finds earlier continuations.
``policy`` estimates their probability, and the cost of proposing them. ``draft_tree`` takes the
nodes that are worth their cost. ``forced_drafts`` puts before them what the requests' grammars
force.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specplug import (
    DEFAULT_MODEL,
    AlgorithmInfo,
    Capabilities,
    Conformance,
    Defaults,
    SpecConfig,
    hookimpl,
)
from specplug_ngram.config import NgramSettings
from specplug_ngram.corpus import check_corpus, read_corpus

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from specplug import (
        Batch,
        CommittedOutput,
        Draft,
        DraftInput,
        ForeseenDrafts,
        RequestReport,
        RequestView,
        Runtime,
    )
    from specplug_ngram.worker import NgramWorker


class Ngram:
    """The hooks of ``NGRAM``, which call an ``NgramWorker``."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="NGRAM",
            summary="Longest suffix match over prompt, output and earlier requests; no draft model",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=7, topk=1, num_draft_tokens=8),
            paper="https://arxiv.org/abs/2411.04975",
            settings=NgramSettings,
            conformance=Conformance(accept_lengths={DEFAULT_MODEL: 2.47}),
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Reduce ``num_draft_tokens`` and ``num_steps`` to those of the largest possible tree."""
        check_corpus(config.settings.ngram_corpus)
        steps, topk, nodes = config.num_steps, config.topk, config.num_draft_tokens
        most = most_nodes(topk, steps, nodes)
        if nodes > most:
            what = f"a chain of {steps} steps" if topk == 1 else f"topk {topk}, {steps} steps deep"
            config = config.adjust(
                f"num_draft_tokens {nodes} -> {most}: {what}", num_draft_tokens=most
            )
        deepest = max(most - 1, 1)
        if steps > deepest:
            reason = f"num_steps {steps} -> {deepest}: num_draft_tokens is {most}, with the root"
            config = config.adjust(reason, num_steps=deepest)
        return config

    @hookimpl
    def create_worker(self, runtime: Runtime) -> NgramWorker:
        from specplug_ngram.compiled_drafter import load_library
        from specplug_ngram.draft_tree import Shape
        from specplug_ngram.policy import CPU_COSTS, GPU_COSTS
        from specplug_ngram.worker import MOST_COMMITTED, NgramWorker

        config = runtime.config
        shape = Shape(config.topk, config.num_steps, config.num_draft_tokens)
        costs = CPU_COSTS if runtime.device.type == "cpu" else GPU_COSTS
        settings: NgramSettings = config.settings
        # A step too early: what the running step commits may be as long as a draft.
        is_early = runtime.device.type != "cpu" and runtime.overlap
        most = shape.num_draft_tokens
        foreseen = most + min(most, MOST_COMMITTED) if is_early else None
        worker = NgramWorker(shape, settings, load_library(), costs, foreseen)
        if settings.ngram_corpus:
            worker.read_corpus(read_corpus(settings.ngram_corpus, runtime.tokenizer))
        return worker

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        worker: NgramWorker = runtime.worker
        return worker.feed(batch, target_output)

    @hookimpl
    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor
    ) -> DraftInput:
        """Read the prompts, which another instance has prefilled."""
        import torch

        from specplug import DraftInput

        worker: NgramWorker = runtime.worker
        ends = [len(request.prompt_token_ids) for request in batch.requests]
        worker.read_prompts(batch.requests, ends)
        if worker.grower is not None:
            worker.grower.forget_rows(batch.requests)
        ones = torch.ones(batch.size, dtype=torch.int64)
        new = {"tokens": last_tokens.unsqueeze(1), "counts": ones}
        return DraftInput(bonus_tokens=last_tokens, host=new)

    @hookimpl
    def on_host_tensors(
        self, runtime: Runtime, request_ids: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> None:
        worker: NgramWorker = runtime.worker
        worker.observe(request_ids, tensors["tokens"], tensors["counts"])

    @hookimpl
    def foresee_drafts(
        self, runtime: Runtime, requests: Sequence[RequestView]
    ) -> ForeseenDrafts | None:
        worker: NgramWorker = runtime.worker
        forced = runtime.forced_tokens(requests)
        return worker.foresee([request.request_id for request in requests], forced)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        worker: NgramWorker = runtime.worker
        # What is left for the host has been waited for.
        forced = runtime.forced_tokens(batch.requests, wait=True)
        return worker.propose(batch, draft_input, forced)

    @hookimpl
    def grow_draft(
        self, runtime: Runtime, batch: Batch, draft_input: DraftInput, draft: Draft
    ) -> Draft:
        worker: NgramWorker = runtime.worker
        if worker.grower is None:
            from specplug_ngram.growth import DraftGrower

            worker.grower = DraftGrower(runtime, worker)
        forced = runtime.forced_tokens(batch.requests, wait=True)
        return worker.grower.grow(batch, draft, forced)

    @hookimpl
    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        worker: NgramWorker = runtime.worker
        worker.forget(report.request_id)

    @hookimpl
    def on_text_forgotten(self, runtime: Runtime, cache_salt: str | None) -> None:
        worker: NgramWorker = runtime.worker
        worker.forget_text(cache_salt)


def most_nodes(topk: int, num_steps: int, limit: int) -> int:
    """Return the number of nodes of the full tree, its root included, at most ``limit``."""
    nodes = level = 1
    for _ in range(num_steps):
        level *= topk
        nodes += level
        if nodes >= limit:
            return limit
    return nodes


algorithm = Ngram()
