"""The pages build as a site, without a warning, and all of them are in it."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path

import pytest

from specplug.contract import HOOKS

ROOT = Path(__file__).parents[1]
DIAGRAMS = {
    "architecture": ["run         → disagg, engine", "    keep_accepted, HookOrder.commit"],
    "hosting": ["HookOrder → plugin  propose"],
    "vllm_runners": ["vLLM's scheduler → model runner"],
}
"""By the page that has them, lines of each as the site shows it."""
LINK = re.compile(r"\]\(([^)#:]+)\)")
sphinx = pytest.importorskip("sphinx", reason="the extra `docs` is not installed")


def build(source: Path, site: Path) -> str:
    """Build a site as ``make docs`` does; what it warned of, empty if nothing."""
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-c",
        str(source / "docs"),
    ]
    done = subprocess.run(
        [*command, "-d", str(site / ".cache"), str(source), str(site)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode == 0) == (not done.stderr), done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site of this repository."""
    folder = tmp_path_factory.mktemp("site")
    assert build(ROOT, folder) == ""
    return folder


def test_site_has_every_page_also_as_markdown(site: Path) -> None:
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("benchmarks/**/*.md"), ROOT / "README.md"]
    listed = LINK.findall((site / "llms.txt").read_text(encoding="utf-8"))
    for page in pages:
        name = page.relative_to(ROOT)
        assert (site / name).with_suffix(".html").is_file(), name
        assert (site / name).read_text(encoding="utf-8") == page.read_text(encoding="utf-8")
        assert str(name) in listed
    assert all((site / name).is_file() for name in listed)


def test_site_has_the_page_of_every_package(site: Path) -> None:
    listed = LINK.findall((site / "llms.txt").read_text(encoding="utf-8"))
    for page in ROOT.glob("plugins/*/README.md"):
        name = page.relative_to(ROOT)
        assert (site / name).with_suffix(".html").is_file(), name
        assert str(name) in listed


def test_site_shows_diagrams_as_lines(site: Path) -> None:
    shown = {name: (site / "docs" / f"{name}.html").read_text("utf-8") for name in DIAGRAMS}
    for name, lines in DIAGRAMS.items():
        drawn = unescape(re.sub(r"<[^>]+>", "", shown[name]))
        assert not re.search("sequenceDiagram|flowchart TB|graph TD", drawn), name
        assert all(line in drawn for line in lines), name


def test_site_has_every_hook(site: Path) -> None:
    shown = (site / "docs" / "hooks.html").read_text(encoding="utf-8")
    assert not {hook for hook in HOOKS if f">{hook}<" not in shown}


def test_first_page_leads_to_every_page(site: Path) -> None:
    first = (site / "index.html").read_text(encoding="utf-8")
    for page in ROOT.glob("docs/*.md"):
        assert f'href="docs/{page.stem}.html"' in first, page.name


def test_a_link_to_nothing_fails_the_build(tmp_path: Path) -> None:
    source = tmp_path / "pages"
    (source / "docs").mkdir(parents=True)
    conf = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    (source / "docs" / "conf.py").write_text(conf, encoding="utf-8")
    text = "# Pages\n\nWhat it is.\n\n## Documentation\n\n| [docs/a.md](docs/a.md) | one |\n"
    (source / "README.md").write_text(text, encoding="utf-8")
    (source / "docs" / "a.md").write_text("# A\n\n[gone](b.md) and [title](#none)\n", "utf-8")
    kernels = source / "specplug" / "kernels"
    kernels.mkdir(parents=True)
    (kernels / "README.md").write_text("# Kernels\n", encoding="utf-8")
    warned = build(source, tmp_path / "site")
    assert "b.md" in warned
    assert "none" in warned
