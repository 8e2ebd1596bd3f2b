"""A windlass checkpoint written once more as the files that DeepSpeed 0.19 writes, for tools that read those.

[Note: DeepSpeed's files beside ours] With `checkpoint.format: deepspeed` a save writes its own files first. Then each
rank reads from those what is its part in DeepSpeed's layout ([Note: DeepSpeed's files]), and writes that into the same
draft: one rename makes both appear. So what rests on disk, a save behind training and any home need nothing of their
own here, and no rank has more in memory than a part of a tensor, at most a few megabytes (a whole state, where states
are kept in 8 bits: DeepSpeed has no such thing, and gets them in float32). Whoever loads with windlass reads our files.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from windlass.base.log import logger
from windlass.checkpoint.deepspeed_flat import Flat, FlatGroup, in_a_row, in_parts
from windlass.checkpoint.deepspeed_told import VERSION, hyper, loss_scaler, own_scaling, plainly, said_of_run
from windlass.checkpoint.export import dtype_in_use, tensors_of
from windlass.checkpoint.pickled import Named, Planned
from windlass.checkpoint.stored import Stored
from windlass.checkpoint.torch_file_writer import write_torch_file

MODEL_FILE = "mp_rank_00_model_states.pt"


@dataclass(frozen=True)
class Target:
    """What DeepSpeed's engine would have been.

    Attributes:
        stage, ranks: of ZeRO, and of data parallelism.
        sub_group: at stage 3, `sub_group_size`.
        round_robin: `round_robin_gradients`, by which stages 1 and 2 order parameters.
        half: `bf16` or `fp16`, where it is enabled.
        module: names of the module's state dictionary, in order.
        trained: names of the parameters that are trained.
        flat_optimizer: at stage 0 under 16 bits, whether its optimizer is one that is stepped on flat groups.
        clip: `gradient_clipping`.
        scaling: of the loss, see `loss_scaler`.
        config: the caller's.
    """

    stage: int
    ranks: int
    sub_group: int
    round_robin: bool
    half: str | None
    module: Sequence[str]
    trained: frozenset[str]
    flat_optimizer: bool
    clip: float
    scaling: Mapping[str, Any]
    config: Mapping[str, Any]


def write_deepspeed_files(path: Path, target: Target, rank: int) -> None:
    """Writes the files of one rank into the directory of a whole windlass checkpoint.

    Raises:
        CheckpointError: its files are damaged, or the disk is full.
    """
    with Stored.at(path) as stored:
        writing = _Writing(path, stored, target, rank)
        if target.stage == 3:
            write_torch_file(path / f"zero_pp_rank_{rank}_{MODEL_FILE}", writing.model_states())
        elif rank == 0:
            write_torch_file(path / MODEL_FILE, writing.model_states())
        if target.stage and writing.groups:
            prefix = "bf16_" if target.half == "bf16" else ""
            name = f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
            write_torch_file(path / name, writing.optimizer_states())


class _Writing:
    """One rank's files of one checkpoint."""

    def __init__(self, path: Path, stored: Stored, target: Target, rank: int) -> None:
        self._path, self._stored, self._target, self._rank = path, stored, target, rank
        self._held = tensors_of(stored)
        self._shapes = {name: tuple(stored.described(where).shape) for name, where in self._held.items()}
        self._planned: dict[str, Planned] = {}
        self.groups = list(self._groups())

    def model_states(self) -> dict[str, Any]:
        """What is in the file of model states."""
        target, plain = self._target, self._stored.said
        whole = target.stage < 3
        tied = {alias: name for alias, name in plain.get("tied", {}).items() if alias not in self._held}
        frozen = [n for n, where in self._held.items() if where.startswith("param/") and n not in target.trained]
        fragments: dict[str, Any] | None = None
        if target.stage and not plain.get("trainable_only"):
            fragments = OrderedDict((name, self._of(name) if whole else self._own_cut(name)) for name in frozen)
        shapes = [OrderedDict((name, torch.Size(group.shapes[name])) for name in group.shapes) for group in self.groups]
        client = dict(plain.get("client", {}))
        own = {
            "module": self._module(tied),
            "buffer_names": [name for name, where in self._held.items() if where.startswith("buffer/")],
            "optimizer": self._whole_optimizer() if not target.stage and self.groups else None,
            "param_shapes": shapes if target.stage else None,
            "frozen_param_shapes": _shapes_of(frozen, self._shapes) if fragments is not None else None,
            "shared_params": tied if target.stage and (whole or self._rank == 0) else ({} if target.stage else None),
            "frozen_param_fragments": fragments,
            "lr_scheduler": plain.get("schedule"),
            **said_of_run(plain, target.ranks),
            "ds_config": plainly(target.config),
            "ds_version": VERSION,
        }
        if both := sorted(set(client) & set(own)):
            logger.warning(
                "%s: %s of the client state have names of DeepSpeed's own, and are in windlass' files alone",
                self._path.parent,
                ", ".join(map(repr, both)),
            )
        return {**{key: plainly(value) for key, value in client.items()}, **own}

    def _module(self, tied: Mapping[str, str]) -> dict[str, Any]:
        extra = self._stored.said.get("extra", {})
        found: dict[str, Any] = OrderedDict()
        for name in self._target.module:
            kept = tied.get(name, name)
            if kept in self._held:
                gone = self._target.stage == 3 and self._held[kept].startswith("param/")
                dtype = dtype_in_use(self._stored, self._held[kept])
                found[name] = torch.empty(0, dtype=dtype, device="cpu") if gone else self._of(kept)
            elif name in extra:
                found[name] = plainly(extra[name])
        return found

    def _of(self, name: str) -> Planned:
        """A parameter or buffer as the model has it, once for all places that name it."""
        where = self._held[name]
        if name not in self._planned:
            dtype = dtype_in_use(self._stored, where)
            self._planned[name] = Planned(dtype, self._shapes[name], lambda: self._stored.parts(where))
        return self._planned[name]

    def _own_cut(self, name: str) -> Planned:
        """This rank's part of a frozen parameter, flat."""
        where, size = self._held[name], in_parts({name: self._shapes[name]}, self._target.ranks)
        flat = Flat(self._stored, size.spans(self._rank), lambda _: where)
        return flat.planned(dtype_in_use(self._stored, where))

    # what the optimizer holds

    def _groups(self) -> Iterator[FlatGroup]:
        """What is flat by itself: the optimizer's groups, at stage 3 cut into sub-groups."""
        target = self._target
        for number, group in enumerate(self._stored.said.get("groups", [])):
            names = [name for name in group["parameters"] if name in self._held]
            if target.stage or target.half:
                names = [name for name in names if name in target.trained]
            shapes = {name: self._shapes[name] for name in names}
            if not shapes:
                continue
            if target.stage == 3:
                for part in _sub_groups(shapes, target.ranks, target.sub_group):
                    yield FlatGroup(number, in_parts(part, target.ranks))
            else:
                if target.stage and target.round_robin:
                    order = [name for first in range(target.ranks) for name in names[first :: target.ranks]]
                    shapes = {name: shapes[name] for name in order}
                ranks = target.ranks if target.stage else 1
                yield FlatGroup(number, in_a_row(shapes, ranks))

    def optimizer_states(self) -> dict[str, Any]:
        """What is in this rank's file of optimizer states."""
        target = self._target
        masters = [self._masters(group) for group in self.groups]
        scaling: dict[str, Any] = {
            "loss_scaler": loss_scaler(target.scaling, self._stored.said, target.half),
            "dynamic_loss_scale": bool(target.scaling["dynamic"]),
            "overflow": False,
        }
        base = {"state": dict(enumerate(map(self._states, self.groups))), "param_groups": self._flat_hyper()}
        if target.stage == 3:
            inner = {
                "zero_stage": 3,
                **scaling,
                "partition_count": target.ranks,
                "optimizer_state_dict": base,
                "fp32_flat_groups": masters,
            }
        else:
            inner = {
                **scaling,
                "clip_grad": float(target.clip),
                "base_optimizer_state": base,
                "single_partition_of_fp32_groups": masters,
                "zero_stage": target.stage,
                "group_paddings": [group.lies.padding(self._rank) for group in self.groups],
                "param_alignment_paddings": [[0] * len(group.shapes) for group in self.groups],
                "partition_count": [target.ranks] * len(self.groups),
                "ds_version": VERSION,
                "param_slice_mappings": [self._slices(group) for group in self.groups],
            }
        return {"optimizer_state_dict": inner, "ds_config": plainly(target.config), "ds_version": VERSION}

    def _masters(self, group: FlatGroup) -> Planned:
        padded = self._target.stage == 3
        flat = Flat(self._stored, group.lies.spans(self._rank, padded=padded), lambda name: self._held[name])
        return flat.planned(torch.float32)

    def _states(self, group: FlatGroup) -> dict[str, Any]:
        return group.states(self._stored, group.lies.spans(self._rank))

    def _flat_hyper(self) -> list[dict[str, Any]]:
        """Hyper-parameters by optimizer group, with the numbers of what is flat."""
        made = []
        for number in dict.fromkeys(group.number for group in self.groups):
            mine = [at for at, group in enumerate(self.groups) if group.number == number]
            steps = max(self.groups[at].step(self._stored) for at in mine)
            made.append(hyper(self._stored.said["groups"][number]["values"], mine, steps))
        return made

    def _slices(self, group: FlatGroup) -> dict[str, Named]:
        """Where each parameter lies in this rank's part; what makes universal checkpoints reads it."""
        found, at = OrderedDict(), 0
        for name, start, stop in group.lies.spans(self._rank):
            if name:
                where = {"numel": stop - start, "start": at}
                found[name] = Named("deepspeed.utils.tensor_fragment", "fragment_address", attributes=where)
            at += stop - start
        return found

    def _whole_optimizer(self) -> dict[str, Any]:
        """Stage 0: torch's own, by numbers; under 16 bits inside of another dictionary."""
        target, stored = self._target, self._stored
        if target.half and target.flat_optimizer:
            base = {"state": dict(enumerate(map(self._states, self.groups))), "param_groups": self._flat_hyper()}
            flats = [self._masters(group) for group in self.groups]
            facts = own_scaling(target.scaling, stored.said) if target.half == "fp16" else {}
            return {**facts, "optimizer_state_dict": base, "fp32_groups_flat": flats, "clip_grad": float(target.clip)}
        states: dict[int, Any] = {}
        groups, masters, number = [], [], 0
        for group in self.groups:
            numbers = []
            names = group.shapes if target.half else stored.said["groups"][group.number]["parameters"]
            for name in names:
                numbers.append(number)
                number += 1
                if name not in group.shapes:  # frozen, and left out
                    continue
                shape = group.shapes[name]
                alone = FlatGroup(group.number, in_a_row({name: shape}, 1, align=1))
                if found := alone.states(stored, alone.lies.spans(0), shape):
                    states[numbers[-1]] = found
            values = stored.said["groups"][group.number]["values"]
            groups.append(hyper(values, numbers, group.step(stored)))
            masters.append([self._master(name) for name in group.shapes])
        base = {"state": states, "param_groups": groups}
        if not target.half:
            return base
        return {**own_scaling(target.scaling, stored.said), "optimizer_state_dict": base, "fp32_groups": masters}

    def _master(self, name: str) -> Planned:
        where = self._held[name]
        return Planned(torch.float32, self._shapes[name], lambda: self._stored.parts(where))


def _shapes_of(names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]) -> dict[str, torch.Size]:
    return OrderedDict((name, torch.Size(shapes[name])) for name in names)


def _sub_groups(shapes: Mapping[str, tuple[int, ...]], ranks: int, most: int) -> Iterator[dict[str, tuple[int, ...]]]:
    """Stage 3 steps so many elements of a rank at a time; a sub-group ends with the parameter that reaches that."""
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
