"""Sluice: a disaggregated LLM serving stack; importing it pulls in neither torch nor nixl."""
