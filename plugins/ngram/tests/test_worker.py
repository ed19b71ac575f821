"""The drafter proposes what it knows, and nothing when it knows nothing."""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable

import attrs
import pytest
import torch

from specplug import Batch, DraftInput, ForcedTokens, SpecConfig, UsageError
from specplug.speculative.hook_order import ForwardMode
from specplug_ngram import algorithm
from specplug_ngram.compiled_drafter import load_library
from specplug_ngram.config import ENGINE, REQUEST, TENANT, NgramSettings
from specplug_ngram.draft_tree import Shape
from specplug_ngram.forced_drafts import FORCED, with_forced
from specplug_ngram.history import TOKEN_BYTES
from specplug_ngram.index import FIRST_CAPACITY
from specplug_ngram.policy import CPU_COSTS, GPU_COSTS, Costs, Novelty
from specplug_ngram.worker import NgramWorker


@attrs.frozen
class Request:
    """What a hook sees of one."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    cache_salt: str | None = None


REPEATS = Request("repeats", (5, 6, 7, 8, 9, 1, 5, 6, 7))
KNOWS_NOTHING = Request("knows nothing", (21, 22, 23, 24))
BRANCHES = Request("branches", (31, 32, 33, 41, 31, 32, 34, 42, 31, 32, 34, 43, 31, 32))


def _batch(*requests: Request, max_draft_nodes: int = 8) -> Batch:
    rows = torch.arange(1, len(requests) + 1)
    return Batch(
        mode=ForwardMode.DECODE,
        requests=requests,
        req_indices=rows,
        seq_lens=rows,
        max_draft_nodes=(max_draft_nodes,) * len(requests),
    )


def _input(*bonus_tokens: int) -> DraftInput:
    return DraftInput(bonus_tokens=torch.tensor(bonus_tokens))


def _read(worker: NgramWorker, *requests: Request) -> None:
    worker.read_prompts(requests, [len(request.prompt_token_ids) for request in requests])


Make = Callable[..., NgramWorker]


@pytest.fixture(params=["in Python", "compiled"])
def make_worker(request: pytest.FixtureRequest) -> Make:
    """``make_worker(*requests, **limits)``: a worker that has read the requests' prompts."""
    compiled = load_library() if request.param == "compiled" else None

    def make(
        *requests: Request,
        topk: int = 1,
        nodes: int = 4,
        scope: str = ENGINE,
        most_bytes: int = 1 << 20,
        costs: Costs = CPU_COSTS,
        foreseen: int | None = None,
    ) -> NgramWorker:
        settings = NgramSettings(ngram_index_scope=scope, ngram_index_bytes=most_bytes)
        worker = NgramWorker(Shape(topk, 7, nodes), settings, compiled, costs, foreseen)
        _read(worker, *requests)
        return worker

    return make


def _observe(worker: NgramWorker, request_id: str, tokens: list[int]) -> None:
    worker.observe([request_id], torch.tensor([tokens]), torch.tensor([len(tokens)]))


def test_it_drafts_the_chain_behind_the_longest_match(make_worker: Make) -> None:
    worker = make_worker(REPEATS)
    _observe(worker, "repeats", [8])
    draft = worker.propose(_batch(REPEATS), _input(8))
    assert draft.is_chain
    assert draft.tokens.tolist() == [[8, 9, 1, 5]]


def test_it_proposes_the_root_alone_when_it_knows_nothing(make_worker: Make) -> None:
    worker = make_worker(KNOWS_NOTHING)
    _observe(worker, "knows nothing", [25])
    draft = worker.propose(_batch(KNOWS_NOTHING), _input(25))
    assert draft.tokens.tolist() == [[25]]
    assert draft.total == 1


def test_with_one_node_it_proposes_nothing(make_worker: Make) -> None:
    worker = make_worker(REPEATS, nodes=1)
    assert worker.propose(_batch(REPEATS), _input(7)).tokens.tolist() == [[7]]


