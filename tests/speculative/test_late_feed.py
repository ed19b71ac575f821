"""Late feeding: what does not draft is not fed until it does, and drafts as if it had been."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Collection, Iterator
from typing import Any

import pytest
import torch
from recorded_operations import record_operations

from specplug import (
    LLM,
    Batch,
    CommittedOutput,
    Draft,
    DraftChoices,
    DraftInput,
    DraftPlan,
    FutureMap,
    Runtime,
    SamplingParams,
    hookimpl,
)
from specplug.engine.engine_runtime import EngineRuntime
from specplug.speculative import feature_drafter, graph_recorder, part
from specplug.speculative.graph_recorder import GraphRecorder
from specplug.speculative.graph_runner import GraphRunner
from specplug.speculative.hook_order import ForwardMode
from specplug.speculative.late_feed import LateFeed, single_rows
from specplug.speculative.part import Part
from specplug.speculative.pass_arguments import BatchPadding
from specplug_eagle3 import Eagle3

TEXT = "def area(width, height):\n    return width * height\n\n\ndef "
PROMPTS = [TEXT, TEXT + "area(width, height):\n", "import os\nimport ", "class Shape:\n    def "]
PARAMS = [
    SamplingParams(max_tokens=70, ignore_eos=True),
    SamplingParams(max_tokens=56, temperature=0.7, seed=5, ignore_eos=True),
    SamplingParams(max_tokens=64, ignore_eos=True),
    SamplingParams(max_tokens=40, temperature=1.0, top_k=20, seed=7, ignore_eos=True),
]
SMALL: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float64",
    "max_total_tokens": 2048,
    "draft_choice": "first",
}


class Turns:
    """Has algorithms draft by turns of random lengths, nobody most of the time, and keeps what they
    draft."""

    def __init__(
        self, seed: int = 0, *, alike: bool = False, as_foreseen: int | None = None
    ) -> None:
        self.random = random.Random(seed)
        self.alike, self.as_foreseen = alike, as_foreseen
        self.left: dict[str, tuple[int, int]] = {}
        self.drafts: list[tuple[str, list[int]]] = []

    @hookimpl
    def plan_drafts(self, batch: Batch, choices: DraftChoices) -> DraftPlan:
        names = [request.request_id for request in batch.requests]
        who = tuple(self._turn("" if self.alike else name, len(choices.names)) for name in names)
        most = choices.most_nodes
        return DraftPlan(who=who, most_nodes=most, as_foreseen=self.as_foreseen)

    def _turn(self, name: str, count: int) -> int:
        who, left = self.left.get(name, (-1, 0))
        if not left:
            who = self.random.choice([*range(-1, count)])
            left = self.random.choice([1, 2, 3, 6 if who >= 0 else 40])
        self.left[name] = who, left - 1
        return who

    @hookimpl(wrapper=True)
    def propose(self, runtime: Runtime, batch: Batch) -> Iterator[None]:
        draft: Draft = yield  # type: ignore[misc]
        if not batch.is_warm_up:
            widths = draft.widths or (draft.width,) * batch.size
            for request, tokens, width in zip(
                batch.requests, draft.tokens.tolist(), widths, strict=True
            ):
                self.drafts.append((request.request_id, tokens[:width]))
        return draft  # type: ignore[return-value]


def drafts(algorithm: str, params: Any = PARAMS, **settings: Any) -> tuple[Turns, list[Any]]:
    own = {name: settings.pop(name) for name in ("alike", "as_foreseen") if name in settings}
    turns = Turns(**own)
    given = {**SMALL, **settings, "extensions": [turns]}
    with LLM(speculative_algorithm=algorithm, **given) as llm:
        outputs = llm.generate(PROMPTS, params)
        llm.check_pool()
    return turns, [output.token_ids for output in outputs]


def fed_while_known(monkeypatch: pytest.MonkeyPatch, *, ahead: bool) -> list[int]:
    """Return the batch sizes of what ``LateFeed.take_known`` yields from now on.

    Args:
        ahead: whether draft models are fed ahead, as beside a device, of few rows too.
    """
    known, take_known = list[int](), LateFeed.take_known

    def counted(self: LateFeed, batch: Batch, least: int) -> Any:
        for own, output in take_known(self, batch, least):
            known.append(own.size)
            yield own, output

    monkeypatch.setattr(LateFeed, "take_known", counted)
    if ahead:
        monkeypatch.setattr(part, "_BUSY_WITH_HOST", ())
        monkeypatch.setattr(part, "_WORTH_A_PASS", 3)
    return known


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {}),
        ("NGRAM,EAGLE3", {"disable_overlap_schedule": True}),
        ("NGRAM,EAGLE3", {"alike": True, "page_size": 16}),
        ("NGRAM:topk=3,tokens=9,EAGLE3:steps=3,topk=3,tokens=12", {"page_size": 4}),
        ("EAGLE,MULTI_LAYER_EAGLE", {"chunked_prefill_size": 8, "enable_mixed_chunk": True}),
        ("DFLASH,PEAGLE", {"page_size": 4}),
        ("DSPARK,EAGLE3+NGRAM", {}),
        ("NGRAM,EAGLE3", {"max_total_tokens": 224, "page_size": 4}),
    ],
)
def test_drafts_are_those_of_one_fed_at_each_step(
    algorithm: str, settings: dict[str, Any], ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if what has drafted is fed at the end of its step, as beside a device."""
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    skipped, skip = [], LateFeed.skip

    def counted(self: LateFeed, batch: Batch) -> None:
        skipped.append(batch.size)
        skip(self, batch)

    monkeypatch.setattr(LateFeed, "skip", counted)
    known = fed_while_known(monkeypatch, ahead=ahead)
    late, tokens = drafts(algorithm, **settings)
    if algorithm.startswith("NGRAM"):  # which a device waits for
        assert bool(known) == ahead
    if settings.get("alike"):  # one that goes on for all is fed as if it were alone
        assert ahead == bool(skipped), len(skipped)
    monkeypatch.setattr(Part, "feed_late", lambda self, name: iter(()))
    fed, expected = drafts(algorithm, **settings)
    assert tokens == expected
    assert late.drafts == fed.drafts
    assert sum(len(draft) > 1 for _, draft in late.drafts) > 10


