"""The DFlash drafter: it writes the target's features to its KV cache, and drafts blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specplug import (
    AttentionPlan,
    Batch,
    CommittedOutput,
    Draft,
    DraftInput,
    Lattice,
    LikeliestTokens,
    Runtime,
    StateTensor,
    couple,
    layers,
    likeliest_tree,
    longest_path,
    received_state,
)
from specplug_dflash.checkpoint import load_network
from specplug_dflash.domino import DominoDrawing
from specplug_dflash.drawing import DrawingHead, DrawnBlocks
from specplug_dflash.network import DFlashNetwork
from specplug_dflash.selector import CandidateSelector


class DFlashWorker:
    """The draft network and its KV cache, which is its only state between steps.

    Args:
        runtime: the run's.

    Attributes:
        network: the draft model.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.network = network = self._load(runtime)
        config = network.config
        own_embedding, own_head = network.embed_tokens, network.lm_head
        self._embed = runtime.embed_tokens if own_embedding is None else own_embedding
        self._lm_head = runtime.lm_head if own_head is None else own_head
        self._token_ids = torch.arange(config.draft_vocab_size, device=runtime.device)
        self._has_own_ids = own_head is not None
        if self._has_own_ids:
            self._token_ids += network.d2t
        self._first_row = config.first_row
        self._find_likeliest = LikeliestTokens(runtime.device)
        self._head = self._drawing_head()
        self._capture(runtime)
        self._width = runtime.config.num_draft_tokens
        self._topk = runtime.config.topk
        steps = runtime.config.num_steps if self._width > 1 else 0
        # A draft of the root alone needs no layer.
        layers = config.num_hidden_layers if self._width > 1 else 0
        self._cache = runtime.allocate_kv(layers, config.num_key_value_heads, config.head_dim)
        device = runtime.device
        self._masks = torch.full((1, steps), config.mask_token_id, device=device)
        self._ahead = torch.arange(1, steps + 1, device=device)
        all_seen = torch.ones(1, steps + 1, steps + 1, dtype=torch.bool, device=device)
        # The masks within a block, for causal and for other layers.
        self._block_masks = {
            causal: None if causal else all_seen for causal in sorted(set(config.causal))
        }
        self._steps = steps
        self._draft_chain = runtime.record_draft(self._chain)
        self._draft_tree = runtime.record_draft(self._tree)
        self._write_paths = runtime.record_draft(self._write)

    def _load(self, runtime: Runtime) -> DFlashNetwork:
        """Return the draft network of the run's checkpoint."""
        return load_network(runtime)

    def _drawing_head(self) -> DrawingHead | None:
        """Return what draws a block's tokens one after the other; None: each row is by itself, or
        a head scores pairs."""
        return None if self.network.prefix_gru is None else DominoDrawing(self.network, self._embed)

    def _capture(self, runtime: Runtime) -> None:
        """Ask the target for the features that the network fuses."""
        config = self.network.config
        normed = [config.normed_last and i == runtime.num_layers for i in config.feature_layers]
        inputs = [i for i, last in zip(config.feature_layers, normed, strict=True) if not last]
        self._inputs = runtime.capture_layer_inputs(tuple(inputs)) if inputs else None
        self._last = runtime.capture_lm_head_input() if any(normed) else None
        self._normed = normed

    def _features(self, output: CommittedOutput) -> Tensor:
        """Join the features by layer: [R, len(feature_layers) * target_hidden]."""
        if self._last is None:
            assert self._inputs is not None
            return output.per_node[self._inputs]
        last = output.per_node[self._last]
        width = last.shape[1]
        inputs = torch.split(output.per_node[self._inputs], width, 1) if self._inputs else ()
        others = iter(inputs)
        return torch.cat([last if normed else next(others) for normed in self._normed], dim=1)

    def extend(self, batch: Batch, output: CommittedOutput) -> DraftInput:
        """Write the keys and values of the committed rows to the draft's KV cache."""
        if self._width > 1:
            plan = batch.attention
            if not batch.is_prefill:
                width = output.next_tokens.shape[0] // batch.size
                plan = self._runtime.plan_attention(batch, batch.seq_lens, width)
            assert plan is not None
            write = self._write if batch.is_prefill else self._write_paths
            state = write(self._features(output), plan, output.last_rows)
            return DraftInput(bonus_tokens=output.bonus_tokens, state=state)
        return DraftInput(bonus_tokens=output.bonus_tokens)

    def receive(self, batch: Batch, last_tokens: Tensor) -> DraftInput:
        """Start from the state that came."""
        state = received_state(batch, self.state_spec()).tensors
        return DraftInput(bonus_tokens=last_tokens, state=state)

    def state_spec(self) -> dict[str, StateTensor]:
        """Declare what a draft input carries: the anchor that a LiLiCorr head reads, the fused
        features of the last committed position."""
        if self.network.lilicorr is None:
            return {}
        width = self.network.config.hidden_size
        return {"anchor": StateTensor((width,), self._runtime.dtype)}

    def _write(self, features: Tensor, plan: AttentionPlan, last_rows: Tensor) -> dict[str, Tensor]:
        """Write the keys and values of features [R, len(feature_layers) * target_hidden].

        Returns:
            The state that ``extend`` leaves.
        """
        context = self.network.fuse(features)
        for layer, (k, v) in enumerate(self.network.context_kv(context, plan.positions)):
            plan.write(self._cache, layer, k, v)
        return {} if self.network.lilicorr is None else {"anchor": context[last_rows]}

    def propose(self, batch: Batch, draft_input: DraftInput) -> Draft:
        """Draft one block for each request in one pass, within ``max_draft_nodes``: its chain if
        ``topk`` is 1, else a tree of its candidates."""
        roots = draft_input.bonus_tokens
        nodes = min(self._width, max(batch.max_draft_nodes))
        if nodes == 1:
            return Draft.chain(roots.unsqueeze(1))
        steps = min(self._steps, nodes - 1)
        rows = steps + self.network.config.idle_rows
        plans = [
            self._runtime.plan_attention(
                batch, batch.seq_lens, rows, mask=None if mask is None else mask[:, :rows, :rows]
            )
            for mask in self._block_masks.values()
        ]
        anchors = None if self.network.lilicorr is None else draft_input["anchor"]
        if self._topk == 1:
            tokens, scores = self._draft_chain(batch, roots, anchors, rows, *plans)
            return Draft.chain(tokens, scores=scores)
        tokens, parents, scores = self._draft_tree(batch, roots, anchors, nodes, rows, *plans)
        return Draft.tree(tokens, parents, steps, scores=scores)

    def _chain(
        self,
        batch: Batch,
        roots: Tensor,
        anchors: Tensor | None,
        rows: int,
        *plans: AttentionPlan,
    ) -> tuple[Tensor, Tensor]:
        """Draft blocks of some rows each.

        Returns:
            Tokens [bs, N] int64, the roots first, and their scores, float32.
        """
        hidden = self._hidden(roots, rows, *plans)
        if self.network.config.candidates:
            tokens, scores = longest_path(self._lattice(batch, roots, hidden, anchors))
        else:
            tokens, scores = self._choose(batch, roots, hidden)
        # The root's score is 0.
        scores = F.pad(scores.to(torch.float32), (1, 0))
        return torch.cat((roots.unsqueeze(1), tokens), dim=1), scores

    def _tree(
        self,
        batch: Batch,
        roots: Tensor,
        anchors: Tensor | None,
        nodes: int,
        rows: int,
        *plans: AttentionPlan,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draft trees of some nodes each, of the candidates of blocks of some rows.

        Returns:
            Tokens and parents, [bs, nodes] int64 each, and scores, [bs, nodes] float32.
        """
        hidden = self._hidden(roots, rows, *plans)
        if self._head is not None:
            return self._drawn(self._head, batch, roots, hidden).tree(self._topk, nodes)
        lattice = self._lattice(batch, roots, hidden, anchors)
        return likeliest_tree(lattice, roots, self._topk, nodes)

    def _lattice(
        self, batch: Batch, roots: Tensor, hidden: Tensor, anchors: Tensor | None
    ) -> Lattice:
        """Return the best candidates of each position of blocks: as many as the head that scores
        their pairs was trained for, or else ``topk``.

        Args:
            roots, hidden: as in ``_choose``.
            anchors: [bs, hidden], what a LiLiCorr head reads of the committed text; None: there is
                no such head.
        """
        drafting = hidden[:, self._first_row :]
        logits = self._unary(drafting.flatten(0, 1))
        coupled = self._coupled(batch, logits, drafting.shape[1])
        # Scores add up over the depth and are compared: half precision would round them away.
        precise = torch.promote_types(coupled.dtype, torch.float32)
        logs = coupled.log_softmax(-1, dtype=precise)
        # LiLiCorr was trained on the candidates without noise, and reads their order.
        ranked = logs if anchors is None else logits
        best = ranked.topk(self.network.config.candidates or self._topk, dim=-1).indices
        tokens = self._token_ids[best].view(len(roots), -1, best.shape[1])
        scores = logs.gather(1, best).view(tokens.shape)
        selector = self.network.candidate_selector
        if selector is not None:
            pairs = self._pairs(selector, batch, roots, drafting, tokens)
            pairs = scores.unsqueeze(2) + pairs
        elif anchors is not None:
            pairs = self._matches(batch, logits, coupled, best, drafting, anchors)
        else:
            return Lattice(tokens.unbind(1), scores.unsqueeze(2).unbind(1))
        # A head says which candidate, not whether it is any of them.
        of_any = scores.logsumexp(-1).view(*scores.shape[:2], 1, 1)
        pairs = pairs.log_softmax(-1) + of_any
        return Lattice(tokens.unbind(1), [pairs[:, 0, :1], *pairs[:, 1:].unbind(1)])

    def _matches(
        self,
        batch: Batch,
        logits: Tensor,
        coupled: Tensor,
        best: Tensor,
        drafting: Tensor,
        anchors: Tensor,
    ) -> Tensor:
        """Score candidates after each of the position before, as a LiLiCorr head does.

        Args:
            logits, coupled: [bs * S, V_draft], without and with the target's noise.
            best: [bs * S, C] int64, the candidates as columns of these.
            drafting: [bs, S, hidden].
            anchors: [bs, hidden].

        Returns:
            [bs, S, C, C].
        """
        head = self.network.lilicorr
        assert head is not None
        bs, steps = drafting.shape[:2]
        tokens = self._token_ids[best].view(bs, steps, -1)
        precise = torch.promote_types(logits.dtype, torch.float32)
        logs = logits.log_softmax(-1, dtype=precise).gather(1, best).view(tokens.shape)
        embeds = self._embed(tokens.flatten()).view(*tokens.shape, -1)
        pairs: Tensor = head(embeds, logs, drafting, anchors)
        if batch.greedy:
            return pairs
        heat = self._runtime.temperatures(batch).view(-1, 1, 1)
        own = logits.gather(1, best).view(tokens.shape) / heat
        noise = coupled.gather(1, best).view(tokens.shape) - own
        return pairs / heat.unsqueeze(3) + noise.unsqueeze(2)

    def _pairs(
        self,
        selector: CandidateSelector,
        batch: Batch,
        roots: Tensor,
        drafting: Tensor,
        tokens: Tensor,
    ) -> Tensor:
        """Score the candidates [bs, S, C] of rows [bs, S, hidden] after each of the position
        before: [bs, S, C, C]. At the first position all rows are the same, after the root."""
        root = roots.view(-1, 1, 1).expand(-1, 1, tokens.shape[2])
        before = torch.cat((root, tokens[:, :-1]), dim=1)
        rows = drafting.flatten(0, 1)
        pairs: Tensor = selector(rows, before.flatten(0, 1), tokens.flatten(0, 1))
        pairs = pairs.view(*tokens.shape, -1)
        if batch.greedy:
            return pairs
        return pairs / self._runtime.temperatures(batch).view(-1, 1, 1, 1)

    def _choose(self, batch: Batch, roots: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Choose the tokens of blocks where no head scores pairs.

        Args:
            roots: [bs] int64.
            hidden: [bs, rows, hidden], the input of the LM head; rows before ``_first_row`` draft
                nothing.

        Returns:
            Tokens [bs, N - 1] int64, and their scores [bs, N - 1]: of each token by itself,
            whatever stands before it, where no head knows that.
        """
        if self._head is not None:
            return self._drawn(self._head, batch, roots, hidden).chain()
        drafting = hidden[:, self._first_row :]
        logits = self._coupled(batch, self._unary(drafting.flatten(0, 1)), drafting.shape[1])
        tokens, scores = self._likeliest(logits)
        return tokens.view(len(roots), -1), scores.view(len(roots), -1)

    def _drawn(self, head: DrawingHead, batch: Batch, roots: Tensor, hidden: Tensor) -> DrawnBlocks:
        """Return the blocks whose tokens a head draws one after the other; arguments as in
        ``_choose``."""
        by_row = hidden.transpose(0, 1).contiguous()
        drafting = by_row[self._first_row :]

        def couple_row(logits: Tensor, index: int, paths: int) -> Tensor:
            if batch.greedy:
                return logits
            positions = (batch.seq_lens + 1 + index).unsqueeze(1).expand(-1, paths)
            return couple(self._runtime, batch, logits, positions, self._token_ids)

        return DrawnBlocks(
            head=head,
            roots=roots,
            anchors=by_row[0],
            hidden=drafting,
            logits=self._unary(drafting.flatten(0, 1)).view(*drafting.shape[:2], -1),
            couple=couple_row,
            likeliest=self._likeliest,
            token_ids=self._token_ids,
        )

    def _coupled(self, batch: Batch, logits: Tensor, steps: int) -> Tensor:
        """Add the target's noise to logits [bs * steps, V_draft] of the drafting rows of blocks; a
        greedy batch has none."""
        if batch.greedy:
            return logits
        positions = batch.seq_lens.unsqueeze(1) + self._ahead[:steps]
        return couple(self._runtime, batch, logits, positions, self._token_ids)

    def _unary(self, drafting: Tensor) -> Tensor:
        """Return the logits of rows [R, hidden], each by itself: [R, V_draft]."""
        return self.network.scaled(self._lm_head(drafting))

    def _likeliest(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Return the likeliest token of each row of [R, V_draft], in the target's ids, and its
        log-probability: [R] int64, [R]."""
        return self._find_likeliest(logits, self._token_ids if self._has_own_ids else None)

    def _hidden(self, roots: Tensor, rows: int, *plans: AttentionPlan) -> Tensor:
        """Run blocks of some rows: the roots [bs], and mask tokens. ``plans`` are in the order of
        ``_block_masks``.

        Returns:
            [bs, rows, hidden], the input of the LM head; without a last row that drafts nothing.
        """
        masks = self._masks[:, : rows - 1].expand(len(roots), -1)
        block = torch.cat((roots.unsqueeze(1), masks), dim=1)
        kinds = dict(zip(self._block_masks, plans, strict=True))
        config = self.network.config
        of_layer = [kinds[causal] for causal in config.causal]
        attend = layers.PagedAttend(self._cache, of_layer, config.windows)
        embeds = self._embed(block.flatten())
        hidden: Tensor = self.network(embeds, plans[0].positions, attend, rows)
        normed: Tensor = self.network.norm(hidden)
        blocks = normed.view(*block.shape, -1)
        return blocks[:, : rows - config.idle_rows + self._first_row]
