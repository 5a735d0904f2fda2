"""Speculative decoding: draft, verify, commit."""
