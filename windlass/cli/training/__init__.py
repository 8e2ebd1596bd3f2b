"""The training command: what a run is to do, the loop of each rank, what it shows, and what it leaves.

In reading order: plan, recipe, model, settings, agreement, interrupt, evaluation, metrics, progress, picture, export,
sample, failure, loop, rank. `windlass.cli.train` is the parent, `windlass.cli.train_worker` what each rank starts as.
"""
