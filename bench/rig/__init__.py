"""Parts of the training benchmark. Reading order: job, worker (one process), squad, plan, floor, measure,
targets, show, growth."""
