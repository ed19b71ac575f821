"""Compiles a source in C by the machine's own compiler, and keeps the library in the user's cache.

A fresh library is not trusted: another process calls it first, and may crash or hang. A kept one is
loaded only if its content is unchanged and no other user could have written it.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from specplug.cache_folder import cache_base

_FLAGS = ("-O3", "-fPIC", "-shared", "-fno-math-errno", "-fno-trapping-math")
_TUNED = ("-march=native",), ("-mcpu=native",), ()
"""The first of these that the compiler takes."""
_COMPILE_SECONDS, _TRIAL_SECONDS = 60, 30
_BUILD = "build-"
"""Begins the name of a folder in the cache that a compiler works in."""
_ABANDONED_SECONDS = 3600
"""Age of such a folder at which it counts as abandoned: its process was killed."""
_LONGEST_LINE = 300
_MOST_TOLD = 65536
"""Bytes of a compiler's errors that are read."""

Opened = TypeVar("Opened")


class CompilerError(Exception):
    """A library cannot be compiled or loaded; the message is the reason."""


class _TooSlowError(CompilerError):
    """A process took too long."""


def find_compiler() -> str | None:
    """Return the command of the C compiler, with its arguments: ``CC``, or the first there is."""
    own = os.environ.get("CC", "").strip()
    return own or next(filter(shutil.which, ("cc", "gcc", "clang")), None)


def load_or_reason(source: Path, trial: Path, opened: Callable[[Path], Opened]) -> Opened | str:
    """Return a library in C, compiled if the cache has none; or why there is none.

    Args:
        source, trial: as ``plugin_library.load_compiled`` takes them.
        opened: as there; it may test the library, too, and raise a ``CompilerError``.
    """
    compiler = find_compiler()
    if compiler is None:
        return "there is no C compiler; install one, or set CC to one"

    def tested(path: Path) -> Opened:
        try:
            return opened(path)
        except (OSError, AttributeError) as error:
            raise CompilerError(f"what was compiled cannot be loaded: {error}") from error

    try:
        return _kept_or_made(source, compiler, tested, trial)
    except OSError as error:
        told = f"{compiler} could not be run: {error}"
    except CompilerError as error:
        told = str(error)
    return f"{told}; set CC to a C compiler that makes libraries for this machine"


def _kept_or_made(
    source: Path, compiler: str, opened: Callable[[Path], Opened], trial: Path
) -> Opened:
    name, folder = _name(source, compiler), _cache_folder()
    if folder is None:
        return _made(source, compiler, name, None, opened, trial)
    for path in sorted(folder.glob(f"{name}-*.so")):
        with suppress(OSError, CompilerError):
            if _is_whole(path):
                return opened(path)
        with suppress(OSError):
            path.unlink()
    _tidy(folder)
    try:
        return _made(source, compiler, name, folder, opened, trial)
    except _TooSlowError:
        raise
    except (OSError, CompilerError):  # the folder may be full, or mounted noexec
        return _made(source, compiler, name, None, opened, trial)


def _name(source: Path, compiler: str) -> str:
    """Return the first part of a library's name, of its source, processor and compiler."""
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
        marks = {line for line in lines if line.startswith(("flags", "Features"))}
    except OSError:
        marks = set()
    processor = "".join(sorted(marks)) or platform.node()
    key = (source.read_bytes(), compiler, platform.machine(), processor, _FLAGS, _TUNED)
    return f"{source.stem}-{_digest(repr(key).encode())}"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:24]


def _cache_folder() -> Path | None:
    """Return the folder that keeps what is compiled, made if there is none; None if others could
    write to it, or if it would be made in a folder of theirs."""
    try:
        base = cache_base()
        there = next(path for path in (base, *base.parents) if path.exists()).stat()
        is_open = there.st_mode & stat.S_IWOTH and not there.st_mode & stat.S_ISVTX
        if is_open or there.st_uid not in (0, os.getuid()):
            return None
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder = base / "specplug"
        folder.mkdir(mode=0o700, exist_ok=True)
        return folder if _is_ours(folder) and os.access(folder, os.W_OK) else None
    except (OSError, RuntimeError):
        return None


def _is_ours(path: Path) -> bool:
    """Return whether no other user may write there."""
    state = path.stat()
    return state.st_uid == os.getuid() and not state.st_mode & 0o022


def _is_whole(path: Path) -> bool:
    """Return whether a library is complete: loading a truncated one ends the process."""
    return _is_ours(path) and path.stem.endswith(f"-{_digest(path.read_bytes())}")


def _tidy(folder: Path) -> None:
    """Remove the folders of killed processes."""
    for path in folder.glob(f"{_BUILD}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _ABANDONED_SECONDS:
                shutil.rmtree(path)


def _made(
    source: Path,
    compiler: str,
    name: str,
    folder: Path | None,
    opened: Callable[[Path], Opened],
    trial: Path,
) -> Opened:
    """Compile a library, try it, open it, and keep it in the folder if there is one."""
    with tempfile.TemporaryDirectory(
        prefix=f"specplug-{_BUILD}" if folder is None else _BUILD,
        dir=folder,
        ignore_cleanup_errors=True,  # a remote folder holds what is loaded
    ) as build:
        library = Path(build) / f"{name}.so"
        _compile(source, compiler, library)
        library.chmod(0o600)
        _try(compiler, library, trial)
        found = opened(library)
        if folder is not None:
            # Atomic: other processes may do the same.
            library.replace(folder / f"{name}-{_digest(library.read_bytes())}.so")
        return found


def _compile(source: Path, compiler: str, to: Path) -> None:
    try:
        command = shlex.split(compiler)
    except ValueError as error:
        raise CompilerError(f"CC is {compiler!r}, which is no command: {error}") from error
    for tuned in _TUNED:
        options = [*_FLAGS, *tuned, "-o", str(to), str(source), "-lm"]
        failure = _failure(f"{compiler} compiles", [*command, *options], _COMPILE_SECONDS)
        if failure is None and to.is_file():
            return
    raise CompilerError(f"{compiler} did not compile: {failure or 'it wrote no library'}")


def _try(compiler: str, library: Path, trial: Path) -> None:
    """Call the library's functions in another process."""
    command = [sys.executable, "-I", "-S", str(trial), str(library)]
    failure = _failure(f"what {compiler} compiled runs", command, _TRIAL_SECONDS)
    if failure is not None:
        raise CompilerError(f"what {compiler} compiled fails: {failure}")


def _failure(what: str, command: list[str], seconds: float) -> str | None:
    """Run a command; with whatever it has started, it is ended if it takes too long.

    Returns:
        The reason of its failure, from its output or signal; None if it succeeds.

    Raises:
        OSError: it cannot be started.
        CompilerError: it takes too long.
    """
    with tempfile.TemporaryFile() as told:
        with subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=told,
            start_new_session=True,
        ) as process:
            try:
                code = process.wait(seconds)
            except BaseException as error:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                if isinstance(error, subprocess.TimeoutExpired):
                    raise _TooSlowError(f"{what} for {seconds} seconds without an end") from error
                raise
        if code == 0:
            return None
        if code < 0:
            return f"it was ended by signal {-code} ({signal.strsignal(-code)})"
        told.seek(max(0, told.seek(0, os.SEEK_END) - _MOST_TOLD))
        said = [line for line in told.read().decode(errors="replace").splitlines() if line.strip()]
    errors = [line for line in said if "error" in line.lower()]
    return (errors[:1] or said[-1:] or [f"it ended with {code}"])[0].strip()[:_LONGEST_LINE]
