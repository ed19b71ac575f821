"""The page in a browser: what it draws, its keys, dark mode, 2,000 steps."""

from __future__ import annotations

import json
import re
import shutil
import struct
import subprocess
import zlib
from pathlib import Path
from typing import Any

import pytest

from specplug import SamplingParams

from .conftest import PROMPTS, Viewed, view

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no Chromium is installed")

PRESS = 'const press = (key) => document.dispatchEvent(new KeyboardEvent("keydown", { key }));\n'
STATE = (
    'const state = () => [document.getElementById("request").textContent, '
    'document.getElementById("step").textContent];\n'
)


def browse(page: Path, *options: str) -> str:
    """Open a page without a window; what the browser prints."""
    assert BROWSER is not None
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--window-size=1360,860",
        f"--user-data-dir={page.parent / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",  # nothing comes from a network
        *options,
        f"file://{page}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout


def evaluate(page: Path, script: str) -> Any:
    """Run a script in a page that has been drawn; the value of its last line, ``found``."""
    code = (
        f"<script>window.addEventListener('load', () => {{\n{PRESS}{STATE}{script}\n"
        "const told = document.createElement('pre'); told.id = 'found';\n"
        "told.textContent = JSON.stringify(found); document.body.append(told); });</script>"
    )
    copy = page.with_name("scripted.html")
    text = page.read_text(encoding="utf-8")
    copy.write_text(text.replace("</head>", code + "</head>", 1), encoding="utf-8")
    dom = browse(copy, "--dump-dom")
    (found,) = re.findall(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    for escape, sign in (("&lt;", "<"), ("&gt;", ">"), ("&nbsp;", "\xa0"), ("&amp;", "&")):
        found = found.replace(escape, sign)
    return json.loads(found)


def screenshot(page: Path, image: Path, *options: str) -> list[bytes]:
    """Take a picture of a page; its rows of RGB bytes."""
    browse(page, f"--screenshot={image}", *options)
    return pixels(image.read_bytes())


def pixels(png: bytes) -> list[bytes]:
    """Decode a PNG of 8-bit RGB or RGBA without interlacing."""
    width, height, _, kind = struct.unpack(">IIBB", png[16:26])
    parts, place = [], 8
    while place < len(png):
        (length,) = struct.unpack(">I", png[place : place + 4])
        if png[place + 4 : place + 8] == b"IDAT":
            parts.append(png[place + 8 : place + 8 + length])
        place += length + 12
    raw, size = zlib.decompress(b"".join(parts)), {2: 3, 6: 4}[kind]
    rows, before = [], bytearray(width * size)
    for y in range(height):
        start = y * (width * size + 1)
        row = bytearray(raw[start + 1 : start + 1 + width * size])
        _undo(raw[start], row, before, size)
        rows.append(bytes(row))
        before = row
    return rows


def _undo(filtered: int, row: bytearray, before: bytearray, size: int) -> None:
    """Undo the filter of a row of a PNG in place."""
    for i in range(len(row)):
        left = row[i - size] if i >= size else 0
        up, corner = before[i], before[i - size] if i >= size else 0
        if filtered == 4:
            guess = left + up - corner
            near = [(abs(guess - each), k) for k, each in enumerate((left, up, corner))]
            add = (left, up, corner)[min(near)[1]]
        else:
            add = (0, left, up, (left + up) // 2)[filtered]
        row[i] = (row[i] + add) & 255


def test_page_draws_the_tree_and_the_accepted_path(tree: Viewed) -> None:
    found = evaluate(
        tree.page,
        """press("ArrowRight");
        const all = (selector, of) => [...document.querySelectorAll(selector)].map(of);
        const texts = (kind) => all(`svg .node${kind} text:not(.percent)`, (t) => t.textContent);
        const boxes = all("svg .node", (node) => node.getBoundingClientRect());
        const found = {
          took: texts(".took"), own: texts(".own"), root: texts(".root"), all: texts("").length,
          boxes: boxes.map((box) => [box.left, box.top, box.right, box.bottom]),
          text: document.getElementById("text").textContent,
          marked: all("#text mark", (mark) => mark.textContent) };""",
    )
    step = next(r for r in tree.records if r["kind"] == "decode" and r["request"] == "0")
    seen = {
        int(token): text.replace(" ", "·").replace("\n", "⏎")
        for r in tree.records
        if r["kind"] == "pieces"
        for token, text in r["pieces"].items()
    }
    assert found["took"] == [seen[step["tokens"][node]] for node in step["path"][1:]]
    assert found["root"] == [seen[step["tokens"][0]]]
    assert found["own"] == [seen[step["target"][step["path"][-1]]]]
    assert found["all"] == len(step["tokens"]) + 1
    assert found["text"] == tree.outputs[0].prompt + tree.outputs[0].text
    assert "".join(found["marked"]) == "".join(step["text"])
    for i, a in enumerate(found["boxes"]):
        for b in found["boxes"][:i]:
            apart = a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
            assert apart, "two nodes overlap"


def test_keys_walk_through_steps_and_requests(tree: Viewed) -> None:
    found = evaluate(
        tree.page,
        """const found = [state()];
        for (const key of "ArrowRight ArrowRight ArrowLeft j End Home j j k".split(" ")) {
          press(key); found.push(state());
        }
        press("/"); found.push([document.activeElement.id, location.hash]);
        const jump = document.getElementById("jump"); jump.value = "3";
        jump.dispatchEvent(new KeyboardEvent("keydown", { key: "Enter", bubbles: true }));
        found.push(state());""",
    )
    owners = [r["request"] for r in tree.records if r["kind"] in ("prefill", "decode")]
    steps = [owners.count(str(request)) for request in range(3)]
    walked = [(1, 1), (1, 2), (1, 3), (1, 2), (2, 2), (2, steps[1]), (2, 1), (3, 1), (3, 1), (2, 1)]
    assert found[:10] == [[f"request {r} of 3", f"step {s} of {steps[r - 1]}"] for r, s in walked]
    assert found[10:] == [["jump", "#2/1"], ["request 2 of 3", f"step 3 of {steps[1]}"]]


def test_page_says_who_drafted_and_why_nobody_did(tmp_path: Path) -> None:
    script = """press("End");
        const facts = [...document.querySelectorAll("#facts dd")].map((dd) => dd.textContent);
        const found = [facts, document.getElementById("said").textContent];"""
    told: dict[int | None, bool] = {}
    for most in (0, None):
        params = SamplingParams(max_tokens=8, max_draft_tokens=most)
        viewed = view(tmp_path, "EAGLE3,NGRAM", params, PROMPTS[:1])
        facts, said = evaluate(viewed.page, script)
        step = [r for r in viewed.records if r["kind"] == "decode"][-1]
        assert facts[2:4] == [step["drafter"].replace("NONE", "nobody"), str(step["planned"])]
        told[most] = said.startswith("No draft was asked for: the request wants none")
        assert told[most] == (step["drafter"] == "NONE")
    assert told[0]


def test_text_in_a_page_is_text(tmp_path: Path) -> None:
    bad = "document.title = 'bad'"
    text = f'</script><script>{bad}</script><img src=x onerror="{bad}">'
    viewed = view(tmp_path, "NGRAM", SamplingParams(max_tokens=12), [text * 2])
    script = (
        "press('End'); const found = [document.title, document.getElementById('text').textContent];"
    )
    title, shown = evaluate(viewed.page, script)
    assert title == "specplug: drafts step by step"
    assert shown == text * 2 + viewed.outputs[0].text


def test_page_without_a_request_says_so(tmp_path: Path) -> None:
    viewed = view(tmp_path, prompts=[])
    script = "press('ArrowRight'); const found = document.getElementById('tree').textContent;"
    assert evaluate(viewed.page, script).startswith("This page shows the steps of a run.")


def test_screenshots_are_light_and_dark(tree: Viewed, tmp_path: Path) -> None:
    light = screenshot(tree.page, tmp_path / "light.png")
    dark = screenshot(tree.page, tmp_path / "dark.png", "--blink-settings=preferredColorScheme=0")
    for rows, least, most in ((light, 200, 255), (dark, 0, 60)):
        mean = sum(sum(row) for row in rows[::20]) / sum(len(row) for row in rows[::20])
        assert least <= mean <= most
        assert len(set(rows)) > 100  # something is drawn


def test_two_thousand_steps_stay_quick(tree: Viewed, tmp_path: Path) -> None:
    page = tmp_path / "long.html"
    page.write_text(lengthened(tree, 2000), encoding="utf-8")
    found = evaluate(
        page,
        """const times = [];
        const right = Array(60).fill("ArrowRight"), left = Array(60).fill("ArrowLeft");
        for (const key of [...right, "End", ...left, "Home"]) {
          const began = performance.now();
          press(key); document.getElementById("tree").getBoundingClientRect();
          times.push(performance.now() - began);
        }
        times.sort((a, b) => a - b);
        const found = { median: times[times.length / 2 | 0], state: state() };""",
    )
    assert found["state"] == ["request 1 of 1", "step 1 of 2000"]
    assert page.stat().st_size < 4 << 20
    assert found["median"] < 100  # milliseconds


def lengthened(tree: Viewed, steps: int) -> str:
    """The page of a request whose decode steps are repeated."""
    records = tree.records
    own = [r for r in records if r["kind"] == "decode" and r["request"] == "0"]
    whole = {r["step"]: r for r in records if r["kind"] == "step"}
    made = [r for r in records if r["kind"] in ("run", "pieces")]
    made += [r for r in records if r["kind"] == "request" and r["request"] == "0"]
    for i in range(steps):
        step = own[i % len(own)]
        made += [{**whole[step["step"]], "step": i + 1}, {**step, "step": i + 1}]
    text = tree.page.read_text(encoding="utf-8")
    head, mark, rest = text.partition('id="records">')
    data = json.dumps(made, separators=(",", ":")).replace("<", "\\u003c")
    return head + mark + data + rest[rest.index("</script>") :]
