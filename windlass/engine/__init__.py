"""The engine, in reading order: progress, optimizer, questions, buffers, blame, reporting, weights, pieces, states,
fingerprint, filling, groups, position, batches, averages, saving, files, train, watch (what a tool may put in the way
of `initialize`)."""
