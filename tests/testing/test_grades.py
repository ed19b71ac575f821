"""An algorithm's grade: ``specplug check`` keeps it, ``specplug info`` shows it while it holds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner

from specplug.cli.check import check
from specplug.testing import kit
from specplug.testing.grades import EarnedGrade, Holder, Standing, earned_by, keep


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of this process and its children."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _earned(name: str, grade: str | None = "silver", **missed: str) -> EarnedGrade:
    earned = EarnedGrade(grade=grade, missed=missed, holder=Holder.of(name))
    keep(name, earned)
    return earned


def test_grade_that_was_kept_is_read() -> None:
    assert earned_by("NGRAM") is None
    earned = _earned("NGRAM")
    assert earned_by("NGRAM") == earned
    assert Standing.of("NGRAM").status == "holds"


def test_info_shows_grade_with_versions(plugin_folder: Any) -> None:
    plugin_folder.write("SOUND")
    assert "not known: run specplug check SOUND" in plugin_folder.specplug("info", "SOUND").stdout
    keep("SOUND", attrs.evolve(_earned("SOUND"), missed={"gold.scores": "expected"}))
    shown = plugin_folder.specplug("info", "SOUND").stdout
    assert "silver, since gold.scores fails as declared (kit 1, API 1, specplug 0." in shown
    assert "specplug-sound 1.0)" in shown
    told = json.loads(plugin_folder.specplug("info", "SOUND", "--json").stdout)["conformance"]
    assert (told["status"], told["grade"]) == ("holds", "silver")


def test_grade_of_other_files_does_not_hold(plugin_folder: Any) -> None:
    source = plugin_folder.write("SOUND")
    _earned("SOUND")
    (source.parent / "weights.bin").write_bytes(b"1")
    shown = plugin_folder.specplug("info", "SOUND").stdout
    assert "not known: it was silver, but its files have changed; run specplug check" in shown
    told = json.loads(plugin_folder.specplug("info", "SOUND", "--json").stdout)["conformance"]
    assert (told["status"], told["grade"]) == ("stale", None)


@pytest.mark.parametrize("name", ["kit", "API", "specplug", "specplug-ngram"])
def test_grade_of_another_version_does_not_hold(name: str) -> None:
    earned = _earned("NGRAM")
    versions = earned.holder.versions
    older = attrs.evolve(earned.holder, versions={**versions, name: "0"})
    keep("NGRAM", attrs.evolve(earned, holder=older))
    standing = Standing.of("NGRAM")
    assert standing.status == "stale"
    assert f"{name} was 0 and is {versions[name]}" in standing.line("NGRAM")


def test_joined_algorithms_have_the_versions_of_each() -> None:
    assert {"specplug-eagle3", "specplug-ngram"} <= set(Holder.of("EAGLE3+NGRAM").versions)


def test_damaged_file_is_no_grade(cache: Path) -> None:
    keep("NGRAM", _earned("NGRAM"))
    (path,) = cache.rglob("NGRAM.json")
    for text in ("", "[]", "{}", '{"grade": "gold", "holder": 3}'):
        path.write_text(text)
        assert Standing.of("NGRAM").status == "unknown"


def test_grade_is_read_without_torch() -> None:
    _earned("NGRAM")
    code = (
        "import sys; from specplug.testing.grades import Standing;"
        "print(Standing.of('NGRAM').status, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "holds False"


def test_check_keeps_grade_once_all_checks_ran(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    only_form = kit.checks_named(["form"])
    monkeypatch.setattr(kit, "all_checks", lambda: only_form)
    part = CliRunner().invoke(check, ["ngram", "--only", "form.hooks"])
    assert part.exit_code == 0, part.output
    assert earned_by("NGRAM") is None
    assert CliRunner().invoke(check, ["ngram"]).exit_code == 0
    earned = earned_by("NGRAM")
    assert earned is not None
    assert (earned.grade, earned.missed, earned.settings) == ("gold", {}, {})
    assert CliRunner().invoke(check, ["ngram", "--seed", "2"]).exit_code == 0
    earned = earned_by("NGRAM")
    assert earned is not None
    assert earned.settings == {"seed": "2"}


def test_grade_is_kept_with_what_was_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    checks = kit.checks_named(["form", "conduct.state"])
    monkeypatch.setattr(kit, "all_checks", lambda: checks)
    monkeypatch.setitem(sys.modules, "zmq", None)  # as if it were not installed
    done = CliRunner().invoke(check, ["NGRAM"])
    assert done.exit_code == 0, done.output
    assert "conduct.state  left out" in done.output
    assert "grade: gold; conduct.state was left out: disaggregation needs pyzmq" in done.output
    standing = Standing.of("NGRAM")
    assert standing.as_mapping()["left_out"] == ["conduct.state"]
    assert standing.line("NGRAM").startswith("gold, without conduct.state (kit ")


def test_check_tells_where_grade_cannot_be_kept(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    only_form = kit.checks_named(["form"])
    monkeypatch.setattr(kit, "all_checks", lambda: only_form)
    cache.write_text("a file, and no folder")
    done = CliRunner().invoke(check, ["NGRAM"])
    assert done.exit_code == 0
    assert "the grade is not kept" in done.stderr
