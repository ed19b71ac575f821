"""An algorithm that another one holds as a part: its hooks, bound to a runtime of its own.

``runtime.part("NGRAM")`` in ``create_worker`` makes one. The algorithm that holds it calls its
hooks, with the batches of the run. Their results are checked as those of a run's algorithm are, and
their errors name the part's plugin. Extensions wrap the hooks of the run's algorithm alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import attrs
import torch
from torch import Tensor

from specplug.algorithm import SpecConfig
from specplug.errors import PluginError, UsageError
from specplug.registry import Registry, build_plugin_manager
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.draft import Draft, DraftInput
from specplug.speculative.draft_state import StateTensor
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.graph_runner import PassRunner
from specplug.speculative.hook_calls import HookCalls, parts_of
from specplug.speculative.host_copy import upload
from specplug.speculative.late_feed import MOST_ROWS, LateFeed, stand_ins
from specplug.speculative.planned_drafts import evolved, sub_batch
from specplug.speculative.verify import OF_REQUESTS, CommittedOutput

if TYPE_CHECKING:
    from specplug.speculative.draft_plan import ForeseenDrafts
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.runtime import Runtime

_SHORT_PROMPT = 32
"""Rows of a prompt, without what the prefix cache has, up to which it may be fed late."""
_IDLE = 16
"""Decode steps without a draft of an algorithm after which it is fed short prompts late, of an 8B
model EAGLE-3 takes 0.3 ms of 5 for one, and of decode steps nothing for which nobody waits."""

_WORTH_A_PASS = 192
"""Rows of several steps from which on they are fed before their algorithm drafts: up to 256 are one
recorded pass, which takes as long for fewer."""
_BUSY_WITH_HOST = ("cpu",)
"""Devices on which nothing runs while the host plans: there what has drafted is fed when it drafts
again."""


class PartHolder:
    """A runtime whose algorithm may hold parts.

    Attributes:
        parts: those that ``create_worker`` asked for, by name.
    """

    def __init__(self) -> None:
        self.parts: dict[str, Part] = {}

    def close_parts(self) -> None:
        """Free the parts' models."""
        for part in self.parts.values():
            part.close()
        self.parts.clear()

    def every_config(self) -> Iterator[SpecConfig]:
        """Yield the settings of the algorithm, and those of its parts and of theirs."""
        yield cast("Runtime", self).config
        for part in self.parts.values():
            yield from cast(PartHolder, part.runtime).every_config()

    def part(self, algorithm: str | object, **settings: Any) -> Part:
        runtime = cast("Runtime", self)
        cast("Any", self).check_open("part")
        if not runtime.host.parts:
            raise UsageError(f"{runtime.host.name} runs one algorithm alone, without parts")
        made = Part(runtime, algorithm, settings)
        if made.name in self.parts:
            raise PluginError(f"part: there is a part {made.name} already; expected another name")
        self.parts[made.name] = made
        return made


