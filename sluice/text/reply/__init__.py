"""What a model's answer is made of: reasoning, content, tool calls; one file a chat format."""
