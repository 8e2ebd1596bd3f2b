"""Tests that run in one process, in the folder layout of the package.

Tests that start another process that imports torch are in `tests/process`.
"""