def test_drafts_in_a_short_pool_count_the_nodes_that_fit(make_worker: Make) -> None:
    """Whether a draft pays is asked of what is left of it."""
    worker = make_worker(REPEATS)
    draft = worker.propose(_batch(REPEATS, max_draft_nodes=2), _input(7))
    assert draft.tokens.tolist() == [[7, 8]]
    assert worker.propose(_batch(REPEATS, max_draft_nodes=1), _input(7)).tokens.tolist() == [[7]]


def test_who_knows_nothing_costs_no_more_beside_one_who_does(make_worker: Make) -> None:
    worker = make_worker(REPEATS, KNOWS_NOTHING)
    draft = worker.propose(_batch(KNOWS_NOTHING, REPEATS), _input(24, 7))
    assert draft.widths == (1, 4)
    assert draft.flatten(draft.tokens).tolist() == [24, 7, 8, 9, 1]


def test_a_draft_too_weak_for_the_whole_batch_is_left_out(make_worker: Make) -> None:
    others = [Request(str(n), (n,)) for n in range(100, 107)]
    worker = make_worker(REPEATS, *others, nodes=2)
    assert worker.propose(_batch(REPEATS), _input(7)).total == 2
    batch = _batch(REPEATS, *others)
    assert worker.propose(batch, _input(7, *range(7))).tokens.shape == (8, 1)
    _observe(worker, "repeats", [8])
    # Its draft, which did not pay, was right.
    assert worker.requests["repeats"].drafted.novelty.log < Novelty().log


def test_branches_make_a_tree_beside_chains_and_bare_roots(make_worker: Make) -> None:
    worker = make_worker(BRANCHES, KNOWS_NOTHING, REPEATS, topk=4, nodes=5)
    draft = worker.propose(_batch(BRANCHES, KNOWS_NOTHING, REPEATS), _input(32, 24, 7))
    assert not draft.is_chain
    assert draft.widths is not None
    assert draft.widths[1] == 1
    assert draft.parents is not None
    assert sorted(draft.tokens[0, draft.parents[0] == 0].tolist()) == [33, 34]
    assert draft.tokens[0, 1] == 34  # the more frequent one comes first
    assert draft.tokens[2, :4].tolist() == [7, 8, 9, 1]
    assert draft.parents[2, :4].tolist() == [-1, 0, 1, 2]
    assert draft.depth == int(draft.depths.max())


def test_a_tree_without_a_branch_is_given_as_a_chain(make_worker: Make) -> None:
    worker = make_worker(REPEATS, KNOWS_NOTHING, topk=4, nodes=5)
    draft = worker.propose(_batch(REPEATS, KNOWS_NOTHING), _input(7, 24))
    assert draft.is_chain
    assert draft.widths == (5, 1)


def test_chains_on_a_gpu_are_equally_long(make_worker: Make) -> None:
    worker = make_worker(REPEATS, KNOWS_NOTHING, nodes=8, costs=GPU_COSTS)
    both = _batch(KNOWS_NOTHING, REPEATS)
    draft = worker.propose(both, _input(24, 7))
    assert draft.tokens.tolist() == [[24, 0, 0, 0, 0, 0, 0, 0], [7, 8, 9, 1, 5, 6, 7, 0]]
    assert draft.is_chain
    assert draft.widths is None
    assert draft.scores is not None
    assert draft.scores[0].tolist() == [0.0, *[-math.inf] * 7]
    assert draft.scores[1, 7] == -math.inf
    assert draft.scores[1, :7].isfinite().all()
    short = attrs.evolve(both, max_draft_nodes=(2, 8))
    assert worker.propose(short, _input(24, 7)).widths == (2, 8)
    assert worker.propose(_batch(KNOWS_NOTHING), _input(24)).tokens.tolist() == [[24]]


