"""DeepSpeed's `tensor_parallel` section, and its merger with `parallel.tensor_table`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from windlass.config.config_section import ConfigSection, Count, Int, Names, Positive
from windlass.config.key_status import accepted, honoured, refused
from windlass.config.regex_pattern import check_pattern

_OWN_PLAN_REASON = "the model's own plan determines its sharding"


def _check_patterns(patterns: list[str]) -> list[str]:
    return [check_pattern(pattern) for pattern in patterns]


class TensorParallelGroupConfig(ConfigSection):
    """Size and group of the tensor-parallel axis."""

    tp_size: Positive = honoured(1)
    """Same as parallel.tp; 1 has no effect."""
    tp_grain_size: Positive = accepted(1, "the assignment of rows to ranks changes no value")
    mpu: Any = refused(None, "groups follow from the axis sizes; pass an mpu to initialize, or delete the key")
    tp_group: Any = refused(None, "groups follow from the axis sizes; write parallel.tp, and delete the key")


class TensorParallelLayerSpec(ConfigSection):
    """Sharding of the layers that match some patterns."""

    patterns: Annotated[Names, AfterValidator(_check_patterns)] = honoured(list)
    """Regular expressions for the start of a weight's name."""
    partition_type: Literal["row", "column", "skip"] = honoured("column")
    """column: shard the outputs; row: shard the inputs; skip: replicate the layer."""
    model_types: Names | None = honoured(None)
    """Model types to which the rule is limited (`config.model_type` of a transformers model)."""
    shape: list[Any] | None = refused(None, "the model's own plan determines the parts of a fused matrix; delete it")
    partition_dim: Int | None = refused(None, "partition_type determines it; delete it")
    gather_output: bool = refused(False, "not built: all-gather of outputs; write false")
    grad_allreduce: bool = refused(False, "partial gradients are always all-reduced; write false")


class TensorParallelPartitionConfig(ConfigSection):
    """The user's own sharding rules."""

    use_default_specs: bool = honoured(True)
    """Use the model's own plan for layers that no rule matches; false: replicate these layers."""
    layer_specs: list[TensorParallelLayerSpec] = honoured(list)
    """Sharding rules. The first rule that matches a layer applies; entries of parallel.tensor_table override it."""


class TensorParallelConfig(ConfigSection):
    """Sharding of matrices over ranks."""

    autotp_size: Count = honoured(0)
    """Same as parallel.tp; 0 and 1 have no effect."""
    tp: TensorParallelGroupConfig = honoured(TensorParallelGroupConfig, aliases=("tensor_parallel",))
    """Section whose `tp_size` may set the number of ranks in place of autotp_size."""
    tp_overlap_comm: bool = honoured(False)
    """Same as parallel.tp_overlap_chunks 2, if that key is absent."""
    partition_config: TensorParallelPartitionConfig | None = honoured(None)
    """Sharding of single layers."""

    dtype: Any = accepted("torch.float16", "dtypes follow from the sections fp16 and bf16")
    vocab_parallel_lm_head: bool | None = accepted(
        None, "sharded like the embedding where possible; losses are the same"
    )
    vocab_parallel_ce_backend: Literal["torch", "liger"] = accepted(
        "torch", "there is one implementation of the loss of a sharded vocabulary"
    )
    preset_model: Literal["llama", "bloom", "chatglm", "mixtral", "deepseek_v2", "qwen2", "phi3"] | None = accepted(
        None, _OWN_PLAN_REASON
    )
    keep_module_on_host: bool = accepted(False, "zero_optimization.offload_param sets the tier of parameters")
    injection_policy_tuple: list[Any] | None = refused(
        None, "write parallel.tensor_table, which matches names of modules"
    )
    kernel_inject: bool = refused(
        False, "retired: replacement of modules by fused kernels; write false", aliases=("replace_with_kernel_inject",)
    )


_STYLE_OF_PARTITION_TYPE = {"row": "row", "column": "column", "skip": "replicated"}


def merge_tensor_tables(
    tensor_table: Mapping[str, str] | None,
    section: TensorParallelConfig,
    names: Iterable[str],
    model_type: str | None = None,
) -> dict[str, str]:
    """Merge the user's sharding rules into one table, in which the last match applies.

    The table begins with DeepSpeed's specs, each expanded to the names of the layers that match no earlier spec, and
    ends with `tensor_table`.

    Args:
        names: names of the model's linear layers.
        model_type: type of a transformers model; specs for other types are left out.
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
    return {**{key: style for key, style in found.items() if key not in own}, **own}
