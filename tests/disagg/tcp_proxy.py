"""A TCP proxy that can hold back what it carries, and cut its connections."""

from __future__ import annotations

import math
import socket
from contextlib import suppress
from threading import Condition, Thread
from typing import Self


class Proxy:
    """Stands between instances that connect to it, and the one at a port of this machine."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._changed = Condition()
        self._left = math.inf
        self._cuts = 0
        self._cuts_there = False
        self._open: list[socket.socket] = []
        Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def hold(self, after: int = 0) -> None:
        """Let so many more bytes through from those that connect; then nothing, either way."""
        with self._changed:
            self._left = after

    def cut_after(self, count: int) -> None:
        """Let so many more bytes through from those that connect, and cut all connections there."""
        with self._changed:
            self._left, self._cuts_there = count, True

    def wait_until_cut(self, timeout: float) -> None:
        """Until so many bytes have gone through, and no more."""
        with self._changed:
            assert self._changed.wait_for(lambda: not self._cuts_there, timeout), self._left

    def wait_until_held(self, timeout: float) -> None:
        """Until so many bytes have gone through."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._left == 0, timeout), self._left

    def cut(self) -> None:
        """Cut all connections, with what is held back; new ones are carried."""
        with self._changed:
            self._cuts += 1
            self._left, self._cuts_there = math.inf, False
            ends, self._open = self._open, []
            for end in ends:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
            self._changed.notify_all()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                try:
                    far = socket.create_connection(("127.0.0.1", self._to))
                except OSError:
                    near.close()
                    continue
                with self._changed:
                    self._open += [near, far]
                    cuts = self._cuts
                for pair in ((near, far), (far, near)):
                    Thread(target=self._carry, args=(*pair, near, cuts), daemon=True).start()

    def _carry(
        self, source: socket.socket, sink: socket.socket, near: socket.socket, cuts: int
    ) -> None:
        with source, suppress(OSError):
            while data := source.recv(1 << 16):
                while data:
                    part = self._let(len(data), cuts, counted=source is near)
                    sink.sendall(data[:part])
                    data = data[part:]
                    if self._cuts_there and not self._left:
                        self.cut()
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)

    def _let(self, size: int, cuts: int, *, counted: bool) -> int:
        """How many of these bytes may go now; waits until some may."""
        with self._changed:
            self._changed.wait_for(lambda: self._left > 0 or self._cuts != cuts)
            if self._cuts != cuts:
                raise OSError("cut")
            part = int(min(size, self._left)) if counted else size
            self._left -= part if counted else 0
            self._changed.notify_all()
            return part