@pytest.mark.parametrize("costs", [CPU_COSTS, GPU_COSTS], ids=["CPU", "GPU"])
def test_a_tree_without_a_branch_is_no_deeper_than_asked(make_worker: Make, costs: Costs) -> None:
    again = Request("again", tuple(range(50, 70)) * 2)
    worker = make_worker(again, topk=4, nodes=29, costs=costs)
    worker.requests["again"].drafted.novelty.log = -2.0
    draft = worker.propose(_batch(again, max_draft_nodes=29), _input(69))
    assert draft.tokens.tolist() == [[69, *range(50, 57)]]


def test_draft_has_scores_of_how_often_a_token_followed(make_worker: Make) -> None:
    worker = make_worker(BRANCHES, KNOWS_NOTHING, topk=4, nodes=5)
    draft = worker.propose(_batch(BRANCHES, KNOWS_NOTHING), _input(32, 24))
    assert draft.scores is not None
    # After (31, 32), 34 followed twice and 33 once.
    known = Novelty().known(2, 3)
    of_token = dict(zip(draft.tokens[0].tolist(), draft.scores[0].exp().tolist(), strict=True))
    assert of_token[34] == pytest.approx(known * 2 / 3)
    assert of_token[33] == pytest.approx(known / 3)
    assert draft.scores[1].tolist() == [0.0, *[-math.inf] * (draft.width - 1)]


def test_match_that_is_longer_has_the_greater_score(make_worker: Make) -> None:
    found = []
    for length in (3, 6):
        request = Request(str(length), (*range(10, 10 + length + 4), 99, *range(10, 10 + length)))
        draft = make_worker(request).propose(_batch(request), _input(9 + length))
        assert draft.scores is not None
        found.append(float(draft.scores[0, 1]))
    assert found[0] < found[1] < 0


def test_requests_learn_from_one_another(make_worker: Make) -> None:
    other = Request("other", (22, 23, 24))
    worker = make_worker(KNOWS_NOTHING, other)
    _observe(worker, "knows nothing", [27, 28])
    assert worker.propose(_batch(other), _input(24)).tokens.tolist() == [[24, 27, 28]]
    worker.forget("knows nothing")
    assert worker.propose(_batch(other), _input(24)).tokens.tolist() == [[24, 27, 28]]
    assert "knows nothing" not in worker.requests


def test_what_is_no_longer_remembered_is_not_proposed(make_worker: Make) -> None:
    worker = make_worker(KNOWS_NOTHING, most_bytes=FIRST_CAPACITY * TOKEN_BYTES)
    _observe(worker, "knows nothing", [27, 28])
    _read(worker, Request("long", tuple(range(100, 100 + FIRST_CAPACITY))))
    late = Request("late", (22, 23, 24))
    _read(worker, late)
    assert worker.propose(_batch(late), _input(24)).total == 1


def _said(worker: NgramWorker, request: Request, tokens: list[int]) -> None:
    """Have a request read its prompt, write tokens, and end."""
    _read(worker, request)
    _observe(worker, request.request_id, tokens)
    worker.forget(request.request_id)


@pytest.mark.parametrize(
    ("scope", "known"),
    [
        (REQUEST, {"same salt": False, "other salt": False, "no salt": False}),
        (TENANT, {"same salt": True, "other salt": False, "no salt": False}),
        (ENGINE, {"same salt": True, "other salt": True, "no salt": True}),
    ],
)
@pytest.mark.parametrize("has_ended", [True, False])
def test_request_drafts_from_the_text_of_its_scope_alone(
    scope: str, known: dict[str, bool], has_ended: bool, make_worker: Make
) -> None:
    worker = make_worker(scope=scope)
    author = Request("author", (22, 23, 24), "same salt")
    _read(worker, author)
    _observe(worker, "author", [27, 28])
    if has_ended:
        worker.forget("author")
    found = {}
    for salt in known:
        late = Request(salt, (22, 23, 24), None if salt == "no salt" else salt)
        _read(worker, late)
        found[salt] = worker.propose(_batch(late), _input(24)).tokens.tolist() == [[24, 27, 28]]
        worker.forget(salt)
    assert found == known


