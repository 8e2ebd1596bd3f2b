"""Check that ranks that compute one sample together get the same input."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

from windlass.base.collective_activity import WaitScope
from windlass.base.errors import DataError
from windlass.base.tensor_tree import iterate_tensors
from windlass.comm.mesh import Mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.parallel.sequence.batch_sharding import SHARD_KEY


class InputConsistencyCheck:
    """Comparison of the inputs of ranks along tp and sp, in the first forward with gradients and the first without.

    A loader that gives these ranks different samples is a likely mistake, and no other check finds it: the loss still
    falls, but each gradient mixes parts of different samples.

    Args:
        mesh: the mesh that defines the ranks along each axis.
        sequence_is_sharded: True if ranks along sp get different parts of a sequence, and so are not compared.
    """

    def __init__(self, mesh: Mesh, *, sequence_is_sharded: bool = False) -> None:
        compared = [mesh.tp] if sequence_is_sharded else [mesh.tp, mesh.sp]
        self._axes = [MeshAxis(axis.name, axis.group) for axis in compared if axis.size > 1]
        self._data_loading_ranks = mesh.grid.data_loading_size
        self._checked: set[bool] = set()

    def check(self, inputs: Any) -> None:
        """Compare a forward's arguments. Collective along tp and sp, unless already done.

        Raises:
            DataError: ranks got different tensors. Raised on all ranks along the axis.
        """
        kind = torch.is_grad_enabled()
        if not self._axes or kind in self._checked:
            return
        self._checked.add(kind)
        local = input_digest(inputs)
        marked = any(
            isinstance(one, Mapping) and SHARD_KEY in one for one in inputs
        )  # a loader already split the sequence over the sp ranks
        for axis in self._axes:
            if marked and axis.name == "sp":
                continue
            with WaitScope(f"the comparison of inputs along {axis.name}"):
                digests = axis.all_gather_object(local)
            if len(set(digests)) > 1:
                other = next(place for place, digest in enumerate(digests) if digest != digests[0])
                raise DataError(
                    f"ranks {axis.group.ranks[0]} and {axis.group.ranks[other]} are neighbours along {axis.name} and "
                    "got different inputs, but they compute the same samples together. Make the sampler with "
                    "num_replicas, rank = engine.data_loading_ranks (here num_replicas is "
                    f"{self._data_loading_ranks}), or pass training_data to initialize"
                )


def input_digest(inputs: Any) -> str:
    """Return a hash of the shapes and dtypes of all tensors in `inputs`, and the values of dense ones with memory."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in iterate_tensors(inputs):
        digest.update(repr((tuple(tensor.shape), str(tensor.dtype))).encode())
        if tensor.layout is torch.strided and tensor.device.type != "meta":
            values = tensor.detach().cpu().contiguous()
            digest.update(values.reshape(-1).view(torch.uint8).numpy().tobytes() if values.numel() else b"")
    return digest.hexdigest()
