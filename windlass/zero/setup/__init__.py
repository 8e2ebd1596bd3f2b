"""Choices and checks before the first step: units, their tiers and buffers, and equality of the model on all ranks."""
