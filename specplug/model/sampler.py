"""Choose the target's token at each node: exact, and a function of the node's own path alone.

The token at position t is ``argmax(log p_t + g(seed, t, token))`` (greedy: g = 0) after grammar,
logit bias, penalties, temperature, min-p, top-k and top-p, in this order. It depends on nothing
else, so it is the same whatever was drafted and whatever else is in the batch.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug.grammar.masks import mask_scores
from specplug.kernels.argmax import argmax_rows
from specplug.kernels.kernel_table import Operation, runs_triton
from specplug.sampling_params import BannedTokens, Needs, SamplingParams
from specplug.speculative.draft import Draft
from specplug.speculative.host_copy import upload
from specplug.speculative.noise import gumbel

if TYPE_CHECKING:
    from specplug.kernels.sampling import Cuts, Path, Settings

_COLDEST = 1e-6
"""The lowest temperature used. Lower ones choose the same, but overflow the logits."""

_NOTHING_BANNED = BannedTokens()

_LEAST_TOP_P = torch.finfo(torch.float32).tiny
"""The lowest top_p used. Less would be 0 in float32, which leaves no token."""

_COLUMNS = ("temperature", "top_p", "top_k", "min_p", "repetition", "presence", "frequency")


class Sampler:
    """Keeps the sampling settings of each request row on the device, and chooses tokens.

    Args:
        req_table_size: request rows, row 0 included.
        vocab_size: V.
    """

    def __init__(self, req_table_size: int, vocab_size: int, device: torch.device) -> None:
        self._device = device
        self._vocab = torch.arange(vocab_size, device=device)
        self._settings = torch.zeros(
            req_table_size, len(_COLUMNS), dtype=torch.float32, device=device
        )
        self._seeds = torch.zeros(req_table_size, dtype=torch.int64, device=device)
        self._random = torch.zeros(req_table_size, dtype=torch.bool, device=device)
        self._log_min_p = self._settings.new_full((req_table_size,), float("-inf"))
        self._size = req_table_size, vocab_size
        # These three have rows x vocabulary elements, so they are allocated when first needed.
        self._bias: Tensor | None = None
        self._in_prompt: Tensor | None = None
        self._output_counts: Tensor | None = None
        # Tokens that end the output, [rows, most], and the position from which on each row may
        # choose them.
        self._enders = torch.zeros(req_table_size, 1, dtype=torch.int64, device=device)
        self._may_end_at = torch.zeros(req_table_size, dtype=torch.int64, device=device)

    def admit(
        self,
        req_index: int,
        params: SamplingParams,
        seed: int,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        banned: BannedTokens = _NOTHING_BANNED,
    ) -> None:
        """Enter a request's settings in its row.

        Args:
            seed: of its noise.
            prompt: its tokens, for penalties and for the place of its output.
            output: tokens that a retracted request has generated already.
            banned: tokens that it must not choose early.
        """
        p, row = params, req_index
        temperature = 1.0 if p.greedy else max(p.temperature, _COLDEST)
        settings = (
            temperature, max(p.top_p, _LEAST_TOP_P), min(max(p.top_k, 0), self._size[1]), p.min_p,
            p.repetition_penalty, p.presence_penalty, p.frequency_penalty,
        )  # fmt: skip
        values = torch.tensor(settings, dtype=torch.float32)  # whatever the process's default is
        self._settings[row] = values.to(self._device, non_blocking=True)
        self._log_min_p[row] = self._settings[row, _COLUMNS.index("min_p")].log()
        # An item of a GPU's tensor that is set by ``=`` waits for all that was launched before.
        self._seeds[row].fill_(seed)
        self._random[row].fill_(not p.greedy)
        if p.needs & Needs.BIAS:
            self._admit_bias(row, p.logit_bias)
        elif self._bias is not None:
            self._bias[row] = 0.0  # clears the bias of the row's last request
        if p.needs & Needs.PENALTIES:
            self._admit_counts(row, prompt, output)
        enders = sorted(token for token in banned.early if token < self._size[1])
        if p.needs & Needs.MIN_TOKENS and enders:
            self._admit_enders(row, enders)
            self._may_end_at[row].fill_(len(prompt) + p.min_tokens)
        else:
            self._may_end_at[row].fill_(0)

    @property
    def form(self) -> Hashable:
        """The key of a recorded ``sample``, besides its arguments: the tensors of the run's
        settings are the same as long as this is."""
        return self._enders.shape[1]

    def temperatures(self, req_indices: Tensor) -> Tensor:
        """Return the temperatures of requests [bs]: [bs, 1] float32, 1 for greedy ones."""
        return self._settings[req_indices, :1]

    def is_random(self, req_indices: Tensor) -> Tensor:
        """Return whether each request samples: [n] int64 to [n] bool."""
        return self._random[req_indices]

    def noise(self, req_indices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Return the Gumbel noise of each request and position [n] at ``token_ids`` [V]: [n, V]
        float32, 0 for greedy requests."""
        seeds, random = self._seeds[req_indices], self._random[req_indices]
        if runs_triton(Operation.NOISE, self._device):
            from specplug.kernels.sampling import gumbel_noise

            return gumbel_noise(seeds, random, positions, token_ids)
        noise = gumbel(seeds, positions, token_ids)
        return noise.masked_fill_(~random.unsqueeze(1), 0.0).to(torch.float32)

    def sample(
        self,
        logits: Tensor,
        needs: Needs,
        random: Tensor | None,
        req_indices: Tensor,
        positions: Tensor,
        draft: Draft | None,
        masks: Tensor | None = None,
    ) -> Tensor:
        """Choose the target's token for each row of logits.

        Args:
            logits: [T, V].
            needs: what the requests of the batch need, together.
            random: [T] bool, whether the row's request samples; None if none does.
            req_indices: [T] int64, the request of each row. It and ``positions`` are not read of
                requests that need nothing but outputs.
            positions: [T] int64 position of the token being chosen.
            draft: whose nodes the rows are, so that penalties follow each node's path; None on a
                prefill.
            masks: [T, words] int32, what grammars allow (see ``mask_scores``), or None.

        Returns:
            [T] int64.
        """
        if not needs & ~Needs.OUTPUTS:
            return argmax_rows(logits)
        if runs_triton(Operation.SAMPLING, logits.device, logits.dtype):
            from specplug.kernels.sampling import choose_tokens

            return choose_tokens(
                logits,
                req_indices,
                positions,
                self._kernel_settings(needs, tempered=random is not None),
                random=random,
                cuts=self._cuts() if needs & Needs.TRUNCATION else None,
                masks=masks,
                path=_path_of(draft) if needs & Needs.PENALTIES and draft is not None else None,
            )
        return argmax_rows(
            self._scores(logits, needs, random, req_indices, positions, draft, masks)
        )

    def count(self, req_indices: Tensor, tokens: Tensor, valid: Tensor) -> None:
        """Count committed output tokens [bs, C] of the requests [bs], where ``valid`` [bs, C]."""
        if self._output_counts is not None:
            index = req_indices.unsqueeze(1).expand_as(tokens)
            self._output_counts.index_put_(
                (index, tokens), valid.to(self._output_counts.dtype), accumulate=True
            )

    @cached_property
    def _columns(self) -> dict[str, Tensor]:
        """The settings of all rows by name: the same tensors each time."""
        return dict(zip(_COLUMNS, self._settings.unbind(1), strict=True))

    def _kernel_settings(self, needs: Needs, *, tempered: bool) -> Settings:
        """Return the settings that the kernels read for these needs."""
        from specplug.kernels.sampling import Settings

        column = self._columns
        penalties, early = needs & Needs.PENALTIES, needs & Needs.MIN_TOKENS
        in_prompt = self._in_prompt if penalties else None
        return Settings(
            seeds=self._seeds,
            temperature=column["temperature"] if tempered else None,
            repetition=column["repetition"],
            presence=column["presence"],
            frequency=column["frequency"],
            stride=len(_COLUMNS),
            enders=self._enders if early else None,
            may_end_at=self._may_end_at if early else None,
            bias=self._bias if needs & Needs.BIAS else None,
            counts=self._output_counts if penalties else None,
            in_prompt=None if in_prompt is None else in_prompt.view(torch.uint8),
        )

    def _cuts(self) -> Cuts:
        """Return the settings of truncation that the kernels read."""
        from specplug.kernels.sampling import Cuts

        column = self._columns
        return Cuts(column["top_k"], column["top_p"], len(_COLUMNS), self._log_min_p, 1)

    def _scores(
        self,
        logits: Tensor,
        needs: Needs,
        random: Tensor | None,
        req_indices: Tensor,
        positions: Tensor,
        draft: Draft | None,
        masks: Tensor | None,
    ) -> Tensor:
        """Return what ``sample`` takes the greatest of, [T, V]: the reference of the kernels."""
        scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if masks is not None:
            scores = mask_scores(scores, masks)
        if needs & Needs.MIN_TOKENS:
            scores = self._without_early_ends(scores, req_indices, positions)
        settings = self._settings[req_indices].to(scores.dtype)
        column = dict(zip(_COLUMNS, settings.unsqueeze(2).unbind(1), strict=True))
        if needs & Needs.BIAS:
            assert self._bias is not None
            scores = scores + self._bias[req_indices]
        if needs & Needs.PENALTIES:
            scores = self._penalize(scores, column, req_indices, draft)
        if random is not None:
            scores = scores / column["temperature"]
            if needs & Needs.TRUNCATION:
                scores = truncate(scores, column["min_p"], column["top_k"], column["top_p"])
            noise = gumbel(self._seeds[req_indices], positions, self._vocab)
            scores = scores + noise.masked_fill_(~random.unsqueeze(1), 0.0)
        return scores

    def _penalize(
        self,
        scores: Tensor,
        column: Mapping[str, Tensor],
        req_indices: Tensor,
        draft: Draft | None,
    ) -> Tensor:
        assert self._output_counts is not None
        assert self._in_prompt is not None
        counts = self._output_counts[req_indices]
        if draft is not None:
            counts = counts + path_counts(draft, scores.shape[1], counts.dtype)
        appeared = counts > 0
        seen = appeared | self._in_prompt[req_indices]
        factor = torch.where(seen, column["repetition"], 1.0)
        scores = torch.where(scores > 0, scores / factor, scores * factor)
        scores = scores - column["frequency"] * counts
        return scores - column["presence"] * appeared

    def _without_early_ends(self, scores: Tensor, req_indices: Tensor, positions: Tensor) -> Tensor:
        """Return the scores [T, V], with -inf for what ends the output of a request that must go
        on."""
        enders = self._enders[req_indices]
        early = (positions < self._may_end_at[req_indices]).unsqueeze(1)
        kept = scores.gather(1, enders).masked_fill(early, float("-inf"))
        return scores.scatter(1, enders, kept)

    def _admit_enders(self, row: int, enders: Sequence[int]) -> None:
        """Enter what ends a row's output, the first of them again where others have more."""
        missing = len(enders) - self._enders.shape[1]
        if missing > 0:
            more = self._enders[:, :1].expand(-1, missing)
            self._enders = torch.cat((self._enders, more), dim=1)
        row_of = torch.full((self._enders.shape[1],), enders[0], dtype=torch.int64)
        row_of[: len(enders)] = torch.tensor(enders)
        self._enders[row] = row_of.to(self._device, non_blocking=True)

    def _admit_bias(self, row: int, bias: Mapping[int, float]) -> None:
        if self._bias is None:
            self._bias = torch.zeros(self._size, dtype=torch.float32, device=self._device)
        values = torch.zeros(self._size[1], dtype=torch.float32)
        values[list(bias)] = torch.tensor(list(bias.values()), dtype=torch.float32)
        self._bias[row] = values.to(self._device, non_blocking=True)

    def _admit_counts(self, row: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        if self._output_counts is None or self._in_prompt is None:
            self._output_counts = torch.zeros(self._size, dtype=torch.int32, device=self._device)
            self._in_prompt = torch.zeros(self._size, dtype=torch.bool, device=self._device)
        self._output_counts[row] = 0
        if output:
            counted = upload(output, self._device)
            once = torch.ones_like(counted, dtype=torch.int32)
            self._output_counts[row].index_add_(0, counted, once)
        self._in_prompt[row] = False
        self._in_prompt[row].index_fill_(0, upload(prompt, self._device), True)


def _path_of(draft: Draft) -> Path:
    """Return the nodes of a draft as the kernels read them."""
    from specplug.kernels.sampling import Path

    return Path(
        tokens=draft.tokens,
        parents=draft.parents,
        flat_index=None if draft.padding is None else draft.padding.flat_index,
        depth=draft.depth,
    )


def path_counts(draft: Draft, vocab_size: int, dtype: torch.dtype) -> Tensor:
    """Count each token on the path from the root to each node, both included: [T, V]."""
    bs, width = draft.tokens.shape
    tokens = draft.tokens.unsqueeze(1).expand(bs, width, width)
    counts = torch.zeros(bs, width, vocab_size, dtype=dtype, device=tokens.device)
    counts.scatter_add_(2, tokens, draft.mask.to(dtype).expand(bs, width, width).contiguous())
    return draft.select(counts.view(bs * width, vocab_size))


def truncate(scores: Tensor, min_p: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Mask with -inf what min-p, top-k and top-p leave out.

    Args:
        scores: [T, V] logits after temperature.
        min_p, top_k, top_p: [T, 1]; 0, 0 and 1 leave everything in.
    """
    floor = scores.max(-1, keepdim=True).values + min_p.log()
    scores = scores.masked_fill(scores < floor, float("-inf"))
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[1], device=scores.device)
    drop = (rank >= top_k) & (top_k > 0)
    probs = ordered.masked_fill(drop, float("-inf")).softmax(-1)
    # A token stays while those before it have not reached top_p; the first one always stays.
    drop |= (probs.cumsum(-1) - probs >= top_p) & (top_p < 1)
    return scores.masked_fill(torch.zeros_like(drop).scatter_(1, order, drop), float("-inf"))


def top_logprobs(logits: Tensor, predict: Tensor, count: int) -> dict[str, Tensor]:
    """Compute the model's own log-probabilities by node, for the ``per_node`` container.

    Args:
        logits: [T, V].
        predict: [T] int64 chosen tokens.
        count: top tokens wanted.

    Returns:
        ``logprobs`` [T, 1 + count], ``logprob_ids`` [T, 1 + count] and ``logprob_ranks``
        [T, 1 + count]; the chosen token first.
    """
    logprobs = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    chosen = logprobs.gather(1, predict.unsqueeze(1))
    rank = (logprobs > chosen).sum(1, keepdim=True) + 1
    top = logprobs.topk(count, dim=1)
    ranks = torch.arange(1, count + 1, device=logits.device).expand(len(predict), -1)
    return {
        "logprobs": torch.cat((chosen, top.values), dim=1),
        "logprob_ids": torch.cat((predict.unsqueeze(1), top.indices), dim=1),
        "logprob_ranks": torch.cat((rank, ranks), dim=1),
    }
