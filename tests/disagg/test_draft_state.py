"""What the draft model has computed arrives: the proposals are those of a single process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from shallow_target import shallow_target

from conftest import TEXT, Pair, Plain
from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Runtime,
    SamplingParams,
    StateTensor,
    hookimpl,
)
from specplug.engine.step_values import ReadOnlyRequest
from specplug.registry import Registry
from specplug.speculative.hook_order import ForwardMode
from specplug.speculative.plain import Plain as NoDraft

PROMPT = TEXT[:110]
PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
Proposals = dict[tuple[int, ...], list[tuple[int, int]]]
NAMES = [name for name in Registry().names() if name != "NONE"]
STATEFUL = [name for name in NAMES if name not in ("NGRAM", "DFLASH", "DSPARK")]


@pytest.fixture(scope="module")
def plain(shallow_plain: Plain) -> Plain:
    return shallow_plain


def branches(name: str) -> bool:
    return Registry().select(name).info.capabilities.branching


def watched(name: str) -> Any:
    """The algorithm, with ``proposals``: prompt and root's position -> the nodes after it, and
    ``states``: the shapes of each draft input of received requests."""
    kind: Any = type(Registry().select(name).plugin)

    class Watched(kind):  # type: ignore[misc]
        proposals: Proposals

        @hookimpl
        def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
            draft: Draft = super().propose(runtime, batch, draft_input)
            parents = draft.parents.tolist() if draft.parents is not None else None
            widths = draft.widths or (draft.width,) * batch.size
            for b, request in enumerate(batch.requests):
                nodes = draft.tokens[b, : widths[b]].tolist()
                above = parents[b] if parents is not None else range(-1, len(nodes) - 1)
                place = (*request.prompt_token_ids, int(batch.seq_lens[b]))
                self.proposals[place] = list(zip(nodes, above, strict=False))
            return draft

    plugin = Watched()
    plugin.proposals = {}
    return plugin


def alone(name: str, prompts: list[Any], options: dict[str, Any]) -> Proposals:
    """What is proposed in a single process, for one prompt after the other."""
    plugin = watched(name)
    with LLM(**shallow_target().options(plugin), dtype="float64", **options) as llm:
        for prompt in prompts:
            llm.generate([prompt], PARAMS)
    proposals: Proposals = plugin.proposals
    return proposals


CHUNKS = [(3, 2), (16, None)]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("page_size", "chunk"), CHUNKS, ids=lambda value: str(value))
def test_the_proposals_are_those_of_a_single_process(
    plain: Plain, name: str, page_size: int, chunk: int | None
) -> None:
    """At every position, from the first on; again when the prompt, or a part of it, is cached."""
    options: dict[str, Any] = {
        "page_size": page_size,
        "chunked_prefill_size": chunk,
        "speculative_eagle_topk": 3 if branches(name) and page_size == 3 else None,
        "disable_overlap_schedule": page_size == 16,
    }
    whole = plain.ids(PROMPT)
    prompts = [whole, (*whole[:33], 77, 78), whole]
    expected = alone(name, prompts, {**options, "disable_radix_cache": name != "NGRAM"})
    plugin = watched(name)
    with Pair.open(options, decode=plugin, prefill=name) as pair:
        for number, prompt in enumerate(prompts):
            (output,) = pair.generate([prompt], PARAMS)
            assert output.token_ids == plain.output(prompt, PARAMS).token_ids
            assert bool(output.num_cached_tokens) == (number > 0)
        stats = pair.decode.stats()
    assert stats["received"] == 3
    assert stats["stateless"] == stats["lost_prefixes"] == 0
    assert stats["prompt_tokens"] == 0, "nothing is prefilled here"
    assert plugin.proposals.keys() == expected.keys()
    wrong = {p[-1]: (n, expected[p]) for p, n in plugin.proposals.items() if n != expected[p]}
    assert not wrong


def pools_at(llm: LLM, prompt: tuple[int, ...], size: int) -> list[torch.Tensor]:
    """What each KV pool has cached for the first positions of a prompt that has ended."""
    engine = llm.engine
    node = engine.scheduler.cache.match(prompt, size)
    assert node.depth == size, "pages of 1 are positions"
    slots = [page.page for page in node.path()][::-1]
    return [pool[:, :, slots] for pool in engine.steps.kv.tensors]


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("NGRAM", "SPARSE_SELF")])
def test_the_kv_is_that_of_a_single_process(plain: Plain, name: str) -> None:
    """Of every layer of the target and of the draft model, where chunks end in the prompt's last
    tokens too: what is not final there must not be sent before it is."""
    options = {"page_size": 1, "chunked_prefill_size": 3, "max_total_tokens": 2048}
    whole = plain.ids(PROMPT)
    prompts = [whole[i : 12 + 2 * i] for i in range(3)]
    with (
        LLM(**shallow_target().options(name), dtype="float64", **options) as llm,
        Pair.open(options, decode=name, prefill=name) as pair,
    ):
        ahead = llm.spec_config.num_steps + 1  # what names a page in the cache
        for prompt in prompts:
            (output,) = llm.generate([prompt], PARAMS)
            assert pair.generate([prompt], PARAMS)[0].token_ids == output.token_ids
            text = (*prompt, *output.token_ids[:ahead])
            ours, theirs = (pools_at(e, text, len(prompt)) for e in (llm, pair.decode))
            assert len(ours) == 2
            for a, b in zip(ours, theirs, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", NAMES)
def test_a_prefill_without_the_draft_is_decoded_all_the_same(
    plain: Plain, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Counted, and told once; the draft's keys are zeros then, and not another request's."""
    prompts = [plain.ids(PROMPT), plain.ids("import "), (5,)]
    with (
        caplog.at_level(logging.WARNING),
        Pair.open(
            {"page_size": 4, "chunked_prefill_size": 16}, decode=name, prefill="NONE"
        ) as pair,
    ):
        for _ in range(2):
            for prompt, output in zip(prompts, pair.generate(prompts, PARAMS), strict=True):
                assert output.token_ids == plain.output(prompt, PARAMS).token_ids
        stats = pair.decode.stats()
    carries = name in STATEFUL
    assert stats["received"] == 6
    assert stats["stateless"] == (6 if carries else 0)
    told = [r.message for r in caplog.records if "without a draft state:" in r.message]
    assert len(told) == carries
    assert [r for r in caplog.records if "a prefill instance has the draft 'NONE" in r.message]


