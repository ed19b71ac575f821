"""The settings of an algorithm inside vLLM, and its ``SpecConfig``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from specplug import AlgorithmInfo, SpecConfig, UsageError

KEY = "specplug"
"""Where the settings stand in vLLM's ``additional_config``."""

FASTER, ALWAYS = "faster", "always"


def _count(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise UsageError(f"{KEY}.{attribute.name}={value!r}: expected an integer")


def _folder(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value is not None and not isinstance(value, str):
        raise UsageError(f"{KEY}.{attribute.name}={value!r}: expected the path of a folder")


def _names(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise UsageError(f"{KEY}.{attribute.name}={value!r}: expected a list of extensions' names")


def _when(_: object, attribute: attrs.Attribute[Any], value: object) -> None:
    if value not in (None, FASTER, ALWAYS):
        raise UsageError(f"{KEY}.{attribute.name}={value!r}: expected {FASTER!r} or {ALWAYS!r}")


@attrs.frozen(kw_only=True)
class Settings:
    """What a user may write into ``additional_config={"specplug": {…}}``.

    Attributes:
        num_steps: draft depth S; None: ``num_speculative_tokens``.
        topk: branches K of a step; vLLM verifies chains, which have 1.
        num_draft_tokens: nodes N with the root; None: ``num_speculative_tokens + 1``.
        draft_model_path: folder of the draft weights; None: those that the algorithm ships.
        draft_when: "faster": only while drafts give more tokens a second, which is measured as the
            engine runs; "always". None: "faster" where the host can, on model runner V2.
        disable_extensions: extensions that are neither imported nor run.
    """

    num_steps: int | None = attrs.field(default=None, validator=_count)
    topk: int | None = attrs.field(default=None, validator=_count)
    num_draft_tokens: int | None = attrs.field(default=None, validator=_count)
    draft_model_path: str | None = attrs.field(default=None, validator=_folder)
    draft_when: str | None = attrs.field(default=None, validator=_when)
    disable_extensions: list[str] = attrs.field(factory=list, validator=_names)

    @classmethod
    def of(cls, additional_config: object) -> Settings:
        """Read them from vLLM's ``additional_config``.

        Raises:
            UsageError: a name or a value is none of them.
        """
        given = additional_config.get(KEY, {}) if isinstance(additional_config, Mapping) else {}
        known = [field.name for field in attrs.fields(cls)]
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
        )
