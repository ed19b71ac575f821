"""A third party's package: a small algorithm, and an extension that writes down what it is told, a
line of JSON each, to the file that ``WITNESS_FILE`` names."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence

import torch

import specplug
from specplug import (
    AlgorithmInfo,
    Batch,
    Capabilities,
    Defaults,
    Draft,
    DraftInput,
    FutureMap,
    VerifyOutput,
    hookimpl,
    verify_tree,
)


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


class Fragile(Echo):
    """Fails in the call that ``FRAGILE`` names, "propose 4" for the fourth of ``propose``, once;
    "validate_config" wants one more node in each call."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.known: set[str] = set()

    def called(self, hook: str) -> None:
        name, _, call = os.environ.get("FRAGILE", "").partition(" ")
        self.calls[hook] += 1
        if name == hook and self.calls[hook] == int(call):
            raise ValueError("no more ideas")

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="FRAGILE",
            summary="fails when it is told to",
            api_version=1,
            defaults=Defaults(num_steps=3),
        )

    @hookimpl
    def validate_config(self, config):
        if os.environ.get("FRAGILE") == "validate_config":
            return config.adjust("one more", num_draft_tokens=config.num_draft_tokens + 1)
        return config

    @hookimpl
    def create_future_map(self, runtime):
        self.called("create_future_map")
        return FragileMap(runtime.req_table_size, runtime.device, self)

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output) -> DraftInput:
        self.called("build_draft_input")
        ids = {request.request_id for request in batch.requests}
        assert batch.is_prefill or ids <= self.known, "a step of a request was not told"
        self.known |= ids
        rows = target_output.next_tokens[target_output.last_rows]
        assert torch.equal(rows, target_output.bonus_tokens)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        self.called("propose")
        assert {request.request_id for request in batch.requests} <= self.known
        return Echo.propose(self, runtime, batch, draft_input)

    @hookimpl
    def verify(self, draft: Draft, target_output) -> VerifyOutput:
        self.called("verify")
        target_output.per_node["seen"] = torch.ones_like(target_output.predict)
        return verify_tree(draft, target_output.predict)

    @hookimpl
    def on_request_finished(self, report: specplug.RequestReport) -> None:
        self.called("on_request_finished")
        self.known.discard(report.request_id)

    @hookimpl
    def on_text_forgotten(self) -> None:
        self.called("on_text_forgotten")


class FragileTree(Fragile):
    """The same, of trees: each node of a chain has a sibling that is never taken."""

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="FRAGILE_TREE",
            summary="fails when it is told to, and drafts trees",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=3, topk=2, num_draft_tokens=7),
        )

    @hookimpl
    def propose(self, runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        chain = Fragile.propose(self, runtime, batch, draft_input)
        tokens = chain.tokens[:, :4]
        bs = len(tokens)
        # 1 and 2 follow the root, 3 and 4 follow 2, 5 and 6 follow 4
        other = (tokens[:, 1:] + 1) % runtime.vocab_size
        pairs = torch.stack((other, tokens[:, 1:]), dim=2).flatten(1)
        parents = torch.tensor([-1, 0, 0, 2, 2, 4, 4]).repeat(bs, 1)
        return Draft.tree(torch.cat((tokens[:, :1], pairs), dim=1), parents, 3)


class FragileMap(FutureMap):
    """Fails when it is resolved, if it is told to."""

    def __init__(self, rows, device, owner: Fragile) -> None:
        super().__init__(rows, device)
        self.owner = owner

    def resolve(self, req_indices):
        self.owner.called("resolve")
        return super().resolve(req_indices)


class Witness:
    """Writes down the facts of the run, prefill chunks, received prefills, idle steps and ends."""

    def write(self, **event) -> None:
        path = os.environ.get("WITNESS_FILE")
        if path:
            with open(path, "a") as file:
                file.write(json.dumps(event) + "\n")

    @hookimpl(wrapper=True)
    def create_worker(self, runtime):
        facts = runtime.max_running_requests, runtime.page_size, runtime.chunked_prefill_size
        self.write(run=[*facts, runtime.overlap, runtime.config.num_draft_tokens])
        return (yield)

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
    def propose(self, batch: Batch):
        prompts = [list(request.prompt_token_ids) for request in batch.requests]
        lengths = batch.seq_lens.tolist()
        draft = yield
        if os.environ.get("WITNESS_DRAFTS") and max(batch.max_draft_nodes) > 1:
            self.write(drafts=[*zip(prompts, lengths, draft.tokens.tolist(), strict=True)])
        return draft

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
fragile = Fragile()
fragile_tree = FragileTree()
extension = Witness()
