"""Process groups of the most recently built engine, for the module-level queries of `deepspeed.utils.groups`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from windlass.comm.mesh import Mesh
from windlass.comm.mesh_shape import DATA_LOADING_AXES
from windlass.comm.rank_group import RankGroup

if TYPE_CHECKING:
    from windlass.engine.training_engine import Engine


@dataclass(frozen=True)
class EngineGroups:
    """Process groups of one engine.

    Attributes:
        mesh: mesh of all ranks.
        data_loading_group: ranks that read different samples.
        model_parallel_group: ranks that together hold one copy of the model, along pp and tp.
        expert_group_name: name of the expert-parallel groups; empty if there are none.
        mpu: the `mpu` passed to `initialize`.
    """

    mesh: Mesh
    data_loading_group: RankGroup
    model_parallel_group: RankGroup
    expert_group_name: str
    mpu: Any


@dataclass(frozen=True)
class _CurrentEngine:
    engine: Any  # weak reference
    groups: EngineGroups


_current: _CurrentEngine | None = None


def groups_of_engine(engine: Engine, mpu: Any, *, has_experts: bool) -> EngineGroups:
    """Build the groups of an engine. Collective over all ranks.

    Args:
        has_experts: True if the model has MoE layers.
    """
    mesh = engine.mesh
    name = f"ep_size_{mesh.ep.size}" if has_experts or mesh.ep.size > 1 else ""
    return EngineGroups(mesh, mesh.over(*DATA_LOADING_AXES), mesh.over("pp", "tp"), name, mpu)


def set_current_engine(engine: Engine, groups: EngineGroups) -> None:
    """Make this engine's groups the current ones, until it is destroyed."""
    global _current
    _current = _CurrentEngine(ref(engine), groups)


def current_groups() -> EngineGroups | None:
    """Return the current engine's groups; None if there is no engine or it is destroyed."""
    engine = _current.engine() if _current is not None else None
    return _current.groups if _current is not None and engine is not None and not engine._destroyed else None
