"""Mistakes that authors make, each put into a plugin that works: the shipped EAGLE3, STANDALONE
and NGRAM.

The kit must find each by a message in which its author recognizes it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    VerifyOutput,
    hookimpl,
    layers,
)
from specplug_eagle3 import Eagle3
from specplug_eagle3.worker import Eagle3Worker
from specplug_ngram import Ngram
from specplug_ngram.worker import NgramWorker
from specplug_standalone import Standalone
from specplug_standalone.worker import StandaloneWorker


@attrs.frozen
class Mutant:
    """A plugin with a mistake.

    Attributes:
        name: what the mistake is.
        make: makes the plugin.
        check: the id of the one that is to find it.
        words: that its message has.
        accept_length: that its author declares.
        settings: of the runs.
    """

    name: str
    make: Callable[[], object]
    check: str
    words: tuple[str, ...]
    accept_length: float | None = None
    settings: Mapping[str, Any] = attrs.field(factory=dict)


MUTANTS: list[Mutant] = []


def mutant(
    name: str, check: str, *words: str, accept_length: float | None = None, **settings: Any
) -> Callable[[type], type]:
    """Add a mutant: the class of a plugin, or of a worker of a shipped one."""

    def added(kind: type) -> type:
        make: Callable[[], object] = kind
        for worker, plugin in ((Eagle3Worker, WithEagle3), (StandaloneWorker, WithModel)):
            if issubclass(kind, worker):
                make = _maker(plugin, kind)
        MUTANTS.append(Mutant(name, make, check, words, accept_length, settings))
        return kind

    return added


def _maker(plugin: type, worker: type) -> Callable[[], object]:
    return lambda: plugin(worker)


class WithEagle3(Eagle3):
    """EAGLE3 with another worker."""

    def __init__(self, worker: type = Eagle3Worker) -> None:
        self.worker = worker

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        return self.worker(runtime)


class WithModel(Standalone):
    """STANDALONE with another worker."""

    def __init__(self, worker: type = StandaloneWorker) -> None:
        self.worker = worker

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        return self.worker(runtime)


class ChangedRuntime:
    """A runtime of which a worker sees another ``plan_attention``."""

    def __init__(self, runtime: Runtime, plan: Callable[..., AttentionPlan]) -> None:
        self._runtime = runtime
        self.plan_attention = plan

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)


# What a feature drafter reads


@mutant("own instead of next tokens", "blind.reference", "own_tokens", "next_tokens")
class OwnTokens(Eagle3Worker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        return super().extend(batch, attrs.evolve(output, next_tokens=output.own_tokens))


@mutant("features of the row before", "blind.reference", "features", "row before")
class FeaturesBefore(Eagle3Worker):
    def features(self, output: CommittedOutput) -> Tensor:
        found = super().features(output)
        return torch.cat((found[:1], found[:-1]))


@mutant("wrong last row", "blind.reference", "row before the last", "last_rows")
class WrongLastRow(Eagle3Worker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        rows = (output.last_rows - 1).clamp(min=0)
        return super().extend(batch, attrs.evolve(output, last_rows=rows))


@mutant("chunk tail", "blind.invariance", "chunk=")
class ChunkTail(Eagle3Worker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        if batch.is_prefill:
            tokens = output.next_tokens.clone()
            for row, last in zip(output.last_rows.tolist(), batch.last_chunk, strict=True):
                if not last:
                    tokens[row] = 0
            output = attrs.evolve(output, next_tokens=tokens)
        return super().extend(batch, output)


@mutant("d2t off by one", "gold.acceptance", "expected", "declared", accept_length=4.0)
class OtherVocabulary(Eagle3Worker):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.token_ids = (self.token_ids + 1).clamp(max=runtime.vocab_size - 1)


@mutant("no final norm", "gold.acceptance", "declared", accept_length=4.17)
class NoFinalNorm(Eagle3Worker):
    def logits(self, hidden: Tensor) -> Tensor:
        return layers.linear(hidden, self.network.lm_head.weight)


@mutant("layer outputs for layer inputs", "gold.acceptance", "declared", accept_length=4.17)
class LayerOutputs(Eagle3Worker):
    def _load(self, runtime: Runtime) -> Any:
        network = super()._load(runtime)
        ids = tuple(i + 1 for i in network.config.aux_layer_ids)
        network.config = attrs.evolve(network.config, aux_layer_ids=ids)
        return network


# Positions, slots, keys


@mutant("rotary off by one", "blind.reference", "positions", "one too great")
class RotaryOffByOne(Eagle3Worker):
    def advance(
        self, tokens: Tensor, hidden: Tensor | None, plan: AttentionPlan
    ) -> tuple[Tensor, Tensor]:
        assert hidden is not None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(self._cache, layer, q, k, v)

        following = self.forward(tokens, hidden, plan.positions + 1, attend)
        return self.logits(following), following


@mutant("positions of a chunk from 0", "blind.invariance", "positions", "batch.seq_lens")
class PositionsFromZero(Eagle3Worker):
    def _extend(self, batch: Batch, output: CommittedOutput) -> dict[str, Tensor]:
        self._starts = batch.seq_lens if batch.is_prefill and batch.size == 1 else None
        return super()._extend(batch, output)

    def forward(
        self, tokens: Tensor, hidden: Tensor, positions: Tensor, attend: layers.Attend
    ) -> Tensor:
        starts = getattr(self, "_starts", None)
        self._starts = None
        return super().forward(
            tokens, hidden, positions if starts is None else positions - starts, attend
        )


@mutant("slot off by one", "blind.reference", "slots", "lead")
class SlotOffByOne(StandaloneWorker):
    """Drafted keys go one slot too far; the slot between holds what an earlier step left."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        self.lead = 2