STEPS, TOPK, NODES = (
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
OTHER_SETTINGS: dict[str, tuple[str, dict[str, int], dict[str, int]]] = {
    "fewer branches": ("EAGLE", {TOPK: 1}, {TOPK: 3}),
    "more branches": ("EAGLE3", {TOPK: 3, NODES: 6}, {TOPK: 1}),
    "more steps": ("EAGLE3", {STEPS: 4}, {STEPS: 2, TOPK: 2}),
    "fewer candidates": ("MULTI_LAYER_EAGLE", {STEPS: 4, TOPK: 2}, {STEPS: 5, TOPK: 3}),
    "a chain of a tree's": ("MULTI_LAYER_EAGLE", {TOPK: 1}, {TOPK: 3}),
    "fewer layers": ("MULTI_LAYER_EAGLE", {STEPS: 3}, {STEPS: 5}),
    "a smaller block": ("DFLASH", {STEPS: 3, NODES: 4}, {STEPS: 7, NODES: 8}),
}


def proposals_apart(
    plain: Plain, name: str, decode: dict[str, int], prefill: dict[str, int]
) -> tuple[Proposals, Proposals]:
    """What is proposed under the settings of a decode instance: by it, for what an instance with
    others has prefilled, and in a single process."""
    options: dict[str, Any] = {"page_size": 4, "chunked_prefill_size": 16, **decode}
    prompts = [plain.ids(PROMPT), plain.ids("import "), (5,)]
    expected = alone(name, prompts, options)
    plugin = watched(name)
    with Pair.open(options, decode=plugin, prefill=name, **prefill) as pair:
        for prompt, output in zip(prompts, pair.generate(prompts, PARAMS), strict=True):
            assert output.token_ids == plain.output(prompt, PARAMS).token_ids
        assert pair.decode.stats()["received"] == 3
        assert pair.decode.stats()["stateless"] == 0
    return plugin.proposals, expected


@pytest.mark.parametrize("case", OTHER_SETTINGS)
def test_another_setting_of_the_prefill_changes_no_proposal(plain: Plain, case: str) -> None:
    """Only what it has more of is left out; branches that it has not kept are chosen again."""
    ours, expected = proposals_apart(plain, *OTHER_SETTINGS[case])
    assert ours == expected


def test_layers_that_the_prefill_lacks_change_no_others(plain: Plain) -> None:
    """The first three tokens of each proposal are those of a single process; the next are guessed
    without what two more layers have seen of the prompt."""
    ours, expected = proposals_apart(plain, "MULTI_LAYER_EAGLE", {STEPS: 5}, {STEPS: 3})
    shared = ours.keys() & expected.keys()
    assert len(shared) > 5
    for place in shared:
        assert len(ours[place]) == 6
        assert ours[place][:4] == expected[place][:4]


def test_candidates_that_the_prefill_lacks_change_no_others(plain: Plain) -> None:
    """The chain of each tree is that of a single process; what hangs beside it in the first one is
    any token, and from then on the same."""
    name, shape = "MULTI_LAYER_EAGLE", {STEPS: 3, TOPK: 3, NODES: 10}
    ours, expected = proposals_apart(plain, name, shape, {STEPS: 3, NODES: 4})
    shared = ours.keys() & expected.keys()
    assert len(shared) > 5
    assert sum(sorted(ours[place]) == sorted(expected[place]) for place in shared) > 2
    for place in shared:
        assert spine(ours[place]) == spine(expected[place])


def spine(nodes: list[tuple[int, int]]) -> list[int]:
    """The tokens of the nodes that have children."""
    above = [parent for _, parent in nodes]
    return [token for at, (token, _) in enumerate(nodes) if at in above]


def test_the_kv_that_came_is_not_written_again(plain: Plain) -> None:
    """At positions whose hidden states did not come: the keys of three layers are those of a single
    process with five, and stay so."""
    options: dict[str, Any] = {"page_size": 1, "chunked_prefill_size": 7, STEPS: 5}
    prompt = plain.ids(PROMPT)[:20]
    name = "MULTI_LAYER_EAGLE"
    with (
        LLM(
            **shallow_target().options(name), dtype="float64", max_total_tokens=512, **options
        ) as llm,
        Pair.open(options, decode=name, prefill=name, **{STEPS: 3}) as pair,
    ):
        (output,) = llm.generate([prompt], PARAMS)
        assert pair.generate([prompt], PARAMS)[0].token_ids == output.token_ids
        text = (*prompt, *output.token_ids[:6])
        ours, theirs = (pools_at(e, text, len(prompt))[1][:3] for e in (llm, pair.decode))
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-9)


