"""Grammars: what an answer's text must match, and which tokens keep it on the way there."""
