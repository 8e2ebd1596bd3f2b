"""Training command: the plan of a run, the loop of each rank, its display, and its results.

Reading order: run_folder, training_plan, default_recipe, model_builder, teacher, train_options, loss_agreement,
stop_signals, run_metrics, progress_display, loss_plot, text_continuation, run_failure, train_loop, train_rank.
`windlass.cli.train` is the parent process, `windlass.cli.train_worker` the program of each rank.
"""
