"""Drafts computed densely: without a cache, over the whole text, by a worker's own public steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug import (
    Batch,
    CommittedOutput,
    DraftInput,
    FeatureDrafter,
    KVCache,
    PagedModel,
    Runtime,
    TokenDrafter,
    hookimpl,
)
from specplug.testing.check import Failure, NotApplicable, check
from specplug.testing.configuration import SIMPLEST
from specplug.testing.laboratory import Drafted, Key, Laboratory, Recorder

AGREE = 0.9
"""Share of the roots whose drafts must be those of the dense pass, which adds in another order."""

ROUNDED = 2.0
"""How far another order of adding may move the difference of two logits, in units of what the dtype
rounds in the greatest one. Two passes may each be off by half of it: against float32 with the same
weights, EAGLE, EAGLE3 and STANDALONE in bf16 moved the difference of the two best ones by 0.2 in
the mean and 1.04 at most."""

ROOTS = 16
"""At which drafts are compared."""

TOLD = 0.1
"""By how much more often drafts must be those of a mistake than the right ones, for it to be
named."""


@attrs.frozen(eq=False)
class DensePlan:
    """An ``AttentionPlan`` of rows that see one another and nothing else, in float64.

    Attributes:
        positions: [R] int64.
        unseen: rows whose keys no later row sees.
    """

    positions: Tensor
    unseen: Sequence[int] = ()

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float | None = None,
        window: int | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attend causally, as ``AttentionPlan.attend`` says."""
        rows, heads, size = q.shape
        group = heads // k.shape[1]
        queries, keys, values = (
            each.transpose(0, 1).to(torch.float64)
            for each in (q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1))
        )
        scores = queries @ keys.transpose(1, 2) * (size**-0.5 if scale is None else scale)
        order = torch.arange(rows, device=q.device)
        visible = order <= order.unsqueeze(1)
        visible[:, list(self.unseen)] = False
        visible |= order == order.unsqueeze(1)
        if window is not None:
            visible &= self.positions.unsqueeze(1) - self.positions < window
        scores = scores.masked_fill(~visible, -torch.inf)
        if sinks is not None:
            column = sinks.to(torch.float64).view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat((scores, column), dim=2)
        weights = scores.softmax(-1)[..., :rows]
        return (weights @ values).transpose(0, 1).reshape(rows, -1).to(q.dtype)

    def write(self, cache: KVCache, layer: int, k: Tensor, v: Tensor) -> None:
        """Keep nothing: all rows are in the pass."""


@attrs.frozen(kw_only=True)
class Mistake:
    """What the reference may do wrongly, to find out what a plugin does.

    Attributes:
        told: of it, as an author says it.
        own_tokens: of committed rows the tokens at them are read, not those after them.
        features_before: of committed rows the features of the row before.
        last_row: the first token follows the row that is so many before the last one.
        positions: of drafted rows are so much greater.
        restart: positions after the prompt are counted from 0.
        unseen_last: the key of the last committed row is not seen.
        unwritten: nor are those of the rows after the prompt.
        ids: drafted tokens are so much greater.
        depth: below the root at which it begins to show; 0: at the first token.
    """

    told: str
    own_tokens: bool = False
    features_before: bool = False
    last_row: int = 0
    positions: int = 0
    restart: bool = False
    unseen_last: bool = False
    unwritten: bool = False
    ids: int = 0


NONE = Mistake(told="")
MISTAKES = (
    Mistake(
        told="tokens: the network reads own_tokens where it should read next_tokens",
        own_tokens=True,
    ),
    Mistake(
        told="features: each row has those of the row before it",
        features_before=True,
    ),
    Mistake(
        told="rows: what is drafted first follows the row before the last one (last_rows)",
        last_row=1,
    ),
    Mistake(told="positions: those of drafted tokens are one too great", positions=1),
    Mistake(told="positions: those of drafted tokens are one too small", positions=-1),
    Mistake(told="positions: they begin at 0 again after the prompt", restart=True),
    Mistake(
        told="keys: that of the last committed row is not seen (a slot off by one)",
        unseen_last=True,
    ),
    Mistake(
        told="keys: those of accepted rows are not seen (they are not written)", unwritten=True
    ),
    Mistake(told="token ids: each is one too great (d2t)", ids=1),
    Mistake(told="token ids: each is one too small (d2t)", ids=-1),
)


