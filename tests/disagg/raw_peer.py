"""Sockets of ZeroMQ that come as an instance without a key does, and one that such a one meets."""

from __future__ import annotations

import hashlib
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator

_DIGEST = hashlib.sha256(b"").hexdigest()
NO_KEY = {"PLAIN_USERNAME": b"specplug", "PLAIN_PASSWORD": _DIGEST.encode()}
"""Options of such a socket, before it connects."""


def present(socket: zmq.Socket[Any]) -> None:
    """Have a socket come as an instance without a key."""
    for name, value in NO_KEY.items():
        socket.setsockopt(getattr(zmq, name), value)


def expect_no_key(router: zmq.Socket[Any]) -> ThreadAuthenticator:
    """Have a socket be met as a decode instance without a key, until the caller stops the thread
    that is returned."""
    router.setsockopt(zmq.PLAIN_SERVER, 1)
    router.setsockopt(zmq.ZAP_DOMAIN, b"specplug")
    gate = ThreadAuthenticator(router.context)
    gate.start()
    gate.configure_plain(domain="specplug", passwords={"specplug": _DIGEST})
    return gate
