"""vLLM's adaptive verification cuts our drafts by our scores, and no token changes.

vLLM refuses it where it records no graphs of the target's passes, as on a CPU. These refusals are
lifted here, and the costs of a step are given instead of timed; what cuts is vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest
import torch
import vllm
from hosted_engines import FORMS, Engines, Hosted
from test_identity import seeded
from test_pauses import drafts_of
from torch import Tensor
from vllm.config import VllmConfig
from vllm.v1.worker.gpu import model_runner

from specplug import Draft
from specplug_vllm.v2 import names as v2_names
from specplug_vllm.v2.confidences import confidences
from specplug_vllm.v2.step_hooks import StepHooks
from specplug_vllm.versions import has_runner_v2_of_0_25

if has_runner_v2_of_0_25():
    pytest.skip("vLLM 0.25.0 has no adaptive verification", allow_module_level=True)

from vllm.v1.worker.gpu.spec_decode import adaptive_verification

CHAINS = ["DSPARK", "EAGLE3", "DFLASH", "STANDALONE"]
SMALL_BLOCKS = {"block_size": 32, "enable_prefix_caching": True, "num_gpu_blocks_override": 96}
MIDDLE, CHEAP, FREE, DEAR = [1.3, 1.6], [1.01, 1.02], [1.0, 1.0], [1.0, 1e9]
"""What a step of one node costs, and one of two; each more node costs as much more again."""

Adaptive = Callable[..., Hosted]


@pytest.fixture
def adaptive(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> Adaptive:
    """Engines that verify adaptively, by algorithm and what steps cost."""
    given = {
        (VllmConfig, "_validate_adaptive_verification"): lambda config: None,
        (adaptive_verification, "get_varlen_cudagraph_unsupported_backend"): lambda *_, **__: None,
        (model_runner, "resolve_adaptive_cudagraph_mode"): lambda mode, **_: mode,
        (adaptive_verification, "_assign_draft_token_budget_compiled"): (
            adaptive_verification._assign_draft_token_budget
        ),
    }
    for (owner, name), value in given.items():
        monkeypatch.setattr(owner, name, value)

    def made(algorithm: str, costs: list[float] = MIDDLE, **more: Any) -> Hosted:
        hosted = engines(algorithm, FORMS.get(algorithm, 5), adaptive=True, **more)
        hosted.runner.adaptive_verification.set_cost_curves([(1, 0.1)], [*enumerate(costs, 1)])
        return hosted

    return made


@attrs.frozen
class Cuts:
    """What vLLM did in steps with drafts: of each the drafted tokens, and those of each request
    that it verified."""

    drafted: list[int] = attrs.field(factory=list)
    verified: list[list[int]] = attrs.field(factory=list)

    @classmethod
    def of(cls, hosted: Hosted, monkeypatch: pytest.MonkeyPatch) -> Cuts:
        """Return those from now on."""
        cuts, manager = cls(), hosted.runner.adaptive_verification
        reallocate = manager.reallocate_drafts

        def noted(*args: Any) -> Any:
            drafts, *_ = manager._batch_budget
            made = reallocate(*args)
            cuts.drafted.append(sum(drafts.values()))
            cuts.verified.append((made[0].diff() - 1).tolist())
            return made

        monkeypatch.setattr(manager, "reallocate_drafts", noted)
        return cuts

    def check(self) -> None:
        """Raise an error unless drafts were cut, not wholly, and not of all requests alike."""
        sums = [sum(verified) for verified in self.verified]
        assert sum(0 < kept < drafted for kept, drafted in zip(sums, self.drafted, strict=True)) > 4
        assert any(len({*verified}) > 1 for verified in self.verified)


@pytest.mark.parametrize("algorithm", CHAINS)
def test_greedy_tokens_are_plain_where_drafts_are_cut(
    algorithm: str,
    engines: Engines,
    adaptive: Adaptive,
    prompts: list[str],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = adaptive(algorithm)
    found = []
    for each in (hosted, engines(algorithm, FORMS[algorithm])):
        with monkeypatch.context() as patch:
            cuts = Cuts.of(hosted, patch)
            found.append(drafts_of(patch))
            assert each.generate(prompts, max_tokens=32) == plain
        if each is hosted:
            cuts.check()
        assert each.drafter.undrafted == 0
    # What was committed of a cut draft is fed as that of a whole one: the next ones are as good.
    cut, whole = found
    both = cut.keys() & whole.keys()
    assert len(both) > 10
    assert {root: cut[root] for root in both} == {root: whole[root] for root in both}


@pytest.mark.parametrize("algorithm", CHAINS)
def test_seeded_tokens_are_plain_where_drafts_are_cut(
    algorithm: str,
    engines: Engines,
    adaptive: Adaptive,
    prompts: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected = seeded(engines(), prompts, temperature=0.8, top_k=20)
    hosted = adaptive(algorithm)
    cuts = Cuts.of(hosted, monkeypatch)
    assert seeded(hosted, prompts, temperature=0.8, top_k=20) == expected
    assert hosted.drafter.undrafted == 0
    cuts.check()


def test_chunks_and_prefix_hits_beside_cut_drafts_are_fed_right(
    engines: Engines, adaptive: Adaptive, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts that begin one after the other, with chunks beside drafts, and all but one token of
    a prompt in the cache: where rows begin is known on the device alone."""
    params = vllm.SamplingParams(max_tokens=24, temperature=0)
    found = []
    for make in (adaptive, engines):
        hosted = make("EAGLE3", **SMALL_BLOCKS, max_num_batched_tokens=48)
        engine, tokens = hosted.llm.llm_engine, {}
        aligned = engine.get_tokenizer().encode(prompts[0])[:33]
        with monkeypatch.context() as patch:
            found.append(drafts_of(patch))
            given = [*prompts, {"prompt_token_ids": aligned}, {"prompt_token_ids": aligned}]
            for index, prompt in enumerate(given):
                engine.add_request(str(index), prompt, params)
                for _ in range(3):
                    tokens |= {each.request_id: each.outputs[0].token_ids for each in engine.step()}
            while engine.has_unfinished_requests():
                tokens |= {each.request_id: each.outputs[0].token_ids for each in engine.step()}
        expected = engines().generate(given, max_tokens=24)
        assert [list(tokens[str(index)]) for index in range(len(given))] == expected
        assert hosted.drafter.undrafted == 0
    cut, whole = found
    both = cut.keys() & whole.keys()
    assert len(both) > 20
    assert {root: cut[root] for root in both} == {root: whole[root] for root in both}


