"""What the target does for drafts: it runs some of its layers, over all it has cached or a part."""

from __future__ import annotations

import attrs
import torch
from torch import Tensor

from specplug.engine.kv_pool import KVPool
from specplug.errors import PluginError
from specplug.model.layer_range import AttentionWatch, LayerRange, final_norm
from specplug.model.target import Target
from specplug.speculative.draft import described
from specplug.speculative.hook_order import Batch
from specplug.speculative.runtime import TargetPlan as RuntimePlan
from specplug.speculative.target_plan import LentTargetPlan, TargetPlan, ViewShape


class TargetDrafts:
    """The target as a draft model. Its committed keys and values stay as they are: a row writes to
    the slots after them, over which the verification writes.

    Args:
        target: of the run.
        kv: of the run.
    """

    def __init__(self, target: Target, kv: KVPool) -> None:
        self._kv = kv
        self._name = type(target.model).__name__
        self._norm = final_norm(target.capture.decoder)

    def final_norm(self, hidden: Tensor) -> Tensor:
        """Apply the target's final norm, [R, H] to [R, H]."""
        if self._norm is None:
            raise PluginError(
                f"final_norm: {self._name} has none of a known name; call target_layers() in "
                "create_worker(), which refuses such a target"
            )
        rows: Tensor = self._norm[1](hidden.unsqueeze(0)).squeeze(0)
        return rows

    def plan(
        self,
        batch: Batch,
        starts: Tensor,
        width: int,
        offset: int,
        *,
        view: ViewShape | None,
        pages: Tensor | None,
        room: int,
    ) -> LentTargetPlan:
        """Return the plan of rows; ``view``: of what they see; None: all."""
        return LentTargetPlan(
            TargetPlan.of(
                self._kv.request_slots,
                batch.req_indices,
                starts,
                width,
                length=self._kv.key_length,
                offset=offset,
                room=room,
                view=view,
                pages=pages,
            )
        )


@attrs.frozen(eq=False)
class DraftingLayers:
    """Layers of the target for drafts: [R, H] and the plan of the R rows -> [R, H]."""

    kv: KVPool
    layers: LayerRange

    def __call__(self, hidden: Tensor, plan: RuntimePlan) -> Tensor:
        """Run the layers.

        Raises:
            PluginError: the plan is not of ``plan_target``.
        """
        if not isinstance(plan, LentTargetPlan):
            raise PluginError(
                f"the target's layers: the plan is {described(plan)}; expected what plan_target() "
                "returned: other plans may write committed positions"
            )
        committed = self.kv.committed
        assert committed is not None, "drafts come after the start of the run"
        return self.layers.draft(hidden, plan._plan.guarded(committed))


@attrs.frozen(eq=False)
class WatchedLayer:
    """A layer of the target whose attention is looked at."""

    kv: KVPool
    layer: LayerRange
    page_size: int

    def __call__(self, batch: Batch, hidden: Tensor, positions: Tensor) -> Tensor:
        """Return how much of its attention each row gives to each page.

        Args:
            hidden: [bs, H], what goes into the layer.
            positions: [bs] int64 of the rows.

        Returns:
            [bs, pages] float32.
        """
        rows, requests = batch.req_indices, self.kv.request_slots
        table = requests.slots[:, : self.kv.key_length].index_select(0, rows)
        lengths = requests.lengths
        if lengths is not None:
            lengths = torch.maximum(positions + 1, lengths[rows])
        positions = positions.clamp(max=requests.last_position)
        return AttentionWatch(table, positions, lengths, self.page_size).of(self.layer, hidden)
