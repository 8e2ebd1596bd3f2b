"""Full products of the covering arrays in tests/dist. They are slow, and `make parity` runs them."""
