"""Prediction of the memory that a run will need, without allocating it.

Reading order: `memory_plan` (the result), `planned_model` (models on the meta device), `activation_trace` (forward and
backward without memory), `planned_layout` (units of a rank, and storage of their gradients), `optimizer_states` (bytes
of states), `heap_model` (fragmentation on a CPU), `memory_planner` (memory at each moment of a step), `plan_run` (from
model and configuration to the plan), `rank_limits` (memory of GPUs), `choose_config` (the ladder of configurations),
`out_of_memory_note` (advice after an out-of-memory error).
"""
