"""`deepspeed.ops.op_builder`: builders of native code that in windlass is built already, or is not there."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from windlass.compat.aio_handle import aio_handle, aio_read, aio_write
from windlass.compat.not_built import NotBuiltError
from windlass.kernels import get_active_kernel_path


class OpBuilder:
    """Stands for native code. windlass' own was compiled when it was installed: nothing is built at run time.

    Attributes:
        TARGET_MODULE: what `load` gives, as a dotted name; empty where windlass has no such code.
        UNAVAILABLE_REASON: where it has none: what to use instead.
    """

    NAME = "not_implemented"
    BUILD_VAR = ""
    TARGET_MODULE = ""
    UNAVAILABLE_REASON = "there is no such native code in windlass"

    def __init__(self, name: str | None = None) -> None:
        self.name = name or self.NAME
        self.error_log: str | None = None

    def absolute_name(self) -> str:
        return f"deepspeed.ops.{self.name}"

    def sources(self) -> list[str]:
        """None that a script could compile."""
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
        """Whether there is one of these commands to run."""
        return any(shutil.which(name) for name in ([cmd] if isinstance(cmd, str) else cmd))

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether `load` gives something here."""
        return bool(self.TARGET_MODULE)

    def load(self, verbose: bool = False) -> Any:
        """The code.

        Raises:
            NotBuiltError: windlass has none; says what to use.
        """
        if not self.is_compatible(verbose):
            raise NotBuiltError(f"{type(self).__name__}.load: {self.UNAVAILABLE_REASON}")
        return importlib.import_module(self.TARGET_MODULE)

    def jit_load(self, verbose: bool = True) -> Any:
        """As `load`."""
        return self.load(verbose)

    def builder(self) -> Any:
        """An extension for setuptools.

        Raises:
            NotBuiltError: always.
        """
        raise NotBuiltError(f"{type(self).__name__}.builder: windlass' native code is compiled when it is installed")


class _CPUOptimizerBuilder(OpBuilder):
    """Of the optimizers for host memory."""

    TARGET_MODULE = "windlass.kernels"
    UNAVAILABLE_REASON = (
        "the native module is missing: install a C++20 compiler, then windlass again; the reference steps meanwhile"
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
    """torch's own fused step."""

    NAME = "fused_adam"
    TARGET_MODULE = "torch.optim._functional"


class AsyncIOBuilder(OpBuilder):
    """Reads and writes of files beside the computation."""

    NAME = "async_io"
    TARGET_MODULE = "windlass.compat.aio_handle"

    def load(self, verbose: bool = False) -> Any:
        """`aio_handle`, `aio_read`, `aio_write`."""
        return SimpleNamespace(aio_handle=aio_handle, aio_read=aio_read, aio_write=aio_write)


class UtilsBuilder(OpBuilder):
    """Flat buffers of many tensors."""

    NAME = "utils"
    TARGET_MODULE = "torch._utils"

    def load(self, verbose: bool = False) -> Any:
        """`flatten`, `unflatten`."""
        return SimpleNamespace(
            flatten=torch._utils._flatten_dense_tensors, unflatten=torch._utils._unflatten_dense_tensors
        )


class NotImplementedBuilder(OpBuilder):
    """What stands for any builder that there is none of."""

    NAME = "deepspeed_not_implemented"


_UNAVAILABLE_BUILDERS = {
    "FusedLambBuilder": ("fused_lamb", "deepspeed.ops.lamb.FusedLamb needs no builder: use the class"),
    "FusedLionBuilder": ("fused_lion", "deepspeed.ops.lion.FusedLion needs no builder: use the class"),
    "GDSBuilder": ("gds", "disks are reached through host memory, not by GPUDirect Storage: use AsyncIOBuilder"),
    "TransformerBuilder": ("transformer", "layers stay your own: use torch.nn, or a model of transformers"),
    "StochasticTransformerBuilder": ("stochastic_transformer", "layers stay your own: use torch.nn"),
    "InferenceBuilder": ("transformer_inference", "serving is not built yet: use engine.module.generate"),
    "InferenceCoreBuilder": ("inference_core_ops", "serving is not built yet: use engine.module.generate"),
    "InferenceCutlassBuilder": ("cutlass_ops", "serving is not built yet: use engine.module.generate"),
    "RaggedOpsBuilder": ("ragged_device_ops", "serving is not built yet: use engine.module.generate"),
    "RaggedUtilsBuilder": ("ragged_ops", "serving is not built yet: use engine.module.generate"),
    "SpatialInferenceBuilder": ("spatial_inference", "serving is not built yet: use the model itself"),
    "QuantizerBuilder": ("quantizer", "quantisation is not built yet: use torchao"),
    "FPQuantizerBuilder": ("fp_quantizer", "quantisation is not built yet: use torchao"),
    "RandomLTDBuilder": ("random_ltd", "random layer-token dropping is not built: train on all tokens"),
    "EvoformerAttnBuilder": ("evoformer_attn", "use torch.nn.functional.scaled_dot_product_attention with a bias"),
    "FlashAttentionBuilder": ("flash_attn", "use torch.nn.functional.scaled_dot_product_attention"),
    "SparseAttnBuilder": ("sparse_attn", "block-sparse attention is not built: use torch's flex_attention"),
    "CCLCommBuilder": ("deepspeed_ccl_comm", "CPU ranks talk through gloo or shared memory, which windlass chooses"),
    "ShareMemCommBuilder": ("deepspeed_shm_comm", "CPU ranks of a host share memory without it"),
    "PinMemoryBuilder": ("pin_memory", "memory is page-locked by torch: use get_accelerator().pin_memory"),
    "DeepCompileBuilder": ("dc", "DeepCompile is not built: use engine.compile or torch.compile"),
}


def _unavailable_builder(name: str, op: str, reason: str) -> type[OpBuilder]:
    return type(
        name,
        (OpBuilder,),
        {"NAME": op, "UNAVAILABLE_REASON": reason, "__module__": __name__, "__doc__": f"Refuses: {reason}."},
    )


_AVAILABLE_BUILDERS: tuple[type[OpBuilder], ...] = (
    AsyncIOBuilder,
    CPUAdagradBuilder,
    CPUAdamBuilder,
    CPULionBuilder,
    FusedAdamBuilder,
    NotImplementedBuilder,
    UtilsBuilder,
)
ALL_BUILDERS: dict[str, type[OpBuilder]] = {
    **{cls.__name__: cls for cls in _AVAILABLE_BUILDERS},
    **{name: _unavailable_builder(name, op, why) for name, (op, why) in _UNAVAILABLE_BUILDERS.items()},
}
"""Every builder by its class's name."""


def find_builder(class_name: str) -> type[OpBuilder]:
    """The class of a builder; `NotImplementedBuilder` for names that nobody has."""
    return ALL_BUILDERS.get(class_name, NotImplementedBuilder)


def check_compatible_ops(names: Sequence[str] = tuple(ALL_BUILDERS)) -> dict[str, bool]:
    """Which native code there is here, by the op's name."""
    return {ALL_BUILDERS[name].NAME: ALL_BUILDERS[name]().is_compatible() for name in names}


def __getattr__(name: str) -> Any:
    if name in ALL_BUILDERS:
        return ALL_BUILDERS[name]
    if name == "ALL_OPS":
        return {cls.NAME: cls() for cls in ALL_BUILDERS.values()}
    if name == "COMPATIBLE_OPS":
        return globals().setdefault(name, check_compatible_ops())
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
