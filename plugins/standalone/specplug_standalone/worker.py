"""The drafter: a language model of transformers, and the map between its vocabulary and the
target's."""

from __future__ import annotations

from torch import Tensor

from specplug import AttentionPlan, PagedModel, Runtime, TokenDrafter, UsageError


class StandaloneWorker(TokenDrafter):
    """A ``TokenDrafter`` over any causal LM of transformers.

    Args:
        runtime: the run's.

    Attributes:
        model: the draft model.
        vocabulary: its tokens and the target's.

    Raises:
        UsageError: trees, and some layers of the draft model see a sliding window.
        CheckpointError: the draft model cannot be loaded, or shares no token with the target.
    """

    def __init__(self, runtime: Runtime) -> None:
        path = runtime.config.draft_model_path
        assert path is not None
        self.model = PagedModel(runtime, path, reads_pieces=True)
        self.vocabulary = self.model.vocabulary
        if runtime.config.topk > 1 and self.model.has_windows:
            raise UsageError(
                f"topk={runtime.config.topk}: layers of the draft model {path} see a sliding "
                "window, which trees do not; expected topk=1"
            )
        self._same = self.vocabulary.is_identity
        own = self.model.pieces
        self._reads = None if self._same or own is not None else self.vocabulary.reads
        super().__init__(runtime, token_ids=self.vocabulary.target_ids, pieces=own)

    def logits(self, tokens: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Run the model on tokens [R], its own or the target's; return the logits of the shared
        ones."""
        if self._reads is not None:
            tokens = self._reads[tokens]
        logits = self.model.logits(tokens, plan, rows)
        return logits if self._same else self.vocabulary.shared(logits)
