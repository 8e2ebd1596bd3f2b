"""The `compile` section: compilation of the engine."""

from __future__ import annotations

from typing import Literal

from windlass.config.config_section import ConfigSection, Count
from windlass.config.key_status import refused


class CompileConfig(ConfigSection):
    """Compiler passes over the whole training step."""

    refusal = "not yet built: compilation of the engine; compile modules with torch.compile, and delete the key"

    deepcompile: bool = refused(False, "")
    autoep_non_moe: bool = refused(False, "")
    free_activation: bool = refused(False, "")
    free_activation_threshold: Count = refused(10_485_760, "")
    offload_activation: bool = refused(False, "")
    offload_activation_pin_memory: bool = refused(True, "")
    offload_opt_states: bool = refused(False, "")
    double_buffer: bool = refused(True, "")
    symmetric_memory: bool = refused(False, "")
    debug_log: bool = refused(False, "")
    offload_parameters: bool = refused(False, "")
    sync_before_reduce: bool = refused(False, "")
    sync_after_reduce: bool = refused(False, "")
    sync_before_allgather: bool = refused(False, "")
    sync_after_allgather: bool = refused(False, "")
    keep_int_input_tensors: bool = refused(True, "")
    keep_all_input_tensors: bool = refused(False, "")
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = refused(None, "")

    def requested_key(self) -> str | None:
        for key in ("deepcompile", "passes", "autoep_non_moe"):
            if getattr(self, key):
                return key
        return None
