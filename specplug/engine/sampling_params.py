"""How a request wants its tokens chosen. Names and meanings are those vLLM users know."""

from __future__ import annotations

import enum
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import attrs

from specplug.errors import UsageError


class Needs(enum.IntFlag):
    """What a step must do for a request; a batch does the union of its requests' needs."""

    NOTHING = 0
    NOISE = 1
    TRUNCATION = 2
    PENALTIES = 4
    BIAS = 8
    LOGPROBS = 16
    EXPERTS = 32
    GRAMMAR = 64


def _is_number(value: Any) -> bool:
    """Whether it is a number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        float(value)
    except OverflowError:
        return False
    return True


def _within(low: float, high: float, why: str, *, low_open: bool = False) -> Callable[..., None]:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        number = _is_number(value)
        inside = number and (low < value if low_open else low <= value) and value <= high
        if not inside:
            raise UsageError(f"{attribute.name}={value!r}: expected {why}")

    return check


def _integer(low: int, why: str, *, optional: bool = False) -> Callable[..., None]:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < low:
            raise UsageError(f"{attribute.name}={value!r}: expected {why}")

    return check


def _flag(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{attribute.name}={value!r}: expected True or False")


def _bias(value: Mapping[int, float] | None) -> dict[int, float]:
    try:
        return {} if value is None else dict(value)
    except (TypeError, ValueError) as error:
        raise UsageError(f"logit_bias={value!r}: expected token id -> number") from error


def _tokens(value: Sequence[int] | None) -> tuple[int, ...]:
    try:
        return () if value is None else tuple(value)
    except TypeError as error:
        raise UsageError(f"stop_token_ids={value!r}: expected a list of token ids") from error


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    try:
        return (value,) if isinstance(value, str) else () if value is None else tuple(value)
    except TypeError as error:
        raise UsageError(f"stop={value!r}: expected a string or a list of them") from error


def _schema(value: Any) -> Any:
    """A mapping as JSON text. The order of its keys is that of the output, so it stays."""
    if not isinstance(value, Mapping):
        return value
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"json_schema={repr(value)[:80]}: expected what JSON can express; {error}"
        ) from error


def _text(what: str) -> Callable[..., None]:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not (isinstance(value, str) and value):
            raise UsageError(f"{attribute.name}={value!r:.80}: expected {what}, or None")

    return check


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Settings of one request.

    Attributes:
        max_tokens: most tokens to generate; None: up to the context's end.
        temperature: 0 takes the most likely token (greedy).
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many tokens; 0 or -1: all.
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        repetition_penalty: divides (or, if negative, multiplies) the logits of tokens that stand
            in the prompt or the output, > 0; 1: none.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once, or
            once for each time they occur, in [-2, 2].
        logit_bias: token id -> what is added to its logit.
        seed: of this request's noise; the same seed gives the same tokens, whatever else runs.
            None: one is derived from the engine's seed and the request's number.
        stop: strings that end the output; they are not part of the text.
        stop_token_ids: tokens that end the output; they are the last of ``token_ids``.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: give the log-probabilities of this many top tokens, and of the chosen one.
        skip_special_tokens: leave special tokens out of the text.
        return_routed_experts: give the experts that a mixture-of-experts target routed each token
            to.
        json_schema: the output is JSON that this schema, its text or a dict, allows, properties in
            the schema's order. It is kept as text.
        regex: the output matches this regular expression, as a whole.
        ebnf: the output is derived from the rule ``root`` of this grammar in GBNF, the notation of
            llama.cpp. At most one of these three; each needs ``specplug[grammar]``. The output
            ends by an end-of-sequence token, where it is a whole match; it is cut off before if
            ``max_tokens`` or a stop string ends it.
    """

    max_tokens: int | None = attrs.field(
        default=128, validator=_integer(1, "an integer of at least 1, or None", optional=True)
    )
    temperature: float = attrs.field(
        default=0.0, validator=_within(0, math.inf, "a number of at least 0; 0 is greedy")
    )
    top_p: float = attrs.field(
        default=1.0, validator=_within(0, 1, "a number in (0, 1]", low_open=True)
    )
    top_k: int = attrs.field(default=0, validator=_integer(-1, "an integer; 0 or -1 keeps all"))
    min_p: float = attrs.field(default=0.0, validator=_within(0, 1, "a number in [0, 1]"))
    repetition_penalty: float = attrs.field(
        default=1.0, validator=_within(0, 1e6, "a number above 0; 1 is none", low_open=True)
    )
    presence_penalty: float = attrs.field(
        default=0.0, validator=_within(-2, 2, "a number in [-2, 2]")
    )
    frequency_penalty: float = attrs.field(
        default=0.0, validator=_within(-2, 2, "a number in [-2, 2]")
    )
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_bias)
    seed: int | None = attrs.field(default=None)
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tokens)
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    logprobs: int | None = attrs.field(
        default=None, validator=_integer(0, "an integer of at least 0, or None", optional=True)
    )
    skip_special_tokens: bool = attrs.field(default=True, validator=_flag)
    return_routed_experts: bool = attrs.field(default=False, validator=_flag)
    json_schema: str | None = attrs.field(
        default=None,
        converter=_schema,
        validator=_text("a JSON schema as text or as a dict"),
    )
    regex: str | None = attrs.field(default=None, validator=_text("a regular expression"))
    ebnf: str | None = attrs.field(default=None, validator=_text("the text of a grammar"))

    @temperature.validator
    def _finite(self, attribute: attrs.Attribute[float], value: float) -> None:
        if not math.isfinite(value):
            raise UsageError(f"temperature={value!r}: expected a finite number of at least 0")

    @logit_bias.validator
    def _numbers(self, attribute: attrs.Attribute[Any], value: Mapping[int, float]) -> None:
        for token, bias in value.items():
            if not _is_number(bias) or math.isnan(bias) or bias == math.inf:
                raise UsageError(
                    f"logit_bias[{token!r}]={bias!r}: expected a number; -inf bans the token"
                )

    @seed.validator
    def _fits(self, attribute: attrs.Attribute[int | None], value: int | None) -> None:
        if value is not None and not (isinstance(value, int) and -(2**63) <= value < 2**63):
            raise UsageError(f"seed={value!r}: expected an integer of 64 bits, or None")

    @stop.validator
    def _not_empty(self, attribute: attrs.Attribute[tuple[str, ...]], value: Any) -> None:
        if not all(isinstance(s, str) and s for s in value):
            raise UsageError(f"stop={value!r}: expected non-empty strings")

    @ebnf.validator
    def _one_grammar(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        names = ("json_schema", "regex", "ebnf")
        given = [name for name in names if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(given)} are given: expected at most one of them; an output "
                "follows one grammar"
            )

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The field that says what the output must match, and its text; None if there is none."""
        fields = ("json_schema", self.json_schema), ("regex", self.regex), ("ebnf", self.ebnf)
        return next(((name, text) for name, text in fields if text is not None), None)

    @property
    def greedy(self) -> bool:
        """Whether no noise is added."""
        return self.temperature == 0

    @property
    def needs(self) -> Needs:
        """What must be done beyond taking the greatest logit."""
        needs = Needs.NOTHING
        if not self.greedy:
            needs |= Needs.NOISE
            if self.top_p < 1 or self.top_k > 0 or self.min_p > 0:
                needs |= Needs.TRUNCATION
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        if penalties != (1, 0, 0):
            needs |= Needs.PENALTIES
        if self.logit_bias:
            needs |= Needs.BIAS
        if self.logprobs is not None:
            needs |= Needs.LOGPROBS
        if self.return_routed_experts:
            needs |= Needs.EXPERTS
        if self.grammar is not None:
            needs |= Needs.GRAMMAR
        return needs
