"""Lookahead decoding (arXiv 2402.02057): the target's guesses of later tokens, kept as n-grams.

There is no draft model. Each draft is a tree of two parts. The *candidates* are n-grams of the
request's pool that begin with the root. The *window* is the lookahead branch: a chain of guesses
(level 0), from each token of which hangs a diagonal (levels 1 … n - 2). The target verifies both in
one pass, and what it says after the last token of each diagonal ends an n-gram of the pool. Then
each level takes the place of the one before it, as in Jacobi iteration.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import attrs

import specplug
from specplug.settings import Integer, setting

if TYPE_CHECKING:
    from torch import Tensor

MOST_GRAMS = 4096
"""N-grams of a request that are kept, the newest ones."""

PREDICTED = "lookahead_predicted"


@attrs.frozen(kw_only=True)
class LookaheadSettings:
    lookahead_window: int = setting(
        5, Integer(least=1), "Guesses of a level.", group="LOOKAHEAD", unit="tokens"
    )
    lookahead_ngram: int = setting(
        4, Integer(least=2), "Tokens of an n-gram, its first one included.", group="LOOKAHEAD"
    )


class Trie:
    """The nodes of one request's draft; equal paths share nodes.

    Args:
        root: token.
        most: nodes, at least 1.
        deepest: the greatest depth of a node.
    """

    def __init__(self, root: int, most: int, deepest: int) -> None:
        self.tokens, self.parents, self._depths = [root], [-1], [0]
        self._children: dict[tuple[int, int], int] = {}
        self._most, self._deepest = most, deepest

    def add(self, parent: int | None, token: int) -> int | None:
        """Return the child of a node; None if there is no room, or no such parent."""
        if parent is None:
            return None
        found = self._children.get((parent, token))
        if found is None:
            if len(self.tokens) >= self._most or self._depths[parent] >= self._deepest:
                return None
            found = self._children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
        return found


class Lookahead:
    """What one request has guessed: its window, and its pool of n-grams.

    Args:
        text: the prompt, of which the first guesses are made.
        window: W, guesses of a level.
        size: n.
    """

    def __init__(self, text: Sequence[int], window: int, size: int) -> None:
        self.root = text[-1]
        self._size = size
        self._pool: OrderedDict[tuple[int, ...], None] = OrderedDict()
        self._recent = list(text[-size:])
        for start in range(max(len(text) - MOST_GRAMS, 0), len(text) - size + 1):
            self._keep(tuple(text[start : start + size]))
        seen = list(text) * (window + size)
        self._levels = [seen[-window - level :][:window] for level in range(size - 1)]
        self._ends: list[int | None] = []

    def _keep(self, gram: tuple[int, ...]) -> None:
        self._pool.pop(gram, None)
        self._pool[gram] = None
        if len(self._pool) > MOST_GRAMS:
            self._pool.popitem(last=False)

    def commit(self, tokens: Sequence[int]) -> None:
        """Take what was committed; its n-grams are in the pool too."""
        for token in tokens:
            self.root = token
            self._recent = [*self._recent, token][-self._size :]
            if len(self._recent) == self._size:
                self._keep(tuple(self._recent))

    def learn(self, predicted: Sequence[int]) -> None:
        """Take what the target said after each node of the last draft: n-grams, and a new level."""
        said = []
        for index, end in enumerate(self._ends):
            token = -1 if end is None or end >= len(predicted) else predicted[end]
            if token >= 0:
                self._keep((*(level[index] for level in self._levels), token))
            said.append(token if token >= 0 else self._levels[-1][index])
        if said:
            self._levels, self._ends = [*self._levels[1:], said], []

    def draft(self, most: int, deepest: int, candidates: int) -> Trie:
        """Draft the newest n-grams that begin with the root, then the window, as far as there is
        room."""
        trie, found = Trie(self.root, most, deepest), 0
        for gram in reversed(self._pool):
            if gram[0] == self.root and found < candidates:
                node: int | None = 0
                for token in gram[1:]:
                    node = trie.add(node, token)
                found += 1
        self._ends, node = [], 0
        for index in range(len(self._levels[0])):
            node = end = trie.add(node, self._levels[0][index])
            for level in self._levels[1:]:
                end = trie.add(end, level[index])
            self._ends.append(end)
        return trie


class LookaheadAlgorithm:
    """The hooks of ``LOOKAHEAD``. The worker is what requests have guessed, by their ids; it is on
    the host, which reads each step's results before it drafts the next one."""

    @specplug.hookimpl
    def describe(self) -> specplug.AlgorithmInfo:
        return specplug.AlgorithmInfo(
            name="LOOKAHEAD",
            summary="Lookahead decoding: n-grams of the target's own guesses; no draft model",
            api_version=1,
            capabilities=specplug.Capabilities(branching=True),
            defaults=specplug.Defaults(num_steps=7, topk=5, num_draft_tokens=31),
            paper="https://arxiv.org/abs/2402.02057",
            settings=LookaheadSettings,
            conformance=specplug.Conformance(
                accept_lengths={specplug.DEFAULT_MODEL: 2.47},
                expected_failures={
                    "blind.invariance": "the window is what earlier drafts left; cuts change it",
                    "blind.replay": "a prompt does not tell what was guessed while it was written",
                },
            ),
        )

    @specplug.hookimpl
    def create_worker(self, runtime: specplug.Runtime) -> dict[str, Lookahead]:
        return {}

    @specplug.hookimpl
    def propose(
        self, runtime: specplug.Runtime, batch: specplug.Batch, draft_input: specplug.DraftInput
    ) -> specplug.Draft:
        import torch

        config, roots = runtime.config, draft_input.bonus_tokens
        tries = []
        for request, most in zip(batch.requests, batch.max_draft_nodes, strict=True):
            room = min(config.num_draft_tokens, most)
            guessed = runtime.worker.get(request.request_id)
            trie = Trie(0, room, config.num_steps)
            if guessed is not None:
                trie = guessed.draft(room, config.num_steps, config.topk)
            for token in range(room if batch.is_warm_up else 0):
                trie.add(0, token)  # as wide as any draft, for what is compiled and recorded
            tries.append(trie)
        widths = [len(trie.tokens) for trie in tries]
        tokens = torch.zeros(batch.size, max(widths), dtype=torch.int64)
        parents = torch.zeros_like(tokens)  # of padding too, as it must be
        for row, trie in enumerate(tries):
            tokens[row, : widths[row]] = torch.tensor(trie.tokens)
            parents[row, : widths[row]] = torch.tensor(trie.parents)
        tokens, parents = (each.to(roots.device, non_blocking=True) for each in (tokens, parents))
        tokens[:, 0] = roots
        depth = min(config.num_steps, max(widths) - 1)
        return specplug.Draft.tree(tokens, parents, depth, widths)

    @specplug.hookimpl
    def verify(
        self,
        runtime: specplug.Runtime,
        batch: specplug.Batch,
        draft: specplug.Draft,
        target_output: specplug.TargetOutput,
    ) -> None:
        """Give each node all that the target says of its request, -1 where a cut left no node: what
        is accepted keeps it for ``build_draft_input``. The core verifies."""
        import torch

        predict, width = target_output.predict, draft.tokens.shape[1]
        places = draft.places
        if places is None:
            widths = draft.widths or [width] * batch.size
            on_host = [row * width + i for row, n in enumerate(widths) for i in range(n)]
            places = torch.tensor(on_host, dtype=torch.int64).to(predict.device, non_blocking=True)
        said = torch.full((batch.size * width,), -1, dtype=torch.int64, device=predict.device)
        said[places] = predict
        target_output.per_node[PREDICTED] = said.view(batch.size, width)[places // width]

    @specplug.hookimpl
    def build_draft_input(
        self,
        runtime: specplug.Runtime,
        batch: specplug.Batch,
        target_output: specplug.CommittedOutput,
    ) -> specplug.DraftInput:
        import torch

        roots = target_output.bonus_tokens
        if batch.is_warm_up:
            return specplug.DraftInput(bonus_tokens=roots)
        if batch.is_prefill:
            begun = zip(batch.requests, batch.last_chunk, strict=True)
            _begin(runtime, [(each.request_id, each.token_ids) for each, last in begun if last])
            counts = torch.tensor(batch.last_chunk, dtype=torch.int64)
            host = {"tokens": roots.unsqueeze(1), "counts": counts}
            return specplug.DraftInput(bonus_tokens=roots, host=host)
        host = {
            "tokens": target_output.next_tokens.view(batch.size, -1),
            "counts": target_output.accept_lens,
            # The first row of each request is its root's; all rows have the same.
            "predicted": target_output.per_node[PREDICTED].unflatten(0, (batch.size, -1))[:, 0],
        }
        return specplug.DraftInput(bonus_tokens=roots, host=host)

    @specplug.hookimpl
    def build_disagg_draft_input(
        self, runtime: specplug.Runtime, batch: specplug.Batch, last_tokens: Tensor
    ) -> specplug.DraftInput:
        """Begin with the prompts, which another instance has prefilled."""
        import torch

        _begin(runtime, [(each.request_id, each.prompt_token_ids) for each in batch.requests])
        host = {"tokens": last_tokens.unsqueeze(1), "counts": torch.ones_like(last_tokens)}
        return specplug.DraftInput(bonus_tokens=last_tokens, host=host)

    @specplug.hookimpl
    def on_host_tensors(
        self,
        runtime: specplug.Runtime,
        request_ids: Sequence[str],
        tensors: Mapping[str, Tensor],
    ) -> None:
        tokens, counts = (tensors[name].tolist() for name in ("tokens", "counts"))
        predicted = tensors["predicted"].tolist() if "predicted" in tensors else None
        for row, request_id in enumerate(request_ids):
            guessed = runtime.worker.get(request_id)
            if guessed is not None:
                if predicted is not None:
                    guessed.learn(predicted[row])
                guessed.commit(tokens[row][: counts[row]])

    @specplug.hookimpl
    def on_request_finished(
        self, runtime: specplug.Runtime, report: specplug.RequestReport
    ) -> None:
        runtime.worker.pop(report.request_id, None)


def _begin(runtime: specplug.Runtime, texts: Sequence[tuple[str, Sequence[int]]]) -> None:
    settings: LookaheadSettings = runtime.config.settings
    for request_id, text in texts:
        runtime.worker[request_id] = Lookahead(
            text, settings.lookahead_window, settings.lookahead_ngram
        )


algorithm = LookaheadAlgorithm()