@pytest.mark.parametrize("idle", [16, 0])
def test_what_drafts_now_and_then_is_fed_where_nobody_waits(
    idle: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the drafts of others are taken as they were foreseen."""
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    monkeypatch.setattr(part, "_IDLE", idle)
    known = fed_while_known(monkeypatch, ahead=True)
    late, tokens = drafts("NGRAM,EAGLE3", as_foreseen=64)
    assert bool(known) == bool(idle)
    monkeypatch.setattr(Part, "feed_late", lambda self, name: iter(()))
    fed, expected = drafts("NGRAM,EAGLE3", as_foreseen=64)
    assert tokens == expected
    assert late.drafts == fed.drafts
    assert sum(len(draft) > 1 for _, draft in late.drafts) > 10


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {}),
        ("NGRAM,EAGLE3", {"disable_overlap_schedule": True, "enable_mixed_chunk": True}),
        ("EAGLE:topk=3,tokens=9,MULTI_LAYER_EAGLE", {"alike": True, "page_size": 16}),
        ("DFLASH,PEAGLE", {"page_size": 4}),
        ("DSPARK,EAGLE3+NGRAM", {}),
        ("NGRAM,STANDALONE", {}),
    ],
)
def test_drafts_are_the_same_where_prompts_wait(
    algorithm: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specplug.debug.DEBUG", True)
    monkeypatch.setattr("specplug.speculative.part._IDLE", 1 << 30)
    fed, expected = drafts(algorithm, **settings)
    monkeypatch.setattr("specplug.speculative.part._IDLE", 0)
    prompts, add = Counter[bool](), LateFeed.add

    def counted(self: LateFeed, batch: Batch, output: CommittedOutput) -> bool:
        prompts[batch.is_prefill] += 1
        return add(self, batch, output)

    monkeypatch.setattr(LateFeed, "add", counted)
    late, tokens = drafts(algorithm, **settings)
    assert prompts[True]
    assert tokens == expected
    assert late.drafts == fed.drafts
    assert sum(len(draft) > 1 for _, draft in late.drafts) > 10


def test_first_prompts_of_a_run_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many steps a warm-up has in which an algorithm does not draft."""
    monkeypatch.setattr("specplug.speculative.part._IDLE", 1)
    added, add = [], LateFeed.add

    def counted(self: LateFeed, batch: Batch, output: CommittedOutput) -> bool:
        added.append(batch.mode)
        return add(self, batch, output)

    monkeypatch.setattr(LateFeed, "add", counted)
    with LLM(speculative_algorithm="EAGLE3,NGRAM", warm_up="on", **SMALL) as llm:
        llm.generate(PROMPTS, SamplingParams(max_tokens=1))
    assert not added


def assert_recorded_drafts_are_the_same(
    algorithm: str,
    settings: dict[str, Any],
    read: Collection[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Assert that drafts are, and tokens, where the passes of draft models are recorded, here as
    operations that are replayed.

    Args:
        read: counts what is read row by row: nothing where no pass is recorded.
    """

    def recorded(self: EngineRuntime, forward: Any) -> GraphRunner:
        padding = BatchPadding(length=lambda: self._kv.key_length)
        return GraphRunner(forward, padding, GraphRecorder())

    monkeypatch.setattr("specplug.debug.DEBUG", True)
    joined, tokens = drafts(algorithm, **settings)
    assert not read
    monkeypatch.setattr(EngineRuntime, "draft_pass", recorded)
    monkeypatch.setattr(graph_recorder, "record_graph", record_operations)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    single, expected = drafts(algorithm, **settings)
    assert tokens == expected
    assert joined.drafts == single.drafts


@pytest.mark.parametrize("keys", [1 << 18, 300, 0])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("EAGLE3", {}),
        ("EAGLE3", {"chunked_prefill_size": 8, "page_size": 4}),
        ("EAGLE", {"chunked_prefill_size": 8, "enable_mixed_chunk": True}),
    ],
)
def test_prompts_read_as_requests_give_the_same_drafts(
    algorithm: str, settings: dict[str, Any], keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row by row where passes are recorded, unless the rows have many keys before them."""
    read: list[int] = []

    def counted(batch: Batch, output: CommittedOutput, most: int) -> Any:
        ends = zip(batch.chunk_widths, batch.chunk_ends, strict=True)
        read.append(sum(width * end for width, end in ends))
        return single_rows(batch, output, most)

    monkeypatch.setattr(feature_drafter, "single_rows", counted)
    monkeypatch.setattr(feature_drafter, "_MOST_KEYS", keys)
    assert_recorded_drafts_are_the_same(algorithm, settings, read, monkeypatch)
    assert bool(read) == (keys > 300 or (keys > 0 and "chunked_prefill_size" in settings))
    assert max(read, default=0) <= keys


@pytest.mark.parametrize("most", [5, 256])
@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("NGRAM,EAGLE3", {"page_size": 4}),
        ("NGRAM,EAGLE3", {"alike": True}),
        ("EAGLE,EAGLE3:steps=3,topk=3,tokens=12", {}),
    ],
)
def test_rows_read_as_requests_give_the_same_drafts(
    algorithm: str, settings: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they are where passes are recorded, here as operations that are replayed: also if they
    are more than one such pass takes."""
    read = Counter[int]()

    def counted(batch: Batch, output: CommittedOutput, given: int) -> Any:
        assert given == most
        for single, rows in single_rows(batch, output, most):
            read[single.size] += 1
            yield single, rows

    monkeypatch.setattr(feature_drafter, "single_rows", counted)
    monkeypatch.setattr(feature_drafter, "_SINGLE_ROWS", most)
    assert_recorded_drafts_are_the_same(algorithm, settings, read, monkeypatch)
    assert sum(size * count for size, count in read.items()) > 30
    assert (max(read) > 5) == (most > 5)


class Second(Turns):
    """Has the last algorithm draft for the second request alone, and nobody for the first."""

    @hookimpl
    def plan_drafts(self, batch: Batch, choices: DraftChoices) -> DraftPlan:
        who = tuple(-1 if request.request_id == "0" else 1 for request in batch.requests)
        return DraftPlan(who=who, most_nodes=choices.most_nodes)


@pytest.mark.parametrize(("idle", "is_shared"), [(0, False), (1 << 30, True)])
def test_prompts_that_were_not_fed_are_not_shared(
    idle: int, is_shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither while their request runs, nor afterwards."""
    monkeypatch.setattr("specplug.speculative.part._IDLE", idle)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    with LLM(speculative_algorithm="NGRAM,EAGLE3", **{**SMALL, "page_size": 4}) as llm:
        requests = [llm.prepare(TEXT, params)[0] for _ in range(3)]
        for request in requests:
            llm.submit(request)
            for _ in range(4 if request is requests[0] else 60):
                llm.engine.step()
        llm.check_pool()
        cached = [request.num_cached for request in requests]
    assert cached[0] == 0
    assert [count > 4 for count in cached[1:]] == [is_shared] * 2


def test_pages_that_were_not_fed_are_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[list[Any], list[int]]:
        second = Second()
        given = {**SMALL, "extensions": [second], "page_size": 4}
        with LLM(speculative_algorithm="NGRAM,EAGLE3", **given) as llm:
            params = SamplingParams(max_tokens=180, ignore_eos=True)
            (first,) = llm.generate([TEXT], params)
            known = [*first.prompt_token_ids, *first.token_ids]
            (again,) = llm.generate([known], params)
            return second.drafts, [again.num_cached_tokens, len(known)]

    late, (cached, known) = run()
    assert known - 140 < cached < known - 4
    monkeypatch.setattr(Part, "feed_late", lambda self, name: iter(()))
    fed, (more, _) = run()
    assert more > cached
    assert late == fed


class Chunks(Eagle3):
    """Notes the chunks that several decode steps make up, of the warm-up and of requests: how many
    requests, the least power of two that is as wide as the widest, and whether drafts follow."""

    def __init__(self) -> None:
        self.warmed: set[tuple[int, int, bool]] = set()
        self.seen: set[tuple[int, int, bool]] = set()

    @hookimpl
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput, future_map: FutureMap
    ) -> DraftInput:
        if batch.is_prefill and not any(batch.first_chunk):
            form = batch.size, (max(batch.chunk_widths) - 1).bit_length(), batch.drafts_follow
            (self.warmed if batch.is_warm_up else self.seen).add(form)
        return super().build_draft_input(runtime, batch, target_output, future_map)


def test_warm_up_feeds_what_several_steps_make_up() -> None:
    """So that no request waits for what a late chunk compiles."""
    chunks = Chunks()
    given = {**SMALL, "warm_up": "on", "max_running_requests": 2, "chunked_prefill_size": 16}
    with LLM(speculative_algorithm=["NGRAM", chunks], extensions=[Turns()], **given) as llm:
        assert not chunks.seen
        llm.generate(["def area(width, height):\n"] * 2, SamplingParams(max_tokens=90))
    assert len({width for _, width, _ in chunks.seen}) > 2
    assert chunks.seen <= chunks.warmed
    assert {width for _, width, _ in chunks.warmed} == {1, 2, 3, 4, 5, 6, 7}


class View:
    def __init__(self, name: str) -> None:
        self.request_id = name


def step(late: LateFeed, names: str, columns: int, start: int) -> bool:
    """Let a step of requests wait, the tokens of which count up from their positions."""
    bs = len(names)
    tokens = (start + torch.arange(columns)).repeat(bs)
    batch = Batch(
        mode=ForwardMode.DECODE,
        requests=[View(name) for name in names],  # type: ignore[misc]
        req_indices=torch.arange(1, bs + 1),
        seq_lens=torch.full((bs,), start),
    )
    output = CommittedOutput(
        next_tokens=tokens + 1,
        own_tokens=tokens,
        per_node={"hidden": tokens.unsqueeze(1).float()},
        last_rows=torch.arange(bs) * columns,
        accept_lens=torch.ones(bs, dtype=torch.int64),
        bonus_tokens=torch.full((bs,), start + 1),
    )
    return late.add(batch, output)


def batch_of(names: str) -> Batch:
    return Batch(
        mode=ForwardMode.DECODE,
        requests=[View(name) for name in names],  # type: ignore[misc]
        req_indices=torch.tensor([ord(name) for name in names]),
        seq_lens=torch.zeros(len(names), dtype=torch.int64),
    )


def test_take_joins_steps_whose_lengths_are_known() -> None:
    late = LateFeed("A")
    step(late, "ab", 3, start=5)
    late.learn("ab", [2, 1])
    step(late, "ab", 1, start=7)
    step(late, "bc", 4, start=8)
    (chunk, output), (path, last) = late.take(batch_of("ba"))
    assert [request.request_id for request in chunk.requests] == ["b", "a"]
    assert chunk.chunk_widths == (2, 3)
    assert chunk.seq_lens.tolist() == [5, 5]
    assert output.own_tokens.tolist() == [5, 7, 5, 6, 7]
    assert output.per_node["hidden"].flatten().tolist() == [5, 7, 5, 6, 7]
    assert output.bonus_tokens.tolist() == [8, 8]
    assert [request.request_id for request in path.requests] == ["b"]
    assert path.req_indices.tolist() == [ord("b")]
    assert last.own_tokens.tolist() == [8, 9, 10, 11]
    assert set(late.waiting) == {"c"}


def test_one_step_is_taken_in_the_order_of_the_batch() -> None:
    late = LateFeed("A")
    step(late, "abc", 2, start=5)
    late._steps[0].seq_lens = torch.tensor([5, 6, 7])
    ((path, output),) = late.take(batch_of("ca"))
    assert [request.request_id for request in path.requests] == ["c", "a"]
    assert path.req_indices.tolist() == [ord("c"), ord("a")]
    assert path.seq_lens.tolist() == [7, 5]
    assert not path.is_prefill
    assert len(output.own_tokens) == 4
    assert set(late.waiting) == {"b"}


def test_steps_before_the_present_one_are_taken_if_known() -> None:
    late = LateFeed("A")
    step(late, "abc", 3, start=5)
    step(late, "abc", 3, start=7)
    late.learn("abc", [2, 1, 3])
    assert not list(late.take_known(batch_of("ab"), 7)), "there are six"
    ((chunk, output),) = late.take_known(batch_of("ab"), 6)
    assert chunk.chunk_widths == (2, 1)
    assert output.own_tokens.tolist() == [5, 6, 5]
    assert not late.has_caught_up, "the next draft is fed one step, as any"
    assert not list(late.take_known(batch_of("ab"), 0)), "the present one is fed when it is drafted"
    assert set(late.waiting) == {"a", "b", "c"}
    late.learn("abc", [1, 1, 1])
    assert [each.size for each, _ in late.take(batch_of("abc"))] == [3]
    step(late, "ab", 1, start=9)
    step(late, "ab", 1, start=10)  # of which the host knows at once that all count
    ((chunk, _),) = late.take_known(batch_of("ab"), 0)
    assert chunk.seq_lens.tolist() == [9, 9]
    assert chunk.chunk_widths == (1, 1)


def test_leave_tells_the_accepted_tokens_that_wait() -> None:
    late = LateFeed("A")
    step(late, "ab", 3, start=5)
    step(late, "ab", 3, start=7)
    late.learn("ab", [2, 1])
    assert late.leave("a") == 2
    assert late.leave("a") == 0
    assert late.leave("b") == 1
    assert not late.waiting


def test_a_prompt_waits_with_the_steps_after_it() -> None:
    late = LateFeed("A")
    tokens = torch.tensor([4, 5, 6, 3])
    output = CommittedOutput(
        next_tokens=tokens + 1,
        own_tokens=tokens,
        per_node={"hidden": tokens.unsqueeze(1).float()},
        last_rows=torch.tensor([2, 3]),
        accept_lens=torch.tensor([3, 1]),
        bonus_tokens=torch.tensor([7, 4]),
    )
    prefill = Batch(
        mode=ForwardMode.PREFILL,
        requests=[View(name) for name in "ab"],  # type: ignore[misc]
        req_indices=torch.tensor([1, 2]),
        seq_lens=torch.tensor([4, 3]),
        chunk_widths=(3, 1),
        first_chunk=(True, True),
        last_chunk=(True, True),
    )
    assert not late.add(prefill, output)
    assert [late.lacking("a"), late.lacking("b")] == [3, 1]
    ((alone, one),) = late.take(batch_of("b"))
    assert alone.is_prefill
    assert (alone.first_chunk, alone.chunk_widths, alone.seq_lens.tolist()) == ((True,), (1,), [3])
    assert one.next_tokens.tolist() == [4]
    step(late, "a", 2, start=7)
    late.learn("a", [1])
    assert late.lacking("a") == 4
    ((chunk, rows),) = late.take(batch_of("a"))
    assert (chunk.first_chunk, chunk.chunk_widths) == ((True,), (4,))
    assert chunk.seq_lens.tolist() == [4]
    assert rows.own_tokens.tolist() == rows.per_node["hidden"].flatten().tolist() == [4, 5, 6, 7]
    assert rows.bonus_tokens.tolist() == [8]
    assert not late.waiting


def test_add_asks_for_a_feed_when_many_rows_wait() -> None:
    late = LateFeed("A")
    asked = [step(late, "a", 1, start=position) for position in range(129)]
    assert asked == [False] * 128 + [True]
    ((chunk, _),) = late.take(batch_of("a"), drafts_follow=False)
    assert chunk.chunk_widths == (128,)
    assert set(late.waiting) == {"a"}


def test_refused_nodes_do_not_count_once_the_host_knows_them() -> None:
    late, asked = LateFeed("A"), []
    for position in range(0, 112, 2):
        asked.append(step(late, "a", 16, start=position))
        late.learn("a", [2])
    assert not any(asked)
    assert step(late, "a", 17, start=112)


def test_feeding_several_steps_at_once_is_catching_up() -> None:
    late = LateFeed("A")
    step(late, "a", 1, start=0)
    list(late.take(batch_of("a")))
    assert not late.has_caught_up
    for position in (1, 2):
        step(late, "a", 1, start=position)
    list(late.take(batch_of("a")))
    assert late.has_caught_up


def test_fewer_rows_wait_where_they_take_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    row = 20  # two tokens and a float
    monkeypatch.setattr("specplug.speculative.late_feed._MANY_BYTES", 50 * row)
    late = LateFeed("A")
    for _ in range(2):  # what was fed, or given up, counts no longer
        asked = [step(late, "a", 1, start=position) for position in range(34)]
        assert asked == [False] * 34
        assert step(late, "a", 16, start=34)
        assert len(list(late.take(batch_of("a")))) == 2
