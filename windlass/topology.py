"""Mesh shapes: coordinates and groups of ranks. Pure arithmetic, for worlds of any size.

>>> from windlass.topology import MeshShape
>>> grid = MeshShape(pp=2, dp_shard=2, tp=2)
>>> grid.coordinates(5)
{'pp': 1, 'dp_replicate': 0, 'dp_shard': 0, 'ep': 0, 'sp': 0, 'tp': 1}
>>> grid.along(5, "pp"), grid.rank(pp=1, tp=1)
((1, 5), 5)
"""

from windlass.comm.mesh_shape import MeshShape as MeshShape

__all__ = ["MeshShape"]
