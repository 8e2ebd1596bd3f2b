"""Experiments of `windlass bench`. Reading order: bench_models, memory_sampler, bench_engines, bench_tasks, bench_rank
(inside one rank); bench_results, bench_launch, expected_order, bar_chart, zero_memory_bench, training_bench (the
command that starts the ranks and reports)."""
