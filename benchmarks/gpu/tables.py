"""Put the rows of several runs together: one file for each card, and the tables of the README.

    python benchmarks/gpu/tables.py DIR … --readme

reads every ``results.jsonl`` under these folders (or a file that it wrote before), and writes for
each card ``results/<date>-<card>.json`` beside this file, and a picture of what a choice of drafts
gives if that was measured. ``--readme`` writes the tables between the marks of the README, a
section for each card; otherwise they are printed. Of a point that was measured twice the later one
counts.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from choice_results import choice_table, draw_choices
from points import Row, read_results, table

HERE = Path(__file__).resolve().parent
BEGIN, END = "<!-- measured: tables.py writes from here -->", "<!-- measured: to here -->"

DATA_SHEETS = {"NVIDIA H100 80GB HBM3": 3.35e12, "NVIDIA H200": 4.8e12}
"""Bytes a second of a card's memory, as its data sheet has them."""

_OF_STARTS = "warm_up="
"""How a setting begins that changes nothing of what is measured."""


def collect(places: Iterable[Path]) -> list[Row]:
    """Read all rows in these folders, or of files that ``tables.py`` wrote.

    Each gets what its run says of itself: ``card``, ``shape``, ``settings_given``, and the
    ``bandwidth`` that the run has read.
    """
    rows: list[Row] = []
    for place in places:
        if place.is_file():
            rows += _annotated(json.loads(place.read_text()))
        else:
            for file in sorted(place.rglob("results.jsonl")):
                rows += _annotated(read_results(file))
    return rows


def _annotated(rows: list[Row]) -> list[Row]:
    """Add to each row what the run before it says. A run without a card has the file's first."""
    machines = [row["machine"] for row in rows if "machine" in row]
    about: Row = {}
    machine: Row = machines[0] if machines else {}
    for row in rows:
        if row["kind"] == "run":
            about, machine = row, row.get("machine", machine)
        row["card"] = machine.get("gpu") or machine.get("cpu") or "unknown card"
        given = about.get("settings", [])
        row["settings_given"] = [each for each in given if not each.startswith(_OF_STARTS)]
        if about.get("cublas"):
            row["settings_given"].append("products of cuBLAS")
        row.setdefault("shape", about.get("shape"))
        if "bandwidth" in about:
            row.setdefault("bandwidth", about["bandwidth"])
    return rows


