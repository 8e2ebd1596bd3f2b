"""Full products of the covering arrays in tests/dist, and runs that change between DeepSpeed and windlass.

These tests are slow. `make parity` runs them.
"""
