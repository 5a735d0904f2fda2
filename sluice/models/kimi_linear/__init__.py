"""Kimi Linear: delta-rule and latent attention layers."""
