"""The drafter: a language model of transformers, and the map between its vocabulary and the
target's."""

from __future__ import annotations

from torch import Tensor

from specplug import AttentionPlan, PagedModel, Runtime, TokenDrafter, TokenMap, UsageError


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
        self.model = PagedModel(runtime, path)
        self.vocabulary = TokenMap.of_draft(runtime, path, self.model.vocab_size)
        if runtime.config.topk > 1 and self.model.has_windows:
            raise UsageError(
                f"topk={runtime.config.topk}: layers of the draft model {path} see a sliding "
                "window, which trees do not; expected topk=1"
            )
        self._same = self.vocabulary.is_identity
        super().__init__(runtime, token_ids=self.vocabulary.target_ids)

    def logits(self, tokens: Tensor, plan: AttentionPlan, rows: Tensor | None = None) -> Tensor:
        """Run the model on target ids [R]; return the logits of the shared tokens."""
        if self._same:
            return self.model.logits(tokens, plan, rows)
        logits = self.model.logits(self.vocabulary.reads[tokens], plan, rows)
        return self.vocabulary.shared(logits)
