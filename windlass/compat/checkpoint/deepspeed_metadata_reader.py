"""Conversion of the metadata in DeepSpeed's files to windlass' plain data."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import plain_data
from windlass.compat.checkpoint.pickle_stand_ins import LossScalerStandIn, NamespaceStandIn, NumpyArrayStandIn
from windlass.compat.checkpoint.torch_file import StoredTensor

DEEPSPEED_KEY = "deepspeed"
"""Key under which a checkpoint's plain data has `ds_config` and `ds_version`. DeepSpeed returns these two with the
client state."""

# keys that DeepSpeed's engine writes besides the caller's `client_state`
_ENGINE_KEYS = frozenset(
    """
    module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments lr_scheduler
    data_sampler random_ltd skipped_steps global_steps global_samples dp_world_size mp_world_size ds_config ds_version
    checkpoint_parallel_dimensions universal_checkpoint_info
    """.split()  # noqa: SIM905
)


def read_deepspeed_metadata(first: Mapping[str, Any], saved: list[dict[str, Any]], path: Path) -> dict[str, Any]:
    """Return counters, loss scale, scheduler state, client state, and DeepSpeed's configuration and version.

    Args:
        first: the model states of rank 0.
        saved: the optimizer states, by rank.
    """
    steps, config = int(first.get("global_steps") or 0), first.get("ds_config")
    accumulation = config.get("gradient_accumulation_steps", 1) if isinstance(config, dict) else 1
    return {
        "engine": {
            "micro_steps": steps * (accumulation if isinstance(accumulation, int) else 1),
            "global_steps": steps,
            "global_samples": int(first.get("global_samples") or 0),
            "skipped_steps": int(first.get("skipped_steps") or 0),
        },
        "loss_scale": _loss_scale(first, saved),
        "schedule": first.get("lr_scheduler"),
        "client": _client_state(first, path),
        "written_by": f"DeepSpeed {first.get('ds_version', '')}".strip(),
        DEEPSPEED_KEY: _plain_values({key: first[key] for key in ("ds_config", "ds_version") if key in first}, path),
    }


def _loss_scale(first: Mapping[str, Any], saved: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a state for `windlass.optim.loss_scale`.

    `good_steps` counts the steps since the last overflow.
    """
    scaler = saved[0].get("loss_scaler") if saved else None
    facts = scaler.attributes if isinstance(scaler, LossScalerStandIn) else first.get("optimizer") or {}
    if "cur_scale" not in facts:
        return {"scale": 1.0}
    if "last_overflow_iter" not in facts:
        return {"scale": float(facts["cur_scale"])}
    return {
        "scale": float(facts["cur_scale"]),
        "good_steps": int(facts["cur_iter"]) - int(facts["last_overflow_iter"]) - 1,
        "hysteresis_left": int(facts.get("cur_hysteresis", 1)),
        "cur_iter": int(facts["cur_iter"]),
    }


def _client_state(first: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the caller's client state. Unsupported values are left out with a warning."""
    return _plain_values({key: value for key, value in first.items() if key not in _ENGINE_KEYS}, path)


def _plain_values(values: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = {}
    for key, value in values.items():
        try:
            value = _resolve_stand_ins(value)
            plain_data.encode(value, "", (torch.Tensor, StoredTensor))
        except CheckpointError as error:
            logger.warning("%s: %r of the client state is not read: %s", path, key, error)
            continue
        found[key] = value
    return found


def _resolve_stand_ins(value: Any) -> Any:
    if isinstance(value, NamespaceStandIn):
        return argparse.Namespace(**{key: _resolve_stand_ins(item) for key, item in value.attributes.items()})
    if isinstance(value, NumpyArrayStandIn):
        return value.to_numpy()
    if isinstance(value, dict):
        return {key: _resolve_stand_ins(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve_stand_ins(item) for item in value)
    return value
