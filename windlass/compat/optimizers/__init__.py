"""Optimizers with DeepSpeed's class names and arguments, implemented by torch's and windlass's optimizers."""
