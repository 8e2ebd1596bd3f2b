"""Tests of windlass.launch with real ranks, most of which do not import torch."""
