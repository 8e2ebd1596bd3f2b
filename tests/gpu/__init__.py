"""Tests of laws on one CUDA GPU. They are skipped without a GPU."""