class Declaring(NoDraft):
    """NONE with a state that it reads, and with the required hooks alone."""

    def __init__(self, *, declares: bool = True) -> None:
        self.seen: list[tuple[Any, ...]] = []
        self._declares = declares

    @hookimpl
    def create_worker(self, runtime: Runtime) -> Declaring:
        self._features = runtime.capture_lm_head_input()
        self._width = runtime.hidden_size
        self._dtype = runtime.dtype
        return self

    def state_spec(self) -> dict[str, StateTensor]:
        if not self._declares:
            return {}
        count = StateTensor((), torch.int64)
        return {"feature": StateTensor((self._width,), self._dtype), "count": count}

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> DraftInput:
        feature = target_output.per_node[self._features][target_output.last_rows]
        state = {"feature": feature, "count": torch.full_like(batch.req_indices, 4)}
        return DraftInput(bonus_tokens=target_output.bonus_tokens, state=state)

    @hookimpl
    def propose(self, runtime: Runtime, batch: Batch, draft_input: DraftInput) -> Draft:
        assert draft_input["feature"].shape == (batch.size, self._width)
        counts, known = draft_input["count"].tolist(), draft_input["feature"].any(1).tolist()
        self.seen += zip(counts, known, strict=True)
        return Draft.chain(draft_input.bonus_tokens.unsqueeze(1))


def test_a_declared_state_is_zeros_where_none_came(plain: Plain) -> None:
    """By the core's own build_disagg_draft_input; from the first step on it is the algorithm's."""
    prompts = [plain.ids("import "), plain.ids("class ")]
    algorithm = Declaring()
    with Pair.open({}, decode=algorithm, prefill="NONE") as pair:
        for prompt, output in zip(prompts, pair.generate(prompts, PARAMS), strict=True):
            assert output.error is None
            assert output.token_ids == plain.output(prompt, PARAMS).token_ids
        assert pair.decode.stats()["stateless"] == 2
    assert algorithm.seen.count((0, False)) == 2
    assert set(algorithm.seen) == {(0, False), (4, True)}


def test_a_state_nobody_declared_is_told_by_its_name(plain: Plain) -> None:
    with Pair.open({}, decode=Declaring(declares=False), prefill="NONE") as pair:
        name = pair.decode.add_request(plain.ids("import "), PARAMS)
        outputs: dict[str, Any] = {}
        while name not in outputs:
            pair.prefill.prefill_loop.step(wait=False)
            with suppress(Exception):
                outputs.update({o.request_id: o for o in pair.decode.step() if o.finished})
    assert "'feature' is absent" in (outputs[name].error or "")
    assert "state_spec()" in (outputs[name].error or "")


