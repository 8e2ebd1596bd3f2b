"""World sizes that may change while a run goes on."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from windlass.config.config_section import ConfigSection, Float, Int, Positive
from windlass.config.key_status import accepted, honoured, refused

_MODEL = "axes of the model are in the section parallel, and the batch is for the ranks that read; write 1"


class Elasticity(ConfigSection):
    """One batch size for many numbers of ranks, computed as DeepSpeed documents it: see docs/hangs.md."""

    enable_key = "enabled"

    enabled: bool = honoured(False)
    """Compute the batch from the keys below, so that it is the same on every number of ranks that it allows."""
    max_train_batch_size: Positive = honoured(2000)
    """The largest batch that may come out."""
    micro_batch_sizes: Annotated[list[Positive], Field(min_length=1)] = honoured([2, 4, 6])
    """Micro-batch sizes to choose from; the largest that divides a rank's share is taken."""
    min_gpus: Positive = honoured(1)
    """The fewest ranks that read to be ready for."""
    max_gpus: Positive = honoured(10_000)
    """The most ranks that read to be ready for."""
    min_time: Int = accepted(0, "a hint to a scheduler, which DeepSpeed itself does not read")
    prefer_larger_batch: bool = honoured(True, aliases=("prefer_large_batch",))
    """Of two batches that fit equally many numbers of ranks take the larger."""
    ignore_non_elastic_batch_info: bool = honoured(False)
    """Let the batch sizes outside this section be ignored; else they are an error beside it."""
    version: Float = accepted(
        0.2,
        "its versions differ in keys of model parallelism, which are refused, and on a number of ranks that does not "
        "fit: 0.2 changes the batch there, here that is an error in either",
    )
    num_gpus_per_node: Positive = refused(1, _MODEL)
    model_parallel_size: Positive = refused(1, _MODEL)
