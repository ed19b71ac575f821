"""What ``pytest --specplug NAME`` collects: the pytest plugin puts a class of tests here for each
name."""

from __future__ import annotations
