"""The process groups of the engine that was made last, which answers where a script asks for groups by themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import ref

from windlass.comm.grid import READERS
from windlass.comm.groups import Group
from windlass.comm.mesh import Mesh

if TYPE_CHECKING:
    from windlass.engine.train import Engine


@dataclass(frozen=True)
class EngineAxes:
    """The groups of one engine.

    Attributes:
        mesh: all ranks on their axes.
        readers: ranks that read samples of their own.
        model: ranks that have one copy of the model together, along pp and tp.
        experts: the name by which groups of experts go; empty where there are none.
        unit: the `mpu` that the engine was made with.
    """

    mesh: Mesh
    readers: Group
    model: Group
    experts: str
    unit: Any


@dataclass(frozen=True)
class _Followed:
    engine: Any  # a weak reference
    axes: EngineAxes


_followed: _Followed | None = None


def axes_of(engine: Engine, unit: Any, *, experts: bool) -> EngineAxes:
    """The groups of an engine. Collective over all ranks.

    Args:
        experts: its model has layers of experts.
    """
    mesh = engine.mesh
    name = f"ep_size_{mesh.ep.size}" if experts or mesh.ep.size > 1 else ""
    return EngineAxes(mesh, mesh.over(*READERS), mesh.over("pp", "tp"), name, unit)


def follow(engine: Engine, axes: EngineAxes) -> None:
    """Answer for this engine from now on, until it is destroyed."""
    global _followed
    _followed = _Followed(ref(engine), axes)


def current() -> EngineAxes | None:
    """The groups of the engine that is followed; None where there is none."""
    engine = _followed.engine() if _followed is not None else None
    return _followed.axes if _followed is not None and engine is not None and not engine._destroyed else None
