"""Schema of the plain data that an engine saves besides its tensors (docs/checkpoint-format.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StrictBool,
    StrictStr,
    ValidationError,
    model_validator,
)

from windlass.base.errors import CheckpointError
from windlass.checkpoint.checkpoint_index import Count, validation_message


def _check_hyperparameters(values: dict[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters unchanged. Raise ValueError if a common one (`lr`, `betas`, ...) is invalid."""
    for key in ("lr", "initial_lr", "max_lr", "min_lr", "weight_decay", "eps", "momentum", "step"):
        value = values.get(key, 0)
        if isinstance(value, bool) or (isinstance(value, (int, float)) and not 0 <= value < float("inf")):
            raise ValueError(f"{key} is {value}")
    betas = values.get("betas", ())
    numbers = [one for one in betas if not isinstance(one, torch.Tensor)] if isinstance(betas, (list, tuple)) else [-1]
    if any(isinstance(one, bool) or not isinstance(one, (int, float)) or not 0 <= one <= 1 for one in numbers):
        raise ValueError(f"betas are {betas!r:.100}")
    return values


def _check_span(span: tuple[int, int]) -> tuple[int, int]:
    if span[0] >= span[1]:
        raise ValueError("an empty span of elements")
    return span


def _check_dtype_name(name: str) -> str:
    if not isinstance(getattr(torch, name, None) if name.isidentifier() else None, torch.dtype):
        raise ValueError("not a dtype of torch")
    return name


_Finite = Annotated[float, Field(strict=True, allow_inf_nan=False)]
_Hash = Annotated[str, Field(strict=True, pattern=r"^[0-9a-f]{16}$")]
_Kind = Annotated[str, Field(strict=True, pattern=r"^((pieces|whole) [a-z][a-z0-9_]*|(signed|unsigned) uint8|value)$")]
_Dtype = Annotated[StrictStr, AfterValidator(_check_dtype_name)]
_Span = Annotated[tuple[Count, Count], AfterValidator(_check_span)]


class _EngineDataModel(BaseModel):
    model_config = ConfigDict(extra="ignore", arbitrary_types_allowed=True)


class _Counters(_EngineDataModel):
    micro_steps: Count
    global_steps: Count
    global_samples: Count
    skipped_steps: Count


class _Layout(_EngineDataModel):
    stage: Annotated[int, Field(strict=True, ge=0, le=3)]
    ranks: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]
    axes: dict[StrictStr, Annotated[int, Field(strict=True, ge=1, lt=1 << 31)]] | None = None
    accumulation: Annotated[int, Field(strict=True, ge=1, lt=1 << 31)] | None = None


class _Fingerprints(_EngineDataModel):
    parameters: _Hash | None
    states: _Hash | None


class _SavedGroup(_EngineDataModel):
    parameters: list[StrictStr]
    values: Annotated[dict[StrictStr, Any], AfterValidator(_check_hyperparameters)]


class _SavedScale(_EngineDataModel):
    scale: Annotated[float, Field(strict=True, allow_inf_nan=False, gt=0)]
    good_steps: Annotated[int, Field(strict=True, ge=-1, lt=1 << 63)] | None = None
    hysteresis_left: Annotated[int, Field(strict=True, lt=1 << 31, ge=0)] | None = None
    cur_iter: Count | None = None

    @model_validator(mode="after")
    def _require_both_fields(self) -> _SavedScale:
        if (self.good_steps is None) != (self.hysteresis_left is None):
            raise ValueError("good_steps and hysteresis_left belong together")
        return self


class _SavedAverage(_EngineDataModel):
    decay: _Finite
    updates: Count


class EngineData(_EngineDataModel):
    """Keys of the plain data that windlass reads. A missing key was not saved."""

    engine: _Counters | None = None
    layout: _Layout | None = None
    fingerprint: _Fingerprints | None = None
    states: dict[StrictStr, dict[StrictStr, _Kind]] | None = None
    values: dict[StrictStr, dict[StrictStr, Any]] | None = None
    spans: dict[StrictStr, list[_Span]] | None = None
    groups: list[_SavedGroup] | None = None
    loss_scale: _SavedScale | None = None
    schedule: dict[Any, Any] | None = None
    data: dict[StrictStr, Any] | None = None
    trainable_only: StrictBool | None = None
    buffers: StrictBool | None = None
    tied: dict[StrictStr, StrictStr] | None = None
    dtypes: dict[StrictStr, _Dtype] | None = None
    absent: list[StrictStr] | None = None
    frozen: list[StrictStr] | None = None
    base: dict[StrictStr, _Hash] | None = None
    averages: dict[StrictStr, _SavedAverage] | None = None
    extra: dict[StrictStr, Any] | None = None
    client: dict[Any, Any] | None = None


_NULLABLE = frozenset({"fingerprint", "schedule", "data", "trainable_only", "absent", "frozen"})
_REQUIRED = ("engine", "layout", "groups", "loss_scale", "schedule", "client", "trainable_only")


def require_engine_data(plain: Any, path: object, *, require_all: bool = False) -> dict[str, Any]:
    """Check the plain data of a checkpoint and return a copy.

    Args:
        path: path of the checkpoint, for messages.
        require_all: raise if a key is missing that an engine needs.

    Raises:
        CheckpointError: `plain` is not a dictionary, a required key is missing, or a value has another type or range
            than an engine writes. The message names the key.
    """
    if not isinstance(plain, Mapping):
        raise CheckpointError(f"{path}: its plain data is a {type(plain).__name__}, not a dictionary")
    if require_all and (lacks := [key for key in _REQUIRED if key not in plain]):
        raise CheckpointError(f"{path} was not saved by an engine: its plain data has no {lacks[0]!r}; use read_full")
    known = {key: value for key, value in plain.items() if key in EngineData.model_fields}
    none = next((key for key, value in known.items() if value is None and key not in _NULLABLE), None)
    if none is not None:
        raise CheckpointError(f"{path}: the plain data {none!r} is null; load another checkpoint")
    try:
        EngineData.model_validate(known)
    except ValidationError as error:
        raise CheckpointError(
            f"{path} has plain data that an engine does not write: {validation_message(error)}; load another checkpoint"
        ) from error
    _check_names(known, path)
    return dict(plain)


def _check_names(plain: Mapping[str, Any], path: object) -> None:
    """Check the names of states, that states of kind `value` have values, and that no parameter is in two groups."""
    values = plain.get("values", {})
    for name, kinds in plain.get("states", {}).items():
        for key, kind in kinds.items():
            if kind == "value" and key not in values.get(name, {}):
                raise CheckpointError(f"{path}: the state {key!r} of {name!r} has no value")
            if not key or "/" in key:
                raise CheckpointError(f"{path}: {key!r} cannot name a state of {name!r}")
    seen: set[str] = set()
    for group in plain.get("groups", []):
        for name in group["parameters"]:
            if name in seen:
                raise CheckpointError(f"{path}: the parameter {name!r} is in the optimizer's groups twice")
            seen.add(name)
