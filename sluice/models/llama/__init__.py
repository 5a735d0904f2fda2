"""The plain family: Llama and Qwen3, grouped-query attention over a full key/value history."""
