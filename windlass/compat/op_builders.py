"""Module `deepspeed.ops.op_builder`: builders whose `load` returns windlass's or torch's code for an op, or raises."""

from __future__ import annotations

import ctypes
import importlib
import shutil
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from windlass.base.errors import ModelError
from windlass.compat.aio_handle import aio_handle, aio_read, aio_write
from windlass.compat.collectives.byte_payload import as_bytes, is_flat_view
from windlass.compat.fp_quantizer import MANTISSA_BITS
from windlass.compat.not_built import NotBuiltError
from windlass.kernels import get_active_kernel_path
from windlass.kernels.grouped_formats import MinifloatWeightFormat


class OpBuilder:
    """Builder of one native op. windlass compiles its native code at installation and builds nothing at run time.

    Attributes:
        TARGET_MODULE: dotted name of the module that `load` returns; empty if windlass does not have the op.
        UNAVAILABLE_REASON: text of the error if the op is missing: the reason, or the replacement.
    """

    NAME = "not_implemented"
    BUILD_VAR = ""
    TARGET_MODULE = ""
    UNAVAILABLE_REASON = "windlass has no such native code: use torch's operators"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    @staticmethod
    def is_rocm_pytorch() -> bool:
        """Return True if torch was built for AMD's GPUs."""
        return torch.version.hip is not None

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """Return the version of ROCm for which torch was built; (0, 0) without ROCm."""
        major, minor, *_ = (torch.version.hip or "0.0").split(".")
        return int(major), int(minor)

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def sources(self) -> list[str]:
        """Return []: there are no sources for a script to compile."""
        return []

    def include_paths(self) -> list[str]:
        return []

    def cxx_args(self) -> list[str]:
        return []

    def nvcc_args(self) -> list[str]:
        return []

    def extra_ldflags(self) -> list[str]:
        return []

    def command_exists(self, cmd: str | Sequence[str]) -> bool:
        """Return True if one of these commands is installed."""
        return any(shutil.which(name) for name in ([cmd] if isinstance(cmd, str) else cmd))

    def is_compatible(self, verbose: bool = False) -> bool:
        """Return True if `load` succeeds here."""
        return bool(self.TARGET_MODULE)

    def load(self, verbose: bool = False) -> Any:
        """Return the module with the native code.

        Raises:
            NotBuiltError: windlass does not have the op; the message names an alternative.
        """
        if not self.is_compatible(verbose):
            raise NotBuiltError(f"{type(self).__name__}.load: {self.UNAVAILABLE_REASON}")
        return importlib.import_module(self.TARGET_MODULE)

    def jit_load(self, verbose: bool = True) -> Any:
        """Call `load`."""
        return self.load(verbose)

    def builder(self) -> Any:
        """Raise NotBuiltError: there is no setuptools extension.

        Raises:
            NotBuiltError: always.
        """
        raise NotBuiltError(f"{type(self).__name__}.builder: windlass compiles native code at installation; use load()")


class _CPUOptimizerBuilder(OpBuilder):
    """Builder of the CPU optimizers."""

    TARGET_MODULE = "windlass.kernels"
    UNAVAILABLE_REASON = (
        "the native module is missing: install a C++20 compiler and reinstall windlass; the reference kernel is used "
        "meanwhile"
    )

    def is_compatible(self, verbose: bool = False) -> bool:
        return get_active_kernel_path().is_native


class CPUAdamBuilder(_CPUOptimizerBuilder):
    NAME = "cpu_adam"


class CPUAdagradBuilder(_CPUOptimizerBuilder):
    NAME = "cpu_adagrad"


class CPULionBuilder(_CPUOptimizerBuilder):
    NAME = "cpu_lion"


class FusedAdamBuilder(OpBuilder):
    """Builder of the fused Adam step, which is torch's own."""

    NAME = "fused_adam"
    TARGET_MODULE = "torch.optim._functional"


class AsyncIOBuilder(OpBuilder):
    """Builder of asynchronous file reads and writes."""

    NAME = "async_io"
    TARGET_MODULE = "windlass.compat.aio_handle"

    def load(self, verbose: bool = False) -> Any:
        """Return a namespace with `aio_handle`, `aio_read` and `aio_write`."""
        return SimpleNamespace(aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write)


class PinMemoryBuilder(OpBuilder):
    """Builder of the allocator of page-locked host memory."""

    NAME = "pin_memory"
    TARGET_MODULE = "windlass.compat.locked_memory"
    UNAVAILABLE_REASON = "this system has no mlock: use get_accelerator().pin_memory, where torch page-locks memory"

    def is_compatible(self, verbose: bool = False) -> bool:
        return hasattr(ctypes.CDLL(None), "mlock")


class QuantizerBuilder(OpBuilder):
    """Builder of quantization by groups."""

    NAME = "quantizer"
    TARGET_MODULE = "windlass.compat.group_quantizer"


class FPQuantizerBuilder(OpBuilder):
    """Builder of quantization to floats of few bits."""

    NAME = "fp_quantizer"
    TARGET_MODULE = "windlass.compat.fp_quantizer"

    @staticmethod
    def get_default_quant_dtype() -> torch.dtype:
        """Return the dtype of packed codes."""
        return torch.uint8

    @staticmethod
    def get_quant_range(q_bits: int | None = None) -> float:
        """Return the largest float of `q_bits` bits, e.g. 28 for 6 bits and 480 for 8 bits.

        Raises:
            ModelError: `q_bits` is not 4, 6, 8 or 12.
        """
        if q_bits not in MANTISSA_BITS:
            raise ModelError(f"get_quant_range: q_bits is {q_bits!r}; pass 4, 6, 8 or 12")
        return float(MinifloatWeightFormat(q_bits, MANTISSA_BITS[q_bits], 1).largest)


