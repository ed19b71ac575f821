"""A request of vLLM's as hooks see it: to read, and not to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import attrs
from torch import Tensor

_NO_STATE: Mapping[str, Tensor] = MappingProxyType({})


class Tokens(Sequence[int]):
    """A read-only view of a prompt, and of an output that grows. A slice of it is a copy."""

    __slots__ = ("_output", "_prompt")

    def __init__(self, prompt: list[int], output: list[int]) -> None:
        self._prompt, self._output = prompt, output

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        size, prompt = len(self), len(self._prompt)
        if isinstance(index, slice):
            start, stop, step = index.indices(size)
            if step == 1:
                after = self._output[max(start - prompt, 0) : max(stop - prompt, 0)]
                return self._prompt[start:stop] + after
            return [self[i] for i in range(start, stop, step)]
        place = index + size if index < 0 else index
        if not 0 <= place < size:
            raise IndexError(f"token {index} of {size}")
        return self._prompt[place] if place < prompt else self._output[place - prompt]

    def __repr__(self) -> str:
        return repr(self[:])


@attrs.frozen(eq=False)
class VllmRequest:
    """Implements ``RequestView``.

    Args:
        state: the model runner's record of the request.
        context_len: most tokens of a request.
    """

    _state: Any
    _context_len: int

    @property
    def request_id(self) -> str:
        request_id: str = self._state.req_id
        return request_id

    @property
    def prompt_token_ids(self) -> Sequence[int]:
        return Tokens(self._state.prompt_token_ids, [])

    @property
    def token_ids(self) -> Sequence[int]:
        return Tokens(self._state.prompt_token_ids, self._state.output_token_ids)

    @property
    def max_tokens(self) -> int:
        params = self._state.sampling_params
        most: int | None = None if params is None else params.max_tokens
        room = self._context_len - len(self._state.prompt_token_ids)
        return room if most is None else min(most, room)

    @property
    def min_tokens(self) -> int:
        """Tokens before which nothing ends the request. Hooks do not read it."""
        params = self._state.sampling_params
        return 0 if params is None else int(params.min_tokens)

    @property
    def cache_salt(self) -> None:
        """vLLM's scheduler alone knows it."""
        return None

    @property
    def draft_state(self) -> Mapping[str, Tensor]:
        return _NO_STATE
