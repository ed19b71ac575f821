"""A drafter that proposes nonsense and writes to all it is lent changes no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from runs_again import RunsAgain
from torch import Tensor

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    Capabilities,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    FutureMap,
    Runtime,
    TargetOutput,
    VerifyOutput,
    hookimpl,
)

STEPS, NODES = 4, 7
KINDS = ("greedy", "seeded", "truncated", "penalized and sampled")
fuzzed = settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Hostile:
    """Every tensor that it has ever been given, or has given away, is written to in every hook."""

    def __init__(self, *, tree: bool) -> None:
        self._tree = tree
        self.random = random.Random(0)
        self._seen: list[Tensor] = []
        self.writes = 0
        self.known: dict[tuple[int, ...], tuple[int, ...]] = {}

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="HOSTILE",
            summary="Proposes nonsense, and writes to all it is lent",
            api_version=1,
            capabilities=Capabilities(branching=True),
            defaults=Defaults(num_steps=STEPS, num_draft_tokens=NODES if self._tree else STEPS + 1),
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Hostile:
        runtime.capture_lm_head_input()
        self._cache = runtime.allocate_kv(1, 1, 2)
        return self

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
    ) -> DraftInput:
        if batch.attention is not None:
            rows = torch.zeros(len(target_output.next_tokens), 1, 2, dtype=runtime.dtype)
            if batch.is_prefill:
                batch.attention.write(self._cache, 0, rows, rows)
        state = {"noise": torch.rand(batch.size, 3), "count": torch.ones(batch.size)}
        made = DraftInput(bonus_tokens=target_output.bonus_tokens, state=state)
        self._write(batch, target_output, future_map, made)
        return DraftInput(bonus_tokens=self._some(batch.size), state=state)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        bs, width = batch.size, self.random.randint(1, runtime.config.num_draft_tokens)
        roots = draft_input.bonus_tokens.clone()
        self._write(batch, draft_input)
        self._spoil(batch)
        if not self._tree:
            width = min(width, STEPS + 1)
        tokens = self._some(bs, width)
        for b, request in enumerate(batch.requests):  # else hardly a node is ever accepted
            known = () if batch.is_warm_up else self.known[tuple(request.prompt_token_ids)]
            ahead = known[len(request.token_ids) + self.random.randint(0, 2) :][:STEPS]
            for i in range(1, width) if ahead else ():
                tokens[b, i] = self.random.choice([ahead[min(i, len(ahead)) - 1], *ahead])
        if self.random.random() < 0.5:
            tokens[:, 0] = roots
        widths = [self.random.randint(1, width) for _ in range(bs)]
        if self._tree:
            parents = torch.randint(-3, width + 3, (bs, width))
            if self.random.random() < 0.5:
                order = torch.arange(width)
                parents = (torch.rand(bs, width) * order).long().where(order > 0, -1)
            draft = Draft.tree(tokens, parents, self.random.randint(0, STEPS), widths)
        else:
            draft = Draft.chain(tokens, widths)
        if not self._tree and self.random.random() < 0.3:
            self._write(draft.mask, draft.depths)  # shared with nobody
        self._keep(draft)
        return draft

    @hookimpl
    @torch.inference_mode()
    def on_step(self, runtime: Runtime) -> None:
        self._write()

    def _some(self, *shape: int) -> Tensor:
        """Tokens, some of which are out of the vocabulary."""
        small = torch.randint(0, 96, shape)
        large = torch.randint(-(1 << 62), 1 << 62, shape)
        return small.where(torch.rand(shape) < 0.9, large)

    def _write(self, *lent: Any) -> None:
        for one in lent:
            self._keep(one)
        for tensor in self._seen:
            if not tensor.numel():
                continue
            self.writes += 1
            if tensor.is_floating_point():
                tensor.fill_(float("nan"))
            elif tensor.dtype is torch.bool:
                tensor.logical_not_()
            else:
                tensor.fill_(self.random.choice((0, 1, 7)))
        del self._seen[:-80]

    def _spoil(self, batch: Batch) -> None:
        """Change what is no tensor."""
        for request in batch.requests:
            changes = (
                (request.token_ids, "append", 1),
                (request.token_ids, "__setitem__", 0, 1),
                (request, "__setattr__", "token_ids", [1]),
                (request, "__setattr__", "max_tokens", 1),
                (request.draft_state, "clear"),
            )
            for what, how, *arguments in changes:
                with suppress(AttributeError, TypeError):
                    getattr(what, how)(*arguments)

    def _keep(self, lent: Any) -> None:
        if isinstance(lent, Tensor):
            self._seen.append(lent)
        elif isinstance(lent, dict):
            for value in lent.values():
                self._keep(value)
        elif isinstance(lent, FutureMap):
            self._keep(vars(lent))
        elif attrs.has(type(lent)):
            for field in attrs.fields(type(lent)):
                self._keep(getattr(lent, field.name))


class HostileInVerify(Hostile):
    """It is lent what is verified too, before the core verifies."""

    @hookimpl
    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput | None:
        self._write(batch, draft, draft.mask, draft.depths, target_output)
        target_output.per_node = {"own": torch.rand(len(target_output.predict), 2)}
        return None


@pytest.fixture
def without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are bounded, as in a run of a user, and not told."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)


SCENES: dict[str, tuple[type[Hostile], dict[str, Any]]] = {
    "overlap, a pool that is short": (Hostile, {"page_size": 1, "max_total_tokens": 90}),
    "overlap, mixed steps": (
        HostileInVerify,
        {"page_size": 16, "enable_mixed_chunk": True, "chunked_prefill_size": 7},
    ),
    "mixed steps, padded": (
        HostileInVerify,
        {"page_size": 16, "enable_mixed_chunk": True, "chunked_prefill_size": 7},
    ),
    "plain loop": (
        HostileInVerify,
        {"page_size": 3, "disable_overlap_schedule": True, "chunked_prefill_size": 5},
    ),
}


@pytest.fixture(params=SCENES)
def attacked(
    request: pytest.FixtureRequest, tree: bool, tiny_model: Path, without_debug: None
) -> Iterator[tuple[LLM, Hostile]]:
    """An engine under the hostile drafter; requests wait, are chunked, retracted, and cached."""
    drafter, scene = SCENES[request.param]
    algorithm = drafter(tree=tree)
    with LLM(
        tiny_model,
        dtype="float64",
        device="cpu",
        max_running_requests=4,
        speculative_algorithm=algorithm,
        **scene,
    ) as llm:
        if "padded" in request.param:  # as on a GPU: what passes return is in buffers that stay
            llm.engine.steps.runner.pad_passes(RunsAgain())
        yield llm, algorithm
        stats = llm.stats()
        assert stats["accepted"] > stats["verifications"], "some drafts are right all the same"
        assert algorithm.writes > 10 * stats["decode_steps"]


@pytest.fixture(params=["chain", "tree"])
def tree(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "tree")


@fuzzed
@given(seed=st.integers(0, 1 << 30), kind=st.sampled_from(KINDS))
def test_a_hostile_drafter_changes_no_token(
    seed: int, kind: str, attacked: tuple[LLM, Hostile], reference: Any
) -> None:
    llm, algorithm = attacked
    algorithm.random = random.Random(seed)
    algorithm.known = {p: p + tokens for p, tokens in reference.tokens([kind] * 7).items()}
    torch.manual_seed(seed)
    outputs = llm.generate(reference.prompts, reference.params[kind])
    for output, expected in zip(outputs, reference.outputs[kind], strict=True):
        assert output.token_ids == expected.token_ids
        assert output.logprobs is not None
        for ours, theirs in zip(output.logprobs, expected.logprobs, strict=True):
            assert ours.keys() == theirs.keys()
    llm.check_pool()
