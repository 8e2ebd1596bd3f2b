"""Training methods of each axis: ways to train one model on two ranks, and the lower bound of each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rig.floor import Roofs
from rig.models import Sizes
from rig.plan import BASE
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes, count_local_parameters, sum_bytes_by_axis

DENSE = Sizes(hidden=384, layers=6, heads=6, intermediate=1024, vocabulary=8192)
EXPERTS = Sizes(hidden=256, layers=4, heads=4, intermediate=512, vocabulary=4096, experts=8, chosen=2)
RANKS, FLOAT = 2, 4
_PASSES = 4  # memory passes of a byte over loopback: read and written on its way into the kernel, and out of it
_ADAM_BYTES = 28  # bytes per parameter: reads parameter, gradient and two moments, writes all but the gradient

EXPLANATION = (
    "forward and backward of half the batch by one rank alone, times (m + p - 1) / m where m micro-batches pass p "
    "stages + AdamW on the parameters that a rank updates (28 bytes each, at the rate of torch's fused step) + the "
    "bytes that a rank receives by windlass/parallel/comm_volumes.py: four passes through memory each, and "
    "one where windlass reduces and gathers through shared memory. Rates are a rank's while both do the same. Over a "
    "slow link: the longer of compute and AdamW, and of these bytes at its rate."
)


@dataclass(frozen=True)
class TrainingMethod:
    """Method to train a model on two ranks.

    Attributes:
        name: `none` trains on each rank without communication, to time the compute alone; the losses of `dp` are the
        reference.
        how: key in `rig.training_methods`.
        axes: the section `parallel` of windlass, and the mesh for formulas.
        rivals: torch's own methods in the same run, whose time is the limit.
        whole: every rank gets the whole batch, not its half of the samples.
        sizes: sizes of a different model, whose losses differ; None: the common model.
    """

    name: str
    how: str
    axes: Mapping[str, Any] = field(default_factory=dict)
    rivals: tuple[str, ...] = ()
    whole: bool = False
    sizes: Sizes | None = None

    @property
    def synchronises(self) -> bool:
        """True if the ranks train one model."""
        return self.name != BASE


_DP = TrainingMethod("dp", "windlass")
# The part of the mixture that a token passes, without routers: one network as wide as its chosen experts together.
_ACTIVE = replace(EXPERTS, intermediate=EXPERTS.intermediate * EXPERTS.chosen, experts=0, chosen=0)
_FIELDS = {
    "tp": (
        _DP,
        TrainingMethod("tp", "windlass", {"tp": 2}, ("torch tp", "torch tp, loss cut"), whole=True),
        TrainingMethod("torch tp", "tensor", {"tp": 2}, whole=True),
        TrainingMethod("torch tp, loss cut", "tensor-loss", {"tp": 2}, whole=True),
    ),
    "sp": (
        _DP,
        TrainingMethod("sp ulysses", "windlass", {"sp": 2}, ("torch cp",), whole=True),
        TrainingMethod("sp ring", "windlass", {"sp": 2, "sp_mode": "ring"}, ("torch cp",), whole=True),
        TrainingMethod("torch cp", "context", {"sp": 2, "sp_mode": "ring"}, whole=True),
    ),
    "pp": (
        _DP,
        TrainingMethod("pp gpipe", "windlass-pipeline", {"pp": 2, "schedule": "gpipe"}, ("torch gpipe",), whole=True),
        TrainingMethod("pp 1f1b", "windlass-pipeline", {"pp": 2, "schedule": "1f1b"}, ("torch 1f1b",), whole=True),
        TrainingMethod("torch gpipe", "pipeline", {"pp": 2, "schedule": "gpipe"}, whole=True),
        TrainingMethod("torch 1f1b", "pipeline", {"pp": 2, "schedule": "1f1b"}, whole=True),
    ),
    "ep": (
        replace(_DP, rivals=("torch ddp",)),
        TrainingMethod("ep", "windlass", {"ep": 2}, ("torch ddp",)),
        TrainingMethod("torch ddp", "ddp"),
        TrainingMethod("dense", "windlass", sizes=_ACTIVE),
    ),
    "link": (
        replace(_DP, rivals=("torch ddp",)),
        TrainingMethod("pp", "windlass-pipeline", {"pp": 2, "schedule": "1f1b"}, ("torch pp",), whole=True),
        TrainingMethod("torch ddp", "ddp"),
        TrainingMethod("torch pp", "pipeline", {"pp": 2, "schedule": "1f1b"}, whole=True),
    ),
}
FIELDS = {axis: {item.name: item for item in (TrainingMethod(BASE, "alone"), *of)} for axis, of in _FIELDS.items()}
"""Methods by axis; the first one of each is `none`, the compute alone."""

SIZES = {axis: EXPERTS if axis == "ep" else DENSE for axis in FIELDS}
"""Sizes of the model that the methods of an axis train, by axis."""


@dataclass(frozen=True)
class Load:
    """Global batch, and the speed of the links.

    Attributes:
        samples: number of sequences; each is a micro-batch in a pipeline.
        length: tokens of a sequence.
        link: bytes per second of each connection between ranks; 0: unlimited.
    """

    samples: int
    length: int
    link: int = 0


def floor(one: TrainingMethod, sizes: Sizes, load: Load, compute: float, roofs: Roofs) -> float:
    """Return the lower bound of a step in seconds; see `EXPLANATION`.

    Args:
        compute: seconds of forward and backward of half the samples by one rank alone.
    """
    axes = {name: size for name, size in one.axes.items() if name in ("pp", "sp", "tp", "ep")}
    grid = MeshShape(**axes, dp_shard=RANKS // MeshShape(**axes).world) if one.synchronises else MeshShape()
    micros = load.samples if grid.pp > 1 else 1
    tokens = load.samples * load.length // micros // grid.data_loading_size
    degree = 1 if one.axes.get("sp_mode") == "ring" else 0
    work = StepWorkload(
        tokens, micros, activation_bytes=FLOAT, parameter_bytes=FLOAT, gradient_bytes=FLOAT, ulysses_degree=degree
    )
    shape = sizes.shape()
    shared = ("data", "experts") if one.how.startswith("windlass") and not load.link else ()
    moved = 0
    for pipe in range(grid.pp):
        along = sum_bytes_by_axis(compute_step_volumes(shape, grid, work, pipe))
        passes = {axis: 1 if axis in shared or load.link else _PASSES for axis in along}
        moved = max(moved, sum(nbytes * passes[axis] for axis, nbytes in along.items()))
    updated = max(sum(count_local_parameters(shape, grid, pipe)) for pipe in range(grid.pp))
    idle = (micros + grid.pp - 1) / micros
    own = compute * idle + _ADAM_BYTES * updated / roofs.adam
    return max(own, moved / load.link) if load.link else own + moved / roofs.memory
