"""Experiments of `windlass bench`: one module `*_bench` for each experiment. Start with: bench_tasks, bench_engines,
bench_rank (inside one rank); rank_pool (the processes of ranks, also for the scripts in bench); bench_launch,
bench_results, training_bench (the command that starts the ranks and reports)."""