@attrs.frozen(eq=False)
class Text:
    """A prompt with its output.

    Attributes:
        tokens: of both.
        prompt: how many of them are the prompt's.
        features: [len(tokens), H], as a ``FeatureDrafter`` reads them; None of a ``TokenDrafter``.
    """

    tokens: tuple[int, ...]
    prompt: int
    features: Tensor | None


@attrs.frozen
class Guide:
    """Chooses the tokens of a chain: the likeliest ones, and the draft's where they are as likely.

    So a rounding does not part the chain from the draft, and what follows is compared.

    Attributes:
        draft: that is compared.
        rounding: what the dtype rounds, relative to a number.
    """

    draft: Drafted
    rounding: float

    def next(
        self, chain: Sequence[int], logits: Tensor, token_ids: Tensor, mistake: Mistake
    ) -> int:
        """Return the token after a chain.

        Args:
            logits: [1, D].
            token_ids: [D] int64, the tokens that they are of.
        """
        row = logits[0].float()
        best = int(row.argmax())
        drafted = self.draft.after(chain)
        if drafted and int(token_ids[best]) + mistake.ids not in drafted:
            slack = ROUNDED * self.rounding * float(row.abs().max())
            near = (row >= row[best] - slack).nonzero().flatten()
            near = near[row[near].argsort(descending=True)]
            for token in (token_ids[near] + mistake.ids).tolist():
                if token in drafted:
                    return int(token)
        return int(token_ids[best]) + mistake.ids


Reference = Callable[[Any, Text, int, Guide, Mistake], list[int]]
"""Takes a worker, a text, the position of a root, the guide and a mistake; returns the chain that
is to be drafted there, as deep as the guide's draft, without the root."""


def feature_chain(
    worker: FeatureDrafter, text: Text, root: int, guide: Guide, mistake: Mistake
) -> list[int]:
    """Return the likeliest chain of a ``FeatureDrafter``."""
    assert text.features is not None
    first = 0 if mistake.own_tokens else 1
    tokens, features = list(text.tokens[first : root + first]), text.features[:root]
    if mistake.features_before:
        features = torch.cat((features[:1], features[:-1]))
    hidden, chain = features, list[int]()
    while True:
        plan = _plan(text, root, len(tokens), mistake, hidden.device)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, plan: DensePlan = plan) -> Tensor:
            return plan.attend(KVCache(), layer, q, k, v)

        row = len(tokens) - 1 - (0 if chain else mistake.last_row)
        rows = torch.tensor(tokens, device=hidden.device)
        last = worker.forward(rows, hidden, plan.positions, attend)[row : row + 1]
        chain.append(guide.next(chain, worker.logits(last), worker.token_ids, mistake))
        if len(chain) == guide.draft.depth:
            return chain
        tokens.append(chain[-1] - mistake.ids)
        hidden = torch.cat((hidden, last))


def token_chain(
    worker: TokenDrafter, text: Text, root: int, guide: Guide, mistake: Mistake
) -> list[int]:
    """Return the likeliest chain of a ``TokenDrafter``."""
    tokens, chain = list(text.tokens[: root + 1]), list[int]()
    device = worker.token_ids.device
    while True:
        plan = _plan(text, root + 1, len(tokens), mistake, device)
        row = len(tokens) - 1 - (0 if chain else mistake.last_row)
        last = torch.tensor([row], device=device)
        logits = worker.logits(torch.tensor(tokens, device=device), plan, last)
        chain.append(guide.next(chain, logits, worker.token_ids, mistake))
        if len(chain) == guide.draft.depth:
            return chain
        tokens.append(chain[-1] - mistake.ids)


