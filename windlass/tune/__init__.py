"""Search for the fastest configuration of a program, by short runs of the program itself.

Reading order: `search_space` (what is searched), `memory_forecast` (what cannot fit), `step_estimate` (an order to try
in), `trial_process` (one run of the program), `trial_record` (its result), `search` (the order of trials),
`result_files`, `tuning_run` (all of it).
"""
