"""Export of a windlass checkpoint as the files that DeepSpeed 0.19 writes, for tools that read those.

[Note: DeepSpeed's files beside windlass'] With `checkpoint.format: deepspeed` a save writes windlass' files first. Then
each rank reads its part of DeepSpeed's layout from them ([Note: DeepSpeed's files]) and writes it into the same staging
directory, so that one rename makes both appear. So offloaded states, async saves and all tiers need no extra code here.
A rank has at most a few megabytes in memory, a part of a tensor. 8-bit states are the exception: DeepSpeed does not
support them, so each is decoded in full and exported in float32. A load by windlass reads windlass' files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.base.log import logger
from windlass.checkpoint.pickle_writer import PickledObject, PlannedTensor
from windlass.checkpoint.safetensors_export import stored_names, stored_param_dtype
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.torch_file_writer import write_torch_file
from windlass.compat.checkpoint.deepspeed_flat_layout import (
    FlatGroup,
    FlatTensorSource,
    concatenated_layout,
    per_parameter_layout,
)
from windlass.compat.checkpoint.deepspeed_metadata_writer import (
    DEEPSPEED_VERSION,
    group_state,
    loss_scale_fields,
    loss_scaler_object,
    run_metadata,
    to_plain_data,
)

MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class DeepSpeedTarget:
    """Description of the DeepSpeed engine whose files are written.

    Attributes:
        stage, dp_world_size: ZeRO stage, and number of data-parallel ranks.
        sub_group_size: value of `zero_optimization.sub_group_size`, in elements per rank, used at stage 3.
        round_robin_gradients: value of the key; it determines the order of parameters at stages 1 and 2.
        low_precision: `bf16` or `fp16`; None if neither is enabled.
        state_dict_keys: names of the module's state dictionary, in order.
        trainable_names: names of the trained parameters.
        flat_optimizer: True if DeepSpeed steps this optimizer on flat groups at stage 0 with 16-bit parameters.
        gradient_clipping: value of the key.
        loss_scaling: settings of the loss scale, see `loss_scale_fields`.
        config: the caller's configuration.
    """

    stage: int
    dp_world_size: int
    sub_group_size: int
    round_robin_gradients: bool
    low_precision: str | None
    state_dict_keys: Sequence[str]
    trainable_names: frozenset[str]
    flat_optimizer: bool
    gradient_clipping: float
    loss_scaling: Mapping[str, Any]
    config: Mapping[str, Any]


def write_deepspeed_files(path: Path, target: DeepSpeedTarget, rank: int) -> None:
    """Write the files of one rank into the directory of a complete windlass checkpoint.

    Raises:
        CheckpointError: the windlass files are damaged, or the disk is full.
    """
    with StoredCheckpoint.from_path(path) as stored:
        writing = _DeepSpeedExport(path, stored, target, rank)
        if target.stage == 3:
            write_torch_file(path / f"zero_pp_rank_{rank}_{MODEL_FILE}", writing.model_states())
        elif rank == 0:
            write_torch_file(path / MODEL_FILE, writing.model_states())
        if target.stage and writing.groups:
            prefix = "bf16_" if target.low_precision == "bf16" else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            write_torch_file(path / name, writing.optimizer_states())


class _DeepSpeedExport:
    """Contents of one rank's DeepSpeed files, computed from the windlass files of the same checkpoint."""

    def __init__(self, path: Path, stored: StoredCheckpoint, target: DeepSpeedTarget, rank: int) -> None:
        self._path, self._stored, self._target, self._rank = path, stored, target, rank
        self._stored_names = stored_names(stored)
        self._shapes = {name: tuple(stored.meta_tensor(where).shape) for name, where in self._stored_names.items()}
        self._planned: dict[str, PlannedTensor] = {}
        self.groups = list(self._flat_groups())

    def model_states(self) -> dict[str, Any]:
        """Return the contents of the file of model states."""
        target, plain = self._target, self._stored.engine_data
        whole = target.stage < 3
        tied = {alias: name for alias, name in plain.get("tied", {}).items() if alias not in self._stored_names}
        frozen = [
            n
            for n, where in self._stored_names.items()
            if where.startswith("param/") and n not in target.trainable_names
        ]
        fragments: dict[str, Any] | None = None
        if target.stage and not plain.get("trainable_only"):
            fragments = OrderedDict(
                (name, self._planned_tensor(name) if whole else self._local_shard(name)) for name in frozen
            )
        shapes = [OrderedDict((name, torch.Size(group.shapes[name])) for name in group.shapes) for group in self.groups]
        client = dict(plain.get("client", {}))
        own = {
            "module": self._module(tied),
            "buffer_names": [name for name, where in self._stored_names.items() if where.startswith("buffer/")],
            "optimizer": self._stage_0_optimizer() if not target.stage and self.groups else None,
            "param_shapes": shapes if target.stage else None,
            "frozen_param_shapes": _shapes_of(frozen, self._shapes) if fragments is not None else None,
            "shared_params": tied if target.stage and (whole or self._rank == 0) else ({} if target.stage else None),
            "frozen_param_fragments": fragments,
            "lr_scheduler": plain.get("schedule"),
            **run_metadata(plain, target.dp_world_size),
            "ds_config": to_plain_data(target.config),
            "ds_version": DEEPSPEED_VERSION,
        }
        if both := sorted(set(client) & set(own)):
            logger.warning(
                "%s: client_state keys %s are names that DeepSpeed uses, so DeepSpeed's files lack them; rename them",
                self._path.parent,
                ", ".join(map(repr, both)),
            )
        return {**{key: to_plain_data(value) for key, value in client.items()}, **own}

    def _module(self, tied: Mapping[str, str]) -> dict[str, Any]:
        extra = self._stored.engine_data.get("extra", {})
        found: dict[str, Any] = OrderedDict()
        for name in self._target.state_dict_keys:
            kept = tied.get(name, name)
            if kept in self._stored_names:
                gone = self._target.stage == 3 and self._stored_names[kept].startswith("param/")
                dtype = stored_param_dtype(self._stored, self._stored_names[kept])
                found[name] = torch.empty(0, dtype=dtype, device="cpu") if gone else self._planned_tensor(kept)
            elif name in extra:
                found[name] = to_plain_data(extra[name])
        return found

    def _planned_tensor(self, name: str) -> PlannedTensor:
        """Return a parameter or buffer in the model's dtype: the same object at each call with the same name."""
        where = self._stored_names[name]
        if name not in self._planned:
            dtype = stored_param_dtype(self._stored, where)
            self._planned[name] = PlannedTensor(dtype, self._shapes[name], lambda: self._stored.iter_parts(where))
        return self._planned[name]

    def _local_shard(self, name: str) -> PlannedTensor:
        """Return this rank's flat part of a frozen parameter."""
        where, size = (
            self._stored_names[name],
            per_parameter_layout({name: self._shapes[name]}, self._target.dp_world_size),
        )
        flat = FlatTensorSource(self._stored, size.spans(self._rank), lambda _: where)
        return flat.plan(stored_param_dtype(self._stored, where))

    # Optimizer.

    def _flat_groups(self) -> Iterator[FlatGroup]:
        """Yield the flat groups: the optimizer's groups, at stage 3 divided into sub-groups."""
        target = self._target
        for number, group in enumerate(self._stored.engine_data.get("groups", [])):
            names = [name for name in group["parameters"] if name in self._stored_names]
            if target.stage or target.low_precision:
                names = [name for name in names if name in target.trainable_names]
            shapes = {name: self._shapes[name] for name in names}
            if not shapes:
                continue
            if target.stage == 3:
                for part in _sub_groups(shapes, target.dp_world_size, target.sub_group_size):
                    yield FlatGroup(number, per_parameter_layout(part, target.dp_world_size))
            else:
                if target.stage and target.round_robin_gradients:
                    order = [
                        name for first in range(target.dp_world_size) for name in names[first :: target.dp_world_size]
                    ]
                    shapes = {name: shapes[name] for name in order}
                ranks = target.dp_world_size if target.stage else 1
                yield FlatGroup(number, concatenated_layout(shapes, ranks))

    def optimizer_states(self) -> dict[str, Any]:
        """Return the contents of this rank's file of optimizer states."""
        target = self._target
        masters = [self._flat_master_weights(group) for group in self.groups]
        scaling: dict[str, Any] = {
            "loss_scaler": loss_scaler_object(target.loss_scaling, self._stored.engine_data, target.low_precision),
            "dynamic_loss_scale": bool(target.loss_scaling["dynamic"]),
            "overflow": False,
        }
        base = {"state": dict(enumerate(map(self._flat_states, self.groups))), "param_groups": self._group_states()}
        if target.stage == 3:
            inner = {
                "zero_stage": 3,
                **scaling,
                "partition_count": target.dp_world_size,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        else:
            inner = {
                **scaling,
                "clip_grad": float(target.gradient_clipping),
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "zero_stage": target.stage,
                "group_paddings": [group.layout.padding_numel(self._rank) for group in self.groups],
                "param_alignment_paddings": [[0] * len(group.shapes) for group in self.groups],
                "partition_count": [target.dp_world_size] * len(self.groups),
                "ds_version": DEEPSPEED_VERSION,
                "param_slice_mappings": [self._slice_mappings(group) for group in self.groups],
            }
        return {
            "optimizer_state_dict": inner,
            "ds_config": to_plain_data(target.config),
            "ds_version": DEEPSPEED_VERSION,
        }

    def _flat_master_weights(self, group: FlatGroup) -> PlannedTensor:
        padded = self._target.stage == 3
        flat = FlatTensorSource(
            self._stored, group.layout.spans(self._rank, padded=padded), lambda name: self._stored_names[name]
        )
        return flat.plan(torch.float32)

    def _flat_states(self, group: FlatGroup) -> dict[str, Any]:
        return group.plan_states(self._stored, group.layout.spans(self._rank))

    def _group_states(self) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each optimizer group, with the numbers of its flat groups."""
        made = []
        for number in dict.fromkeys(group.number for group in self.groups):
            mine = [at for at, group in enumerate(self.groups) if group.number == number]
            steps = max(self.groups[at].step_count(self._stored) for at in mine)
            made.append(group_state(self._stored.engine_data["groups"][number]["values"], mine, steps))
        return made

    def _slice_mappings(self, group: FlatGroup) -> dict[str, PickledObject]:
        """Return the position of each parameter in this rank's part, for the conversion to universal checkpoints."""
        found, at = OrderedDict(), 0
        for name, start, stop in group.layout.spans(self._rank):
            if name:
                where = {"numel": stop - start, "start": at}
                found[name] = PickledObject("deepspeed.utils.tensor_fragment", "fragment_address", attributes=where)
            at += stop - start
        return found

    def _stage_0_optimizer(self) -> dict[str, Any]:
        """Return the optimizer state of stage 0: torch's `state_dict()`.

        With 16-bit parameters, this state is inside a dictionary of DeepSpeed's that also has the master weights and
        the loss scale (no loss scale for bf16 in flat groups).
        """
        target, stored = self._target, self._stored
        if target.low_precision and target.flat_optimizer:
            base = {"state": dict(enumerate(map(self._flat_states, self.groups))), "param_groups": self._group_states()}
            flats = [self._flat_master_weights(group) for group in self.groups]
            facts = loss_scale_fields(target.loss_scaling, stored.engine_data) if target.low_precision == "fp16" else {}
            return {
                **facts,
                "optimizer_state_dict": base,
                "fp32_groups_flat": flats,
                "clip_grad": float(target.gradient_clipping),
            }
        states: dict[int, Any] = {}
        groups, masters, number = [], [], 0
        for group in self.groups:
            numbers = []
            names = group.shapes if target.low_precision else stored.engine_data["groups"][group.number]["parameters"]
            for name in names:
                numbers.append(number)
                number += 1
                if name not in group.shapes:  # a frozen parameter that the checkpoint lacks
                    continue
                shape = group.shapes[name]
                alone = FlatGroup(group.number, concatenated_layout({name: shape}, 1, align=1))
                if found := alone.plan_states(stored, alone.layout.spans(0), shape):
                    states[numbers[-1]] = found
            values = stored.engine_data["groups"][group.number]["values"]
            groups.append(group_state(values, numbers, group.step_count(stored)))
            masters.append([self._master_weight(name) for name in group.shapes])
        base = {"state": states, "param_groups": groups}
        if not target.low_precision:
            return base
        return {
            **loss_scale_fields(target.loss_scaling, stored.engine_data),
            "optimizer_state_dict": base,
            "fp32_groups": masters,
        }

    def _master_weight(self, name: str) -> PlannedTensor:
        where = self._stored_names[name]
        return PlannedTensor(torch.float32, self._shapes[name], lambda: self._stored.iter_parts(where))


def _shapes_of(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shapes[name])) for name in names)


def _sub_groups(shapes: Mapping[str, tuple[int, ...]], ranks: int, most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Divide parameters into sub-groups, as DeepSpeed's stage 3 does.

    A sub-group ends with the parameter that brings it to `most` elements per rank or more.
    """
    part: dict[str, tuple[int, ...]] = {}
    size = 0
    for name, shape in shapes.items():
        part[name] = shape
        size += -(-torch.Size(shape).numel() // ranks)
        if size >= most:
            yield part
            part, size = {}, 0
    if part:
        yield part
