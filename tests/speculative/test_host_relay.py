"""What a step leaves for the host, in a run and between batches of any two sizes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from specplug import (
    LLM,
    AlgorithmInfo,
    Batch,
    CommittedOutput,
    Defaults,
    Draft,
    DraftInput,
    PluginError,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug.speculative.host_relay import IN_FLIGHT, HostRelay

PROMPTS = ["def f(x):\n    return ", "import os\nimport ", "class Queue:\n    def "]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (24, 9, 17)]


def batch_of(names: str) -> Any:
    return SimpleNamespace(requests=[SimpleNamespace(request_id=name) for name in names])


def test_steps_arrive_once_in_order_as_they_were_left() -> None:
    relay, tensor = HostRelay(), torch.tensor([1, 2])
    relay.send(batch_of("ab"), {"n": tensor, "gone": None}, tensor.device)
    tensor.fill_(9)
    relay.send(batch_of("b"), {"t": torch.tensor([[3, 4]])}, tensor.device)
    relay.send(batch_of("c"), {}, tensor.device)
    found = [
        (names, {name: t.tolist() for name, t in tensors.items()})
        for names, tensors in relay.arrived()
    ]
    assert found == [(("a", "b"), {"n": [1, 2]}), (("b",), {"t": [[3, 4]]})]
    assert not list(relay.arrived())


class Reading:
    """Reads on the host what its last step has committed."""

    def __init__(self, wrong: Any = None) -> None:
        self.heard: defaultdict[str, list[int]] = defaultdict(list)
        self.wrong = wrong

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="READING", summary="Reads", api_version=1, defaults=Defaults(num_draft_tokens=2)
        )

    @hookimpl
    def create_worker(self, runtime: Runtime) -> object:
        return self

    @hookimpl
    def build_draft_input(self, batch: Batch, target_output: CommittedOutput) -> DraftInput:
        roots = target_output.bonus_tokens
        if self.wrong is not None:
            return DraftInput(bonus_tokens=roots, host={"tokens": self.wrong})
        if batch.is_prefill:
            counts = torch.tensor(batch.last_chunk).long()
            return DraftInput(
                bonus_tokens=roots, host={"tokens": roots.unsqueeze(1), "counts": counts}
            )
        tokens, counts = target_output.next_tokens.view(batch.size, -1), target_output.accept_lens
        return DraftInput(bonus_tokens=roots, host={"tokens": tokens, "counts": counts})

    @hookimpl
    def on_host_tensors(
        self, request_ids: Sequence[str], tensors: Mapping[str, torch.Tensor]
    ) -> None:
        rows, counts = tensors["tokens"].tolist(), tensors["counts"].tolist()
        for request_id, row, count in zip(request_ids, rows, counts, strict=True):
            self.heard[request_id] += row[:count]

    @hookimpl
    def propose(self, draft_input: DraftInput) -> Draft:
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1).repeat(1, 2))


@pytest.mark.parametrize("overlap", [True, False])
def test_plugin_reads_each_committed_token_before_it_drafts(overlap: bool) -> None:
    plugin = Reading()
    with LLM(
        speculative_algorithm=plugin, device="cpu", disable_overlap_schedule=not overlap,
        chunked_prefill_size=8,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS, PARAMS)
    for output in outputs:
        heard = plugin.heard[output.request_id]
        # A request may draft once more after its end. Its last step is not waited for.
        assert heard[: len(output.token_ids)] == list(output.token_ids)[: len(heard)]
        assert len(heard) >= len(output.token_ids) - 2


def test_steps_without_drafts_do_not_pile_up() -> None:
    plugin = Reading()
    with LLM(speculative_algorithm=plugin, device="cpu", max_running_requests=1) as llm:
        outputs = llm.generate(PROMPTS[:1] * 9, SamplingParams(max_tokens=1))
    heard = [output.request_id for output in outputs if plugin.heard[output.request_id]]
    assert heard == [output.request_id for output in outputs[: 9 - IN_FLIGHT]]


def test_host_tensor_of_a_wrong_form_is_told() -> None:
    with (
        LLM(speculative_algorithm=Reading(wrong=[1]), device="cpu") as llm,
        pytest.raises(PluginError, match=r"build_draft_input\(\) gave host 'tokens'"),
    ):
        llm.generate(PROMPTS, PARAMS)
