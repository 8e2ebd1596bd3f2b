"""Conversion of tensors to memory that MPI supports: bytes to move, or elements to reduce in a dtype and by an operator
of MPI."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from windlass.base.errors import CommunicationError

Finish = Callable[[], None]
_OPS = {"SUM": "SUM", "AVG": "SUM", "PRODUCT": "PROD", "MIN": "MIN", "MAX": "MAX"}
_BITWISE = {"BAND": "BAND", "BOR": "BOR", "BXOR": "BXOR"}
_BOOLEAN = {"SUM": "MAX", "MAX": "MAX", "BOR": "MAX", "PRODUCT": "MIN", "MIN": "MIN", "BAND": "MIN", "BXOR": "BXOR"}
_DATATYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.complex64: "C_FLOAT_COMPLEX",
    torch.complex128: "C_DOUBLE_COMPLEX",
    torch.int8: "INT8_T",
    torch.int16: "INT16_T",
    torch.int32: "INT32_T",
    torch.int64: "INT64_T",
    torch.uint8: "UINT8_T",
    torch.uint16: "UINT16_T",
    torch.uint32: "UINT32_T",
    torch.uint64: "UINT64_T",
}


@dataclass(frozen=True)
class MpiElements:
    """Memory that MPI may use in place of tensors.

    Attributes:
        memory: contiguous flat uint8 tensor, in GPU memory only if the library is CUDA-aware.
        finish: function that copies the received data to the tensors; None if no copy is necessary.
    """

    memory: torch.Tensor
    finish: Finish | None = None


def is_usable(tensor: torch.Tensor, cuda_aware: bool) -> bool:
    """Return True if MPI may read and write the tensor's own memory."""
    return _is_reachable(tensor, cuda_aware) and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def bytes_to_send(tensors: Sequence[torch.Tensor], cuda_aware: bool) -> torch.Tensor:
    """Return the concatenated bytes of the tensors. A single tensor that MPI may read is not copied."""
    parts = [_as_bytes(_staged(tensor.detach(), cuda_aware)) for tensor in tensors]
    memory = parts[0] if len(parts) == 1 else torch.cat(parts)
    _synchronize(memory)
    return memory


def bytes_to_receive(tensors: Sequence[torch.Tensor], cuda_aware: bool) -> MpiElements:
    """Return memory for the concatenated bytes of the tensors: that of a single usable tensor, or a new buffer."""
    if len(tensors) == 1 and is_usable(tensors[0], cuda_aware):
        _synchronize(tensors[0])
        return MpiElements(_as_bytes(tensors[0].detach()))
    sizes = [tensor.numel() * tensor.element_size() for tensor in tensors]
    device = tensors[0].device if _is_reachable(tensors[0], cuda_aware) else torch.device("cpu")
    memory = new_memory(sum(sizes), torch.uint8, device)

    def finish() -> None:
        for tensor, part in zip(tensors, memory.split(sizes), strict=True):
            aligned = part.clone() if part.storage_offset() % 16 else part  # a view needs its dtype's alignment
            tensor.detach().copy_(aligned.view(tensor.dtype).view(tensor.shape))

    return MpiElements(memory, finish)


