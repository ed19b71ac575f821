"""What the draft model has computed arrives: the proposals are those of a single process."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch

from conftest import TEXT, Pair, Plain
from specplug import LLM, Batch, Draft, DraftInput, Runtime, SamplingParams, hookimpl
from specplug.registry import Registry
from specplug.spec.batch import ForwardMode

PROMPT = TEXT[:110]
PARAMS = SamplingParams(max_tokens=8, temperature=0.7, seed=1)
Proposals = dict[tuple[int, ...], list[tuple[int, int]]]
NAMES = [name for name in Registry().names() if name != "NONE"]
STATEFUL = [name for name in NAMES if name not in ("NGRAM", "DFLASH")]


def branches(name: str) -> bool:
    return Registry().select(name).info.capabilities.branching


def watched(name: str) -> Any:
    """The algorithm, with ``proposals``: prompt and root's position -> the nodes behind it, and
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
    with LLM(dtype="float64", speculative_algorithm=plugin, **options) as llm:
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
    engine = llm._engine
    node = engine.scheduler.cache.match(prompt, size)
    assert node.depth == size, "pages of 1 are positions"
    slots = [page.page for page in node.path()][::-1]
    return [pool[:, :, slots] for pool in engine._runtime.pools]


@pytest.mark.parametrize("name", [name for name in NAMES if name != "NGRAM"])
def test_the_kv_is_that_of_a_single_process(plain: Plain, name: str) -> None:
    """Of every layer of the target and of the draft model, where chunks end in the prompt's last
    tokens too: what is not final there must not be sent before it is."""
    options = {"page_size": 1, "chunked_prefill_size": 3, "max_total_tokens": 2048}
    whole = plain.ids(PROMPT)
    prompts = [whole[i : 12 + 2 * i] for i in range(3)]
    with (
        LLM(dtype="float64", speculative_algorithm=name, **options) as llm,
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


@pytest.mark.parametrize(("name", "decode", "prefill"), [("EAGLE", 1, 3), ("EAGLE3", 4, 2)])
def test_states_of_another_topk_are_left_where_they_are(
    plain: Plain, name: str, decode: int, prefill: int
) -> None:
    prompts = [plain.ids(PROMPT), plain.ids("import ")]
    llm = {"dtype": "float64", "speculative_algorithm": name, "max_total_tokens": 2048}
    with (
        LLM(
            disaggregation="decode",
            disaggregation_address="tcp://127.0.0.1:*",
            speculative_eagle_topk=decode,
            **llm,
        ) as decoding,
        LLM(
            disaggregation="prefill",
            disaggregation_address=decoding.effective_config["disaggregation_address"],
            speculative_eagle_topk=prefill,
            **llm,
        ) as prefilling,
    ):
        outputs = Pair(decoding, prefilling).generate(prompts, PARAMS)
        for prompt, output in zip(prompts, outputs, strict=True):
            assert output.token_ids == plain.output(prompt, PARAMS).token_ids
        assert decoding.stats()["stateless"] == 2


def received(llm: LLM, num_requests: int) -> Batch:
    """A batch of requests that came without anything, in rows of their own."""
    rows = torch.arange(1, num_requests + 1, device=llm._engine._runtime.device)
    requests = [llm.prepare([3, 4, 5 + i], PARAMS) for i in range(num_requests)]
    for request in requests:
        request.token_ids.append(7)
    return Batch(
        mode=ForwardMode.DECODE, requests=requests, rows=rows, seq_lens=torch.full_like(rows, 3)
    )


@pytest.mark.parametrize(
    ("name", "topk"),
    [(name, None) for name in [*NAMES, "NONE"]] + [(name, 3) for name in NAMES if branches(name)],
)
def test_an_empty_batch_and_one_without_states_have_the_same_form(
    name: str, topk: int | None
) -> None:
    """K states a request where the draft branches, S of them where there is one layer a step."""
    with LLM(dtype="float64", speculative_algorithm=name, speculative_eagle_topk=topk) as llm:
        steps, hidden = llm.spec_config.num_steps, llm._engine._runtime.hidden_size
        forms = {}
        for size in (0, 2):
            with torch.inference_mode():
                batch = received(llm, size)
                llm._engine._runtime.max_slots = 4
                draft_input = llm._hooks.build_disagg_draft_input(
                    runtime=llm._engine._runtime,
                    batch=batch,
                    last_tokens=torch.full_like(batch.rows, 7),
                    future_map=llm._engine._steps._future_map,
                )
            assert draft_input.bonus_tokens.shape == (size,)
            state = {n: t for n, t in draft_input.state.items() if t is not None}
            assert all(len(tensor) == size for tensor in state.values())
            forms[size] = {n: (tuple(t.shape[1:]), t.dtype) for n, t in state.items()}
    assert forms[0] == forms[2]
    shapes = {n: shape for n, (shape, _) in forms[0].items()}
    if name in ("EAGLE", "EAGLE3"):
        assert shapes.keys() == {"hidden_states", "tokens", "scores"}
        assert shapes["tokens"] == shapes["scores"] == (topk or 1,)
    elif name == "MULTI_LAYER_EAGLE":
        assert shapes["hidden_states"] == ((steps - 1) * hidden,)
        assert (shapes["tokens"], shapes["drafts"]) == ((steps - 1,), (steps,))
    else:
        assert shapes == {}


def test_a_mixture_of_instances_serves_one_batch(plain: Plain) -> None:
    """Requests with a draft state and without one decode together."""
    prompts = [plain.ids(PROMPT[: 60 + 20 * i]) for i in range(4)]
    with Pair.open({}, decode="EAGLE3", prefill="EAGLE3") as pair:
        address = pair.decode.effective_config["disaggregation_address"]
        with LLM(
            dtype="float64", disaggregation="prefill", disaggregation_address=address
        ) as other:
            while pair.decode.stats()["prefill_instances"] < 2:
                for llm in (other, pair.prefill, pair.decode):
                    llm.step()
            step: Callable[..., None] = pair.prefill._step_prefill

            def both(*, wait: bool) -> None:
                other._step_prefill(wait=wait)
                step(wait=wait)

            names = [pair.decode.add_request(prompt, PARAMS) for prompt in prompts]
            outputs = {}
            while pair.decode.has_unfinished_requests:
                both(wait=False)
                outputs.update({o.request_id: o for o in pair.decode.step() if o.finished})
            for prompt, name in zip(prompts, names, strict=True):
                assert outputs[name].token_ids == plain.output(prompt, PARAMS).token_ids
            assert pair.decode.stats()["stateless"] == 2
