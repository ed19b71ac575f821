"""``specplug new``: each kind's package works as it is made, and docs/new.md goes on with one."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from importlib_metadata import EntryPoint
from setuptools import Distribution

from specplug import LLM, DraftModelAlgorithm, Registry, SamplingParams, UsageError
from specplug.cli import main
from specplug.cli import new as command

pytest.importorskip("copier", reason="specplug[new] is not installed")

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "new.md"
WALK = ROOT / "docs" / "write_an_algorithm.md"
CACHE = ROOT / ".mypy_cache" / "made"  # what mypy knows of torch takes a minute to learn
PROMPTS = ["x = [1, 2, 3]\ny = [1, 2, 3]\nz = [1,", "class Stack:\n    def push(self, item):\n"]
PARAMS = [
    SamplingParams(max_tokens=20, ignore_eos=True),
    SamplingParams(max_tokens=20, temperature=0.9, seed=5, ignore_eos=True),
]
LONGEST = "AN_ALGORITHM_OF_24_CHARS"


def make(folder: Path, *arguments: str) -> str:
    """Run ``specplug new`` in a folder; return what it prints."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        return str(CliRunner().invoke(main, ["new", *arguments], catch_exceptions=False).output)
    finally:
        os.chdir(before)


def refused(folder: Path, *arguments: str) -> str:
    """Run ``specplug new``, which is refused; return the error."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        with pytest.raises(UsageError) as refusal:
            main.main(["new", *arguments], standalone_mode=False)
    finally:
        os.chdir(before)
    return str(refusal.value)


@pytest.fixture(scope="module")
def expected() -> list[tuple[int, ...]]:
    """The tokens of NONE."""
    with LLM(warm_up="off") as llm:
        return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


@pytest.fixture
def _forgets_modules() -> Iterator[None]:
    """What is imported in a test is there no longer afterwards."""
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.startswith("specplug_made_"):
            del sys.modules[name]


@pytest.mark.usefixtures("_forgets_modules")
@pytest.mark.parametrize("kind", command.KINDS)
def test_a_made_package_gives_the_tokens_of_none(
    kind: str, expected: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"MADE_{kind.upper()}"
    make(tmp_path, name, "--kind", kind, "--path", "made")
    monkeypatch.syspath_prepend(tmp_path / "made")
    point = EntryPoint(name, f"specplug_{name.lower()}:algorithm", "specplug.algorithms")
    assert Registry([point]).check(name) == []
    algorithm = importlib.import_module(f"specplug_{name.lower()}").algorithm
    assert isinstance(algorithm, DraftModelAlgorithm)
    for overlap in (True, False):
        with LLM(
            speculative_algorithm=algorithm, warm_up="off", disable_overlap_schedule=not overlap
        ) as llm:
            assert [each.token_ids for each in llm.generate(PROMPTS, PARAMS)] == expected
            stats = llm.stats()
            assert stats["drafted"] > 0
            if kind == "model":  # the target drafts for itself
                assert stats["mean_accept_length"] > 3
            elif kind in ("ngram", "self"):
                assert stats["mean_accept_length"] > 1


def run(words: list[str], folder: Path, **environment: str) -> None:
    variables = {**os.environ, **environment}
    done = subprocess.run(
        words, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_made_package_tests_with_all_that_the_kit_needs(tmp_path: Path) -> None:
    make(tmp_path, "MADE", "--kind", "ngram", "--path", "made")
    made = tomllib.loads((tmp_path / "made" / "pyproject.toml").read_text(encoding="utf-8"))
    assert "specplug[disagg,grammar]" in made["project"]["optional-dependencies"]["test"]


@pytest.mark.parametrize("name", ["X", LONGEST])
def test_a_made_package_is_clean(name: str, tmp_path: Path) -> None:
    pytest.importorskip("ruff")
    for kind in command.KINDS:
        make(tmp_path, name, "--kind", kind, "--path", kind)
        for words in (["check", "--no-cache"], ["format", "--check", "--no-cache"]):
            run([sys.executable, "-m", "ruff", *words, "."], tmp_path / kind)
        files = [path for path in (tmp_path / kind).rglob("*") if path.suffix in (".py", ".md")]
        assert files
        assert not any("{{" in path.read_text() for path in files)


def test_a_made_package_has_types(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    packages = []
    for kind in command.KINDS:
        make(tmp_path, f"MADE_{kind}", "--kind", kind, "--path", kind)
        packages.append(shutil.move(tmp_path / kind / f"specplug_made_{kind}", tmp_path))
    shutil.copy(tmp_path / "ngram" / "pyproject.toml", tmp_path)
    words = [sys.executable, "-m", "mypy", "--cache-dir", str(CACHE), *map(str, packages)]
    run(words, tmp_path, MYPYPATH=str(ROOT))


# Names and folders


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("MY-DRAFTER", "expected letters, digits and underscores"),
        ("2FAST", "a letter first"),
        ("ngram", "specplug-ngram 0.1.0"),
        ("NONE", "is installed; expected a name that no installed algorithm has"),
    ],
)
def test_a_name_that_is_taken_or_none_is_refused(name: str, told: str, tmp_path: Path) -> None:
    assert told in refused(tmp_path, name, "--kind", "self")
    assert list(tmp_path.iterdir()) == []


def test_a_package_that_can_be_imported_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "specplug_there").mkdir()
    (tmp_path / "specplug_there" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    told = refused(tmp_path, "THERE", "--kind", "self")
    assert "a package specplug_there is installed" in told


@pytest.mark.parametrize("kind", ["self", "heads"])
def test_what_comes_next_is_told(kind: str, tmp_path: Path) -> None:
    install, check, bench = make(tmp_path, "my_drafter", "--kind", kind).splitlines()[1:]
    assert install == "    pip install -e ./specplug-my-drafter"
    assert check.startswith("    specplug check MY_DRAFTER")
    assert ("until the network is trained" in check) is (kind == "heads")
    assert bench == "    specplug bench --speculative-algorithms MY_DRAFTER"


def test_a_folder_that_is_there_is_kept_unless_forced(tmp_path: Path) -> None:
    make(tmp_path, "MINE", "--kind", "ngram")
    worker = tmp_path / "specplug-mine" / "specplug_mine" / "worker.py"
    worker.write_text("mine")
    assert "--force" in refused(tmp_path, "MINE", "--kind", "ngram")
    assert worker.read_text() == "mine"
    make(tmp_path, "MINE", "--kind", "ngram", "--force")
    assert "class MineWorker" in worker.read_text()


def test_name_and_kind_are_both_needed(tmp_path: Path) -> None:
    assert "expected both" in refused(tmp_path, "MINE")
    assert "expected both" in refused(tmp_path, "--kind", "self")


def test_without_copier_the_error_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "copier", None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specplug.debug.DEBUG", False)
    with pytest.raises(SystemExit) as ended:
        main(["new", "MINE", "--kind", "self"])
    assert ended.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'specplug[new]'" in line


# Later versions of the template


def committed(folder: Path) -> None:
    for words in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "made"]):
        run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], folder)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another user's, who has no template yet."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return tmp_path


def test_update_merges_a_later_version(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(home, "MINE", "--kind", "ngram")
    folder = home / "specplug-mine"
    worker = folder / "specplug_mine" / "worker.py"
    worker.write_text(worker.read_text().replace("LONGEST = 8", "LONGEST = 5"))
    committed(folder)

    templates = shutil.copytree(command.TEMPLATES, home / "templates")
    later = shutil.copytree(templates / "v1", templates / "v2")
    answers = next((later / "project").glob("*answers_file*"))
    answers.write_text(answers.read_text().replace("_commit: v1", "_commit: v2"))
    for path, old, new in (
        (later / "project" / ".github" / "workflows" / "test.yml.jinja", "@v4", "@v5"),
        (later / "workers" / "ngram.py.jinja", "Drop the text", "Forget the text"),
    ):
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new))
    monkeypatch.setattr(command, "TEMPLATES", templates)
    assert "template's v2" in make(home, "--update", "specplug-mine")

    assert "checkout@v5" in (folder / ".github" / "workflows" / "test.yml").read_text()
    assert "Forget the text" in worker.read_text()
    assert "LONGEST = 5" in worker.read_text()
    assert "_commit: v2" in (folder / command.ANSWERS).read_text()


def test_update_to_the_same_version_changes_nothing(home: Path) -> None:
    make(home, "MINE", "--kind", "block")
    folder = home / "specplug-mine"
    committed(folder)
    make(home, "--update", "specplug-mine")
    assert subprocess.check_output(["git", "status", "--porcelain"], cwd=folder) == b""


def test_update_wants_a_package_whose_files_are_committed(home: Path) -> None:
    assert "made by specplug new" in refused(home, "--update", "home")
    make(home, "MINE", "--kind", "block")
    assert "git commit" in refused(home, "--update", "specplug-mine")


def test_answers_name_their_version_and_its_repository(tmp_path: Path) -> None:
    make(tmp_path, "MINE", "--kind", "block", "--path", "made")
    answers = (tmp_path / "made" / command.ANSWERS).read_text()
    newest = max(command.TEMPLATES.iterdir(), key=lambda folder: int(folder.name[1:]))
    assert f"_commit: {newest.name}\n" in answers
    assert f"_src_path: {command.REPOSITORY}\n" in answers


def test_the_distribution_has_all_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files whose names begin with a dot match no plain pattern."""
    monkeypatch.chdir(ROOT)
    distribution = Distribution()
    distribution.parse_config_files([str(ROOT / "pyproject.toml")])
    build = distribution.get_command_obj("build_py")
    build.ensure_finalized()
    build.manifest_files = {}  # what the patterns alone find
    shipped = {Path(path).resolve() for path in build.find_data_files("specplug", "specplug")}
    assert {path for path in command.TEMPLATES.rglob("*") if path.is_file()} <= shipped


