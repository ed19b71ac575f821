"""Prefill and decode as separate instances, and the transfer between them."""
