"""``sluice bench``: load on a running router, and what came of it."""
