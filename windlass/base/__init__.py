"""Foundations that every other package may import: errors, log, dtypes, pending work, devices, memory, tensor trees."""
