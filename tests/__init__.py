"""The tests: unit (one process), dist (ranks over gloo and shared memory), parity (full products), gpu."""
