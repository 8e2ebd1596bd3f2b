"""Tests of predicted steps: bytes of each axis, times on one device, waits, tiers, and kinds of steps."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.causal_models import model_of
from windlass.base.errors import ConfigError, ModelError
from windlass.comm.mesh_shape import AXES, MeshShape
from windlass.config import load_config
from windlass.parallel.comm_volumes import StepWorkload, compute_step_volumes
from windlass.parallel.model_shape import ModelShape, from_transformers
from windlass.plan.planned_model import build_on_meta
from windlass.simulate.cluster import Cluster, Network
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.collective_cost import CollectiveCosts, RankPattern
from windlass.simulate.event_loop import EventLoop, LinkKey
from windlass.simulate.goodput import expected_goodput
from windlass.simulate.hardware_parts import DEVICES, HOSTS, DevicePart, LinkPart
from windlass.simulate.layer_work import ComputeStyle, backward_of, product
from windlass.simulate.model_blocks import global_model_flops, rank_sizes
from windlass.simulate.model_states import state_bytes_of_rank
from windlass.simulate.predict_step import predict_kinds, predict_step
from windlass.simulate.rank_units import RankUnits
from windlass.simulate.step_lanes import RankLanes
from windlass.simulate.step_tasks import StepTasks
from windlass.simulate.step_workload import describe_step, shape_of
from windlass.simulate.timeline import write_trace

DENSE = ModelShape(hidden=64, layers=4, heads=8, vocabulary=256, kv_heads=4, intermediate=128)
EXPERTS = replace(DENSE, experts=4, top_k=4, intermediate=96)
MICRO, SAMPLES, LENGTH = 2, 2, 32
KEYS = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_reuse_distance": 0,
    "stage3_max_live_parameters": 0,
}


def config(stage: int = 0, zero: dict[str, Any] | None = None, **other: Any) -> Any:
    return load_config(
        {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": MICRO,
            "zero_optimization": {"stage": stage, **(zero or {})},
            **other,
        }
    )


def place(world: int, name: str = "dgx-h100") -> Cluster:
    return known_cluster(name).with_devices(world)


AXIS_CASES = [
    *((2, {}, stage, {}) for stage in range(4)),
    (2, {"tp": 2}, 0, {}),
    (2, {"tp": 2, "recompute": True}, 0, {}),
    (2, {"tp": 2, "tp_overlap_chunks": 2}, 0, {}),
    (2, {"tp": 2, "tp_sequence_norms": True}, 0, {}),
    (2, {"sp": 2}, 1, {}),
    (2, {"sp": 2, "sp_mode": "ring"}, 1, {}),
    (2, {"sp": 2, "recompute": True}, 0, {}),
    (2, {"ep": 2}, 2, {}),
    (2, {"ep": 2, "recompute": True}, 0, {}),
    (2, {"pp": 2}, 0, {}),
    (2, {"pp": 2}, 0, {"schedule": "gpipe"}),
    (2, {"pp": 2}, 0, {"schedule": "interleaved", "virtual_stages": 2}),
    (2, {"pp": 2}, 0, {"schedule": "zero-bubble"}),
    (4, {"dp_replicate": 2}, 3, {}),
    (4, {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}, 2, {}),
    (4, {"ep": 2, "tp": 2}, 2, {}),
    (4, {"ep": 2, "sp": 2}, 2, {}),
    (4, {"pp": 2, "tp": 2}, 0, {}),
    (4, {"pp": 2, "tp": 2, "tp_sequence_norms": True}, 0, {"schedule": "interleaved", "virtual_stages": 2}),
    (4, {"pp": 2}, 3, {}),
    (4, {"pp": 2}, 3, {"unshard_per": "micro-batch"}),
    (4, {"pp": 2, "ep": 2}, 1, {}),
    (16, {"pp": 2, "tp": 2, "sp": 2, "ep": 2}, 2, {}),
]


@pytest.mark.parametrize(("world", "axes", "stage", "pipeline"), AXIS_CASES)
def test_simulated_bytes_equal_the_formulas(
    world: int, axes: dict[str, Any], stage: int, pipeline: dict[str, Any]
) -> None:
    """The formulas are compared with the counters of real ranks in bench/parallel_axes.py and tests/dist."""
    shape = EXPERTS if "ep" in axes else DENSE
    settings = config(stage, KEYS, parallel=axes, pipeline=pipeline)
    found = predict_step(shape, settings, place(world), world_size=world, length=LENGTH).moved
    taken = {axis: int(axes.get(axis, 1)) for axis in AXES if axis != "dp_shard"}
    grid = MeshShape(**taken, dp_shard=world // MeshShape(**taken).world)
    work = StepWorkload(
        SAMPLES * LENGTH, micro_batches=MICRO, zero_stage=stage, activation_bytes=4, parameter_bytes=4,
        recompute=bool(axes.get("recompute")), tp_sequence_norms=bool(axes.get("tp_sequence_norms")),
        ulysses_degree={"ring": 1, "ulysses+ring": axes.get("ulysses_degree", 0)}.get(axes.get("sp_mode", ""), 0),
        unshards_once="unshard_per" not in pipeline, virtual_stages=pipeline.get("virtual_stages", 1),
    )  # fmt: skip
    for pipe in range(grid.pp):
        expected: dict[str, dict[str, int]] = {}
        for volume in compute_step_volumes(shape, grid, work, pipe):
            axis = "data" if volume.axis == "experts" else volume.axis
            of = expected.setdefault(axis, {})
            name = {"activations": "activations", "gradients of activations": "gradients"}.get(volume.tensors)
            operation = name if axis == "pp" and name else volume.operation
            of[operation] = of.get(operation, 0) + volume.nbytes
        _add_scalars(expected, grid, pipe, 2 if axes.get("recompute") else 1)
        if axes.get("tp_sequence_norms"):  # gradients of two norms a layer, which the formulas leave out
            expected["data"] = {"replicate": DENSE.layers // grid.pp * 2 * DENSE.hidden * 4}
        assert found[pipe] == expected


@pytest.mark.parametrize(
    "axes",
    [
        {"sp": 4},
        {"sp": 4, "sp_mode": "ring"},
        {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2},
        {"sp": 2, "tp": 2},
    ],
)
def test_simulated_bytes_of_an_odd_length_equal_the_formulas(axes: dict[str, Any]) -> None:
    """Each sequence is sharded by itself: two samples of 7 tokens are 8 tokens on one of two ranks."""
    settings, length = config(0, KEYS, parallel=axes), 7
    work = describe_step(DENSE, settings, 4, length)
    (found,) = predict_step(DENSE, settings, place(4), world_size=4, length=length).moved
    expected: dict[tuple[str, str], int] = {}
    for volume in compute_step_volumes(DENSE, work.grid, work.volumes):
        key = volume.axis, volume.operation
        expected[key] = expected.get(key, 0) + volume.nbytes
    for axis, operation in (("sp", "all_to_all"), ("sp", "pass_on"), ("tp", "all_reduce")):
        assert found.get(axis, {}).get(operation, 0) == expected.get((axis, operation), 0)


def _add_scalars(expected: dict[str, dict[str, int]], grid: MeshShape, pipe: int, forwards: int) -> None:
    """Add the traffic that the formulas leave out: losses, numbers of tokens, and numbers of rows for experts."""
    if pipe < grid.pp - 1:
        expected["pp"]["broadcast"] = 4
    if grid.sp > 1 and pipe == grid.pp - 1:
        expected["sp"]["all_reduce"] = 2 * MICRO * (2 * 2 * 4 * (grid.sp - 1) // grid.sp)
    if grid.ep > 1:
        layers = DENSE.layers // grid.pp
        expected["ep"]["all_to_all"] += forwards * MICRO * layers * (grid.ep - 1) * (4 // grid.ep) * 8


class PlainLayer:
    """Operations of a float32 layer of `DENSE` in eager PyTorch, as (FLOPs, bytes, kernels), and their times.

    The figures follow from the sizes of the layer's tensors, independently of the simulator's tables.
    """

    tokens, hidden, width, heads, keys, inner = SAMPLES * LENGTH, 64, 8, 8, 4, 128

    def __init__(self, device: DevicePart) -> None:
        t, h = self.tokens, self.hidden
        self.device = device
        norm = (0, 28 * t * h, 6)
        residual = (0, 12 * t * h, 1)
        queries = self.product(t, h, (self.heads + 2 * self.keys) * self.width)
        rotary = (0, 44 * t * (self.heads + self.keys) * self.width, 10)
        output = self.product(t, self.heads * self.width, h)
        flops, nbytes, _ = self.product(t, h, 2 * self.inner)  # gate and up
        gates = (flops, nbytes, 2)
        activation = (0, 20 * t * self.inner, 2)
        down = self.product(t, self.inner, h)
        self.kept = [norm, queries, rotary, residual, norm, gates, activation, residual]
        self.dropped = [output, down]  # every second product, which selective checkpointing does not recompute

    @staticmethod
    def product(m: int, k: int, n: int) -> tuple[float, float, int]:
        return 2 * m * k * n, 4 * (m * k + k * n + m * n), 1

    def seconds(self, operations: list[tuple[float, float, int]], times: int = 1, share: float = 0.0) -> float:
        """Return the time of operations that run `times` times each. `share`: arithmetic efficiency, 0: of products."""
        part, total = self.device, 0.0
        arithmetic = part.flops["fp32"] * (share or part.matmul_efficiency)
        for flops, nbytes, kernels in operations:
            memory = part.memory_rate * part.memory_efficiency
            total += times * max(flops / arithmetic, nbytes / memory, kernels * part.launch_seconds)
        return total

    def attention(self, *, back: bool) -> float:
        # Two products over the half of the scores that a causal mask leaves. A backward has four, and recomputes one of
        # the forward: five, 2.5 times as many.
        flops = 2 * 2 * self.tokens * LENGTH * self.heads * self.width / 2 * (2.5 if back else 1)
        nbytes = 4 * self.tokens * self.heads * self.width * (8 if back else 4)
        return self.seconds([(flops, nbytes, 3 if back else 1)], share=self.device.attention_efficiency)

    def ends(self, vocabulary: int) -> float:
        """Return the time of embedding, head and loss, forward and backward."""
        t, h = self.tokens, self.hidden
        embedding = self.seconds([(0, 8 * t * h, 1)], 2) + self.seconds([(0, 4 * vocabulary * h, 1)])
        last = self.seconds([(0, 28 * t * h, 6), self.product(t, h, vocabulary)], 3)
        return embedding + last + self.seconds([(0, 16 * t * vocabulary, 3)], 2)


@pytest.mark.parametrize("bound", ["launches", "memory", "arithmetic", "all"])
@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_one_device_takes_the_sum_of_its_operations(checkpointing: str, bound: str) -> None:
    infinite = LinkPart(math.inf, 0.0, 1.0)
    host = replace(HOSTS["dgx-h100"], devices=1, nics=1, device_link=infinite, nic=infinite)
    part = DEVICES["h100"]
    if bound in ("memory", "arithmetic"):
        part = replace(part, launch_seconds=0.0)
        part = replace(part, flops={"fp32": math.inf}) if bound == "memory" else replace(part, memory_rate=math.inf)
    if bound == "all":  # different operations have different bounds
        part = replace(part, flops={"fp32": 2e11}, memory_rate=2e10, launch_seconds=2e-6)
    lonely = Cluster(part, host, 1, Network(switch_latency=0.0))
    found = predict_step(DENSE, config(3, KEYS), lonely, length=LENGTH, checkpointing=checkpointing)
    layer = PlainLayer(part)
    forward = layer.seconds(layer.kept + layer.dropped)
    again = {"none": 0.0, "full": forward + layer.attention(back=False), "selective": layer.seconds(layer.kept)}
    numel = (
        2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 128 + 2 * 64
    )  # matrices of queries, outputs, keys, values and MLP; norms
    layers = 3 * forward + layer.attention(back=False) + layer.attention(back=True) + again[checkpointing]
    layers += layer.seconds([(0, 8 * numel, 1)])  # copy of gradients into the layer's flat buffer
    total = MICRO * (4 * layers + layer.ends(256))
    rate = part.memory_rate * part.memory_efficiency
    whole = 4 * numel + 2 * 256 * 64 + 64
    assert whole == DENSE.numel
    total += whole * (4 + (4 + 2 * 8 + 2 * 4)) / rate  # bytes of the gradient norm, and of the update
    total += MICRO * whole * 8 / rate  # copy of gradients into the reduction's buffer
    assert math.isclose(found.seconds, total, rel_tol=1e-9)
    assert math.isclose(found.compute_seconds, total, rel_tol=1e-9)
    assert sum(found.waits.values()) == pytest.approx(0.0, abs=1e-12)


def test_checkpointing_and_fusion_follow_the_configuration() -> None:
    enabled = config(activation_checkpointing={"enabled": True})
    assert describe_step(DENSE, config(), 1, LENGTH).style.checkpointing == "none"
    assert not describe_step(DENSE, config(), 1, LENGTH).style.fused
    assert describe_step(DENSE, config(compile={"enabled": True}), 1, LENGTH).style.fused
    assert describe_step(DENSE, enabled, 1, LENGTH).style.checkpointing == "full"
    assert describe_step(DENSE, enabled, 1, LENGTH).volumes.recompute
    for given in ("none", "selective"):
        assert describe_step(DENSE, enabled, 1, LENGTH, checkpointing=given).style.checkpointing == given
    followed, full, none = (
        predict_step(DENSE, one, place(1), world_size=1, length=LENGTH, checkpointing=given).seconds
        for one, given in ((enabled, None), (config(), "full"), (enabled, "none"))
    )
    assert followed == full > none


def test_inputs_of_fp8_products_are_cast_before_the_product() -> None:
    part = DEVICES["h100"]
    m, k, n = 4096.0, 1024.0, 512.0
    one = product(m, k, n, ComputeStyle(linear_dtype="fp8"))
    rate, inputs = part.memory_rate * part.memory_efficiency, m * k + k * n
    multiply = max(2 * m * k * n / (part.peak("fp8") * part.matmul_efficiency), (inputs + 2 * m * n) / rate)
    assert one.seconds(replace(part, launch_seconds=0.0)) == pytest.approx(multiply + 5 * inputs / rate)
    whole = backward_of(one)
    assert whole.seconds(replace(part, launch_seconds=0.0)) == pytest.approx(2 * (multiply + 5 * inputs / rate))
    assert product(m, k, n, ComputeStyle()).cast_bytes == 0
    assert product(m, k, n, ComputeStyle(linear_dtype="fp8"), linear=False).cast_bytes == 0


def test_a_dtype_without_a_rate_has_that_of_a_wider_one() -> None:
    part = replace(DEVICES["h100"], flops={"bf16": 4.0, "fp32": 2.0})
    assert [part.peak(dtype) for dtype in ("fp8", "bf16", "fp16", "fp32")] == [4.0, 4.0, 4.0, 2.0]
    assert DEVICES["v100"].peak("bf16") == 125e12
    narrow = replace(part, flops={"fp8": 8.0, "bf16": 4.0})
    for dtype in ("fp32", "fp64"):
        with pytest.raises(ConfigError, match=f"device.flops of h100 has fp8, bf16, and products are in {dtype}: add"):
            narrow.peak(dtype)


def test_offloaded_slots_do_not_count_against_device_memory() -> None:
    numel, ranks = DENSE.numel, 4

    def held(stage: int, cluster: str = "dgx-h100", **zero: Any) -> float:
        settings = config(stage, zero, bf16={"enabled": True})
        return state_bytes_of_rank(describe_step(DENSE, settings, ranks, LENGTH), place(ranks, cluster)) / numel

    cpu, disk = {"device": "cpu"}, {"device": "nvme", "nvme_path": "/x"}
    everything = (2 + 4 + 4 + 8) / ranks
    assert held(3) == pytest.approx(everything)
    assert held(3, offload_optimizer=cpu) == pytest.approx(2 / ranks)
    assert held(3, offload_optimizer=cpu, offload_param=cpu) == 0
    assert held(3, offload_param=cpu) == pytest.approx((4 + 4 + 8) / ranks)
    assert held(3, offload_optimizer={**cpu, "ratio": 0.5}) == pytest.approx((2 + 16 / 2) / ranks)
    assert held(1, offload_optimizer=cpu) == pytest.approx(2 + 4)  # full parameters and gradients
    # The memory of a CPU rank's device is the host's.
    assert held(3, "cpu", offload_optimizer=cpu, offload_param=cpu) == pytest.approx(everything)
    assert held(3, "cpu", offload_optimizer=disk, offload_param=cpu) == pytest.approx((2 + 4) / ranks)
    on_disk = {**disk, "gradient_device": "nvme"}
    assert held(3, "cpu", offload_optimizer=on_disk, offload_param=disk) == 0


def test_compute_and_waits_sum_to_the_step() -> None:
    for axes, stage in (({}, 3), ({"tp": 2, "pp": 2}, 1), ({"sp": 4}, 2)):
        found = predict_step(DENSE, config(stage, parallel=axes), place(16), length=LENGTH)
        assert math.isclose(found.compute_seconds + sum(found.waits.values()), found.seconds, rel_tol=1e-9)
        assert found.waits and all(seconds >= 0 for seconds in found.waits.values())


def test_sums_of_blocking_collectives_take_the_same_time() -> None:
    work = describe_step(EXPERTS, config(2, parallel={"tp": 2, "pp": 2, "ep": 2}), 16, LENGTH)
    fine, coarse = (StepTasks(work, place(16), coarse=coarse) for coarse in (False, True))
    assert coarse.run() == pytest.approx(fine.run(), rel=0.02)
    assert [stage.lanes.moved for stage in coarse.stages] == [stage.lanes.moved for stage in fine.stages]
    assert len(coarse.loop.tasks) < 0.6 * len(fine.loop.tasks)


def test_sums_of_collectives_add_the_times_of_their_phases() -> None:
    """Phases inside a host and between hosts have different slowest links and do not overlap."""
    costs = CollectiveCosts(place(32, "dgx-a100"), MeshShape(dp_shard=32))
    pattern, nbytes = RankPattern(("dp_shard",)), 1e7
    cost = costs.cost(pattern, "all_gather", nbytes)
    assert len({phase.slowest_link(costs.cluster) for phase in cost.phases}) == 2
    seconds = []
    for coarse in (False, True):
        rates: dict[LinkKey, float] = {}
        loop = EventLoop(rates)
        lanes = RankLanes(0, costs, loop, rates, coarse=coarse)
        for _ in range(2):
            lanes.spend("compute", 1e-5)
            lanes.blocking("zero", "all_gather", nbytes, pattern, label="x", counted={})
        lanes.flush()
        seconds.append(loop.run())
    expected = 2 * (1e-5 + cost.seconds(costs.cluster))
    assert seconds == [pytest.approx(expected), pytest.approx(expected)]


def test_model_flops_equal_those_of_the_traced_model() -> None:
    import transformers
    from torch.utils.flop_counter import FlopCounterMode

    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "vocab_size": 96, "use_cache": False}
    own = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, attn_implementation="eager", tie_word_embeddings=False
    )
    model = transformers.LlamaForCausalLM(own)
    ids = torch.zeros((SAMPLES, LENGTH), dtype=torch.long)
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    work = describe_step(model, config(), 1, LENGTH)
    assert work.shape == from_transformers(own.to_dict())
    # eager attention multiplies whole score matrices; the embedding is not a product
    assert global_model_flops(work, DEVICES["h100"]) / MICRO == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_prefetch_hides_gathers_and_reuse_saves_them() -> None:
    shape = replace(DENSE, hidden=4096, heads=32, kv_heads=8, intermediate=14336, layers=4)
    slow = replace(place(8), host=replace(HOSTS["dgx-h100"], device_link=LinkPart(100e9, 0.0)))
    ahead = predict_step(shape, config(3), slow, length=2048)
    alone = predict_step(shape, config(3, {"stage3_prefetch_bucket_size": 0}), slow, length=2048)
    again = predict_step(shape, config(3, {"stage3_max_reuse_distance": 0}), slow, length=2048)
    big = {"stage3_prefetch_bucket_size": 1_000_000_000}
    hidden = predict_step(shape, config(3, {**big, "stage3_max_reuse_distance": 0}), slow, length=2048)
    assert ahead.moved[0]["data"]["gather"] < again.moved[0]["data"]["gather"]
    assert hidden.moved == again.moved and hidden.seconds < again.seconds
    assert alone.seconds > ahead.seconds


def test_tiers_and_codecs_change_transfers() -> None:
    shape = replace(DENSE, hidden=1024, heads=8, intermediate=4096)

    def run(**zero: Any) -> Any:
        return predict_step(shape, config(3, zero, bf16={"enabled": True}), place(16), length=LENGTH)

    base, states = run(), run(offload_optimizer={"device": "cpu"})
    nvme = run(offload_optimizer={"device": "nvme", "nvme_path": "/x"}, offload_param={"device": "cpu"})
    assert "device to host" in states.link_bytes and "disk read" in nvme.link_bytes
    assert base.seconds < states.seconds < nvme.seconds and nvme.waits["disk"] > 0
    delayed = run(offload_optimizer={"device": "cpu", "delayed_update": True})
    assert delayed.seconds < states.seconds
    encoded = run(zero_quantized_weights=True, zero_quantized_gradients=True)
    assert encoded.moved[0]["data"]["gather"] < 0.6 * base.moved[0]["data"]["gather"]
    assert encoded.moved[0]["data"]["reduce"] < 0.4 * base.moved[0]["data"]["reduce"]
    bare = replace(place(16), host=replace(HOSTS["dgx-h100"], disk_read=0.0))
    settings = config(3, {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}})
    with pytest.raises(ConfigError, match="hosts have no disk; set host.disk_read"):
        predict_step(shape, settings, bare, length=LENGTH)


def test_pipeline_bubble_is_that_of_the_formula() -> None:
    infinite = LinkPart(math.inf, 0.0, 1.0)
    host = replace(HOSTS["dgx-h100"], device_link=infinite, nic=infinite)
    fast = Cluster(replace(DEVICES["h100"], launch_seconds=0.0), host, 1, Network(switch_latency=0.0))
    shape = replace(DENSE, vocabulary=1)  # so that embedding and head take almost no time
    found = predict_step(shape, config(parallel={"pp": 4}, train_batch_size=16, gradient_accumulation_steps=8), fast,
                         world_size=4, length=LENGTH)  # fmt: skip
    assert found.waits["pipeline"] / found.seconds == pytest.approx(3 / 11, rel=0.1)


def test_sixteen_thousand_devices_are_folded(tmp_path: Path) -> None:
    settings = config(1, parallel={"tp": 8, "pp": 4}, bf16={"enabled": True})
    found = predict_step(DENSE, settings, place(16_384), world_size=16_384, length=LENGTH, timeline=True)
    assert found.world_size == 16_384 and {span.process for span in found.spans} == {
        *("rank 0", "rank 4096", "rank 8192", "rank 12288"),
        "links",
    }
    write_trace(found, tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if "_name" in event["name"] and event["ph"] == "M"}
    assert {"rank 0", "links", "compute", "tp", "zero"} <= names
    last = max(event["ts"] + event["dur"] for event in events if event["ph"] == "X")
    assert last == pytest.approx(found.seconds * 1e6)


def test_goodput_follows_young_and_daly() -> None:
    found = expected_goodput(16_384, 50_000 * 3600.0, 30.0, 600.0)
    assert found.mtbf == pytest.approx(10986.3, rel=1e-4)
    assert found.young == pytest.approx(math.sqrt(2 * 30 * found.mtbf))
    best = max((expected_goodput(16_384, 50_000 * 3600.0, 30.0, 600.0, t).goodput, t) for t in range(200, 3000, 5))
    assert found.daly == pytest.approx(best[1], rel=0.02) and found.goodput == pytest.approx(best[0], rel=1e-4)
    assert 0.8 < found.goodput < 1
    with pytest.raises(ConfigError, match="checkpoint = 0"):
        expected_goodput(8, 1.0, 0.0, 0.0)
    for interval in (0.0, -60.0):
        with pytest.raises(ConfigError, match=f"interval = {interval} is not positive"):
            expected_goodput(8, 1e6, 30.0, 600.0, interval)
    with pytest.raises(ConfigError, match="restart = -1.0 is negative"):
        expected_goodput(8, 1e6, 30.0, -1.0)
    # Failures come so much faster than restarts that the expected time overflows: the run never advances.
    assert expected_goodput(16_384, 3600.0, 30.0, 600.0).goodput == 0.0


def test_bad_input_names_the_fix() -> None:
    with pytest.raises(ConfigError, match="has 8 devices .* and the run has 16 ranks"):
        predict_step(DENSE, config(), known_cluster("dgx-h100"), world_size=16)
    with pytest.raises(ModelError, match="the sizes of Linear are unknown"):
        predict_step(torch.nn.Linear(2, 2), config(), known_cluster("dgx-h100"))
    with pytest.raises(ConfigError, match="a pipeline of 8 stages .* the model has 4"):
        predict_step(DENSE, config(parallel={"pp": 8}), known_cluster("dgx-h100"))


TWO_MATRICES = {
    "FalconForCausalLM": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
    "BloomForCausalLM": {"hidden_size": 32, "n_layer": 2, "n_head": 4},
    "Starcoder2ForCausalLM": {**{"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4},
                              **{"num_key_value_heads": 2, "intermediate_size": 128}},
    "GPTBigCodeForCausalLM": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "MptForCausalLM": {"d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 16},
}  # fmt: skip


@pytest.mark.parametrize("kind", TWO_MATRICES)
def test_feed_forward_networks_of_two_matrices_are_known(kind: str) -> None:
    """The activation function does not determine the number of matrices; three instead of two would add half to the
    feed-forward work."""
    ends = {"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0}
    model = build_on_meta(lambda: model_of(kind, vocab_size=96, **ends, **TWO_MATRICES[kind]), kind)
    plain = from_transformers(model.config.to_dict())  # type: ignore[union-attr, operator]
    matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
    found = shape_of(model)
    assert not plain.gated and not found.gated
    assert abs(found.numel - matrices) < 0.05 * matrices, (found.numel, matrices)


def test_a_model_that_also_reads_images_has_the_sizes_of_its_decoder() -> None:
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 64}
    text = {**sizes, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 96}
    images = {**sizes, "num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
    given = Gemma3Config(text_config=text, vision_config=images)
    model = build_on_meta(lambda: Gemma3ForConditionalGeneration(given), "gemma3")
    expected = ModelShape(32, 3, 4, vocabulary=96, kv_heads=2, head_dim=8, intermediate=64, tied=True)
    assert shape_of(model) == expected
    found = predict_step(model, config(3), known_cluster("dgx-h100"), world_size=2, length=16)
    assert found.seconds > 0 and any("and a decoder of its sizes" in note for note in found.notes)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft 0.21
@pytest.mark.parametrize("wrapped", [False, True], ids=["plain", "adapters"])
def test_layers_of_a_vision_tower_are_not_those_of_the_decoder(wrapped: bool) -> None:
    import peft
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    text = {**sizes, "model_type": "llama", "intermediate_size": 64, "vocab_size": 96}
    images = {**sizes, "model_type": "clip_vision_model", "intermediate_size": 48, "image_size": 16, "patch_size": 8}
    given = LlavaConfig(text_config=text, vision_config=images)
    model: nn.Module = build_on_meta(lambda: LlavaForConditionalGeneration(given), "llava")
    decoder = model.get_decoder()  # type: ignore[operator]
    if wrapped:
        model = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    work = describe_step(model, config(3), 2, LENGTH)
    units = RankUnits(work, rank_sizes(work), 0)
    assert units.layer_numel == sum(parameter.numel() for parameter in decoder.layers[0].parameters())
    assert {f"layer {number}" for number in range(3)} <= units.of_block.keys()


def test_a_model_unlike_a_decoder_of_its_sizes_is_named() -> None:
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    model = build_on_meta(lambda: model_of("MixtralForCausalLM", vocab_size=96, **sizes, **experts), "mixtral")

    def notes() -> list[str]:
        return predict_step(model, config(), known_cluster("dgx-h100"), world_size=1, length=16).notes

    assert not any("parameters" in note for note in notes())
    model.add_module("tower", nn.Linear(200, 200, device="meta"))
    assert any("and a decoder of its sizes" in note for note in notes())


def test_a_message_leaves_before_the_next_action_of_its_sender() -> None:
    """Without overlap, a send takes the computation's stream before the next action, and the last stage never waits."""
    fast = LinkPart(math.inf, 0.0, 1.0)
    host = replace(HOSTS["cpu-host"], devices=2, device_link=fast, nic=fast)
    place = Cluster(DEVICES["cpu"], host, 1, Network(switch_latency=0.0), overlaps=False)
    settings = config(0, parallel={"pp": 2}, gradient_accumulation_steps=6)
    found = predict_step(DENSE, settings, place, length=LENGTH, world_size=2, timeline=True)
    lanes = {
        rank: [span for span in found.spans if (span.process, span.lane) == (rank, "compute")]
        for rank in ("rank 0", "rank 1")
    }
    first_forward = lanes["rank 0"][0].stop
    assert lanes["rank 1"][0].start == pytest.approx(first_forward)
    # The last stage has no idle time before the end of its last backward.
    last = max(number for number, span in enumerate(lanes["rank 1"]) if span.name.startswith("backward"))
    busy = sum(span.stop - span.start for span in lanes["rank 1"][: last + 1])
    assert lanes["rank 1"][last].stop - first_forward == pytest.approx(busy)


