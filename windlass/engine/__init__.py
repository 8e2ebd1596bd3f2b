"""The engine, in reading order: progress, optimizer, questions, buffers, blame, reporting, weights, saving, train."""
