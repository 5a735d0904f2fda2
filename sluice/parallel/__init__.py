"""Ranks that compute one model together: their collectives, and which part of a tensor is whose."""
