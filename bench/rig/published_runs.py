"""Published training runs, with their hardware and settings, that the simulator is compared with.

No constant of the simulator is fitted to a row. Settings that a source leaves open are in `assumed`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from windlass.parallel.model_shape import ModelShape
from windlass.simulate.cluster import Cluster
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.hardware_parts import DEVICES
from windlass.simulate.step_prediction import StepPrediction

_VOCABULARY = 51_200  # padded vocabulary of Megatron's GPT models


@dataclass(frozen=True)
class PublishedRun:
    """Run and its published figure.

    Attributes:
        row: Number of the published claim; several runs may share it.
        framework: Program that trained the model.
        source: Paper or page.
        figure: Published value, in `unit`.
        unit: `TFLOP/s` (of one device, by Megatron's formula, which counts recomputation), `tokens/s` (of one device)
            or `s` (a step).
        config: The configuration, without the batch sizes, which follow from the numbers of samples.
        assumed: Settings that the source does not give.
    """

    row: int
    framework: str
    name: str
    source: str
    figure: float
    unit: str
    shape: ModelShape
    cluster: Cluster
    ranks: int
    samples: int
    length: int
    config: dict[str, Any]
    micro_batches: int = 1
    checkpointing: str = "none"
    fused: bool = True
    linear_dtype: str = ""
    assumed: str = ""
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def kernels(self) -> tuple[str, str]:
        """Device and framework, which decide the share of the device's rates that kernels reach."""
        return self.cluster.device.name, self.framework

    def full_config(self) -> dict[str, Any]:
        """Return the configuration of windlass."""
        return {
            "train_micro_batch_size_per_gpu": self.samples,
            "gradient_accumulation_steps": self.micro_batches,
            **self.config,
        }

    def predicted(self, found: StepPrediction) -> float:
        """Return the predicted value in the published unit."""
        if self.unit == "s":
            return found.seconds
        if self.unit == "tokens/s":
            return found.tokens_per_second / self.ranks
        return megatron_flops(self.shape, found.tokens, self.length) / found.seconds / self.ranks / 1e12


def megatron_flops(shape: ModelShape, tokens: int, length: int) -> float:
    """Return 96 B s l h^2 (1 + s / 6h + V / 16 l h), which counts the recomputation of every layer (Narayanan et al.
    2021b, appendix)."""
    h, layers = shape.hidden, shape.layers
    return 96.0 * tokens * layers * h * h * (1 + length / (6 * h) + shape.vocabulary / (16 * layers * h))


def gpt(hidden: int, layers: int, heads: int) -> ModelShape:
    """Return the sizes of a GPT: two matrices of 4 x hidden, tied embeddings."""
    return ModelShape(hidden, layers, heads, _VOCABULARY, gated=False, tied=True)


def llama(size: str) -> ModelShape:
    """Return the sizes of Llama 3.1."""
    hidden, layers, heads, inner = {
        "8b": (4096, 32, 32, 14_336),
        "70b": (8192, 80, 64, 28_672),
        "405b": (16_384, 126, 128, 53_248),
    }[size]
    return ModelShape(hidden, layers, heads, 128_256, kv_heads=8, intermediate=inner)


def _grand_teton() -> Cluster:
    return replace(known_cluster("dgx-h100"), device=DEVICES["h100-96"], name="Grand Teton")


_HALF = {"fp16": {"enabled": True}, "communication_data_type": "fp16"}
_BF16 = {"bf16": {"enabled": True}}
_TITAN = "torchtitan benchmarks, 2024-12"
_AZURE = "DeepSpeed blog, 2022-07-26"
_INFINITY = "arXiv 2104.07857, figures 5a and 5c"
_TABLE_1 = "model sizes, batch and mp of the paper's Table 1, from memory"
# stage3_* of examples_deepspeed/azure/run-175b.sh and run-1t.sh of Megatron-DeepSpeed, which the page names
_AZURE_ZERO = {
    "stage": 3,
    "stage3_max_live_parameters": 3_000_000_000,
    "stage3_max_reuse_distance": 3_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
}


def _infinity(name: str, figure: float, hidden: int, layers: int, batch: float, hosts: int, tiers: str) -> PublishedRun:
    tp = {32: 4, 1: 1}[hosts] if hidden < 88_000 else 8
    zero: dict[str, Any] = {"stage": 3}
    if "s" in tiers:
        zero["offload_optimizer"] = {"device": "nvme", "nvme_path": "/nvme"}
    if "p" in tiers:
        zero["offload_param"] = {"device": "nvme" if "n" in tiers else "cpu", "nvme_path": "/nvme"}
    return PublishedRun(
        11, "DeepSpeed", f"ZeRO-Infinity {name}, {hosts} DGX-2", _INFINITY, figure, "TFLOP/s",
        gpt(hidden, layers, hidden // 128), known_cluster("dgx2"), 16 * hosts, int(batch * tp), 1024,
        {**_HALF, "zero_optimization": zero, "parallel": {"tp": tp, "activation_tier": "cpu", "recompute": True}},
        1, "full", assumed=_TABLE_1,
    )  # fmt: skip


_TITAN_ZERO = {"stage": 3, "stage3_max_reuse_distance": 0, "stage3_prefetch_bucket_size": 1_000_000_000}
# At the run's commit (9dec370), a pipeline has as many micro-batches as ranks, and two parts for each rank of an
# interleaved schedule, unless set (pipelining_utils.py). FSDP gathers parameters once a step (apply_fsdp in
# parallelize_llama.py), as stage 1 does.
_TITAN_PIPELINE = {"stage": 1}


def _titan(row: int, name: str, figure: float, size: str, ranks: int, samples: int, length: int, **other: Any) -> Any:
    given = {"checkpointing": "full", "fused": True, "linear_dtype": "fp8", **other}
    parallel = given.pop("parallel", {})
    pipeline = given.pop("pipeline", {})
    zero = given.pop("zero", _TITAN_ZERO)
    config = {
        **_BF16,
        "communication_data_type": "fp32",
        "zero_optimization": zero,
        "parallel": parallel,
        "pipeline": pipeline,
    }
    return PublishedRun(
        row, "torchtitan", name, _TITAN, figure, "tokens/s", llama(size), given.pop("cluster", _grand_teton()), ranks,
        samples, length, config, given.pop("micro_batches", 1), **given,
    )  # fmt: skip


def published_runs() -> list[PublishedRun]:
    """Return all rows."""
    runs = [
        _infinity("0.5T", 46, 18_432, 124, 7, 32, ""),
        _infinity("1T", 49, 25_600, 128, 5, 32, ""),
        _infinity("5T", 44, 49_152, 174, 3, 32, "spn"),
        _infinity("10T", 43, 65_536, 200, 2, 32, "spn"),
        _infinity("20T", 34, 90_112, 205, 1.25, 32, "spn"),
        _infinity("0.01T", 45, 4096, 50, 8, 1, ""),
        _infinity("0.05T", 44, 8192, 62, 26, 1, "sp"),
        _infinity("0.1T", 41, 8192, 125, 24, 1, "sp"),
        _infinity("0.5T", 33, 18_432, 124, 8, 1, "spn"),
        _infinity("1T", 27, 25_600, 128, 7, 1, "spn"),
        PublishedRun(
            11, "DeepSpeed", "ZeRO-Offload 0.01T, 1 DGX-2", _INFINITY, 35, "TFLOP/s", gpt(4096, 50, 32),
            known_cluster("dgx2"), 16, 8, 1024,
            {**_HALF, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
            1, "full", assumed="the batch of ZeRO-Infinity's run",
        ),
        PublishedRun(
            11, "DeepSpeed", "3D parallelism 0.5T, 32 DGX-2", _INFINITY, 47, "TFLOP/s", gpt(18_432, 124, 144),
            known_cluster("dgx2"), 512, 1, 1024,
            {**_HALF, "zero_optimization": {"stage": 1}, "parallel": {"tp": 8, "pp": 32}},
            7 * 256, "full", assumed="tp 8, pp 32, micro-batch 1, the batch of ZeRO-Infinity's run",
        ),
    ]  # fmt: skip
    for hosts, seconds in ((280, 60.1), (350, 50.2), (420, 44.4)):
        data = hosts * 8 // 280
        runs.append(
            PublishedRun(
                27, "Megatron", f"MT-NLG 530B, {hosts} DGX-A100", "arXiv 2201.11990, section 2.4", seconds, "s",
                gpt(20_480, 105, 128), known_cluster("dgx-a100"), hosts * 8, 1, 2048,
                {**_BF16, "communication_data_type": "bf16", "zero_optimization": {"stage": 1},
                 "parallel": {"tp": 8, "pp": 35}},
                1920 // data, "full", assumed="micro-batch 1; attention is not fused", extra={"attention": 0.0},
            )
        )  # fmt: skip
    for name, figure, sizes, ranks, samples, length in (
        ("175B", 204.49, (12_288, 96, 96), 256, 32, 512),
        ("530B", 171.37, (20_480, 105, 128), 1024, 8, 1024),
        ("1T", 165.36, (25_600, 128, 160), 1024, 8, 1024),
        ("2T", 157.0, (32_768, 160, 128), 1024, 8, 1024),
    ):
        # run-175b.sh keeps the states on the device; run-1t.sh offloads them
        tiers = {} if name == "175B" else {"offload_optimizer": {"device": "cpu"}}
        runs.append(
            PublishedRun(
                28, "DeepSpeed", f"ZeRO-3 {name}, {ranks} A100", _AZURE, figure, "TFLOP/s", gpt(*sizes),
                known_cluster("dgx-a100"), ranks, samples, length,
                {**_HALF, "zero_optimization": {**_AZURE_ZERO, **tiers},
                 "parallel": {"activation_tier": "cpu", "recompute": True}},
                1, "full", assumed="attention is not fused; one micro-batch a step; activations in host memory" +
                ("; micro-batch 8" if name == "530B" else ""), extra={"attention": 0.0},
            )
        )  # fmt: skip
    one = {"checkpointing": "selective", "linear_dtype": ""}
    runs += [
        _titan(59, "8B, 8 H100, eager", 5762, "8b", 8, 2, 8192, **{**one, "fused": False}),
        _titan(59, "8B, 8 H100, compiled", 6667, "8b", 8, 2, 8192, **one),
        _titan(59, "8B, 8 H100, compiled, FP8", 8532, "8b", 8, 2, 8192, checkpointing="selective"),
        _titan(59, "8B, 128 H100, eager", 5605, "8b", 128, 2, 8192, **{**one, "fused": False}),
        _titan(59, "8B, 128 H100, compiled", 6514, "8b", 128, 2, 8192, **one),
        _titan(59, "8B, 128 H100, compiled, FP8", 8380, "8b", 128, 2, 8192, checkpointing="selective"),
    ]
    for length, ranks, figure in ((32_768, 1, 3890), (65_536, 2, 2540), (131_072, 4, 1071), (262_144, 8, 548)):
        runs.append(
            _titan(60, f"8B, 8 H100, CP {ranks}, {length // 1024}K", figure, "8b", 8, 1, length,
                   parallel={"sp": ranks, "sp_mode": "ring"} if ranks > 1 else {})
        )  # fmt: skip
    runs += [
        _titan(60, "70B, 256 H100, TP 8", 829, "70b", 256, 16, 8192, parallel={"tp": 8, "tp_sequence_norms": True}),
        _titan(60, "70B, 256 H100, async TP 8", 876, "70b", 256, 16, 8192,
               parallel={"tp": 8, "tp_sequence_norms": True}, assumed="async TP is not simulated"),
        _titan(60, "405B, 512 H100, TP 8, PP 8, 1F1B", 100, "405b", 512, 4, 8192, micro_batches=8,
               parallel={"tp": 8, "pp": 8, "tp_sequence_norms": True}, zero=_TITAN_PIPELINE,
               assumed="async TP is not simulated"),
        _titan(60, "405B, 512 H100, TP 8, PP 8, interleaved", 128, "405b", 512, 4, 8192, micro_batches=8,
               parallel={"tp": 8, "pp": 8, "tp_sequence_norms": True}, zero=_TITAN_PIPELINE,
               pipeline={"schedule": "interleaved", "virtual_stages": 2},
               assumed="async TP is not simulated"),
    ]  # fmt: skip
    for ranks, figure in ((32, 10_938), (64, 10_753)):
        runs.append(
            replace(
                _titan(61, f"8B, {ranks} H200, compiled, FP8", figure, "8b", ranks, 2, 8192,
                       checkpointing="selective", cluster=known_cluster("dgx-h200")),
                source="torchtitan benchmarks, 2025-06 (H200)", assumed="selective checkpointing",
            )
        )  # fmt: skip
    return runs


def cluster_of(run: PublishedRun) -> Cluster:
    """Return the cluster with as many hosts as the run needs, and attention as the run computed it."""
    place = run.cluster.with_devices(run.ranks)
    if "attention" in run.extra:
        place = replace(place, device=replace(place.device, attention_efficiency=run.extra["attention"]))
    return place
