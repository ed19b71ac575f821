"""``SparseSelfSettings``: the settings of SPARSE_SELF. No torch here."""

from __future__ import annotations

import attrs

from specplug.settings import Integer, setting
from specplug_sparse_self.view import MOST_TOKENS, View


@attrs.frozen(kw_only=True)
class SparseSelfSettings:
    """The settings of what drafts see. docs/settings.md shows them."""

    sparse_self_tokens: int | None = setting(
        None,
        Integer(least=1),
        "Most tokens of a context that drafts see: half of them the last ones, a few first ones, "
        "and the pages that were looked at most. A request that is no longer is not drafted.",
        group="SPARSE_SELF",
        unset=f"a quarter of the longest context, at most {MOST_TOKENS:,}",
    )

    def view(self, context_len: int) -> View:
        """Return what drafts see, of contexts of at most so many tokens."""
        if self.sparse_self_tokens is None:
            return View.of_context(context_len)
        return View.of_tokens(min(self.sparse_self_tokens, context_len))
