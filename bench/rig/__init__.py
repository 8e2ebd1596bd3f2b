"""Parts of the training benchmark. Reading order: job, worker (one process), rank_pool, plan, floor, measure,
targets, show, growth."""
