"""Tests of windlass.data."""
