"""Calls the hooks of a run and checks what they give: the one place where a failure gets its name.

Whoever drives an algorithm, the embedded engine or another host, calls ``HookCalls`` and never
pluggy. Each hook has one function here, whose result has the type, dtypes, shapes and device that
``hookspecs`` promises. Everything else is a ``PluginError`` that names the plugin, its distribution
and version, and the hook. Values on the device are bounded so that they can do no harm; with
``SPECPLUG_DEBUG=1`` they are read, and told.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterable, Mapping
from functools import wraps
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar, cast

import pluggy
from torch import Tensor

from specplug import hookspecs
from specplug.algorithm import SpecConfig
from specplug.contract import PluginWarning, error_line, implementations
from specplug.debug import DEBUG
from specplug.errors import InstanceError, PluginError, SpecplugError
from specplug.speculative.draft import Draft, DraftInput, described
from specplug.speculative.future_map import FutureMap
from specplug.speculative.state import StateTensor, check_state, state_spec
from specplug.speculative.target_output import CommittedOutput, TargetOutput
from specplug.speculative.verify import VerifyOutput, verify_tree

if TYPE_CHECKING:
    from specplug.registry import Extension, SelectedAlgorithm
    from specplug.speculative.batch import Batch
    from specplug.speculative.defaults import CoreDefaults
    from specplug.speculative.report import RequestReport, StepReport
    from specplug.speculative.runtime import Runtime

Result = TypeVar("Result")

_OPTIONS = f"{hookspecs.PROJECT}_impl"
"""Where ``hookimpl`` leaves its options."""

_OBSERVERS = ("on_step", "on_request_finished")
"""Hooks by which an extension only looks on: the run does without it if they fail."""

_BEFORE_THE_RUN = ("validate_config", "create_worker", "create_future_map")
"""Hooks that may refuse the user's settings or files, by specplug's own errors."""

_FIX = "fix the plugin, or tell its author (SPECPLUG_DEBUG=1 shows the traceback)"


class _ExtensionFailure(Exception):
    """What an extension raised, on its way out of pluggy."""

    def __init__(self, extension: Extension, error: BaseException) -> None:
        super().__init__(error)
        self.extension = extension
        self.error = error


class HookCalls:
    """The hooks of one run, typed and checked.

    Args:
        manager: the run's plugins; see ``specplug.registry.build_plugin_manager``. Its extensions
            are registered anew, so that their failures bear their names.
        algorithm: of the run.
        extensions: those that the manager was built with.
    """

    def __init__(
        self,
        manager: pluggy.PluginManager,
        algorithm: SelectedAlgorithm,
        extensions: Iterable[Extension] = (),
    ) -> None:
        self._manager = manager
        self._hooks = manager.hook
        self._subject = algorithm.entry.subject
        self._defaults = cast("CoreDefaults", manager.get_plugin(hookspecs.PROJECT))
        self._states: dict[str, tuple[Extension, str]] = {}
        self._answered: str | None = None
        self._spec: Mapping[str, StateTensor] = {}
        for extension in extensions:
            name = manager.get_name(extension.plugin)
            if name is not None:  # else it was left out
                manager.unregister(extension.plugin)
                manager.register(_Guarded(self, extension), name=name)
                self._states[name] = extension, "on"
        self._core_verifies = self._only_core("verify")

    @property
    def extensions(self) -> list[dict[str, str]]:
        """The extensions of the run: name, distribution, version, and "state", which is "on", or
        "off: " and why."""
        return [
            {
                "name": extension.name,
                "distribution": extension.entry.distribution,
                "version": extension.entry.version,
                "state": state,
            }
            for extension, state in self._states.values()
        ]

    # Before the run

    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """The settings of the run, as the algorithm takes them.

        Raises:
            UsageError: it refuses them.
        """
        hook = "validate_config"
        found = self._call(hook, config=config)
        if found is None:
            return config
        return self._expect_type(hook, found, SpecConfig, "a specplug.SpecConfig, or None")

    def create_worker(self, runtime: Runtime) -> object:
        """The algorithm's worker.

        Raises:
            SpecplugError: it refuses the settings, or its checkpoint.
        """
        worker: object = self._call("create_worker", runtime=runtime)
        if worker is None:
            self._refuse("create_worker", "returned None", "an object, any that is not None")
        self._spec = self._guarded("worker.state_spec", state_spec, worker)
        return worker

    def create_future_map(self, runtime: Runtime) -> FutureMap:
        """The relay between steps, with the buffers that the worker declares."""
        hook = "create_future_map"
        found = self._call(hook, runtime=runtime)
        made = self._expect_type(hook, found, FutureMap, "a specplug.FutureMap")
        self._guarded(f"{type(made).__name__}.declare", made.declare, self._spec)
        return made

    def supports_target_verify_for_draft(self) -> bool:
        """Whether the draft's pass has the shape of a target verify."""
        hook = "supports_target_verify_for_draft"
        return self._expect_type(hook, self._call(hook), bool, "True, False or None")

    # In a step

    def propose(
        self, runtime: Runtime, batch: Batch, draft_input: DraftInput, *, roots: Tensor
    ) -> Draft:
        """What the algorithm drafts, in tensors of the engine's own.

        Args:
            roots: [bs] int64, the bonus tokens; not those that the plugin was lent.
        """
        hook = "propose"
        found = self._call(hook, runtime=runtime, batch=batch, draft_input=draft_input)
        draft = self._expect_type(hook, found, Draft, "a specplug.Draft")
        try:
            draft.check(values=DEBUG)
        except ValueError as error:
            self._refuse(hook, f"drafted {error}", fix="make it by Draft.chain or Draft.tree")
        config, (size, width) = runtime.config, draft.tokens.shape
        most, steps = config.num_draft_tokens, config.num_steps
        if size != len(roots) or width > most or draft.depth > steps:
            self._refuse(
                hook,
                f"drafted {width} nodes, {draft.depth} deep, for {size} requests",
                f"at most num_draft_tokens={most} nodes, num_steps={steps} deep, for {len(roots)}",
                "draft less, or raise these in validate_config()",
            )
        if draft.tokens.device != roots.device:
            found = f"drafted tokens {described(draft.tokens)}"
            self._refuse(hook, found, f"them on runtime.device, {roots.device}")
        if DEBUG:
            self._check_tokens(draft, roots, runtime.vocab_size)
        return draft.rooted(roots, runtime.vocab_size)

    def _check_tokens(self, draft: Draft, roots: Tensor, vocab_size: int) -> None:
        first, tokens = draft.tokens[:, 0].tolist(), draft.flatten(draft.tokens).tolist()
        if first != roots.tolist():
            expected = f"draft_input.bonus_tokens, {roots.tolist()}"
            self._refuse("propose", f"drafted from the roots {first}", expected)
        outside = [token for token in tokens if not 0 <= token < vocab_size]
        if outside:
            found = f"drafted the tokens {outside}"
            self._refuse("propose", found, f"tokens from 0 to {vocab_size - 1}")

    def verify(
        self, runtime: Runtime, batch: Batch, draft: Draft, target_output: TargetOutput
    ) -> VerifyOutput:
        """What is accepted of ``draft``: what the core finds, or what a plugin answers, bounded to
        a path of the draft. What plugins add to the nodes is in ``target_output.per_node`` then.
        """
        if self._core_verifies:
            return verify_tree(draft, target_output.predict)
        hook, predict = "verify", target_output.predict
        lent = TargetOutput(
            predict=predict.clone(),
            logits=target_output.logits,
            per_node={name: tensor.clone() for name, tensor in target_output.per_node.items()},
        )
        self._defaults.verifying = draft, predict
        try:
            found = self._call(
                hook, runtime=runtime, batch=batch, draft=draft.copy(), target_output=lent
            )
        finally:
            self._defaults.verifying = None
        verified = self._expect_type(hook, found, VerifyOutput, "a specplug.VerifyOutput, or None")
        last_token = runtime.vocab_size - 1
        try:
            verified.check(draft, runtime.config.num_steps + 1, last_token, values=DEBUG)
        except ValueError as error:
            self._refuse(hook, f"returned {error}")
        self._check_tensors(hook, "target_output.per_node", lent.per_node, len(predict), predict)
        target_output.per_node = dict(lent.per_node)
        return verified.bounded(draft, last_token)

    def build_draft_input(
        self,
        runtime: Runtime,
        batch: Batch,
        target_output: CommittedOutput,
        future_map: FutureMap,
    ) -> DraftInput:
        """What the next ``propose`` starts from."""
        hook = "build_draft_input"
        made = self._call(
            hook, runtime=runtime, batch=batch, target_output=target_output, future_map=future_map
        )
        return self._check_draft_input(hook, made, batch.size, target_output.next_tokens)

    def fixup_idle(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> DraftInput:
        """The draft input of no request."""
        hook, like = "fixup_idle", draft_input.bonus_tokens
        made = self._call(hook, runtime=runtime, batch=batch, draft_input=draft_input)
        return self._check_draft_input(hook, made, 0, like)

    def build_disagg_draft_input(
        self, runtime: Runtime, batch: Batch, last_tokens: Tensor, future_map: FutureMap
    ) -> DraftInput:
        """What the first ``propose`` of received requests starts from."""
        hook = "build_disagg_draft_input"
        made = self._call(
            hook, runtime=runtime, batch=batch, last_tokens=last_tokens, future_map=future_map
        )
        return self._check_draft_input(hook, made, batch.size, last_tokens)

    def export_draft_state(
        self, runtime: Runtime, batch: Batch, future_map: FutureMap
    ) -> Mapping[str, Tensor | None]:
        """The draft state that travels with prefilled requests."""
        hook = "export_draft_state"
        found = self._call(hook, runtime=runtime, batch=batch, future_map=future_map)
        self._check_tensors(hook, "a state", found, batch.size, batch.req_indices, may_lack=True)
        state: Mapping[str, Tensor | None] = found
        return state

    # The relay, which may be the algorithm's own

    def resolve(self, future_map: FutureMap, req_indices: Tensor) -> tuple[Tensor, DraftInput]:
        """The committed lengths and the draft input of a batch, for the algorithm."""
        what = f"{type(future_map).__name__}.resolve"
        found = self._guarded(what, future_map.resolve, req_indices)
        if not (isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], DraftInput)):
            self._refuse(what, f"returned {described(found)}", "(seq_lens, a specplug.DraftInput)")
        return found

    def relay(
        self,
        future_map: FutureMap,
        req_indices: Tensor,
        seq_lens: Tensor,
        output: CommittedOutput,
        draft_input: DraftInput,
    ) -> None:
        """Leave the next step what it starts from."""
        kind = type(future_map).__name__
        self._guarded(f"{kind}.publish", future_map.publish, req_indices, seq_lens, output)
        self._guarded(f"{kind}.stash", future_map.stash, req_indices, draft_input)

    # Afterwards

    def on_step(self, runtime: Runtime, report: StepReport) -> None:
        """Tell all of a step."""
        self._call("on_step", runtime=runtime, report=report)

    def on_request_finished(self, runtime: Runtime, report: RequestReport) -> None:
        """Tell all of an ended request."""
        self._call("on_request_finished", runtime=runtime, report=report)

    # Failures

    def _call(self, hook: str, **arguments: Any) -> Any:
        self._answered = None
        return self._guarded(hook, getattr(self._hooks, hook), **arguments)

    def _guarded(
        self, what: str, function: Callable[..., Result], *positional: Any, **named: Any
    ) -> Result:
        """Call a plugin's code. Whatever it raises but Ctrl-C becomes a ``PluginError``: its
        SystemExit must not pass for the end of a process that did all it had to."""
        try:
            return function(*positional, **named)
        except KeyboardInterrupt:
            raise
        except BaseException as raised:
            # No name here may hold the error, whose traceback holds this frame: what a failed
            # step has used is freed with it, without the garbage collector.
            if isinstance(raised, _ExtensionFailure):
                if _is_told(what, raised.error):
                    raise raised.error from None
                raise PluginError(self._told(what, raised)) from raised.error
            if _is_told(what, raised):
                raise
            raise PluginError(self._told(what, raised)) from raised

    def _told(self, what: str, raised: BaseException) -> str:
        if isinstance(raised, _ExtensionFailure):
            return _failure(raised.extension.entry.subject, what, raised.error)
        return _failure(self._subject, what, raised)

    def _refuse(
        self, what: str, found: str, expected: str = "", fix: str = "fix the plugin"
    ) -> NoReturn:
        """Raise that a plugin returned what it must not."""
        subject = self._answered or self._subject
        expectation = f"; expected {expected}" if expected else ""
        raise PluginError(f"{subject}: {what}() {found}{expectation}; {fix}")

    def _expect_type(self, hook: str, result: Any, expected: type[Result], called: str) -> Result:
        if not isinstance(result, expected):
            found = "None" if result is None else f"a value {described(result)}"
            self._refuse(hook, f"returned {found}", called)
        checked: Result = result
        return checked

    def _check_draft_input(self, hook: str, made: Any, size: int, like: Tensor) -> DraftInput:
        draft_input = self._expect_type(hook, made, DraftInput, "a specplug.DraftInput")
        tokens = {"bonus_tokens": draft_input.bonus_tokens}
        self._check_tensors(hook, "a draft input", tokens, size, like)
        self._check_tensors(hook, "a state", draft_input.state, size, like, may_lack=True)
        if self._spec:
            try:
                check_state(self._spec, draft_input)
            except PluginError as error:
                self._refuse(hook, f"gave a wrong state: {error}")
        return draft_input

    def _check_tensors(
        self, hook: str, what: str, found: Any, size: int, like: Tensor, *, may_lack: bool = False
    ) -> None:
        """Refuse all but named tensors of leading ``size``, on the device of ``like``."""
        if not isinstance(found, Mapping):
            self._refuse(hook, f"gave {what} {described(found)}", "a mapping of named tensors")
        for name, tensor in found.items():
            if tensor is None and may_lack:
                continue
            if not (
                isinstance(name, str)
                and isinstance(tensor, Tensor)
                and tensor.dim()
                and len(tensor) == size
                and tensor.device == like.device
            ):
                expected = f"a tensor of leading size {size} on {like.device}"
                self._refuse(hook, f"gave {what} {name!r} {described(tensor)}", expected)

    # Extensions

    def _only_core(self, hook: str) -> bool:
        callers = getattr(self._hooks, hook).get_hookimpls()
        return all(implementation.plugin is self._defaults for implementation in callers)

    def answered_by(self, extension: Extension) -> None:
        """An extension has answered a hook, or changed the answer."""
        self._answered = extension.entry.subject

    def switch_off(self, guard: _Guarded, hook: str, error: BaseException) -> None:
        """Go on without an extension that failed to look on."""
        name = self._manager.get_name(guard)
        if name is None:
            return  # it has failed before in the same call
        self._manager.unregister(guard)
        self._core_verifies = self._only_core("verify")
        extension = guard.extension
        self._states[name] = extension, f"off: {hook}() raised {error_line(error)}"
        told = _failure(extension.entry.subject, hook, error)
        warnings.warn(f"switched off: {told}", PluginWarning, stacklevel=2)


