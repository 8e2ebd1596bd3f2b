"""Meshes on which the bytes of axes are counted, and the formulas for each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from rig.models import Sizes
from windlass.comm.mesh_shape import AXES, MeshShape
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes, count_local_layers

DENSE = Sizes(hidden=64, layers=4, heads=8, kv_heads=4, intermediate=128, vocabulary=256)
EXPERTS = Sizes(hidden=64, layers=4, heads=8, kv_heads=4, intermediate=96, vocabulary=256, experts=4, chosen=4)
"""Each token chooses every expert, so that routing is even, as the formula assumes."""

SAMPLES, LENGTH, MICRO_BATCHES, FLOAT, COUNT = 2, 32, 2, 4, 8
_DATA = ("data", "experts")  # axes of the formulas that the transport counts together
# names of tensors in the formulas of pp -> names of the counters
_PASSED = {"activations": "activations", "gradients of activations": "gradients"}

Moved = dict[str, dict[str, int]]
"""Bytes by axis and operation; ZeRO's collectives have the axis `data`."""


@dataclass(frozen=True)
class Case:
    """Mesh and settings of one case. The mesh divides the ranks by `axes`, and the rest of the division is
    data-parallel.

    Attributes:
        axes: the section `parallel`.
        pipeline: the section `pipeline`.
        recompute: layers are recomputed in the backward, by torch's reentrant checkpointing.
    """

    ranks: int
    axes: Mapping[str, Any] = field(default_factory=dict)
    stage: int = 0
    recompute: bool = False
    pipeline: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Label in tables."""
        words = [f"{axis} {size}" for axis, size in self.axes.items() if axis in AXES]
        words += [str(self.axes["sp_mode"])] if "sp_mode" in self.axes else []
        words += [f"{key} {value}" for key, value in self.pipeline.items()]
        words += ["norms cut"] if self.work.tp_sequence_norms else []
        words += ["recompute"] if self.recompute else []
        return ", ".join([f"{self.ranks} ranks", *words, f"stage {self.stage}"])

    @property
    def grid(self) -> MeshShape:
        """Mesh of the case."""
        taken = {axis: int(self.axes.get(axis, 1)) for axis in ("pp", "dp_replicate", "ep", "sp", "tp")}
        others = MeshShape(**taken).world
        return MeshShape(**taken, dp_shard=self.ranks // others)

    @property
    def sizes(self) -> Sizes:
        """Shape of the model."""
        return EXPERTS if self.grid.ep > 1 else DENSE

    @property
    def work(self) -> StepWorkload:
        """Workload of a step."""
        degree = {"ulysses": 0, "ring": 1, "ulysses+ring": self.axes.get("ulysses_degree", 0)}
        return StepWorkload(
            SAMPLES * LENGTH,
            micro_batches=MICRO_BATCHES,
            zero_stage=self.stage,
            activation_bytes=FLOAT,
            parameter_bytes=FLOAT,
            gradient_bytes=FLOAT,
            recompute=self.recompute,
            tp_sequence_norms=bool(self.axes.get("tp_sequence_norms")),
            ulysses_degree=degree[self.axes.get("sp_mode", "ulysses")],
            unshards_once=self.pipeline.get("unshard_per", "step") == "step",
            virtual_stages=int(self.pipeline.get("virtual_stages", 1)),
        )


CASES = (
    *(Case(2, stage=stage) for stage in range(4)),
    Case(2, {"tp": 2}),
    Case(2, {"tp": 2}, recompute=True),
    Case(2, {"tp": 2, "tp_sequence_norms": True}),
    Case(2, {"sp": 2}, stage=1),
    Case(2, {"sp": 2, "sp_mode": "ring"}, stage=1),
    Case(2, {"sp": 2}, recompute=True),
    Case(2, {"ep": 2}, stage=2),
    Case(2, {"ep": 2}, recompute=True),
    Case(2, {"pp": 2}),
    Case(2, {"pp": 2}, pipeline={"schedule": "gpipe"}),
    Case(2, {"pp": 2}, pipeline={"schedule": "interleaved", "virtual_stages": 2}),
    Case(2, {"pp": 2}, pipeline={"schedule": "zero-bubble"}),
    Case(4, {"dp_replicate": 2}, stage=3),
    Case(4, {"tp": 4}),
    Case(4, {"sp": 4}),
    Case(4, {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}, stage=2),
    Case(4, {"ep": 2}, stage=3),
    Case(4, {"tp": 2}, stage=3),
    Case(4, {"sp": 2, "tp": 2}, stage=1),
    Case(4, {"ep": 2, "tp": 2}, stage=2),
    Case(4, {"ep": 2, "sp": 2}, stage=2),
    Case(4, {"pp": 2, "tp": 2}),
    Case(4, {"pp": 2}, stage=2),
    Case(4, {"pp": 2}, stage=3),
    Case(4, {"pp": 2}, stage=3, pipeline={"unshard_per": "micro-batch"}),
    Case(4, {"pp": 2, "sp": 2}, stage=1),
    Case(4, {"pp": 2, "ep": 2}, stage=1),
)


def formulas(case: Case, pipe: int = 0) -> Moved:
    """Return the bytes that a rank of pipeline stage `pipe` receives in a step, by `windlass.parallel.comm_volumes`."""
    results: Moved = defaultdict(lambda: defaultdict(int))
    for item in compute_step_volumes(case.sizes.shape(), case.grid, case.work, pipe):
        operation = _PASSED[item.tensors] if item.axis == "pp" else item.operation
        results["data" if item.axis in _DATA else item.axis][operation] += item.nbytes
    return {axis: dict(operations) for axis, operations in results.items()}


def scalars(case: Case, pipe: int = 0) -> Moved:
    """Return the bytes that the formulas do not count, by axis.

    Along sp: the sum of losses and the count of tokens, forward and backward. Along ep: the number of rows for each
    expert, sent again if a layer is recomputed. Along pp: the loss, which the last stage broadcasts.
    """
    grid, micros = case.grid, case.work.micro_batches
    results: Moved = {}
    if pipe < grid.pp - 1:
        results["pp"] = {"broadcast": FLOAT}
    if grid.sp > 1 and pipe == grid.pp - 1:
        results["sp"] = {"all_reduce": 2 * micros * (2 * 2 * FLOAT * (grid.sp - 1) // grid.sp)}
    if grid.ep > 1:
        often = micros * (2 if case.recompute else 1) * count_local_layers(case.sizes.layers, grid.pp, pipe)
        results["ep"] = {"all_to_all": often * (grid.ep - 1) * (case.sizes.experts // grid.ep) * COUNT}
    return results


@dataclass(frozen=True)
class Line:
    """Bytes that a rank receives in a step by one operation along one axis, in one case."""

    case: str
    pipe: int
    axis: str
    operation: str
    formula: int
    scalars: int
    measured: int

    @property
    def equal(self) -> bool:
        """True if formula and measurement are equal to the byte."""
        return self.formula + self.scalars == self.measured

    def plain(self) -> dict[str, Any]:
        """Return plain data for the JSON."""
        return {**asdict(self), "equal": self.equal}


def compare(case: Case, pipe: int, measured: Moved) -> list[Line]:
    """Return a line for each operation that a formula has or that moved bytes."""
    text, small = formulas(case, pipe), scalars(case, pipe)
    keys = {(axis, name) for each in (text, small, measured) for axis, of in each.items() for name in of}

    def of(found: Moved, key: tuple[str, str]) -> int:
        return found.get(key[0], {}).get(key[1], 0)

    lines = [Line(case.name, pipe, *key, of(text, key), of(small, key), of(measured, key)) for key in sorted(keys)]
    return [line for line in lines if line.formula or line.scalars or line.measured]


def unequal(lines: Iterable[Line]) -> list[Line]:
    """Return the lines whose formula and measurement differ."""
    return [line for line in lines if not line.equal]