@pytest.mark.parametrize("algorithm", [*CHAINS, "NGRAM"])
def test_vllm_is_told_the_scores(
    algorithm: str, adaptive: Adaptive, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = adaptive(algorithm)
    manager, draft, record = (
        hosted.runner.adaptive_verification,
        StepHooks.draft,
        hosted.runner.adaptive_verification.record_confidences,
    )
    made: list[tuple[np.ndarray, Draft]] = []
    told: list[Tensor] = []

    def drafted(self: Any, step: Any, chosen: np.ndarray, wanted: int) -> Draft:
        made.append((chosen, draft(self, step, chosen, wanted).copy()))
        return made[-1][1]

    def recorded(probabilities: Tensor, batch: Any) -> None:
        record(probabilities, batch)
        told.append(probabilities[: batch.num_reqs].clone())
        assert torch.equal(manager._confidence_probs[batch.idx_mapping], told[-1])

    monkeypatch.setattr(StepHooks, "draft", drafted)
    monkeypatch.setattr(manager, "record_confidences", recorded)
    hosted.generate(prompts[:2], max_tokens=24)
    assert len(told) == len(made) > 4
    for (chosen, chain), found in zip(made, told, strict=True):
        assert chain.scores is not None or chain.width == 1  # NGRAM may know nothing
        for row, index in enumerate(chosen.tolist()):
            count = chain.width if chain.widths is None else chain.widths[row]
            if chain.scores is not None:
                assert torch.equal(found[index, : count - 1], chain.scores[row, 1:count].exp())
            assert not found[index, count - 1 :].any()
    assert any(0 < float(found.max()) < 1 for found in told)


@pytest.mark.parametrize(("costs", "share"), [(FREE, 1.0), (DEAR, 0.0)], ids=["free", "dear"])
def test_cost_of_a_node_says_how_much_is_verified(
    costs: list[float],
    share: float,
    adaptive: Adaptive,
    prompts: list[str],
    plain: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    hosted = adaptive("EAGLE3", costs)
    cuts = Cuts.of(hosted, monkeypatch)
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert [sum(each) for each in cuts.verified] == [share * drafted for drafted in cuts.drafted]
    assert hosted.drafter.undrafted == 0


def test_algorithm_without_scores_is_not_cut_and_told_of_once(
    adaptive: Adaptive,
    third_party: Any,
    prompts: list[str],
    plain: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    hosted = adaptive("ECHO", CHEAP)
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert hosted.drafter.undrafted == 0
    told = [each.getMessage() for each in caplog.records if "no scores" in each.getMessage()]
    assert {*told} == {
        "ECHO gives no scores: adaptive verification takes each of its tokens for one that is "
        "accepted."
    }


def test_logprobs_are_plain_where_drafts_are_cut(
    engines: Engines, adaptive: Adaptive, prompts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    params = vllm.SamplingParams(max_tokens=16, temperature=0, logprobs=2)
    hosted, found = adaptive("EAGLE3"), []
    cuts = Cuts.of(hosted, monkeypatch)
    for each in (hosted, engines()):
        outputs = each.llm.generate(prompts, params, use_tqdm=False)
        found.append(
            [
                {token: round(one.logprob, 3) for token, one in after.items()}
                for output in outputs
                for after in output.outputs[0].logprobs
            ]
        )
    assert found[0] == found[1]
    assert sum(map(sum, cuts.verified)) < sum(cuts.drafted)


def test_draft_that_is_narrower_is_worth_nothing_after_its_end() -> None:
    scores = torch.tensor([[0.0, -1.0, -2.0, -3.0], [0.0, -0.5, -0.5, -0.5]])
    draft = Draft.chain(torch.zeros(2, 4, dtype=torch.int64), (3, 1), scores=scores)
    expected = torch.tensor([[-1.0, -2.0], [-9.0, -9.0]]).exp()
    expected[1] = 0.0
    found = confidences(draft)
    assert torch.equal(found[:, :2], expected)
    assert not found[:, 2].any()


def test_scores_out_of_range_become_probabilities() -> None:
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    draft = Draft.chain(tokens)
    assert confidences(draft).tolist() == [[1.0] * 5]
    inf, nan = float("inf"), float("nan")
    draft.scores = torch.tensor([[0.0, -inf, nan, 0.5, -1e4, inf]])
    assert confidences(draft).tolist() == [[0.0, 1.0, 1.0, 0.0, 1.0]]


def test_drafts_take_their_time_where_vllm_measures(
    adaptive: Adaptive, prompts: list[str], plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM weighs what drafts cost, which it times in dummy steps."""
    hosted = adaptive("DSPARK")
    drafter, sizes = hosted.drafter, []
    draft = StepHooks.draft

    def noted(self: Any, step: Any, chosen: np.ndarray, wanted: int) -> Draft:
        assert step.is_warm_up
        sizes.append((len(chosen), bool(step.prefills.any())))
        return draft(self, step, chosen, wanted)

    def dummy_step(size: int) -> Tensor:
        made: Tensor = drafter.propose(
            SimpleNamespace(num_reqs=size), *(None,) * 10, dummy_run=True
        )
        return made

    with monkeypatch.context() as patch:
        patch.setattr(StepHooks, "draft", noted)
        assert dummy_step(3).shape == (3, FORMS["DSPARK"])
        assert sizes == []  # nobody measures
        patch.setattr(v2_names, "is_timed", lambda runner: True)
        for size in (2, 2, 3):
            dummy_step(size)
    assert sizes == [(2, True), (2, False), (2, False), (3, True), (3, False)]
    assert hosted.generate(prompts, max_tokens=32) == plain
    assert drafter.undrafted == 0


def test_draft_when_faster_is_refused(adaptive: Adaptive) -> None:
    with pytest.raises(Exception, match="with enable_adaptive_verification drafts in every step"):
        adaptive("EAGLE3", settings={"draft_when": "faster"})
