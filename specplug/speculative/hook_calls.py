"""The hooks of a run, each as a typed function whose result is checked (``hook_results``).

Whoever drives an algorithm, the embedded engine or another host, calls ``HookCalls`` and never
pluggy. A function has its hook's name and its hook's arguments; what the core needs besides is
keyword-only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, cast

import attrs
import pluggy
import torch
from torch import Tensor

from specplug import debug, hookspecs
from specplug.algorithm import SpecConfig
from specplug.errors import UsageError
from specplug.speculative.choice.measured_choice import MeasuredChoice
from specplug.speculative.draft import Draft, DraftInput, described
from specplug.speculative.draft_plan import DraftChoices, DraftPlan, ForeseenDrafts, Hindsight
from specplug.speculative.draft_state import StateTensor, state_spec
from specplug.speculative.foreseen_draft import ForeseenStep
from specplug.speculative.future_map import FutureMap, is_plain
from specplug.speculative.hook_results import (
    Limits,
    check_draft,
    check_draft_input,
    check_foreseen,
    check_integers,
    check_per_node,
    check_tensors,
    check_type,
    check_verified,
    rebuilt,
)
from specplug.speculative.host_relay import IN_FLIGHT, HostRelay
from specplug.speculative.lent_runtime import LentRuntime
from specplug.speculative.parts_future_map import PartsFutureMap
from specplug.speculative.plugin_guard import PluginGuard
from specplug.speculative.several_algorithms import SeveralAlgorithms
from specplug.speculative.trainer import DraftFiles, Trainer, TrainingBatch, TrainingLoss
from specplug.speculative.verify import CommittedOutput, TargetOutput, VerifyOutput, verify_tree

if TYPE_CHECKING:
    from specplug.registry import Extension, SelectedAlgorithm
    from specplug.speculative.defaults import CoreDefaults
    from specplug.speculative.hook_order import Batch, RequestView
    from specplug.speculative.part import Part
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime
    from specplug.speculative.trainer import TrainingRuntime

_RIGHT = "right"
"""The name under which hindsight goes to the host."""
_MOST_SENT = 16
"""Steps in a row, without a draft, whose tensors for the host are handed over together: one after
another takes longer, since a pass has run between them."""


class HookCalls:
    """The hooks of one run, typed and checked.

    Args:
        manager, algorithm, extensions: see ``PluginGuard``.

    Attributes:
        as_foreseen: how many nodes of what the algorithm foresaw are taken in the place of its
            drafts, if it foresees any: ``HookOrder`` says so for a step. None: it is asked.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        algorithm: SelectedAlgorithm,
        extensions: Iterable[Extension] = (),
    ) -> None:
        self._plugins = PluginGuard(manager, algorithm, extensions)
        self._info = algorithm.info
        self._defaults = cast("CoreDefaults", manager.get_plugin(hookspecs.PROJECT))
        self._spec: Mapping[str, StateTensor] = {}
        self._lent: tuple[Runtime, LentRuntime] | None = None
        self._relay: HostRelay | None = None  # until a plugin leaves something for the host
        self._hindsight: HostRelay | None = None  # until a plugin tells of it
        self._told: ForeseenStep | None = None  # what it foresees of a step
        self.as_foreseen: int | None = None

    @property
    def extensions(self) -> list[dict[str, str]]:
        """The extensions of the run, with their state; see ``PluginGuard``."""
        return self._plugins.extensions

    @property
    def core_verifies(self) -> bool:
        """Whether the core alone implements ``verify``."""
        return "verify" in self._plugins.core_alone

    @property
    def plans_drafts(self) -> bool:
        """Whether a plugin implements ``plan_drafts``."""
        return "plan_drafts" not in self._plugins.core_alone

    @cached_property
    def _own_choice(self) -> MeasuredChoice | None:
        """The core's own choice of drafts, where no other plugin has a part in it."""
        only = self._plugins.only_caller("plan_drafts")
        return only if type(only) is MeasuredChoice else None

    @cached_property
    def _own_holder(self) -> SeveralAlgorithms | None:
        """The core's own algorithm that holds others, where no plugin wraps what it hands to them:
        what its parts return has been checked."""
        hooks = "propose", "build_draft_input"
        first, second = (self._plugins.only_caller(hook) for hook in hooks)
        return first if first is second and isinstance(first, SeveralAlgorithms) else None

    @property
    def reads_on_host(self) -> bool:
        """Whether a plugin has left something for the host, which ``propose`` waits for."""
        return self._relay is not None

    @property
    def takes_foreseen(self) -> bool:
        """Whether this step's drafts are taken as they were foreseen."""
        return self.as_foreseen is not None and self._told is not None

    @property
    def waits(self) -> bool:
        """Whether ``propose`` waits on the host for what the last step has left."""
        return self.reads_on_host and not self.takes_foreseen

    @cached_property
    def reads_map(self) -> bool:
        """Whether a plugin may read the future map."""
        return self._plugins.takes("future_map")

    @property
    def declares_state(self) -> bool:
        """Whether the worker declares a draft state."""
        return bool(self._spec)

    @property
    def state_spec(self) -> Mapping[str, StateTensor]:
        """What the worker declares; nothing before it is made."""
        return self._spec

    @property
    def running(self) -> str | None:
        """The plugin's hook or method that is called now, a part's too; see ``PluginGuard``."""
        parts = () if self._lent is None else parts_of(self._lent[0])
        every = self._plugins.running, *(part.hooks.running for part in parts)
        return next(filter(None, every), None)

    def _lend(self, runtime: Runtime) -> LentRuntime:
        """Return the runtime as hooks get it: one object for the whole run, which plugins may
        compare, and cache by."""
        if self._lent is None or self._lent[0] is not runtime:
            self._lent = runtime, LentRuntime(runtime, self._plugins)
        return self._lent[1]

    # Before the run

    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Return the settings of the run, as the algorithm takes them.

        Raises:
            UsageError: it refuses them.
        """
        hook = "validate_config"
        found = self._plugins.call(hook, config=config)
        if found is None:
            return config
        return rebuilt(self._plugins, hook, found, SpecConfig, "a specplug.SpecConfig, or None")

    def create_worker(self, runtime: Runtime) -> object:
        """Return the algorithm's worker.

        Raises:
            UsageError: the algorithm or its settings need more than the host gives.
            SpecplugError: it refuses the settings, or its checkpoint.
        """
        runtime.host.check(self._info, runtime.config, own_verify=not self.core_verifies)
        worker: object = self._plugins.call("create_worker", runtime=self._lend(runtime))
        if worker is None:
            self._plugins.refuse(
                "create_worker", "returned None", "an object, any that is not None"
            )
        self._spec = self._plugins.guard("worker.state_spec", state_spec, worker)
        return worker

    def create_future_map(self, runtime: Runtime) -> FutureMap:
        """Return the future map, with the buffers that the worker declares."""
        hook = "create_future_map"
        found = self._plugins.call(hook, runtime=self._lend(runtime))
        made = check_type(self._plugins, hook, found, FutureMap, "a specplug.FutureMap")
        least = runtime.req_table_size
        rows = self._plugins.guard(hook, getattr, made, "req_table_size")
        if rows < least:  # a kernel would write beyond its buffers
            self._plugins.refuse(
                hook, f"returned a future map of {rows} rows", f"runtime.req_table_size={least}"
            )
        parts = parts_of(runtime)
        if parts:
            made = PartsFutureMap(made, parts)
        self._plugins.guard(f"{type(made).__name__}.declare", made.declare, self._spec)
        return made

    def supports_target_verify_for_draft(self) -> bool:
        """Return whether the draft's pass has the shape of a target verify."""
        hook = "supports_target_verify_for_draft"
        return check_type(
            self._plugins, hook, self._plugins.call(hook), bool, "True, False or None"
        )

    def create_trainer(self, runtime: TrainingRuntime) -> Trainer:
        """Return what trains the algorithm's draft network.

        Raises:
            UsageError: there is nothing that does, or it refuses the target or a setting.
            CheckpointError: it refuses the network that it is to go on from.
        """
        hook = "create_trainer"
        found = self._plugins.call(hook, runtime=runtime)
        if found is None:
            raise UsageError(
                f"{self._info.name} cannot be trained here: it has no create_trainer; expected an "
                "algorithm that has one (docs/training.md shows how to write it)"
            )
        expected = "a specplug.Trainer, or None"
        return check_type(self._plugins, hook, found, Trainer, expected)  # type: ignore[type-abstract]

    def trainer_loss(self, trainer: Trainer, batch: TrainingBatch) -> TrainingLoss:
        """Return a trainer's loss of a batch."""
        method = f"{type(trainer).__name__}.loss"
        found = self._plugins.guard(method, trainer.loss, batch)
        return check_type(self._plugins, method, found, TrainingLoss, "a specplug.TrainingLoss")

    def trainer_files(self, trainer: Trainer) -> DraftFiles:
        """Return what a trainer publishes."""
        method = f"{type(trainer).__name__}.export"
        found = self._plugins.guard(method, trainer.export)
        return check_type(self._plugins, method, found, DraftFiles, "a specplug.DraftFiles")

    def orthogonal(self, trainer: Trainer) -> Sequence[Any]:
        """Return what a trainer says that Muon steps."""
        method = f"{type(trainer).__name__}.orthogonal"
        return tuple(self._plugins.guard(method, trainer.orthogonal) or ())

    # In a step

    def foresee_drafts(self, runtime: Runtime, requests: Sequence[RequestView]) -> ForeseenDrafts:
        """Return what the algorithm would draft, and whether it has read all that is committed."""
        hook = "foresee_drafts"
        self._told = None
        if hook in self._plugins.core_alone:
            return ForeseenDrafts.untold(len(requests))
        self._hand_over(runtime, keep=_num_on_way(self._relay, runtime))
        found = self._plugins.call(hook, runtime=self._lend(runtime), requests=requests)
        expected = "a specplug.ForeseenDrafts, or None"
        if type(found) is not ForeseenDrafts:
            found = rebuilt(self._plugins, hook, found, ForeseenDrafts, expected)
        check_foreseen(self._plugins, found, len(requests))
        is_current = self._relay is not None and not self._relay.num_sent
        told = ForeseenDrafts(
            tokens=found.tokens,
            scores=found.scores,
            known=found.known,
            is_current=is_current or not self._info.capabilities.overlap,
        )
        self._told = ForeseenStep.of(requests, told)
        return told

    def begin_plan(self) -> None:
        """Note that a decode step is planned, whether or not the algorithm is asked what it would
        draft."""
        for relay in (self._relay, self._hindsight):
            if relay is not None:
                relay.begin_plan()

    def hindsight(self, runtime: Runtime, algorithm: int) -> Iterator[Hindsight]:
        """Yield what has become known of how often the algorithm would have been right.

        Args:
            algorithm: its number among those that can draft.
        """
        relay = self._hindsight
        if relay is not None:
            for request_ids, told in relay.arrived(_num_on_way(relay, runtime)):
                right = told[_RIGHT]
                yield Hindsight(algorithm=algorithm, request_ids=request_ids, right=right)

    def kept_plan(self, batch: Batch, choices: DraftChoices) -> DraftPlan | None:
        """Return the plan of a step for which nobody needs to be asked what would be drafted, by
        the core's own choice; None: it is to be planned.

        Args:
            choices: without what is foreseen.
        """
        own = self._own_choice
        plan = None if own is None else own.kept_plan(batch, choices)
        assert not debug.DEBUG or plan is None or plan == choices.bound(plan)
        return plan

    def plan_drafts(self, runtime: Runtime, batch: Batch, choices: DraftChoices) -> DraftPlan:
        """Return who drafts for each request, and how much, within what the requests allow. The
        core's own choice keeps to that by itself."""
        hook, own = "plan_drafts", self._own_choice
        if own is not None:
            plan = own.plan_drafts(runtime, batch, choices)
            assert not debug.DEBUG or plan == choices.bound(plan)
            return plan
        found = self._plugins.call(hook, runtime=self._lend(runtime), batch=batch, choices=choices)
        plan = rebuilt(self._plugins, hook, found, DraftPlan, "a specplug.DraftPlan, or None")
        try:
            return choices.bound(plan)
        except ValueError as error:
            self._plugins.refuse(hook, f"planned {error}")

    def propose(
        self, runtime: Runtime, batch: Batch, draft_input: DraftInput, *, roots: Tensor
    ) -> Draft:
        """Return what the algorithm drafts, from the engine's roots and in tensors of its own; or
        what it foresaw, without asking it.

        Args:
            roots: [bs] int64, the bonus tokens; not those that the plugin was lent.
        """
        hook, config, vocab_size = "propose", runtime.config, runtime.vocab_size
        if self.as_foreseen is not None and self._told is not None:
            return self._told.draft(batch, roots, self.as_foreseen, vocab_size)
        found: Any
        if self._own_holder is not None:
            found = self._own_holder.propose(runtime, batch, draft_input)
            if not debug.DEBUG:
                return cast("Draft", found)
        else:
            self._hand_over(runtime)
            found = self._plugins.call(
                hook, runtime=self._lend(runtime), batch=batch, draft_input=draft_input
            )
        most = Limits(config.num_draft_tokens, config.num_steps)
        return check_draft(self._plugins, hook, found, most, roots, vocab_size)

    def grow_draft(
        self,
        runtime: Runtime,
        batch: Batch,
        draft_input: DraftInput,
        draft: Draft,
        *,
        roots: Tensor,
    ) -> Draft:
        """Return a draft with what the algorithm adds, from the engine's roots.

        Args:
            roots: [bs] int64, as in ``propose``.
        """
        hook, config, vocab_size = "grow_draft", runtime.config, runtime.vocab_size
        self._hand_over(runtime)
        most = Limits(
            draft.width + config.num_draft_tokens - 1, draft.depth + config.num_steps, added=True
        )
        found = self._plugins.call(
            hook,
            runtime=self._lend(runtime),
            batch=batch,
            draft_input=draft_input,
            draft=attrs.evolve(draft),  # its tensors are the holder's own
        )
        return check_draft(self._plugins, hook, found, most, roots, vocab_size)

    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput:
        """Return what is accepted of ``draft``: what the core finds, or what a plugin answers, cut
        to a path of the draft that the target's own tokens take. ``target_output.per_node`` then
        holds what plugins have added.
        """
        if self.core_verifies:
            return verify_tree(draft, target_output.predict)
        predict, config = target_output.predict, runtime.config
        lent = TargetOutput(
            predict=predict.clone(),
            logits=target_output.logits,
            per_node={name: tensor.clone() for name, tensor in target_output.per_node.items()},
        )
        self._defaults.verifying = draft, predict.clone()  # which a wrapper finds in the result
        try:
            found = self._plugins.call(
                "verify",
                runtime=self._lend(runtime),
                batch=batch,
                draft=draft.copy(),
                target_output=lent,
            )
        finally:
            self._defaults.verifying = None
        verified = check_verified(self._plugins, found, draft, predict, config.num_steps)
        own = target_output.per_node
        target_output.per_node = {**own, **check_per_node(self._plugins, lent, own, draft)}
        return verified

    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        """Return what the next ``propose`` starts from."""
        hook = "build_draft_input"
        like = target_output.bonus_tokens  # before plugins can replace it
        size = len(like)
        made: Any
        if self._own_holder is not None:
            made = self._own_holder.build_draft_input(runtime, batch, target_output)
            if not debug.DEBUG:
                return cast("DraftInput", made)
        else:
            made = self._plugins.call(
                hook,
                runtime=self._lend(runtime),
                batch=batch,
                target_output=target_output,
                future_map=own_map(future_map),
            )
        checked = check_draft_input(self._plugins, hook, made, size, like, self._spec)
        self._leave(batch, checked.host, like.device)
        if checked.hindsight is not None and not batch.is_warm_up:
            self._tell(batch, checked.hindsight)
        if self._relay is not None and self._relay.num_sent > _MOST_SENT:  # no step drafts
            self._hand_over(runtime, keep=IN_FLIGHT)
        return checked

    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        """Return the draft input of no request."""
        hook, like = "fixup_idle", draft_input.bonus_tokens
        made = self._plugins.call(
            hook, runtime=self._lend(runtime), batch=batch, draft_input=draft_input
        )
        return check_draft_input(self._plugins, hook, made, 0, like, self._spec)

    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor, future_map: FutureMap
    ) -> DraftInput:
        """Return what the first ``propose`` of received requests starts from."""
        hook, size = "build_disagg_draft_input", len(last_tokens)
        made = self._plugins.call(
            hook,
            runtime=self._lend(runtime),
            batch=batch,
            last_tokens=last_tokens,
            future_map=own_map(future_map),
        )
        checked = check_draft_input(self._plugins, hook, made, size, last_tokens, self._spec)
        self._leave(batch, checked.host, last_tokens.device)
        return checked

    def _leave(
        self, batch: Batch, tensors: Mapping[str, Tensor | None], device: torch.device
    ) -> None:
        """Start copying what a step leaves for the host, if it leaves something."""
        if tensors:
            self._relay = self._relay or HostRelay()
            self._relay.send(batch, tensors, device)

    def _tell(self, batch: Batch, right: Tensor) -> None:
        """Start copying how often the algorithm would have been right."""
        self._hindsight = self._hindsight or HostRelay()
        self._hindsight.send(batch, {_RIGHT: right}, right.device)
        if self._hindsight.num_sent > _MOST_SENT:  # nobody asks
            deque(self._hindsight.arrived(IN_FLIGHT), maxlen=0)

    def _hand_over(self, runtime: Runtime, keep: int = 0) -> None:
        """Give plugins what steps have left for the host, but for the last ``keep`` steps."""
        if self._relay is None:
            return
        for request_ids, tensors in self._relay.arrived(keep):
            self.on_host_tensors(runtime, request_ids, tensors)

    def on_host_tensors(
        self, runtime: Runtime, request_ids: Sequence[str], tensors: Mapping[str, Tensor]
    ) -> None:
        """Give all plugins what a step has left for the host."""
        self._plugins.call(
            "on_host_tensors",
            runtime=self._lend(runtime),
            request_ids=request_ids,
            tensors=tensors,
        )

    def export_draft_state(
        self, runtime: Runtime, batch: Batch, future_map: FutureMap, *, req_indices: Tensor
    ) -> Mapping[str, Tensor | None]:
        """Return the draft state that travels with prefilled requests.

        Args:
            req_indices: [bs] int64, the host's own.
        """
        hook = "export_draft_state"
        found = self._plugins.call(
            hook, runtime=self._lend(runtime), batch=batch, future_map=own_map(future_map)
        )
        size = len(req_indices)
        state = check_tensors(
            self._plugins, hook, "a state", found, size, req_indices, may_lack=True
        )
        for part in parts_of(runtime):
            state |= part.export_draft_state(batch)
        return state

    # The future map, which may be of the algorithm's own class

    def resolve_with(
        self, committed: FutureMap, future_map: FutureMap, req_indices: Tensor
    ) -> tuple[tuple[Tensor, DraftInput], tuple[Tensor, DraftInput]] | None:
        """Resolve a batch in the core's own map and in the algorithm's at once, if one kernel can
        read both; see ``FutureMap.resolve_with``."""
        what = "FutureMap.resolve"
        return self._plugins.guard(what, committed.resolve_with, future_map, req_indices)

    def resolve(self, future_map: FutureMap, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """Return the committed lengths [bs] and the draft input of a batch, for the algorithm."""
        what = f"{type(future_map).__name__}.resolve"
        found = self._plugins.guard(what, future_map.resolve, req_indices)
        if not (type(found) is tuple and len(found) == 2 and isinstance(found[1], DraftInput)):
            self._plugins.refuse(
                what, f"returned {described(found)}", "(seq_lens, a specplug.DraftInput)"
            )
        seq_lens, draft_input = found
        check_integers(self._plugins, what, "returned seq_lens", seq_lens, req_indices)
        return seq_lens, draft_input

    def publish_and_stash(
        self,
        future_map: FutureMap,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Publish how far the requests are, and stash what the next step starts from."""
        if is_plain(future_map):
            call, given = FutureMap.publish_and_stash, (req_indices, seq_lens, output, draft_input)
            self._plugins.guard("FutureMap.publish_and_stash", call, future_map, *given)
            return
        kind = type(future_map).__name__
        self._plugins.guard(f"{kind}.publish", future_map.publish, req_indices, seq_lens, output)
        self._plugins.guard(f"{kind}.stash", future_map.stash, req_indices, draft_input)

    # Afterwards

    def on_step(self, runtime: Runtime, report: StepReport) -> None:
        """Tell all plugins of a processed step."""
        if "on_step" not in self._plugins.core_alone:
            self._plugins.call("on_step", runtime=self._lend(runtime), report=report)
        for part in parts_of(runtime):
            part.hooks.on_step(part.runtime, report)

    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        """Tell all plugins of an ended request, and before that what earlier steps have left."""
        self._hand_over(runtime, keep=IN_FLIGHT)
        self._plugins.call("on_request_finished", runtime=self._lend(runtime), report=report)
        for part in parts_of(runtime):
            part.hooks.on_request_finished(part.runtime, report)

    def on_text_forgotten(self, runtime: Runtime, cache_salt: str | None) -> None:
        """Tell all plugins to drop the text that they keep of earlier requests."""
        self._hand_over(runtime, keep=IN_FLIGHT)
        self._plugins.call("on_text_forgotten", runtime=self._lend(runtime), cache_salt=cache_salt)
        for part in parts_of(runtime):
            part.hooks.on_text_forgotten(part.runtime, cache_salt)


def _num_on_way(relay: HostRelay | None, runtime: Runtime) -> int:
    """Return how many of a relay's last copies may still be on their way while a step is
    planned."""
    return relay.num_on_way if relay is not None and _takes_time(runtime) else 0


def _takes_time(runtime: Runtime) -> bool:
    """Return whether copies to the host may be on their way when the next step is launched."""
    return runtime.device.type != "cpu" and runtime.overlap


def parts_of(runtime: Runtime) -> Sequence[Part]:
    """Return the parts that a runtime's algorithm holds."""
    return tuple(getattr(runtime, "parts", {}).values())


def own_map(future_map: FutureMap) -> FutureMap:
    """Return the future map that an algorithm's hooks get: its own, without those of its parts."""
    return future_map.own if isinstance(future_map, PartsFutureMap) else future_map