def received(llm: LLM, num_requests: int) -> Batch:
    """A batch of requests that came without anything, in rows of their own."""
    rows = torch.arange(1, num_requests + 1, device=llm.engine.runtime.device)
    requests = [llm.prepare([3, 4, 5 + i], PARAMS)[0] for i in range(num_requests)]
    for request in requests:
        request.token_ids.append(7)
    return Batch(
        mode=ForwardMode.DECODE,
        requests=[ReadOnlyRequest(request) for request in requests],
        req_indices=rows,
        seq_lens=torch.full_like(rows, 3),
    )


@pytest.mark.parametrize(
    ("name", "topk"),
    [(name, None) for name in [*NAMES, "NONE"]] + [(name, 3) for name in NAMES if branches(name)],
)
def test_empty_and_stateless_batches_have_the_same_form(name: str, topk: int | None) -> None:
    """K states a request where the draft branches, S of them where there is one layer a step."""
    target = shallow_target().options(name)
    with LLM(**target, dtype="float64", speculative_eagle_topk=topk) as llm:
        steps, hidden = llm.spec_config.num_steps, llm.engine.runtime.hidden_size
        forms = {}
        for size in (0, 2):
            with torch.inference_mode():
                batch = received(llm, size)
                llm.engine.steps.kv.begin_step(4)
                draft_input = llm.engine.hooks.build_disagg_draft_input(
                    runtime=llm.engine.runtime,
                    batch=batch,
                    last_tokens=torch.full_like(batch.req_indices, 7),
                    future_map=llm.engine.hooks.create_future_map(llm.engine.runtime),
                )
            assert draft_input.bonus_tokens.shape == (size,)
            state = {n: t for n, t in draft_input.state.items() if t is not None}
            assert all(len(tensor) == size for tensor in state.values())
            forms[size] = {n: (tuple(t.shape[1:]), t.dtype) for n, t in state.items()}
    assert forms[0] == forms[2]
    shapes = {n: shape for n, (shape, _) in forms[0].items()}
    if name in ("EAGLE", "EAGLE3", "PEAGLE"):
        assert shapes.keys() == {"hidden_states", "tokens", "scores"}
        assert shapes["tokens"] == shapes["scores"] == (topk or 1,)
    elif name == "MULTI_LAYER_EAGLE":
        assert shapes["hidden_states"] == (steps - 1, hidden)
        assert shapes["tokens"] == (steps - 1,)
        ranks = ["", *(f"_{rank}" for rank in range(1, topk or 1))]
        named = {f"{name}{rank}" for name in ("drafts", "scores") for rank in ranks}
        assert {name for name, shape in shapes.items() if shape == (steps,)} == named
    elif name == "STANDALONE":
        assert shapes == {"own_tokens": (steps + 1,), "count": ()}
    elif name == "SPARSE_SELF":
        assert shapes.keys() == {"pages"}
    else:
        assert shapes == {}


def test_a_mixture_of_instances_serves_one_batch(plain: Plain) -> None:
    """Requests with a draft state and without one decode together."""
    prompts = [plain.ids(PROMPT[: 60 + 20 * i]) for i in range(4)]
    with Pair.open({}, decode="EAGLE3", prefill="EAGLE3") as pair:
        address = pair.decode.effective_config["disaggregation_address"]
        with LLM(
            **shallow_target().options("NONE"),
            dtype="float64",
            disaggregation="prefill",
            disaggregation_address=address,
        ) as other:
            while pair.decode.stats()["prefill_instances"] < 2:
                for llm in (other, pair.prefill, pair.decode):
                    llm.step()
            step: Callable[..., None] = pair.prefill.prefill_loop.step

            def both(*, wait: bool) -> None:
                other.prefill_loop.step(wait=wait)
                step(wait=wait)

            names = [pair.decode.add_request(prompt, PARAMS) for prompt in prompts]
            outputs = {}
            while pair.decode.has_unfinished_requests:
                both(wait=False)
                outputs.update({o.request_id: o for o in pair.decode.step() if o.finished})
            for prompt, name in zip(prompts, names, strict=True):
                assert outputs[name].token_ids == plain.output(prompt, PARAMS).token_ids
            assert pair.decode.stats()["stateless"] == 2
