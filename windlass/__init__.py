"""Public names of windlass, each imported at first use: `import windlass` alone does not import torch."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from windlass import checkpointing as checkpointing
    from windlass import optim as optim
    from windlass import parameter_server as parameter_server
    from windlass import topology as topology
    from windlass import zero as zero
    from windlass.base.errors import WindlassError as WindlassError
    from windlass.checkpoint.torch_state_dicts import read_checkpoint as read_checkpoint
    from windlass.comm.bootstrap import init_distributed as init_distributed
    from windlass.engine.training_engine import Engine as Engine
    from windlass.from_pretrained import from_pretrained as from_pretrained
    from windlass.inference.async_engine import AsyncLLMEngine as AsyncLLMEngine
    from windlass.inference.inference_model import init_inference as init_inference
    from windlass.inference.llm import LLM as LLM
    from windlass.inference.llm import TextPrompt as TextPrompt
    from windlass.inference.llm import TokensPrompt as TokensPrompt
    from windlass.inference.lora_request import LoRARequest as LoRARequest
    from windlass.inference.outputs import CompletionOutput as CompletionOutput
    from windlass.inference.outputs import RequestOutput as RequestOutput
    from windlass.inference.sampling_params import BeamSearchParams as BeamSearchParams
    from windlass.inference.sampling_params import SamplingParams as SamplingParams
    from windlass.inference.sampling_params import StructuredOutputsParams as StructuredOutputsParams
    from windlass.initialize import initialize as initialize
    from windlass.launch.config_arguments import add_config_arguments as add_config_arguments
    from windlass.parallel.experts.expert_modules import register_experts as register_experts
    from windlass.parallel.experts.mixture_of_experts import MixtureOfExperts as MoE
    from windlass.parallel.experts.stacked_mlp import StackedMLP as StackedMLP
    from windlass.parallel.pipeline.layer_specs import LayerSpec as LayerSpec
    from windlass.parallel.pipeline.layer_specs import TiedLayerSpec as TiedLayerSpec
    from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential as PipelineModule
    from windlass.tracing.trace_profiler import profile as profile

__version__ = "0.1.0"

__all__ = [
    "AsyncLLMEngine",
    "BeamSearchParams",
    "CompletionOutput",
    "Engine",
    "LLM",
    "LayerSpec",
    "LoRARequest",
    "MoE",
    "PipelineModule",
    "RequestOutput",
    "SamplingParams",
    "StackedMLP",
    "StructuredOutputsParams",
    "TextPrompt",
    "TiedLayerSpec",
    "TokensPrompt",
    "WindlassError",
    "__version__",
    "add_config_arguments",
    "checkpointing",
    "from_pretrained",
    "init_distributed",
    "init_inference",
    "initialize",
    "optim",
    "parameter_server",
    "profile",
    "read_checkpoint",
    "register_experts",
    "topology",
    "zero",
]

_MODULE_OF = {
    "AsyncLLMEngine": "windlass.inference.async_engine",
    "BeamSearchParams": "windlass.inference.sampling_params",
    "CompletionOutput": "windlass.inference.outputs",
    "Engine": "windlass.engine.training_engine",
    "LLM": "windlass.inference.llm",
    "LayerSpec": "windlass.parallel.pipeline.layer_specs",
    "LoRARequest": "windlass.inference.lora_request",
    "MoE": "windlass.parallel.experts.mixture_of_experts",
    "PipelineModule": "windlass.parallel.pipeline.pipeline_sequential",
    "RequestOutput": "windlass.inference.outputs",
    "SamplingParams": "windlass.inference.sampling_params",
    "StackedMLP": "windlass.parallel.experts.stacked_mlp",
    "StructuredOutputsParams": "windlass.inference.sampling_params",
    "TextPrompt": "windlass.inference.llm",
    "TiedLayerSpec": "windlass.parallel.pipeline.layer_specs",
    "TokensPrompt": "windlass.inference.llm",
    "WindlassError": "windlass.base.errors",
    "add_config_arguments": "windlass.launch.config_arguments",
    "from_pretrained": "windlass.from_pretrained",
    "init_distributed": "windlass.comm.bootstrap",
    "init_inference": "windlass.inference.inference_model",
    "initialize": "windlass.initialize",
    "profile": "windlass.tracing.trace_profiler",
    "read_checkpoint": "windlass.checkpoint.torch_state_dicts",
    "register_experts": "windlass.parallel.experts.expert_modules",
}
# Classes whose public name differs from the class name. `windlass.compat` defines subclasses of them, with the public
# name.
_CLASS_OF = {"MoE": "MixtureOfExperts", "PipelineModule": "PipelineSequential"}
_PACKAGES = ("checkpointing", "optim", "parameter_server", "topology", "zero")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(_MODULE_OF[name]), _CLASS_OF.get(name, name))
    elif name in _PACKAGES:
        value = importlib.import_module(f"windlass.{name}")
    else:
        raise AttributeError(f"module 'windlass' has no attribute {name!r}; its public names are {', '.join(__all__)}")
    globals()[name] = value  # later accesses do not reach __getattr__
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Module type that keeps the functions `initialize` and `from_pretrained` when their submodules are imported.

    Importing such a submodule would otherwise bind the module to the name of the function.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        shadows = name in ("from_pretrained", "initialize") and isinstance(value, ModuleType)
        super().__setattr__(name, getattr(value, name) if shadows else value)


sys.modules[__name__].__class__ = _Package
