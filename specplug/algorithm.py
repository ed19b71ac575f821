"""What a plugin declares about its algorithm, and a run's speculation settings. No torch here.

An algorithm's ``describe()`` hook returns an ``AlgorithmInfo``. The engine merges its defaults with
what the user typed into a ``SpecConfig`` and hands that to ``validate_config``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
from attrs import validators

from specplug.bounds import (
    MAX_DRAFT_SLOTS,
    MAX_DRAFT_TOKENS,
    MAX_NUM_STEPS,
    MAX_TOPK,
    check_integer,
)
from specplug.errors import UsageError, shown
from specplug.settings import settings_of

API_VERSION = 1
"""Version of the hook contract (``specplug.hookspecs``). It grows when a hook changes meaning."""

OLDEST_API_VERSION = 1
"""The oldest version whose plugins still run, with a warning. CONTRIBUTING.md says how it moves."""

DEFAULT_MODEL = "tiny-code"
"""Name of the model that ships with specplug; plugins key their shipped weights by it."""


_NAME = "[A-Z][A-Z0-9_]*"

ASSETS = Path(__file__).parent / "assets"
"""The models and prompts that ship with specplug."""

DEFAULT_MODEL_PATH = ASSETS / "tiny_code"
"""Folder of the default model, as transformers reads one."""

HELD_OUT_PROMPTS = ASSETS / "prompts" / "held_out.jsonl"
"""256 beginnings of Python functions that the default model was not trained on, JSON Lines of
{"module", "prompt"}."""

CAPTURES = {
    "layer_inputs": "the hidden states before layers (capture_layer_inputs)",
    "lm_head_input": "the hidden states after the final norm (capture_lm_head_input)",
}
"""The target's hidden states that an algorithm may read, with what users are told of each."""


def names_of(given: Iterable[str]) -> frozenset[str]:
    """Make a set of names, for attrs fields."""
    return frozenset(given)


def _within(least: int, most: int) -> Any:
    """Make a validator of integers from ``least`` to ``most``."""
    return validators.and_(validators.instance_of(int), validators.ge(least), validators.le(most))


@attrs.frozen(kw_only=True)
class Capabilities:
    """What an algorithm supports. The core refuses settings that need more.

    Attributes:
        branching: drafts may branch (``topk > 1``); otherwise they are chains.
        draft_model: it loads weights of its own, found by ``--speculative-draft-model-path`` or
            shipped for the default model.
        overlap: a step may be launched before the host knows what the last one accepted. Where it
            is False the hooks of a step may read device data (``hookspecs``, Blocking).
        prefix_cache: a request may begin in the middle of its prompt, with the target's and the
            draft model's KV before it from the prefix cache. False if the algorithm keeps other
            state of every position and cannot compute it from the tokens.
        parts: it holds other algorithms (``Runtime.part``).
        captures: the hidden states of the target that it reads with every checkpoint, names of
            ``CAPTURES``. A host without them refuses it before anything is loaded.
        target_drafts: it drafts with the target's own layers (``Runtime.target_layers``).
        late_feed: where it is one of several that take turns (``A,B``), ``build_draft_input`` may
            be called for a decode step right before ``propose``, and for several steps together,
            or a short prompt, as for a prefill chunk. Then steps in which it does not draft cost
            nothing. False if the hook has to hear of every step, or reads ``chunk_ends``.
    """

    branching: bool = False
    draft_model: bool = False
    overlap: bool = True
    prefix_cache: bool = True
    parts: bool = False
    captures: frozenset[str] = attrs.field(
        default=frozenset(),
        converter=names_of,
        validator=validators.deep_iterable(validators.in_(CAPTURES)),
    )
    target_drafts: bool = False
    late_feed: bool = False