class PartRuntime(PartHolder):
    """The ``Runtime`` of a part: configuration and worker are its own, everything else the run's.

    Args:
        runtime: of the algorithm that holds the part.
        config: the part's.
        records: whether its passes have the shape of a target verify.
    """

    def __init__(self, runtime: Runtime, config: SpecConfig, *, records: bool) -> None:
        super().__init__()
        self._runtime = runtime
        self._records = records
        self._eager: list[PassRunner] = []
        self.config = config
        self.worker: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runtime, name)

    def record_draft(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        if self._records or not callable(forward):
            return self._runtime.record_draft(forward)
        self._eager.append(PassRunner(forward))
        return self._eager[-1]

    def close(self) -> None:
        """Free what belongs to the part alone."""
        self.worker = None
        for runner in self._eager:
            runner.close()
        self._eager.clear()
        self.close_parts()


class Part:
    """One algorithm inside of another one.

    The state that a part leaves has its names after the part's, as ``NGRAM.tokens``, wherever the
    holder sees it: in ``DraftInput.state`` and in ``state_spec()``.

    Args:
        runtime: of the algorithm that holds it.
        algorithm: a name as users type it, or a plugin object.
        settings: what ``SpecConfig.resolve`` takes of the user, over the part's defaults.

    Attributes:
        name: the algorithm's.
        config: its settings, as it takes them.
        has_draft_model: whether it has weights of its own.

    Raises:
        UsageError: the part refuses its settings, or cannot be a part here.
        CheckpointError: its weights cannot be loaded.
    """

    def __init__(
        self, runtime: Runtime, algorithm: str | object, settings: Mapping[str, Any]
    ) -> None:
        selected = Registry().select(algorithm)
        self.name, held = selected.name, runtime.config
        self.has_draft_model = selected.info.capabilities.draft_model
        self._prefix = f"{self.name}."
        self._hooks = HookCalls(build_plugin_manager(selected, (), CoreDefaults()), selected)
        if not self._hooks.core_verifies:
            raise UsageError(f"{self.name} has a verify() of its own: it cannot be a part")
        resolved = SpecConfig.resolve(
            selected.info,
            model_name=runtime.model_path,
            target_config=held.target_config,
            **settings,
        )
        self.config = self._hooks.validate_config(resolved)
        if self.config.num_lookahead_slots > held.num_lookahead_slots:
            raise PluginError(
                f"part: {self.name} writes {self.config.num_lookahead_slots} slots while it "
                f"drafts; expected at most the {held.num_lookahead_slots} of {held.algorithm}; "
                "raise num_draft_slots or num_draft_tokens in its validate_config()"
            )
        records = self._hooks.supports_target_verify_for_draft()
        self._own = PartRuntime(runtime, self.config, records=records)
        self._runtime = cast("Runtime", self._own)
        self._own.worker = self._hooks.create_worker(self._runtime)
        self._future_map: FutureMap | None = None
        self._takes_late_feed = selected.info.capabilities.late_feed
        self._late: LateFeed | None = None
        self._is_fed = True
        self._idle = 0  # decode steps since it last drafted
        self._drafted: frozenset[str] = frozenset()  # whom it drafts for, if it is fed ahead
        self._feeds_ahead = runtime.device.type not in _BUSY_WITH_HOST
        self._warmed: set[int] = set()

    @property
    def worker(self) -> Any:
        """What its ``create_worker`` returned."""
        return self._runtime.worker

    def state_spec(self) -> dict[str, StateTensor]:
        """Return what its worker declares, for the ``state_spec()`` of the worker that holds it."""
        return self._named(self._hooks.state_spec)

    def close(self) -> None:
        """Free its model."""
        if self._late is not None:
            self._late.clear()
        self._own.close()

    # Its hooks, for the algorithm that holds it

    def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        """Feed it what the target has computed; see the hook. What is fed late waits, and leaves no
        state."""
        self._is_fed = not self._waits(batch)
        if not (batch.is_prefill or batch.is_warm_up):
            self._idle += 1
            if self._late is not None and self._is_fed:
                self._late.skip(batch)
                self._drafted = frozenset()
        if self._late is not None and batch.is_warm_up and not batch.is_prefill:
            self._feed_stand_ins(batch, target_output)
        if self._late is None or self._is_fed:
            own, output = _copies(batch, target_output)
            made = self._hooks.build_draft_input(self._runtime, own, output, self.future_map)
            return self._of_holder(made)
        if batch.seq_lens.is_cuda:  # a recorded pass writes there again
            own, output = _copies(batch, target_output)
            output.per_node = {name: tensor.clone() for name, tensor in output.per_node.items()}
        else:
            own, output = self._lend(batch), target_output
        if self._late.add(own, output):
            self._feed(batch, drafts_follow=False)
        if not batch.is_prefill:
            self._feed_ahead(batch)
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    def _waits(self, batch: Batch) -> bool:
        """Return whether it is not fed a step yet: a decode step, unless it goes on for all, or
        whole prompts that are short, if it has not drafted for long. Pages of these are not shared
        until it is fed."""
        if self._late is None or batch.is_warm_up:
            return False
        if not batch.is_prefill:
            # As an algorithm alone is where it has drafted for all, and nothing else of them waits.
            ids = [request.request_id for request in batch.requests]
            goes_on = self._drafted.issuperset(ids) and self._late.waiting.isdisjoint(ids)
            return not goes_on
        is_short = max(batch.chunk_widths) <= _SHORT_PROMPT
        return is_short and self._idle >= _IDLE and all(batch.first_chunk + batch.last_chunk)

    def _feed(self, batch: Batch, *, drafts_follow: bool = True) -> None:
        """Feed it what waits for the requests of a batch; see ``LateFeed.take``."""
        assert self._late is not None
        for own, output in self._late.take(batch, drafts_follow=drafts_follow):
            self._feed_one(own, output, drafts_follow)

    def _feed_ahead(self, batch: Batch) -> None:
        """Feed it this step's requests for which it has drafted: mostly it goes on, and a device is
        fed while the host plans the next step."""
        if not self._drafted:
            return
        drafted, self._drafted = self._drafted, frozenset()
        places = [n for n, each in enumerate(batch.requests) if each.request_id in drafted]
        if not places:
            return
        if len(places) < batch.size:
            batch = sub_batch(batch, places, upload(places, batch.req_indices.device))
        self._feed(batch)

    def feed_known(self, batch: Batch, *, waits: bool) -> None:
        """Feed it what steps before this one have left, if that is worth a pass.

        Args:
            waits: whether a device waits for the host before the next step, and catches it up
                meanwhile. Else it is fed if it drafts now and then: to catch it up at once, when it
                is to draft, takes the host longer than the device, which would wait.
        """
        if self._late is None or not (self._feeds_ahead and (waits or self._idle < _IDLE)):
            return
        for own, output in self._late.take_known(batch, _WORTH_A_PASS):
            self._feed_one(own, output, drafts_follow=False)

    def _feed_stand_ins(self, batch: Batch, output: CommittedOutput) -> None:
        """Feed it what may come late, in a warm-up: of a batch size long chunks only once."""
        longest = (
            2 if batch.size in self._warmed else min(MOST_ROWS, self._runtime.context_len // 2)
        )
        self._warmed.add(batch.size)
        for drafts_follow in (False, True):
            for own, joined in stand_ins(batch, output, max(2, longest)):
                self._feed_one(own, joined, drafts_follow)

    def _feed_one(self, own: Batch, output: CommittedOutput, drafts_follow: bool) -> None:
        """Feed it one of the batches that ``LateFeed`` yields."""
        own.drafts_follow = drafts_follow
        rows, seq_lens = own.req_indices.clone(), own.seq_lens + output.accept_lens
        if own.is_prefill:
            widths = own.chunk_widths
            own.attention = self._runtime.plan_attention(own, own.seq_lens, widths)
        made = self._hooks.build_draft_input(self._runtime, own, output, self.future_map)
        if drafts_follow or made.state:
            self._hooks.publish_and_stash(self.future_map, rows, seq_lens, output, made)

    def build_disagg_draft_input(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return what it drafts from after another instance's prefill; see the hook."""
        self._is_fed = True
        views = tuple(PartRequest(request, self._prefix) for request in batch.requests)
        own = evolved(self._lend(batch), requests=views)
        made = self._hooks.build_disagg_draft_input(
            self._runtime, own, last_tokens.clone(), self.future_map
        )
        return self._of_holder(made)

    def foresee_drafts(self, requests: Sequence[RequestView]) -> ForeseenDrafts:
        """Return what it would draft, if it says so; see the hook."""
        return self._hooks.foresee_drafts(self._runtime, requests)

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Return what it drafts; see the hook.

        Args:
            draft_input: the holder's.
        """
        roots = draft_input.bonus_tokens
        self._idle = 0
        if self._hooks.takes_foreseen:  # nothing is fed or lent for that
            return self._hooks.propose(self._runtime, batch, draft_input, roots=roots)
        if self._late is None:
            given = self._of_part(draft_input)
        else:
            if self._feeds_ahead:
                self._drafted = frozenset([request.request_id for request in batch.requests])
            self._feed(batch)
            rows = batch.req_indices
            rows = rows if is_plain(self.future_map) else rows.clone()
            state = self._hooks.resolve(self.future_map, rows)[1].state
            given = DraftInput(bonus_tokens=roots.clone(), state=state)
        return self._hooks.propose(self._runtime, self._lend(batch), given, roots=roots)

    def grow_draft(self, batch: Batch, draft_input: DraftInput, draft: Draft) -> Draft:
        """Return another algorithm's draft, with what this one adds; see the hook.

        Args:
            draft_input: the holder's.
        """
        given = self._of_part(draft_input)
        roots = draft_input.bonus_tokens
        return self._hooks.grow_draft(self._runtime, self._lend(batch), given, draft, roots=roots)

    def fixup_idle(self, batch: Batch, draft_input: DraftInput) -> DraftInput:
        """Return its draft input of no request; see the hook."""
        self._is_fed = True
        given = self._of_part(draft_input)
        return self._of_holder(self._hooks.fixup_idle(self._runtime, self._lend(batch), given))

    def export_draft_state(self, batch: Batch) -> dict[str, Tensor | None]:
        """Return its state that travels with prefilled requests; see the hook."""
        own = self._lend(batch)
        found = self._hooks.export_draft_state(
            self._runtime, own, self.future_map, req_indices=batch.req_indices
        )
        return self._named(found)

    # For the core alone

    @property
    def hooks(self) -> HookCalls:
        """Of its plugin alone."""
        return self._hooks

    @property
    def runtime(self) -> Runtime:
        """As it is lent."""
        return self._runtime

    @property
    def future_map(self) -> FutureMap:
        """Its own."""
        assert self._future_map is not None, "begin() makes it"
        return self._future_map

    def begin(self) -> None:
        """Make its future map: ``runtime.req_table_size`` is final."""
        self._future_map = self._hooks.create_future_map(self._runtime)

    def feed_late(self, name: str) -> Iterator[LateFeed]:
        """Let decode steps wait until it drafts, and so those that it holds, as far as they can
        take that; yield what waits, for the one that plans know as ``name``."""
        if self._takes_late_feed:
            self._late = LateFeed(name)
            yield self._late
            return
        for part in parts_of(self._runtime):
            yield from part.feed_late(name)

    def resolve(self, req_indices: Tensor) -> dict[str, Tensor | None]:
        """Return the state that it left for these requests [bs], under the holder's names; none if
        it is fed late, right before it drafts, or leaves none."""
        if self._late is not None or (is_plain(self.future_map) and not self.future_map.state):
            return {}
        return self._named(self._hooks.resolve(self.future_map, req_indices.clone())[1].state)

    def publish_and_stash(
        self,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Publish and stash in its own map, unless what was committed waits, or nobody reads that
        map; ``draft_input`` is the holder's."""
        if not self._is_fed:
            return
        own = self._of_part(draft_input)
        has_state = own.state or self.future_map.state
        if not (has_state or self._hooks.reads_map) and is_plain(self.future_map):
            return
        self._hooks.publish_and_stash(self.future_map, req_indices, seq_lens, output, own)

    def owns(self, name: str) -> bool:
        """Return whether a state of the holder's is this part's."""
        return name.startswith(self._prefix)

    def _lend(self, batch: Batch) -> Batch:
        """Return a batch of the part's own: other parts get theirs."""
        rows, lens = batch.req_indices.clone(), batch.seq_lens.clone()
        return evolved(batch, req_indices=rows, seq_lens=lens)

    def _named(self, state: Mapping[str, Any]) -> dict[str, Any]:
        return {self._prefix + name: value for name, value in state.items()}

    def _of_holder(self, made: DraftInput) -> DraftInput:
        return DraftInput(bonus_tokens=made.bonus_tokens, state=self._named(made.state))

    def _of_part(self, given: DraftInput) -> DraftInput:
        start = len(self._prefix)
        state = {name[start:]: t for name, t in given.state.items() if self.owns(name)}
        return DraftInput(bonus_tokens=given.bonus_tokens.clone(), state=state)


def _copies(batch: Batch, output: CommittedOutput) -> tuple[Batch, CommittedOutput]:
    """Return a batch and an output in tensors of a part's own, but for those of each node: in one
    launch, each of which takes a host longer than a GPU."""
    rows, lens, *of_requests = _even_copies(
        [batch.req_indices, batch.seq_lens, *(getattr(output, name) for name in OF_REQUESTS)]
    )
    committed = dict(zip(OF_REQUESTS, of_requests, strict=True))
    own = evolved(batch, req_indices=rows, seq_lens=lens)
    return own, CommittedOutput(**committed, per_node=output.per_node)


def _even_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of tensors [n] int64, each at a multiple of 16 bytes, as kernels are compiled
    for."""
    if not tensors[0].is_cuda:  # a copy takes less there than to put them together
        return [tensor.clone() for tensor in tensors]
    return _even_pieces(tensors)


def _even_pieces(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return copies as ``_even_copies`` does, put together."""
    sizes = [tensor.numel() for tensor in tensors]
    if not any(size % 2 for size in sizes):
        return list(torch.cat(list(tensors)).split_with_sizes(sizes))
    pieces = [piece for tensor in tensors for piece in (tensor, tensor[: tensor.numel() % 2])]
    sizes = [piece.numel() for piece in pieces]
    return list(torch.cat(pieces).split_with_sizes(sizes)[::2])


@attrs.frozen(eq=False)
class PartRequest:
    """A request as a part sees it: the state that came with it is the part's alone."""

    _request: RequestView
    _prefix: str

    @property
    def draft_state(self) -> dict[str, Tensor]:
        start, state = len(self._prefix), self._request.draft_state
        return {name[start:]: t for name, t in state.items() if name.startswith(self._prefix)}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._request, name)
