"""How a request wants its tokens chosen. Names and meanings are those vLLM users know."""

from __future__ import annotations

import enum
import json
import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import attrs

from specplug.errors import UsageError, shown


class Needs(enum.IntFlag):
    """What a step must do for a request; a batch does the union of its requests' needs."""

    NOTHING = 0
    NOISE = 1
    TRUNCATION = 2
    PENALTIES = 4
    BIAS = 8
    GRAMMAR = 16
    OUTPUTS = 32


_HOTTEST = 1e6
_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6
"""Logits of thousands, divided by these and by the lowest temperature, are far within float32."""

MOST_BIAS = 10_000.0
"""Beyond it float32 tells logits apart by less than a thousandth: what two tokens are biased by
would decide between them no more than their order does."""

MOST_STOPS, MOST_STOP_CHARACTERS = 64, 256
"""Each character takes a place in the table that finds all of them at once, which is made before
a request starts; 64 times 256 take some 20 ms. OpenAI takes four strings."""


def plain_integer(value: Any) -> Any:
    """An integer of any type as Python's own; anything else, and a bool, as it is."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return operator.index(value)
    return value


def _plain_number(value: Any) -> Any:
    """A real number of any type as Python's own; what no float can hold, and a bool, as it is."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return operator.index(value) if isinstance(value, Integral) else float(value)
    except Exception:  # it is too large, or its own
        return value


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


def _number(low: float, high: float, why: str, *, low_open: bool = False) -> dict[str, Any]:
    """Converter and validator of a field."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        inside = _is_number(value) and (low < value if low_open else low <= value) and value <= high
        if not inside:
            raise UsageError(f"{attribute.name}={shown(value)}: expected {why}")

    return {"converter": _plain_number, "validator": check}


def _integer(
    low: int, why: str, *, high: int | None = None, optional: bool = False
) -> dict[str, Any]:
    """Converter and validator of a field."""

    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if optional and value is None:
            return
        if type(value) is not int or value < low or (high is not None and value > high):
            raise UsageError(f"{attribute.name}={shown(value)}: expected {why}")

    return {"converter": plain_integer, "validator": check}


def _flag(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, bool):
        raise UsageError(f"{attribute.name}={shown(value)}: expected True or False")


def _layers(value: Any) -> bool | tuple[int, ...]:
    if isinstance(value, bool):
        return value
    try:
        layers = tuple(map(plain_integer, value))
    except Exception:  # it is no sequence, or one of its own
        layers = ()
    if not layers or any(type(layer) is not int or layer < 0 for layer in layers):
        raise UsageError(
            f"return_hidden_states={shown(value)}: expected True, False or a tuple of layer numbers"
        )
    return layers


def _bias(value: Mapping[int, float] | None) -> dict[int, float]:
    try:
        items = [] if value is None else list(dict(value).items())
        return {plain_integer(token): _plain_number(bias) for token, bias in items}
    except Exception as error:  # the mapping may be of any type
        raise UsageError(f"logit_bias={shown(value)}: expected token id -> number") from error


def _names(value: Sequence[str] | None) -> tuple[str, ...]:
    try:
        found = () if value is None else tuple(map(_plain_text, value))
    except Exception:  # it is no sequence, or one of its own
        found = (None,)
    if isinstance(value, str) or not all(isinstance(name, str) and name for name in found):
        raise UsageError(f"outputs={shown(value)}: expected a tuple of names")
    return found


def _tokens(value: Sequence[int] | None) -> tuple[int, ...]:
    try:
        return () if value is None else tuple(map(plain_integer, value))
    except Exception as error:
        raise UsageError(f"stop_token_ids={shown(value)}: expected a list of token ids") from error


def _strings(value: str | Sequence[str] | None) -> tuple[str, ...]:
    try:
        found = () if value is None else (value,) if isinstance(value, str) else tuple(value)
    except Exception as error:
        raise UsageError(f"stop={shown(value)}: expected a string or a list of them") from error
    return tuple(map(_plain_text, found))


def _plain_text(value: Any) -> Any:
    """A string of any type as Python's own; anything else as it is."""
    return str.__str__(value) if isinstance(value, str) else value


def _check_integers(name: str, tokens: Iterable[Any]) -> None:
    for token in tokens:
        if type(token) is not int:
            raise UsageError(f"{name} token id {shown(token)}: expected an integer")


def _schema(value: Any) -> Any:
    """A mapping as JSON text. The order of its keys is that of the output, so it stays."""
    if not isinstance(value, Mapping):
        return _plain_text(value)
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"json_schema={shown(value)}: expected what JSON can express; {error}"
        ) from error


