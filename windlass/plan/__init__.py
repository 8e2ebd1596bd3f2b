"""Know before you run: the memory that a run will need, predicted without allocating it.

Reading order: `memory_plan` (the result), `planned_model` (models on the meta device), `activation_trace` (forward and
backward without memory), `planned_layout` (units and slots of a rank), `memory_planner` (memory by moment), `plan_run`
(all of it), `choose_config` (the ladder of configurations).
"""
