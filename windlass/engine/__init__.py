"""The engine, in reading order: progress, optimizer, questions, buffers, blame, reporting, weights, pieces, states,
filling, saving, train, watch (what a tool may put in the way of `initialize`)."""
