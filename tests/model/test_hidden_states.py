"""What hooks keep of a pass is what transformers itself gives out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    UsageError,
    hookimpl,
)

PROMPT = tuple(range(5, 28))


class Watcher:
    """NONE that keeps what it captures: per position, the chosen layers' inputs and the head's."""

    def __init__(self, *layer_ids: int) -> None:
        self.layer_ids = layer_ids
        self.rows: list[torch.Tensor] = []

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(name="WATCHER", summary="watches", api_version=1)

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Any:
        self.names = runtime.capture_layer_inputs(self.layer_ids), runtime.capture_lm_head_input()
        return self

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        kept = [target_output.per_node[name] for name in self.names]
        self.rows.append(torch.cat(kept, dim=1))
        return DraftInput(bonus_tokens=target_output.bonus_tokens)

    @hookimpl
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("layer_ids", [(0, 1, 2), (2,), (1, 0)], ids=str)
def test_layer_inputs_and_what_the_head_reads(
    tiny_model: Path, layer_ids: tuple[int, ...], chunk: int | None
) -> None:
    """Layer 2 of two is what leaves the last layer, before the final norm."""
    from transformers import AutoModelForCausalLM

    watcher = Watcher(*layer_ids)
    with LLM(
        tiny_model,
        dtype="float64",
        speculative_algorithm=watcher,
        warm_up="off",
        chunked_prefill_size=chunk,
        disable_overlap_schedule=True,
    ) as llm:
        output = llm.generate(PROMPT)[0]
    tokens = [*PROMPT, *output.token_ids][:-1]
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float64).eval()
    inputs: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(
            lambda module, args, kwargs: inputs.append(args[0][0]), with_kwargs=True
        )
    model.model.norm.register_forward_pre_hook(lambda module, args: inputs.append(args[0][0]))
    with torch.inference_mode():
        last = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0]
    expected = torch.cat([*(inputs[i] for i in layer_ids), last], dim=1)
    # transformers norms in float32, whatever the model's type is.
    torch.testing.assert_close(torch.cat(watcher.rows).cpu(), expected, rtol=0, atol=5e-5)


def test_a_layer_that_is_not_there_is_told(tiny_model: Path) -> None:
    with pytest.raises(UsageError, match="layer 3 of the target: it has layers 0 to 1"):
        LLM(tiny_model, speculative_algorithm=Watcher(3))