def new_memory(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate memory that MPI may write."""
    memory = torch.empty(numel, dtype=dtype, device=device)
    _synchronize(memory)  # torch may reuse memory that an operation of the stream still accesses
    return memory


def elements_to_reduce(tensors: Sequence[torch.Tensor], cuda_aware: bool) -> torch.Tensor:
    """Return the concatenated elements of the tensors, in a dtype that MPI reduces.

    A single tensor that MPI may access and reduce is not copied. 16-bit and 8-bit floats are reduced in float32, so the
    result is rounded once.
    """
    parts = [_staged(tensor.detach(), cuda_aware).reshape(-1).to(reduce_dtype(tensor.dtype)) for tensor in tensors]
    memory = parts[0] if len(parts) == 1 else torch.cat(parts)
    if tensors[0].dtype is torch.bool:
        memory = memory.ne(0).to(torch.uint8)
    _synchronize(memory)
    return memory


def reduce_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which MPI reduces elements of `dtype`."""
    if dtype is torch.bool:
        return torch.uint8
    if dtype.is_floating_point and dtype not in _DATATYPES:
        return torch.float32
    return dtype


def write_result(memory: torch.Tensor, tensors: Sequence[torch.Tensor], op: Any, ranks: int) -> None:
    """Write a reduction's result to the tensors; divide by `ranks` first if the operator is an average."""
    if op_name(op) == "AVG":
        if memory.dtype.is_floating_point or memory.dtype.is_complex:
            memory = memory / ranks
        elif memory.dtype.is_signed or memory.dtype == torch.uint8:
            memory = torch.div(memory, ranks, rounding_mode="trunc")
        else:  # torch cannot divide unsigned integers of more than 8 bits
            memory = torch.from_numpy(memory.cpu().numpy() // ranks).to(memory.device)
    parts = memory.split([tensor.numel() for tensor in tensors])
    for tensor, part in zip(tensors, parts, strict=True):
        if part.data_ptr() != tensor.data_ptr() or part.dtype != tensor.dtype or not tensor.is_contiguous():
            tensor.detach().copy_(part.view(tensor.shape))


def op_name(op: Any) -> str:
    """Return the name of torch's operator."""
    kind = op if isinstance(op, dist.ReduceOp.RedOpType) else op.op
    return str(kind.name)


def mpi_operator(mpi: Any, op: Any, dtype: torch.dtype) -> Any:
    """Return MPI's operator for torch's operator `op`.

    Raises:
        CommunicationError: MPI has no such operator for elements of this dtype.
    """
    name = op_name(op)
    fractional = dtype.is_floating_point or dtype.is_complex
    table = _BOOLEAN if dtype is torch.bool else _OPS if fractional else {**_OPS, **_BITWISE}
    if name not in table or (dtype.is_complex and name in ("MIN", "MAX")):
        raise CommunicationError(
            f"MPI has no operator ReduceOp.{name} for {dtype} tensors; use an operator or a dtype that MPI has, or "
            "windlass.compat.collectives, which computes further operators"
        )
    return getattr(mpi, table[name])


def mpi_spec(mpi: Any, memory: torch.Tensor, *counts: Any) -> list[Any]:
    """Return mpi4py's description of a buffer: memory, counts, datatype."""
    size = memory.numel() * memory.element_size()
    pointer = mpi.buffer.fromaddress(memory.data_ptr() if size else 0, size)
    datatype = getattr(mpi, "BYTE" if memory.dtype is torch.uint8 else _DATATYPES[memory.dtype])
    return [pointer, *(counts or (memory.numel(),)), datatype]


def reduce_spec(mpi: Any, memory: torch.Tensor) -> list[Any]:
    """Return the description of elements to reduce. uint8 is described as UINT8_T, since MPI cannot reduce BYTE."""
    spec = mpi_spec(mpi, memory)
    return [*spec[:-1], mpi.UINT8_T] if memory.dtype is torch.uint8 else spec


def _staged(tensor: torch.Tensor, cuda_aware: bool) -> torch.Tensor:
    tensor = tensor.resolve_conj().resolve_neg()
    return (tensor if _is_reachable(tensor, cuda_aware) else tensor.to("cpu")).contiguous()


def _is_reachable(tensor: torch.Tensor, cuda_aware: bool) -> bool:
    return tensor.device.type == "cpu" or (tensor.device.type == "cuda" and cuda_aware)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # A contiguous tensor of one element may have any stride, but a view as bytes requires stride 1.
    flat = tensor.reshape(-1).as_strided((tensor.numel(),), (1,))
    return (torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat).view(torch.uint8)


def _synchronize(memory: torch.Tensor) -> None:
    """Wait for the stream that writes or reads GPU memory, because MPI does not order its accesses by streams."""
    if memory.device.type == "cuda":
        torch.cuda.current_stream(memory.device).synchronize()