def _cast_to_byte_tensor(tensor: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor | list[torch.Tensor]:
    """Return the memory of a contiguous tensor as uint8 `[bytes]`; of several tensors, a list.

    Raises:
        ModelError: a tensor is not contiguous, so its bytes are not one range of memory.
    """
    if not isinstance(tensor, torch.Tensor):
        return [as_bytes(_require_contiguous(one)) for one in tensor]
    return as_bytes(_require_contiguous(tensor))


def _require_contiguous(tensor: torch.Tensor) -> torch.Tensor:
    if not is_flat_view(tensor):
        raise ModelError(
            f"cast_to_byte_tensor: the tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not "
            "contiguous; pass tensor.contiguous()"
        )
    return tensor


class UtilsBuilder(OpBuilder):
    """Builder of functions that flatten tensors."""

    NAME = "utils"
    TARGET_MODULE = "torch._utils"

    def load(self, verbose: bool = False) -> Any:
        """Return a namespace with `flatten`, `unflatten` and `cast_to_byte_tensor`."""
        return SimpleNamespace(
            flatten=torch._utils._flatten_dense_tensors,
            unflatten=torch._utils._unflatten_dense_tensors,
            cast_to_byte_tensor=_cast_to_byte_tensor,
        )


class NotImplementedBuilder(OpBuilder):
    """Builder returned for unknown names."""

    NAME = "deepspeed_not_implemented"


_UNAVAILABLE_BUILDERS = {
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb.FusedLamb needs no builder: use the class"),
    "FusedLionBuilder": ("fused_lion", "deepspeed.ops.lion.FusedLion needs no builder: use the class"),
    "GDSBuilder": ("gds", "GPUDirect Storage is not used, NVMe I/O goes through host memory: use AsyncIOBuilder"),
    "TransformerBuilder": ("transformer", "windlass has no transformer layers: use torch.nn, or a transformers model"),
    "StochasticTransformerBuilder": ("stochastic_transformer", "windlass has no transformer layers: use torch.nn"),
    "InferenceBuilder": ("transformer_inference", "kernels are internal; use windlass.LLM or init_inference"),
    "InferenceCoreBuilder": ("inference_core_ops", "kernels are internal; use windlass.LLM or init_inference"),
    "InferenceCutlassBuilder": ("cutlass_ops", "kernels are internal; use windlass.LLM or init_inference"),
    "RaggedOpsBuilder": ("ragged_device_ops", "kernels are internal; use windlass.LLM or init_inference"),
    "RaggedUtilsBuilder": ("ragged_ops", "kernels are internal; use windlass.LLM or init_inference"),
    "SpatialInferenceBuilder": (
        "spatial_inference",
        "diffusion models have no layers to replace: use the model itself",
    ),
    "RandomLTDBuilder": ("random_ltd", "random layer-token dropping is not built: train on all tokens"),
    "EvoformerAttnBuilder": ("evoformer_attn", "use torch.nn.functional.scaled_dot_product_attention with a bias"),
    "FlashAttentionBuilder": ("flash_attn", "use torch.nn.functional.scaled_dot_product_attention"),
    "SparseAttnBuilder": ("sparse_attn", "block-sparse attention is not built: use torch's flex_attention"),
    "CCLCommBuilder": ("deepspeed_ccl_comm", "CPU ranks use gloo or shared memory without this op: delete the call"),
    "ShareMemCommBuilder": (
        "deepspeed_shm_comm",
        "CPU ranks of a host use shared memory without this op: delete the call",
    ),
    "DeepCompileBuilder": ("dc", "DeepCompile is not built: use engine.compile or torch.compile"),
}


def _unavailable_builder(name: str, op: str, reason: str) -> type[OpBuilder]:
    return type(
        name,
        (OpBuilder,),
        {
            "NAME": op,
            "UNAVAILABLE_REASON": reason,
            "__module__": __name__,
            "__doc__": f"Builder of an unavailable op: {reason}.",
        },
    )


_AVAILABLE_BUILDERS: tuple[type[OpBuilder], ...] = (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FPQuantizerBuilder,
    FusedAdamBuilder,
    NotImplementedBuilder,
    PinMemoryBuilder,
    QuantizerBuilder,
    UtilsBuilder,
)
ALL_BUILDERS: dict[str, type[OpBuilder]] = {
    **{cls.__name__: cls for cls in _AVAILABLE_BUILDERS},
    **{name: _unavailable_builder(name, op, why) for name, (op, why) in _UNAVAILABLE_BUILDERS.items()},
}
"""All builders by class name."""


def find_builder(class_name: str) -> type[OpBuilder]:
    """Return the builder class of a name; `NotImplementedBuilder` for unknown names."""
    return ALL_BUILDERS.get(class_name, NotImplementedBuilder)


def check_compatible_ops(names: Sequence[str] = tuple(ALL_BUILDERS)) -> dict[str, bool]:
    """Return a dict from op name to True if the op is available here, else False."""
    return {ALL_BUILDERS[name].NAME: ALL_BUILDERS[name]().is_compatible() for name in names}


def __getattr__(name: str) -> Any:
    if name in ALL_BUILDERS:
        return ALL_BUILDERS[name]
    if name == "ALL_OPS":
        return {cls.NAME: cls() for cls in ALL_BUILDERS.values()}
    if name == "COMPATIBLE_OPS":
        return globals().setdefault(name, check_compatible_ops())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
