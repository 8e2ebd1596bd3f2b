"""The tests: unit (one process), process (programs), dist (ranks on gloo and shared memory), parity (products), gpu."""
