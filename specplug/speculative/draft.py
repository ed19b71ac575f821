"""What is proposed (``Draft``) and what a proposal is made from (``DraftInput``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import accumulate
from operator import index
from typing import TypeGuard

import attrs
import torch
from torch import Tensor
from torch.nn import Parameter

from specplug import debug
from specplug.errors import shown
from specplug.kernels.kernel_table import runs_tree_kernels
from specplug.kernels.score_tables import LEAST_SCORE
from specplug.speculative.host_copy import host_copy, upload
from specplug.speculative.padding import Padding


def arange(length: int, device: torch.device) -> Tensor:
    """Return [length] int64, the same tensor each time but while a graph is recorded: for the core
    alone, never lent to a plugin."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return torch.arange(length, device=device)  # a graph outlives what is kept
    return _kept_arange(length, device)


@lru_cache(maxsize=64)
def _kept_arange(length: int, device: torch.device) -> Tensor:
    return torch.arange(length, device=device)


@attrs.define(eq=False, kw_only=True, slots=False)
class Draft:
    """The nodes that the target is to verify, for every request of a batch.

    Node 0 of each request is its root, the bonus token; a parent stands before its children. Made
    by ``Draft.chain`` or ``Draft.tree``. Where a plugin returns a subclass, the engine takes the
    values below and calls no method of it.

    Attributes:
        tokens: [bs, N] int64.
        parents: [bs, N] int64, -1 at the root; None for chains.
        widths: how many nodes of each request count, each from 1 to N; None if all are N wide.
            Known on the host, so that what is not drafted is not computed.
        depth: S, the deepest node's distance from its root; a step accepts at most S + 1 tokens.
        scores: [bs, N] float32, at each node the logarithm of the probability that the target takes
            it where it took its parent: at most 0, and 0 at the root. None: not known.
        places: [T] int64 ascending, where the nodes that count stand among the bs·N, after a cut
            over the batch: how many each request has is then known on the device alone, and
            ``widths`` is None. None: ``widths`` says which count. The core alone sets it.
    """

    tokens: Tensor
    parents: Tensor | None
    widths: tuple[int, ...] | None
    depth: int
    scores: Tensor | None = None
    places: Tensor | None = attrs.field(init=False, default=None)

    @classmethod
    def chain(
        cls, tokens: Tensor, widths: Sequence[int] | None = None, *, scores: Tensor | None = None
    ) -> Draft:
        """Make a chain for each request: ``tokens`` [bs, N], of which ``widths`` count.

        Raises:
            ValueError: they do not fit; see ``check``.
        """
        width = _width_of(tokens)
        draft = cls(
            tokens=tokens,
            parents=None,
            widths=_ragged(widths, width),
            depth=width - 1,
            scores=scores,
        )
        draft.check(values=debug.DEBUG)
        return draft

    @classmethod
    def tree(
        cls,
        tokens: Tensor,
        parents: Tensor,
        depth: int,
        widths: Sequence[int] | None = None,
        *,
        scores: Tensor | None = None,
    ) -> Draft:
        """Make a tree for each request.

        Args:
            tokens: [bs, N] int64; siblings differ.
            parents: [bs, N] int64, -1 at node 0, ``parents[b, i] < i``. Another node with parent -1
                and score -inf is absent: it takes a row, and is never accepted.
            depth: the greatest depth of any node, known on the host (``num_steps``). A node that
                is deeper is never accepted.
            widths: nodes that count; None if all do.
            scores: [bs, N] float32, as in ``Draft``; None: not known.

        Raises:
            ValueError: they do not fit; see ``check``.
        """
        draft = cls(
            tokens=tokens,
            parents=parents,
            widths=_ragged(widths, _width_of(tokens)),
            depth=depth,
            scores=scores,
        )
        draft.check(values=debug.DEBUG)
        return draft

    def rooted(self, roots: Tensor, vocab_size: int) -> Draft:
        """Return this draft as the engine verifies it, in tensors of its own.

        The roots are the engine's, every token is one of the vocabulary, and a node without a
        parent before it has none: it is never accepted (``lost``), nor is what hangs from it. The
        scores are the plugin's: they say which nodes a cut keeps, and change no token.

        Args:
            roots: [bs] int64 bonus tokens.
            vocab_size: V.
        """
        parents = self.parents
        if parents is not None and runs_tree_kernels(self.tokens):
            return self._rooted_at_once(roots, parents, vocab_size)
        tokens = roots.unsqueeze(1)
        if self.width > 1:
            # Two launches of torch take a host 20 us, beside an H200; one of Triton takes 23.
            tokens = self.tokens.clamp(0, vocab_size - 1).contiguous()
            tokens[:, 0] = roots
        if parents is not None:
            order = arange(self.width, parents.device)
            parents = torch.where((parents < 0) | (parents >= order), -1, parents)
        return self._like(tokens, parents)

    def _like(self, tokens: Tensor, parents: Tensor | None) -> Draft:
        """Return a draft of other tokens and parents."""
        return Draft(
            tokens=tokens,
            parents=parents,
            widths=self.widths,
            depth=self.depth,
            scores=self.scores,
        )

    def _rooted_at_once(self, roots: Tensor, parents: Tensor, vocab_size: int) -> Draft:
        """Root a tree in one launch, which computes what the step needs of it too."""
        from specplug.kernels.tree import root_trees

        tokens, parents, *of_tree = root_trees(self.tokens, parents, self.depth, roots, vocab_size)
        draft = self._like(tokens, parents)
        draft._at_once = tuple(of_tree)
        return draft

    def copy(self) -> Draft:
        """Return the same in tensors of its own, to lend."""
        parents, scores = (
            None if own is None else own.clone() for own in (self.parents, self.scores)
        )
        copied = attrs.evolve(self, tokens=self.tokens.clone(), parents=parents, scores=scores)
        copied.places = None if self.places is None else self.places.clone()
        return copied

    @property
    def is_chain(self) -> bool:
        """Whether every request's nodes follow one another, so that nothing moves on acceptance."""
        return self.parents is None

    @property
    def columns(self) -> int:
        """C, the most tokens that a step can accept: ``accept_index.shape[1]``."""
        return self.depth + 1

    @property
    def width(self) -> int:
        """N."""
        return self.tokens.shape[1]

    @property
    def total(self) -> int:
        """T, the nodes of all requests."""
        if self.places is not None:
            return len(self.places)
        return sum(self.widths) if self.widths is not None else self.tokens.numel()

    def is_wider(self, max_draft_nodes: Sequence[int]) -> bool:
        """Return whether a request has more nodes than ``max_draft_nodes`` [bs] says for it."""
        assert self.places is None, "the cut over the batch is the last one"
        widths = self.widths or (self.width,) * len(max_draft_nodes)
        return any(width > most for width, most in zip(widths, max_draft_nodes, strict=True))

    @property
    def is_ragged(self) -> bool:
        """Whether some of the bs·N nodes do not count."""
        return self.widths is not None or self.places is not None

    @cached_property
    def counts(self) -> Tensor:
        """[bs] int64, how many nodes of each request count."""
        bs, device = len(self.tokens), self.tokens.device
        if self.places is not None:
            zeros = torch.zeros(bs, dtype=torch.int64, device=device)
            owner = self.places // self.width
            return zeros.scatter_add_(0, owner, torch.ones_like(owner))
        return upload(self.widths or (self.width,) * bs, device)

    @cached_property
    def _at_once(self) -> tuple[Tensor, ...] | None:
        """Mask, depths and lost of a tree where one launch computes them; None where torch does."""
        if self.parents is None or not runs_tree_kernels(self.tokens):
            return None
        from specplug.kernels.tree import root_trees

        return root_trees(self.tokens, self.parents, self.depth)[2:]

    @cached_property
    def mask(self) -> Tensor:
        """[bs or 1, N, N] bool, node i sees node j: j is i or an ancestor of i."""
        if self.parents is None:
            one = torch.ones(1, self.width, self.width, dtype=torch.bool, device=self.tokens.device)
            return one.tril_()
        if self._at_once is not None:
            return self._at_once[0]
        return ancestor_mask(self.parents, self.depth)

    @cached_property
    def depths(self) -> Tensor:
        """[bs or 1, N] int64 distance from the root."""
        if self.parents is None:
            return torch.arange(self.width, device=self.tokens.device).unsqueeze(0)
        if self._at_once is not None:
            return self._at_once[1]
        return self.mask.sum(-1) - 1

    @cached_property
    def lost(self) -> Tensor:
        """[bs, N] bool, nodes that can never be accepted: no path of at most ``depth`` steps leads
        to them from the root. In a valid tree all are False but the root's, which is not read."""
        assert self.parents is not None
        if self._at_once is not None:
            return self._at_once[2]
        return (self.parents < 0) | (self.depths > self.depth) | ~self.mask[:, :, 0]

    def host_counts(self) -> tuple[int, ...] | Tensor:
        """Return how many nodes of each request count; where the device alone knows it, a tensor
        [bs] int64 that is being copied to the host."""
        if self.places is not None:
            return host_copy(self.counts)
        return self.widths or (self.width,) * len(self.tokens)

    @cached_property
    def offsets(self) -> Tensor:
        """[bs] int64, the flat index of each request's root among the T nodes."""
        device = self.tokens.device
        if self.places is not None:
            return self.counts.cumsum(0) - self.counts
        if self.widths is None:
            return arange(self.tokens.shape[0], device) * self.width
        starts = [0, *accumulate(self.widths)][:-1]
        return upload(starts, device)

    @cached_property
    def padding(self) -> Padding | None:
        """Where the T nodes of the flat order stand in the padded bs·N; None if dense."""
        if self.places is not None:
            return Padding.at(self.places, *self.tokens.shape)
        if self.widths is None:
            return None
        return Padding.of(self.widths, self.width, self.tokens.device)

    @cached_property
    def links(self) -> tuple[Tensor, Tensor]:
        """The tree as a kernel walks it: ``next_token`` and ``next_sibling``, each [bs, N] int64.

        The first child of a node, and the next child of its parent; -1 where there is none, and
        at nodes that do not count. From the root: to the first child while its token is what the
        target says, else to that child's next sibling.
        """
        bs, width = self.tokens.shape
        order = arange(width, self.tokens.device)
        parents = order.expand(bs, -1) - 1 if self.parents is None else self.parents
        if self.is_ragged:
            parents = torch.where(order < self.counts.unsqueeze(1), parents, -2)
        child_of = parents.unsqueeze(1) == order.unsqueeze(1)  # [bs, N, N], node j is i's child
        is_node = parents.unsqueeze(2) >= 0
        later = (
            (parents.unsqueeze(1) == parents.unsqueeze(2)) & is_node & (order > order.unsqueeze(1))
        )
        return _first(child_of, order), _first(later, order)

    def flatten(self, padded: Tensor) -> Tensor:
        """Put what stands at each node in the flat order: [bs or 1, N] -> [T]."""
        return self.select(padded.expand(self.tokens.shape).reshape(-1))

    @cached_property
    def flat_tokens(self) -> Tensor:
        """[T] int64, the tokens in the flat order."""
        return self.select(self.tokens.reshape(-1))

    def spread(self, values: Tensor) -> Tensor:
        """Give each node what its request has: [bs] -> [T], in the flat order."""
        if self.width == 1:
            return values
        if self.places is not None:
            return values[self.places // self.width]
        return self.select(values.repeat_interleave(self.width, output_size=self.tokens.numel()))

    def pad(self, flat: Tensor, fill: int) -> Tensor:
        """Pad [T] to [bs, N], with ``fill`` at nodes that do not count."""
        if self.padding is None:
            return flat.view(self.tokens.shape)
        padded = flat.new_full((self.tokens.numel(),), fill)
        return padded.index_copy_(0, self.padding.flat_index, flat).view(self.tokens.shape)

    def select(self, padded: Tensor) -> Tensor:
        """Select the nodes' rows: [bs·N, …] in the padded order -> [T, …] in the flat order."""
        return padded if self.padding is None else padded[self.padding.flat_index]

    @property
    def survival(self) -> Tensor:
        """[bs, N] float32, the logarithm of the probability that the target takes a node and all
        that it hangs from, as the scores say; never greater than its parent's.

        A score above 0 counts as 0, and NaN as the least.
        """
        assert self.scores is not None
        scores = self.scores.nan_to_num(nan=LEAST_SCORE).clamp(LEAST_SCORE, 0.0)
        scores[:, 0] = 0.0
        return self.along_paths(scores)

    def along_paths(self, values: Tensor) -> Tensor:
        """Sum what stands at the nodes of each path.

        Args:
            values: [bs, N] float32, at most 0, and 0 at the root.

        Returns:
            [bs, N] float32: the sum for the path to each node, never greater than its parent's.
        """
        if self.parents is None:
            return values.cumsum(1)
        # Rows are summed in one order, and rounding is monotone: a term less than 0 raises no sum.
        return torch.where(self.mask, values.unsqueeze(1), 0.0).sum(-1)

    def least_along_paths(self, values: Tensor) -> Tensor:
        """Return the least value of the path to each node, [bs, N] to [bs, N] float32."""
        if self.parents is None:
            return values.cummin(1).values
        return torch.where(self.mask, values.unsqueeze(1), torch.inf).amin(-1)

    def check(self, *, values: bool) -> None:
        """Refuse what is no draft: by type, dtype and shape, and by ``values`` too, which are read
        on the host.

        Raises:
            ValueError: what was found, and what was expected.
        """
        tokens, parents, widths, depth = self.tokens, self.parents, self.widths, self.depth
        width = _width_of(tokens)
        if tokens.dtype != torch.int64:
            raise ValueError(f"tokens of {tokens.dtype}; expected torch.int64")
        if type(depth) is not int or depth < 0:
            raise ValueError(f"depth={shown(depth)}; expected an integer of at least 0")
        if parents is None:
            if depth != width - 1:
                raise ValueError(f"a chain of {width} nodes, {depth} deep; expected {width - 1}")
        elif not (
            is_dense(parents)
            and (parents.dtype, parents.shape, parents.device)
            == (torch.int64, tokens.shape, tokens.device)
        ):
            found = described(parents)
            raise ValueError(f"parents {found}; expected them like tokens, {described(tokens)}")
        if self.scores is not None and not (
            is_dense(self.scores)
            and (self.scores.dtype, self.scores.shape, self.scores.device)
            == (torch.float32, tokens.shape, tokens.device)
        ):
            raise ValueError(
                f"scores {described(self.scores)}; expected {list(tokens.shape)} of torch.float32 "
                f"on {tokens.device}, or None"
            )
        if widths is not None:
            bs = tokens.shape[0]
            is_of_integers = type(widths) is tuple and set(map(type, widths)) <= {int}
            are_there = is_of_integers and len(widths) == bs
            if not are_there or (bs and not 1 <= min(widths) <= max(widths) <= width):
                raise ValueError(
                    f"widths={shown(widths)}; expected one integer from 1 to {width} for each of "
                    f"the {bs} requests"
                )
        if values and parents is not None:
            self._check_tree(parents)
        if values and self.scores is not None:
            counted = self.flatten(self.scores)
            what = "scores must be logarithms of probabilities, at most 0"
            _expect((counted <= 0).all(), what, self.scores)
            _expect((self.scores[:, 0] == 0).all(), "the root's score must be 0", self.scores)

    def _check_tree(self, parents: Tensor) -> None:
        order = torch.arange(self.width, device=parents.device)
        absent = torch.zeros_like(parents, dtype=torch.bool)
        if self.scores is not None:
            absent = (parents < 0) & (self.scores == -torch.inf)
        _expect((parents[:, 0] == -1).all(), "node 0 must be the root, with parent -1", parents)
        _expect((parents < order).all(), "a parent must stand before its children", parents)
        rooted = (parents >= 0) | absent
        _expect(rooted[:, 1:].all(), "only node 0 is a root, unless a score is -inf", parents)
        mask = ancestor_mask(parents, self.width)
        deep = (mask.sum(-1) - 1 > self.depth) & ~absent
        _expect(~deep.any(), f"a node is deeper than the declared depth {self.depth}", parents)
        same = (parents.unsqueeze(1) == parents.unsqueeze(2)) & (
            self.tokens.unsqueeze(1) == self.tokens.unsqueeze(2)
        )
        valid = ~absent
        if self.widths is not None:
            valid &= order < torch.tensor(self.widths, device=parents.device).unsqueeze(1)
        same &= valid.unsqueeze(1) & valid.unsqueeze(2)
        _expect((same.sum((1, 2)) == valid.sum(1)).all(), "siblings must differ", self.tokens)


def _width_of(tokens: Tensor) -> int:
    if not is_dense(tokens) or tokens.dim() != 2 or tokens.shape[1] < 1:
        found = described(tokens)
        raise ValueError(f"tokens {found}; expected a tensor [bs, N], the root among the N nodes")
    return tokens.shape[1]


def _expect(holds: Tensor, what: str, found: Tensor) -> None:
    if not bool(holds):
        raise ValueError(f"{what}; found {found.tolist()}")


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Return whether a value is a tensor of torch's own type, whose elements lie in memory by its
    strides: neither of a subclass, which may change any operation, nor sparse, nested or quantized,
    nor one whose memory was given back."""
    if type(value) is not Tensor and type(value) is not Parameter:
        return False
    if value.layout is not torch.strided or value.is_nested or value.is_quantized:
        return False
    return value.is_meta or value.data_ptr() != 0 or value.numel() == 0


def described(value: object) -> str:
    """Describe a tensor by its shape, dtype and device, and by what it is if it is not dense;
    anything else by its type."""
    if type(value) is not Tensor and type(value) is not Parameter:
        return f"of type {type(value).__name__}"
    if value.is_nested:
        return f"nested, of {value.dtype} on {value.device}"
    kind = "" if value.layout is torch.strided else f" in {value.layout}"
    if not kind and not is_dense(value):
        kind = ", quantized" if value.is_quantized else ", without memory"
    return f"{list(value.shape)} of {value.dtype} on {value.device}{kind}"


def _ragged(widths: Sequence[int] | None, width: int) -> tuple[int, ...] | None:
    if widths is None or all(w == width for w in widths):
        return None
    return tuple(map(index, widths))


def _first(chosen: Tensor, order: Tensor) -> Tensor:
    """Return each row's first chosen index, [bs, N, N] bool -> [bs, N] int64, -1 if there is
    none."""
    none = len(order)
    first = torch.where(chosen, order, none).amin(-1)
    return torch.where(first < none, first, -1)


def ancestor_mask(parents: Tensor, depth: int) -> Tensor:
    """Return which nodes each sees, [bs, N] parents -> [bs, N, N] bool: j is i or an ancestor of i.

    Doubling: after k rounds every node sees 2^k generations, so log2(depth) rounds suffice.
    """
    bs, width = parents.shape
    seen = torch.eye(width, dtype=torch.bool, device=parents.device).expand(bs, -1, -1)
    step = parents.clamp(min=0)
    seen = seen | torch.zeros_like(seen).scatter_(2, step.unsqueeze(2), True)
    # The root's clamped parent is itself, so nothing false is marked.
    reach = 1
    while reach < depth:
        seen = seen | (seen.to(torch.float32) @ seen.to(torch.float32) > 0)
        reach *= 2
    return seen


@attrs.define(eq=False, kw_only=True)
class DraftInput:
    """What ``build_draft_input`` leaves for the next ``propose``.

    Its state is copied by request row into the future map; the tensors may be used again at once.
    Where a plugin returns a subclass, the engine takes the values below and calls no method of it;
    ``propose`` gets a ``DraftInput``.

    Attributes:
        bonus_tokens: [bs] int64, the next step's roots. What is verified begins at the engine's
            own, whatever stands here.
        state: named tensors of leading size bs, in the form that ``worker.state_spec()`` declares;
            None for a state that is absent, which is read as zeros.
        host: named tensors of leading size bs, on the device or the CPU, for ``on_host_tensors``.
            The core starts copying them when the step is launched.
        hindsight: [bs, W] int8, where several steps of a request were fed together: whether one
            drafted token after each of some tokens would have been right, 1 or 0; -1: not known.
            None: nothing is told. The choice of drafts learns from it (``DraftChoices.hindsight``).
    """

    bonus_tokens: Tensor
    state: Mapping[str, Tensor | None] = attrs.field(factory=dict)
    host: Mapping[str, Tensor | None] = attrs.field(factory=dict)
    hindsight: Tensor | None = None

    def __getitem__(self, name: str) -> Tensor:
        tensor = self.state.get(name)
        if tensor is None:
            raise KeyError(
                f"the draft state {name!r} is absent: no request of the batch has left it; what "
                "worker.state_spec() declares is always there, as zeros if it was never left"
            )
        return tensor
