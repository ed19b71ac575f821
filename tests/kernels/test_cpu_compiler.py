"""The CPU's kernels are compiled once and kept; whatever a compiler or a cache does, a start goes
on, with the reason told."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import is_alive, wait_until

from specplug.kernels import cpu_compiler, cpu_library, plugin_library
from specplug.kernels.cpu_compiler import find_compiler
from specplug.kernels.cpu_kernels import CPUKernels, load_cpu_kernels
from specplug.kernels.kernel_table import c_declined, kernels_used
from specplug.kernels.plugin_library import load_compiled

Compiler = Callable[[str], str]
"""Makes a command of a shell script, which finds the place of the library in ``$out``, and that of
a library that is right in ``$right``."""


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a cache folder with a library that is right."""
    folder = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        found = load_cpu_kernels.__wrapped__()
    if isinstance(found, str):
        pytest.skip(found)
    return folder / "specplug"


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return the cache folder, which is empty; what is temporary stands beside it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    return tmp_path / "cache" / "specplug"


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, right: Path, tmp_path: Path, cache: Path) -> Compiler:
    """Have a script be the compiler."""

    def make(script: str) -> str:
        path = tmp_path / "compiler"
        (library,) = right.glob("*.so")
        path.write_text(
            f"#!/bin/sh\nright={library}\nfor each; do\n"
            f'[ "$last" = -o ] && out=$each\nlast=$each\ndone\n{script}\n'
        )
        path.chmod(0o700)
        monkeypatch.setenv("CC", str(path))
        return str(path)

    return make


def loaded() -> CPUKernels | str:
    return load_cpu_kernels.__wrapped__()


def never(*_: object) -> None:
    raise AssertionError("it compiles")


def test_library_is_kept_and_loaded_again(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler("cp $right $out")
    assert isinstance(loaded(), CPUKernels)
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    monkeypatch.setattr(cpu_compiler, "_compile", never)
    assert isinstance(loaded(), CPUKernels)


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert loaded() == "there is no C compiler; install one, or set CC to one"


@pytest.mark.parametrize("size", [0, 4096])
def test_library_cut_off_is_made_anew(cache: Path, compiler: Compiler, size: int) -> None:
    compiler("cp $right $out")
    assert isinstance(loaded(), CPUKernels)
    (library,) = cache.iterdir()
    whole = library.read_bytes()
    library.unlink()  # what this process has loaded stays whole, or it would end at its exit
    library.touch(0o600)
    library.write_bytes(whole[:size])  # to load it would end this process
    assert isinstance(loaded(), CPUKernels)
    assert [path.read_bytes() for path in cache.iterdir()] == [whole]


def test_library_others_may_write_is_not_loaded(
    cache: Path, right: Path, compiler: Compiler
) -> None:
    compiler("cp $right $out")
    assert isinstance(loaded(), CPUKernels)
    (library,) = cache.iterdir()
    library.chmod(0o666)
    compiler("exit 1")
    assert isinstance(loaded(), str)


def test_library_is_kept_for_nobody_else_to_write(cache: Path, compiler: Compiler) -> None:
    compiler("umask 0; cp $right $out; chmod 777 $out")
    before = os.umask(0)
    try:
        assert isinstance(loaded(), CPUKernels)
    finally:
        os.umask(before)
    for path in (cache.parent, cache, *cache.iterdir()):
        assert not path.stat().st_mode & 0o077


@pytest.mark.parametrize(
    ("script", "told"),
    [
        ("echo no such option >&2; exit 1", "no such option"),
        ("echo warned >&2; echo an error: x >&2; echo ended >&2; exit 1", "an error: x"),
        ("printf '\\377\\376bad' >&2; exit 1", "\ufffd\ufffdbad"),
        ("exit 3", "it ended with 3"),
        ("kill -SEGV $$", "it was ended by signal 11"),
        ("exit 0", "it wrote no library"),
        (": > $out", "file too short"),
        ("cp /bin/sh $out", "cannot dynamically load"),
    ],
)
def test_compiler_that_fails_is_told(
    cache: Path, compiler: Compiler, script: str, told: str
) -> None:
    name = compiler(script)
    found = loaded()
    assert isinstance(found, str)
    assert name in found
    assert told in found
    assert "set CC to a C compiler" in found
    assert not list(cache.iterdir())
    assert not list((cache.parents[1] / "temporary").iterdir())


@pytest.mark.parametrize("body", ["__builtin_trap();", "for (;;) sleep(1);"])
def test_library_that_crashes_or_hangs_ends_no_start(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, body: str
) -> None:
    own = find_compiler()
    monkeypatch.setattr(cpu_compiler, "_TRIAL_SECONDS", 1)
    source = tmp_path / "bad.c"
    functions = "".join(f"int {name}(void) {{ {body} }}" for name in cpu_library._SIGNATURES)
    source.write_text(f"unsigned sleep(unsigned);{functions}")
    compiler(f"{own} -shared -fPIC -o $out {source}")
    found = loaded()
    assert isinstance(found, str)
    assert "compiled fails: it was ended by signal" in found or "without an end" in found
    assert not list(cache.iterdir())


def test_compiler_that_hangs_is_ended(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cpu_compiler, "_COMPILE_SECONDS", 0.3)
    compiler(f"sleep 60 & echo $! > {tmp_path}/child; wait")
    began = time.monotonic()
    found = loaded()
    assert isinstance(found, str)
    assert "compiles for 0.3 seconds without an end" in found
    assert time.monotonic() - began < 5
    child = int((tmp_path / "child").read_text())
    wait_until(lambda: not is_alive(child))


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("garbage; touch touched", "No such file or directory: 'garbage;'"),
        ('cc "unclosed', "which is no command: No closing quotation"),
    ],
)
def test_command_that_is_none_is_told(
    cache: Path, monkeypatch: pytest.MonkeyPatch, command: str, told: str
) -> None:
    monkeypatch.chdir(cache.parents[1])
    monkeypatch.setenv("CC", command)
    monkeypatch.setenv("PATH", os.defpath)  # in the user's may be folders that are closed to him
    found = loaded()
    assert isinstance(found, str)
    assert command in found
    assert told in found
    assert not Path("touched").exists()


