"""Search for the fastest configuration of a program, by short runs of the program itself.

Reading order: `search_space` (searched keys and candidates), `memory_forecast` (predicted memory), `step_ranking`
(predicted times), `trial_command` (command line of a trial), `trial_process` (one run of the program), `trial_record`
(result of a trial), `cost_regression` (predictions corrected by results), `trial_choice` (the next trial), `search`
(the order of trials and the end of the search), `optuna_sampler`, `ray_trials`, `result_files`, `tuning_run` (a full
search), `tuning_report`, `autotuning_command` (`--autotuning` of launchers).
"""
