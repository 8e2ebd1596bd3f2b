"""Optimizer updates of a ZeRO model: master weights, optimizer states, their offload, and the steps on them."""