@attrs.frozen(kw_only=True)
class Defaults:
    """The default speculation settings of an algorithm.

    Attributes:
        num_steps: draft depth S, at least 1.
        topk: branches K kept per step, at least 1.
        num_draft_tokens: nodes N the target verifies for each request, root included; None
            means ``num_steps * topk + 1``.
    """

    num_steps: int = attrs.field(default=1, validator=_within(1, MAX_NUM_STEPS))
    topk: int = attrs.field(default=1, validator=_within(1, MAX_TOPK))
    num_draft_tokens: int | None = attrs.field(
        default=None, validator=validators.optional(_within(1, MAX_DRAFT_TOKENS))
    )


@attrs.frozen(kw_only=True)
class Conformance:
    """What the conformance kit (``specplug.testing``) is told of an algorithm by its plugin.

    Attributes:
        settings: of ``LLM``, in each run of the kit, whose texts have 8 to 100 tokens: what makes
            the algorithm draft there, if its defaults are for other texts.
        accept_lengths: tokens a verification on the kit's texts with those settings, by the name of
            the model for which the plugin ships weights: what ``gold.acceptance`` measured.
        expected_failures: by the id of a check, why it is known to fail. One that passes all the
            same is a failure: what is declared must be true.
        reference: what drafts as well as is published, measured beside the algorithm with the same
            settings: the name of an installed algorithm, or "module:object", a plugin object that
            the package ships for it, such as the paper's own network. It is imported when the kit
            runs. None: there is none.
    """

    settings: Mapping[str, Any] = attrs.field(
        factory=dict,
        validator=validators.deep_mapping(
            validators.instance_of(str), validators.instance_of(object)
        ),
    )
    accept_lengths: Mapping[str, float] = attrs.field(factory=dict)
    expected_failures: Mapping[str, str] = attrs.field(factory=dict)
    reference: str | None = attrs.field(
        default=None, validator=validators.optional(validators.instance_of(str))
    )

    @expected_failures.validator
    def _reasons(self, attribute: attrs.Attribute[Any], value: Mapping[str, str]) -> None:
        for check, reason in value.items():
            if not (isinstance(check, str) and isinstance(reason, str) and reason.strip()):
                raise ValueError(
                    f"expected_failures[{check!r}]={reason!r}: expected a check's id, and the "
                    "reason why it fails, a text"
                )

    @accept_lengths.validator
    def _numbers(self, attribute: attrs.Attribute[Any], value: Mapping[str, float]) -> None:
        for model, length in value.items():
            if not (isinstance(model, str) and isinstance(length, int | float) and length >= 1):
                raise ValueError(
                    f"accept_lengths[{model!r}]={length!r}: expected a model's name, and a number "
                    "of at least 1: tokens a verification, the target's own one included"
                )


