"""Mesh shapes: coordinates and groups of ranks. Pure arithmetic, for worlds of any size.

`MeshShape` has the axes of windlass; `ProcessTopology` has axes with arbitrary names and follows DeepSpeed's class.

    >>> from windlass.topology import MeshShape, PipeModelDataParallelTopology
    >>> grid = MeshShape(pp=2, dp_shard=2, tp=2)
    >>> grid.coordinates(5)
    {'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'ep': 0, 'sp': 0, 'tp': 1}
    >>> grid.along(5, "pp"), grid.rank(pp=1, tp=1)
    ((1, 5), 5)
    >>> PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=2).get_axis_list("pipe", 1)
    [4, 5, 6, 7]
"""

from windlass.comm.mesh_shape import MeshShape as MeshShape
from windlass.comm.topology import PipeDataParallelTopology as PipeDataParallelTopology
from windlass.comm.topology import PipeModelDataParallelTopology as PipeModelDataParallelTopology
from windlass.comm.topology import ProcessTopology as ProcessTopology
from windlass.comm.topology import topology_of as topology_of

__all__ = [
    "MeshShape",
    "PipeDataParallelTopology",
    "PipeModelDataParallelTopology",
    "ProcessTopology",
    "topology_of",
]