def _plan(
    text: Text, committed: int, rows: int, mistake: Mistake, device: torch.device
) -> DensePlan:
    """Return the plan of a pass over committed rows, and drafted ones after them."""
    positions = torch.arange(rows, device=device)
    positions[committed:] += mistake.positions
    if mistake.restart:
        positions[text.prompt :] -= text.prompt
    unseen: list[int] = []
    if mistake.unseen_last:
        unseen = [committed - 1]
    if mistake.unwritten:
        unseen = list(range(text.prompt, committed))
    return DensePlan(positions.clamp(min=0), unseen)


class FeatureRecorder:
    """An extension that takes down the features of prompts, row by row: so none can be read from
    another row."""

    def __init__(self) -> None:
        self.features: dict[tuple[int, ...], list[Tensor]] = {}

    @hookimpl(wrapper=True)
    def build_draft_input(
        self, runtime: Runtime, batch: Batch, target_output: CommittedOutput
    ) -> Generator[None, DraftInput, DraftInput]:
        """Take down those of the prompts of a prefill."""
        if batch.is_prefill and isinstance(runtime.worker, FeatureDrafter):
            row = 0
            for request, width in zip(batch.requests, batch.chunk_widths, strict=True):
                rows = self.features.setdefault(tuple(request.prompt_token_ids), [])
                for _ in range(width):
                    rows.append(runtime.worker.features(_row_of(target_output, row)).clone())
                    row += 1
        return (yield)


def _row_of(output: CommittedOutput, row: int) -> CommittedOutput:
    rows = slice(row, row + 1)
    one = torch.ones(1, dtype=torch.int64, device=output.own_tokens.device)
    return CommittedOutput(
        next_tokens=output.next_tokens[rows],
        own_tokens=output.own_tokens[rows],
        per_node={name: tensor[rows] for name, tensor in output.per_node.items()},
        last_rows=torch.zeros_like(one),
        accept_lens=one,
        bonus_tokens=output.next_tokens[rows],
    )


@check("blind.reference", "silver", "drafts are those of a dense pass over the whole text")
def reference(laboratory: Laboratory) -> str:
    """Compute drafts anew from the worker's own steps, and compare them with what it drafted."""
    told = []
    shapes = ["declared"]
    if laboratory.subject.selected.info.capabilities.branching:
        shapes.append("wide")
    for shape in shapes:
        share, count = _compare(laboratory, shape)
        told.append(f"{100 * share:.0f} % of {count} ({shape})")
    return ", ".join(told)


@torch.inference_mode()
def _compare(laboratory: Laboratory, shape: str) -> tuple[float, int]:
    """Return at which share of how many roots drafts are those of the dense pass."""
    recorder, features = Recorder(), FeatureRecorder()
    prompts, prompt_params = laboratory.prompts()[:4], laboratory.params
    configuration = {**SIMPLEST, "batch": 3, "shape": shape}
    with laboratory.engine(configuration, extensions=[recorder, features]) as llm:
        worker = llm.engine.runtime.worker
        compute = _reference_of(worker)
        asked = prompt_params(len(prompts), sampled=False, max_tokens=20)
        outputs = llm.generate(prompts, asked)
        whole = [[*output.prompt_token_ids, *output.token_ids] for output in outputs]
        drafts = dict(recorder.drafts)
        llm.generate(whole, prompt_params(len(whole), sampled=False, max_tokens=1))
        texts = {}
        for output, tokens in zip(outputs, whole, strict=True):
            rows = features.features.get(tuple(tokens))
            prompt = tuple(output.prompt_token_ids)
            found = None if rows is None else torch.cat(rows)
            texts[prompt] = Text(tuple(tokens), len(prompt), found)
        for each in vars(worker).values():
            if isinstance(each, PagedModel):  # a fused layer writes to the cache by itself
                each._target.unfuse_layers()
        rounding = torch.finfo(llm.engine.runtime.dtype).eps
        return _judge(compute, worker, texts, drafts, shape, rounding)


