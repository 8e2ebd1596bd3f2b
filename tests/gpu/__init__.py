"""Laws on one CUDA GPU; skipped without one."""
