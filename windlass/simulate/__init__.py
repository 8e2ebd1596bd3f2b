"""Prediction of the time of a training step on a cluster, by discrete-event simulation.

Reading order: `hardware_parts` (known devices and hosts), `cluster` (links and routes), `cluster_file` (TOML),
`layer_work` (operations of a layer), `step_messages` (kinds of steps of compressed optimizers), `step_workload` (a
model under a configuration), `rank_units` (units of a rank), `model_blocks` (blocks of a rank), `model_states` (bytes
of a rank), `collective_cost` (bytes on links by algorithm), `event_loop` (tasks that share links), `step_lanes`
(streams of a rank), `message_lanes` (compressed messages), `zero_lanes` (ZeRO's part of a step), `step_tasks` (all
tasks of a step), `step_prediction` (the result), `predict_step` (from model and configuration to the prediction),
`goodput` (failures and checkpoints), `timeline` (trace file).
"""
