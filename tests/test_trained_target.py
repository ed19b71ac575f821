"""The trained target of ``benchmarks/gpu`` and the recipes of it, but for the training itself."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
import torch
import train_target
from train_target import RECIPES, Recipe, run_recipes

sys.path.insert(0, str(RECIPES))
import target

LEARN = f"""
import sys
sys.path.insert(0, {str(RECIPES)!r})
import torch
from ranks import join
ranks = join("cpu")
torch.manual_seed(0)
network, data = torch.nn.Linear(3, 2), torch.arange(12.0).view(4, 3) / 12
network(ranks.share(data)).square().mean().backward()
ranks.average_gradients(network.parameters())
assert ranks.agree(float(ranks.rank)) == 0.0
assert ranks.mean(float(ranks.rank)) == (ranks.size - 1) / 2
if ranks.rank == 0:
    torch.save(network.weight.grad, sys.argv[1])
ranks.leave()
"""


def test_two_ranks_average_to_the_gradient_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "learn.py").write_text(LEARN)
    monkeypatch.setattr(train_target, "RECIPES", tmp_path)
    files = [tmp_path / "one.pt", tmp_path / "two.pt"]
    for file, gpus in zip(files, ((None,), ("0", "1")), strict=True):
        run_recipes([Recipe("learn", [file], gpus)], 1.0)
    one, two = (torch.load(file) for file in files)
    torch.testing.assert_close(one, two)


def test_recipe_that_fails_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fails.py").write_text("raise SystemExit(3)")
    (tmp_path / "waits.py").write_text("import time; time.sleep(600)")
    monkeypatch.setattr(train_target, "RECIPES", tmp_path)
    start = time.monotonic()
    with pytest.raises(SystemExit, match="fails failed with exit code 3"):
        run_recipes([Recipe("waits", [], ("0", "1")), Recipe("fails", [])], 1.0)
    assert time.monotonic() - start < 60


def test_clock_after_compiling_begins_at_zero() -> None:
    now = time.monotonic()
    assert target.clock(now - 50, now, 1.0) < 0.2  # 10 s are left
    assert target.clock(now - 55, now - 5, 1.0) == pytest.approx(0.5, abs=0.1)
    assert target.clock(now - 70, now - 20, 1.0) == 1.0
