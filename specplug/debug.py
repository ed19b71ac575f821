"""``SPECPLUG_DEBUG=1`` turns on the checks that cost time. All tests run with it.

The engine then checks its pool and its requests after every step, reads what a plugin proposes and
accepts on the host (tokens, parents, paths) and tells what is wrong with it, and the command line
shows tracebacks. Without it the same values are bounded on the device, so that they do no harm.
"""

from __future__ import annotations

import os

DEBUG = os.environ.get("SPECPLUG_DEBUG", "") not in ("", "0")
