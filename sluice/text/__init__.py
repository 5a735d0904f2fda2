"""Tokeniser, chat template and incremental detokenising; only the router uses it."""
