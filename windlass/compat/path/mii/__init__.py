"""Stand-in for package `mii`: the functions of DeepSpeed-MII over windlass's inference engine."""

from typing import Any

from windlass.compat.mii_deployment import MiiClient, client, serve
from windlass.compat.mii_pipeline import MiiPipeline, MiiResponse, pipeline

__all__ = ["MiiClient", "MiiPipeline", "MiiResponse", "client", "pipeline", "serve"]

_LEGACY = frozenset(
    {"MIIServer", "MIIClient", "mii_query_handle", "deploy", "terminate", "DeploymentType", "TaskType", "MIIConfig"}
    | {"ModelConfig", "aml_output_path", "get_supported_models", "async_pipeline"}
)


def __getattr__(name: str) -> Any:
    if name in _LEGACY:
        raise AttributeError(f"mii.{name} is of MII's older interface; use mii.pipeline, or mii.serve and mii.client")
    raise AttributeError(f"module 'mii' has no attribute {name!r}")
