"""The laws on one CUDA GPU; skipped where there is none."""
