"""Whatever a plugin raises or returns wrongly is told with its name, and the engine goes on."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import attrs
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from specplug import (
    LLM,
    AlgorithmInfo,
    CheckpointError,
    Draft,
    DraftInput,
    FutureMap,
    PluginError,
    SamplingParams,
    SpecplugError,
    UsageError,
    VerifyOutput,
    hookimpl,
    verify_tree,
)
from specplug.contract import HOOKS, OBSERVERS
from specplug.registry import (
    Extension,
    ExtensionEntry,
    PluginWarning,
    Registry,
    build_plugin_manager,
)
from specplug.speculative.default_device import default_device
from specplug.speculative.defaults import CoreDefaults
from specplug.speculative.plugin_guard import PluginGuard

SHORT = SamplingParams(max_tokens=6)
PROMPT = [3, 1, 4, 1, 5]


class Plain:
    """Drafts the root three times; what is in ``instead`` is done in the place of a hook."""

    def __init__(self) -> None:
        self.instead: dict[str, Callable[..., Any]] = {}

    def _do(self, hook: str, usual: Callable[..., Any], *arguments: Any) -> Any:
        return self.instead.get(hook, usual)(*arguments)

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="PLAIN", summary="The root again", api_version=1)

    @hookimpl
    def validate_config(self, config: Any) -> Any:
        return self._do("validate_config", lambda config: config, config)

    @hookimpl
    def supports_target_verify_for_draft(self) -> Any:
        return self._do("supports_target_verify_for_draft", lambda: None)

    @hookimpl
    def create_worker(self, runtime: Any) -> Any:
        return self._do("create_worker", lambda runtime: self, runtime)

    @hookimpl
    def create_future_map(self, runtime: Any) -> Any:
        return self._do("create_future_map", lambda runtime: None, runtime)

    @hookimpl
    def build_draft_input(self, runtime: Any, batch: Any, target_output: Any) -> Any:
        def usual(runtime: Any, batch: Any, output: Any) -> DraftInput:
            return DraftInput(bonus_tokens=output.bonus_tokens)

        return self._do("build_draft_input", usual, runtime, batch, target_output)

    @hookimpl
    def propose(self, runtime: Any, batch: Any, draft_input: Any) -> Any:
        def usual(runtime: Any, batch: Any, roots: Any) -> Draft:
            return Draft.chain(roots.unsqueeze(1).repeat(1, 2))

        return self._do("propose", usual, runtime, batch, draft_input.bonus_tokens)

    @hookimpl
    def verify(self, runtime: Any, draft: Any, target_output: Any) -> Any:
        return self._do("verify", lambda *_: None, runtime, draft, target_output)

    @hookimpl
    def on_step(self, runtime: Any, report: Any) -> None:
        self._do("on_step", lambda *_: None, runtime, report)

    @hookimpl
    def on_request_finished(self, runtime: Any, report: Any) -> None:
        self._do("on_request_finished", lambda *_: None, runtime, report)


class OwnBase(BaseException):
    """Neither an Exception nor one of Python's own."""


def raising(error: BaseException) -> Callable[..., Any]:
    def hook(*_: Any) -> Any:
        raise error

    return hook


def returning(value: Any) -> Callable[..., Any]:
    return lambda *_: value


def leaving(*_: Any) -> Any:
    sys.exit(0)


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[tuple[LLM, Plain]]:
    """One engine for all: a step that fails ends its requests, and the next ones are served."""
    plugin = Plain()
    with LLM(tiny_model, device="cpu", speculative_algorithm=plugin) as llm:
        yield llm, plugin


@pytest.fixture
def told(engine: tuple[LLM, Plain]) -> Iterator[Callable[..., str]]:
    """``told(hook, instead)``: the error that a run gets if the hook does that."""
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids

    def run(hook: str, instead: Callable[..., Any]) -> str:
        plugin.instead[hook] = instead
        with pytest.raises(PluginError) as caught:
            llm.generate([PROMPT], SHORT)
        plugin.instead.clear()
        message = str(caught.value)
        subject = "algorithm PLAIN (a plugin object, "
        assert message.startswith(subject), message
        assert "\n" not in message
        return message.partition("): ")[2]

    yield run
    plugin.instead.clear()
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected, "the next ones are served"
    llm.check_pool()


RUN_TIME = ("propose", "verify", "build_draft_input", "on_step", "on_request_finished")


@pytest.mark.parametrize("hook", RUN_TIME)
@pytest.mark.parametrize(
    ("error", "said"),
    [
        (LookupError("two\nlines"), "LookupError: two"),
        (SystemExit(0), "SystemExit: 0"),
        (OwnBase("own"), "OwnBase: own"),
        (UsageError("not the user's"), "UsageError: not the user's"),
    ],
)
def test_what_a_hook_raises_bears_its_name(
    hook: str, error: BaseException, said: str, told: Callable[..., str]
) -> None:
    assert told(hook, raising(error)).startswith(f"{hook}() raised {said}; expected")


