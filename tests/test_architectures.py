"""``docs/models.md`` holds for the installed transformers; a part of it is run again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from architectures import VARIANTS, examine
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

PAGE = Path(__file__).parent.parent / "docs" / "models.md"
SHARE = {
    "gpt_oss": "sinks and windows",
    "deepseek_v3": "latent attention",
    "gpt_bigcode": "one key head",
    "gemma2, soft caps": "soft caps",
    "gemma3n_text": "streams side by side",
    "doge": "a mask of its own",
    "bloom": "attention of its own",
}


def _rows() -> dict[str, tuple[str, str]]:
    lines = re.findall(r"^\| ([^|]+) \| ([^|]+) \| ([^|]*) \|$", PAGE.read_text(), re.MULTILINE)
    return {name: (result, why.strip()) for name, result, why in lines}


def test_page_lists_every_architecture() -> None:
    assert set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) | set(VARIANTS) <= set(_rows())


def test_page_has_nothing_wrong_and_reasons() -> None:
    rows = {k: v for k, v in _rows().items() if k not in ("architecture", "---")}
    assert {result for result, _ in rows.values()} <= {"identical", "refused", "not made"}
    assert all(why for result, why in rows.values() if result != "identical")


@pytest.mark.parametrize("name", SHARE)
def test_architecture_is_what_the_page_says(name: str) -> None:
    model_type, changes = VARIANTS.get(name, (name, {}))
    row = examine(name, model_type, changes)
    assert (row.result, row.why) == _rows()[name]
