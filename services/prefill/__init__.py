"""The pod that reads prompts."""