def test_sys_exit_in_a_hook_is_a_failure(told: Callable[..., str]) -> None:
    assert told("propose", leaving).startswith("propose() raised SystemExit: 0; expected")


def test_ctrl_c_in_a_hook_is_the_users(engine: tuple[LLM, Plain]) -> None:
    llm, plugin = engine
    plugin.instead["propose"] = raising(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPT], SHORT)
    plugin.instead.clear()


def of_roots(make: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda runtime, batch, roots: make(roots.unsqueeze(1))


def of_output(make: Callable[[Any], Any]) -> Callable[..., Any]:
    return lambda runtime, batch, output: make(output.bonus_tokens)


def changed(**changes: Any) -> Callable[..., Any]:
    """A sound result of verify, with changes that are made of the draft."""

    def verify(runtime: Any, draft: Any, output: Any) -> Any:
        sound = {
            "predict": output.predict,
            "accept_index": draft.offsets.unsqueeze(1),
            "accept_lens": torch.ones_like(draft.offsets),
            "bonus_tokens": output.predict[draft.offsets],
        }
        return VerifyOutput(**{**sound, **{k: make(draft) for k, make in changes.items()}})

    return verify


def adding(value: Any) -> Callable[..., Any]:
    def verify(runtime: Any, draft: Any, output: Any) -> None:
        output.per_node["own"] = value

    return verify


class BrokenMap(FutureMap):
    def stash(self, rows: Any, draft_input: Any) -> None:
        raise LookupError("no room")


TREE = torch.tensor([[-1, 0]])
WRONG: list[tuple[str, Callable[..., Any], str]] = [
    ("propose", returning(None), "returned None; expected a specplug.Draft"),
    ("propose", returning([1, 2]), "returned a value of type list; expected a specplug.Draft"),
    ("propose", of_roots(lambda r: r), "returned a value [1, 1] of torch.int64 on cpu; expected"),
    ("propose", of_roots(lambda r: Draft.chain(r.int())), "raised ValueError: tokens of torch.int"),
    ("propose", of_roots(lambda r: Draft.chain(r[0])), "raised ValueError: tokens [1] of torch"),
    (
        "propose",
        of_roots(lambda r: Draft(tokens=r.float(), parents=None, widths=None, depth=0)),
        "drafted tokens of torch.float32; expected torch.int64",
    ),
    (
        "propose",
        of_roots(lambda r: Draft(tokens=r, parents=TREE, widths=None, depth=1)),
        "drafted parents [1, 2] of torch.int64 on cpu; expected them like tokens, [1, 1]",
    ),
    (
        "propose",
        of_roots(lambda r: Draft.chain(r.to("meta"))),
        "drafted tokens [1, 1] of torch.int64 on meta; expected them on runtime.device, cpu",
    ),
    ("propose", of_roots(lambda r: Draft.chain(r + 1)), "drafted from the roots ["),
    (
        "propose",
        of_roots(lambda r: Draft.chain(torch.cat((r, r * 0 + 96), 1))),
        "drafted the tokens [96]; expected tokens from 0 to 95",
    ),
    (
        "propose",
        of_roots(lambda r: Draft.tree(r.repeat(1, 2), TREE + 1, 1)),
        "raised ValueError: node 0 must be the root, with parent -1; found [[0, 1]]",
    ),
    ("build_draft_input", returning(None), "returned None; expected a specplug.DraftInput"),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t.repeat(2))),
        "gave a draft input 'bonus_tokens' [2] of torch.int64 on cpu; expected a tensor of leading",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t.float())),
        "gave bonus_tokens [1] of torch.float32 on cpu; expected [1] of torch.int64 on cpu",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, hindsight=t.unsqueeze(1))),
        "gave hindsight [1, 1] of torch.int64 on cpu; expected [1, W] of torch.int8",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, hindsight=torch.zeros(2, 3))),
        "gave a draft input 'hindsight' [2, 3] of torch.float32 on cpu; expected a tensor of",
    ),
    (
        "propose",
        of_roots(lambda r: Draft(tokens=r, parents=None, widths=3, depth=0)),
        "drafted widths=3; expected one integer from 1 to 1 for each of the 1 requests",
    ),
    (
        "propose",
        of_roots(lambda r: Draft(tokens=r, parents=None, widths=None, depth=True)),
        "drafted depth=True; expected an integer of at least 0",
    ),
    (
        "propose",
        lambda runtime, *_: setattr(runtime, "config", None),
        ": runtime.config was set; expected the runtime to be read alone",
    ),
    (
        "build_draft_input",
        lambda runtime, *_: delattr(runtime, "device"),
        ": runtime.device was deleted; expected the runtime to be read alone",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, state={"h": torch.zeros(3, 2)})),
        "gave a state 'h' [3, 2] of torch.float32 on cpu; expected a tensor of leading size 1 on",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, state={"h": [1]})),
        "gave a state 'h' of type list; expected a tensor of leading size 1 on cpu",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, state={"h": t.to("meta")})),
        "gave a state 'h' [1] of torch.int64 on meta; expected",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, state=[t])),
        "gave a state of type list; expected a mapping of named tensors",
    ),
    (
        "build_draft_input",
        of_output(lambda t: DraftInput(bonus_tokens=t, state={3: t})),
        "gave a state named 3; expected a string",
    ),
    ("verify", returning(5), "returned a value of type int; expected a specplug.VerifyOutput"),
    (
        "verify",
        changed(accept_lens=lambda d: d.offsets.float()),
        "returned accept_lens [1] of torch.float32 on cpu; expected [1] of torch.int64 on cpu",
    ),
    (
        "verify",
        changed(predict=lambda d: d.offsets),
        "returned predict [1] of torch.int64 on cpu; expected [2] of torch.int64",
    ),
    (
        "verify",
        changed(accept_index=lambda d: d.offsets.unsqueeze(1).repeat(1, 9)),
        "returned 9 columns; expected 1 to 2, num_steps + 1",
    ),
    (
        "verify",
        changed(accept_lens=lambda d: d.offsets + 2),
        "returned accept_lens=[2]; expected [1]: a path from the root",
    ),
    (
        "verify",
        changed(predict=lambda d: d.flat_tokens * 0 + 42),
        "returned predict=[42, 42]; expected [",
    ),
    (
        "verify",
        adding(torch.zeros(5, 1)),
        "gave target_output.per_node 'own' [5, 1] of torch.float32 on cpu; expected a tensor of le",
    ),
    (
        "build_draft_input",
        lambda runtime, *_: runtime.allocate_kv(1, 1, 2),
        ": runtime.allocate_kv() was called after create_worker(); expected it there",
    ),
    (
        "build_draft_input",
        lambda runtime, *_: runtime.capture_layer_inputs((0,)),
        ": runtime.capture_layer_inputs() was called after create_worker()",
    ),
    (
        "propose",
        lambda runtime, *_: runtime.record_draft(len),
        ": runtime.record_draft() was called after create_worker()",
    ),
    (
        "propose",
        lambda runtime, batch, roots: runtime.plan_attention(batch, batch.seq_lens, 9),
        ": plan_attention: width 9 at offset 0; expected at least 1 and, with the offset, at most",
    ),
    (
        "propose",
        lambda runtime, batch, roots: runtime.plan_attention(batch, batch.seq_lens, 1, offset=2),
        ": plan_attention: width 1 at offset 2; expected",
    ),
    (
        "propose",
        lambda runtime, batch, roots: runtime.plan_attention(batch, roots.repeat(2), 1),
        ": plan_attention: starts [2] of torch.int64 on cpu; expected [1] of torch.int64 on cpu",
    ),
    (
        "propose",
        lambda runtime, batch, roots: runtime.plan_attention(batch, roots.int(), 1),
        ": plan_attention: starts [1] of torch.int32 on cpu; expected [1] of torch.int64 on cpu",
    ),
    (
        "propose",
        lambda runtime, batch, roots: runtime.plan_attention(
            batch, batch.seq_lens, 1, mask=torch.ones(1, 1, 1)
        ),
        ": plan_attention: mask [1, 1, 1] of torch.float32 on cpu; expected [1, 1, 1] of torch.boo",
    ),
]


