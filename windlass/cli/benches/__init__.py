"""Experiments of `windlass bench`. Reading order: bench_models, memory_sampler, bench_engines, bench_tasks, bench_rank
(inside one rank); rank_pool (the processes of ranks, also for the scripts in bench); bench_launch, bench_results,
expected_order, bar_chart, zero_memory_bench, training_bench (the command that starts the ranks and reports)."""
