"""``PagedModel``: any causal LM of transformers as a draft model, over a runtime's plans."""

from __future__ import annotations

import weakref
from functools import cached_property
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import CheckpointError
from specplug.kernels.attention_form import AttentionForm
from specplug.model.attention import running
from specplug.model.target import Target
from specplug.speculative.paged_plan import PagedKVCache, plan_of
from specplug.speculative.runtime import AttentionPlan, KVCache, Runtime
from specplug.speculative.token_drafter import TokenPieces
from specplug.speculative.token_map import TokenMap


class PagedModel:
    """A causal LM of transformers with a KV cache of its own, over the target's slots.

    It is loaded, proved and sped up as a target is, in the target's dtype and on its device. A
    draft needs no exactness, so its bits may depend on what else is in a pass. At position p it
    reads the token **at** p, and its logits are those of the token at p + 1.

    Call it in ``create_worker``: it allocates its cache there.

    Args:
        runtime: the engine's.
        path: the model's folder or hub id.
        reads_pieces: whether it reads a token that its vocabulary lacks as all pieces of it
            (``pieces``), where the host has own lengths.

    Attributes:
        pieces: what it reads in the place of the target's tokens, for ``TokenDrafter``; None:
            one token for each.
        vocab_size: V of its logits.
        context_len: tokens of the longest sequence that it was made for. Later positions are taken
            for the last one.
        has_windows: whether some layers see a sliding window of their context alone, which the
            plan of a tree cannot give them.

    Raises:
        CheckpointError: there is no such model, it cannot be loaded, its attention is none that
            the runtime's plans compute, or its pieces are to be read and it shares no token with
            the target.
    """

    def __init__(self, runtime: Runtime, path: str | Path, *, reads_pieces: bool = False) -> None:
        self._target = target = Target(
            str(path),
            runtime.dtype,
            runtime.device,
            row_invariant=False,
            num_threads=torch.get_num_threads(),  # those of the run
        )
        # The weights go with this object: nothing waits for the garbage collector.
        weakref.finalize(self, target.close).atexit = False
        self.vocab_size = target.vocab_size
        self.context_len = target.context_len
        shape = target.kv_shape
        self._runtime, self._path = runtime, path
        own_lengths = {}
        if reads_pieces and runtime.host.own_lengths and self.vocabulary.most_pieces > 1:
            own_lengths = {"own_lengths": self.vocabulary.most_pieces}
        self._cache: Any = runtime.allocate_kv(
            shape.num_layers, shape.num_kv_heads, shape.head_dim, **own_lengths
        )
        self.pieces = None
        if own_lengths:
            self.pieces = TokenPieces(
                self._cache, self.vocabulary.pieces, self.vocabulary.num_pieces
            )
        if not isinstance(self._cache, PagedKVCache):
            _check_foreign(str(path), target)
            target.unfuse_layers()  # a fused one writes to the cache's tensors
        self.has_windows = any(
            kind.window is not None and kind.window < self.context_len for kind in target.attentions
        )

    @cached_property
    def vocabulary(self) -> TokenMap:
        """Its tokens and the target's.

        Raises:
            CheckpointError: as ``TokenMap.of_draft``.
        """
        return TokenMap.of_draft(self._runtime, self._path, self.vocab_size)

    @property
    def model(self) -> Any:
        """The module of transformers."""
        return self._target.model

    def logits(self, tokens: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Run a pass, and return the logits of the token after each row.

        Args:
            tokens: [R] int64, in its own vocabulary.
            plan: where they stand and what they see.
            rows: [M] int64, those whose logits are wanted; None: all R.

        Returns:
            [M, V].
        """
        target = self._target
        own = plan_of(plan)
        running_plan: Any = _ForeignPlan(plan) if own is None else own
        positions = running_plan.positions.clamp(max=self.context_len - 1)
        target.rotary.begin(None)
        with running(running_plan, self._cache):
            out = target.model(
                input_ids=tokens.unsqueeze(0),
                position_ids=positions.unsqueeze(0),
                use_cache=False,
                logits_to_keep=0 if rows is None else rows,
            )
        logits: Tensor = out.logits.squeeze(0)
        return logits


@attrs.frozen(eq=False)
class _ForeignPlan:
    """A plan that is not ours, as the modules of a model call one."""

    plan: AttentionPlan

    @property
    def positions(self) -> Tensor:
        """[R] int64."""
        return self.plan.positions

    def attend(
        self,
        cache: KVCache,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionForm,
    ) -> Tensor:
        """Write keys and values, then attend."""
        return self.plan.attend(cache, layer, q, k, v, form.scale, form.window)


def _check_foreign(name: str, target: Target) -> None:
    """Refuse a model whose attention an ``AttentionPlan`` does not compute."""
    for kind in target.attentions:
        if kind.softcap is not None or kind.has_sinks:
            what = "a softcap" if kind.softcap is not None else "sinks"
            raise CheckpointError(
                f"draft model {name}: its attention has {what}, which the plans of this host do "
                "not compute; expected scores of a scale and a window alone: choose another model"
            )