def test_command_may_have_a_blank_in_its_path(
    cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "with blank" / "cc"
    path.parent.mkdir()
    Path(compiler("cp $right $out")).rename(path)
    monkeypatch.setenv("CC", f"'{path}' -O2")
    assert isinstance(loaded(), CPUKernels)


def test_empty_command_is_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "  ")
    assert find_compiler() == next(filter(shutil.which, ("cc", "gcc", "clang")), None)


def test_cache_that_takes_nothing_leaves_nothing(cache: Path, compiler: Compiler) -> None:
    compiler(f"case $out in {cache}*) echo No space left >&2; exit 1;; esac; cp $right $out")
    assert isinstance(loaded(), CPUKernels)
    assert not list(cache.iterdir())
    assert not list((cache.parents[1] / "temporary").iterdir())


@pytest.mark.parametrize("mode", [0o777, 0o720, 0o702])
def test_folder_that_others_may_write_keeps_none(
    cache: Path, compiler: Compiler, mode: int
) -> None:
    compiler("cp $right $out")
    cache.mkdir(parents=True)
    cache.chmod(mode)
    assert isinstance(loaded(), CPUKernels)
    assert not list(cache.iterdir())
    assert not list((cache.parents[1] / "temporary").iterdir())


def test_home_of_another_is_left_alone(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    compiler("cp $right $out")
    home = tmp_path / "home"
    home.mkdir()
    if os.getuid() == 0:
        os.chown(home, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.chdir(tmp_path)
    assert isinstance(loaded(), CPUKernels)
    assert not list(home.iterdir())
    assert not Path("relative").exists()


def test_folder_of_a_killed_process_is_removed(cache: Path, compiler: Compiler) -> None:
    compiler("cp $right $out")
    for name in ("build-old", "build-new"):
        (cache / name).mkdir(parents=True)
    os.utime(cache / "build-old", (0, 0))
    assert isinstance(loaded(), CPUKernels)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == {"build-new"}


def test_interrupted_compilation_leaves_nothing(cache: Path, compiler: Compiler) -> None:
    name = compiler("kill -INT $PPID; sleep 60")
    script = (
        "from pathlib import Path\n"
        "from specplug.kernels.cpu_compiler import load_or_reason\n"
        f"load_or_reason(Path({name!r}), Path({name!r}), Path.exists)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "KeyboardInterrupt" in done.stderr
    assert not list(cache.iterdir())


def test_trial_is_quick_and_imports_no_torch(right: Path) -> None:
    (library,) = right.glob("*.so")
    script = (
        "import runpy, sys\n"
        f"sys.argv[1:] = [{str(library)!r}]\n"
        f"runpy.run_path({cpu_library.__file__!r}, run_name='__main__')\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True)


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a plugin's source; nothing of it is loaded yet."""
    monkeypatch.setattr(plugin_library, "_loaded", {})
    path = tmp_path / "own.c"
    path.write_text("int two(void) { return 2; }\n")
    return path


def test_library_of_a_plugin_is_tried_by_its_own_script(
    cache: Path, source: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    right, wrong = tmp_path / "right.py", tmp_path / "wrong.py"
    call = "import ctypes, sys\nfound = ctypes.CDLL(sys.argv[1]).two()\n"
    right.write_text(call + "sys.exit(found != 2)")
    wrong.write_text(call + "sys.exit(f'error: {found} is not 3')")
    opened = lambda path: ctypes.CDLL(str(path))  # noqa: E731
    with caplog.at_level("INFO", logger="specplug"):
        assert load_compiled(source, wrong, opened) is None
    assert "own.c is not compiled" in caplog.text
    assert "error: 2 is not 3" in caplog.text
    assert not list(cache.iterdir())
    library = load_compiled(source, right, opened)
    assert library is not None
    assert library.two() == 2
    assert load_compiled(source, right, never) is library


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_library_of_a_plugin_that_does_not_open_is_none(
    cache: Path, source: Path, tmp_path: Path, error: type[Exception]
) -> None:
    (tmp_path / "trial.py").touch()

    def opened(path: Path) -> None:
        raise error(path)

    assert load_compiled(source, tmp_path / "trial.py", opened) is None


def test_c_declined_loads_nothing(
    cache: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "trial.py").touch()
    with c_declined(True):
        assert load_compiled(source, tmp_path / "trial.py", never) is None
    with kernels_used("torch"):
        assert load_compiled(source, tmp_path / "trial.py", never) is None
    with c_declined(False):
        assert load_compiled(source, tmp_path / "trial.py", Path.exists) is True