# The page


@pytest.fixture
def shell(tmp_path: Path) -> dict[str, str]:
    """The environment of an author: a virtual environment in which specplug is installed."""
    folder = tmp_path / "venv"
    venv.create(folder, with_pip=False, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    there = [path for path in sys.path if path.endswith("site-packages")]
    lines = [f"import site; site.addsitedir({path!r})" for path in there]
    (site / "installed.pth").write_text("\n".join([*lines, str(ROOT)]))
    commands = {"pip": "-m pip", "pytest": "-m pytest", "specplug": "-m specplug.cli"}
    offline = {"pip": "--no-deps --no-build-isolation --disable-pip-version-check"}
    for name, words in commands.items():
        script = folder / "bin" / name
        script.write_text(f'#!/bin/sh\nexec python {words} "$@" {offline.get(name, "")}\n')
        script.chmod(0o755)
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    return {**os.environ, "PATH": path, "VIRTUAL_ENV": str(folder)}


def test_the_page_goes_from_nothing_to_a_bench(tmp_path: Path, shell: dict[str, str]) -> None:
    """The kit runs in part here: all of it takes minutes."""
    (block,) = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    part = {"specplug check MY_DRAFTER": " --only form --only gold"}
    for line in block.splitlines():
        done = subprocess.run(
            ["bash", "-euc", line + part.get(line, "")],
            cwd=tmp_path,
            env=shell,
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
        assert done.stdout
    done = subprocess.run(
        ["pytest", "-q", "-p", "no:cacheprovider", "--specplug-check", "form", "-rA"],
        cwd=tmp_path / "specplug-my-drafter",
        env=shell,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert "2 passed" in done.stdout, done.stdout + done.stderr


def test_the_walk_ends_at_a_measured_plugin(tmp_path: Path, shell: dict[str, str]) -> None:
    """Its commands and its changes, in order; what takes minutes is made smaller."""
    part = {
        "specplug check RECENT": " --only form",
        "specplug bench": " --rounds 1 --num-prompts 1 --max-new-tokens 8",
    }
    text, change = WALK.read_text(encoding="utf-8"), ""
    lengths = []
    for kind, block in re.findall(r"^```(sh|diff)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if kind == "diff":
            change = block
            patch(tmp_path / "specplug-recent", change)
            continue
        for line in block.splitlines():
            less = part.get(line) or part.get(" ".join(line.split()[:2]), "")
            done = subprocess.run(
                ["bash", "-euc", line.partition("  # exits")[0] + less],
                cwd=tmp_path,
                env=shell,
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            fails = line.endswith("# exits with 1")
            assert done.returncode == fails, f"{line}\n{done.stdout}{done.stderr}"
            lengths += re.findall(r"mean accept length ([\d.]+)", done.stderr)
            if fails:
                told = " ".join(done.stderr.split())
                assert "drafted [671, 2750, 26, 711]; expected [671, 2750, 26, 428]" in told
                patch(tmp_path / "specplug-recent", change, "--reverse")
    assert lengths[:2] == ["2.94", "2.76"]
    assert all(f"accept length of {length}" in text for length in lengths[:2])
    assert (tmp_path / "trees.html").stat().st_size > 10_000
    assert (tmp_path / "trace.json").stat().st_size > 1_000


def patch(folder: Path, change: str, *options: str) -> None:
    """Apply a change to a package, or take it back."""
    words = ["git", "apply", *options, "-"]
    done = subprocess.run(
        words, input=change, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
