"""The deliberate breaks of ``benchmarks/breaks.py`` fit the code that they break."""

from __future__ import annotations

import subprocess
from pathlib import Path

import attrs
import pytest
from breaks import BREAKS, Break, run_break

ROOT = Path(__file__).parents[1]
OWN = Break("own", "product.py", "return 1", "return 2", ("test_product.py",))


def test_breaks_have_names_of_their_own() -> None:
    assert len({each.name for each in BREAKS}) == len(BREAKS) >= 30


@pytest.mark.parametrize("each", BREAKS, ids=lambda each: each.name)
def test_break_finds_its_text_once(each: Break, tmp_path: Path) -> None:
    target, text = tmp_path / each.file, (ROOT / each.file).read_text(encoding="utf-8")
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(text, encoding="utf-8")
    each.apply(tmp_path)
    assert target.read_text(encoding="utf-8") != text
    assert [name for name in each.tests if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("old", ["return 3", "return"])
def test_break_without_its_text_once_is_an_error(old: str, tmp_path: Path) -> None:
    (tmp_path / "product.py").write_text("return 1\nreturn 2\n")
    with pytest.raises(ValueError, match=f"{0 if old == 'return 3' else 2} times; expected once"):
        attrs.evolve(OWN, old=old).apply(tmp_path)


def test_run_tells_what_is_caught_from_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # quicker
    (tmp_path / "product.py").write_text("def one():\n    return 1\n")
    (tmp_path / "test_product.py").write_text(
        "from product import one\n\n\ndef test_one():\n    assert one() < 3\n\n\n"
        "def test_one_is_one():\n    assert one() == 1\n"
    )
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    assert run_break(OWN, tmp_path).test == "test_product.py::test_one_is_one"
    missed = run_break(attrs.evolve(OWN, new="return 1 + 0"), tmp_path)
    assert (missed.test, missed.problem) == ("", "")
    assert (tmp_path / "product.py").read_text() == "def one():\n    return 1\n"
