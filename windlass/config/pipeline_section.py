"""The `pipeline` section: how layers become stages, and in which order micro-batches pass them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator
from pydantic_core import PydanticCustomError

from windlass.config.config_section import ConfigSection, Count, Positive
from windlass.config.key_status import accepted, honoured
from windlass.config.regex_pattern import check_pattern

_PARTITIONS = ("best", "parameters", "uniform", "time")


def _check_partition(value: str) -> str:
    if value.startswith("type:"):
        check_pattern(value.removeprefix("type:"))
    elif value not in _PARTITIONS:
        raise PydanticCustomError(
            "partition", 'Input should be "parameters", "uniform", "time", "best" or "type:" and a regular expression'
        )
    return value


class PipelineConfig(ConfigSection):
    """Layers spread over the ranks along pp."""

    stages: Positive | Literal["auto"] = honoured("auto")
    """As parallel.pp; "auto": what that says."""
    partition: Annotated[str, AfterValidator(_check_partition)] = honoured("best")
    """What stages have alike: "parameters" ("best" is that), layers ("uniform"), measured "time", or the layers whose
    class matches ("type:REGEX")."""
    activation_checkpoint_interval: Count = honoured(0)
    """Keep only the inputs of every so many layers and compute the rest again; 0 keeps all."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = honoured("1f1b", windlass_only=True)
    """The order of forwards and backwards: one and one in turn, all forwards first, several parts of the model a rank,
    or weight gradients where a rank would wait."""
    micro_batches: Positive | None = honoured(None, windlass_only=True)
    """Micro-batches that pass the stages in one step: another name of gradient_accumulation_steps."""
    virtual_stages: Positive | None = honoured(None, windlass_only=True)
    """Parts of the model that each rank has; null is 2 where the schedule is interleaved, else 1."""
    unshard_per: Literal["step", "micro-batch"] = honoured("step", windlass_only=True)
    """Under ZeRO: parameters are gathered and gradients reduced once a step, or once a micro-batch with less memory."""

    seed_layers: bool = accepted(False, "DeepSpeed itself reads it nowhere; PipelineModule has an argument of the name")
    pipe_partitioned: bool = accepted(
        True, "each rank along tp sends what it has, whole, to its like in the next stage"
    )
    grad_partitioned: bool = accepted(
        True, "each rank along tp sends what it has, whole, to its like in the next stage"
    )
    use_reentrant: bool = accepted(True, "layers are computed again to the same values in either way")

    @property
    def resolved_virtual_stages(self) -> int:
        """`virtual_stages` with its default filled in."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)

    @property
    def partition_method(self) -> str:
        """`partition` in one spelling."""
        return "parameters" if self.partition == "best" else self.partition