@mutant("rows unwritten after a tree", "blind.reference", "keys", "accepted rows", "written")
class UnwrittenRows(StandaloneWorker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        if batch.is_prefill:
            return super().extend(batch, output)
        return self.receive(batch, output.bonus_tokens)


@mutant("tree mask all true", "blind.reference", "wide shape", "mask")
class MaskAllTrue(StandaloneWorker):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)

        def plan(*given: Any, mask: Tensor | None = None, **named: Any) -> AttentionPlan:
            seen = None if mask is None else torch.ones_like(mask)
            return runtime.plan_attention(*given, mask=seen, **named)

        self.runtime = ChangedRuntime(runtime, plan)  # type: ignore[assignment]


@mutant("logits of the row before", "blind.reference", "row before the last")
class LogitsBefore(StandaloneWorker):
    def _first(
        self, batch: Batch, roots: Tensor, own_tokens: Tensor, count: Tensor
    ) -> tuple[Tensor, Tensor]:
        tokens, plan, rows = self._pending_rows(batch, roots, own_tokens, count)
        logits = self.logits(tokens, plan, (rows - 1).clamp(min=0))
        return self.likeliest(batch, logits, batch.seq_lens.unsqueeze(1), 1)


@mutant("perfect draft model misread", "blind.perfect", "its own draft model", "keys")
class PendingLost(StandaloneWorker):
    """Of the tokens that were accepted the last one is never read."""

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        made = super().extend(batch, output)
        if not batch.is_prefill and made.state:
            made.state["count"] = (made["count"] - 1).clamp(min=0)
        return made


# Noise


@mutant("noise off by one", "blind.noise", "noise", "position")
class NoiseOffByOne(Eagle3Worker):
    def _coupled(self, batch: Batch, logits: Tensor, *positions: Tensor | int) -> Tensor:
        return super()._coupled(batch, logits, *positions, 1)


@mutant("noise of a draft model off by one", "blind.noise", "noise", "position")
class ModelNoiseOffByOne(StandaloneWorker):
    def _coupled(self, batch: Batch, logits: Tensor, *positions: Tensor | int) -> Tensor:
        return super()._coupled(batch, logits, *positions, -1)


# What is kept


