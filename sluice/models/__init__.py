"""Target and draft models, their loader and registry."""
