"""Experiments of `windlass bench`: one module `*_bench` for each (training_bench has two). Start with: bench_tasks,
bench_engines, bench_rank (inside one rank); rank_pool (the processes of ranks, also for the scripts of the folder
bench); bench_launch, bench_results, training_bench (the process that starts the ranks and reports)."""
