"""What a step leaves for the host, in a run and between batches of any two sizes."""

from __future__ import annotations

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
from specplug.speculative.host_relay import HostRelay

PROMPTS = ["def f(x):\n    return ", "import os\nimport ", "class Queue:\n    def "]
PARAMS = [SamplingParams(max_tokens=n, ignore_eos=True) for n in (24, 9, 17)]


def batch_of(names: str) -> Any:
    return SimpleNamespace(requests=[SimpleNamespace(request_id=name) for name in names])


def test_rows_come_in_the_order_of_the_next_batch() -> None:
    relay = HostRelay()
    relay.send(batch_of("ab"), {"n": torch.tensor([1, 2]), "gone": None})
    relay.send(batch_of("c"), {"n": torch.tensor([3])})
    found = relay.take(batch_of("cxa"))
    assert {name: t.tolist() for name, t in found.items()} == {"n": [3, 0, 1]}
    assert relay.take(batch_of("ca")) == {}, "it is taken once"
    assert relay.take(batch_of("b"))["n"].tolist() == [2]


def test_rows_of_other_sizes_are_filled_up_with_zeros() -> None:
    relay = HostRelay()
    relay.send(batch_of("a"), {"t": torch.tensor([[1, 2, 3]])})
    relay.send(batch_of("b"), {"t": torch.tensor([[4]]), "own": torch.tensor([0.5])})
    found = relay.take(batch_of("ab"))
    assert found["t"].tolist() == [[1, 2, 3], [4, 0, 0]]
    assert found["own"].tolist() == [0.0, 0.5]


def test_later_writes_change_nothing_and_the_last_step_counts() -> None:
    relay, tensor = HostRelay(), torch.tensor([1, 2])
    relay.send(batch_of("ab"), {"n": tensor})
    tensor.fill_(9)
    relay.send(batch_of("b"), {"n": torch.tensor([5])})
    assert relay.take(batch_of("ab"))["n"].tolist() == [1, 5]


def test_ended_request_leaves_nothing() -> None:
    relay = HostRelay()
    relay.send(batch_of("a"), {"n": torch.tensor([1])})
    relay.forget("a")
    relay.forget("never seen")
    assert relay.take(batch_of("a")) == {}


class Reading:
    """Reads on the host what its last step has committed."""

    def __init__(self, wrong: Any = None) -> None:
        self.heard: dict[str, list[int]] = {}
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
    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        left = draft_input.host
        assert left["tokens"] is not None
        assert left["counts"] is not None
        rows, counts = left["tokens"].tolist(), left["counts"].tolist()
        for view, row, count in zip(batch.requests, rows, counts, strict=True):
            self.heard.setdefault(view.request_id, []).extend(row[:count])
        roots = draft_input.bonus_tokens
        return Draft.chain(roots.unsqueeze(1).expand(-1, 2).contiguous())


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
        # A request may draft once more after its end. Of its last step nothing need be heard.
        assert heard[: len(output.token_ids)] == list(output.token_ids)[: len(heard)]
        assert len(heard) >= len(output.token_ids) - 2


def test_host_tensor_of_a_wrong_form_is_told() -> None:
    with (
        LLM(speculative_algorithm=Reading(wrong=[1]), device="cpu") as llm,
        pytest.raises(PluginError, match=r"build_draft_input\(\) gave host 'tokens'"),
    ):
        llm.generate(PROMPTS, PARAMS)
