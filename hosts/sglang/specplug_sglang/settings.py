"""SGLang's settings as specplug reads them, each declared once, and the start of a run by them."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

import specplug
from specplug import AlgorithmInfo, HostCapabilities, PluginError, SpecConfig, UsageError
from specplug.settings import Anything, Choice, setting, settings_of
from specplug.speculative.algorithm_start import StartedAlgorithm, start_algorithm
from specplug_sglang.capabilities import MASKED, PLANNED, PREFIX, capabilities
from specplug_sglang.fault_tolerant_hooks import FaultTolerantHooks

logger = logging.getLogger(__name__)

MAX_RUNNING_REQUESTS = 48
"""The default for our algorithms, as for SGLang's own."""

DRAFT_WHEN = "SPECPLUG_DRAFT_WHEN"
"""The variable that says when to draft: SGLang's arguments have no place for it."""

_DRAFTS, _SCHEDULE, _TARGET = "Drafts", "Schedule", "Target"


@attrs.frozen
class Only:
    """The one value that a setting may have.

    Attributes:
        value: the value.
        why: the reason, in messages and in README.md.
    """

    value: object
    why: str

    def __call__(self, name: str, value: Any) -> None:
        """Refuse another value."""
        if value != self.value:
            raise UsageError(f"{name}={value!r}: expected {self.value!r}, {self.why}")


@attrs.frozen(kw_only=True)
class SglangSettings:
    """The settings that specplug reads of SGLang's ``ServerArgs``, by their names there."""

    speculative_num_steps: int | None = setting(
        None, Anything(), "`num_steps`", group=_DRAFTS, unset="the algorithm's"
    )
    speculative_eagle_topk: int | None = setting(
        None, Anything(), "`topk`", group=_DRAFTS, unset="the algorithm's"
    )
    speculative_num_draft_tokens: int | None = setting(
        None, Anything(), "`num_draft_tokens`", group=_DRAFTS, unset="the algorithm's"
    )
    speculative_draft_model_path: str | None = setting(
        None,
        Anything(),
        "folder of the draft weights, with a `model_type` of transformers in its `config.json`",
        group=_DRAFTS,
        unset="the weights that the plugin ships for the default model",
    )
    max_running_requests: int | None = setting(
        None,
        Anything(),
        "requests that decode together",
        group=_SCHEDULE,
        unset=f"{MAX_RUNNING_REQUESTS}, as for SGLang's own algorithms",
    )
    page_size: int | None = setting(
        None, Anything(), "tokens of a page; trees need no particular size", group=_SCHEDULE
    )
    chunked_prefill_size: int | None = setting(
        None, Anything(), "tokens of a prefill chunk; -1: prompts are not cut", group=_SCHEDULE
    )
    disable_overlap_schedule: bool = setting(
        False, Anything(), "each step waits for the one before it", group=_SCHEDULE
    )
    disable_radix_cache: bool = setting(False, Anything(), "no prefix cache", group=_SCHEDULE)
    enable_mixed_chunk: bool = setting(
        False,
        Anything(),
        "turned off: a step with prompts and drafts in one pass has no draft extend",
        group=_SCHEDULE,
    )
    model_path: str = setting("", Anything(), "the target", group=_TARGET)
    attention_backend: str = setting(
        MASKED,
        Choice(
            (MASKED, PLANNED),
            f"{MASKED!r}, or {PLANNED!r} on a CPU: these can verify drafts; start SGLang with "
            f"--attention-backend {MASKED}",
        ),
        "attention of the target",
        group=_TARGET,
    )
    enable_deterministic_inference: bool = setting(
        False,
        Anything(),
        "sampled tokens depend on a request's seed, the position and the text alone",
        group=_TARGET,
    )
    enable_return_hidden_states: bool = setting(
        False,
        Only(False, "the hidden states of a pass are the algorithm's"),
        "hidden states in replies",
        group=_TARGET,
    )
    tp_size: int = setting(
        1, Only(1, "drafts are made on one rank"), "tensor-parallel ranks", group=_TARGET
    )
    pp_size: int = setting(
        1, Only(1, "drafts are made on one rank"), "pipeline stages", group=_TARGET
    )

    @classmethod
    def of(cls, args: Any, algorithm: str) -> SglangSettings:
        """Return the settings of a process of SGLang's.

        Args:
            args: SGLang's ``ServerArgs`` or a view of it, with what SGLang has filled in.

        Raises:
            UsageError: specplug cannot run with one of them; it names the algorithm.
        """
        try:
            return cls(**{name: getattr(args, name) for name in settings_of(cls)})
        except UsageError as error:
            raise UsageError(f"{algorithm}: {error}") from None

    def capabilities(self) -> HostCapabilities:
        """Return what SGLang gives with these settings."""
        return capabilities(
            overlap=not self.disable_overlap_schedule,
            seeded=bool(self.enable_deterministic_inference),
        )

    def check(self, info: AlgorithmInfo) -> None:
        """Refuse settings that the algorithm cannot run with.

        Raises:
            UsageError: it needs the overlap schedule or the prefix cache turned off.
        """
        if not info.capabilities.overlap and not self.disable_overlap_schedule:
            raise UsageError(
                f"{info.name} needs the result of a step before the next one; start SGLang with "
                "--disable-overlap-schedule"
            )
        if not info.capabilities.prefix_cache and not self.disable_radix_cache:
            raise UsageError(
                f"{info.name} cannot begin in the middle of a prompt; start SGLang with "
                "--disable-radix-cache"
            )

    def check_settled(self, config: SpecConfig) -> None:
        """Refuse a configuration that differs from these settings, by which SGLang has sized its
        pools. The algorithm is started in two processes, and validates its own result in the other.

        Raises:
            PluginError: ``validate_config`` has changed the settings once more.
        """
        for name, settled in (
            ("num_steps", self.speculative_num_steps),
            ("topk", self.speculative_eagle_topk),
            ("num_draft_tokens", self.speculative_num_draft_tokens),
        ):
            if (found := getattr(config, name)) != settled:
                raise PluginError(
                    f"{config.algorithm}: validate_config() changes {name} {settled} to {found} in "
                    "settings that it returned itself; expected them unchanged; fix the plugin"
                )


