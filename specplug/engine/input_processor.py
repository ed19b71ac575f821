"""Turns prompts and settings into requests, and refuses what cannot be one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import count
from numbers import Integral
from typing import Any

import attrs

from specplug.config import EngineConfig
from specplug.engine.collected_output import collect
from specplug.engine.request import Request, make_detokenizer
from specplug.errors import UsageError, shown
from specplug.grammar.compiler import GrammarCompiler
from specplug.kv.page_allocator import PageAllocator
from specplug.model.loading import backend_of
from specplug.model.target import Target
from specplug.sampling_params import Needs, SamplingParams, plain_integer
from specplug.speculative.draft_plan import ANY_DRAFT, UNDRAFTED, DraftWish
from specplug.speculative.output_kind import OutputKind

Prompt = str | Sequence[int]


class InputProcessor:
    """Makes the requests of an engine.

    Args:
        config: of the run.
        target: of the run.
        tokenizer: of transformers, or None.
        pool: which must hold each request alone.
        context_len: most tokens of a request, prompt and output.
        outputs: what requests can get for each token.
        drafters: the algorithms that may draft, by name.
    """

    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        tokenizer: Any | None,
        pool: PageAllocator,
        *,
        context_len: int,
        outputs: Iterable[OutputKind],
        drafters: Iterable[str] = (),
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._pool = pool
        self._context_len = context_len
        self._eos = target.eos_token_ids
        self._outputs = tuple(outputs)
        self._drafters = tuple(dict.fromkeys((*drafters, UNDRAFTED)))
        self._seed = config.seed
        self._numbers = count()
        self._grammars = GrammarCompiler(tokenizer, target.vocab_size, self._eos)

    def requests(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        priority: int | Sequence[int],
    ) -> list[Request]:
        """Make ``SamplingParams.n`` requests of each prompt, one after another.

        Raises:
            UsageError: one of them cannot be run; it says which.
        """
        batch = _as_batch(prompts)
        params = _as_params(sampling_params, len(batch))
        priorities = _as_priorities(priority, len(batch))
        requests: list[Request] = []
        each = zip(batch, params, priorities, strict=True)
        for place, (prompt, wanted, order) in enumerate(each, 1):
            try:
                requests += self._choices(prompt, wanted, order)
            except UsageError as error:
                if len(batch) == 1:
                    raise
                which = f"prompt {place} of {len(batch)}"
                raise UsageError(f"{which}: {error}") from error
        return requests

    def _choices(self, prompt: Prompt, params: SamplingParams, priority: int) -> Iterator[Request]:
        """Yield the requests of one prompt, which is tokenized and checked once."""
        params = attrs.evolve(params)  # a copy: the caller may change the mapping in it
        text, ids = self._tokenize(prompt)
        self._check_tokens("logit_bias", params.logit_bias)
        self._check_tokens("stop_token_ids", params.stop_token_ids)
        self._check(len(ids), params)
        for index in range(params.n):
            yield self._request(text, ids, params, priority, index)

    def _request(
        self,
        text: str | None,
        ids: tuple[int, ...],
        params: SamplingParams,
        priority: int,
        index: int,
    ) -> Request:
        room = self._context_len - len(ids)
        if params.max_tokens is None:  # as far as it can go
            room = max(1, min(room, self._pool.num_tokens - len(ids)))
        outputs = collect(self._outputs, params, len(ids))
        number, seed = next(self._numbers), params.seed_of(index)
        request = Request(
            request_id=str(number),
            number=number,
            index=index,
            priority=priority,
            prompt=text,
            prompt_token_ids=ids,
            params=params,
            max_tokens=min(params.max_tokens or room, room),
            seed=self._seed_for(number) if seed is None else seed,
            eos_token_ids=self._eos,
            detokenizer=make_detokenizer(backend_of(self._tokenizer), params),
            needs=params.needs | Needs.OUTPUTS if outputs else params.needs,
            outputs=outputs,
            draft_wish=self._draft_wish(params),
            rule=self._target.rotary.rule,
            grammar_state=self._grammars.start(params) if params.grammar else None,
        )
        self._check_pool(request)
        return request

    def _draft_wish(self, params: SamplingParams) -> DraftWish:
        name, most = params.speculative_algorithm, params.max_draft_tokens
        if name is None and most is None:
            return ANY_DRAFT
        if name is not None and name not in self._drafters:
            raise UsageError(
                f"speculative_algorithm={shown(name)}: expected one of this run's: "
                f"{', '.join(self._drafters)}"
            )
        return DraftWish(name, most)

    def _check(self, num_tokens: int, params: SamplingParams) -> None:
        if num_tokens >= self._context_len:
            raise UsageError(
                f"the prompt has {num_tokens} tokens; expected at most {self._context_len - 1}, "
                f"since the context is {self._context_len} and one token must fit after it"
            )
        if params.stop and self._tokenizer is None:
            raise UsageError(
                f"stop={shown(params.stop)} needs a tokenizer; the model has none: use "
                "stop_token_ids"
            )
        banned = params.banned_tokens(self._eos)
        if len(banned.at(0)) == self._target.vocab_size:
            raise UsageError(
                f"{banned.setting_at(0)} bans all {self._target.vocab_size} tokens: expected at "
                "least one that is left"
            )

    def _check_pool(self, request: Request) -> None:
        pool, need = self._pool, request.most_tokens
        if pool.pages_for(need) > pool.num_pages - 1:
            raise UsageError(
                f"the prompt's {len(request.prompt_token_ids)} tokens and "
                f"max_tokens={request.max_tokens} need {need} "
                f"KV slots; the pool has {pool.num_tokens}: "
                "raise max_total_tokens or lower max_tokens"
            )

    def _seed_for(self, number: int) -> int:
        """Return a seed of 64 bits for the request of this number."""
        return (self._seed * 1_000_003 + number) % (1 << 63)

    def _tokenize(self, prompt: Prompt) -> tuple[str | None, tuple[int, ...]]:
        if isinstance(prompt, str):
            if self._tokenizer is None:
                raise UsageError("the model has no tokenizer: give the prompt as token ids")
            try:
                ids = tuple(self._tokenizer(prompt)["input_ids"])
            except TypeError as error:  # lone surrogates, from bytes that were no UTF-8
                raise UsageError(f"prompt {prompt[:40]!r}: expected Unicode text") from error
            text: str | None = prompt
        else:
            try:
                text, ids = None, tuple(prompt)
            except TypeError as error:
                raise UsageError(
                    f"prompt {shown(prompt)}: expected a text or a list of token ids"
                ) from error
            if set(map(type, ids)) != {int}:
                ids = tuple(map(plain_integer, ids))
        if not ids:
            raise UsageError("the prompt is empty; expected at least one token")
        self._check_tokens("prompt token id", ids)  # a tokenizer may know more than the model
        return text, ids

    def _check_tokens(self, what: str, tokens: Collection[Any]) -> None:
        """Refuse ids that are no tokens of the model; fast for long prompts."""
        size = self._target.vocab_size
        if not tokens or (
            set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) < size
        ):
            return
        wrong = next(t for t in tokens if type(t) is not int or not 0 <= t < size)
        raise UsageError(f"{what} {shown(wrong)}: expected an integer from 0 to {size - 1}")


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    try:
        batch: list[Any] = list(prompts)
    except TypeError as error:
        raise UsageError(
            f"prompts={shown(prompts)}: expected texts or lists of token ids"
        ) from error
    return [batch] if batch and isinstance(batch[0], Integral) else batch


def _as_params(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    found = list(params) if isinstance(params, Sequence) else [params]
    for each in found:
        if not isinstance(each, SamplingParams):
            raise UsageError(
                f"sampling_params={shown(each)}: expected a SamplingParams, or one for each prompt"
            )
    if len(found) != count:
        raise UsageError(f"{len(found)} sampling_params for {count} prompts: expected as many")
    return found


def _as_priorities(priority: int | Sequence[int], count: int) -> list[int]:
    try:
        priorities = [priority] * count if isinstance(priority, int) else list(priority)
    except TypeError as error:
        raise UsageError(
            f"priority={shown(priority)}: expected an integer, or one for each prompt"
        ) from error
    if len(priorities) != count:
        raise UsageError(f"{len(priorities)} priorities for {count} prompts: expected as many")
    for value in priorities:
        if not isinstance(value, int) or isinstance(value, bool):
            raise UsageError(f"priority={shown(value)}: expected an integer; lower ones come first")
    return priorities
