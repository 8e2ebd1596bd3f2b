"""DeepSpeed's `tensor_parallel` section, and the user's rules of cutting, however they are written."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from windlass.config.config_section import ConfigSection, Count, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused
from windlass.config.regex_pattern import check_pattern

_OWN_PLAN_REASON = "the model's own plan says how it is cut"


def _check_patterns(patterns: list[str]) -> list[str]:
    return [check_pattern(pattern) for pattern in patterns]


class TensorParallelGroupConfig(ConfigSection):
    """Size and group of the tensor-parallel axis."""

    tp_size: Positive = honoured(1)
    """As parallel.tp; 1 says nothing."""
    tp_grain_size: Positive = accepted(1, "which rank has which rows changes no value")
    mpu: Any = refused(None, "groups come from the axes' sizes; pass an mpu to initialize, or delete the key")
    tp_group: Any = refused(None, "groups come from the axes' sizes; write parallel.tp, and delete the key")


class TensorParallelLayerSpec(ConfigSection):
    """How the layers that match some patterns are cut."""

    patterns: Annotated[Names, AfterValidator(_check_patterns)] = honoured(list)
    """Regular expressions for the start of a weight's name."""
    partition_type: Literal["row", "column", "skip"] = honoured("column")
    """column: outputs are cut; row: inputs; skip: each rank has all."""
    model_types: Names | None = honoured(None)
    """The rule is of these alone (`config.model_type` of a model of transformers)."""
    shape: list[Any] | None = refused(None, "the parts of a fused matrix are found by the model's own plan; delete it")
    partition_dim: Int | None = refused(None, "partition_type says which; delete it")
    gather_output: bool = refused(False, "not built: outputs that are gathered again; write false")
    grad_allreduce: bool = refused(False, "gradients are added up wherever they are parts; write false")


class TensorParallelPartitionConfig(ConfigSection):
    """The user's own rules of cutting."""

    use_default_specs: bool = honoured(True)
    """What no rule matches is cut by the model's own plan; false: each rank has all of it."""
    layer_specs: list[TensorParallelLayerSpec] = honoured(list)
    """The first that matches counts; lines of parallel.tensor_table go before."""


class TensorParallelConfig(ConfigSection):
    """Matrices cut over ranks."""

    autotp_size: Count = honoured(0)
    """As parallel.tp; 0 and 1 say nothing."""
    tp: TensorParallelGroupConfig = honoured(TensorParallelGroupConfig, aliases=("tensor_parallel",))
    """Another place for the size."""
    tp_overlap_comm: bool = honoured(False)
    """As parallel.tp_overlap_chunks 2, where that is absent."""
    partition_config: TensorParallelPartitionConfig | None = honoured(None)
    """How single layers are cut."""

    dtype: Any = accepted("torch.float16", "dtypes follow from the sections fp16 and bf16")
    vocab_parallel_lm_head: bool | None = accepted(
        None, "cut like the embedding wherever it can be; losses are the same"
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = accepted(
        "torch", "one way computes the loss of a vocabulary that is cut"
    )
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = accepted(
        None, _OWN_PLAN_REASON
    )
    keep_module_on_host: bool = accepted(False, "where parameters rest is said by zero_optimization.offload_param")
    injection_policy_tuple: list[Any] | None = refused(
        None, "write parallel.tensor_table, which goes by names of modules"
    )
    kernel_inject: bool = refused(
        False, "retired: replaced modules; write false", aliases=("replace_with_kernel_inject",)
    )


_STYLE_OF_PARTITION_TYPE = {"row": "row", "column": "column", "skip": "replicated"}


def merge_tensor_tables(
    tensor_table: Mapping[str, str] | None,
    section: TensorParallelConfig,
    names: Iterable[str],
    model_type: str | None = None,
) -> dict[str, str]:
    """The user's lines of cutting in one table, of which the last that fits counts: DeepSpeed's specs, each written out
    for the modules that it is the first to match, and then `table`.

    Args:
        names: of the model's linear layers.
        model_type: of a model of transformers; specs of others are left out.
    """
    own = dict(tensor_table or {})
    found: dict[str, str] = {}
    given = section.partition_config or TensorParallelPartitionConfig()
    specs = [
        spec
        for spec in given.layer_specs
        if spec.model_types is None or model_type is None or model_type in spec.model_types
    ]
    for name in names:
        fitting = (spec for spec in specs if any(re.match(pattern, f"{name}.weight") for pattern in spec.patterns))
        spec = next(fitting, None)
        if spec is not None:
            found[re.escape(name)] = _STYLE_OF_PARTITION_TYPE[spec.partition_type]
        elif not given.use_default_specs:
            found[re.escape(name)] = "replicated"
    return {**{key: cut for key, cut in found.items() if key not in own}, **own}
