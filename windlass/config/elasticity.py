"""World sizes that may change while a run goes on."""

from __future__ import annotations

from windlass.config.section import Float, Int, Positive, Section
from windlass.config.verdict import refused


class Elasticity(Section):
    """Batch sizes that fit many world sizes."""

    refusal = "not yet built: elastic training; write false"
    switch = "enabled"

    enabled: bool = refused(False, "")
    max_train_batch_size: Positive = refused(2000, "")
    micro_batch_sizes: list[Int] = refused([2, 4, 6], "")
    min_gpus: Positive = refused(1, "")
    max_gpus: Positive = refused(10_000, "")
    min_time: Int = refused(0, "")
    prefer_larger_batch: bool = refused(True, "", also=("prefer_large_batch",))
    ignore_non_elastic_batch_info: bool = refused(False, "")
    version: Float = refused(0.2, "")
    num_gpus_per_node: Positive = refused(1, "")
    model_parallel_size: Positive = refused(1, "")