@pytest.mark.parametrize(("hook", "instead", "found"), WRONG)
def test_what_a_hook_returns_wrongly_bears_its_name(
    hook: str, instead: Callable[..., Any], found: str, told: Callable[..., str]
) -> None:
    message = told(hook, instead)
    separator = "" if found.startswith(":") else " "
    assert message.startswith(f"{hook}(){separator}{found}"), message
    assert "; expected " in message


@pytest.fixture
def without_debug(monkeypatch: pytest.MonkeyPatch) -> None:
    """Values are bounded, as in a run of a user, and not told."""
    monkeypatch.setattr("specplug.debug.DEBUG", False)


def test_values_are_bounded_where_nobody_debugs(
    engine: tuple[LLM, Plain], without_debug: None
) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    for make in (
        lambda r: Draft.chain(r + 1),
        lambda r: Draft.chain(torch.cat((r, r * 0 - 5), 1)),
        lambda r: Draft.tree(r.repeat(1, 2), TREE + 9, 1),
        lambda r: Draft.tree(r.repeat(1, 2), TREE, 0),
    ):
        plugin.instead["propose"] = of_roots(make)
        assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    plugin.instead.clear()
    llm.check_pool()


# An engine that is called by a hook of its own step

REENTRANT: dict[str, Callable[[LLM], Any]] = {
    "generate": lambda llm: llm.generate([PROMPT], SHORT),
    "stream": lambda llm: next(llm.stream([PROMPT], SHORT)),
    "step": lambda llm: llm.step(),
    "submit": lambda llm: llm.add_request(PROMPT, SHORT),
    "close": lambda llm: llm.close(),
    "flush_cache": lambda llm: llm.flush_cache(),
    "reset_stats": lambda llm: llm.reset_stats(),
    "check_pool": lambda llm: llm.check_pool(),
}


