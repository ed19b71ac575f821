"""The capabilities of a host, and whether an algorithm can run with them. No torch here.

A host is an engine that runs plugins: the embedded one, or another whose package is installed. Its
``Runtime`` has its ``HostCapabilities`` as ``host``. An algorithm or a setting that needs more is
refused at start, with the names of both; nothing is cut silently.

A package that brings specplug to an engine names a ``HostPlugin`` in the entry-point group
``specplug.hosts``, by the name that users type: ``specplug list --engine NAME``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import attrs
from attrs import validators

from specplug.algorithm import CAPTURES, AlgorithmInfo, SpecConfig, names_of
from specplug.errors import UsageError

if TYPE_CHECKING:
    from specplug.sampling_params import SamplingParams


@attrs.frozen(kw_only=True)
class HostCapabilities:
    """The capabilities of a host. One that is not named is missing.

    Attributes:
        name: what messages call the host, with its version: ``vLLM 0.32.0 (model runner V1)``.
        draft_models: embeddings, LM head, KV caches and attention plans for draft models.
        captures: the hidden states of the target that algorithms may read, of ``CAPTURES``.
        trees: its target verifies drafts that branch.
        verify: an algorithm's or an extension's ``verify`` hook is called.
        overlap: a step may be launched before the last one's result is read.
        exact_sampling: the token at a position depends on the request's seed, the position and the
            text before it alone. Then sampled output is that of plain decoding too, not only
            greedy output.
        foreseeable_noise: ``Runtime.gumbel_noise`` is the noise with which the host will choose.
            Without it drafts choose as for greedy requests.
        disaggregation: prefill and decode instances exchange draft states.
        target_drafts: the target's own layers run for drafts, over its cache or a part of it.
        parts: an algorithm may hold others (``Runtime.part``).
        cache_salts: ``RequestView.cache_salt`` is what the request was given. Otherwise it is None.
        verify_budget: what a policy says that a batch verifies together is heeded
            (``DraftPlan.verify_budget``): drafts may be cut on the device, which alone knows then
            how many nodes each request has.
        own_lengths: a draft's text may have more tokens than the target's (``Runtime.own_text``).
    """

    name: str = attrs.field(validator=validators.instance_of(str))
    draft_models: bool = False
    captures: frozenset[str] = attrs.field(
        default=frozenset(),
        converter=names_of,
        validator=validators.deep_iterable(validators.in_(CAPTURES)),
    )
    trees: bool = False
    verify: bool = False
    overlap: bool = False
    exact_sampling: bool = False
    foreseeable_noise: bool = False
    disaggregation: bool = False
    target_drafts: bool = False
    parts: bool = False
    cache_salts: bool = False
    verify_budget: bool = False
    own_lengths: bool = False

    def obstacles(
        self, info: AlgorithmInfo, config: SpecConfig | None = None, *, own_verify: bool = False
    ) -> Iterator[str]:
        """Yield why an algorithm cannot run here, a line each; nothing if it can.

        Args:
            info: what it declares.
            config: settings to judge too; None: those with which it fits best.
            own_verify: whether a plugin of the run implements ``verify``.
        """
        able = info.capabilities
        if able.draft_model and not self.draft_models:
            yield f"{info.name} has a draft model, and {self.name} runs none"
        if able.target_drafts and not self.target_drafts:
            yield (
                f"{info.name} drafts with the target's own layers, and {self.name} runs them for "
                "its own passes alone"
            )
        if able.parts and not self.parts:
            yield f"{info.name} holds other algorithms, and {self.name} runs one alone"
        for capture in sorted(able.captures - self.captures):
            yield f"{info.name} reads {CAPTURES[capture]}, and {self.name} does not give them"
        if own_verify and not self.verify:
            yield f"{info.name} has a verify() of its own, and {self.name} verifies by itself"
        if config is not None and config.topk > 1 and not self.trees:
            yield (
                f"{info.name} with topk={config.topk} drafts trees, and {self.name} verifies "
                "chains only; use topk=1"
            )

    def check(self, info: AlgorithmInfo, config: SpecConfig, *, own_verify: bool = False) -> None:
        """Refuse a run that needs more than the host gives.

        Raises:
            UsageError: it does, with all reasons.
        """
        found = "; ".join(self.obstacles(info, config, own_verify=own_verify))
        if found:
            raise UsageError(found)


@attrs.frozen(kw_only=True)
class RunOptions:
    """The command line's options of a run in another engine.

    Attributes:
        model: the target's folder or id; the default model's folder if none was given.
        algorithm: the algorithm's name; NONE: the engine decodes plainly, without specplug.
        num_steps, topk, num_draft_tokens: as typed; None: the algorithm's defaults.
        draft_model_path: folder of the draft weights; None: those that are shipped.
        dtype: as typed; "auto": the engine's own choice.
        settings: the algorithm's own, by name.
        more: the engine's own arguments, as they were typed after ``--``.
    """

    model: str
    algorithm: str
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    draft_model_path: Path | None = None
    dtype: str = "auto"
    settings: Mapping[str, Any] = attrs.field(factory=dict)
    more: Sequence[str] = ()


@attrs.frozen(kw_only=True)
class ServerOptions(RunOptions):
    """The options of ``specplug serve --engine NAME``.

    Attributes:
        address: host name and port to listen at.
        served_model_name: what clients call the model; None: its folder or id.
    """

    address: tuple[str, int] = ("127.0.0.1", 30000)
    served_model_name: str | None = None


@attrs.frozen(kw_only=True)
class EngineOptions(RunOptions):
    """The options of an engine of ``specplug bench --engine NAME``.

    Attributes:
        max_running_requests: the requests that it runs together.
        seed: of the sampling noise.
    """

    max_running_requests: int = 1
    seed: int = 0


class Completion(Protocol):
    """An engine's output for a prompt.

    Attributes:
        token_ids: of the output.
    """

    @property
    def token_ids(self) -> Sequence[int]: ...


class MeasuredEngine(Protocol):
    """An engine that ``specplug bench`` measures, in its own process. ``LLM`` is one.

    Attributes:
        effective_config: its settings as they are used, with "dtype", "device", "page_size",
            "num_steps", "topk" and "num_draft_tokens".
        tokenizer: of transformers; None: prompts are token ids.
        context_len: most tokens of a request, prompt and output.
    """

    @property
    def effective_config(self) -> Mapping[str, Any]: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def context_len(self) -> int: ...

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling_params: SamplingParams | Sequence[SamplingParams],
        *,
        on_finished: Callable[[Any], None] | None = None,
    ) -> Sequence[Completion]:
        """Complete prompts together; the completions are in their order.

        Args:
            sampling_params: one for all, or one for each.

        Raises:
            UsageError: ``sampling_params`` ask for what the engine has not.
        """

    def stats(self) -> Mapping[str, Any]:
        """Return totals since ``reset_stats``: the tokens "accepted" by so many "verifications"
        (bonus tokens included), "drafted_by_position" and "accepted_by_position", lists; "seconds"
        by part of a decode step ("propose", "target", "verify", "extend") and "prefill_seconds";
        {} and 0 where they are not known; and, of an engine that decodes requests without drafts,
        how many were "undrafted", by reason."""

    def reset_stats(self) -> None:
        """Start counting anew."""

    def close(self) -> None:
        """Free the engine."""


class HostPlugin(Protocol):
    """The object that a host's package offers the command line.

    Its module imports neither torch nor the engine at its top.
    """

    def versions(self) -> Mapping[str, str | None]:
        """Return the engine's distributions with the versions that are installed, or None, from
        metadata alone."""

    def describe(self) -> HostCapabilities:
        """Return what the installed engine gives.

        Raises:
            UsageError: it is not installed, or a version that was not tested; with those that were.
        """

    def server_command(self, options: ServerOptions) -> Sequence[str]:
        """Return the command that starts the engine's own server with an algorithm.

        Raises:
            UsageError: the engine cannot do what is asked.
        """

    def open_engine(self, options: EngineOptions) -> MeasuredEngine:
        """Make an engine to be measured, in this process.

        Raises:
            UsageError: the engine cannot do what is asked.
        """
