"""A third party's package: a small algorithm, and an extension that writes down what it is told, a
line of JSON each, to the file that ``WITNESS_FILE`` names."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence

import torch

import specplug
from specplug import AlgorithmInfo, Batch, Capabilities, Defaults, Draft, DraftInput, hookimpl


class Echo:
    """Drafts what followed the last token when the text last had it: chains of many lengths."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="ECHO",
            summary="what followed the last token",
            api_version=1,
            defaults=Defaults(num_steps=3),
        )

    @hookimpl
    def create_worker(self, runtime):
        return self

    @hookimpl
    def build_draft_input(self, target_output) -> DraftInput:
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        most = runtime.config.num_draft_tokens
        roots = draft_input.bonus_tokens.tolist()
        known = [request.token_ids for request in batch.requests]
        chains = [after(root, tokens, most) for root, tokens in zip(roots, known, strict=True)]
        padded = [chain + [0] * (most - len(chain)) for chain in chains]
        return Draft.chain(torch.tensor(padded), [len(chain) for chain in chains])


def after(root: int, tokens: Sequence[int], most: int) -> list[int]:
    """Return ``root``, and what followed it when it was last there."""
    for place in range(len(tokens) - 2, -1, -1):
        if tokens[place] == root:
            return list(tokens[place : place + most])
    return [root]


class Sync(Echo):
    """The same, of an algorithm that waits for each step and cannot begin within a prompt."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="SYNC",
            summary="what followed the last token, step by step",
            api_version=1,
            capabilities=Capabilities(overlap=False, prefix_cache=False),
            defaults=Defaults(num_steps=3),
        )


class Broken(Echo):
    """Fails at its fifth step."""

    steps = 0

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="BROKEN", summary="fails at its fifth step", api_version=1)

    @hookimpl
    def propose(self, runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        self.steps += 1
        if self.steps == 5:
            raise ValueError("no more ideas")
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


class Witness:
    """Writes down prefill chunks, received prefills, idle steps and ends."""

    def write(self, **event) -> None:
        path = os.environ.get("WITNESS_FILE")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(event) + "\n")

    @hookimpl(wrapper=True)
    def build_draft_input(self, batch: Batch):
        if batch.is_prefill:
            ids = [request.request_id for request in batch.requests]
            starts = batch.seq_lens.tolist()
            chunks = zip(
                ids, starts, batch.chunk_ends, batch.first_chunk, batch.last_chunk, strict=True
            )
            self.write(prefill=list(chunks))
        return (yield)

    @hookimpl(wrapper=True)
    def create_future_map(self):
        future_map = yield
        self.write(future_map=type(future_map).__name__)
        return future_map

    @hookimpl(wrapper=True)
    def build_disagg_draft_input(self, batch: Batch):
        prompts = [len(request.prompt_token_ids) for request in batch.requests]
        self.write(received=[prompts, batch.seq_lens.tolist()])
        return (yield)

    @hookimpl(wrapper=True)
    def supports_target_verify_for_draft(self):
        self.write(asked=True)
        return (yield)

    @hookimpl(wrapper=True)
    def fixup_idle(self):
        self.write(idle=True)
        return (yield)

    @hookimpl
    def on_request_finished(self, report: specplug.RequestReport) -> None:
        self.write(finished=report.request_id, reason=report.finish_reason)


algorithm = Echo()
sync = Sync()
broken = Broken()
extension = Witness()
