"""The `compile` section: torch.compile of the model, and compiler passes of DeepSpeed."""

from __future__ import annotations

from typing import Any, Literal

from windlass.config.config_section import ConfigSection, Count
from windlass.config.key_status import accepted, honoured, refused

_REASON = "DeepCompile is not built; set compile.enabled, which calls torch.compile, and delete the key"
_OPTION = "an option of DeepCompile, which is not built"


class CompileConfig(ConfigSection):
    """Compilation of the model by torch.compile, and DeepSpeed's compiler passes over the training step."""

    enabled: bool = honoured(False, windlass_only=True)
    """Call `engine.compile` in `initialize`: torch.compile of the model's forward, or at stage 3 of the forward of each
    innermost block."""
    backend: str = honoured("inductor", windlass_only=True)
    """Back end of torch.compile."""
    kwargs: dict[str, Any] = honoured(dict, windlass_only=True)
    """Other arguments of torch.compile, such as `{"mode": "max-autotune"}`."""
    deepcompile: bool = refused(False, _REASON)
    autoep_non_moe: bool = refused(False, _REASON)
    free_activation: bool = accepted(False, _OPTION)
    free_activation_threshold: Count = accepted(10_485_760, _OPTION)
    offload_activation: bool = accepted(False, _OPTION)
    offload_activation_pin_memory: bool = accepted(True, _OPTION)
    offload_opt_states: bool = accepted(False, _OPTION)
    double_buffer: bool = accepted(True, _OPTION)
    symmetric_memory: bool = accepted(False, _OPTION)
    debug_log: bool = accepted(False, _OPTION)
    offload_parameters: bool = accepted(False, _OPTION)
    sync_before_reduce: bool = accepted(False, _OPTION)
    sync_after_reduce: bool = accepted(False, _OPTION)
    sync_before_allgather: bool = accepted(False, _OPTION)
    sync_after_allgather: bool = accepted(False, _OPTION)
    keep_int_input_tensors: bool = accepted(True, _OPTION)
    keep_all_input_tensors: bool = accepted(False, _OPTION)
    passes: list[Literal["z1", "z3", "autosp", "autotp"]] | None = refused(None, _REASON)
