"""Preparation of the first step: choice of units, tiers and buffers, and a check that all ranks have equal models."""
