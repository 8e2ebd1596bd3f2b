"""The engine, in reading order: progress, optimizer, buffers, blame, reporting, weights, saving, train."""
