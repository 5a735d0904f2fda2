"""The DeepSeek-V4 family: configuration, weights, forward pass, and the NextN draft layer."""
