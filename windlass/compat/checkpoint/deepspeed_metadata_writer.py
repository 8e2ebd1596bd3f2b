"""Conversion of windlass' plain data to the metadata in DeepSpeed's files; inverse of `deepspeed_metadata_reader`."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from windlass.checkpoint.pickle_writer import PickledObject

DEEPSPEED_VERSION = "0.19.8"  # the version whose layout the files have
_LOSS_SCALER_MODULE = "deepspeed.runtime.fp16.loss_scaler"
_IMPLEMENTATION_KEYS = ("fused", "foreach")  # group keys that select an implementation, which each run chooses


def run_metadata(plain: Mapping[str, Any], ranks: int) -> dict[str, Any]:
    """Return the numbers of steps, samples and ranks under DeepSpeed's keys."""
    engine = plain["engine"]
    return {
        "data_sampler": None,
        "random_ltd": None,
        "skipped_steps": int(engine["skipped_steps"]),
        "global_steps": int(engine["global_steps"]),
        "global_samples": int(engine["global_samples"]),
        "dp_world_size": ranks,
        "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
    }


def group_state(values: Mapping[str, Any], numbers: Sequence[int], step: int) -> dict[str, Any]:
    """Return a group of the optimizer's state dictionary.

    Args:
        values: hyper-parameters of the group.
        numbers: numbers of the group's parameters, or of its flat groups.
        step: number of steps so far, which DeepSpeed's fused optimizers store in the group; 0: the key is left out.
    """
    kept = {key: to_plain_data(value) for key, value in values.items() if key != "state_dtype"}
    kept |= {key: None for key in _IMPLEMENTATION_KEYS if key in kept}
    if "betas" in kept:
        kept.setdefault("bias_correction", True)  # DeepSpeed's Adam optimizers need this key
    if step:
        kept["step"] = step
    return {**kept, "params": list(numbers)}


def loss_scale_fields(loss_scaling: Mapping[str, Any], plain: Mapping[str, Any]) -> dict[str, Any]:
    """Return the loss scale as stage 0 stores it, among the optimizer's fields.

    Args:
        loss_scaling: a mapping with `dynamic`, and for a dynamic scale also `window`, `min_scale`, `hysteresis`,
            `consecutive_hysteresis` and `raises`.
    """
    saved = plain.get("loss_scale", {})
    steps = int(saved.get("cur_iter", plain["engine"]["global_steps"]))
    facts = {
        "dynamic_loss_scale": bool(loss_scaling["dynamic"]),
        "cur_scale": float(saved.get("scale", 1.0)),
        "cur_iter": steps,
    }
    if loss_scaling["dynamic"]:
        facts |= {
            "last_overflow_iter": steps - int(saved.get("good_steps", 0)) - 1,
            "scale_factor": 2.0,
            "scale_window": int(loss_scaling["window"]),
        }
    return facts


def loss_scaler_object(
    loss_scaling: Mapping[str, Any], plain: Mapping[str, Any], low_precision: str | None
) -> PickledObject:
    """Return the loss scale as the other stages store it: as an object of DeepSpeed's class."""
    facts = loss_scale_fields(loss_scaling, plain)
    dynamic = facts.pop("dynamic_loss_scale")
    if not dynamic:
        return PickledObject(
            _LOSS_SCALER_MODULE, "LossScaler", attributes={"cur_scale": facts["cur_scale"], "dynamic": False}
        )
    attributes = {
        **facts,
        "min_scale": float(loss_scaling["min_scale"]),
        "delayed_shift": int(loss_scaling["hysteresis"]),
        "cur_hysteresis": int(plain["loss_scale"].get("hysteresis_left", loss_scaling["hysteresis"])),
        "consecutive_hysteresis": bool(loss_scaling["consecutive_hysteresis"]),
        "raise_error_at_min_scale": bool(loss_scaling["raises"]),
        "dynamic": True,
        "dtype": torch.bfloat16 if low_precision == "bf16" else torch.float16,
    }
    return PickledObject(_LOSS_SCALER_MODULE, "DynamicLossScaler", attributes=attributes)


def to_plain_data(value: Any) -> Any:
    """Convert a caller's value to plain data or objects of Python's standard library; any other value to its text."""
    if value is None or isinstance(value, (bool, int, float, str, torch.Tensor, torch.dtype)):
        return value
    if isinstance(value, Mapping):
        return {to_plain_data(key): to_plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = [to_plain_data(item) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, (Namespace, SimpleNamespace)):
        return PickledObject(
            "argparse", "Namespace", attributes={name: to_plain_data(item) for name, item in vars(value).items()}
        )
    if isinstance(value, (set, frozenset)):
        return PickledObject("builtins", type(value).__name__, arguments=([to_plain_data(item) for item in value],))
    if isinstance(value, bytes):
        return PickledObject("_codecs", "encode", arguments=(value.decode("latin1"), "latin1"))
    if hasattr(value, "tolist") and type(value).__module__ == "numpy":
        return to_plain_data(value.tolist())
    return str(value)
