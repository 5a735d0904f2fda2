"""The step loop that runs a model for many requests at once."""
