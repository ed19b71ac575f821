"""Who drafts in a decode step, and how much: what ``plan_drafts`` chooses from, and its choice.

All of it is known on the host when the step is launched. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import attrs

from specplug.errors import shown

if TYPE_CHECKING:
    from torch import Tensor

NOBODY = -1
"""In ``DraftPlan.who``: nothing is drafted for the request."""

UNDRAFTED = "NONE"
"""How reports name what drafts for a request for which nothing is drafted."""


@attrs.frozen
class DraftWish:
    """What a request asks for of its drafts, by ``SamplingParams``.

    Attributes:
        algorithm: the name of the only one that may draft for it, or ``UNDRAFTED``; None: any.
        max_draft_tokens: the most tokens that are drafted for it in a step; None: any number.
    """

    algorithm: str | None = None
    max_draft_tokens: int | None = None


ANY_DRAFT = DraftWish()
"""That of a request which asks for nothing."""


@attrs.frozen(eq=False, kw_only=True)
class ForeseenDrafts:
    """The chains that an algorithm would draft for the requests of a step, known on the host.

    Attributes:
        tokens: [bs, D] int64 on the CPU, those after each root. D may be greater than the depth of
            its drafts: where the running step is not read yet the first of them are what that
            commits.
        scores: [bs, D] float32 on the CPU, of these nodes, as in ``Draft.scores``; -inf after the
            last one of a request.
        known: how many tokens of each request, its prompt included, the algorithm has read: the
            first of its ``tokens`` would follow them.
        is_current: whether it has read all tokens that the steps before have committed, so that
            this is what it would draft now. The core says so.
    """

    tokens: Tensor
    scores: Tensor
    known: Sequence[int]
    is_current: bool = False

    @staticmethod
    @lru_cache(maxsize=256)
    def untold(size: int) -> ForeseenDrafts:
        """Return that of an algorithm that does not say: D is 0."""
        import torch

        return ForeseenDrafts(
            tokens=torch.empty(size, 0, dtype=torch.int64),
            scores=torch.empty(size, 0, dtype=torch.float32),
            known=(0,) * size,
        )

    @property
    def is_told(self) -> bool:
        """Whether the algorithm says what it would draft."""
        return self.tokens.shape[1] > 0


@attrs.frozen(eq=False, kw_only=True)
class Hindsight:
    """How often an algorithm would have been right of requests for which others drafted.

    Attributes:
        algorithm: its index into ``DraftChoices.names``.
        request_ids: of n requests, some of which may have ended.
        right: [n, W] int8 on the CPU, as in ``DraftInput.hindsight``.
    """

    algorithm: int
    request_ids: Sequence[str]
    right: Tensor


@attrs.frozen(kw_only=True)
class ForcedTokens:
    """The tokens that a request's grammar forces next: keys, braces, names of functions.

    The grammar forces their text. The tokens are the tokenizer's own for it; the target may spell
    it otherwise.

    Attributes:
        known: how many tokens of the request, its prompt included, the first of them follows.
        tokens: () if what comes next is free.
    """

    known: int
    tokens: tuple[int, ...]


@attrs.frozen(eq=False, kw_only=True)
class DraftChoices:
    """What can be chosen for the requests of a decode step, [bs] in the batch's order.

    Attributes:
        names: the algorithms that can draft: those of ``A,B`` in the order of its name; of a single
            algorithm that one.
        num_draft_tokens: for each of these, the most nodes that it drafts for a request, the root
            included.
        allowed: for each request, the indices into ``names`` of those that may draft for it,
            ascending; none if the request asks for no drafts.
        most_nodes: for each request, the most nodes that can be verified, the root included: at
            least 1. It is what the request asks for at most, and what it has slots for.
        verify_budget: the most nodes of all requests together, at least bs; None: no limit.
        takes_budget: whether ``DraftPlan.verify_budget`` is heeded: the host verifies drafts whose
            widths the device alone knows.
        foreseen: for each of ``names`` what it says that it would draft, by ``foresee_drafts``.
        hindsight: what has become known, since it was last told, of what algorithms would have had
            right while they did not draft, by ``DraftInput.hindsight``. Each is told once.
    """

    names: tuple[str, ...]
    num_draft_tokens: tuple[int, ...]
    allowed: tuple[tuple[int, ...], ...]
    most_nodes: tuple[int, ...]
    verify_budget: int | None = None
    takes_budget: bool = False
    foreseen: tuple[ForeseenDrafts, ...] = ()
    hindsight: tuple[Hindsight, ...] = ()

    @classmethod
    def of(
        cls,
        drafters: Mapping[str, int],
        max_draft_nodes: Sequence[int],
        wishes: Sequence[DraftWish],
        verify_budget: int | None,
        *,
        takes_budget: bool = False,
        foreseen: tuple[ForeseenDrafts, ...] = (),
    ) -> DraftChoices:
        """Return what can be chosen.

        Args:
            drafters: ``num_draft_tokens`` by ``names``.
            max_draft_nodes: for each request, the nodes that it has slots for.
            wishes: for each request what it asks for; none: none asks for anything.
            takes_budget, foreseen: as in the attributes.
        """
        names = tuple(drafters)
        every, most = tuple(range(len(names))), tuple(max_draft_nodes)
        allowed: tuple[tuple[int, ...], ...] = (every,) * len(most)
        if wishes:
            allowed = tuple(
                every
                if wish.algorithm is None
                else tuple(index for index in every if names[index] == wish.algorithm)
                for wish in wishes
            )
            most = tuple(
                own if wish.max_draft_tokens is None else min(own, 1 + wish.max_draft_tokens)
                for own, wish in zip(most, wishes, strict=True)
            )
        return cls(
            names=names,
            num_draft_tokens=tuple(drafters.values()),
            allowed=allowed,
            most_nodes=most,
            verify_budget=verify_budget,
            takes_budget=takes_budget,
            foreseen=foreseen,
        )

    @property
    def size(self) -> int:
        """bs."""
        return len(self.most_nodes)

    def default(self) -> DraftPlan:
        """Return the choice of a run without a policy: the first algorithm that a request allows
        drafts for it, as much as it can."""
        who = tuple(allowed[0] if allowed else NOBODY for allowed in self.allowed)
        return self.bound(DraftPlan(who=who, most_nodes=self.most_nodes))

    def bound(self, plan: DraftPlan) -> DraftPlan:
        """Return a plan within what requests allow: where one does not allow the algorithm, or no
        node after the root, nobody drafts.

        Raises:
            ValueError: the plan does not fit the step; see ``DraftPlan.check``.
        """
        plan.check(self)
        each = zip(plan.who, plan.most_nodes, self.allowed, self.most_nodes, strict=True)
        who, nodes = [], []
        for drafter, planned, allowed, most in each:
            room = min(planned, most)
            drafts = drafter in allowed and room > 1
            who.append(drafter if drafts else NOBODY)
            nodes.append(room if drafts else 1)
        return DraftPlan(
            who=tuple(who),
            most_nodes=tuple(nodes),
            verify_budget=self._bound_budget(plan.verify_budget, sum(nodes)),
            as_foreseen=plan.as_foreseen,
            reason=plan.reason,
            expected_tokens=plan.expected_tokens,
            expected_seconds=plan.expected_seconds,
        )

    def _bound_budget(self, planned: int | None, nodes: int) -> int | None:
        """Return the budget of a plan of so many nodes, if it is one and is heeded."""
        return planned if self.takes_budget and planned is not None and planned < nodes else None


@attrs.frozen(kw_only=True)
class DraftPlan:
    """Who drafts for each request of a decode step, and how much.

    Attributes:
        who: [bs] the index into ``DraftChoices.names`` of the algorithm that drafts for the
            request; -1: nobody, and its root alone is verified.
        most_nodes: [bs] the most nodes that are drafted for it, the root included, at least 1. The
            algorithm learns it before it drafts (``Batch.max_draft_nodes``), and its draft is cut
            to it. Greater than what it can draft, or has room for: that is what counts.
        verify_budget: the most nodes that are verified of all requests together, the roots
            included, at least bs; None: all that are drafted. The core keeps those that survive
            most likely, by the calibrated scores of the drafts, on the device. A host that cannot
            (``DraftChoices.takes_budget``) verifies all. The run's own budget binds too.
        as_foreseen: algorithms that say what they would draft (``foresee_drafts``) are taken at
            their word, and so many nodes of it are verified at most, the roots not counted: the
            likeliest. They are not asked to ``propose``, which waits for what the running step
            commits: on the device the core goes on after that in what they foresaw, whether or not
            it is what they foresaw. None: they are asked.
        reason: why it is so, in a few words for people; nothing goes by it. "": it is not said.
        expected_tokens: that the step is expected to give, of all requests, the bonus tokens
            included; None: it is not estimated.
        expected_seconds: that it is expected to take; None: it is not estimated.
    """

    who: tuple[int, ...]
    most_nodes: tuple[int, ...]
    verify_budget: int | None = None
    as_foreseen: int | None = None
    reason: str = ""
    expected_tokens: float | None = None
    expected_seconds: float | None = None

    @property
    def drafts_nothing(self) -> bool:
        """Whether nobody drafts for any request."""
        return all(index < 0 for index in self.who)

    def check(self, choices: DraftChoices) -> None:
        """Refuse what is no plan for a step.

        Raises:
            ValueError: what was found, and what was expected.
        """
        size, last = choices.size, len(choices.names) - 1
        for name, found, least, most in (
            ("who", self.who, NOBODY, last),
            ("most_nodes", self.most_nodes, 1, None),
        ):
            fits = type(found) is tuple and len(found) == size and set(map(type, found)) <= {int}
            if not fits or (
                found and (min(found) < least or (most is not None and max(found) > most))
            ):
                bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
                raise ValueError(
                    f"{name}={shown(found)}; expected a tuple with one integer {bounds} for each "
                    f"of the {size} requests"
                )
        budget = self.verify_budget
        if not (budget is None or (type(budget) is int and budget >= size)):
            raise ValueError(
                f"verify_budget={shown(budget)}; expected an integer of at least {size}, one node "
                "for each request, or None"
            )
        nodes = self.as_foreseen
        if not (nodes is None or (type(nodes) is int and nodes >= 0)):
            raise ValueError(f"as_foreseen={shown(nodes)}; expected a number of nodes, or None")
        if not isinstance(self.reason, str):
            raise ValueError(f"reason={shown(self.reason)}; expected a text")
        for name in ("expected_tokens", "expected_seconds"):
            value = getattr(self, name)
            if not (value is None or (isinstance(value, float | int) and value >= 0)):
                raise ValueError(f"{name}={shown(value)}; expected a number, or None")
