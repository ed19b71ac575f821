"""What the pages show is run; what they point to is there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import attrs
import click
import pytest
from warm_process import run_command

from specplug.cli import main

ROOT = Path(__file__).parents[1]
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted(ROOT.glob("docs/*.md")),
    *sorted(ROOT.glob("benchmarks/**/*.md")),
    *sorted(ROOT.glob("examples/**/*.md")),
]
INDEXED = sorted(ROOT.glob("plugins/*/README.md"))
"""What a package index shows; the README's list has none of them."""
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OUTPUT = re.compile(r"\n[^`]*?\n```output\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)#:]+)(?:#([^)]+))?\)")


@attrs.frozen
class Block:
    """A block of code in a page."""

    page: Path
    line: int
    language: str
    code: str
    output: str | None = None
    """What the page says that it prints: a block ``output`` right after it."""

    def __str__(self) -> str:
        return f"{self.page.parent.name}/{self.page.name}:{self.line}"


def blocks(language: str) -> list[Block]:
    return [block for block in every_block() if block.language == language]


def every_block() -> list[Block]:
    found = []
    for page in (*PAGES, *INDEXED):
        text = page.read_text(encoding="utf-8")
        for fence in FENCE.finditer(text):
            line = text.count("\n", 0, fence.start()) + 2
            shown = OUTPUT.match(text, fence.end())
            found.append(Block(page, line, fence[1], fence[2], shown and shown[1]))
    return found


def commands() -> list[tuple[Block, str]]:
    """Every line of every bash block."""
    return [
        (block, line)
        for block in blocks("bash")
        for line in block.code.splitlines()
        if line.strip()
    ]


def test_the_pages_are_read():
    assert blocks("python")
    assert commands()


@pytest.mark.parametrize("block", blocks("python"), ids=str)
def test_python(block, capsys):
    lines = "\n" * (block.line - 1)  # so that a traceback points into the page
    exec(compile(lines + block.code, str(block.page), "exec"), {"__name__": "__main__"})
    printed = capsys.readouterr().out
    assert printed
    if block.output is not None:
        assert printed == block.output


def test_every_output_stands_after_what_prints_it():
    shown = [block for block in blocks("python") if block.output is not None]
    assert len(shown) == len(blocks("output"))
    assert shown


@pytest.mark.parametrize(("block", "command"), commands(), ids=str)
def test_bash(block, command):
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        makefile = (ROOT / "Makefile").read_text()
        assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in words[1:])
    elif words[:2] == ["pip", "install"]:
        targets = [word for word in words[2:] if not word.startswith("-")]
        assert all((ROOT / target / "pyproject.toml").is_file() for target in targets)
    elif words[0] == "specplug" and "|" not in words:
        code, shown, errors = run_command(words[1:], os.environ, ROOT)
        assert code == 0, errors
        assert shown
    else:
        run(command)


RUN_ELSEWHERE = {
    "new.md": "tests/cli/test_new.py",
    "write_an_algorithm.md": "tests/cli/test_new.py",
}
"""Pages whose ``sh`` blocks are run from the first line to the last, and by what."""


def shown_commands() -> list[tuple[Block, str]]:
    """Every line of the blocks that take minutes, or what not every machine has."""
    return [
        (block, line.removeprefix("$ "))
        for block in (*blocks("sh"), *blocks("console"))
        for line in block.code.splitlines()
        if block.page.name not in RUN_ELSEWHERE
    ]


@pytest.mark.parametrize(("block", "command"), shown_commands(), ids=str)
def test_shown_command_is_one(block, command, tmp_path, monkeypatch):
    """What would take minutes is not run: its options are read as if it were."""
    program, *words = shlex.split(command)
    if program == "specplug":
        found = main.get_command(click.Context(main), words[0])
        assert found is not None, words[0]
        monkeypatch.chdir(tmp_path)
        (tmp_path / "heads").mkdir()  # what the command before it has made
        found.make_context(words[0], words[1:])
    elif program == "pytest":
        options = ["--collect-only", "--specplug-check", "form", "-p", "no:cacheprovider"]
        run(shlex.join(["python", "-m", "pytest", *words, *options]), tmp_path)
    else:
        assert [program, words[0]] == ["pip", "install"]
        assert (ROOT / words[1] / "pyproject.toml").is_file()


def test_pages_that_are_run_elsewhere_are_there():
    for page, tests in RUN_ELSEWHERE.items():
        assert f'"{page}"' in (ROOT / tests).read_text(encoding="utf-8")
    languages = {block.language for block in every_block()}
    known = ["bash", "console", "diff", "mermaid", "output", "py", "python", "sh", "text", "toml"]
    assert languages <= set(known)


def run(command: str, folder: Path = ROOT) -> None:
    """Run a line as a reader would, with the virtual environment active. One with a pipe is a
    ``specplug`` that begins cold."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links(page):
    for target, title in LINK.findall(page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target
        if title:
            text = (page.parent / target).read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
            assert title in {re.sub(r"[^\w-]", "", t.lower().replace(" ", "-")) for t in titles}


def test_readme_index_links_every_page():
    index = (ROOT / "README.md").read_text(encoding="utf-8").partition("## Documentation\n")[2]
    linked = {ROOT / target for target, _ in LINK.findall(index)}
    assert {page for page in PAGES if page.name != "README.md" or page.parent != ROOT} <= linked


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_scripts_that_are_named_are_there(page):
    text = page.read_text(encoding="utf-8")
    for script in re.findall(r"^    python ([\w/]+\.py)", text, re.MULTILINE):
        assert (ROOT / script).exists() or (page.parent / script).exists(), script


TESTS = re.compile(r"\]\(([^)]+/test_\w+\.py)\)((?:,? `test_\w+`)+)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tests_that_are_named_are_there(page):
    for file, names in TESTS.findall(page.read_text(encoding="utf-8")):
        code = (page.parent / file).read_text(encoding="utf-8")
        for name in re.findall(r"`(\w+)`", names):
            assert f"def {name}(" in code, f"{file} has no {name}"


def test_every_behaviour_names_a_test():
    text = (ROOT / "docs" / "behaviours.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| ")][2:]
    assert len(rows) > 15
    assert all(TESTS.search(row) for row in rows)


def test_the_table_names_every_algorithm_of_this_repository():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for project in [ROOT / "pyproject.toml", *(ROOT / "plugins").glob("*/pyproject.toml")]:
        declared = project.read_text(encoding="utf-8")
        section = declared.partition('[project.entry-points."specplug.algorithms"]\n')[2]
        for name in re.findall(r"^(\w+) = ", section.partition("\n\n")[0], re.MULTILINE):
            assert f"| `{name}` |" in text, f"{name} is missing in the table of algorithms"
