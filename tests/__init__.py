"""Tests by folder.

`unit` runs in one process, `process` starts programs, `dist` runs ranks over gloo and shared memory, `parity` runs the
full products of covering arrays in `dist`, `gpu` needs a GPU, and `fuzz` mutates the input of readers. The other
folders test the part of windlass in their name.
"""