def optimizer(name: str, **params: Any) -> Any:
    return config(optimizer={"type": name, "params": {"lr": 1e-3, **params}})


def test_optimizers_that_reduce_gradients_themselves_are_named() -> None:
    def run(name: str, **params: Any) -> Any:
        return predict_step(DENSE, optimizer(name, **params), place(2), world_size=2, length=LENGTH)

    first = run("OneBitAdam")
    assert first.notes[-1].endswith("in this one gradients are sent as: in full")
    assert first.moved == run("AdamW").moved
    assert not any("AdamW" in note for note in run("AdamW").notes)


@pytest.mark.parametrize(
    ("name", "params", "kinds"),
    [
        ("AdamW", {}, []),
        ("OneBitLamb", {"freeze_step": 5}, [("in full", 1, 0.0), ("compressed", 6, 1.0)]),
        ("PowerSGD", {"start_step": 3}, [("in full", 1, 0.0), ("low rank", 4, 1.0)]),
        (
            "ZeroOneAdam",
            {"var_freeze_step": 8, "var_update_scaler": 4, "local_step_clipper": 4},
            [("in full", 1, 0.0), ("compressed", 5, 0.0), ("synchronizing", 31 * 32678 + 10, 0.25),
             ("local", 31 * 32678 + 11, 0.75)],
        ),
        ("DiLoCo", {"inner_steps": 4}, [("local", 1, 0.75), ("outer", 12, 0.25)]),
        # Each of the two fragments is sent once in four steps, at different steps.
        ("DiLoCo", {"inner_steps": 4, "fragments": 2}, [("local", 1, 0.5), ("outer", 10, 0.25), ("outer", 12, 0.25)]),
        # Half of a message is sent in each of two steps, and the other two steps send nothing.
        (
            "DiLoCo",
            {"inner_steps": 4, "overlap_steps": 3},
            [("local", 1, 0.5), ("outer", 9, 0.25), ("outer", 12, 0.25)],
        ),
    ],
)  # fmt: skip
def test_kinds_of_steps_and_their_shares(name: str, params: Any, kinds: list[tuple[str, int, float]]) -> None:
    work = describe_step(DENSE, optimizer(name, **params), 2, LENGTH)
    found = predict_kinds(work, place(2))
    assert [(one.kind, one.step, one.share) for one in found] == kinds
    by_kind = {one.kind: one for one in found}
    if "local" in by_kind:
        assert by_kind["local"].received == 0
    if "compressed" in by_kind:  # 1 bit instead of 32 for each element, plus scales and alignment
        assert by_kind["compressed"].received < by_kind["in full"].received / 20
    for one in found:
        step = predict_step(DENSE, optimizer(name, **params), place(2), world_size=2, length=LENGTH, step=one.step)
        assert step.seconds == one.seconds and one.kind in step.notes[-1]


