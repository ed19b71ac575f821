"""The drafter of MTP layers: each layer runs once, right after the target's pass.

Layer k reads, at a position p, the token at p + k. For the last k - 1 committed positions that
token is only drafted when the pass runs. So the next pass begins S - 1 positions before its new
rows, and computes these positions again with the committed tokens: no stale key remains.

Each layer reads the likeliest token of the layer before it. The K likeliest of a layer are the
children of that one's: a tree of a chain and of leaves beside its nodes, each with the probability
that its own layer gives it.
"""

from __future__ import annotations

import attrs
import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    FutureMap,
    LikeliestTokens,
    Runtime,
    StateTensor,
    UsageError,
    chunk_tails,
    couple,
    layers,
    received_state,
    rotate_chunks,
    select_nodes,
)
from specplug_multi_layer_eagle.checkpoint import load_network


@attrs.define(eq=False)
class _Window:
    """The rows of one pass: W earlier ones of each request, then its new ones.

    Attributes:
        plan: positions and slots of the rows.
        hidden: [R, H] the target's hidden states.
        tokens: [R] int64, the token after each row's position.
        last_rows: [bs] int64, each request's last committed row.
    """

    plan: AttentionPlan
    hidden: Tensor
    tokens: Tensor
    last_rows: Tensor


