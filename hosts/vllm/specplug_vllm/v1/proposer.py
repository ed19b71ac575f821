"""The proposer that vLLM's model runner of version 1 asks for drafts: an algorithm of specplug.

A step of vLLM's verifies by itself and ends with the next step's drafts. So one call here is the
end of a step and the beginning of the next: the committed tokens go to the algorithm
(``HookOrder.feed``), and what it drafts then (``HookOrder.draft``) goes to vLLM's scheduler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import attrs
import numpy as np
import torch
from torch import Tensor, nn

from specplug import Batch, CommittedOutput, PluginError
from specplug.speculative.hook_order import ForwardMode, Half, Scheduled
from specplug.speculative.host_copy import upload
from specplug.speculative.undrafted import FAILED
from specplug_vllm import vllm_names
from specplug_vllm.draft_cache import PREFIX
from specplug_vllm.hosted_run import HostedRun
from specplug_vllm.v1 import names as v1_names
from specplug_vllm.v1.request_rows import RequestRows
from specplug_vllm.v1.step import RunnerStep
from specplug_vllm.v1.step_rows import accepted, first_rows, ranges
from specplug_vllm.vllm_stages import chains, feed_chunks, prefilled_chunks


class VllmProposer:
    """vLLM's interface of a ``custom_class``: what model runner V1 has as its ``drafter``.

    Args:
        vllm_config: vLLM's.
        name: the algorithm's.

    Raises:
        SpecplugError: the version of vLLM, the algorithm or a setting does not fit.

    Attributes:
        decode_steps: requests' decode steps so far, those of all requests together.
        captured_layers: whose inputs the target returns, in ascending order.
        run: the algorithm.
    """

    def __init__(self, vllm_config: Any, name: str) -> None:
        self.run = HostedRun(vllm_config, name)
        self._target: nn.Module | None = None
        self.captured_layers: tuple[int, ...] = ()
        self.decode_steps = 0

    @property
    def undrafted(self) -> int:
        """How many requests went on without drafts."""
        return self.run.undrafted.counts.total()

    # What vLLM calls

    def load_model(self, target: nn.Module) -> None:
        """Take the target, which has been loaded. ``attach`` follows."""
        self._target = target

    def propose(self, *args: Any, **kwargs: Any) -> list[list[int]]:
        """Raise: this is vLLM's method, not our hook, and ``patches`` has the runner call ``step``.

        vLLM asks that it is there, and would give it tokens alone. It goes when vLLM passes on the
        hidden states that it has (docs/hosts.md).
        """
        raise RuntimeError("specplug_vllm: vLLM's model runner was not patched before its step")

    # What the patches call

    @torch.inference_mode()
    def attach(self, runner: Any) -> None:
        """Make the algorithm's worker, and ask the target for what it captures."""
        assert self._target is not None
        for names in (vllm_names.NAMES, v1_names.NAMES):
            names.check_runner(runner)
        self._runner = runner
        self._order = self.run.create_worker(self._target, runner.device)
        self._runtime = runtime = self.run.runtime
        self._rows = RequestRows(runtime.req_table_size, runtime.context_len, self.run.undrafted)
        self._block_group = 0
        v1_names.keep_drafting_near_the_end(runner)
        self.captured_layers = runtime.captured_layers
        if self.captured_layers:
            vllm_names.capture_layers(runner, self._target, self.captured_layers)

    def forget(self, ended: Iterable[str], preempted: Iterable[str]) -> None:
        """Free the rows of requests that have ended or lost their blocks, and tell plugins of those
        that have ended."""
        for request_id in preempted:
            self._rows.free(request_id)
        for request_id in ended:
            self._rows.free(request_id)
            self.run.report_end(request_id)

    @torch.inference_mode()
    def step(self, step: RunnerStep) -> list[list[int]]:
        """Return the tokens to verify next for each request of a step, at most
        ``step.most_drafts`` each."""
        rows = self._rows
        prefill, decode, ready = rows.sort(step)
        if self._runtime.has_draft_cache:
            self._locate(step)
        if len(prefill):
            self._guard(prefill, partial(self._prefill, step, prefill))
        if len(decode):
            self.decode_steps += len(decode)
            self._guard(decode, partial(self._decode, step, decode))
        drafts: list[list[int]] = [[] for _ in step.states]
        ready = [index for index in ready if not rows.failed[rows.of_step[index]]]
        if len(ready):
            self._guard(ready, partial(self._draft, step, ready, drafts))
        return drafts

    def _guard(self, chosen: Sequence[int], call: Callable[[], None]) -> None:
        """Call hooks. If a plugin fails, draft no more for these requests: a draft changes no
        token, so they go on without."""
        try:
            call()
        except PluginError as error:
            self._rows.fail((self._rows.of_step[index] for index in chosen), FAILED)
            self.run.tell(error)

    def _locate(self, step: RunnerStep) -> None:
        """Note where vLLM keeps the draft models' keys of each request."""
        if self._runtime.table is None:
            self._block_group = v1_names.draft_block_group(self._runner, PREFIX)
            self._runtime.bind(v1_names.block_size(self._runner, self._block_group))
        table, rows = self._runtime.table, self._rows
        assert table is not None
        for index in rows.started:
            table.start(rows.of_step[index], step.starts[index])
        blocks, counts = v1_names.block_rows(self._runner, self._block_group)
        table.fill(np.array(rows.of_step), blocks, counts)
        table.update()
        self._runtime.note_longest(int(step.lengths.max()))

    # The two halves of a step, and the next one's drafts

    def _prefill(self, step: RunnerStep, chosen: Sequence[int]) -> None:
        """Feed the algorithm the chunks of requests whose prompt is computed."""
        rows, starts, ends = self._rows, step.starts[chosen], step.ends[chosen]
        widths = ends - starts
        places = ranges(starts, widths)
        owners = np.repeat(chosen, widths)
        chunks = prefilled_chunks(
            self._views(step, chosen),
            self._rows_of(chosen),
            self._tensor(step.tokens[owners, places]),
            starts,
            ends,
            first=[rows.is_first[index] for index in chosen],
            last=[rows.ends_prompt[index] for index in chosen],
        )
        # The token after each chunk is the next of the prompt, or the one that was sampled.
        after = self._tensor(step.tokens[chosen, ends])
        nodes = ranges(first_rows(step)[chosen], widths)
        per_node = self._runtime.per_node(
            self._tensor(nodes), step.hidden_states, step.layer_inputs
        )
        feed_chunks(self._order, self._runtime, chunks, after, per_node)

    def _decode(self, step: RunnerStep, chosen: Sequence[int]) -> None:
        """Feed the algorithm what vLLM accepted of its drafts."""
        found = accepted(step, chosen)
        req_indices = [self._rows.of_step[index] for index in chosen]
        made = self._tensors(req_indices, *attrs.astuple(found, recurse=False))
        batch = Batch(
            mode=ForwardMode.DECODE,
            requests=self._views(step, chosen),
            req_indices=made[0].clone(),
            seq_lens=made[1].clone(),
        )
        output = CommittedOutput(
            next_tokens=made[3],
            own_tokens=made[4],
            per_node=self._runtime.per_node(made[5], step.hidden_states, step.layer_inputs),
            last_rows=made[6],
            accept_lens=made[7],
            bonus_tokens=made[8],
        )
        half = Half(req_indices=made[0], batch=batch)
        self._order.feed(half, self._order.publish(half, made[2], output))

    def _draft(self, step: RunnerStep, chosen: Sequence[int], drafts: list[list[int]]) -> None:
        """Draft for the requests that decode next; put their tokens into ``drafts``."""
        most = self._rows.max_nodes(step, chosen, self.run.config.num_draft_tokens)
        drafted = self._order.draft(
            Scheduled(
                req_indices=self._rows_of(chosen),
                requests=self._views(step, chosen),
                max_draft_nodes=most,
            )
        )
        draft = drafted.draft
        tokens = chains(draft, self.run.config.algorithm).tokens[:, 1:].tolist()
        widths = draft.widths or (draft.width,) * len(chosen)
        for index, row, width in zip(chosen, tokens, widths, strict=True):
            drafts[index] = row[: width - 1]

    def _tensor(self, values: np.ndarray) -> Tensor:
        """Copy integers to a tensor of int64 on the device."""
        return upload(values, self._runtime.device)

    def _tensors(self, *lists: Sequence[int]) -> tuple[Tensor, ...]:
        """Copy lists of integers to tensors of int64 on the device, in one go."""
        made = upload([value for values in lists for value in values], self._runtime.device)
        return torch.split(made, [len(values) for values in lists])

    def _rows_of(self, chosen: Sequence[int]) -> Tensor:
        (rows,) = self._tensors([self._rows.of_step[index] for index in chosen])
        return rows

    def _views(self, step: RunnerStep, chosen: Sequence[int]) -> list[Any]:
        views = self._rows.views
        return [views[step.states[index].req_id] for index in chosen]
