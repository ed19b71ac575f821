"""What the suite does for each test, by the repository's conftest.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

AS_A_BACKGROUND_JOB = """
import runpy, signal, subprocess, sys

signal.signal(signal.SIGINT, signal.SIG_IGN)
runpy.run_path(sys.argv[1])["heed_interrupts"]()
signal.raise_signal(signal.SIGINT)
print("goes on", flush=True)
code = "import signal; signal.raise_signal(signal.SIGINT)"
print(subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode)
"""


def test_suite_that_ignores_interrupts_starts_what_heeds_them() -> None:
    told = subprocess.run(
        [sys.executable, "-c", AS_A_BACKGROUND_JOB, str(CONFTEST)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout.split("\n") == ["goes on", "-2", ""]
