"""Comparison of a sharded run with plain PyTorch.

Reading order: verification_job, tensor_difference, tolerance, verification_report, module_trace,
recorded_forward, step_recorder, reference_model, independent_run, step_comparison, engine_verifier,
named_model_training, verification_rank, verification_run.
"""
