"""What the training benchmark is made of. Reading order: job, worker (one process), squad, plan, measure, floor, targets,
show, growth."""