def pauses() -> bool:
    """Return whether a run stops drafting while that is slower.

    Raises:
        UsageError: ``SPECPLUG_DRAFT_WHEN`` has an unknown value.
    """
    typed = os.environ.get(DRAFT_WHEN, _FASTER)
    if typed not in (_FASTER, _ALWAYS):
        raise UsageError(f"{DRAFT_WHEN}={typed!r}: expected {_FASTER!r} or {_ALWAYS!r}")
    return typed == _FASTER


_FASTER, _ALWAYS = "faster", "always"


def start_in_sglang(
    algorithm: str, settings: SglangSettings, target_config: Mapping[str, Any]
) -> StartedAlgorithm[FaultTolerantHooks]:
    """Start the algorithm of a run.

    Args:
        target_config: the target's config of transformers.

    Raises:
        UsageError: the settings do not fit, or SGLang cannot give what they need.
    """

    def resolve(info: AlgorithmInfo) -> SpecConfig:
        settings.check(info)
        path = settings.speculative_draft_model_path
        return SpecConfig.resolve(
            info,
            num_steps=settings.speculative_num_steps,
            topk=settings.speculative_eagle_topk,
            num_draft_tokens=settings.speculative_num_draft_tokens,
            draft_model_path=None if path is None else Path(path),
            model_name=_shipped_name(settings.model_path),
            target_config=target_config,
        )

    def tell(line: str) -> None:
        logger.warning("%s%s", PREFIX, line)  # the name that was typed

    return start_algorithm(
        algorithm, resolve, host=settings.capabilities(), calls=FaultTolerantHooks, tell=tell
    )


def _shipped_name(model_path: str) -> str | None:
    """Return the name of a target that plugins ship weights for, by its folder."""
    shipped = Path(specplug.__file__).parent / "assets" / "tiny_code"
    return specplug.DEFAULT_MODEL if Path(model_path).resolve() == shipped.resolve() else None
