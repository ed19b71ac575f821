"""SGLang's own sampler at each node of a draft, and its noise for draft models."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specplug.speculative.calibration import RequestKind
from specplug.speculative.host_copy import upload

if TYPE_CHECKING:
    from sglang.srt.layers.logits_processor import LogitsProcessorOutput
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

_BY_REQUEST = (
    "temperatures",
    "top_ps",
    "top_ks",
    "min_ps",
    "sampling_seed",
    "logit_bias",
    "acc_additive_penalties",
    "acc_scaling_penalties",
)


def plain_because_of(request: Req) -> str:
    """Return why a request is decoded without drafts; "" if it drafts.

    The token after a node then depends on more than SGLang's sampler can be given for a node: on
    the tokens before it (penalties, ``min_new_tokens``), on a grammar's state, or on user code.
    """
    wants = request.sampling_params
    penalties = wants.frequency_penalty or wants.presence_penalty or wants.repetition_penalty != 1.0
    reasons = {
        "grammar": request.grammar is not None,
        "custom_logit_processor": request.custom_logit_processor,
        "penalties": penalties,
        "min_new_tokens": wants.min_new_tokens,
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def kind_of(request: Req) -> RequestKind:
    """Return the rules by which a request's tokens are chosen. SGLang makes temperature 0 a top-k
    of 1."""
    wants = request.sampling_params
    if wants.logit_bias or plain_because_of(request):
        return RequestKind.CONSTRAINED
    return RequestKind.GREEDY if wants.top_k <= 1 else RequestKind.SAMPLED


def sample_nodes(
    runner: ModelRunner,
    batch: ScheduleBatch,
    output: LogitsProcessorOutput,
    widths: Sequence[int],
    positions: Tensor,
) -> Tensor:
    """Return the token after each of the T nodes, [T] int64: the token of plain decoding.

    With ``--enable-deterministic-inference`` SGLang's noise is a function of a request's seed and
    the position, and so the choice depends on no draft. Otherwise each node's token is drawn anew:
    the text has the distribution of plain decoding, and there is no seed to repeat it by.

    Args:
        output: of the target's pass. Its logits [T, V] stay as SGLang's log-probabilities need
            them: after biases and penalties, before the temperature.
        widths: the number of nodes of each request.
        positions: [T] int64 of the nodes.
    """
    info = _by_node(batch.sampling_info, widths)
    runner._preprocess_logits(output, info)
    if not info.is_all_greedy:  # SGLang's sampler overwrites the logits with probabilities
        output = replace(output, next_token_logits=output.next_token_logits.clone())
    nodes = len(positions)
    logprobs = [0] * nodes, [None] * nodes  # none here: keep_logprobs makes those of accepted rows
    tokens: Tensor = runner.sampler(output, info, False, *logprobs, positions)
    return tokens.to(torch.int64)


def has_foreseen_noise(info: SamplingBatchInfo) -> bool:
    """Return whether the sampler adds ``seeded_noise`` for every request of the batch.

    If one request is greedy or has ``top_k``, ``top_p`` or ``min_p``, SGLang adds the noise to all
    requests' tokens by their rank, which is not known before the target's pass.
    """
    filtered = info.need_top_k_sampling or info.need_top_p_sampling or info.need_min_p_sampling
    return info.sampling_seed is not None and not filtered


class SamplingRows:
    """Temperatures and seeds by row of the request table. Row 0 is padding.

    They are the same memory in every step, since recorded passes read it.

    Args:
        rows: the number of rows of the request table.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        self._temperatures = torch.ones(rows, 1, device=device)
        self._seeds = torch.zeros(rows, dtype=torch.int64, device=device)

    def set(self, req_indices: Tensor, info: SamplingBatchInfo) -> None:
        """Set the rows of a step's requests, if drafts can foresee the noise.

        Args:
            req_indices: [bs] int64, their rows.
        """
        if has_foreseen_noise(info):
            self._temperatures.index_copy_(0, req_indices, info.temperatures.view(-1, 1))
            self._seeds.index_copy_(0, req_indices, info.sampling_seed.to(torch.int64))

    def temperatures(self, req_indices: Tensor) -> Tensor:
        """Return the temperatures of rows [bs], [bs, 1] float32."""
        return self._temperatures[req_indices]

    def noise(self, req_indices: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
        """Return the noise that the sampler will add, [bs, w, V] float32.

        Args:
            req_indices: [bs] int64, the requests' rows.
            positions: [bs, w] int64, of the tokens that are chosen.
            token_ids: [V] int64.
        """
        bs, width = positions.shape
        seeds = self._seeds[req_indices].repeat_interleave(width, output_size=bs * width)
        noise = seeded_noise(seeds, positions.reshape(-1), token_ids)
        return noise.view(bs, width, -1).to(torch.float32)


def seeded_noise(seeds: Tensor, positions: Tensor, token_ids: Tensor) -> Tensor:
    """Return the noise that SGLang's ``multinomial_with_seed`` adds to log-probabilities.

    Args:
        seeds: [T] int64.
        positions: [T] int64, of the tokens that are chosen. SGLang hashes the position before.
        token_ids: [V] int64.

    Returns:
        [T, V] float64.
    """
    from sglang.kernels.ops.sampling.murmur_hash import murmur_hash32

    hashed: Tensor = murmur_hash32(seeds.to(torch.uint64), positions - 1, token_ids)
    uniform = hashed.to(torch.float64) / torch.iinfo(torch.uint32).max
    least, most = torch.finfo(torch.float64).min, -(2.0**-32)
    return -uniform.log().clamp(least, most).neg().log()


def _by_node(info: SamplingBatchInfo, widths: Sequence[int]) -> SamplingBatchInfo:
    """Return the batch's sampling settings with a row for each node."""
    if all(width == 1 for width in widths):
        return info
    request_of = [row for row, width in enumerate(widths) for _ in range(width)]
    rows = upload(request_of, info.temperatures.device)
    own = {name: getattr(info, name) for name in _BY_REQUEST}
    changed = {name: value[rows] for name, value in own.items() if value is not None}
    # Requests with a grammar or a processor have one node each: theirs is the first.
    first = [total - width for total, width in zip(accumulate(widths), widths, strict=True)]
    if info.grammars:
        changed["grammars"] = [None] * len(request_of)
        for node, grammar in zip(first, info.grammars, strict=True):
            changed["grammars"][node] = grammar
    if info.has_custom_logit_processor:
        changed["custom_params"] = [info.custom_params[row] for row in request_of]
        changed["custom_logit_processor"] = {
            key: replace(
                entry,
                rows=[first[row] for row in entry.rows],
                indices=upload([first[row] for row in entry.rows], rows.device),
            )
            for key, entry in info.custom_logit_processor.items()
        }
    return replace(info, **changed)
