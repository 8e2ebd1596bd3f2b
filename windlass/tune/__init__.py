"""Search for the fastest configuration of a program, by short runs of the program itself.

Reading order: `search_space` (what is searched), `memory_forecast` (what cannot fit), `step_ranking` (predicted times),
`trial_process` (one run of the program), `trial_record` (its result), `cost_regression` (predictions corrected by
results), `trial_choice` (the next trial), `search` (the order of trials and the end of the search), `result_files`,
`tuning_run` (the whole search).
"""
