"""Kernels in C++ with their meaning in PyTorch beside them. In reading order:

rules (the numbers of an update), piece (the tensors of one), reference (what every kernel has to compute), dispatch
(which path runs, and why); native/ holds the C++ sources, _optimizers is what they build.
"""

from __future__ import annotations

from windlass.kernels.dispatch import path_in_use as path_in_use
from windlass.kernels.dispatch import update as update
from windlass.kernels.piece import Piece as Piece
