"""The pod that writes answers and owns the request."""
