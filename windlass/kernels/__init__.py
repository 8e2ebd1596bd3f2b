"""Kernels in C++ with their meaning in PyTorch beside them. In reading order:

rules (the numbers of an update), piece (the tensors of one), reference (what every kernel has to compute), dispatch
(which path runs, and why), keyed_sum (a hash of memory); native/ holds the C++ sources.
"""

from __future__ import annotations

from windlass.kernels.dispatch import path_in_use as path_in_use
from windlass.kernels.dispatch import update as update
from windlass.kernels.keyed_sum import keyed_sum as keyed_sum
from windlass.kernels.keyed_sum import keyed_sum_on_host as keyed_sum_on_host
from windlass.kernels.piece import Piece as Piece
