"""The interface by which instances exchange messages."""

from __future__ import annotations

from typing import Protocol

import attrs

from specplug.disagg.wire_message import WireError, WireMessage


@attrs.frozen(eq=False)
class Arrived:
    """A message of a peer."""

    peer: str
    message: WireMessage


@attrs.frozen(eq=False)
class Broken:
    """A peer has sent something that is not a whole message."""

    peer: str
    error: WireError


@attrs.frozen
class Found:
    """A peer has been heard of for the first time, or again after it was lost."""

    peer: str


@attrs.frozen
class Refused:
    """A peer refuses to be connected to; it will be tried again.

    Attributes:
        why: in words.
    """

    peer: str
    why: str


@attrs.frozen
class Lost:
    """A peer's connection is cut, or the peer has been silent for too long.

    Messages in both directions may be lost.
    """

    peer: str


Event = Arrived | Broken | Found | Refused | Lost


class Transport(Protocol):
    """Carries messages between this instance and its peers, in order, each whole or not at all.

    It notices by itself when a peer is gone and when it comes back.
    """

    @property
    def address(self) -> str:
        """The address that it is bound to, or connected to."""

    def send(self, peer: str, message: WireMessage) -> None:
        """Send a message, without waiting. Does nothing if the peer is gone."""

    def receive(self, timeout: float) -> list[Event]:
        """Return the events since the last call, in order.

        Args:
            timeout: seconds to wait if there is none.
        """

    def close(self) -> None:
        """Send what is queued, for at most a moment, and disconnect."""
