"""Sections that DeepSpeed removed or never read. The schema has them so that messages can name them."""

from __future__ import annotations

from typing import Any

from pydantic import ConfigDict

from windlass.config.config_section import ConfigSection, Positive
from windlass.config.key_status import refused


class Nebula(ConfigSection):
    """Azure's asynchronous checkpoint service."""

    refusal = "retired: the Nebula checkpoint service; write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")
    enable_nebula_load: bool = refused(True, "")
    nebula_load_path: str | None = refused(None, "")
    persistent_storage_path: str | None = refused(None, "")
    persistent_time_interval: Positive = refused(100, "")
    num_of_version_in_retention: Positive = refused(2, "")


class Amp(ConfigSection):
    """Apex mixed precision; DeepSpeed passed other keys on to `apex.amp.initialize`."""

    model_config = ConfigDict(extra="allow")
    refusal = "retired: apex mixed precision; use torch_autocast, bf16 or fp16, and write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")


class MsAmp(ConfigSection):
    """Microsoft's fp8 training, in the form that accelerate writes."""

    model_config = ConfigDict(extra="allow")
    refusal = "retired: MS-AMP; use bf16, and write false"
    enable_key = "enabled"

    enabled: bool = refused(False, "")


class InferenceInTrainingConfig(ConfigSection):
    """Inference options that transformers reads from a training configuration."""

    model_config = ConfigDict(extra="allow")
    refusal = "not yet built: serving from a training configuration; delete the section"

    def requested_key(self) -> str | None:
        return next(iter(self.__pydantic_extra__ or ()), None)

    def value_at(self, dotted: str) -> Any:
        return (self.__pydantic_extra__ or {}).get(dotted, self)