class _Guarded:
    """An extension's hooks, as pluggy calls them: each notes an answer, and names a failure."""

    def __init__(self, calls: HookCalls, extension: Extension) -> None:
        self.extension = extension
        self._calls = calls
        for found in implementations(extension.plugin):
            options = dict(getattr(found.function, _OPTIONS))
            function = found.function
            if options.get("hookwrapper"):
                function = _as_wrapper(function)
                options |= {"hookwrapper": False, "wrapper": True}
            guard = self._wrapper if options.get("wrapper") else self._answer
            # pluggy reads the arguments' names from what is wrapped.
            guarded = wraps(found.function)(guard(found.hook, function))
            setattr(guarded, _OPTIONS, options)
            setattr(self, found.method, guarded)

    def _answer(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            try:
                result = function(*arguments)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                return self._fail(hook, error)
            if result is not None:
                self._calls.answered_by(self.extension)
            return result

        return answer

    def _wrapper(self, hook: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(*arguments: Any) -> Generator[None, Any, Any]:
            try:
                wrapper = function(*arguments)
                if next(wrapper, self) is self:
                    raise RuntimeError("the wrapper does not yield")
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                self._fail(hook, error)
                return (yield)
            received, failure = None, None
            try:
                received = yield
            except BaseException as error:
                failure = error
            try:
                if failure is None:
                    wrapper.send(received)
                else:
                    wrapper.throw(failure)
                wrapper.close()
                raise RuntimeError("the wrapper yields twice")
            except StopIteration as done:
                if failure is not None or done.value is not received:
                    self._calls.answered_by(self.extension)
                return done.value
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                if error is failure:
                    failure = None  # its traceback holds this frame
                    raise
                self._fail(hook, error)
            try:
                if failure is not None:
                    raise failure
            finally:
                failure = None
            return received

        return wrap

    def _fail(self, hook: str, error: BaseException) -> None:
        """End the call by an extension's error; where it only looks on, go on without it."""
        if hook not in _OBSERVERS:
            raise _ExtensionFailure(self.extension, error) from error
        self._calls.switch_off(self, hook, error)


def _as_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    """A hook of pluggy's older kind (``hookwrapper=True``), which changes an outcome that it is
    given, as one that returns the result."""

    def wrap(*arguments: Any) -> Generator[None, Any, Any]:
        wrapper = function(*arguments)
        next(wrapper)
        outcome: pluggy.Result[Any] = pluggy.Result(None, None)
        try:
            outcome.force_result((yield))
        except BaseException as error:
            outcome.force_exception(error)
        try:
            wrapper.send(outcome)
        except StopIteration:
            return outcome.get_result()
        raise RuntimeError("the wrapper yields twice")

    return wrap


def _is_told(what: str, error: BaseException) -> bool:
    """Whether an error is not the plugin's own failure, and is told as it is."""
    refuses = isinstance(error, SpecplugError) and not isinstance(error, PluginError)
    return isinstance(error, InstanceError) or (refuses and what in _BEFORE_THE_RUN)


def _failure(subject: str, what: str, error: BaseException) -> str:
    if isinstance(error, PluginError):  # of the runtime, which knows no names
        return f"{subject}: {what}(): {error}"
    return f"{subject}: {what}() raised {error_line(error)}; expected it to return; {_FIX}"