@attrs.frozen(kw_only=True)
class AlgorithmInfo:
    """An algorithm's declaration, returned by its ``describe`` hook.

    Attributes:
        name: what users type, upper case; equal to the entry point's name. Names joined by "+" are
            the core's, for one algorithm that proposes and others that grow its drafts, and names
            with commas between them, for several of which each request takes one's drafts.
        summary: one line.
        api_version: the ``API_VERSION`` that the plugin was written for, as a literal.
        capabilities: what it supports.
        defaults: its settings unless the user gives others.
        paper: where the algorithm is described, a URL or an arXiv number.
        weights: folder of the draft weights that the plugin ships, by the name of the model.
        draft_lookahead: the default of ``SpecConfig.draft_lookahead``. If it depends on the
            settings, ``validate_config`` sets it by ``attrs.evolve(config, draft_lookahead=…)``,
            without a warning.
        settings: an attrs class of its own settings, each a ``specplug.settings.setting`` with a
            default. Their names begin with the algorithm's in lower case: NGRAM's
            ``ngram_index_scope`` is the option ``--ngram-index-scope``. None: it has none.
        conformance: what the conformance kit is told of it.
        speed_ups: by the name of the model for which the plugin ships weights, tokens a second over
            those of plain decoding: with the default settings, greedy, at batch size 1 on a CPU, as
            ``benchmarks/speed_ups.py`` measures. ``auto`` chooses one draft model by it.
    """

    name: str = attrs.field(validator=validators.matches_re(_NAME + rf"([+,]{_NAME})*"))
    summary: str = attrs.field(validator=validators.instance_of(str))
    api_version: int
    capabilities: Capabilities = attrs.field(
        default=Capabilities(), validator=validators.instance_of(Capabilities)
    )
    defaults: Defaults = attrs.field(default=Defaults(), validator=validators.instance_of(Defaults))
    paper: str = attrs.field(default="", validator=validators.instance_of(str))
    weights: Mapping[str, Path] = attrs.field(
        factory=dict,
        validator=validators.deep_mapping(
            validators.instance_of(str), validators.instance_of((str, Path))
        ),
    )
    draft_lookahead: int | None = attrs.field(
        default=None, validator=validators.optional(_within(0, MAX_NUM_STEPS))
    )
    settings: type[Any] | None = attrs.field(default=None)
    conformance: Conformance = attrs.field(
        default=Conformance(), validator=validators.instance_of(Conformance)
    )
    speed_ups: Mapping[str, float] = attrs.field(factory=dict)

    @speed_ups.validator
    def _ratios(self, attribute: attrs.Attribute[Any], value: Mapping[str, float]) -> None:
        for model, ratio in value.items():
            if not (isinstance(model, str) and isinstance(ratio, int | float) and ratio > 0):
                raise ValueError(
                    f"speed_ups[{model!r}]={ratio!r}: expected a model's name, and a number above "
                    "0: tokens a second over those of plain decoding"
                )

    @settings.validator
    def _declared(self, attribute: attrs.Attribute[Any], value: type[Any] | None) -> None:
        if value is None:
            return
        prefixes = tuple(f"{name.lower()}_" for name in re.split("[+,]", self.name))
        declared = settings_of(value)
        for field in attrs.fields(value):
            if field.name not in declared or not field.name.startswith(prefixes):
                raise ValueError(
                    f"settings: {value.__name__}.{field.name}: expected a "
                    f"specplug.settings.setting whose name begins with {' or '.join(prefixes)}"
                )

    @property
    def is_several(self) -> bool:
        """Whether it is several algorithms (``A,B``), each with settings of its own."""
        return "," in self.name

    @property
    def setting_names(self) -> tuple[str, ...]:
        """The names of its own settings."""
        return () if self.settings is None else tuple(settings_of(self.settings))