@mutant("a row that is not reset", "blind.invariance", "row's state", "reset")
class RowNotReset(Eagle3Worker):
    """Features are mixed with what the row's last request has left."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        size = runtime.req_table_size, self._hidden_size
        self._left = torch.zeros(size, dtype=runtime.dtype, device=runtime.device)

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        made = super().extend(batch, output)
        if made.state:
            left = self._left[batch.req_indices]
            hidden = made["hidden_states"] + left
            logits = self.logits(hidden)
            made.state["tokens"], made.state["scores"] = self.likeliest(batch, logits, 0)
            self._left[batch.req_indices] = hidden * 0.5
        return made


@mutant("a lent tensor that is kept", "conduct.lifetime", "target_output.bonus_tokens", "clone()")
class LentTensorKept(Eagle3Worker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        made = super().extend(batch, output)
        self._roots = output.bonus_tokens
        made.bonus_tokens = output.bonus_tokens.clone()
        return made

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        draft = super().propose(batch, draft_input)
        if len(self._roots) == batch.size and draft.width > 1:
            draft.tokens[:, 1] = (draft.tokens[:, 1] + self._roots) % 4096
        return draft


@mutant("plan kept over steps", "conduct.lifetime", "AttentionPlan", "earlier step")
class PlanKept(StandaloneWorker):
    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime)
        plans: dict[Any, AttentionPlan] = {}

        def plan(batch: Batch, starts: Tensor, width: int, **named: Any) -> AttentionPlan:
            key = batch.size, width, named.get("offset")
            if key not in plans:
                plans[key] = runtime.plan_attention(batch, starts, width, **named)
            return plans[key]

        self.runtime = ChangedRuntime(runtime, plan)  # type: ignore[assignment]


@mutant("a dict that grows per request", "conduct.leaks", "worker.requests", "100 ->", "300")
class NothingForgotten(Ngram):
    @hookimpl
    def on_request_finished(self) -> None:
        """Forget nothing."""


@mutant("a list that grows per step", "conduct.leaks", "worker._steps", "entries")
class StepsListed(Eagle3Worker):
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        self.__dict__.setdefault("_steps", []).append(batch.size)
        return super().propose(batch, draft_input)


@mutant("a tensor that grows", "conduct.leaks", "plugin.tokens", "entries")
class TensorGrows(Ngram):
    tokens = torch.zeros(0)

    @hookimpl(tryfirst=True)
    def on_host_tensors(
        self, runtime: Runtime, request_ids: Any, tensors: Mapping[str, Tensor]
    ) -> None:
        worker: NgramWorker = runtime.worker
        worker.observe(request_ids, tensors["tokens"], tensors["counts"])
        self.tokens = torch.cat((self.tokens, tensors["tokens"].flatten()))


# What is waited for


@mutant("item() in propose", "conduct.waits", "propose", "item()", "mutants.py")
class Item(Eagle3Worker):
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        if batch.seq_lens.max().item() < 0:
            raise AssertionError
        return super().propose(batch, draft_input)


@mutant("tolist() in build_draft_input", "conduct.waits", "build_draft_input", "tolist()", "host=")
class ToList(Ngram):
    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        self.lens = target_output.accept_lens.tolist()
        return super().build_draft_input(runtime, batch, target_output)


@mutant("an index by a mask", "conduct.waits", "mask", "build_draft_input")
class MaskIndex(StandaloneWorker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        own = output.own_tokens
        self.known = own[own > 0]
        return super().extend(batch, output)


@mutant("a branch on a tensor", "conduct.waits", "bool()", "propose")
class Branch(StandaloneWorker):
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        if (draft_input["count"] > 99).any():
            raise AssertionError
        return super().propose(batch, draft_input)


# Drafts of a wrong form or value


class Changed(Eagle3):
    """EAGLE3 whose drafts are changed."""

    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        raise NotImplementedError

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        changed: Draft = self.change(super().propose(runtime, batch, draft_input), runtime, batch)
        return changed


@mutant("tokens of a wrong dtype", "exact.tokens", "propose", "int32", "int64")
class WrongDtype(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        return attrs.evolve(draft, tokens=draft.tokens.to(torch.int32))


@mutant("a token out of range", "exact.tokens", "propose", "tokens from 0 to")
class TokenOutOfRange(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        draft.tokens[:, 1:] += runtime.vocab_size
        return draft


@mutant("parents after children", "exact.tokens", "propose", "parents")
class ParentsAfter(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        if draft.parents is None:
            return draft
        parents = draft.parents.clone()
        parents[:, 1:] = draft.width - 1
        return attrs.evolve(draft, parents=parents)


@mutant("depth too small", "exact.tokens", "propose", "depth")
class DepthTooSmall(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        if draft.parents is None:
            return draft
        return attrs.evolve(draft, depth=1)


@mutant("another root", "exact.tokens", "propose", "roots")
class OtherRoot(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        draft.tokens[:, 0] = 5
        return draft


@mutant("more nodes than are declared", "exact.tokens", "num_draft_tokens")
class TooWide(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        return Draft.chain(torch.cat((draft.tokens, draft.tokens), dim=1))


@mutant("propose returns nothing", "exact.tokens", "propose", "None", "specplug.Draft")
class Nothing(Changed):
    def change(self, draft: Draft, runtime: Runtime, batch: Batch) -> Any:
        return None


@mutant("a verify that accepts all", "exact.tokens", "verify", "accept_index")
class AcceptsAll(Eagle3):
    @hookimpl
    def verify(self, draft: Draft, target_output: Any) -> VerifyOutput | None:
        if draft.widths is not None or draft.places is not None or draft.parents is not None:
            return None
        bs, width = draft.tokens.shape
        index = torch.arange(bs * width).view(bs, width)
        predict = target_output.predict
        return VerifyOutput(
            predict=predict,
            accept_index=index,
            accept_lens=torch.full((bs,), width),
            bonus_tokens=predict.view(bs, width)[:, -1].clone(),
        )


@mutant("a state that is not as declared", "exact.tokens", "build_draft_input", "state_spec()")
class OtherState(Eagle3Worker):
    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        made = super().extend(batch, output)
        if made.state:
            made.state["hidden_states"] = made["hidden_states"][:, :-1]
        return made


@mutant("a state that must have come", "conduct.state", "never arrives", "build_disagg_draft_input")
class NeedsState(Eagle3Worker):
    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        for request in batch.requests:
            assert request.draft_state["hidden_states"] is not None
        return super().receive(batch, last_tokens)


@mutant("no thought of an empty batch", "conduct.state", "no request", "fixup_idle")
class NoIdle(Eagle3):
    @hookimpl
    def fixup_idle(self, batch: Batch, draft_input: DraftInput) -> DraftInput:
        longest = max(len(request.token_ids) for request in batch.requests)
        return DraftInput(bonus_tokens=draft_input.bonus_tokens[:longest])


# Schedules


@mutant("first chunk alone is read", "blind.invariance", "chunk=")
class FirstChunkAlone(Ngram):
    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        if batch.is_prefill and not all(batch.first_chunk):
            chunk_ends = tuple(
                end if first else 0
                for end, first in zip(batch.chunk_ends, batch.first_chunk, strict=True)
            )
            batch = attrs.evolve(batch, chunk_ends=chunk_ends)
        return super().build_draft_input(runtime, batch, target_output)


@mutant("padding is read as text", "blind.replay", "prompt of the same text", "build_draft_input")
class PaddingRead(Ngram):
    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        made = super().build_draft_input(runtime, batch, target_output)
        if not batch.is_prefill:
            width = made.host["tokens"].shape[1]
            made.host["counts"] = torch.full_like(target_output.accept_lens, width)
        return made


# Hooks of a wrong form


@mutant("a hook is missing", "form.hooks", "propose")
class HookMissing:
    @hookimpl
    def describe(self) -> Any:
        return Eagle3().describe()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        return self

    @hookimpl
    def build_draft_input(self, target_output: CommittedOutput) -> DraftInput:
        return DraftInput(bonus_tokens=target_output.bonus_tokens)


@mutant("a hook is misspelt", "form.hooks", "validate_confg", "validate_config")
class HookMisspelt(Eagle3):
    @hookimpl
    def validate_confg(self, config: Any) -> Any:
        return config


@mutant("hookimpl is forgotten", "form.hooks", "grow_draft", "hookimpl")
class HookUnmarked(Eagle3):
    def grow_draft(self, draft: Draft) -> Draft:
        return draft


@mutant("a hook's argument is not the contract's", "form.hooks", "fixup_idle", "requests")
class ArgumentUnknown(Eagle3):
    @hookimpl
    def fixup_idle(self, requests: Any) -> Any:
        return requests
