"""The DeepSeek-V4 family: configuration, weights, compressors, forward pass and the NextN draft layer."""