class MultiLayerEagleWorker:
    """MTP layers and their KV cache.

    The state between two steps is K * S drafts and their scores: ``drafts`` and ``scores`` [bs, S]
    of the likeliest token of each layer, ``drafts_1`` and ``scores_1`` of the second, and so on.
    With it go the inputs of the last W = S - 1 committed positions, which the next pass computes
    again: the target's ``hidden_states`` [bs, W, H], and ``tokens`` [bs, W], the token after each.

    Raises:
        UsageError: ``topk`` is greater than the vocabulary.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._find_likeliest = LikeliestTokens(runtime.device)
        # A draft of the root alone needs no layer.
        self._width = runtime.config.num_draft_tokens
        self._steps = runtime.config.num_steps if self._width > 1 else 0
        self._topk = runtime.config.topk
        if self._topk > runtime.vocab_size:
            raise UsageError(
                f"topk={self._topk}: the target knows {runtime.vocab_size} tokens; "
                "expected no more than these"
            )
        suffixes = ["", *(f"_{rank}" for rank in range(1, self._topk))]
        self._names = [(f"drafts{suffix}", f"scores{suffix}") for suffix in suffixes]
        self._earlier = max(self._steps - 1, 0)
        self.network = load_network(runtime)
        self._captured = runtime.capture_lm_head_input()
        config = self.network.config
        self._cache = runtime.allocate_kv(self._steps, config.num_key_value_heads, config.head_dim)
        self._vocabulary = torch.arange(runtime.vocab_size, device=runtime.device)
        self._draft_paths = runtime.record_draft(self._draft)
        self._select = runtime.record_draft(self._tree)
        # Each node's parent is the first of the layer before it.
        first = torch.arange(-1, self._steps - 1, device=runtime.device) * self._topk
        self._parents = first.clamp(min=-1).repeat_interleave(self._topk)
        self._back = torch.arange(-self._earlier, 0, device=runtime.device) + 1

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare the state between two steps; {} if drafts are the root alone."""
        if not self._steps:
            return {}
        shape = self._earlier, self._runtime.hidden_size
        return {
            "hidden_states": StateTensor(shape, self._runtime.dtype, kept="last"),
            "tokens": StateTensor((self._earlier,), torch.int64, kept="last"),
            **{
                name: StateTensor((self._steps,), dtype, kept="first")
                for names in self._names
                for name, dtype in zip(names, (torch.int64, torch.float32), strict=True)
            },
        }

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Return the chain, or the tree within ``max_draft_nodes``, that the last pass drafted."""
        roots = draft_input.bonus_tokens
        nodes = min(self._width, max(batch.max_draft_nodes))
        if not self._steps or nodes == 1:
            return Draft.chain(roots.unsqueeze(1))
        if self._topk == 1:
            tokens = torch.cat((roots.unsqueeze(1), draft_input["drafts"]), dim=1)
            return Draft.chain(tokens, scores=F.pad(draft_input["scores"], (1, 0)))
        ranks = (draft_input[name] for names in self._names for name in names)
        tokens, parents, scores = self._select(roots, nodes, *ranks)
        return Draft.tree(tokens, parents, self._steps, scores=scores)

    def _tree(self, roots: Tensor, nodes: int, *ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keep the likeliest of all candidates.

        Args:
            nodes: of each request, its root included.
            ranks: [bs, S] each: drafts and scores of the likeliest tokens, of the second, …

        Returns:
            Tokens and parents, [bs, nodes] int64 each, and scores, [bs, nodes] float32.
        """
        tokens, scores = torch.stack(ranks[::2], dim=2), torch.stack(ranks[1::2], dim=2)
        chain = F.pad(scores[:, :-1, 0].cumsum(1), (1, 0))
        sums = chain.unsqueeze(2) + scores
        parents = self._parents.expand(len(roots), -1)
        return select_nodes(roots, sums.flatten(1), tokens.flatten(1), parents, nodes)

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests that another instance has prefilled.

        An instance with fewer layers has drafted fewer steps, one with a lower ``topk`` fewer
        tokens for each. No layer can run without the target's hidden states: so a missing step
        repeats the token before it, another missing token is any, and both have the least score.
        """
        if not self._steps:
            return DraftInput(bonus_tokens=last_tokens)
        received = received_state(batch, self.state_spec())
        state = received.tensors
        vocab_size = self._runtime.vocab_size
        steps = torch.arange(1, self._steps + 1, device=last_tokens.device)
        state["tokens"].clamp_(0, vocab_size - 1)  # a peer's tokens may be out of range
        better: list[Tensor] = []
        for drafts, scores in self._names:
            counts = torch.tensor(
                [received.counts[drafts], received.counts[scores]], dtype=torch.int64
            )
            drafted, scored = counts.to(steps.device, non_blocking=True).unsqueeze(2)
            tokens = state[drafts].clamp_(0, vocab_size - 1)
            if not better:
                chain = torch.cat((last_tokens.unsqueeze(1), tokens), dim=1)
                tokens = chain.gather(1, torch.minimum(steps, drafted))
            for _ in better:  # and they may be the same
                taken = torch.stack([tokens == other for other in better]).any(0)
                tokens = torch.where(taken, (tokens + 1) % vocab_size, tokens)
            better.append(tokens)
            state[drafts] = tokens
            state[scores].nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0)
            state[scores].masked_fill_(steps > torch.minimum(drafted, scored), -torch.inf)
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def extend(self, batch: Batch, output: CommittedOutput, future_map: FutureMap) -> DraftInput:
        """Run the committed rows through all layers and draft S tokens after the last of each."""
        if not self._steps:
            return DraftInput(bonus_tokens=output.bonus_tokens)
        window = self._window(batch, output, future_map)
        kept = (window.last_rows.unsqueeze(1) + self._back).view(-1)
        state: dict[str, Tensor | None] = {
            "hidden_states": window.hidden[kept].view(
                batch.size, self._earlier, self._runtime.hidden_size
            ),
            "tokens": window.tokens[kept].view(batch.size, self._earlier),
            **self._drafts(batch, window, batch.seq_lens + output.accept_lens),
        }
        return DraftInput(bonus_tokens=output.bonus_tokens, state=state)

    def _window(self, batch: Batch, output: CommittedOutput, future_map: FutureMap) -> _Window:
        """Put the W earlier rows of each request's state before its new rows.

        The plan drops the rows of a request that has fewer than W committed positions.
        """
        bs, earlier = batch.size, self._earlier
        hidden, tokens = output.per_node[self._captured], output.next_tokens
        columns = len(tokens) // bs
        widths = list(batch.chunk_widths) if batch.is_prefill else [columns] * bs
        if earlier:
            state = future_map.resolve(batch.req_indices)[1].state
            hidden = _interleave(state.get("hidden_states"), hidden, widths, earlier)
            tokens = _interleave(state.get("tokens"), tokens, widths, earlier)
        plan = self._runtime.plan_attention(
            batch, batch.seq_lens, [earlier + width for width in widths], offset=-earlier
        )
        ahead = torch.arange(1, bs + 1, device=hidden.device) * earlier
        return _Window(plan, hidden, tokens, output.last_rows + ahead)

    def _drafts(self, batch: Batch, window: _Window, first: Tensor) -> dict[str, Tensor]:
        draft = self._draft if batch.is_prefill else self._draft_paths
        ranks = draft(batch, window.plan, window.hidden, window.tokens, window.last_rows, first)
        names = (name for names in self._names for name in names)
        return dict(zip(names, ranks, strict=True))

    def _draft(
        self,
        batch: Batch,
        plan: AttentionPlan,
        hidden: Tensor,
        tokens: Tensor,
        last_rows: Tensor,
        first: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run each layer once; return the tokens drafted after the bonus token, [bs, S] int64, and
        their scores, [bs, S] float32, those of the likeliest tokens first.

        Args:
            plan, hidden, tokens, last_rows: of a ``_Window``.
            first: [bs] int64, position of the bonus token.
        """
        runtime, network = self._runtime, self.network
        rotary = network.rotary(plan.positions)
        masked = (plan.positions == 0).unsqueeze(1) if network.config.masks_first else None
        attend = layers.PagedAttend(self._cache, plan)
        chain: list[Tensor] = []
        chain_scores: list[Tensor] = []
        for index in range(self._steps):
            if index:
                tails = chunk_tails(batch, index + 1, chain[-1][:, 0])
                tokens = rotate_chunks(tokens, last_rows, tails)
            is_last = index + 1 == self._steps
            rows = last_rows if is_last else None  # the last layer's other rows are not read
            embeds = runtime.embed_tokens(tokens)
            if masked is not None:
                embeds = embeds.masked_fill(masked, 0)
            hidden = network(index, embeds, hidden, rotary, attend, rows)
            ends = hidden if is_last else hidden[last_rows]
            logits = runtime.lm_head(network.head_input(index, ends))
            positions = (first + index + 1).unsqueeze(1)
            found, scores = self._likeliest(
                couple(runtime, batch, logits, positions, self._vocabulary)
            )
            chain.append(found)
            chain_scores.append(scores)
        tokens, logs = torch.stack(chain, dim=1), torch.stack(chain_scores, dim=1)
        ranks = zip(tokens.unbind(2), logs.to(torch.float32).unbind(2), strict=True)
        return tuple(part.contiguous() for rank in ranks for part in rank)

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the K likeliest tokens of each row of [R, V], the likeliest first, and their
        log-probabilities: [R, K] each."""
        if self._topk == 1:
            token, score = self._find_likeliest(logits)
            return token.unsqueeze(1), score.unsqueeze(1)
        precise = torch.promote_types(logits.dtype, torch.float32)
        scores, tokens = logits.log_softmax(-1, dtype=precise).topk(self._topk, dim=-1)
        return tokens, scores


def _interleave(earlier: Tensor | None, new: Tensor, widths: list[int], count: int) -> Tensor:
    """Put each request's ``count`` earlier rows before its new ones: [bs * count + R, …].

    Args:
        earlier: [bs, count * …]; None: zeros, since nothing is committed.
        new: [R, …], ``widths`` rows per request.
    """
    bs = len(widths)
    if earlier is None:
        earlier = new.new_zeros(bs, count, *new.shape[1:])
    earlier = earlier.view(bs, count, *new.shape[1:])
    if len(set(widths)) == 1:
        return torch.cat((earlier, new.view(bs, -1, *new.shape[1:])), dim=1).flatten(0, 1)
    pairs = zip(earlier.unbind(0), torch.split(new, widths), strict=True)
    return torch.cat([part for pair in pairs for part in pair])
