"""What the training benchmark is made of. Reading order: job, worker (one process), squad, plan, floor, measure,
targets, show, growth."""