def _reference_of(worker: object) -> Reference:
    """Return what computes a worker's drafts.

    Raises:
        NotApplicable: nothing does.
    """
    for kind, compute in ((FeatureDrafter, feature_chain), (TokenDrafter, token_chain)):
        if isinstance(worker, kind):
            own = [
                name
                for name in ("chain", "tree", "propose")
                if getattr(type(worker), name) is not getattr(kind, name)
            ]
            if own:
                raise NotApplicable(f"its worker has a {own[0]}() of its own")
            if isinstance(worker, TokenDrafter) and worker.pieces is not None:
                raise NotApplicable("its worker reads tokens of its own, not the target's")
            return compute
    raise NotApplicable("its worker is neither a FeatureDrafter nor a TokenDrafter")


def _judge(
    compute: Reference,
    worker: Any,
    texts: Mapping[tuple[int, ...], Text],
    drafts: Mapping[Key, Drafted],
    shape: str,
    rounding: float,
) -> tuple[float, int]:
    """Compare drafts with the dense pass's.

    Raises:
        Failure: they differ.
    """
    roots = [key for key in sorted(drafts, key=lambda k: (k[1] - len(k[0]), k)) if key[0] in texts]
    roots = roots[:: max(1, len(roots) // ROOTS)][:ROOTS]

    def chains(mistake: Mistake) -> dict[Key, list[int]]:
        return {
            key: compute(worker, texts[key[0]], key[1], Guide(drafts[key], rounding), mistake)
            for key in roots
            if drafts[key].depth
        }

    expected = chains(NONE)
    if not expected:
        raise NotApplicable("no draft was made")
    differing = [key for key, chain in expected.items() if not drafts[key].follows(chain)]
    share = 1 - len(differing) / len(expected)
    if share >= AGREE:
        return share, len(expected)
    shares = {}
    for mistake in MISTAKES:
        made = chains(mistake)
        shares[mistake.told] = sum(drafts[k].follows(c) for k, c in made.items()) / len(made)
    likeliest = max(shares, key=shares.__getitem__)
    first = min(differing, key=lambda key: (key[1] - len(key[0]), key))
    why = _place(expected, drafts, shape)
    if shares[likeliest] > share + TOLD:
        why = f"{100 * shares[likeliest]:.0f} % are what follows from a mistake in the {likeliest}"
    raise Failure(
        f"{100 * share:.0f} % of {len(expected)} drafts ({shape} shape) are those of a pass over "
        f"the whole text without a cache; expected {100 * AGREE:.0f} %. {why}. First: the root at "
        f"position {first[1]} of a prompt of {len(first[0])} tokens, drafted "
        f"{list(drafts[first].tokens[1:])}; expected {expected[first]}."
    )


def _place(expected: Mapping[Key, list[int]], drafts: Mapping[Key, Drafted], shape: str) -> str:
    """Return where to look, by which drafts are right."""
    first_right = all(drafts[key].follows(chain[:1]) for key, chain in expected.items())
    if first_right and shape != "declared":  # what is declared was right
        return (
            "Drafts as declared are right, and wide trees are not: look at the mask of drafted "
            "rows (all true, or of another order?): each sees its own ancestors alone, and no node "
            "beside them"
        )
    if first_right:
        return (
            "The first tokens are right, and later ones are not: look at what drafted rows get, "
            "their slots (offset, lead), positions, mask and features"
        )
    if all(drafts[key].follows(c) for key, c in expected.items() if key[1] == len(key[0])):
        return (
            "Drafts after a prompt are right, and those after a verify are not: look at the keys "
            "of accepted rows (all must be written, in their order), their tokens and features"
        )
    return (
        "No usual mistake gives what is drafted: look at what the first token comes from, the "
        "tokens, features, positions and keys of committed rows, and last_rows"
    )
