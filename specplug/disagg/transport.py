"""How messages get from one instance to another."""

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
    """Something of a peer that is no whole message."""

    peer: str
    error: WireError


@attrs.frozen
class Found:
    """A peer that was not there, or had been lost, has been heard of."""

    peer: str


@attrs.frozen
class Lost:
    """A peer's connection is cut, or it has been silent for too long. What was sent to it may not
    have arrived, and what it sent may not have come."""

    peer: str


Event = Arrived | Broken | Found | Lost


class Transport(Protocol):
    """Carries messages between this instance and its peers, in order, each whole or not at all.

    It notices by itself when a peer is gone, and when one comes back.
    """

    @property
    def address(self) -> str:
        """Where it is bound, or to whom it is connected."""

    def send(self, peer: str, message: WireMessage) -> None:
        """Start a message's way; nothing happens if the peer is gone."""

    def receive(self, timeout: float) -> list[Event]:
        """What has happened since the last call, in order; waits up to ``timeout`` seconds for the
        first."""

    def close(self) -> None:
        """Send what is still to be sent, for a moment, and hang up."""
