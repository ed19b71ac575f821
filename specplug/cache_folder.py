"""The folder that keeps what is made once for a user: compiled libraries, earned grades."""

from __future__ import annotations

import os
from pathlib import Path


def cache_base() -> Path:
    """Return the user's folder for caches, ``$XDG_CACHE_HOME`` or ``~/.cache``, whether or not it
    is there.

    Raises:
        RuntimeError: the user has no home.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return base if base.is_absolute() else Path("~/.cache").expanduser()
