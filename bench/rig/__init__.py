"""Parts of the training benchmark. Reading order: job, worker (one rank), plan, floor, measure,
targets, show, growth."""