@pytest.mark.parametrize("hook", RUN_TIME)
@pytest.mark.parametrize("method", REENTRANT)
def test_a_hook_that_calls_its_engine_is_refused(
    method: str, hook: str, engine: tuple[LLM, Plain], told: Callable[..., str]
) -> None:
    llm, _ = engine
    message = told(hook, lambda *_: REENTRANT[method](llm))
    assert message.startswith(f"{hook}() called {method}() of the engine whose step"), message


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("disaggregation", [None, "both"])
def test_a_refused_call_fails_alone(
    overlap: bool, disaggregation: str | None, tiny_model: Path, engine: tuple[LLM, Plain]
) -> None:
    expected = engine[0].generate([PROMPT, PROMPT[:2]], SHORT)
    plugin, found = Plain(), []
    with LLM(
        tiny_model, speculative_algorithm=plugin, disaggregation=disaggregation,
        disable_overlap_schedule=not overlap,
    ) as llm:  # fmt: skip

        def build(runtime: Any, batch: Any, output: Any) -> DraftInput:
            for call in REENTRANT.values():
                with pytest.raises(PluginError) as caught:
                    call(llm)
                found.append(str(caught.value))
            assert llm.stats()
            return DraftInput(bonus_tokens=output.bonus_tokens)

        plugin.instead["build_draft_input"] = build
        outputs = llm.generate([PROMPT, PROMPT[:2]], SHORT)
        assert [o.token_ids for o in outputs] == [o.token_ids for o in expected]
        plugin.instead.clear()
        llm.check_pool()
    assert all(
        m.startswith("algorithm PLAIN (a plugin object, ") and "build_draft_input() called" in m
        for m in found
    )


def test_an_extension_that_calls_its_engine_is_named(
    extended: Callable[..., LLM], recwarn: pytest.WarningsRecorder
) -> None:
    class Caller:
        @hookimpl
        def on_step(self) -> None:
            llm.generate([PROMPT], SHORT)

    with extended(Caller()) as llm:
        why = r"switched off: extension e0 \(of-e0 1.2, own:it\): on_step\(\) called generate\(\)"
        with pytest.warns(PluginWarning, match=why):
            (output,) = llm.generate([PROMPT], SHORT)
        assert len(output.token_ids) == 6
        llm.check_pool()


def test_a_stream_that_a_hook_closes_is_aborted(engine: tuple[LLM, Plain]) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    stream = llm.stream([PROMPT], SamplingParams(max_tokens=80))
    next(stream)

    def propose(roots: torch.Tensor) -> Draft:
        stream.close()  # as the garbage collector does with a forgotten one
        return Draft.chain(roots)

    plugin.instead["propose"] = of_roots(propose)
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    plugin.instead.clear()
    assert llm.occupancy["running"] == 0
    llm.check_pool()


def test_a_thread_of_a_hook_waits_for_the_step(engine: tuple[LLM, Plain]) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    found: list[Any] = []
    threads = [Thread(target=lambda: found.extend(llm.generate([PROMPT], SHORT)))]

    def on_step(*_: Any) -> None:
        if not found and not threads[0].ident:
            threads[0].start()

    plugin.instead["on_step"] = on_step
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    threads[0].join()
    plugin.instead.clear()
    assert [output.token_ids for output in found] == [expected]


# What is no tensor of torch's own kind