@pytest.mark.parametrize("scope", [REQUEST, TENANT])
def test_requests_without_a_salt_share_no_text(scope: str, make_worker: Make) -> None:
    worker = make_worker(scope=scope)
    _said(worker, Request("author", (22, 23, 24)), [27, 28])
    assert (len(worker.index), worker.index.num_bytes) == (0, 0)
    _read(worker, late := Request("late", (22, 23, 24)))
    assert worker.propose(_batch(late), _input(24)).total == 1


@pytest.mark.parametrize("scope", [REQUEST, TENANT])
@pytest.mark.parametrize("most_tokens", [1 << 14, 3 * FIRST_CAPACITY])
def test_drafts_do_not_depend_on_the_text_of_others(
    scope: str, most_tokens: int, make_worker: Make
) -> None:
    """The others write as much in both runs, of other words, and in a full index too."""
    ours = [Request(f"ours {n}", tuple((i * i) % (7 + n) for i in range(99)), "us") for n in (0, 1)]

    def drafted(word: int) -> list[list[list[int]]]:
        worker = make_worker(scope=scope, most_bytes=most_tokens * TOKEN_BYTES)
        _read(worker, *ours)
        found = []
        for step in range(60):
            prompt = tuple((word * i * step) % 9 for i in range(100))
            _said(worker, Request(f"other {step}", prompt, f"them {step % 3}"), [word, step % 2])
            draft = worker.propose(_batch(*ours), _input(1, 2))
            found.append(draft.tokens.tolist())
            for request in ours:
                _observe(worker, request.request_id, [(step * step) % 7])
        return found

    assert drafted(1) == drafted(2)
    assert max(len(tokens[0]) for tokens in drafted(1)) > 1


def test_text_asked_to_be_forgotten_is_not_proposed(make_worker: Make) -> None:
    worker = make_worker(scope=TENANT)
    for salt in ("a", "b"):
        _said(worker, Request(salt, (22, 23, 24), salt), [27, 28])
    _read(worker, running := Request("running", (22, 23, 24), "a"))
    assert worker.propose(_batch(running), _input(24)).total == 3
    worker.forget_text("a")
    assert worker.propose(_batch(running), _input(24)).total == 1
    _observe(worker, "running", [22, 23, 24, 9])
    _read(worker, other := Request("other", (22, 23, 24), "b"))
    assert worker.propose(_batch(other), _input(24)).total == 3
    worker.forget_text()
    assert worker.propose(_batch(other), _input(24)).total == 1
    assert worker.index.num_tokens == 0


def test_index_stays_within_its_budget_over_many_requests(make_worker: Make) -> None:
    most = 16 * FIRST_CAPACITY * TOKEN_BYTES
    worker = make_worker(scope=TENANT, most_bytes=most)
    highest = 0
    for number in range(600):
        request = Request(str(number), tuple(range(number % 700)), f"tenant {number % 90}")
        _said(worker, request, [1, 2])
        owners = worker.index._owners.values()
        assert worker.index.num_bytes == sum(owner.history.num_bytes for owner in owners) <= most
        highest = max(highest, worker.index.num_bytes)
    assert highest > most // 2
    assert worker.requests == {}


def test_end_of_a_request_frees_its_text_at_once(make_worker: Make) -> None:
    worker = make_worker(REPEATS, scope=REQUEST)
    worker.propose(_batch(REPEATS), _input(7))
    state = weakref.ref(worker.requests["repeats"].drafted)
    history = weakref.ref(worker.index.history((REQUEST, "repeats")))
    gc.disable()  # it must not be what frees them
    try:
        worker.forget("repeats")
        assert (state(), history()) == (None, None)
    finally:
        gc.enable()


