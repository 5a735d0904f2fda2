"""Request and response schemas of the OpenAI-compatible API."""
