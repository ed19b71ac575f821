"""The folder of the sockets between a server and an engine.

A server that is killed cannot remove its folder. So each server holds a lock on its own folder,
which the system releases when the process ends, however it ends. Each server also removes the
folders that no process holds.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path

import zmq

_PREFIX = "specplug-zmq-"


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder for sockets, and remove those that killed processes have left."""
    place = _place()
    _remove_left(place)
    folder, held = _make(place)
    try:
        yield folder
    finally:
        _remove(folder, held)
        os.close(held)


def _place() -> str:
    """Return where to put the folder, since the paths of sockets have a limited length."""
    usual = tempfile.gettempdir()
    longest = os.fsencode(Path(usual) / f"{_PREFIX}12345678" / "commands")
    return usual if len(longest) <= zmq.IPC_PATH_MAX_LEN else "/tmp"


def _make(place: str) -> tuple[Path, int]:
    """Return a new folder, and its descriptor, whose lock is held until it is closed."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place))
        # Until it is held, another process may take it for one that was left, and remove it.
        with suppress(FileNotFoundError):
            held = _open(folder)
            with suppress(OSError):  # where there are no locks, no process removes it either
                flock(held, LOCK_SH)
            if folder.exists():
                return folder, held
            os.close(held)


def _remove_left(place: str) -> None:
    """Remove the folders of this user that no process holds."""
    for folder in Path(place).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is no folder, or another process is removing it
            opened = _open(folder)
            try:
                if os.fstat(opened).st_uid == os.geteuid():
                    flock(opened, LOCK_EX | LOCK_NB)
                    _remove(folder, opened)
            finally:
                os.close(opened)


def _open(folder: Path) -> int:
    return os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def _remove(folder: Path, opened: int) -> None:
    """Remove a folder and the sockets in it; keep a folder with anything else in it."""
    with suppress(OSError):
        for name in os.listdir(opened):
            if stat.S_ISSOCK(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode):
                os.unlink(name, dir_fd=opened)
        folder.rmdir()
