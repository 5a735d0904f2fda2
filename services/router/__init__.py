"""The HTTP front: OpenAI-compatible API over prefill and decode pods."""