def test_least_recently_used_owner_makes_room(make_worker: Make) -> None:
    worker = make_worker(scope=TENANT, most_bytes=3 * FIRST_CAPACITY * TOKEN_BYTES)
    for salt in ("a", "b", "c", "a", "d"):
        _said(worker, Request(salt, (22, 23, 24), salt), [27, 28])
    kept = [key[1] for key in worker.index._owners]
    assert kept == ["c", "a", "d"]


def test_largest_running_owner_makes_room_for_a_new_one(make_worker: Make) -> None:
    worker = make_worker(scope=REQUEST, most_bytes=4 * FIRST_CAPACITY * TOKEN_BYTES)
    text = tuple(range(4 * FIRST_CAPACITY - 1))
    _read(worker, large := Request("large", (*text, 22, 23, 24, 25, 22, 23)))
    _read(worker, small := Request("small", (1, 2, 3, 1, 2)))
    sizes = [owner.history.capacity for owner in worker.index._owners.values()]
    assert sizes == [2 * FIRST_CAPACITY, FIRST_CAPACITY]
    draft = worker.propose(_batch(large, small), _input(23, 2))
    assert draft.flatten(draft.tokens).tolist()[:3] == [23, 24, 25]
    worker.forget("small")
    _observe(worker, "large", [1] * (3 * FIRST_CAPACITY))
    assert worker.index.history((REQUEST, "large")).capacity == 4 * FIRST_CAPACITY


def test_request_without_room_in_the_index_drafts_nothing(make_worker: Make) -> None:
    worker = make_worker(scope=REQUEST, most_bytes=FIRST_CAPACITY * TOKEN_BYTES)
    _read(worker, REPEATS, BRANCHES)
    draft = worker.propose(_batch(BRANCHES, REPEATS), _input(32, 7))
    assert draft.widths == (1, 4)
    _observe(worker, "branches", [33])
    for request in (BRANCHES, REPEATS):
        worker.forget(request.request_id)
    assert worker.index.num_bytes == 0


def test_corpus_is_drafted_from_in_every_scope(make_worker: Make) -> None:
    corpus = [[*range(40, 50)], [22, 23, 24, 27, 28], [40, 41, 60]]
    for scope in (REQUEST, TENANT, ENGINE):
        worker = make_worker(scope=scope)
        worker.read_corpus(corpus)
        _read(worker, one := Request("one", (22, 23, 24)), two := Request("two", (9, 46, 47)))
        draft = worker.propose(_batch(one, two), _input(24, 47))
        assert draft.flatten(draft.tokens).tolist() == [24, 27, 28, 47, 48, 49]
        worker.forget_text()
        assert worker.propose(_batch(one), _input(24)).total == 3  # the corpus stays
        _observe(worker, "one", [40, 41, 42])
        assert worker.propose(_batch(one), _input(42)).tokens.tolist() == [[42, 43, 44, 45]]


def test_own_text_is_followed_unless_the_corpus_matches_more(make_worker: Make) -> None:
    worker = make_worker(REPEATS)
    worker.read_corpus([[5, 6, 7, 99, 98], [9, 1, 5, 6, 7, 77, 76]])
    assert worker.propose(_batch(REPEATS), _input(7)).tokens[0, 1] == 77  # 5 tokens match, not 3
    _observe(worker, "repeats", [8, 9, 1, 5, 6, 7])
    assert worker.propose(_batch(REPEATS), _input(7)).tokens[0, 1] == 8


def test_corpus_beyond_the_budget_is_refused(make_worker: Make) -> None:
    worker = make_worker(most_bytes=1 << 16)
    with pytest.raises(
        UsageError, match=r"ngram_corpus has 2,000 tokens.*ngram_index_bytes=65,536"
    ):
        worker.read_corpus([[1] * 2_000])


def test_it_learns_from_what_it_did_not_propose(make_worker: Make) -> None:
    worker = make_worker(REPEATS)
    worker.requests["repeats"].drafted.novelty.log = 3.9
    assert worker.propose(_batch(REPEATS), _input(7)).total == 1
    _observe(worker, "repeats", [8])
    assert worker.requests["repeats"].drafted.novelty.log < 3.9


