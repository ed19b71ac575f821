"""Per-token outputs on their way through a step: from the target's pass to the requests."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.engine.collected_output import CollectedOutput
from specplug.engine.request import Request
from specplug.speculative.host_copy import host_copy
from specplug.speculative.output_kind import OutputKind


class WantedOutputs:
    """What the requests of a prefill or a decode step want, together.

    Args:
        requests: of the batch.

    Attributes:
        points: where the target's pass is to be read, each once.
    """

    def __init__(self, requests: Sequence[Request]) -> None:
        self._wants: dict[OutputKind, list[Any]] = {}
        self._points: dict[OutputKind, dict[Hashable, int]] = {}
        for request in requests:
            for collected in request.outputs.values():
                output = collected.output
                self._wants.setdefault(output, []).append(collected.want)
                columns = self._points.setdefault(output, {})
                for point in collected.points:
                    columns.setdefault(point, len(columns))
        points = (point for columns in self._points.values() for point in columns)
        self.points = tuple(dict.fromkeys(points))

    def read(self, points: Mapping[Hashable, Tensor]) -> dict[str, Tensor]:
        """Return the outputs that the pass itself gives, by name, [R, columns, …].

        Args:
            points: what stood at each, [R, …].
        """
        return {
            output.name: torch.stack([points[point] for point in columns], dim=1)
            for output, columns in self._points.items()
            if columns
        }

    def sample(self, logits: Tensor, predict: Tensor) -> dict[str, Tensor]:
        """Return the outputs that follow from logits [M, V] and the tokens chosen there [M]: by
        name, [M, …]."""
        found: dict[str, Tensor] = {}
        for output, wants in self._wants.items():
            if output.is_sampled:
                found |= output.sample(logits, predict, wants)
        return found

    def send(self, per_node: Mapping[str, Tensor], num_rows: int) -> HostOutputs:
        """Start copying what is wanted to the host.

        Args:
            per_node: all outputs of the pass, by name.
            num_rows: R, of the pass.
        """
        tensors: dict[str, Tensor] = {}
        for output, wants in self._wants.items():
            found = output.found_in(per_node, wants[0], num_rows)
            tensors |= {name: host_copy(tensor) for name, tensor in found.items()}
        return HostOutputs(
            tensors=tensors,
            columns={output.name: columns for output, columns in self._points.items()},
        )


@attrs.frozen(eq=False, kw_only=True)
class HostOutputs:
    """What was wanted of a prefill or a decode step, on the host.

    Attributes:
        tensors: by name, [rows, …] of all requests, or [rows, columns, …].
        columns: by output, the column of each point.
    """

    tensors: Mapping[str, Tensor]
    columns: Mapping[str, Mapping[Hashable, int]]

    def give(
        self, request: Request, position: int, rows: slice, sampled: int | None = None
    ) -> None:
        """Give a request what it wants.

        Args:
            position: of the first of its rows.
            rows: its own.
            sampled: the row of its logits, where these were computed for its last row alone.
        """
        for collected in request.outputs.values():
            if collected.output.is_sampled and sampled is not None:
                last = position + rows.stop - rows.start - 1
                collected.take(last, self._cut(collected, slice(sampled, sampled + 1)))
            else:
                collected.take(position, self._cut(collected, rows))

    def _cut(self, collected: CollectedOutput, rows: slice) -> dict[str, Tensor]:
        """Copy a request's part of the tensors. A view would keep those of the whole step."""
        output, want, columns = collected.output, collected.want, None
        place = self.columns[output.name]
        if len(collected.points) < len(place) or any(
            place[point] != column for column, point in enumerate(collected.points)
        ):
            columns = [place[point] for point in collected.points]
        cut = {}
        for name in output.tensor_specs(want):
            tensor = output.cut(want, self.tensors[name][rows])
            cut[name] = tensor.clone() if columns is None else tensor[:, columns]
        return cut
