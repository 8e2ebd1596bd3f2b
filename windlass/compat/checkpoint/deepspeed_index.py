"""Index of the files that DeepSpeed 0.19 writes: the range of each file that holds each part of a tensor.

[Note: DeepSpeed's files] The files are read without DeepSpeed, and not copied. Stages 0 to 2 write the full module in
`mp_rank_00_model_states.pt`; stage 3 writes one such file per rank, with frozen parameters divided over ranks and
without trained ones. Stages 1 to 3 write one `..._optim_states.pt` per rank with master weights and moments. There each
optimizer group is flat: at stages 1 and 2 its parameters are concatenated and divided into equal parts; at stage 3 each
parameter is divided into equal parts, and a rank's parts are concatenated. Padding is at the ends of parameters and
groups. So every tensor is a few flat ranges, and each range is a few boxes (rectangular slices) of the parameter, as in
windlass' files. Stage 0 stores optimizer states by number, and only the optimizer defines the parameter of each number.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.text import plural
from windlass.checkpoint import plain_data
from windlass.checkpoint.checkpoint_directory import INDEX_FILE
from windlass.checkpoint.checkpoint_index import (
    FORMAT,
    FORMAT_VERSION,
    CheckpointIndex,
    check_files,
    check_index,
)
from windlass.checkpoint.foreign_formats import ParameterOrder
from windlass.compat.checkpoint.deepspeed_metadata_reader import read_deepspeed_metadata
from windlass.compat.checkpoint.deepspeed_shards import DeepSpeedShards
from windlass.compat.checkpoint.torch_file import StoredTensor, read_torch_file

# group keys that are not hyper-parameters: parameters, step count, and the implementation, which this run chooses
_IGNORED_GROUP_KEYS = frozenset({"params", "param_names", "step", "fused", "foreach", "capturable", "differentiable"})


def read_deepspeed_index(path: Path, parameter_order: ParameterOrder | None = None) -> CheckpointIndex:
    """Return an index of the DeepSpeed checkpoint directory `path`.

    Args:
        parameter_order: names of the parameters in each group of the optimizer that loads the states. None: the
            optimizer states and master weights of DeepSpeed's stage 0 are left out.

    Raises:
        CheckpointError: the checkpoint is missing, damaged, or of an unsupported kind.
    """
    try:
        index = _DeepSpeedDirectory(path, parameter_order).build_index()
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(
            f"{path} does not have the layout that DeepSpeed 0.19 writes ({type(error).__name__}: {error!s:.200}); a "
            "file is damaged, or written by another version. Load it with the library that wrote it"
        ) from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}; check path and rights") from error
    check_index(index, path)
    check_files(index, path)
    return index


@dataclass
class _SavedFlatGroup:
    """Saved optimizer group, or a part of one, that was one flat tensor.

    Attributes:
        shapes: shapes of its parameters, in the order of the flat tensor.
        number: key of the group's entry in the optimizer's `state`.
    """

    shapes: dict[str, tuple[int, ...]]
    number: int


@dataclass
class _DeepSpeedDirectory:
    """DeepSpeed checkpoint directory that is being indexed."""

    path: Path
    parameter_order: ParameterOrder | None
    kinds: dict[str, dict[str, str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.shards = DeepSpeedShards(self.path)

    def build_index(self) -> CheckpointIndex:
        """Read all files and return their index."""
        model_files = _files_by_rank(self.path, r"^zero_pp_rank_(\d+)_mp_rank_00_model_states\.pt$")
        whole = self.path / "mp_rank_00_model_states.pt"
        if not model_files and not whole.is_file():
            raise CheckpointError(
                f"{self.path} has neither {INDEX_FILE} nor DeepSpeed's model states; load the directory of a tag"
            )
        states = [self._read(path) for path in model_files] if model_files else [self._read(whole)]
        first = states[0]
        self._refuse_parallel(first)
        optim_files = _files_by_rank(self.path, r"^(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_00_optim_states\.pt$")
        saved = [self._read(path).get("optimizer_state_dict") or {} for path in optim_files]
        ranks = int(first.get("dp_world_size") or max(1, len(saved)))
        for kind, files in (("optim", optim_files), ("model", model_files)):
            if files and len(files) != ranks:
                raise CheckpointError(
                    f"{self.path}: {plural(ranks, 'rank')} saved, "
                    f"but {len(files)} *_{kind}_states.pt files are there; copy all, or load another checkpoint"
                )
        stage, groups = 0, []
        if model_files:
            self._index_frozen_parameters(states)
            stage, groups = 3, self._index_stage_3_masters(first, saved)
        elif saved:
            stage, groups = _stage_of(saved[0]), self._index_stage_1_2_masters(first, saved)
        elif first.get("optimizer"):
            groups = self._index_stage_0_masters(first)
        return self._make_index(first, saved, stage, ranks, groups, self._index_module(first, stage))

    def _read(self, path: Path) -> dict[str, Any]:
        value = read_torch_file(path)
        if not isinstance(value, dict):
            raise CheckpointError(
                f"{path} is not a DeepSpeed file: it holds a {type(value).__name__}, not a dictionary; load another "
                "checkpoint"
            )
        return value

    def _refuse_parallel(self, first: Mapping[str, Any]) -> None:
        if (self.path / "zero").is_dir() and not any(self.path.glob("*_optim_states.pt")):
            raise CheckpointError(
                f"{self.path} is a universal checkpoint of DeepSpeed, which is not supported; load the checkpoint that "
                "it was made from, in any layout, or convert that with windlass' own ds_to_universal"
            )
        others = sorted(self.path.glob("*mp_rank_01_model_states.pt")) + sorted(self.path.glob("layer_*_expert_*.pt"))
        if others or int(first.get("mp_world_size") or 1) > 1:
            raise CheckpointError(
                f"{self.path} was saved under model, pipeline or expert parallelism, which is not yet supported; make "
                "a checkpoint without it, or export its weights with the library that wrote it"
            )
        if not isinstance(first.get("module"), dict):
            raise CheckpointError(
                f"{self.path} is not a DeepSpeed checkpoint: its model states have no key module; load another one"
            )

    # Weights.

    def _index_module(self, first: Mapping[str, Any], stage: int) -> dict[str, str]:
        """Index buffers, and parameters that have no master weights. Return `{alias: name}` of tied tensors."""
        buffers, tied = set(first.get("buffer_names") or ()), dict[str, str]()
        seen: dict[tuple[int, tuple[int, ...]], str] = {}
        for name, tensor in first["module"].items():
            if not isinstance(tensor, StoredTensor):
                continue  # extra state of a module
            if name in buffers:
                self.shards.add_full_tensor(f"buffer/{name}", tensor)
            elif stage < 3:
                key = (tensor.begin, tuple(tensor.shape))
                kept = seen.setdefault(key, name) if tensor.numel() else name
                if kept != name:
                    tied[name] = kept
                elif f"param/{name}" not in self.shards.tensors:
                    self.shards.add_full_tensor(f"param/{name}", tensor)
        recorded = first.get("shared_params")
        return tied | (dict(recorded) if isinstance(recorded, dict) else {})

    def _index_frozen_parameters(self, states: list[dict[str, Any]]) -> None:
        """Index the frozen parameters of stage 3. Each is saved as one flat part per rank."""
        for name, shape in (states[0].get("frozen_param_shapes") or {}).items():
            parts = [state["frozen_param_fragments"][name] for state in states]
            if math.prod(shape) == 0:
                self.shards.add_ranges(f"param/{name}", tuple(shape), parts[0].dtype, [(0, 0, parts[0], 0)])
                continue
            self.shards.add_per_parameter_shards(f"param/{name}", tuple(shape), [(part, 0) for part in parts])

    # Optimizer.

    def _index_stage_3_masters(self, first: Mapping[str, Any], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Index the master weights of stage 3: each parameter in equal parts, a rank's parts concatenated."""
        if not saved:
            return []
        if saved[0].get("ds_zero_partition_groups") is not None:
            raise CheckpointError(
                f"{self.path} holds experts sharded over groups of ranks, which is not yet supported; export its "
                "weights with DeepSpeed"
            )
        shapes = first.get("param_shapes") or []
        groups = [
            _SavedFlatGroup({name: tuple(shape) for name, shape in part.items()}, n) for n, part in enumerate(shapes)
        ]
        masters = [one["fp32_flat_groups"] for one in saved]
        optimizers = [one["optimizer_state_dict"] for one in saved]
        for group in groups:
            self.shards.require(
                len(group.shapes) and all(len(flat) == len(groups) for flat in masters),
                "the number of flat groups of master weights",
            )
            at = 0
            for name, shape in group.shapes.items():
                size = -(-math.prod(shape) // len(saved))
                self.shards.add_per_parameter_shards(
                    f"param/{name}", shape, [(flat[group.number], at) for flat in masters]
                )
                for key, found in self._index_states(name, optimizers, group):
                    self.shards.add_per_parameter_shards(f"state/{name}/{key}", shape, [(one, at) for one in found])
                at += size
        return self._hyperparameters(optimizers[0], groups)

    def _index_stage_1_2_masters(self, first: Mapping[str, Any], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Index the master weights of stages 1 and 2: parameters concatenated, then divided into equal parts."""
        shapes = first.get("param_shapes") or []
        groups = [
            _SavedFlatGroup({name: tuple(shape) for name, shape in part.items()}, n) for n, part in enumerate(shapes)
        ]
        optimizers = [_as_torch_state(one["base_optimizer_state"]) for one in saved]
        for group in groups:
            number = group.number
            masters = [one["single_partition_of_fp32_groups"][number] for one in saved]
            # The optimizer class of DeepSpeed that records `zero_stage` saves the last rank's part without its padding.
            # With one rank, that is also the first part.
            left_out = int(saved[0]["group_paddings"][number]) if "zero_stage" in saved[0] else 0
            part = masters[0].numel() + left_out
            paddings = (saved[0].get("param_alignment_paddings") or {number: []})[number]
            at = 0
            for place, (name, shape) in enumerate(group.shapes.items()):
                self.shards.add_concatenated_shards(f"param/{name}", shape, masters, part, at)
                for key, found in self._index_states(name, optimizers, group):
                    self.shards.add_concatenated_shards(f"state/{name}/{key}", shape, found, part, at)
                at += math.prod(shape) + (int(paddings[place]) if place < len(paddings) else 0)
        return self._hyperparameters(optimizers[0], groups)

    def _index_stage_0_masters(self, first: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Index master weights and optimizer states of stage 0. `parameter_order` maps the states' numbers to names."""
        given = first["optimizer"]
        optimizer = _as_torch_state(given.get("optimizer_state_dict", given))
        saved = optimizer["param_groups"]
        flat = given.get("fp32_groups_flat")
        if self.parameter_order is None:
            return []
        counts = [len(group["params"]) for group in saved]
        if flat is None and counts != [len(names) for names in self.parameter_order]:
            raise CheckpointError(
                f"{self.path}: DeepSpeed's stage 0 identifies parameters by their number in the optimizer. The groups "
                f"of the saved optimizer have {counts} parameters, those of this optimizer "
                f"{[len(names) for names in self.parameter_order]}; build it with the same groups, or load with "
                "load_optimizer_states=False"
            )
        module = first["module"]
        groups = []
        for number, names in enumerate(self.parameter_order):
            for name in names:
                self.shards.require(isinstance(module.get(name), StoredTensor), f"the module's {name!r}")
            groups.append(_SavedFlatGroup({name: tuple(module[name].shape) for name in names}, number))
        for group, values in zip(groups, saved, strict=True):
            at = 0
            for place, (name, shape) in enumerate(group.shapes.items()):
                numel = math.prod(shape)
                source = _SavedFlatGroup(group.shapes, values["params"][0 if flat is not None else place])
                start = at if flat is not None else 0
                if flat is not None:
                    self.shards.add_concatenated_shards(
                        f"param/{name}", shape, [flat[group.number]], flat[group.number].numel(), start
                    )
                elif "fp32_groups" in given:
                    self.shards.add_full_tensor(f"param/{name}", given["fp32_groups"][group.number][place], shape)
                for key, found in self._index_states(name, [optimizer], source):
                    self.shards.require(found[0].numel() >= start + numel, f"the state {key!r} of {name!r}")
                    self.shards.add_concatenated_shards(f"state/{name}/{key}", shape, found, found[0].numel(), start)
                at += numel
        return self._hyperparameters(optimizer, groups)

    def _index_states(
        self, name: str, optimizers: list[dict[str, Any]], group: _SavedFlatGroup
    ) -> Iterator[tuple[str, list[StoredTensor]]]:
        """Yield each state that has one value per element of the parameter: its key, and its tensors on all ranks.

        Other states are not yielded: scalars, such as step counts, are added to `shards`, and other values to `values`.
        """
        found = [one["state"].get(group.number, {}) for one in optimizers]
        here = dict(found[0])
        holders = [one for one in optimizers[0]["param_groups"] if group.number in one.get("params", ())]
        own = holders[0] if holders else {}
        if "step" in own and here and "step" not in here:
            here["step"] = own["step"]
        for key, value in here.items():
            kinds = self.kinds.setdefault(name, {})
            if isinstance(value, bool) or not isinstance(value, (int, float, StoredTensor)):
                kinds[key] = "value"
                self.values.setdefault(name, {})[key] = value
            elif isinstance(value, StoredTensor) and value.dim():
                kinds[key] = f"pieces {str(value.dtype).removeprefix('torch.')}"
                yield key, [one[key] for one in found]
            elif isinstance(value, StoredTensor):
                kinds[key] = f"whole {str(value.dtype).removeprefix('torch.')}"
                self.shards.add_full_tensor(f"state/{name}/{key}", value)
            else:
                kinds[key] = "whole float32"
                self.shards.add_literal(
                    f"state/{name}/{key}", torch.tensor(float(value), dtype=torch.float32, device="cpu")
                )

    def _hyperparameters(self, optimizer: Mapping[str, Any], groups: list[_SavedFlatGroup]) -> list[dict[str, Any]]:
        """Return the hyper-parameters of each optimizer group, with the names of its parameters."""
        made = []
        saved = optimizer["param_groups"]
        for number, values in enumerate(saved):
            mine = (
                [g for g in groups if g.number in values["params"]] if len(saved) != len(groups) else [groups[number]]
            )
            names = [name for group in mine for name in group.shapes]
            made.append(
                {"parameters": names, "values": {k: v for k, v in values.items() if k not in _IGNORED_GROUP_KEYS}}
            )
        return made

    # Complete index.

    def _make_index(
        self,
        first: Mapping[str, Any],
        saved: list[dict[str, Any]],
        stage: int,
        ranks: int,
        groups: list[dict[str, Any]],
        tied: dict[str, str],
    ) -> CheckpointIndex:
        tensors = self.shards.tensors
        dtypes = {
            name: str(tensor.dtype).removeprefix("torch.")
            for name, tensor in first["module"].items()
            if isinstance(tensor, StoredTensor) and f"param/{name}" in tensors and tensor.dtype != torch.float32
        }
        engine_data = {
            **read_deepspeed_metadata(first, saved, self.path),
            "layout": {"stage": stage, "ranks": ranks},
            "states": self.kinds,
            "values": self.values,
            "spans": {},
            "groups": groups,
            "trainable_only": None,  # not recorded by DeepSpeed
            "buffers": True,
            "tied": tied,
            "dtypes": dtypes,
        }
        encoded, found = plain_data.encode(engine_data, "plain/", (torch.Tensor, StoredTensor))
        for name, tensor in found.items():
            if isinstance(tensor, StoredTensor):
                self.shards.add_full_tensor(name, tensor)
            else:
                self.shards.add_literal(name, tensor)
        files = {chunk.file for record in tensors.values() for chunk in record.chunks}
        return CheckpointIndex.model_construct(
            format=FORMAT,
            format_version=FORMAT_VERSION,
            world_size=ranks,
            files={name: (self.path / name).stat().st_size for name in sorted(files)},
            tensors=tensors,
            plain=encoded,
            ranks=(None,) * ranks,
        )


def _files_by_rank(path: Path, pattern: str) -> list[Path]:
    """Return the files with matching names, by ascending rank. Raise CheckpointError if a rank is missing."""
    found = {int(match[1]): child for child in path.iterdir() if (match := re.match(pattern, child.name))}
    absent = sorted(set(range(len(found))) - set(found))
    if absent:
        raise CheckpointError(
            f"{path}: the file of rank {absent[0]} is missing beside {sorted(found.values())[0].name}; copy all files"
        )
    return [found[rank] for rank in sorted(found)]


def _stage_of(saved: Mapping[str, Any]) -> int:
    recorded = saved.get("zero_stage")
    given = (recorded,) if isinstance(recorded, int) else getattr(recorded, "arguments", (1,))
    return int(given[0]) if given else 1


def _as_torch_state(state: Any) -> dict[str, Any]:
    """Return an optimizer state in torch's form. DeepSpeed's older form is a list with one state per group."""
    if isinstance(state, list):
        return {"state": dict(enumerate(state)), "param_groups": [{"params": [n]} for n in range(len(state))]}
    return dict(state)
