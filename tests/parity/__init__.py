"""The full products of which tests/dist runs a covering array: slow, run by `make parity`."""
