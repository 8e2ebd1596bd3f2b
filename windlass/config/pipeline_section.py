"""The `pipeline` section: partition of layers into stages, and the schedule of micro-batches."""

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
    """Distribution of layers over the ranks along pp."""

    stages: Positive | Literal["auto"] = honoured("auto")
    """Same as parallel.pp; "auto": the value of parallel.pp."""
    partition: Annotated[str, AfterValidator(_check_partition)] = honoured("best")
    """Quantity that is balanced between stages: parameters ("parameters" or "best"), layers ("uniform"), measured time
    ("time"), or layers whose class matches ("type:REGEX")."""
    activation_checkpoint_interval: Count = honoured(0)
    """Save only the inputs of every group of this many layers and recompute the group in the backward; 0: save all."""
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero-bubble"] = honoured("1f1b", windlass_only=True)
    """Order of forwards and backwards. 1f1b: one forward, one backward; gpipe: all forwards first; interleaved: several
    parts of the model on each rank; zero-bubble: weight gradients are computed while a rank would wait."""
    micro_batches: Positive | None = honoured(None, windlass_only=True)
    """Number of micro-batches in one step: another name of gradient_accumulation_steps."""
    virtual_stages: Positive | None = honoured(None, windlass_only=True)
    """Number of model parts on each rank; null: 2 if the schedule is interleaved, else 1."""
    unshard_per: Literal["step", "micro-batch"] = honoured("step", windlass_only=True)
    """With ZeRO: unshard parameters and reduce gradients once a step, or once a micro-batch, which saves memory."""

    seed_layers: bool = accepted(
        False, "DeepSpeed itself does not read it; PipelineModule has an argument of this name"
    )
    pipe_partitioned: bool = accepted(
        True, "each rank along tp sends its full tensor to the same tp rank of the next stage"
    )
    grad_partitioned: bool = accepted(
        True, "each rank along tp sends its full tensor to the same tp rank of the next stage"
    )
    use_reentrant: bool = accepted(True, "both ways recompute layers to the same values")

    @property
    def resolved_virtual_stages(self) -> int:
        """`virtual_stages` with its default filled in."""
        return self.virtual_stages or (2 if self.schedule == "interleaved" else 1)

    @property
    def partition_method(self) -> str:
        """`partition` with "best" replaced by "parameters"."""
        return "parameters" if self.partition == "best" else self.partition