@attrs.frozen(kw_only=True)
class SpecConfig:
    """The speculation settings of one run.

    Attributes:
        algorithm: the algorithm's name.
        num_steps: draft depth S.
        topk: branches K kept per step.
        num_draft_tokens: nodes N that the target verifies for each request, root included.
        num_draft_slots: KV slots after a request's committed length that the draft model may
            write while it drafts; the engine reserves at least N. A request has fewer when the KV
            pool is short: ``Batch.max_draft_nodes``.
        draft_lookahead: tokens after a position on which the draft's KV there depends, so that a
            cached page is shared only where these are equal too. None: 1 for a draft model with a
            KV cache, since ``build_draft_input`` gives the token after each position; else 0.
        draft_model_path: folder of the draft weights, or None.
        model_name: the target's name or folder as the user gave it, or None.
        target_config: the target's ``config.json`` as a mapping (``hidden_size``, …).
        settings: the algorithm's own settings, of the class that ``AlgorithmInfo.settings`` names;
            None if it names none.
        adjustments: what ``validate_config`` changed, and why; shown to the user once.
    """

    algorithm: str
    num_steps: int = attrs.field(default=1, validator=_within(1, MAX_NUM_STEPS))
    topk: int = attrs.field(default=1, validator=_within(1, MAX_TOPK))
    num_draft_tokens: int = attrs.field(default=2, validator=_within(1, MAX_DRAFT_TOKENS))
    num_draft_slots: int = attrs.field(default=0, validator=_within(0, MAX_DRAFT_SLOTS))
    draft_lookahead: int | None = attrs.field(
        default=None, validator=validators.optional(_within(0, MAX_NUM_STEPS))
    )
    draft_model_path: Path | None = None
    model_name: str | None = None
    target_config: Mapping[str, Any] = attrs.field(factory=dict)
    settings: Any = None
    adjustments: tuple[str, ...] = ()

    @property
    def num_lookahead_slots(self) -> int:
        """Slots after a request's committed length that a decode step may write: for the nodes that
        are verified, for those that the draft model expands, and for the tokens that are kept."""
        return max(self.num_draft_tokens, self.num_draft_slots, self.num_steps + 1)

    def adjust(self, reason: str, **changes: Any) -> SpecConfig:
        """Return the configuration with ``changes``; the user is shown the reason."""
        return attrs.evolve(self, adjustments=(*self.adjustments, reason), **changes)

    def fit_feature_draft(self) -> SpecConfig:
        """Adjust the settings to those that ``FeatureDrafter`` can use.

        A chain (``topk`` 1) has S + 1 nodes, a tree at most 1 + K + (S-1)·K², and a draft of fewer
        nodes than that is no deeper than they reach.

        Raises:
            UsageError: a tree of the root alone.
        """
        steps, topk, nodes = self.num_steps, self.topk, self.num_draft_tokens
        if topk > 1 and nodes < 2:
            raise UsageError(
                f"num_draft_tokens={nodes}: expected at least 2 with topk={topk}, "
                "the root and one candidate"
            )
        fitted, depth = self, min(steps, max(nodes - 1, 1))
        if depth < steps:
            reason = f"num_steps {steps} -> {depth}: {nodes} nodes reach no deeper"
            fitted = fitted.adjust(reason, num_steps=depth)
        most = depth + 1 if topk == 1 else 1 + topk + (depth - 1) * topk * topk
        if nodes > most:
            what = f"a chain of {depth} steps" if topk == 1 else f"all candidates of {depth} steps"
            reason = f"num_draft_tokens {nodes} -> {most}: {what}"
            fitted = fitted.adjust(reason, num_draft_tokens=most)
        if topk > 1:
            fitted = attrs.evolve(fitted, num_draft_slots=topk * max(depth - 1, 1))
        return fitted

    def fit_token_draft(self) -> SpecConfig:
        """Adjust the settings to those that ``TokenDrafter`` can use: to those of
        ``fit_feature_draft``, with the slots of the pass that reads what was accepted, and pages
        shared only where the keys of their tokens were written.

        Raises:
            UsageError: a tree of the root alone.
        """
        fitted = self.fit_feature_draft()
        steps = fitted.num_steps
        expanded = 1 + fitted.topk * (steps - 1) if fitted.topk > 1 else 0
        return attrs.evolve(
            fitted,
            num_draft_slots=max(steps + 2, expanded),
            draft_lookahead=min(steps + 1, MAX_NUM_STEPS),
        )

    def fit_target_draft(self) -> SpecConfig:
        """Adjust the settings to those that ``TargetDrafter`` can use: to those of
        ``fit_feature_draft``, with a slot for the root before those of a tree's nodes.

        Raises:
            UsageError: a tree of the root alone.
        """
        fitted = self.fit_feature_draft()
        if fitted.topk > 1:
            slots = 1 + fitted.topk * max(fitted.num_steps - 1, 1)
            fitted = attrs.evolve(fitted, num_draft_slots=slots)
        return fitted

    @classmethod
    def resolve(
        cls,
        info: AlgorithmInfo,
        *,
        num_steps: int | None = None,
        topk: int | None = None,
        num_draft_tokens: int | None = None,
        draft_model_path: Path | None = None,
        model_name: str | None = None,
        target_config: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> SpecConfig:
        """Combine the user's settings with the algorithm's defaults.

        Args:
            model_name: the target's name or folder: plugins ship weights for models that ship with
                specplug.
            settings: the algorithm's own, by name.

        Raises:
            UsageError: a number is out of range, the algorithm cannot branch, it needs a draft
                model and there is none, or it has no such setting.
        """
        for option, value in (
            ("num_steps", num_steps),
            ("topk", topk),
            ("num_draft_tokens", num_draft_tokens),
        ):
            if value is not None:
                check_integer(option, value)
                if info.is_several:
                    raise UsageError(
                        f"{option}={value}: {info.name} are several algorithms; expected it by "
                        "name, as in A,B:steps=5,topk=4,tokens=16"
                    )
        steps = info.defaults.num_steps if num_steps is None else num_steps
        branches = info.defaults.topk if topk is None else topk
        if branches > 1 and not info.capabilities.branching:
            raise UsageError(
                f"topk={branches}: {info.name} drafts chains only; use topk=1, "
                "or an algorithm that branches (specplug info NAME)"
            )
        return cls(
            algorithm=info.name,
            num_steps=steps,
            topk=branches,
            num_draft_tokens=_num_draft_tokens(info, num_steps, topk, num_draft_tokens, steps),
            draft_lookahead=info.draft_lookahead,
            draft_model_path=_draft_model_path(info, draft_model_path, model_name),
            model_name=model_name,
            target_config=dict(target_config or {}),
            settings=_own_settings(info, settings or {}),
        )


DATA_ONLY: dict[str, Any] = {"trust_remote_code": False}
"""Arguments of every ``from_pretrained``. Without them transformers asks on standard input."""


def find_model(model: str | Path | None) -> str:
    """Return a model's folder or hub id; for None and ``"tiny-code"`` the default model's."""
    if model is None or str(model) == DEFAULT_MODEL:
        return str(DEFAULT_MODEL_PATH)
    return str(model)


def shipped_name(model: str | Path) -> str:
    """Return the name of the model that ships in a folder; of another model what was given."""
    if Path(model).expanduser().resolve() == DEFAULT_MODEL_PATH.resolve():
        return DEFAULT_MODEL
    return str(model)


def _num_draft_tokens(
    info: AlgorithmInfo, num_steps: int | None, topk: int | None, typed: int | None, steps: int
) -> int:
    if typed is not None:
        return typed
    # The default N belongs to the default S and K; with another shape it follows the depth.
    untouched = num_steps in (None, info.defaults.num_steps) and topk in (None, info.defaults.topk)
    if info.defaults.num_draft_tokens is not None and untouched:
        return info.defaults.num_draft_tokens
    branches = info.defaults.topk if topk is None else topk
    nodes = steps * branches + 1
    if nodes > MAX_DRAFT_TOKENS:
        raise UsageError(
            f"num_steps={steps} with topk={branches} makes num_draft_tokens {nodes}: expected at "
            f"most {MAX_DRAFT_TOKENS}; lower one of them, or give num_draft_tokens"
        )
    return nodes


def _own_settings(info: AlgorithmInfo, typed: Mapping[str, Any]) -> Any:
    known = info.setting_names
    for name in typed:
        if name not in known:
            has = f"it has {', '.join(known)}" if known else "it has no settings of its own"
            raise UsageError(f"{shown(name)} is no setting of {info.name}: {has}")
    return None if info.settings is None else info.settings(**typed)


def _draft_model_path(
    info: AlgorithmInfo, typed: Path | None, model_name: str | None
) -> Path | None:
    if not info.capabilities.draft_model:
        if typed is not None:
            raise UsageError(
                f"speculative_draft_model_path={str(typed)!r}: {info.name} has no draft model; "
                "expected none, leave it out"
            )
        return None
    if typed is not None:
        return Path(typed)
    if info.is_several:
        return None  # each has its own
    name = None if model_name is None else shipped_name(model_name)
    if name is not None and name in info.weights:
        return Path(info.weights[name])
    shipped = ", ".join(info.weights) or "no model"
    raise UsageError(
        f"{info.name} needs draft weights for this target: it ships them for {shipped}; "
        "give their folder as speculative_draft_model_path (--speculative-draft-model-path)"
    )
