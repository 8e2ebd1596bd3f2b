"""Parts of the benchmarks. Those of the training benchmark (cpu_train.py), in reading order: job, worker (one rank),
plan, floor, measure, targets, show, growth."""