def test_tokens_and_the_end_of_an_unknown_request_are_ignored(make_worker: Make) -> None:
    worker = make_worker()
    _observe(worker, "never met", [1, 2])
    worker.forget("never met")
    draft = worker.propose(_batch(Request("never met", (1, 2))), _input(2))
    assert draft.tokens.tolist() == [[2]]
    assert worker.requests == {}


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_a_prompt_is_read_once_a_chunk_at_a_time(chunk: int, make_worker: Make) -> None:
    worker = make_worker()
    for start in range(0, 9, chunk):
        end = min(start + chunk, 9)
        worker.read_prompts([REPEATS], [end])
        assert worker.index.num_tokens == end
    assert worker.propose(_batch(REPEATS), _input(7)).tokens.tolist() == [[7, 8, 9, 1]]


def test_what_a_prefix_cache_skipped_is_read_too(make_worker: Make) -> None:
    worker = make_worker()
    worker.read_prompts([REPEATS], [6])
    _read(worker, REPEATS)
    _read(worker, REPEATS)
    assert worker.index.num_tokens == 9


@attrs.frozen
class Run:
    """What the hooks use of a runtime."""

    worker: NgramWorker


@pytest.mark.parametrize("received", [(), (REPEATS, KNOWS_NOTHING)])
def test_requests_that_were_prefilled_elsewhere_are_known(
    received: tuple[Request, ...], make_worker: Make
) -> None:
    worker = make_worker()
    last_tokens = torch.tensor([8, 25][: len(received)], dtype=torch.int64)
    batch = _batch(*received)
    draft_input = algorithm.build_disagg_draft_input(Run(worker), batch, last_tokens)
    assert draft_input.bonus_tokens.tolist() == last_tokens.tolist()
    names = [request.request_id for request in received]
    algorithm.on_host_tensors(Run(worker), names, draft_input.host)
    assert worker.index.num_tokens == sum(len(r.prompt_token_ids) + 1 for r in received)
    if received:
        assert worker.propose(batch, draft_input).tokens[0].tolist() == [8, 9, 1, 5]


@pytest.mark.parametrize(
    ("device", "overlap", "costs", "foreseen"),
    [("cpu", True, CPU_COSTS, 7), ("cuda", True, GPU_COSTS, 15), ("cuda", False, GPU_COSTS, 7)],
)
def test_worker_is_made_for_its_device(
    device: str, overlap: bool, costs: Costs, foreseen: int
) -> None:
    """It foresees deeper where that is a step too early."""

    @attrs.frozen
    class Target:
        config: SpecConfig
        device: torch.device
        overlap: bool

    config = SpecConfig.resolve(algorithm.describe())
    worker = algorithm.create_worker(Target(config, torch.device(device), overlap))
    assert worker._costs == costs
    told = worker.foresee(["unknown"])
    assert told is not None
    assert told.tokens.shape == (1, foreseen)


@pytest.mark.parametrize(("topk", "depth"), [(1, 6), (2, 2), (4, 2)])
def test_worker_drafts_its_widest_to_warm_up(topk: int, depth: int, make_worker: Make) -> None:
    worker = make_worker(topk=topk, nodes=7)
    batch = attrs.evolve(_batch(KNOWS_NOTHING), is_warm_up=True)
    draft = worker.propose(batch, _input(25))
    assert (draft.width, draft.depth, draft.is_chain) == (7, depth, topk == 1)
    assert int(draft.depths.max()) == depth
    narrow = attrs.evolve(batch, max_draft_nodes=(3,))
    assert worker.propose(narrow, _input(25)).width == 3
    assert not worker.requests
    pair = attrs.evolve(_batch(KNOWS_NOTHING, BRANCHES), is_warm_up=True, max_draft_nodes=(3, 7))
    assert worker.propose(pair, _input(25, 26)).widths == (3, 7)


