"""A decode instance in the test's process, prefill instances beside it or in others, and NONE."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
from shallow_target import ShallowTarget, shallow_target

from specplug import LLM, RequestOutput, SamplingParams

sys.path.insert(0, str(Path(__file__).parent))

from child_instances import DEADLINE, Instance, check_whole, prefill
from tcp_proxy import Proxy

TEXT = (
    "def total(values):\n    result = 0\n    for value in values:\n        if value is None:\n"
    "            continue\n        if value < 0:\n            raise ValueError(value)\n"
    "        result += value\n    return result\n\n\nclass Stack:\n    def __init__(self):\n"
)


@attrs.define(eq=False)
class Plain:
    """NONE in a single process: what must come out."""

    llm: LLM
    _known: dict[Any, RequestOutput] = attrs.field(factory=dict)

    def ids(self, text: str) -> tuple[int, ...]:
        """A text's tokens."""
        return tuple(self.llm.tokenizer(text)["input_ids"])

    def output(self, prompt: Sequence[int] | str, params: SamplingParams) -> RequestOutput:
        """Of a request alone."""
        name = repr((prompt, params))
        if name not in self._known:
            (self._known[name],) = self.llm.generate([prompt], params)
        return self._known[name]


@pytest.fixture(scope="session")
def plain() -> Iterator[Plain]:
    """NONE in a single process."""
    with LLM(dtype="float64", disable_overlap_schedule=True, disable_radix_cache=True) as llm:
        yield Plain(llm)


@pytest.fixture(scope="session")
def shallow_plain(shallow: ShallowTarget) -> Iterator[Plain]:
    """The same of a model with few layers, which is quicker."""
    with LLM(
        **shallow.options("NONE"),
        dtype="float64",
        disable_overlap_schedule=True,
        disable_radix_cache=True,
    ) as llm:
        yield Plain(llm)


@pytest.fixture(scope="session")
def long_prompt(shallow_plain: Plain) -> tuple[int, ...]:
    """Tokens enough for many chunks of 8."""
    return shallow_plain.ids(TEXT * 3)


def step_until(llm: LLM, true: Callable[[], bool], what: str = "it") -> list[RequestOutput]:
    """Step until something is true; what the requests gave on the way."""
    outputs: list[RequestOutput] = []
    deadline = time.monotonic() + DEADLINE
    while not true():
        assert time.monotonic() < deadline, f"{what} has not happened: {llm.stats()['transfers']}"
        outputs += llm.step()
    return outputs


def finish(llm: LLM) -> dict[str, RequestOutput]:
    """Step until all requests have ended; their outputs by name."""
    outputs = step_until(llm, lambda: not llm.has_unfinished_requests, "the end of all requests")
    return {output.request_id: output for output in outputs if output.finished}


@attrs.define(eq=False)
class Pair:
    """A decode and a prefill instance with settings of their own, stepped in turn. Their target is
    shallow (see ``shallow_plain``)."""

    decode: LLM
    prefill: LLM

    @classmethod
    def open(
        cls,
        both: dict[str, Any],
        *,
        decode: Any,
        prefill: Any,
        watch: object | None = None,
        **of_prefill: Any,
    ) -> Pair:
        """Two engines of one kind and two algorithms; ``of_prefill`` are settings of the one, and
        ``watch`` an extension of the other."""
        both = {"dtype": "float64", "max_total_tokens": 2048, **both}
        target = shallow_target()
        d = LLM(
            disaggregation="decode",
            disaggregation_address="tcp://127.0.0.1:*",
            extensions=[] if watch is None else [watch],
            **target.options(decode),
            **both,
        )
        p = LLM(
            disaggregation="prefill",
            disaggregation_address=d.effective_config["disaggregation_address"],
            **target.options(prefill),
            **{**both, **of_prefill},
        )
        return cls(d, p)

    def __enter__(self) -> Pair:
        return self

    def __exit__(self, *exc: object) -> None:
        self.decode.close()
        self.prefill.close()

    def generate(self, prompts: Sequence[Any], params: Any) -> list[RequestOutput]:
        """As ``LLM.generate``."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        names = [self.decode.add_request(p, s) for p, s in zip(prompts, each, strict=True)]
        ended: dict[str, RequestOutput] = {}
        while self.decode.has_unfinished_requests:
            self.prefill.prefill_loop.step(wait=False)
            ended.update({o.request_id: o for o in self.decode.step() if o.finished})
        while self.prefill.engine.has_work:
            self.prefill.prefill_loop.step(wait=False)
        for llm in (self.decode, self.prefill):
            check_whole(llm)
        return [ended[name] for name in names]


@attrs.define(eq=False)
class Site:
    """A decode instance in this process, and the processes that prefill for it.

    Attributes:
        options: of all of them.
    """

    llm: LLM
    options: dict[str, Any]
    folder: Path
    stack: ExitStack
    _instances: int = 0

    @property
    def address(self) -> str:
        """Of the decode instance."""
        address: str = self.llm.effective_config["disaggregation_address"]
        return address

    @property
    def transfers(self) -> dict[str, int]:
        """What has happened so far."""
        transfers: dict[str, int] = self.llm.stats()["transfers"]
        return transfers

    def prefill(self, address: str | None = None, **options: Any) -> Instance:
        """Start a process that prefills."""
        self._instances += 1
        instance = Instance(
            prefill,
            self.folder / f"prefill{self._instances}.log",
            disaggregation_address=address or self.address,
            **{**self.options, **options},
        )
        self.stack.callback(instance.kill)
        return instance

    def registered(self, address: str | None = None, **options: Any) -> Instance:
        """Start a process that prefills, and step until it has registered."""
        before = self.llm.stats()["prefill_instances"]
        instance = self.prefill(address, **options)
        assert instance.hear() == "ready"
        step_until(self.llm, lambda: self.llm.stats()["prefill_instances"] > before, "registering")
        return instance

    def proxy(self) -> Proxy:
        """Put a proxy before the decode instance."""
        return self.stack.enter_context(Proxy(int(self.address.rpartition(":")[2])))


@pytest.fixture
def open_site(tmp_path: Path) -> Iterator[Callable[..., Site]]:
    """``open_site(timeout, **options)``: a ``Site``, EAGLE3's of the shallow target, with chunks of
    8."""
    with ExitStack() as stack:

        def make(timeout: float = DEADLINE, **options: Any) -> Site:
            options = {
                **shallow_target().options("EAGLE3"),
                "dtype": "float64",
                "chunked_prefill_size": 8,
                "max_total_tokens": 4096,
                **options,
            }
            llm = LLM(
                disaggregation="decode",
                disaggregation_address="tcp://127.0.0.1:*",
                disaggregation_timeout=timeout,
                **options,
            )
            stack.enter_context(llm)
            return Site(llm, options, tmp_path, stack)

        yield make
