"""How a request wants its tokens chosen. Names and meanings are those vLLM users know."""

from __future__ import annotations

import enum
import json
import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import attrs

from specplug.errors import UsageError, shown
from specplug.settings import Anything, Flag, Integer, Number, Text, Texts, setting


class Needs(enum.IntFlag):
    """What a step must do for a request; a batch does the union of its requests' needs."""

    NOTHING = 0
    NOISE = 1
    TRUNCATION = 2
    PENALTIES = 4
    BIAS = 8
    GRAMMAR = 16
    OUTPUTS = 32
    MIN_TOKENS = 64


_HOTTEST = 1e6
_LEAST_PENALTY, _MOST_PENALTY = 1e-6, 1e6
"""Logits of thousands, divided by these and by the lowest temperature, are far within float32."""

MOST_BIAS = 10_000.0
"""Larger biases would leave float32 too few digits for the difference of two logits: beyond this
value logits that differ by less than a thousandth are equal."""

MOST_STOPS, MOST_STOP_CHARACTERS = 64, 256
"""Each character takes a place in the table that finds all strings at once. The table is made
before a request starts: 64 times 256 characters take some 20 ms. OpenAI takes four strings."""


_MOST_TOKENS = 2**31 - 1

_LONGEST_SALT = 256
"""Characters. A page's key holds the salt."""

MOST_CHOICES = 128
"""Each is a request of its own."""

GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The settings that say what an output must match; at most one of them is given."""


def plain_integer(value: Any) -> Any:
    """Return an integer of any type as Python's own; anything else, and a bool, as it is."""
    if isinstance(value, Integral) and not isinstance(value, bool):
        return operator.index(value)
    return value


def _plain_number(value: Any) -> Any:
    """Return a real number as Python's own; one that no float holds, and a bool, as it is."""
    if type(value) is float or isinstance(value, bool) or not isinstance(value, Real):
        return value
    try:
        return operator.index(value) if isinstance(value, Integral) else float(value)
    except Exception:  # it is too large, or its own
        return value


def _is_number(value: Any) -> bool:
    return type(value) is float or type(value) is int


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
        raise UsageError(f"token_outputs={shown(value)}: expected a tuple of names")
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
    """Return a string of any type as Python's own; anything else as it is."""
    return str.__str__(value) if isinstance(value, str) else value


def _upper(value: Any) -> Any:
    """Return a name as algorithms have it."""
    return value.strip().upper() if isinstance(value, str) else value


def _check_integers(name: str, tokens: Iterable[Any]) -> None:
    for token in tokens:
        if type(token) is not int:
            raise UsageError(f"{name} token id {shown(token)}: expected an integer")


def _schema(value: Any) -> Any:
    """Return a schema as JSON text. The order of its keys is that of the output, so it stays."""
    return _json_text("json_schema", value)


def _structural_tag(value: Any) -> Any:
    """Return a structural tag as JSON text."""
    return _json_text("structural_tag", value)


