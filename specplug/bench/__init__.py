"""Algorithms measured beside plain decoding: what ``specplug bench`` does, without its options."""
