"""The engine, in reading order: progress, optimizer, questions, buffers, blame, reporting, weights, pieces, states,
filling, saving, train."""
