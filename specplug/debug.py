"""``SPECPLUG_DEBUG=1`` turns on the checks that cost time. All tests run with it."""

from __future__ import annotations

import os

DEBUG = os.environ.get("SPECPLUG_DEBUG", "") not in ("", "0")
