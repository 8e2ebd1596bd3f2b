"""Layout of a model over the servers. Servers and workers compute the same layout."""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.parameter_server.parameter_partition import Fragment, PartitionedParameter, partition_parameters


@dataclass(frozen=True)
class ModelLayout:
    """Trainable parameters of a model, and each server's fragments of them.

    Attributes:
        parameters: name, size and gradient type (dense or sparse) of each trainable parameter.
        tensors: the trainable parameters themselves.
        fragments: for each server, the fragments of its shard.
        dtype: dtype of values and gradients in messages and on servers: float32, or float64 if a parameter is.
        fingerprint: checksum of `dtype` and of the names and shapes of the parameters, equal on all processes with the
            same model.
    """

    parameters: tuple[PartitionedParameter, ...]
    tensors: tuple[nn.Parameter, ...]
    fragments: tuple[tuple[Fragment, ...], ...]
    dtype: torch.dtype
    fingerprint: int

    def values(self, server: int) -> Tensor:
        """Return a copy of the model's elements in a server's shard, `[n]` of `dtype` on the CPU."""
        parts = [self.part(fragment).to("cpu", self.dtype) for fragment in self.fragments[server]]
        return torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype)

    def part(self, fragment: Fragment) -> Tensor:
        """Return the elements of a fragment as a view of the model's parameter."""
        return self.tensors[fragment.parameter].detach().view(-1)[fragment.begin : fragment.end]

    def numel(self, server: int) -> int:
        """Return the number of elements of a server's shard."""
        return sum(fragment.numel for fragment in self.fragments[server])

    def dense_sizes(self, server: int) -> list[int]:
        """Return the number of elements of each dense fragment of a server."""
        return [one.numel for one in self.fragments[server] if not self.parameters[one.parameter].is_sparse]

    @property
    def splits_parameters(self) -> bool:
        """True if some parameter is split over several servers."""
        return any(
            fragment.numel < self.parameters[fragment.parameter].numel for own in self.fragments for fragment in own
        )

    def sparse_shapes(self, server: int) -> list[tuple[int, int]]:
        """Return `(rows, elements per row)` of each sparse fragment of a server."""
        sparse = [one for one in self.fragments[server] if self.parameters[one.parameter].is_sparse]
        rows = [self.parameters[one.parameter].row for one in sparse]
        return [(one.numel // row, row) for one, row in zip(sparse, rows, strict=True)]


def layout_of(model: nn.Module, servers: int) -> ModelLayout:
    """Return the layout of a model. The weights of `nn.Embedding(sparse=True)` and of `nn.EmbeddingBag(sparse=True)`
    have sparse gradients.

    Raises:
        ModelError: the model has no trainable parameter, or one that is complex or not contiguous.
    """
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    sparse = {id(table.weight) for table in tables if table.sparse}
    named = [(name, tensor) for name, tensor in model.named_parameters() if tensor.requires_grad]
    if not named:
        raise ModelError("parameter server: the model has no trainable parameter; set requires_grad on some")
    for name, tensor in named:
        if tensor.is_complex():
            raise ModelError(
                f"parameter server: parameter {name} is {tensor.dtype}, and servers update real numbers; store "
                "torch.view_as_real of it, and use torch.view_as_complex in the forward"
            )
        if not tensor.is_contiguous():
            raise ModelError(f"parameter server: parameter {name} is not contiguous; make it so before the start")
    parameters = tuple(
        PartitionedParameter(
            name, tensor.numel(), tensor.shape[-1] if id(tensor) in sparse else 1, id(tensor) in sparse
        )
        for name, tensor in named
    )
    dtype = torch.float64 if any(tensor.dtype is torch.float64 for _, tensor in named) else torch.float32
    rows = [
        (name, tuple(tensor.shape), row.row, row.is_sparse)
        for (name, tensor), row in zip(named, parameters, strict=True)
    ]
    text = repr((str(dtype), rows))
    return ModelLayout(
        parameters,
        tuple(tensor for _, tensor in named),
        tuple(tuple(part) for part in partition_parameters(parameters, servers)),
        dtype,
        zlib.crc32(text.encode()),
    )