def by_card(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each card, in the order of the first ones; none of a card that has runs alone."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["card"], []).append(row)
    return {card: rows for card, rows in found.items() if any(r["kind"] != "run" for r in rows)}


def date_of(rows: Sequence[Row]) -> str:
    """When these rows were measured: a day, or the first and the last one."""
    days = sorted({row["date"] for row in rows if row["kind"] == "run"})
    return " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "undated"


def latest(rows: Sequence[Row], kind: str, *keys: str) -> list[Row]:
    """The last row of a kind for each value of its keys, in the order of the first ones."""
    found = {
        json.dumps([row[key] for key in (*keys, "settings_given")]): row
        for row in rows
        if row["kind"] == kind
    }
    return list(found.values())


def _given(row: Row) -> str:
    """The settings of a run, in words."""
    return ", ".join(row["settings_given"])


def step_tables(rows: Sequence[Row]) -> str:
    """Milliseconds a step of each shape, ours beside the limit, plain decoding and vLLM."""
    text = ""
    found = latest(rows, "step", "shape", "engine", "variant", "batch", "context")
    peers = {
        (r["shape"], r["variant"], r["batch"], r["context"]): r
        for r in found
        if r["engine"] == "vllm"
    }
    ours = [row for row in found if row["engine"] == "specplug"]
    for shape, given in dict.fromkeys((row["shape"], _given(row)) for row in ours):
        lines = []
        for row in ours:
            if (row["shape"], _given(row)) != (shape, given):
                continue
            peer = peers.get((shape, row["variant"], row["batch"], row["context"]))
            plain = row["variant"] == "plain"
            bar = "" if not row["bar"] else f"{row['bar']:.0%}" if plain else f"{row['bar']:.2f}"
            lines.append([
                row["variant"],
                row["batch"],
                f"{row['context']:,}",
                f"{row['ms']:.2f}",
                f"{row['limit'] / row['ms']:.0%}",
                _of_data_sheet(row),
                "" if plain else f"{row['ratio']:.2f}",
                bar,
                f"{row['other']:.1%}",
                f"{peer['ms']:.2f}" if peer else "",
                f"{row['ms'] / peer['ms']:.2f}" if peer else "",
            ])  # fmt: skip
        head = ["", "batch", "context", "ms", "of the limit", "of the data sheet's", "x plain"]
        text += f"\n{shape}{', ' + given if given else ''}:\n\n"
        text += table([*head, "bar", "other", "vLLM, ms", "ours / vLLM"], lines)
    return text


def _of_data_sheet(row: Row) -> str:
    """The share of the limit by the data sheet's bandwidth that a step reaches."""
    if row["card"] not in DATA_SHEETS:
        return ""
    limit = row["limit"] * row["bandwidth"] / DATA_SHEETS[row["card"]]
    return f"{limit / row['ms']:.0%}"


def exactness_table(rows: Sequence[Row]) -> str:
    """Tokens and differences of each algorithm, with and without each setting."""
    found = sorted(latest(rows, "exactness", "target", "number"), key=_given)
    text = _exactness_sums(found)
    for given in dict.fromkeys(map(_given, found)):
        sums: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for row in found:
            if _given(row) == given:
                wrong = [d for each in row["differences"] for d in each]
                values = {
                    "scenarios": 1,
                    "requests": row["requests"],
                    "tokens": row["tokens"],
                    "different": len(wrong),
                    "wrong": sum(d[2] for d in wrong),
                    **{name: row[name] for name in ("verifications", "accepted")},
                    **{name: row[name] for name in ("retractions", "cached_tokens")},
                }
                sums[row["algorithm"]].update(values)
                sums["all"].update(values)
        order = [name for name in sorted(sums) if name != "all"] + ["all"]
        lines = [
            [
                f"`{name}`" if name != "all" else "all",
                *(f"{sums[name][key]:,}" for key in ("scenarios", "requests", "tokens")),
                f"{sums[name]['different']:,}",
                f"{sums[name]['wrong']:,}",
                f"{sums[name]['accepted'] / max(sums[name]['verifications'], 1):.2f}",
                f"{sums[name]['retractions']:,}",
                f"{sums[name]['cached_tokens']:,}",
            ]
            for name in order
        ]
        head = ["", "scenarios", "requests", "tokens", "requests that differ", "tokens that differ"]
        text += f"\nTokens in bf16{', ' + given if given else ''}:\n\n"
        text += table([*head, "accept length", "retractions", "tokens from the cache"], lines)
    return text


def _exactness_sums(found: Sequence[Row]) -> str:
    """What differs with each of several settings; empty if there is one."""
    lines: list[list[object]] = []
    for given in dict.fromkeys(map(_given, found)):
        these = [row for row in found if _given(row) == given]
        wrong = [each for row in these for found in row["differences"] for each in found]
        requests, tokens = (sum(row[name] for row in these) for name in ("requests", "tokens"))
        changed = sum(tokens for _, _, tokens in wrong)
        lines.append([
            f"`{given}`" if given else "as it comes",
            f"{requests:,}",
            f"{tokens:,}",
            f"{len(wrong):,} ({len(wrong) / requests:.1%})",
            f"{changed:,} ({changed / tokens:.1%})",
        ])  # fmt: skip
    if len(lines) < 2:
        return ""
    head = ["", "requests", "tokens", "requests that differ", "tokens that differ"]
    return "\nExact, and not, in bf16:\n\n" + table(head, lines)


def price_tables(rows: Sequence[Row]) -> str:
    """What exactness costs, for each shape."""
    text = ""
    found = latest(rows, "price", "shape", "what")
    for shape in dict.fromkeys(r["shape"] for r in found):
        lines: list[list[object]] = [
            [r["what"], f"{r['ms']['exact']:.2f}", f"{r['ms']['cublas']:.2f}",
             f"{r['ratio']:.3f}", r["bar"]]
            for r in found
            if r["shape"] == shape
        ]  # fmt: skip
        text += f"\nWhat exactness costs, {shape}, milliseconds:\n\n"
        text += table(["", "exact", "cuBLAS", "ratio", "bar"], lines)
    return text


def known_table(rows: Sequence[Row]) -> str:
    """Tokens a second at set accept lengths, beside the ideal."""
    lines = [
        [r["shape"], r["batch"], f"{r['context']:,}", f"{r['accept_length']:.2f}",
         f"{r['rate']:,.0f}", f"{r['plain']:,.0f}", f"{r['rate'] / r['plain']:.2f}",
         f"{r['rate'] / r['plain'] / r['accept_length']:.0%}"]
        for r in latest(rows, "known", "shape", "batch", "wanted")
    ]  # fmt: skip
    head = ["", "batch", "context", "accept length", "tokens/s", "plain", "x plain", "of ideal"]
    return _titled("A drafter that knows the truth, chains of 5, tokens a second", head, lines)


def trace_table(rows: Sequence[Row]) -> str:
    """The gaps between the kernels of traced steps."""
    lines = [
        [r["variant"], r["batch"], f"{r['context']:,}", f"{r['ms']:.2f}", f"{r['gap_ms']:.3f}",
         f"{r['longest_gap_us'][0]:.0f}", r["gaps_over_bar"]]
        for r in latest(rows, "trace", "variant", "batch")
    ]  # fmt: skip
    head = ["", "batch", "context", "ms a step", "gaps, ms a step", "longest, us", "over 50 us"]
    return _titled("Gaps between kernels in 20 traced steps", head, lines)


def map_tables(rows: Sequence[Row]) -> str:
    """For each shape, a step of each algorithm in plain ones: the accept length from which it pays.
    A star: fewer than 95 % of the requests' steps drafted."""
    text = ""
    found = latest(rows, "map", "shape", "variant", "batch", "context")
    for shape in dict.fromkeys(row["shape"] for row in found):
        steps = {(r["variant"], r["batch"], r["context"]): r for r in found if r["shape"] == shape}
        plain = {point: r["ms"] for (variant, *point_), r in steps.items()
                 if variant == "plain" for point in [tuple(point_)]}  # fmt: skip
        variants = [v for v in dict.fromkeys(v for v, _, _ in steps) if v != "plain"]
        lines = []
        for batch, context in sorted(plain):
            line: list[object] = [batch, f"{context:,}", f"{plain[batch, context]:.2f}"]
            for variant in variants:
                row = steps.get((variant, batch, context))
                star = "*" if row and row.get("drafting", 1.0) < 0.95 else ""
                line.append(f"{row['ms'] / plain[batch, context]:.2f}{star}" if row else "")
            lines.append(line)
        title = f"{shape}: the accept length from which each algorithm pays (a step in plain steps)"
        text += _titled(title, ["batch", "context", "plain, ms", *variants], lines)
    return text


def trained_table(rows: Sequence[Row]) -> str:
    """The contenders on the trained target."""
    lines = [
        [r["name"], r["batch"], r["temperature"], f"{r['rate']:,.0f}", f"{r['speedup']:.2f}",
         f"{r['accept_length']:.2f}", f"{r['same']} of {r['prompts']}"]
        for r in latest(rows, "trained", "name", "batch", "temperature")
    ]  # fmt: skip
    head = ["", "batch", "temperature", "tokens/s", "x NONE", "accept length", "same tokens"]
    return _titled("The trained target, held-out prompts", head, lines)


def _titled(title: str, head: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """A table after its title; empty without a line."""
    return f"\n{title}:\n\n{table(head, lines)}" if lines else ""


def missed_line(rows: Sequence[Row]) -> str:
    """Which bars are missed, and by how much."""
    found: list[tuple[str, float]] = []
    for row in latest(rows, "step", "shape", "engine", "variant", "batch", "context"):
        if row["settings_given"]:
            continue
        what = f"{row['shape']}, {row['variant']}, batch {row['batch']}, {row['context']:,}"
        if row["engine"] == "vllm":
            found.append((f"{what}: {row['ratio']:.3f} of vLLM's time", row["ratio"]))
        elif row["variant"] == "plain" and row["bar"]:
            share = row["limit"] / row["ms"]
            text = f"{what}: {share:.1%} of the limit, wanted {row['bar']:.0%}"
            found.append((text, row["bar"] / share))
        elif row["variant"] != "plain":
            if row["bar"]:
                text = f"{what}: {row['ratio']:.3f} x plain, at most {row['bar']}"
                found.append((text, row["ratio"] / row["bar"]))
            text = f"{what}: {row['other']:.1%} neither target nor draft, at most 4%"
            found.append((text, row["other"] / 0.04))
    for row in latest(rows, "price", "shape", "what"):
        text = f"exactness, {row['what']}: {row['ratio']:.3f}, at most {row['bar']}"
        found.append((text, row["ratio"] / row["bar"]))
    for row in latest(rows, "trace", "variant", "batch"):
        gap = row["longest_gap_us"][0]
        text = f"longest gap, {row['variant']}, batch {row['batch']}: {gap:.0f} us, at most 50"
        found.append((text, gap / 50))
    if not found:
        return ""
    missed = [f"{text} (by {over - 1:.1%})" for text, over in found if over > 1]
    told = "".join(f"\n- {each}" for each in missed)
    return f"\nOf {len(found)} bars {len(missed)} are missed{':' if missed else '.'}\n{told}\n"


def commits_line(rows: Sequence[Row]) -> str:
    """Which commits the rows of each kind are of."""
    commits: dict[str, list[str]] = {}
    for row in rows:
        if row["kind"] != "run" and row["commit"] not in commits.setdefault(row["kind"], []):
            commits[row["kind"]].append(row["commit"])
    parts = (f"{kind} {', '.join(found)}" for kind, found in commits.items())
    return f"\nCommits: {'; '.join(parts)}.\n" if commits else ""


TABLES: Sequence[Callable[[Sequence[Row]], str]] = [
    commits_line,
    missed_line,
    step_tables,
    exactness_table,
    price_tables,
    known_table,
    map_tables,
    trace_table,
    trained_table,
    choice_table,
]
"""Of a card's section, in their order."""


def name_of(rows: Sequence[Row]) -> str:
    """The last date of these rows, and their card."""
    card = re.sub(r"[^a-z0-9]+", "-", rows[0]["card"].lower()).strip("-")
    return f"{max(row['date'] for row in rows if row['kind'] == 'run')}-{card}"


def section(rows: Sequence[Row], output: Path) -> str:
    """Write the results of a card, and return its section of the README."""
    output.mkdir(parents=True, exist_ok=True)
    text = "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"
    name, card = name_of(rows), rows[0]["card"]
    (output / f"{name}.json").write_text(text)
    tables = "".join(each(rows) for each in TABLES)
    if any(row["kind"] == "choice" for row in rows):
        draw_choices(rows, f"A choice by step, {card}", output / f"{name}-choice.png")
        tables += f"\n![What it gives](results/{name}-choice.png)\n"
    return f"### {card}, {date_of(rows)}\n{tables}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=HERE / "results")
    parser.add_argument("--readme", action="store_true", help="write the tables to the README")
    arguments = parser.parse_args()
    cards = by_card(collect(arguments.folders)).values()
    text = "\n".join(section(rows, arguments.output) for rows in cards)
    if not arguments.readme:
        print(text)
        return
    file = HERE / "README.md"
    before, _, rest = file.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    file.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
