"""The settings of an algorithm inside vLLM, each declared once, and its ``SpecConfig``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import attrs

from specplug import AlgorithmInfo, SpecConfig, UsageError
from specplug.settings import Check, Choice, Integer, Text, setting, settings_of

KEY = "specplug"
"""Where the settings stand in vLLM's ``additional_config``."""

FASTER, ALWAYS = "faster", "always"


@attrs.frozen
class _Names:
    """A list of names."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what is none."""
        is_list = isinstance(value, list | tuple)
        if not is_list or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{name}={value!r}: expected a list of extensions' names")


@attrs.frozen
class _Mapping:
    """Values by name."""

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what is none."""
        if not isinstance(value, Mapping) or not all(isinstance(each, str) for each in value):
            raise UsageError(f"{name}={value!r}: expected a mapping of names to values")


@attrs.frozen
class _InSpecplug:
    """A check whose messages name a setting as it is typed."""

    check: Check

    def __call__(self, name: str, value: Any) -> None:
        """Refuse what the check refuses."""
        self.check(f"{KEY}.{name}", value)


def _setting(default: Any, check: Check, help: str, **more: Any) -> Any:
    return setting(default, _InSpecplug(check), help, group="Settings", option="", **more)


_WHOLE = Integer(least=None, expected="an integer")


@attrs.frozen(kw_only=True)
class Settings:
    """What a user may write into ``additional_config={"specplug": {…}}``."""

    num_steps: int | None = _setting(None, _WHOLE, "draft depth", unset="`num_speculative_tokens`")
    topk: int | None = _setting(
        None,
        _WHOLE,
        "branches of a step. vLLM verifies chains, which have 1; more is refused, with both names",
        unset="1",
    )
    num_draft_tokens: int | None = _setting(
        None,
        _WHOLE,
        "nodes with the root, at most `num_speculative_tokens + 1`",
        unset="`num_speculative_tokens + 1`",
    )
    draft_model_path: str | None = _setting(
        None,
        Text(expected="the path of a folder"),
        "the folder of the draft weights",
        unset="the weights that the plugin ships for the default model",
    )
    draft_when: str | None = _setting(
        None,
        Choice((FASTER, ALWAYS), f"{FASTER!r} or {ALWAYS!r}"),
        '`"faster"`: only while drafts give more tokens a second; `"always"`',
        unset='`"faster"` on model runner V2; `"always"` on V1, without async scheduling, with '
        "`enable_adaptive_verification`, and with `data_parallel_size` over 1",
    )
    settings: Mapping[str, Any] | None = _setting(
        None,
        _Mapping(),
        "the algorithm's own settings, by name",
        unset="the algorithm's",
        hash=False,
    )
    disable_extensions: Sequence[str] = _setting(
        (), _Names(), "extensions that are neither imported nor run, a list of names"
    )

    @classmethod
    def of(cls, additional_config: object) -> Settings:
        """Read them from vLLM's ``additional_config``.

        Raises:
            UsageError: a name or a value is none of them.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = list(settings_of(cls))
        if not isinstance(given, Mapping):
            raise UsageError(
                f"additional_config[{KEY!r}]={given!r}: expected a mapping of {', '.join(known)}"
            )
        for name in given:
            if name not in known:
                raise UsageError(
                    f"additional_config[{KEY!r}]: unknown setting {name!r}; expected one of "
                    f"{', '.join(known)}"
                )
        return cls(**given)

    def resolve(
        self,
        info: AlgorithmInfo,
        *,
        num_speculative_tokens: int,
        target: str,
        target_config: Mapping[str, Any],
    ) -> SpecConfig:
        """Combine them with the algorithm's defaults and vLLM's own settings.

        Args:
            num_speculative_tokens: vLLM's, the most drafted tokens of a step.
            target: vLLM's ``model``, a folder or a name.
            target_config: the target's ``config.json``.

        Raises:
            UsageError: a number is out of range, a draft model is missing, or the drafts are wider
                than vLLM's steps.
        """
        most = num_speculative_tokens + 1
        if self.num_draft_tokens is not None and self.num_draft_tokens > most:
            raise UsageError(
                f"{KEY}.num_draft_tokens={self.num_draft_tokens}: vLLM verifies at most {most} "
                f"nodes with num_speculative_tokens={num_speculative_tokens}; raise that to "
                f"{self.num_draft_tokens - 1}, or lower num_draft_tokens"
            )
        path = self.draft_model_path
        return SpecConfig.resolve(
            info,
            num_steps=num_speculative_tokens if self.num_steps is None else self.num_steps,
            topk=1 if self.topk is None else self.topk,
            num_draft_tokens=most if self.num_draft_tokens is None else self.num_draft_tokens,
            draft_model_path=None if path is None else Path(path),
            model_name=target,
            target_config=target_config,
            settings=self.settings,
        )