def test_what_is_foreseen_is_what_is_drafted(make_worker: Make) -> None:
    worker = make_worker(REPEATS, KNOWS_NOTHING)
    _observe(worker, "repeats", [8])
    foreseen = worker.foresee(["repeats", "knows nothing", "unknown"])
    draft = worker.propose(_batch(REPEATS), _input(8))
    assert foreseen is not None
    assert foreseen.tokens[0].tolist() == draft.tokens[0, 1:].tolist()
    assert draft.scores is not None
    assert torch.equal(foreseen.scores[0], draft.scores[0, 1:])
    assert foreseen.scores[1:].max() == -math.inf
    assert foreseen.known == [len(REPEATS.prompt_token_ids) + 1, 4, 0]


@pytest.mark.parametrize("read_more", [False, True])
def test_what_was_foreseen_is_drafted_as_chosen(make_worker: Make, read_more: bool) -> None:
    """Also where another step was read since, where by its own costs nothing would pay, and where
    by these all chains would have one length."""
    costs = attrs.evolve(CPU_COSTS, draft=1e9, uniform=True)
    worker = make_worker(KNOWS_NOTHING, REPEATS, costs=costs)
    _observe(worker, "repeats", [8])
    batch = attrs.evolve(_batch(REPEATS, KNOWS_NOTHING), max_draft_nodes=(3, 4))
    assert worker.propose(batch, _input(8, 25)).width == 1
    assert worker.foresee(["knows nothing", "repeats", "unknown"]) is not None
    if read_more:
        _observe(worker, "repeats", [9])
    draft = worker.propose(batch, _input(8, 25))
    assert draft.widths == (3, 1)
    assert draft.tokens[0, 1:].tolist() == ([1, 5] if read_more else [9, 1])
    kept = worker.propose(batch, _input(8, 25))  # the plan is, and nothing was foreseen for it
    assert kept.widths == (3, 1)


@pytest.mark.parametrize(("nodes", "foreseen"), [(6, 2), (3, 6)])
def test_as_much_is_foreseen_as_the_deeper_one_of_two(
    nodes: int, foreseen: int, make_worker: Make
) -> None:
    """A request has room for as many nodes. What is foreseen deeper is drafted no deeper."""
    worker = make_worker(REPEATS, nodes=nodes, foreseen=foreseen)
    _observe(worker, "repeats", [8])
    told = worker.foresee(["repeats"])
    assert told is not None
    assert told.tokens.tolist() == [[9, 1, 5, 6, 7]]
    batch = attrs.evolve(_batch(REPEATS), max_draft_nodes=(8,))
    for _ in range(2):  # as foreseen, and looked up
        assert worker.propose(batch, _input(8)).tokens.tolist() == [[8, 9, 1, 5, 6, 7][:nodes]]


def test_foreseeing_teaches_what_text_is_worth(make_worker: Make) -> None:
    surer, other = make_worker(REPEATS), make_worker(REPEATS)
    for worker in (surer, other):
        _observe(worker, "repeats", [8])
    surer.foresee(["repeats"])
    scores = []
    for worker in (surer, other):
        _observe(worker, "repeats", [9])
        foreseen = worker.foresee(["repeats"])
        assert foreseen is not None
        scores.append(float(foreseen.scores[0, 0]))
    assert scores[0] > scores[1]


def _forced(*tokens: int, known: int = 0) -> list[ForcedTokens]:
    return [ForcedTokens(known=known, tokens=tokens)]


def test_forced_tokens_are_drafted_where_nothing_is_known(make_worker: Make) -> None:
    worker = make_worker(KNOWS_NOTHING)
    draft = worker.propose(_batch(KNOWS_NOTHING), _input(25), _forced(71, 72))
    assert draft.tokens.tolist() == [[25, 71, 72]]
    assert draft.scores is not None
    assert draft.scores[0].exp().tolist() == pytest.approx([1, FORCED, FORCED])
    draft = worker.propose(_batch(KNOWS_NOTHING, max_draft_nodes=2), _input(25), _forced(71, 72))
    assert draft.tokens.tolist() == [[25, 71]]
    for nothing in ([None], _forced()):
        draft = worker.propose(_batch(KNOWS_NOTHING), _input(25), nothing)
        assert draft.tokens.tolist() == [[25]]


