"""A request as hooks see it: to read, and not to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import overload

from torch import Tensor

from specplug.engine.request import Request


class ReadOnlyTokens(Sequence[int]):
    """A read-only view of a list of tokens that the engine adds to. A slice of it is a copy."""

    __slots__ = ("_tokens",)

    def __init__(self, tokens: list[int]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return self._tokens[index]

    def __repr__(self) -> str:
        return repr(self._tokens)


class ReadOnlyRequest:
    """Implements ``RequestView``.

    It is made anew for each batch. If a request kept it, the two would refer to each other, and
    only the garbage collector could free them.
    """

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        return self._request.prompt_token_ids

    @property
    def token_ids(self) -> Sequence[int]:
        return ReadOnlyTokens(self._request.token_ids)

    @property
    def max_tokens(self) -> int:
        return self._request.max_tokens

    @property
    def draft_state(self) -> Mapping[str, Tensor]:
        return MappingProxyType(dict(self._request.draft_state))
