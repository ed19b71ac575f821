"""The drafter of MTP layers: each layer runs once, right after the target's pass.

Layer k reads, at a position p, the token at p + k. For the last k - 1 committed positions that
token is only drafted when the pass runs. So the next pass begins S - 1 positions before its new
rows, and computes these positions again with the committed tokens: no stale key remains.
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
    Runtime,
    StateTensor,
    chunk_tails,
    couple,
    likeliest_tokens,
    received_state,
    rotate_chunks,
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

    The state between two steps is the ``drafts`` [bs, S] and their ``scores`` [bs, S], and the
    inputs of the last W = S - 1 committed positions, which the next pass computes again: the
    target's ``hidden_states`` [bs, W, H], and ``tokens`` [bs, W], the token after each.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        # A draft of the root alone needs no layer.
        self._steps = runtime.config.num_steps if runtime.config.num_draft_tokens > 1 else 0
        self._earlier = max(self._steps - 1, 0)
        self.network = load_network(runtime)
        self._captured = runtime.capture_lm_head_input()
        config = self.network.config
        self._cache = runtime.allocate_kv(self._steps, config.num_key_value_heads, config.head_dim)
        self._vocabulary = torch.arange(runtime.vocab_size, device=runtime.device)
        self._draft_paths = runtime.record_draft(self._draft)
        self._back = torch.arange(-self._earlier, 0, device=runtime.device) + 1

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare the state between two steps; {} if drafts are the root alone."""
        if not self._steps:
            return {}
        shape = self._earlier, self._runtime.hidden_size
        return {
            "hidden_states": StateTensor(shape, self._runtime.dtype, kept="last"),
            "tokens": StateTensor((self._earlier,), torch.int64, kept="last"),
            "drafts": StateTensor((self._steps,), torch.int64, kept="first"),
            "scores": StateTensor((self._steps,), torch.float32, kept="first"),
        }

    def propose(self, draft_input: DraftInput) -> Draft:
        """Return the chain that the last pass drafted."""
        root = draft_input.bonus_tokens.unsqueeze(1)
        if not self._steps:
            return Draft.chain(root)
        tokens = torch.cat((root, draft_input["drafts"]), dim=1)
        return Draft.chain(tokens, scores=F.pad(draft_input["scores"], (1, 0)))

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Return the state of requests that another instance has prefilled.

        An instance with fewer layers has drafted fewer steps. The missing steps repeat the token
        before them, and have the least score: no layer can run without the target's hidden states.
        """
        if not self._steps:
            return DraftInput(bonus_tokens=last_tokens)
        received = received_state(batch, self.state_spec())
        state = received.tensors
        for name in ("tokens", "drafts"):  # a peer's tokens may be out of range
            state[name].clamp_(0, self._runtime.vocab_size - 1)
        state["scores"].nan_to_num_(nan=-torch.inf, neginf=-torch.inf).clamp_(max=0)
        if received.lacking("drafts") or received.lacking("scores"):
            counts = torch.tensor([received.counts["drafts"], received.counts["scores"]])
            drafted, scored = counts.to(last_tokens.device, non_blocking=True).unsqueeze(2)
            chain = torch.cat((last_tokens.unsqueeze(1), state["drafts"]), dim=1)
            steps = torch.arange(1, self._steps + 1, device=chain.device)
            state["drafts"] = chain.gather(1, torch.minimum(steps, drafted))
            state["scores"].masked_fill_(steps > scored, -torch.inf)
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
        drafts, scores = draft(
            batch, window.plan, window.hidden, window.tokens, window.last_rows, first
        )
        return {"drafts": drafts, "scores": scores}

    def _draft(
        self,
        batch: Batch,
        plan: AttentionPlan,
        hidden: Tensor,
        tokens: Tensor,
        last_rows: Tensor,
        first: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Run each layer once; return the tokens drafted after the bonus token, [bs, S] int64, and
        their scores, [bs, S] float32.

        Args:
            plan, hidden, tokens, last_rows: of a ``_Window``.
            first: [bs] int64, position of the bonus token.
        """
        runtime, network = self._runtime, self.network
        rotary = network.rotary(plan.positions)
        masked = (plan.positions == 0).unsqueeze(1) if network.config.masks_first else None

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return plan.attend(self._cache, layer, q, k, v)

        chain: list[Tensor] = []
        chain_scores: list[Tensor] = []
        for index in range(self._steps):
            if index:
                tails = chunk_tails(batch, index + 1, chain[-1])
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
            token, score = likeliest_tokens(
                couple(runtime, batch, logits, positions, self._vocabulary)
            )
            chain.append(token)
            chain_scores.append(score)
        return torch.stack(chain, dim=1), torch.stack(chain_scores, dim=1).to(torch.float32)


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