def test_own_text_goes_on_where_forced_tokens_end(make_worker: Make) -> None:
    worker = make_worker(REPEATS)
    draft = worker.propose(_batch(REPEATS), _input(7), _forced(8, 9))
    assert draft.tokens.tolist() == [[7, 8, 9, 1]]
    assert draft.scores is not None
    assert draft.scores[0, 1:3].exp().tolist() == pytest.approx([FORCED, FORCED])
    assert draft.scores[0, 3] < math.log(FORCED)


def test_forced_tokens_go_before_other_text(make_worker: Make) -> None:
    worker = make_worker(REPEATS, BRANCHES)
    both = _batch(REPEATS, BRANCHES)
    draft = worker.propose(both, _input(7, 32), [*_forced(8, 70), None])
    alone = worker.propose(both, _input(7, 32))
    assert draft.tokens.tolist() == [[7, 8, 70], alone.tokens[1, :3].tolist()]
    assert alone.tokens[0].tolist() == [7, 8, 9, 1]


def test_forced_chain_takes_the_place_of_a_tree(make_worker: Make) -> None:
    worker = make_worker(BRANCHES, REPEATS, topk=4, nodes=5)
    draft = worker.propose(_batch(BRANCHES, REPEATS), _input(32, 7), [*_forced(34, 70, 71), None])
    assert draft.tokens[0].tolist()[:4] == [32, 34, 70, 71]
    assert draft.depths[0, :4].tolist() == [0, 1, 2, 3]
    draft = worker.propose(_batch(BRANCHES, REPEATS), _input(32, 7), [*_forced(33), None])
    tree = worker.propose(_batch(BRANCHES, REPEATS), _input(32, 7))
    assert draft.tokens.equal(tree.tokens)  # it is a path of the tree


def test_gains_are_those_of_the_scores(make_worker: Make) -> None:
    worker = make_worker(REPEATS, BRANCHES, topk=4, nodes=5)
    states = worker._drafted(["repeats", "branches"])
    for chains in ([(8, 70), (34, 70, 71)], [(8,), (33,)], [(), (9,)]):
        drafts = worker._drafter.draft(states, [5, 4], 0.0)
        drafts = with_forced(drafts, chains, [5, 4], 7)
        gains, nodes = [0.0] * len(drafts.gains), 0
        for b, width in enumerate(drafts.widths):
            parents = [-1, *range(width - 1)] if drafts.parents is None else drafts.parents[b]
            reached = [(0, 1.0)]
            for node in range(1, width):
                depth, chance = reached[int(parents[node])]
                reached.append((depth + 1, chance * math.exp(drafts.scores[b, node])))
                gains[depth + 1] += reached[-1][1]
            nodes += width - 1
            assert max(depth for depth, _ in reached) <= drafts.depth
        assert list(drafts.gains) == pytest.approx(gains, abs=1e-6)
        assert drafts.nodes == nodes


def test_forced_tokens_are_foreseen_after_what_is_known(make_worker: Make) -> None:
    worker = make_worker(KNOWS_NOTHING)
    foreseen = worker.foresee(["knows nothing"], _forced(71, 72, known=4))
    assert foreseen is not None
    assert foreseen.tokens[0].tolist() == [71, 72, 0]
    assert foreseen.scores[0].exp().tolist() == pytest.approx([FORCED, FORCED, 0])
    late = worker.foresee(["knows nothing"], _forced(71, 72, known=5))
    assert late is not None
    assert late.scores.max() == -math.inf


def test_trees_are_not_foreseen(make_worker: Make) -> None:
    assert make_worker(BRANCHES, topk=2, nodes=8).foresee(["branches"]) is None