class Loud(torch.Tensor):
    """Refuses every operation."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError("never to be called")


def freed(tensor: torch.Tensor) -> torch.Tensor:
    """The same form, after its memory was given back: to read it would end the process."""
    found = tensor.clone()
    found.untyped_storage().resize_(0)
    return found


STRANGE: dict[str, Callable[[torch.Tensor], Any]] = {
    "sparse": lambda t: t.to_sparse(),
    "a subclass": lambda t: t.clone().as_subclass(Loud),
    "fake": lambda t: FakeTensorMode().from_tensor(t.clone()),
    "meta": lambda t: t.to("meta"),
    "nested": lambda t: torch.nested.nested_tensor([row.float() for row in t]),
    "quantized": lambda t: torch.quantize_per_tensor(t.float(), 1.0, 0, torch.qint32),
    "0-dim": lambda t: t.sum(),
    "freed": freed,
    "no tensor": lambda t: t.tolist(),
}
DOORS: dict[str, tuple[str, Callable[..., Callable[..., Any]]]] = {
    "tokens": (
        "propose",
        lambda make: of_roots(lambda r: Draft(tokens=make(r), parents=None, widths=None, depth=0)),
    ),
    "parents": (
        "propose",
        lambda make: of_roots(
            lambda r: Draft(tokens=r.repeat(1, 2), parents=make(TREE), widths=None, depth=1)
        ),
    ),
    "bonus tokens": (
        "build_draft_input",
        lambda make: of_output(lambda t: DraftInput(bonus_tokens=make(t))),
    ),
    "a state": (
        "build_draft_input",
        lambda make: of_output(lambda t: DraftInput(bonus_tokens=t, state={"h": make(t)})),
    ),
    "accept_index": (
        "verify",
        lambda make: changed(accept_index=lambda d: make(d.offsets.unsqueeze(1))),
    ),
    "predict": ("verify", lambda make: changed(predict=lambda d: make(d.flat_tokens))),
    "per_node": ("verify", lambda make: adding_like(make)),
}


def adding_like(make: Callable[[torch.Tensor], Any]) -> Callable[..., Any]:
    def verify(runtime: Any, draft: Any, output: Any) -> None:
        output.per_node["own"] = make(output.predict)

    return verify


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("strange", STRANGE)
def test_a_strange_tensor_bears_the_hooks_name(
    strange: str, door: str, told: Callable[..., str]
) -> None:
    hook, instead = DOORS[door]
    message = told(hook, instead(STRANGE[strange]))
    assert message.startswith(f"{hook}() "), message
    assert not message.startswith(f"{hook}() raised"), "it is refused, not tried"
    assert "; expected " in message


ORDINARY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "non-contiguous": lambda t: t.repeat_interleave(2, dim=0)[::2],
    "expanded": lambda t: t[:1].expand(t.shape),
    "a parameter": lambda t: torch.nn.Parameter(t.clone(), requires_grad=False),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("kind", ORDINARY)
def test_an_ordinary_tensor_passes(
    kind: str, door: str, engine: tuple[LLM, Plain], without_debug: None
) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    hook, instead = DOORS[door]

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return ORDINARY[kind](tensor) if len(tensor) == 1 else tensor

    plugin.instead[hook] = instead(changed)
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    plugin.instead.clear()


WIDE = 1 << 55


@pytest.mark.parametrize(
    ("hook", "instead", "found"),
    [
        (
            "build_draft_input",
            of_output(
                lambda t: DraftInput(bonus_tokens=t, state={"h": t.unsqueeze(1).expand(-1, WIDE)})
            ),
            "FutureMap.publish_and_stash() raised RuntimeError: ",
        ),
        (
            "verify",
            adding_like(lambda t: t.unsqueeze(1).expand(-1, WIDE)),
            "verify() raised RuntimeError: ",
        ),
        (
            "propose",
            of_roots(lambda r: Draft.chain(r.expand(-1, WIDE))),
            f"propose() drafted {WIDE} nodes, {WIDE - 1} deep, for 1 requests; expected at most",
        ),
    ],
)
def test_a_tensor_larger_than_memory_bears_a_name(
    hook: str, instead: Callable[..., Any], found: str, told: Callable[..., str]
) -> None:
    assert told(hook, instead).startswith(found)


@pytest.mark.parametrize(
    "answer", [None, (1, 2), [1, 2], "seq_lens", "draft input"], ids=lambda a: str(a)
)
def test_what_a_future_map_resolves_wrongly_bears_its_name(answer: Any, tiny_model: Path) -> None:
    class OwnMap(FutureMap):
        def resolve(self, rows: Any) -> Any:
            seq_lens, draft_input = super().resolve(rows)
            if answer == "seq_lens":
                return seq_lens.to_sparse(), draft_input
            if answer == "draft input":
                return seq_lens, {"bonus_tokens": draft_input.bonus_tokens}
            return answer

    plugin = Plain()
    plugin.instead["create_future_map"] = lambda r: OwnMap(r.req_table_size, r.device)
    with LLM(tiny_model, device="cpu", speculative_algorithm=plugin) as llm:
        why = r"PLAIN .*: OwnMap.resolve\(\) returned .*; expected "
        with pytest.raises(PluginError, match=why):
            llm.generate([PROMPT], SHORT)
        llm.check_pool()


# Objects whose methods are the plugin's own


def lie(*_: Any, **__: Any) -> Any:
    raise AssertionError("the engine calls no method of what a plugin returns")


class LyingDraft(Draft):
    """A draft that a plugin makes as the core does, and that says something else if it is asked."""

    rooted = check = copy = narrow = flatten = spread = pad = select = lie
    is_chain = columns = width = total = mask = depths = lost = offsets = property(lie)
    padding = links = flat_tokens = property(lie)


class LyingInput(DraftInput):
    __getitem__ = lie


class LyingOutput(VerifyOutput):
    check = bounded = lie
    columns = property(lie)


class LyingMapping(dict[str, Any]):
    """What is asked of it is never what it holds."""

    def __getitem__(self, name: str) -> Any:
        return lie()

    items = values = get = lie


def lying_verify(runtime: Any, draft: Any, output: Any) -> Any:
    verified = verify_tree(draft, output.predict)
    names = ("predict", "accept_index", "accept_lens", "bonus_tokens")
    return LyingOutput(**{name: getattr(verified, name) for name in names})


def lying_draft(roots: torch.Tensor) -> Draft:
    return LyingDraft(tokens=roots.repeat(1, 2), parents=None, widths=None, depth=1)


def lying_input(bonus_tokens: torch.Tensor) -> DraftInput:
    state = LyingMapping(hidden=bonus_tokens.clone())
    return LyingInput(bonus_tokens=bonus_tokens, state=state)


@pytest.mark.parametrize(
    ("hook", "instead"),
    [
        ("propose", of_roots(lying_draft)),
        ("build_draft_input", of_output(lying_input)),
        ("verify", lying_verify),
    ],
)
def test_methods_of_what_a_hook_returns_are_not_called(
    hook: str, instead: Callable[..., Any], engine: tuple[LLM, Plain]
) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    plugin.instead[hook] = instead
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    plugin.instead.clear()


@pytest.mark.parametrize("tree", [False, True])
def test_tokens_of_a_verify_hook_do_not_count(
    tree: bool, engine: tuple[LLM, Plain], without_debug: None
) -> None:
    llm, plugin = engine
    expected = llm.generate([PROMPT], SHORT)[0].token_ids

    def verify(runtime: Any, draft: Any, output: Any) -> VerifyOutput:
        return verify_tree(draft, torch.full_like(output.predict, 42))

    def propose(roots: torch.Tensor) -> Draft:
        tokens = torch.cat((roots, roots * 0 + 42), 1)
        return Draft.tree(tokens, TREE, 1) if tree else Draft.chain(tokens)

    plugin.instead = {"verify": verify, "propose": of_roots(propose)}
    assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
    plugin.instead.clear()
    llm.check_pool()


@pytest.mark.parametrize(
    ("hook", "instead", "found"),
    [
        ("validate_config", returning(5), "() returned a value of type int; expected a specplug"),
        (
            "validate_config",
            lambda config: attrs.evolve(config, num_draft_slots=-1),
            "() raised ValueError: 'num_draft_slots' must be >= 0: -1; expected it to return",
        ),
        (
            "validate_config",
            lambda config: attrs.evolve(config, draft_lookahead="1"),
            "() raised TypeError: 'draft_lookahead' must be <class 'int'>",
        ),
        (
            "validate_config",
            lambda config: attrs.evolve(config, num_steps=0),
            "() raised ValueError: 'num_steps' must be >= 1: 0; expected it to return",
        ),
        ("validate_config", leaving, "() raised SystemExit: 0; expected it to return"),
        ("create_worker", returning(None), "() returned None; expected an object"),
        ("create_worker", leaving, "() raised SystemExit: 0; expected it to return"),
        (
            "create_worker",
            lambda runtime: runtime.record_draft(None),
            "(): record_draft: None; expected a function",
        ),
        (
            "create_future_map",
            returning({}),
            "() returned a value of type dict; expected a specplug.FutureMap",
        ),
        (
            "create_future_map",
            lambda runtime: FutureMap(runtime.max_running_requests, runtime.device),
            "() returned a future map of 8 rows; expected runtime.req_table_size=9; fix the plugin",
        ),
        (
            "supports_target_verify_for_draft",
            returning("yes"),
            "() returned a value of type str; expected True, False or None",
        ),
    ],
)
def test_a_failure_before_the_run_bears_its_name(
    hook: str, instead: Callable[..., Any], found: str, tiny_model: Path
) -> None:
    plugin = Plain()
    plugin.instead[hook] = instead
    with pytest.raises(PluginError) as caught:
        LLM(tiny_model, device="cpu", speculative_algorithm=plugin)
    assert str(caught.value).startswith("algorithm PLAIN (a plugin object, ")
    assert f"): {hook}{found}" in str(caught.value)


@pytest.mark.parametrize(
    ("hook", "error"),
    [
        ("validate_config", UsageError("num_steps=9: expected fewer")),
        ("create_worker", CheckpointError("no such file")),
    ],
)
def test_a_refusal_of_the_users_values_stays_one(
    hook: str, error: Exception, tiny_model: Path
) -> None:
    plugin = Plain()
    plugin.instead[hook] = raising(error)
    with pytest.raises(type(error)) as caught:
        LLM(tiny_model, device="cpu", speculative_algorithm=plugin)
    assert caught.value is error


def test_a_future_map_that_raises_bears_the_plugins_name(tiny_model: Path) -> None:
    plugin = Plain()
    plugin.instead["create_future_map"] = lambda r: BrokenMap(r.req_table_size, r.device)
    with (
        LLM(tiny_model, device="cpu", speculative_algorithm=plugin) as llm,
        pytest.raises(PluginError, match=r"PLAIN .*BrokenMap.stash\(\) raised LookupError: no roo"),
    ):
        llm.generate([PROMPT], SHORT)


# Extensions


@pytest.fixture
def extended(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., LLM]:
    """``extended(plugin, …)``: an engine of NONE with these as its extensions."""

    def make(*plugins: Any) -> LLM:
        entries = [
            ExtensionEntry(name=f"e{i}", value="own:it", distribution=f"of-e{i}", version="1.2")
            for i in range(len(plugins))
        ]
        found = [Extension(e.name, plugin, e) for e, plugin in zip(entries, plugins, strict=True)]
        monkeypatch.setattr(Registry, "extensions", lambda *_: found)
        return LLM(tiny_model, device="cpu")

    return make


class Watcher:
    def __init__(self) -> None:
        self.steps = self.ended = 0

    @hookimpl
    def on_step(self, report: Any) -> None:
        self.steps += 1

    @hookimpl
    def on_request_finished(self) -> None:
        self.ended += 1


class FailingWatcher(Watcher):
    @hookimpl
    def on_step(self, report: Any) -> None:
        super().on_step(report)
        if self.steps == 2:
            sys.exit(0)


class FailingWrapper(Watcher):
    @hookimpl(wrapper=True)
    def on_request_finished(self) -> Any:
        result = yield
        self.ended += 1
        raise OwnBase(result)


def test_extensions_given_as_objects_take_part(tiny_model: Path) -> None:
    watcher, failing = Watcher(), FailingWatcher()
    told = (
        r"extension FailingWatcher \(a plugin object, [\w.]+:FailingWatcher\): on_step\(\) raised"
    )
    with LLM(tiny_model, device="cpu", extensions=[watcher, failing]) as llm:
        with pytest.warns(PluginWarning, match=told):
            llm.generate([PROMPT], SHORT)
        names = [e["name"] for e in llm.effective_config["extensions"]]
        assert names[-2:] == ["Watcher", "FailingWatcher"]
    assert watcher.steps > failing.steps == 2
    assert watcher.ended == 1


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("VIEWS", r"extensions='VIEWS': expected a list of plugin objects"),
        (["VIEWS"], r"extensions=\('VIEWS',\): expected a list of plugin objects"),
        ([Watcher], r"extension Watcher \(a plugin object, [\w.]+:Watcher\): it is the class"),
    ],
)
def test_extensions_that_are_no_objects_are_refused(
    given: Any, told: str, tiny_model: Path
) -> None:
    with pytest.raises(SpecplugError, match=told):
        LLM(tiny_model, device="cpu", extensions=given)


@pytest.mark.parametrize(
    ("kind", "hook", "said"),
    [
        (FailingWatcher, "on_step", "SystemExit: 0"),
        (FailingWrapper, "on_request_finished", "OwnBase: []"),
    ],
)
def test_an_extension_that_fails_to_look_on_is_switched_off(
    kind: type[Watcher], hook: str, said: str, extended: Callable[..., LLM]
) -> None:
    first, failing, last = Watcher(), kind(), Watcher()
    with extended(first, failing, last) as llm:
        assert [e["state"] for e in llm.effective_config["extensions"]] == ["on"] * 3
        why = rf"switched off: extension e1 \(of-e1 1.2, own:it\): {hook}\(\) raised"
        with pytest.warns(PluginWarning, match=why) as warned:
            outputs = [llm.generate([PROMPT], SHORT)[0] for _ in range(2)]
        assert len(warned) == 1, "once"
        assert [len(output.token_ids) for output in outputs] == [6, 6], "the run goes on"
        assert first.steps == last.steps > failing.steps
        assert first.ended == last.ended == 2
        config = llm.effective_config["extensions"]
    assert config[1] == {
        "name": "e1",
        "distribution": "of-e1",
        "version": "1.2",
        "state": f"off: {hook}() raised {said}",
    }
    assert [config[0]["state"], config[2]["state"]] == ["on", "on"]


@pytest.mark.parametrize("hook", OBSERVERS)
def test_an_extension_may_fail_in_any_observer(hook: str) -> None:
    """What is declared on the hookspec alone decides it: a new observer needs no further word."""
    failing = type("Failing", (), {hook: hookimpl(lambda self: 1 / 0)})()
    entry = ExtensionEntry(name="e", value="own:it", distribution="of-e", version="1.2")
    extensions = [Extension("e", failing, entry)]
    selected = Registry().select("NONE")
    manager = build_plugin_manager(selected, extensions, CoreDefaults())
    plugins, arguments = PluginGuard(manager, selected, extensions), dict.fromkeys(HOOKS[hook])
    with pytest.warns(PluginWarning, match=rf"switched off: extension e .*{hook}\(\) raised"):
        plugins.call(hook, **arguments)
    plugins.call(hook, **arguments)


def wrapping(before: Callable[[], Any], after: Callable[[Any], Any]) -> Any:
    class Wraps:
        @hookimpl(wrapper=True)
        def propose(self) -> Any:
            before()
            result = yield
            return after(result)

    return Wraps()


class OldWrapper:
    @hookimpl(hookwrapper=True)
    def propose(self) -> Any:
        outcome = yield
        outcome.force_result("nonsense")


class Twice:
    @hookimpl(wrapper=True)
    def propose(self) -> Any:
        yield
        yield


class Answers:
    @hookimpl
    def propose(self) -> Any:
        return 7


def same(value: Any) -> Any:
    return value


class Overwrites:
    """A wrapper that writes to what the core has answered."""

    @hookimpl(wrapper=True)
    def verify(self) -> Any:
        verified = yield
        for name in ("predict", "accept_index", "accept_lens", "bonus_tokens"):
            getattr(verified, name).fill_(1)
        return verified


def test_a_wrapper_that_writes_to_an_answer_changes_no_token(
    extended: Callable[..., LLM], engine: tuple[LLM, Plain], without_debug: None
) -> None:
    expected = engine[0].generate([PROMPT], SHORT)[0].token_ids
    with extended(Overwrites()) as llm:
        assert llm.generate([PROMPT], SHORT)[0].token_ids == expected


@pytest.mark.parametrize(
    ("plugin", "found"),
    [
        (wrapping(leaving, same), "raised SystemExit: 0; expected it to return"),
        (wrapping(dict, leaving), "raised SystemExit: 0; expected it to return"),
        (wrapping(dict, lambda _: 5), "returned a value of type int; expected a specplug.Draft"),
        (wrapping(dict, lambda _: None), "returned None; expected a specplug.Draft"),
        (OldWrapper(), "returned a value of type str; expected a specplug.Draft"),
        (Twice(), "raised RuntimeError: the wrapper yields twice"),
        (Answers(), "returned a value of type int; expected a specplug.Draft"),
    ],
)
def test_an_extension_that_breaks_a_hook_is_named_itself(
    plugin: Any, found: str, extended: Callable[..., LLM]
) -> None:
    innocent = [wrapping(dict, same) for _ in range(2)]
    with extended(innocent[0], plugin, innocent[1]) as llm:
        with pytest.raises(PluginError) as caught:
            llm.generate([PROMPT], SHORT)
        llm.check_pool()
    assert str(caught.value).startswith(f"extension e1 (of-e1 1.2, own:it): propose() {found}")


def test_an_innocent_wrapper_is_not_named(
    extended: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, tiny_model: Path
) -> None:
    seen: list[Any] = []
    extended(wrapping(dict, lambda result: seen.append(result) or result)).close()
    plugin = Plain()
    with LLM(tiny_model, device="cpu", speculative_algorithm=plugin) as llm:
        llm.generate([PROMPT], SHORT)
        assert seen, "it wraps"
        for instead, found in ((returning(5), "returned a value"), (leaving, "raised SystemExit")):
            plugin.instead["propose"] = instead
            with pytest.raises(PluginError, match=rf"^algorithm PLAIN .*propose\(\) {found}"):
                llm.generate([PROMPT], SHORT)


@pytest.mark.parametrize("before", [None, torch.device("cpu")], ids=str)
@pytest.mark.parametrize("hook", ["propose", "build_draft_input", "verify", "on_step"])
def test_default_device_that_a_hook_sets_is_put_back(
    engine: tuple[LLM, Plain], hook: str, before: torch.device | None
) -> None:
    def setting(*arguments: Any) -> Any:
        found = {
            "propose": lambda roots: Draft.chain(roots.unsqueeze(1).repeat(1, 2)),
            "build_draft_input": lambda output: DraftInput(bonus_tokens=output.bonus_tokens),
        }.get(hook, lambda _: None)(arguments[-1])
        torch.set_default_device("meta")
        return found

    llm, plugin = engine
    plugin.instead.clear()
    expected = llm.generate([PROMPT], SHORT)[0].token_ids
    torch.set_default_device(before)
    try:
        plugin.instead[hook] = setting
        told = rf"^algorithm PLAIN \(.*\): {hook}\(\) set torch's default device to meta; expected"
        with pytest.warns(PluginWarning, match=told):
            assert llm.generate([PROMPT], SHORT)[0].token_ids == expected
        assert default_device() == before
    finally:
        plugin.instead.clear()
        torch.set_default_device(None)


def test_default_device_set_by_an_extension_names_it(extended: Callable[..., LLM]) -> None:
    wrapper = wrapping(lambda: torch.set_default_device("meta"), same)
    told = r"^extension e0 \(of-e0 1.2, own:it\): propose\(\) set torch's default device to meta;"
    with extended(wrapper) as llm, pytest.warns(PluginWarning, match=told):
        assert len(llm.generate([PROMPT], SHORT)[0].token_ids) == 6
    assert default_device() is None
