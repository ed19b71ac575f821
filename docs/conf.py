"""Build the pages as a site: ``make docs``, which runs Sphinx over the Markdown as it stands.

The pages are written for the repository. What a site needs besides is made while they are read: the
list of pages, links to folders, pages as Markdown, llms.txt.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LINK = re.compile(r"\[([^\]]+)\]\(([^)#:]+)(?:#[^)]*)?\)")

DIAGRAM = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EDGE = re.compile(r'(\w+) -(?:- "(.+)" -)?-> (\w+)')
MESSAGE = re.compile(r"(\w+)--?>>(\w+): (.+)")
NOTE = re.compile(r"Note over (\w+): (.+)")

project = "specplug"
extensions = ["myst_parser"]
root_doc = "README"
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["wrapped.css"]
html_title = "specplug"
html_copy_source = False
html_show_copyright = False
myst_heading_anchors = 6
# Titles that several pages have are no fault: links name their page.
suppress_warnings = ["myst.header"]


def listed_groups() -> dict[str, list[tuple[str, str]]]:
    """Read the README's lists of documentation: by their titles each page's path, and what it is
    about."""
    groups: dict[str, list[tuple[str, str]]] = {}
    title = "Documentation"
    for row in README.partition("## Documentation\n")[2].splitlines():
        if row.startswith("### "):
            title = row[4:]
        elif row.startswith("| ["):
            pages, about = row.strip("| ").split(" | ", 1)
            found = [(path, about) for _, path in LINK.findall(pages)]
            groups.setdefault(title, []).extend(found)
    return groups


GROUPS = listed_groups()
PAGES = [page for pages in GROUPS.values() for page in pages]
PACKAGES = [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("plugins/*/README.md"))]
exclude_patterns = [".*", "build"]  # folders that are not even walked: environments, caches
CAPTIONS = {title: [path for path, _ in pages] for title, pages in GROUPS.items()}
CAPTIONS["Packages"] = ["specplug/kernels/README.md", *PACKAGES]
include_patterns = ["README.md", *(name for names in CAPTIONS.values() for name in names)]


def _of_site(app: Any, name: str, source: list[str]) -> None:
    """Change a page's text, as it is read, to what the site shows."""
    folder = (ROOT / name).parent

    def link(found: re.Match[str]) -> str:
        return found[1] if (folder / found[2]).is_dir() else found[0]

    text = LINK.sub(link, source[0])
    text = DIAGRAM.sub(_as_text, text)  # drawing it would need a script of others
    if name == root_doc:
        for caption, names in CAPTIONS.items():
            listed = "\n".join(names)
            text += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}\n```\n"
    source[0] = text


def _as_text(diagram: re.Match[str]) -> str:
    """Write a diagram of Mermaid's as lines: each node with what its arrows lead to."""
    names = dict(re.findall(r'(\w+)\["(.+?)"\]', diagram[1]))
    names |= dict(re.findall(r"participant (\w+) as (.+)", diagram[1]))
    lines: list[str] = []
    arrows: dict[str, list[str]] = {}
    messages: list[tuple[str, str]] = []
    for line in map(str.strip, diagram[1].splitlines()[1:]):
        if edge := EDGE.fullmatch(line):
            start, label, end = names.get(edge[1], edge[1]), edge[2], names.get(edge[3], edge[3])
            if label:
                lines += [start, f"    {label}", f"    → {end}", ""]
            else:
                arrows.setdefault(start, []).append(end)
        elif message := MESSAGE.fullmatch(line):
            messages.append((f"{names[message[1]]} → {names[message[2]]}", message[3]))
        elif note := NOTE.fullmatch(line):
            messages.append((names[note[1]], note[2]))
    width = max((len(who) for who, _ in [*messages, *arrows.items()]), default=0)
    for who, what in messages:
        first, *more = what.split("<br/>")
        lines += [f"{who:{width}}  {first}", *(" " * (width + 2) + each for each in more)]
    lines += [f"{start:{width}} → {', '.join(ends)}" for start, ends in arrows.items()]
    while lines and not lines[-1]:
        lines.pop()
    return "\n".join(["```text", *lines, "```"])


def _finish(app: Any, failure: Exception | None) -> None:
    """Add the pages as Markdown, llms.txt, and the first page under the name servers look for."""
    if failure is not None or app.builder.name != "html":
        return
    site = Path(app.outdir)
    for name in app.env.found_docs:
        (site / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / f"{name}.md", site / f"{name}.md")
    shutil.copyfile(site / "README.html", site / "index.html")
    intro = " ".join(README.split("\n\n")[1].split())
    lines = [
        "# specplug",
        "",
        f"> {intro}",
        "",
        "## Pages",
        "",
        "- [README.md](README.md): the start",
    ]
    lines += [f"- [{path}]({path}): {about.rstrip(' |')}" for path, about in PAGES]
    lines += [f"- [{path}]({path}): the package of an algorithm or a view" for path in PACKAGES]
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Register what is done while pages are read and when all are written."""
    app.connect("source-read", _of_site)
    app.connect("build-finished", _finish)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
