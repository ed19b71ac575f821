"""What a target makes of its head's logits: some models scale them, some cap them."""

from __future__ import annotations

from typing import Any

import attrs
import torch
from torch import Tensor

from specplug.errors import warn_fallback

CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""As ``config.json`` calls the bound of the logits."""

TOKENS = 4
"""Read to find the form."""

CLOSE = 0.02
"""How far, as a share of the greatest, logits may be from the form's: half precision rounds."""


@attrs.frozen
class LogitForm:
    """How the logits of a target follow from its head's.

    Attributes:
        scale: by which they are multiplied.
        cap: ``cap * tanh(logits / cap)`` after that (Gemma 2); None: none.
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, logits: Tensor) -> Tensor:
        """Apply it, […, V], in the dtype of the logits, as models do."""
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.cap is None else self.cap * torch.tanh(logits / self.cap)

    @classmethod
    @torch.no_grad()
    def of(cls, model: Any) -> LogitForm:
        """Find a model's form. Scales have many names, and one name has two meanings: so a few
        tokens are read, and the head's logits compared with the model's.

        Where they have no such form that is told, and the head's are taken.

        Args:
            model: of transformers, with its head.
        """
        of_head: list[Tensor] = []
        head = model.get_output_embeddings()
        hook = head.register_forward_hook(lambda module, args, output: of_head.append(output))
        try:
            read = torch.arange(TOKENS, device=model.device).unsqueeze(0)
            found = model(input_ids=read, use_cache=False).logits.double().flatten()
        finally:
            hook.remove()
        before, config = of_head[0].double().flatten(), model.config.get_text_config()
        cap = next((getattr(config, name) for name in CAPS if getattr(config, name, None)), None)
        for scale in (1.0, _scale(before, found, cap)):
            form = cls(scale, cap)
            if (form(before) - found).abs().max() <= CLOSE * found.abs().max():
                return form
        warn_fallback(
            f"the logits of {type(model).__name__} are not its head's, scaled or capped; a draft "
            "learns the head's, which may say other probabilities than the target"
        )
        return cls()


def _scale(before: Tensor, after: Tensor, cap: float | None) -> float:
    """Return by what logits [n] were multiplied before they were capped, as those say that came not
    near the bound."""
    if cap is not None:
        free = after.abs() < 0.9 * cap
        before, after = before[free], cap * torch.atanh(after[free] / cap)
    return float(before @ after / (before @ before).clamp(min=1e-12))