def _text(what: str) -> Callable[..., None]:
    def check(instance: Any, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is not None and not (isinstance(value, str) and value):
            raise UsageError(f"{attribute.name}={shown(value)}: expected {what}, or None")

    return check


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Settings of one request.

    Numbers may be of any type that is one, as numpy's are, and become Python's own; a bool is none.

    Attributes:
        max_tokens: most tokens to generate; None: up to the context's end.
        temperature: 0 takes the most likely token (greedy); at most 1e6.
        top_p: keep the smallest set of tokens whose probability reaches this, in (0, 1].
        top_k: keep this many tokens; 0 or -1: all.
        min_p: keep tokens at least this likely relative to the most likely one, in [0, 1].
        repetition_penalty: divides (or, if negative, multiplies) the logits of tokens that stand
            in the prompt or the output, in [1e-6, 1e6]; 1: none.
        presence_penalty, frequency_penalty: taken off the logits of tokens in the output, once, or
            once for each time they occur, in [-2, 2].
        logit_bias: token id -> what is added to its logit, in [-10000, 10000]; -inf bans the token.
        seed: of this request's noise; the same seed gives the same tokens, whatever else runs.
            None: one is derived from the engine's seed and the request's number.
        stop: strings that end the output; they are not part of the text. At most 64 strings of 256
            characters.
        stop_token_ids: tokens that end the output; they are the last of ``token_ids``.
        ignore_eos: go on after the end-of-sequence token.
        logprobs: give the log-probabilities of this many top tokens, and of the chosen one.
        skip_special_tokens: leave special tokens out of the text.
        return_routed_experts: give the experts that a mixture-of-experts target routed each token
            to.
        return_hidden_states: give the hidden states of every token: True: those that the LM head
            reads; or of these layers, numbered as in transformers' ``hidden_states``: what enters
            layer 0, 1, …, and last what the LM head reads, after the final norm.
        outputs: names of the outputs to give for each token, of those that plugins and extensions
            add: see ``specplug.PerTokenOutput``.
        json_schema: the output is JSON that this schema, its text or a dict, allows, properties in
            the schema's order. It is kept as text.
        regex: the output matches this regular expression, as a whole.
        ebnf: the output is derived from the rule ``root`` of this grammar in GBNF, the notation of
            llama.cpp. At most one of these three; each needs ``specplug[grammar]``. The output
            ends by an end-of-sequence token, where it is a whole match; it is cut off before if
            ``max_tokens`` or a stop string ends it.
    """

    max_tokens: int | None = attrs.field(
        default=128, **_integer(1, "an integer of at least 1, or None", optional=True)
    )
    temperature: float = attrs.field(
        default=0.0, **_number(0, _HOTTEST, f"a number from 0 to {_HOTTEST:.0f}; 0 is greedy")
    )
    top_p: float = attrs.field(default=1.0, **_number(0, 1, "a number in (0, 1]", low_open=True))
    top_k: int = attrs.field(default=0, **_integer(-1, "an integer; 0 or -1 keeps all"))
    min_p: float = attrs.field(default=0.0, **_number(0, 1, "a number in [0, 1]"))
    repetition_penalty: float = attrs.field(
        default=1.0,
        **_number(
            _LEAST_PENALTY,
            _MOST_PENALTY,
            f"a number from {_LEAST_PENALTY:g} to {_MOST_PENALTY:.0f}; 1 is none",
        ),
    )
    presence_penalty: float = attrs.field(default=0.0, **_number(-2, 2, "a number in [-2, 2]"))
    frequency_penalty: float = attrs.field(default=0.0, **_number(-2, 2, "a number in [-2, 2]"))
    logit_bias: Mapping[int, float] = attrs.field(factory=dict, converter=_bias)
    seed: int | None = attrs.field(
        default=None,
        **_integer(-(2**63), "an integer of 64 bits, or None", high=2**63 - 1, optional=True),
    )
    stop: tuple[str, ...] = attrs.field(default=(), converter=_strings)
    stop_token_ids: tuple[int, ...] = attrs.field(default=(), converter=_tokens)
    ignore_eos: bool = attrs.field(default=False, validator=_flag)
    logprobs: int | None = attrs.field(
        default=None, **_integer(0, "an integer of at least 0, or None", optional=True)
    )
    skip_special_tokens: bool = attrs.field(default=True, validator=_flag)
    return_routed_experts: bool = attrs.field(default=False, validator=_flag)
    return_hidden_states: bool | tuple[int, ...] = attrs.field(default=False, converter=_layers)
    outputs: tuple[str, ...] = attrs.field(default=(), converter=_names)
    json_schema: str | None = attrs.field(
        default=None,
        converter=_schema,
        validator=_text("a JSON schema as text or as a dict"),
    )
    regex: str | None = attrs.field(
        default=None, converter=_plain_text, validator=_text("a regular expression")
    )
    ebnf: str | None = attrs.field(
        default=None, converter=_plain_text, validator=_text("the text of a grammar")
    )

    @logit_bias.validator
    def _numbers(self, attribute: attrs.Attribute[Any], value: Mapping[int, float]) -> None:
        _check_integers("logit_bias", value)
        for token, bias in value.items():
            held = _is_number(bias) and (-MOST_BIAS <= bias <= MOST_BIAS or bias == -math.inf)
            if not held:
                raise UsageError(
                    f"logit_bias[{shown(token)}]={shown(bias)}: expected a number from "
                    f"{-MOST_BIAS:.0f} to {MOST_BIAS:.0f}; -inf bans the token"
                )

    @stop_token_ids.validator
    def _integers(self, attribute: attrs.Attribute[Any], value: tuple[int, ...]) -> None:
        _check_integers("stop_token_ids", value)

    @stop.validator
    def _few_and_short(self, attribute: attrs.Attribute[tuple[str, ...]], value: Any) -> None:
        if len(value) > MOST_STOPS:
            raise UsageError(
                f"stop={shown(value)}: {len(value)} strings; expected at most {MOST_STOPS}"
            )
        if not all(isinstance(s, str) and s for s in value):
            raise UsageError(f"stop={shown(value)}: expected non-empty strings")
        longest = max(value, key=len, default="")
        if len(longest) > MOST_STOP_CHARACTERS:
            raise UsageError(
                f"stop={shown(longest)}: {len(longest)} characters; expected at most "
                f"{MOST_STOP_CHARACTERS} in a stop string"
            )

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
    def banned_token_ids(self) -> frozenset[int]:
        """Tokens that are never chosen, since their bias is -inf."""
        return frozenset(t for t, bias in self.logit_bias.items() if bias == -math.inf)

    @property
    def greedy(self) -> bool:
        """Whether no noise is added."""
        return self.temperature == 0

    @property
    def needs(self) -> Needs:
        """What must be done to choose a token, beyond taking the greatest logit."""
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
        if self.grammar is not None:
            needs |= Needs.GRAMMAR
        return needs
