"""The process groups of the engine that was made last, which answers where a script asks for groups by themselves."""

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
    """The groups of one engine.

    Attributes:
        mesh: all ranks on their axes.
        readers: ranks that read samples of their own.
        model: ranks that have one copy of the model together, along pp and tp.
        experts: the name by which groups of experts go; empty where there are none.
        unit: the `mpu` that the engine was made with.
    """

    mesh: Mesh
    data_loading_group: RankGroup
    model_parallel_group: RankGroup
    expert_group_name: str
    mpu: Any


@dataclass(frozen=True)
class _CurrentEngine:
    engine: Any  # a weak reference
    groups: EngineGroups


_current: _CurrentEngine | None = None


def groups_of_engine(engine: Engine, mpu: Any, *, has_experts: bool) -> EngineGroups:
    """The groups of an engine. Collective over all ranks.

    Args:
        experts: its model has layers of experts.
    """
    mesh = engine.mesh
    name = f"ep_size_{mesh.ep.size}" if has_experts or mesh.ep.size > 1 else ""
    return EngineGroups(mesh, mesh.over(*DATA_LOADING_AXES), mesh.over("pp", "tp"), name, mpu)


def set_current_engine(engine: Engine, groups: EngineGroups) -> None:
    """Answer for this engine from now on, until it is destroyed."""
    global _current
    _current = _CurrentEngine(ref(engine), groups)


def current_groups() -> EngineGroups | None:
    """The groups of the engine that is followed; None where there is none."""
    engine = _current.engine() if _current is not None else None
    return _current.groups if _current is not None and engine is not None and not engine._destroyed else None
