"""Measure algorithms beside plain decoding: ``specplug bench`` without its options."""
