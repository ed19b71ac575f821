"""A target's own logits are found from its head's, whatever the model does to them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from drafted_tokens import save_random
from tiny_targets import TINY_SHAPE
from torch import Tensor

from specplug import SpecConfig
from specplug.errors import FallbackWarning
from specplug.training.corpus import Text
from specplug.training.logit_form import LogitForm
from specplug.training.rows import Rows
from specplug.training.target import FrozenRuntime, FrozenTarget

FORMS: dict[str, tuple[str, dict[str, Any], LogitForm]] = {
    "llama": ("LlamaConfig", {}, LogitForm()),
    "gemma2": ("Gemma2Config", {"final_logit_softcapping": 0.5}, LogitForm(cap=0.5)),
    "granite": ("GraniteConfig", {"logits_scaling": 2.0}, LogitForm(scale=0.5)),
    "cohere2": ("Cohere2Config", {"logit_scale": 0.25}, LogitForm(scale=0.25)),
}


def frozen(kind: str, folder: Path, dtype: torch.dtype = torch.float32) -> FrozenTarget:
    import transformers

    name, more, _ = FORMS[kind]
    save_random(getattr(transformers, name)(**TINY_SHAPE, **more), folder)
    return FrozenTarget(str(folder), dtype, torch.device("cpu"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", FORMS)
def test_form_is_that_of_the_model(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    found, expected = frozen(kind, tmp_path, dtype).logit_form, FORMS[kind][2]
    assert found.cap == expected.cap
    assert found.scale == pytest.approx(expected.scale, rel=0.01)


@pytest.mark.parametrize("kind", FORMS)
def test_target_logits_are_what_the_model_says(kind: str, tmp_path: Path) -> None:
    target = frozen(kind, tmp_path)
    rows = Rows.of([Text(token_ids=range(5, 25), learnt=[True] * 20)], 20)
    runtime = FrozenRuntime(target, SpecConfig(algorithm="X"), rows, {}, None)
    name = runtime.capture_lm_head_input()
    batch = runtime.batch([0])
    with torch.no_grad():
        said: Tensor = target.model(batch.tokens, use_cache=False).logits
    torch.testing.assert_close(runtime.target_logits(batch.features[name]), said)


def test_form_of_another_kind_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = frozen("gemma2", tmp_path)
    target.model.config.final_logit_softcapping = None  # as if the model had another name for it
    inner = target.model.forward

    def forward(**given: Any) -> Any:
        out = inner(**given)
        out.logits = out.logits.square()
        return out

    monkeypatch.setattr(target.model, "forward", forward)
    with pytest.warns(FallbackWarning, match="logits of Gemma2ForCausalLM are not its head's"):
        assert LogitForm.of(target.model) == LogitForm()
