"""Prediction of the memory that a run will need, without allocating it.

Reading order: `memory_plan` (the result), `planned_model` (models on the meta device), `activation_trace` (forward and
backward without memory), `planned_layout` (units and slots of a rank), `memory_planner` (memory by moment), `plan_run`
(from model and configuration to the plan), `choose_config` (the ladder of configurations).
"""
