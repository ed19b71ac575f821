"""What a model runner of version 1 has computed and sampled in a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs
import numpy as np
from torch import Tensor


@attrs.frozen(eq=False, kw_only=True, slots=False)
class RunnerStep:
    """A step of n requests.

    Its arrays are the runner's own or were made for the step, in the order of its batch.

    vLLM pads the first step of a request that has one token left to compute to the width of its
    decode steps, with drafted tokens -1, none of which is accepted. So a request has more rows
    than tokens there: ``ends`` leaves them out.

    Attributes:
        states: the runner's record of each request.
        starts: [n] int, tokens with KV before the step.
        widths: [n] int, rows of each request in the step, drafts and padding included.
        sampled: [n] int, tokens sampled for each; 0 if its prompt goes on.
        lengths: [n] int, tokens known of each now.
        tokens: [n, context] int32, the tokens known of each.
        hidden_states: [R or more, H] after the final norm, of all rows.
        layer_inputs: by layer [R or more, H], the states before it.
        most_drafts: tokens that may be drafted for each request.
    """

    states: list[Any]
    starts: np.ndarray
    widths: np.ndarray
    sampled: np.ndarray
    lengths: np.ndarray
    tokens: np.ndarray
    hidden_states: Tensor
    layer_inputs: Mapping[int, Tensor]
    most_drafts: int

    @cached_property
    def ends(self) -> np.ndarray:
        """[n] int, tokens with KV after the step, of those whose prompt was not computed."""
        known = self.lengths - self.sampled
        ended: np.ndarray = np.minimum(self.starts + self.widths, known)
        return ended

    @classmethod
    def of(
        cls,
        runner: Any,
        scheduler_output: Any,
        sampled_token_ids: Sequence[Sequence[int]],
        hidden_states: Tensor,
        aux_hidden_states: Sequence[Tensor] | None,
        layers: Sequence[int],
    ) -> RunnerStep:
        """Read a step where a runner asks for drafts.

        Args:
            layers: whose inputs ``aux_hidden_states`` are, in their order.
        """
        batch = runner.input_batch
        ids = batch.req_ids
        count, scheduled = len(ids), scheduler_output.num_scheduled_tokens
        return cls(
            states=[runner.requests[request_id] for request_id in ids],
            starts=batch.num_computed_tokens_cpu[:count],
            widths=np.array([scheduled[request_id] for request_id in ids], dtype=np.int64),
            sampled=np.array([len(tokens) for tokens in sampled_token_ids], dtype=np.int64),
            lengths=batch.num_tokens_no_spec[:count],
            tokens=batch.token_ids_cpu,
            hidden_states=hidden_states,
            layer_inputs=dict(zip(layers, aux_hidden_states or (), strict=True)),
            most_drafts=scheduler_output.num_spec_tokens_to_schedule,
        )
