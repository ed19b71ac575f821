"""Imported by the process from which engines' processes are forked: it ends when the tests do.

Else it would not notice, as engines' processes hold the pipe that tells it; and they end with it.
"""

from __future__ import annotations

from sglang.srt.utils import kill_itself_when_parent_died

kill_itself_when_parent_died()
