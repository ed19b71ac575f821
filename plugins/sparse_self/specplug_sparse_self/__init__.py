"""Sparse self-speculation for specplug: the target drafts over a part of its own context.

After Vegas (arXiv 2602.07223) and MagicDec (arXiv 2408.11049). There is no draft model. A step of a
long context takes its time from keys and values, of which a draft reads a few: the first tokens,
the last ones, and the pages that the last verification looked at most. Importing this module does
not import torch; the worker does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specplug import (
    DEFAULT_MODEL,
    AlgorithmInfo,
    Capabilities,
    Conformance,
    Defaults,
    DraftModelAlgorithm,
    SpecConfig,
    hookimpl,
)
from specplug_sparse_self.config import SparseSelfSettings
from specplug_sparse_self.view import View

if TYPE_CHECKING:
    from specplug import Runtime
    from specplug_sparse_self.worker import SparseSelfWorker

__all__ = ["SparseSelf", "View", "algorithm"]


class SparseSelf(DraftModelAlgorithm):
    """The hooks of ``SPARSE_SELF``, which call a ``SparseSelfWorker``.

    Args:
        view: what drafts see; None: as ``sparse_self_tokens`` says.
        watched: the layers whose attention chooses the pages; None: two of the target's middle.
    """

    def __init__(self, view: View | None = None, watched: tuple[int, ...] | None = None) -> None:
        self._view = view
        self._watched = watched

    @hookimpl
    def describe(self) -> AlgorithmInfo:
        return AlgorithmInfo(
            name="SPARSE_SELF",
            summary="The target itself over a part of its context; for long ones; no draft model",
            api_version=1,
            capabilities=Capabilities(
                branching=True, captures={"layer_inputs"}, target_drafts=True
            ),
            defaults=Defaults(num_steps=4, topk=1, num_draft_tokens=5),
            paper="https://arxiv.org/abs/2602.07223",
            settings=SparseSelfSettings,
            # Shorter contexts are not drafted. So many tokens are the first and the last ones, and
            # a page between them.
            conformance=Conformance(
                settings={"speculative_settings": {"sparse_self_tokens": 40}},
                accept_lengths={DEFAULT_MODEL: 2.79},
            ),
        )

    @hookimpl
    def validate_config(self, config: SpecConfig) -> SpecConfig:
        """Fit a chain, or a tree (``topk`` greater than 1)."""
        return config.fit_target_draft()

    @hookimpl
    def create_worker(self, runtime: Runtime) -> SparseSelfWorker:
        from specplug_sparse_self.worker import SparseSelfWorker

        settings: SparseSelfSettings = runtime.config.settings
        view = self._view or settings.view(runtime.context_len)
        return SparseSelfWorker(runtime, view, self._watched)


algorithm = SparseSelf()
