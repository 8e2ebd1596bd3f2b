"""Inference: continuous batching of any causal language model with a paged KV cache."""
