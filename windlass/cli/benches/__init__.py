"""What `windlass bench` runs. Reading order: models, memory, trainee, work, rank (one process); facts, ranks, verdicts,
picture, zero_memory, training (the command that starts them and tells what came of it)."""
