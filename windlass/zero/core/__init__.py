"""Core of ZeRO: units, sharded parameters, gradient reduction, and the order of their collectives."""
