"""What the runtimes of all hosts share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor

from specplug.algorithm import SpecConfig
from specplug.errors import PluginError, UsageError
from specplug.host import HostCapabilities
from specplug.speculative.graph_runner import PassRunner
from specplug.speculative.output_kind import PerTokenOutput
from specplug.speculative.part import PartHolder
from specplug.speculative.runtime import KVCache, RankInfo
from specplug.speculative.token_map import find_tokenizer

if TYPE_CHECKING:
    from specplug.speculative.draft_plan import ForcedTokens
    from specplug.speculative.hook_order import RequestView


class RuntimeBase(PartHolder):
    """The part of a ``Runtime`` that no host does its own way: a door that closes when the worker
    is made, and the passes of draft models, each recorded or not.

    Args:
        host: what the host gives.
        config: of the run's speculation.

    Attributes:
        host, config: as given.
        worker: the algorithm's; set by ``StartedAlgorithm.create_worker``.
        rank: of the run; a host with several ranks sets its own.
        model_path: the target's folder or hub id, which a host sets; None: it is not known.
        tokenizer_path: of the target's tokenizer, likewise.
    """

    worker: Any = None
    rank = RankInfo()
    model_path: str | None = None
    tokenizer_path: str | None = None

    def __init__(self, host: HostCapabilities, config: SpecConfig) -> None:
        super().__init__()
        self.host = host
        self.config = config
        self._is_sealed = False
        self._draft_passes: list[PassRunner] = []

    @cached_property
    def tokenizer(self) -> Any:
        """The target's, loaded when a plugin first asks for it; None: it has none."""
        return None if self.tokenizer_path is None else find_tokenizer(self.tokenizer_path)

    def record_draft(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        self.check_open("record_draft")
        if not callable(forward):
            raise PluginError(
                f"record_draft: {forward!r:.60}; expected a function; give it the draft's pass, "
                "not what the pass returns"
            )
        self._draft_passes.append(self.draft_pass(forward))
        return self._draft_passes[-1]

    def add_output(self, output: PerTokenOutput) -> None:
        raise UsageError(
            f"output {output.name!r}: {self.host.name} hands out its own outputs alone; expected "
            "none of a plugin's; disable the extension that adds it (SPECPLUG_DISABLE)"
        )

    def own_text(self, cache: KVCache) -> Any:
        raise self._one_length("own_text()")

    def _one_length(self, what: str) -> UsageError:
        """Return the refusal of a host whose drafts have the lengths of the target's texts."""
        return UsageError(
            f"{what}: {self.host.name} keeps one token of a draft for one of the target's; "
            "expected a host whose capabilities have own_lengths, as the embedded engine's do"
        )

    def forced_tokens(
        self, requests: Sequence[RequestView], *, wait: bool = False
    ) -> Sequence[ForcedTokens | None]:
        return ()

    def target_layers(self, first: int, last: int) -> Any:
        raise self._no_target_drafts(f"target_layers({first}, {last})")

    def final_norm(self, hidden: Tensor) -> Tensor:
        raise self._no_target_drafts("final_norm()")

    def plan_target(self, *given: Any, **named: Any) -> Any:
        raise self._no_target_drafts("plan_target()")

    def target_attention(self, layer: int, page_size: int) -> Any:
        raise self._no_target_drafts(f"target_attention({layer}, {page_size})")

    def _no_target_drafts(self, what: str) -> UsageError:
        """Return the refusal of a host that runs the target for its own passes alone."""
        return UsageError(
            f"{what}: {self.host.name} runs the target's layers for its own passes alone; expected "
            "a host whose target drafts, as the embedded engine's does"
        )

    # What a host does with it

    def draft_pass(self, forward: Callable[..., Any]) -> PassRunner:
        """Return what runs a draft's pass: a host that records it overrides this."""
        return PassRunner(forward)

    def check_lengths(self, own_lengths: int) -> None:
        """Refuse a number of tokens that a slot cannot have.

        Raises:
            PluginError: there is no such number.
            UsageError: the host has room for one alone.
        """
        if type(own_lengths) is not int or own_lengths < 1:
            raise PluginError(
                f"allocate_kv: own_lengths={own_lengths!r:.40}; expected at least 1, the most "
                "tokens of the draft that stand for one of the target's"
            )
        if own_lengths > 1 and not self.host.own_lengths:
            raise self._one_length(f"allocate_kv(own_lengths={own_lengths})")

    def check_open(self, method: str) -> None:
        """Refuse a call of ``method`` after ``create_worker``.

        Raises:
            PluginError: the worker has been made.
        """
        if self._is_sealed:
            raise PluginError(
                f"runtime.{method}() was called after create_worker(); expected it there, before "
                "the KV pool is made; call it in create_worker()"
            )

    def seal(self) -> None:
        """Refuse further captures, caches, outputs and passes: the worker has been made."""
        self._is_sealed = True

    @property
    def num_recordings(self) -> int:
        """The forms of draft models' passes that are recorded."""
        return sum(each.num_recordings for each in self._draft_passes)
