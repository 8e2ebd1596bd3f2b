"""Profiles of training steps: where the time of each rank goes, and the memory over time, as a trace for Perfetto.

Reading order: `range_log` (recorded ranges of one rank), `operator_events` (events of torch.profiler),
`memory_timeline`, `rank_profile` (the data of one rank), `run_profile` (the summary over all ranks), `chrome_trace`
(the file), `trace_profiler` (`windlass.profile`), `profile_job` and `profile_rank` (the ranks of `windlass profile`).
"""
