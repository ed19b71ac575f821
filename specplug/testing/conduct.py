"""Checks of what a plugin does beside drafting: what it waits for, keeps and leaves."""

from __future__ import annotations