def test_a_step_waits_for_compressed_messages_unless_they_overlap() -> None:
    slow = replace(place(2), host=replace(place(2).host, device_link=LinkPart(1e6, 0.0, 1.0)))

    def seconds(**params: Any) -> dict[str, float]:
        found = predict_kinds(describe_step(DENSE, optimizer("DiLoCo", **params), 2, LENGTH), slow)
        return {f"{one.kind} {one.step}": one.seconds for one in found}

    waited, overlapped = seconds(inner_steps=4), seconds(inner_steps=4, overlap_steps=3)
    # A rank receives half of the model twice, one byte for each element.
    message = DENSE.numel / 2 / 1e6
    assert waited["outer 12"] - waited["local 1"] == pytest.approx(2 * message, rel=0.1)
    # Each of two steps carries half of this traffic, `message`, while it computes.
    assert overlapped["outer 12"] == pytest.approx(max(message, waited["local 1"]), rel=0.1)


@pytest.mark.parametrize(("name", "expected"), [("Muon", 4), ("MuAdam", 8), ("Adafactor", 0), ("DiLoCo", 4)])
def test_states_of_any_optimizer_are_simulated(name: str, expected: int) -> None:
    settings = config(optimizer={"type": name, "params": {"lr": 1e-3}})
    work = describe_step(DENSE, settings, 2, LENGTH)
    assert work.state_bytes == expected and work.master_bytes == (4 if name == "DiLoCo" else 0)


def test_a_rank_alone_on_its_host_has_the_whole_disk() -> None:
    settings = config(3, {"offload_optimizer": {"device": "nvme", "nvme_path": "/x"}}, bf16={"enabled": True})
    host = replace(HOSTS["dgx-h100"], disk_read=8e9, disk_write=8e9)

    def waits(devices: int) -> float:
        return predict_step(
            replace(DENSE, hidden=512), settings, replace(place(1), host=replace(host, devices=devices)), world_size=1
        ).waits["disk"]

    assert waits(8) == pytest.approx(waits(1))


def test_uneven_experts_count_for_the_rank_with_most() -> None:
    work = describe_step(EXPERTS, config(parallel={"ep": 3}), 3, LENGTH)
    assert rank_sizes(work).local_experts == 2
    with pytest.raises(ConfigError, match=r"parallel\.ep is 8, the model has 4 experts.*at most 4"):
        describe_step(EXPERTS, config(parallel={"ep": 8}), 8, LENGTH)
