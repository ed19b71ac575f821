"""Settings of every test of the repository, the plugins' too. Made before torch is imported."""

from __future__ import annotations

import os

os.environ["SPECPLUG_DEBUG"] = "1"  # the engine checks itself while it runs
# Tensors in tests are small: a second OpenMP thread only makes them wait for a busy core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is downloaded by a test