def _json_text(name: str, value: Any) -> Any:
    """Return a mapping as JSON text; a text as it is."""
    if not isinstance(value, Mapping):
        return _plain_text(value)
    try:
        return json.dumps(dict(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{name}={shown(value)}: expected what JSON can express; {error}"
        ) from error


@attrs.frozen
class BannedTokens:
    """Tokens that a request must not choose.

    Attributes:
        always: at no place of its output.
        early: not as one of its first ``min_tokens`` tokens either, since they end it.
    """

    always: frozenset[int] = frozenset()
    early: frozenset[int] = frozenset()
    min_tokens: int = 0

    def at(self, index: int) -> frozenset[int]:
        """Return the tokens that the output must not have at that index, from 0 on."""
        return self.always | self.early if index < self.min_tokens else self.always

    def setting_at(self, index: int) -> str:
        """Return the setting that bans them there."""
        if index >= self.min_tokens:
            return "logit_bias"
        return "min_tokens with logit_bias" if self.always else "min_tokens"


@attrs.frozen(kw_only=True)
class SamplingParams:
    """Settings of one request; docs/settings.md shows all fields with their defaults.

    Numbers may be of any type that is one, as numpy's are, and become Python's own; a bool is none.
    Equal settings have the same hash, so they may be keys of a dict.

    Raises:
        UsageError: a value cannot be used, or two of them not together.
    """

    n: int = setting(
        1,
        Integer(most=MOST_CHOICES, expected=f"an integer from 1 to {MOST_CHOICES}"),
        "Outputs per prompt. With a seed, that of the i-th one is seed + i.",
        group="Output",
        unit="outputs",
        converter=plain_integer,
        option="",
        served=True,
    )
    max_tokens: int | None = setting(
        128,
        Integer(expected="an integer of at least 1, or None"),
        "Most tokens to generate; None: up to the context's end.",
        group="Stopping",
        unit="tokens",
        converter=plain_integer,
        option="--max-new-tokens",
        option_help="Most tokens to generate for a prompt.",
    )
    min_tokens: int = setting(
        0,
        Integer(least=0, most=_MOST_TOKENS, expected=f"an integer from 0 to {_MOST_TOKENS}"),
        "Least tokens to generate: before, no end-of-sequence token and none of stop_token_ids is "
        "chosen, and no stop string ends the output. A complete match of a grammar ends it.",
        group="Stopping",
        unit="tokens",
        converter=plain_integer,
        served=True,
    )
    temperature: float = setting(
        0.0,
        Number(0, _HOTTEST, f"a number from 0 to {_HOTTEST:.0f}; 0 is greedy"),
        "The logits are divided by it; 0 is greedy: the most likely token is taken.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    top_p: float = setting(
        1.0,
        Number(0, 1, "a number in (0, 1]", low_open=True),
        "Keep the smallest set of tokens whose probability reaches this.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    top_k: int = setting(
        0,
        Integer(least=-1, expected="an integer; 0 or -1 keeps all"),
        "Keep this many tokens; 0 or -1: all.",
        group="Sampling",
        converter=plain_integer,
        served=True,
    )
    min_p: float = setting(
        0.0,
        Number(0, 1, "a number in [0, 1]"),
        "Keep tokens at least this likely relative to the most likely one.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    repetition_penalty: float = setting(
        1.0,
        Number(
            _LEAST_PENALTY,
            _MOST_PENALTY,
            f"a number from {_LEAST_PENALTY:g} to {_MOST_PENALTY:.0f}; 1 is none",
        ),
        "The logits of tokens in the prompt or the output are divided by it, or multiplied if they "
        "are negative; 1: no penalty.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    presence_penalty: float = setting(
        0.0,
        Number(-2, 2, "a number in [-2, 2]"),
        "Subtracted from the logits of tokens in the output, once.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    frequency_penalty: float = setting(
        0.0,
        Number(-2, 2, "a number in [-2, 2]"),
        "Subtracted from the logits of tokens in the output, for each time they occur.",
        group="Sampling",
        converter=_plain_number,
        served=True,
    )
    logit_bias: Mapping[int, float] = setting(
        attrs.Factory(dict),
        Anything(),
        f"Token id -> what is added to its logit, from {-MOST_BIAS:.0f} to {MOST_BIAS:.0f}; -inf "
        "bans the token.",
        group="Sampling",
        converter=_bias,
        hash=False,  # a mapping has none
        option="",
        served=True,
    )
    seed: int | None = setting(
        None,
        Integer(least=-(2**63), most=2**63 - 1, expected="an integer of 64 bits, or None"),
        "Seed of this request's noise; the same seed gives the same tokens, whatever else runs.",
        group="Sampling",
        unset="derived from the engine's seed and the request's number",
        converter=plain_integer,
        option="",
        served=True,
    )
    stop: tuple[str, ...] = setting(
        (),
        Texts(),
        f"Strings that end the output and are not part of the text. At most {MOST_STOPS}, each of "
        f"at most {MOST_STOP_CHARACTERS} characters.",
        group="Stopping",
        converter=_strings,
        option_help="String that ends the output; may be given many times.",
        served=True,
    )
    stop_token_ids: tuple[int, ...] = setting(
        (),
        Anything(),
        "Tokens that end the output and are the last of its token ids.",
        group="Stopping",
        converter=_tokens,
        option="",
        served=True,
    )
    ignore_eos: bool = setting(
        False,
        Flag(),
        "Go on after the end-of-sequence token.",
        group="Stopping",
        served=True,
    )
    cache_salt: str | None = setting(
        None,
        Text(expected="a text that is not empty, or None", most=_LONGEST_SALT, secret=True),
        "A secret of those who may profit from one another's text: cached prefixes, and what an "
        "algorithm keeps of earlier requests, are shared with requests of the same salt alone, so "
        "that speed tells others nothing. It changes no token.",
        group="Output",
        unset="none",
        converter=_plain_text,
        option="",
        served=True,
    )
    speculative_algorithm: str | None = setting(
        None,
        Text(expected="an algorithm of the run, or NONE"),
        "The only one of the run's algorithms that may draft for the request; NONE: none may. It "
        "changes no token.",
        group="Speculation",
        unset="any",
        converter=_upper,
        option="",
        served=True,
    )
    max_draft_tokens: int | None = setting(
        None,
        Integer(least=0, expected="an integer of at least 0, or None"),
        "Most tokens that are drafted for the request in a step; 0: none. It changes no token.",
        group="Speculation",
        unit="tokens",
        unset="any number",
        converter=plain_integer,
        option="",
        served=True,
    )
    logprobs: int | None = setting(
        None,
        Integer(least=0, expected="an integer of at least 0, or None"),
        "Return the log-probabilities of this many top tokens, and of the chosen one.",
        group="Output",
        unit="tokens",
        unset="none",
        converter=plain_integer,
        option="",
    )
    skip_special_tokens: bool = setting(
        True,
        Flag(),
        "Leave special tokens out of the text.",
        group="Output",
        option="",
        served=True,
    )
    return_routed_experts: bool = setting(
        False,
        Flag(),
        "Return the experts that a mixture-of-experts target routed each token to.",
        group="Output",
        option="",
    )
    return_hidden_states: bool | tuple[int, ...] = setting(
        False,
        Anything(),
        "Return the hidden states of every token. True: those that the LM head reads. A tuple: of "
        "these layers, numbered as in transformers' hidden_states: i is what enters layer i, and "
        "the last number is what the LM head reads, after the final norm.",
        group="Output",
        converter=_layers,
        option="",
    )
    token_outputs: tuple[str, ...] = setting(
        (),
        Anything(),
        "Names of the per-token outputs to return, of those that plugins and extensions add: see "
        "specplug.PerTokenOutput.",
        group="Output",
        converter=_names,
        option="",
    )
    json_schema: str | None = setting(
        None,
        Text(expected="a JSON schema as text or as a dict, or None", from_file=True),
        "The output is JSON that this schema, its text or a dict, allows, properties in the "
        "schema's order. It is kept as text.",
        group="Structured output",
        unset="none",
        converter=_schema,
        option_help="JSON schema that the output must match; with @, the file it is in. "
        "Needs specplug[grammar], as the next two do.",
        metavar="TEXT|@FILE",
        served=True,
    )
    regex: str | None = setting(
        None,
        Text(expected="a regular expression, or None"),
        "The output matches this regular expression, as a whole.",
        group="Structured output",
        unset="none",
        converter=_plain_text,
        option_help="Regular expression that the whole output must match.",
        served=True,
    )
    ebnf: str | None = setting(
        None,
        Text(expected="the text of a grammar, or None", from_file=True),
        "The output is derived from the rule root of this grammar in GBNF, the notation of "
        "llama.cpp. At most one of json_schema, regex, ebnf and structural_tag; each needs "
        "specplug[grammar]. The output ends by an end-of-sequence token, where it is a whole "
        "match; max_tokens or a stop string may cut it off before.",
        group="Structured output",
        unset="none",
        converter=_plain_text,
        option_help="Grammar in GBNF that the output must match, from its rule root; with @, its "
        "file.",
        metavar="TEXT|@FILE",
        served=True,
    )

    structural_tag: str | None = setting(
        None,
        Text(expected="a structural tag of xgrammar as text or as a dict, or None"),
        "The output matches this structural tag of xgrammar, its text or a dict: texts and JSON "
        "between tags, such as tool calls.",
        group="Structured output",
        unset="none",
        converter=_structural_tag,
        option="",
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

    @min_tokens.validator
    def _reachable(self, attribute: attrs.Attribute[int], value: int) -> None:
        if self.max_tokens is not None and value > self.max_tokens:
            raise UsageError(
                f"min_tokens={value} and max_tokens={self.max_tokens}: expected at most as many"
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

    @structural_tag.validator
    def _one_grammar(self, attribute: attrs.Attribute[Any], value: Any) -> None:
        given = [name for name in GRAMMARS if getattr(self, name) is not None]
        if len(given) > 1:
            raise UsageError(
                f"{' and '.join(given)} are given: expected at most one of them; an output "
                "follows one grammar"
            )

    def for_first_token(self) -> SamplingParams:
        """Return these settings for the first token alone, which a prefill instance samples. It
        drafts nothing, and may have none of the algorithms that a request can name."""
        return attrs.evolve(
            self,
            max_tokens=1,
            min_tokens=min(self.min_tokens, 1),
            n=1,
            speculative_algorithm=None,
            max_draft_tokens=None,
        )

    def seed_of(self, index: int) -> int | None:
        """Return the seed of a prompt's output of that index: ``seed + index``, within 64 bits."""
        return None if self.seed is None else (self.seed + index + 2**63) % 2**64 - 2**63

    def as_json(self) -> dict[str, Any]:
        """Return all fields, for ``from_json`` in another process."""
        fields = attrs.asdict(self, recurse=False)
        return {**fields, "logit_bias": list(self.logit_bias.items())}  # keys stay integers

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> SamplingParams:
        """Return the settings that ``as_json`` gave, also after they were JSON text."""
        return cls(**fields)

    @property
    def grammar(self) -> tuple[str, str] | None:
        """The field that says what the output must match, and its text; None if there is none."""
        texts = ((name, getattr(self, name)) for name in GRAMMARS)
        return next(((name, text) for name, text in texts if text is not None), None)

    def banned_tokens(self, eos_token_ids: frozenset[int]) -> BannedTokens:
        """Return the tokens that are not to be chosen.

        Args:
            eos_token_ids: the model's end-of-sequence tokens.
        """
        always = frozenset(t for t, bias in self.logit_bias.items() if bias == -math.inf)
        return BannedTokens(always, eos_token_ids.union(self.stop_token_ids), self.min_tokens)

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
        if self.min_tokens:
            needs |= Needs.MIN_TOKENS
        return needs
