"""A request as hooks see it: what a plugin can reach here, it can read and not change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import overload

from torch import Tensor

from specplug.engine.request import Request


class ReadOnlyTokens(Sequence[int]):
    """A list of tokens that grows elsewhere; a slice of it is a list of its own."""

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
    """Implements ``RequestView``. Made anew for each batch: a request that held it would wait for
    the garbage collector."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    @property
    def request_id(self) -> str:
        """See ``RequestView``."""
        return self._request.request_id

    @property
    def prompt_token_ids(self) -> tuple[int, ...]:
        """See ``RequestView``."""
        return self._request.prompt_token_ids

    @property
    def token_ids(self) -> Sequence[int]:
        """See ``RequestView``."""
        return ReadOnlyTokens(self._request.token_ids)

    @property
    def max_tokens(self) -> int:
        """See ``RequestView``."""
        return self._request.max_tokens

    @property
    def draft_state(self) -> Mapping[str, Tensor]:
        """See ``RequestView``."""
        return MappingProxyType(dict(self._request.draft_state))
