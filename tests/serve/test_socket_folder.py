"""Folders of sockets, whose processes end as they should or are killed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from forked_engines import serve_here
from server_process import DEADLINE, ServerProcess, environment, serve_arguments, wait_until
from warm_process import start_command

from specplug.serve.socket_folder import socket_folder

HOLD = """
import socket, sys
from specplug.serve.socket_folder import socket_folder
with socket_folder() as folder:
    bound = socket.socket(socket.AF_UNIX)
    bound.bind(str(folder / "reports"))
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder for temporary files; a short path."""
    with tempfile.TemporaryDirectory(prefix="place-", dir="/tmp") as place:
        yield Path(place)


@pytest.fixture
def chosen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have this process put its temporary files there."""
    monkeypatch.setattr(tempfile, "tempdir", str(place))


@pytest.fixture
def holding(place: Path, chosen: None) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """A process that has a folder with a socket, and the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(place)},
    ) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().rstrip("\n"))
        assert folder.parent == place
        assert (folder / "reports").is_socket()
        yield process, folder
        process.kill()


def test_socket_folder_of_a_killed_process_is_removed(place: Path, holding: Any) -> None:
    process, left = holding
    process.kill()
    process.wait(DEADLINE)
    assert left.exists()
    with socket_folder() as mine:
        assert list(place.iterdir()) == [mine]
    assert not list(place.iterdir())


def test_socket_folder_that_is_held_stays(holding: Any) -> None:
    process, folder = holding
    with socket_folder() as mine, socket_folder() as another:
        assert (folder / "reports").is_socket()
        assert mine.exists()
        assert another.exists()
    assert (folder / "reports").is_socket()
    process.communicate("", timeout=DEADLINE)
    assert not folder.exists()


def test_socket_folder_of_another_user_stays(holding: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    process, left = holding
    process.kill()
    process.wait(DEADLINE)
    monkeypatch.setattr(os, "geteuid", lambda: left.stat().st_uid + 1)
    with socket_folder():
        assert (left / "reports").is_socket()


def test_what_is_no_socket_folder_stays(place: Path, holding: Any) -> None:
    process, left = holding
    process.kill()
    process.wait(DEADLINE)
    kept = [left / "notes.txt", place / "specplug-zmq-file", place / "specplug-other"]
    for path in kept:
        path.write_text("mine")
    link = place / "specplug-zmq-link"
    link.symlink_to(left)
    with socket_folder():
        pass
    assert all(path.read_text() == "mine" for path in kept)
    assert link.is_symlink()


def test_a_server_removes_what_a_killed_one_has_left(place: Path) -> None:
    with ExitStack() as ends:

        def start() -> ServerProcess:
            process = start_command(
                serve_arguments(()),
                stdout=1,
                stderr=2,
                environment=environment({"TMPDIR": str(place)}),
                run=serve_here,
            )
            server = ServerProcess(process, url="", errors=[])
            ends.callback(server.kill)
            wait_until(server.children)
            return server

        start().kill()
        (left,) = place.glob("specplug-*")
        second = start()
        (own,) = place.glob("specplug-*")
        assert own != left
        second.signal()
        assert second.wait() == 0
        assert not list(place.glob("specplug-*"))
