"""Tests of windlass.launch: real ranks, most of which do not import torch."""
