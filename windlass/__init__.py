"""The public names of windlass, each imported when it is first used: `import windlass` itself does not import torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass import checkpointing as checkpointing
    from windlass import optim as optim
    from windlass import topology as topology
    from windlass import zero as zero
    from windlass.base.errors import WindlassError as WindlassError
    from windlass.checkpoint.plain_torch import read_checkpoint as read_checkpoint
    from windlass.comm.bootstrap import init_distributed as init_distributed
    from windlass.engine.train import Engine as Engine
    from windlass.from_pretrained import from_pretrained as from_pretrained
    from windlass.initialize import initialize as initialize
    from windlass.launch.arguments import add_config_arguments as add_config_arguments
    from windlass.parallel.experts.families import register_experts as register_experts
    from windlass.parallel.experts.layer import MoE as MoE
    from windlass.parallel.experts.mlp import StackedMLP as StackedMLP
    from windlass.parallel.pipeline.module import PipelineModule as PipelineModule
    from windlass.parallel.pipeline.specs import LayerSpec as LayerSpec
    from windlass.parallel.pipeline.specs import TiedLayerSpec as TiedLayerSpec

__version__ = "0.1.0"

__all__ = [
    "Engine",
    "LayerSpec",
    "MoE",
    "PipelineModule",
    "StackedMLP",
    "TiedLayerSpec",
    "WindlassError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "from_pretrained",
    "init_distributed",
    "initialize",
    "optim",
    "read_checkpoint",
    "register_experts",
    "topology",
    "zero",
]

_HOMES = {
    "Engine": "windlass.engine.train",
    "LayerSpec": "windlass.parallel.pipeline.specs",
    "MoE": "windlass.parallel.experts.layer",
    "PipelineModule": "windlass.parallel.pipeline.module",
    "StackedMLP": "windlass.parallel.experts.mlp",
    "TiedLayerSpec": "windlass.parallel.pipeline.specs",
    "WindlassError": "windlass.base.errors",
    "add_config_arguments": "windlass.launch.arguments",
    "from_pretrained": "windlass.from_pretrained",
    "init_distributed": "windlass.comm.bootstrap",
    "initialize": "windlass.initialize",
    "read_checkpoint": "windlass.checkpoint.plain_torch",
    "register_experts": "windlass.parallel.experts.families",
}
_PACKAGES = ("checkpointing", "optim", "topology", "zero")


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(importlib.import_module(_HOMES[name]), name)
    elif name in _PACKAGES:
        value = importlib.import_module(f"windlass.{name}")
    else:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    globals()[name] = value  # asked for once
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Python binds an imported submodule to its package; a function of its name stays the function all the same."""

    def __setattr__(self, name: str, value: Any) -> None:
        shadows = name in ("from_pretrained", "initialize") and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if shadows else value)


sys.modules[__name__].__class__ = _Package
