"""The `elasticity` section: runs whose world size may change."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from windlass.config.config_section import ConfigSection, Float, Int, Positive
from windlass.config.key_status import accepted, honoured, refused

_MODEL = "axis sizes are in the section parallel, and the batch is for data-loading ranks; write 1"


class Elasticity(ConfigSection):
    """One batch size for many numbers of ranks, computed as DeepSpeed documents it; see docs/hangs.md."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Compute the batch sizes from the keys below, so that the batch is the same for every allowed number of ranks."""
    max_train_batch_size: Positive = honoured(2000)
    """Upper bound on the computed batch size."""
    micro_batch_sizes: Annotated[list[Positive], Field(min_length=1)] = honoured([2, 4, 6])
    """Micro-batch sizes to choose from. The largest that divides the number of samples of a rank in a step is used."""
    min_gpus: Positive = honoured(1)
    """Smallest number of data-loading ranks to support."""
    max_gpus: Positive = honoured(10_000)
    """Largest number of data-loading ranks to support."""
    min_time: Int = accepted(0, "a hint to a scheduler, which DeepSpeed itself does not read")
    prefer_larger_batch: bool = honoured(True, aliases=("prefer_large_batch",))
    """Use the larger of two batch sizes that fit equally many numbers of ranks."""
    ignore_non_elastic_batch_info: bool = honoured(False)
    """Ignore batch sizes that are set outside this section. If false, they are an error while this section is
    enabled."""
    version: Float = accepted(
        0.2,
        "versions differ in keys of model parallelism, which are refused, and for a number of ranks that does not fit: "
        "0.2 then changes the batch; windlass raises an error in both",
    )
    num_gpus_per_node: Positive = refused(1, _MODEL)
    model_parallel_size: Positive = refused(1, _MODEL)
