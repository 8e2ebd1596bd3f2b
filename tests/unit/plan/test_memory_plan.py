"""Laws of predicted memory: it equals what autograd saves, and never falls when the work grows."""

from __future__ import annotations

from collections.abc import Iterator
from io import StringIO
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import windlass
from tests.causal_models import build, model_of
from windlass.base.errors import ConfigError, ModelError
from windlass.cli.plan_report import memory_table
from windlass.config import Config, load_config
from windlass.engine.tier_planning import step_traffic
from windlass.parallel.model_checkpointing import enable_checkpointing
from windlass.parallel.model_shape import parse_model_shape
from windlass.plan.activation_trace import BACKWARD, FORWARD, ActivationTrace, trace_step
from windlass.plan.choose_config import Rung, choose_config, ladder
from windlass.plan.memory_plan import DEVICE, DISK, HOST, MOMENTS, MemoryPlan
from windlass.plan.memory_planner import HOLES, MemoryPlanner
from windlass.plan.plan_run import RunShape, plan_memory, trace_of
from windlass.plan.planned_layout import PlannedLayout, Target, plan_layout
from windlass.plan.planned_model import build_from_shape, build_on_meta
from windlass.plan.rank_limits import RankLimits, gpu_bytes, missing_bytes
from windlass.storage.slot import Tier
from windlass.zero.setup.tier_choice import TierMemory

SIZES = {
    **{"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
}
GPU = Target("cuda", "nccl")
HOMES = [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")]


def llama(**changes: Any) -> nn.Module:
    return build_on_meta(lambda: model_of("LlamaForCausalLM", **{**SIZES, **changes}), "llama")


def settings(stage: int = 0, micro: int = 1, **more: Any) -> dict[str, Any]:
    zero = {"stage": stage, "stage3_param_persistence_threshold": 0, **more.pop("zero", {})}
    return {"train_micro_batch_size_per_gpu": micro, "zero_optimization": zero, **more}


def plan(model: nn.Module, config: dict[str, Any], ranks: int = 2, length: int = 16, **more: Any) -> MemoryPlan:
    return plan_memory(model, load_config(config), RunShape(ranks, length, **more))


@pytest.fixture(scope="module")
def traced_once() -> Iterator[None]:
    """Trace each model once for each batch shape: a trace depends on neither stage nor tiers."""
    traces: dict[Any, ActivationTrace] = {}

    def trace(config: Config, layout: PlannedLayout, run: RunShape, micro: int) -> ActivationTrace:
        blocks = tuple(block.name for block in layout.blocks)
        checkpointing = config.activation_checkpointing.enabled
        key = layout.model, checkpointing, blocks, layout.settings.param_dtype, run.length, micro
        if key not in traces:
            traces[key] = trace_of(config, layout, run, micro)
        return traces[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("windlass.plan.plan_run.trace_of", trace)
        yield


@pytest.fixture(scope="module")
def two_layers() -> nn.Module:
    return llama(num_hidden_layers=2)


class Narrow(nn.Module):
    """Linear, tanh and linear layer. Autograd saves the inputs of both linear layers and the output of tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 16))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.layers(rows)


def saved_bytes(model: nn.Module, run: Any) -> int:
    """Return the bytes of the storages that autograd saves in a run with values, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    saved: dict[int, int] = {}
    alive: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)  # keeps the address from being used again
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(saved.values())


@pytest.mark.parametrize("kind", ["LlamaForCausalLM", "GPT2LMHeadModel", "OPTForCausalLM", "GPTNeoXForCausalLM"])
def test_a_trace_saves_what_autograd_saves(kind: str) -> None:
    values = {"GPT2LMHeadModel": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": 96}}
    sizes: dict[str, Any] = values.get(kind) or {k: v for k, v in SIZES.items() if k != "num_key_value_heads"}
    if kind == "OPTForCausalLM":
        sizes = {**sizes, "ffn_dim": sizes.pop("intermediate_size"), "word_embed_proj_dim": 32}
    model = model_of(kind, bos_token_id=0, eos_token_id=0, pad_token_id=1, **sizes).train()
    ids = torch.zeros((2, 24), dtype=torch.long)
    ids[:] = torch.arange(24)
    real = saved_bytes(model, lambda: model(input_ids=ids, labels=ids))
    trace = trace_step(
        model, lambda: {k: torch.zeros((2, 24), dtype=torch.long) for k in ("input_ids", "labels")}, [""]
    )
    # The embedding saves the ids: once in the real run, and once per name in the trace.
    assert abs(trace.saved_by_autograd - real) <= 2 * ids.numel() * 8
    assert trace.saved >= real and trace.peak(BACKWARD) >= trace.saved


def test_bytes_of_linear_layers_equal_the_formula() -> None:
    trace = trace_step(Narrow(), lambda: torch.zeros(4, 32), ["layers.0"])
    rows, hidden = 4 * 32 * 4, 4 * 64 * 4
    assert trace.saved_by_autograd == rows + hidden  # inputs of both linear layers; the second is tanh's output
    assert trace.inputs == rows
    names = [(event.phase, event.kind) for event in trace.events if event.name == "layers.0"]
    assert names == [(FORWARD, "begin"), (FORWARD, "end"), (BACKWARD, "begin")]


class LayerDropped(Narrow):
    """Layers of `Narrow`, each skipped at random with a small probability, as in models of transformers."""

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if torch.rand([]) < 0.1 or torch.rand([]) <= torch.tensor(0.1):
                continue
            rows = layer(rows)
        return rows


def test_layers_that_are_dropped_at_random_are_traced() -> None:
    dropped, plain = (trace_step(kind(), lambda: torch.zeros(4, 32), [""]) for kind in (LayerDropped, Narrow))
    assert dropped.saved_by_autograd == plain.saved_by_autograd > 0


def test_checkpointing_saves_less_and_trains_alike() -> None:
    model = llama()
    plain = plan(model, settings(micro=2))
    enable_checkpointing(model)
    less = plan(model, settings(micro=2))
    for moment in (FORWARD, BACKWARD):
        assert less.moments[moment].total(HOST) < plain.moments[moment].total(HOST)
    assert less.moments["load"].host == plain.moments["load"].host


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_inputs_of_checkpointed_layers_count_in_their_tier(tier: str, recompute: bool, tmp_path: Path) -> None:
    folder = {"nvme_path": str(tmp_path)} if tier == "nvme" else {}
    where = {"cpu_checkpointing": True} if tier == "cpu" else folder
    if recompute:
        on_device: dict[str, Any] = {"parallel": {"recompute": True}}
        on_tier: dict[str, Any] = {"parallel": {"recompute": True, "activation_tier": tier}}
        on_tier |= {"activation_checkpointing": folder} if folder else {}
    else:
        on_device = {"activation_checkpointing": {"enabled": True}}
        on_tier = {"activation_checkpointing": {"enabled": True, **where}}
    sizes = {"hidden_size": 64, "num_hidden_layers": 8}
    plain, moved = (
        plan(llama(**sizes), settings(micro=2, **one), length=64, target=GPU) for one in (on_device, on_tier)
    )
    inputs = 8 * 2 * 64 * 64 * 4
    for moment in (FORWARD, BACKWARD):
        stored = moved.moments[moment].of(HOST if tier == "cpu" else DISK)["activations"]
        assert inputs <= stored <= 1.2 * inputs  # positions are stored too
        before, after = (
            sum(one.moments[moment].of(DEVICE)[kind] for kind in ("activations", "temporary tensors"))
            for one in (plain, moved)
        )
        assert before - after > 0.6 * inputs  # the backward fetches the inputs of some layers ahead
        assert "activations" not in plain.moments[moment].host
    assert not list(tmp_path.iterdir()), "a plan creates no files"
    on_cpu = plan(llama(**sizes), settings(micro=2, **on_tier), length=64)
    assert ("activations" in on_cpu.moments[FORWARD].of(DISK)) == (tier == "nvme")  # host memory is the device's


@pytest.mark.usefixtures("traced_once")
@given(
    stage=st.integers(0, 3),
    target=st.sampled_from([Target(), GPU]),
    checkpointing=st.booleans(),
    home=st.sampled_from(HOMES),
    batches=st.tuples(*[st.integers(1, 4)] * 2).map(sorted),
    lengths=st.tuples(*[st.sampled_from([8, 16, 24])] * 2).map(sorted),
)
@hypothesis_settings(max_examples=30, deadline=None, derandomize=True)
def test_memory_of_no_moment_falls_when_the_batch_or_its_length_grows(
    two_layers: nn.Module,
    stage: int,
    target: Target,
    checkpointing: bool,
    home: tuple[str, str],
    batches: list[int],
    lengths: list[int],
) -> None:
    more: dict[str, Any] = {"activation_checkpointing": {"enabled": checkpointing}}
    for key, device, least in (("offload_optimizer", home[0], 1), ("offload_param", home[1], 3)):
        if device != "none" and stage >= least:
            more.setdefault("zero", {})[key] = {"device": device, "nvme_path": "/nvme"}
    small, large = (
        plan(two_layers, settings(stage, micro, **more), length=length, target=target)
        for micro, length in zip(batches, lengths, strict=True)
    )
    for place in (DEVICE, HOST, DISK):
        for moment in MOMENTS:
            assert small.moments[moment].total(place) <= large.moments[moment].total(place), (place, moment)
    if (batches[0], lengths[0]) != (batches[1], lengths[1]):
        own = DEVICE if target.has_own_memory else HOST
        assert small.moments[BACKWARD].total(own) < large.moments[BACKWARD].total(own)


@pytest.mark.parametrize(("stage", "target"), [(0, GPU), (1, Target()), (2, GPU), (3, Target()), (3, GPU)])
@pytest.mark.usefixtures("traced_once")
def test_memory_never_falls_when_ranks_go(stage: int, target: Target, two_layers: nn.Module) -> None:
    model = two_layers
    plans = [plan(model, settings(stage), ranks, target=target) for ranks in (4, 3, 2)]
    # A plan for one rank is left out, because one rank needs no buffers for peers.
    # On 4 ranks a unit is padded by at most 4 x 16 elements, of 20 bytes and a fifth for holes: 24 bytes.
    padding = 4 * 16 * 24 * len(plan_layout(model, load_config(settings(stage)), 4, target).units)
    for place in (DEVICE, HOST):
        peaks = [one.peak(place, MOMENTS[2:]) for one in plans]
        assert all(before <= after + padding for before, after in pairwise(peaks))


@pytest.mark.usefixtures("traced_once")
def test_a_stage_holds_no_more_than_the_one_below(two_layers: nn.Module) -> None:
    model = two_layers
    found = [plan(model, settings(stage), 4, target=GPU).moments["step"].device for stage in range(4)]
    kinds = ("parameters", "gradients", "master weights", "optimizer states")
    held = [sum(amounts.get(kind, 0) for kind in kinds) for amounts in found]
    assert held == sorted(held, reverse=True) and held[3] < 1.1 * held[0] / 4


@pytest.mark.usefixtures("traced_once")
def test_offloaded_slots_move_to_the_host_and_to_disk(two_layers: nn.Module) -> None:
    model, host = two_layers, {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
    on_host = plan(model, settings(3, zero=host), target=GPU)
    assert not {"optimizer states", "gradients", "parameters"} & set(on_host.moments["step"].device)
    assert {"optimizer states", "gradients", "parameters"} <= set(on_host.moments["step"].host)
    disk = {"offload_optimizer": {"device": "nvme", "nvme_path": "/nvme"}}
    on_disk = plan(model, settings(3, zero=disk), target=GPU)
    assert "optimizer states" in on_disk.moments["step"].disk and "staging" in on_disk.moments["step"].host
    assert on_disk.peak(HOST) > 0 and on_disk.peak(DISK) > 0
    # Staging memory is a quarter of the planned rank's host memory.
    layouts = [plan_layout(model, load_config(settings(3, zero=disk)), 2, GPU, host_memory=n << 30) for n in (1, 8)]
    assert [layout.staging for layout in layouts] == [256 << 20, 2 << 30]


@pytest.mark.usefixtures("traced_once")
def test_the_ladder_stops_at_the_first_configuration_that_fits(two_layers: nn.Module) -> None:
    model, run = two_layers, RunShape(2, 16, GPU)
    everything = choose_config(model, settings(), run, RankLimits(device=0), nvme_path="/nvme")
    assert everything.chosen is None and everything.nearest.missing[DEVICE] > 0
    rungs = ladder(has_own_memory=True, can_checkpoint=True, nvme=True)
    assert [one.rung for one in everything.tried] == rungs
    for index in (0, 3, 6, 10):
        limit = everything.tried[index].plan.peak(DEVICE)
        found = choose_config(model, settings(), run, RankLimits(device=limit), nvme_path="/nvme")
        first = next(i for i, one in enumerate(everything.tried) if one.plan.peak(DEVICE) <= limit)
        assert found.chosen is not None and found.chosen.rung == rungs[first]
        assert found.chosen.config["zero_optimization"]["stage"] == rungs[first].stage


def test_a_rung_keeps_the_other_keys() -> None:
    raw = settings(1, 4, zero={"overlap_comm": False, "offload_optimizer": {"device": "cpu", "ratio": 0.5}})
    found = Rung(3, False, "nvme", "cpu").apply(raw, "/nvme")
    zero = found["zero_optimization"]
    assert found["train_micro_batch_size_per_gpu"] == 4 and zero["overlap_comm"] is False
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/nvme", "ratio": 0.5}
    assert raw["zero_optimization"]["stage"] == 1
    assert "offload_optimizer" not in Rung(2, False).apply(raw, None)["zero_optimization"]


@pytest.mark.usefixtures("traced_once")
def test_all_nvme_folders_of_a_configuration_serve_states_and_parameters(two_layers: nn.Module) -> None:
    raw = settings(zero={"offload_optimizer": {"device": "nvme", "nvme_path": ["/a", "/b"]}})
    found = choose_config(two_layers, raw, RunShape(2, 16, GPU), RankLimits(device=0)).tried[-1]
    assert (found.rung.states, found.rung.parameters) == ("nvme", "nvme")
    for name in ("offload_optimizer", "offload_param"):
        assert found.config["zero_optimization"][name]["nvme_path"] == ["/a", "/b"]


@pytest.mark.parametrize(
    ("zero", "more"),
    [
        (True, {}),
        ({"stage": 2, "cpu_offload": True}, {}),
        ({"stage": "auto", "offload_optimizer": "auto", "offload_param": {"device": "auto"}}, {}),
        ("auto", {"offload": "auto"}),
    ],
)
def test_a_rung_replaces_other_spellings(zero: Any, more: dict[str, Any]) -> None:
    raw = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, **more}
    config = load_config(Rung(3, False, "cpu", "nvme").apply(raw, "/nvme"))
    section = config.zero_optimization
    assert section.offload_optimizer is not None and section.offload_param is not None and config.offload is None
    assert (section.stage, section.offload_optimizer.device, section.offload_param.device) == (3, "cpu", "nvme")
    plain = load_config(Rung(0, False).apply(raw, None)).zero_optimization
    assert (plain.stage, plain.offload_optimizer, plain.offload_param) == (0, None, None)


def test_a_rung_writes_the_checkpointing_that_it_counts_on() -> None:
    model = llama(num_hidden_layers=2)
    raw = settings(1, activation_checkpointing={"enabled": False, "profile": True})
    written = Rung(2, True).apply(raw, None)
    assert written["activation_checkpointing"] == {"enabled": True, "profile": True}
    assert not load_config(Rung(2, False).apply(written, None)).activation_checkpointing.enabled
    run = RunShape(1, 64, GPU)
    every = choose_config(model, settings(), run, RankLimits(device=0)).tried
    limit = min(one.plan.peak(DEVICE) for one in every if not one.rung.checkpointing) - 1
    chosen = choose_config(model, settings(), run, RankLimits(device=limit)).chosen
    assert chosen is not None and chosen.rung.checkpointing
    # The chosen configuration, on a new model, needs the memory that the rung predicted.
    again = plan_memory(llama(num_hidden_layers=2), load_config(chosen.config), run)
    assert again.as_json() == chosen.plan.as_json()


def test_checkpointing_of_a_configuration_does_not_reach_the_next_plan() -> None:
    model, run = llama(num_hidden_layers=2), RunShape(1, 64, GPU)
    peaks = []
    for enabled in (False, True, False):
        config = load_config(settings(activation_checkpointing={"enabled": enabled}))
        peaks.append(plan_memory(model, config, run).peak(DEVICE))
    assert peaks[0] == peaks[2] > peaks[1]
    enable_checkpointing(model)  # checkpointing that the caller enabled stays enabled
    plan_memory(model, load_config(settings(activation_checkpointing={"enabled": True})), run)
    assert all(getattr(module, "gradient_checkpointing", True) for module in model.modules())


def test_a_configuration_that_no_rung_can_train_is_an_error(two_layers: nn.Module) -> None:
    with pytest.raises(ConfigError, match='is refused at every stage and on every tier: .*bf16.enabled = "auto"'):
        choose_config(two_layers, settings(bf16={"enabled": "auto"}), RunShape(1, 16, GPU), RankLimits(device=0))


class _ReadsValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.steps = int(torch.arange(3).sum().item())


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.inner(rows)[rows[:, 0] > 0]


def test_a_model_that_reads_values_names_its_module() -> None:
    with pytest.raises(ModelError, match=r"cannot be built without values: module .*_ReadsValues"):
        build_on_meta(lambda: nn.Sequential(_ReadsValues()), "mine")
    with pytest.raises(ModelError, match=r"module '1' \(_Branches\).*--activations"):
        trace_step(nn.Sequential(nn.Linear(4, 4), _Branches()), lambda: torch.zeros(2, 4), [])


def test_a_frozen_model_has_no_backward_to_plan() -> None:
    with pytest.raises(ModelError, match="no trainable parameter"):
        plan(llama().requires_grad_(False), settings())


def test_given_activations_replace_the_trace() -> None:
    given = plan(llama(), settings(), activations=12345)
    assert given.moments[FORWARD].host["activations"] == 12345
    assert any("given bytes" in note for note in given.notes)


@pytest.mark.parametrize(
    ("wrong", "says"), [("h2000", "neither a known GPU nor a size"), ("1GB", "leaves nothing beside")]
)
def test_invalid_gpu_is_refused(wrong: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        gpu_bytes(wrong)
    assert gpu_bytes("80GB") == 76 << 30


@pytest.mark.parametrize(
    "shape",
    [
        "hidden=64,layers=2,heads=4,vocabulary=96",
        "hidden=64,layers=2,heads=4,vocabulary=96,kv_heads=2,head_dim=8,intermediate=48,tied=1",
        "hidden=64,layers=2,heads=4,vocabulary=96,intermediate=48,experts=4,top_k=2",
    ],
)
def test_a_model_is_built_from_sizes(shape: str) -> None:
    model = build_from_shape(shape)
    assert sum(parameter.numel() for parameter in model.parameters()) == parse_model_shape(shape).numel
    assert plan(model, settings()).peak("host") > 0


def test_shapes_and_axes_that_are_not_planned() -> None:
    with pytest.raises(ModelError, match=r"125m, 1b.*hidden=4096,layers=32"):
        build_from_shape("6b")
    with pytest.raises(ConfigError, match="lacks heads, vocabulary"):
        build_from_shape("hidden=64,layers=2")
    with pytest.raises(ModelError, match="gated=0"):
        build_from_shape("hidden=64,layers=2,heads=4,vocabulary=96,gated=0")
    with pytest.raises(ConfigError, match="pipeline.partition is 'time'"):
        plan(llama(), {**settings(), "parallel": {"pp": 2}, "pipeline": {"partition": "time"}})


def test_a_pipeline_needs_most_where_its_micro_batches_wait() -> None:
    model = llama(num_hidden_layers=4, vocab_size=32)
    config = {**settings(), "gradient_accumulation_steps": 6, "parallel": {"pp": 2}}
    found = plan(model, config, length=64)
    assert any("pipeline stage 0, which needs most" in note for note in found.notes)  # two micro-batches wait in it
    assert found.parameters == sum(p.numel() for p in model.parameters())
    saved = found.moments[FORWARD].host["activations"]
    more = plan(model, {**config, "pipeline": {"schedule": "gpipe"}}, length=64).moments[FORWARD].host["activations"]
    assert more > 1.7 * saved  # GPipe keeps all six micro-batches
    alone = plan(model, settings(), ranks=1, length=64)
    assert found.moments["step"].host["optimizer states"] < 0.6 * alone.moments["step"].host["optimizer states"]


def test_a_pipeline_that_checkpoints_its_layers_is_planned() -> None:
    """Transformers keeps the handle of a hook on the embedding, which the last stage does not have."""
    model = llama(num_hidden_layers=4, vocab_size=32)
    config = {**settings(), "gradient_accumulation_steps": 6, "parallel": {"pp": 2}}
    plain = plan(model, config, length=64)
    less = plan(model, {**config, "activation_checkpointing": {"enabled": True}}, length=64)
    assert less.moments[BACKWARD].total(HOST) < plain.moments[BACKWARD].total(HOST)


def test_a_pipeline_stage_that_exceeds_a_limit_is_shown() -> None:
    model = llama(num_hidden_layers=4, vocab_size=32)
    zero = {"offload_optimizer": {"device": "cpu"}}
    config = {**settings(1, zero=zero), "gradient_accumulation_steps": 6, "parallel": {"pp": 2}}
    first = plan(model, config, length=64, target=GPU)
    host = first.peak(HOST)
    assert any("pipeline stage 0, which needs most" in note for note in first.notes)  # most device memory
    last = plan(model, config, length=64, target=GPU, limits=RankLimits(host=host))
    assert any("pipeline stage 1, which exceeds the limits most" in note for note in last.notes)
    norm = 32 * 12  # bytes of the last norm: master weight and two states of its 32 elements
    assert missing_bytes(last, RankLimits(host=host)) == {HOST: last.peak(HOST) - host} == {HOST: norm}


def test_experts_over_ranks_need_less_memory() -> None:
    model = build_on_meta(lambda: build("mixtral", output_router_logits=False), "mixtral")
    alone, spread = (plan(model, {**settings(), "parallel": {"ep": ep}}) for ep in (1, 2))
    assert spread.moments["step"].host["optimizer states"] < 0.8 * alone.moments["step"].host["optimizer states"]
    assert alone.moments["init"].host == spread.moments["init"].host  # each rank builds the whole model
    assert 0.7 < spread.moments[FORWARD].host["activations"] / alone.moments[FORWARD].host["activations"] < 1.4


@pytest.mark.parametrize("axis", ["ep", "tp"])
def test_a_rank_holds_its_part_of_a_model_from_sharded_init_that_is_partitioned(axis: str) -> None:
    """Partitioning leaves a rank its part of each parameter in full; the units shard them one after the other."""
    model = build_on_meta(lambda: build("mixtral", output_router_logits=False), "mixtral")
    config = load_config({**settings(3), "parallel": {axis: 2}})
    found = plan_memory(model, config, RunShape(4, 16, sharded_init=True))
    part = sum(p.numel() * p.element_size() for p in plan_layout(model, config, 4, Target()).model.parameters())
    largest = max(p.numel() * p.element_size() for p in model.parameters())
    assert found.moments["load"].total(HOST) >= part + largest
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    assert whole // 4 + largest <= found.moments["init"].host["model as built"] < whole


@pytest.mark.parametrize(
    ("more", "place"),
    [
        ({}, DEVICE),
        ({"zero": {"offload_param": {"device": "cpu"}}}, HOST),
        ({"zero": {"offload_param": {"device": "nvme", "nvme_path": "/nvme"}}}, DISK),
        ({"offload": "auto"}, HOST),
    ],
)
def test_shards_of_sharded_init_lie_where_it_stores_them(more: dict[str, Any], place: str) -> None:
    model, limits = llama(), RankLimits(device=1 << 30, host=1 << 30)
    found = plan(model, settings(3, **more), 4, target=GPU, sharded_init=True, limits=limits)
    whole = sum(p.numel() * 4 for p in model.parameters())
    for moment in ("init", "load"):
        built = {one: found.moments[moment].of(one).get("model as built", 0) for one in (DEVICE, HOST, DISK)}
        assert {one for one, nbytes in built.items() if nbytes} == {HOST, place}, moment
        assert built[place] >= whole // 4 and sum(built.values()) < whole


def test_each_rank_has_all_buffers_of_a_model_from_sharded_init() -> None:
    config, run = load_config(settings(3)), RunShape(4, 16, sharded_init=True)
    without = plan_memory(llama(), config, run)
    model = llama()
    model.register_buffer("table", torch.empty(1 << 20, device="meta"))
    found = plan_memory(model, config, run)
    for moment in ("init", "load"):
        assert found.moments[moment].total(HOST) - without.moments[moment].total(HOST) == 4 << 20, moment


def test_a_merged_unit_stays_unsharded_between_its_blocks() -> None:
    """The blocks are one unit, and a block's backward begins before the backward of the following block has ended."""
    model = llama(num_hidden_layers=4, vocab_size=16)
    zero = {"unit_merge_threshold": 1 << 30, "stage3_max_reuse_distance": 0}
    merged = plan(model, settings(3, zero=zero), target=GPU)
    whole = sum(p.numel() * 4 for p in model.parameters())
    assert merged.moments[BACKWARD].device["unsharded parameters"] >= whole


def test_axes_and_recomputation_of_the_configuration_need_less_memory() -> None:
    def content(one: MemoryPlan) -> int:
        """Return the peak without holes of the heap, which are large beside tensors of a few kilobytes."""
        return max(one.moments[m].total(HOST) - one.moments[m].host[HOLES] for m in MOMENTS[2:])

    model = llama(num_hidden_layers=1)
    alone = plan(model, settings(micro=4), ranks=1)
    for parallel, ranks in (({"tp": 2}, 2), ({"sp": 2}, 2), ({"recompute": True}, 1), ({"tiled_loss": True}, 1)):
        found = plan(model, {**settings(micro=4), "parallel": parallel}, ranks=ranks)
        assert content(found) < content(alone), parallel
        parameters = [one.moments[FORWARD].host["parameters"] for one in (found, alone)]
        assert (parameters[0] < parameters[1]) is ("tp" in parallel)
    assert plan(model, settings(micro=4), ranks=1).as_json() == alone.as_json(), "the model was changed"


def test_the_table_names_each_kind_in_a_narrow_terminal() -> None:
    found = plan(llama(), settings(2), target=GPU)
    console = Console(width=80, file=StringIO())
    console.print(memory_table(found))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("device: parameters", "device: gradients", "device: total", "backward", "MiB of each of 2 ranks"):
        assert word in text


@pytest.mark.usefixtures("traced_once")
@pytest.mark.parametrize("stage", [2, 3])
def test_chosen_tiers_fit_a_limit_between_two_settings(stage: int) -> None:
    """The limit is below the peak with all states on the device and above the peak with all of them on the host."""
    model = llama(num_hidden_layers=6, vocab_size=32)
    config = settings(stage, bf16={"enabled": True})

    def peak(limits: RankLimits, **more: Any) -> MemoryPlan:
        run = RunShape(1, 16, GPU, limits=limits)
        return plan_memory(model, load_config({**config, **more}), run)

    zero = {**config["zero_optimization"], "offload_optimizer": {"device": "cpu"}}
    unlimited = RankLimits()
    most, least = peak(unlimited).peak(DEVICE), peak(unlimited, zero_optimization=zero).peak(DEVICE)
    limit = (most + 2 * least) // 3
    chosen = peak(RankLimits(device=limit), offload="auto")
    assert 0.7 * limit < chosen.peak(DEVICE) <= limit
    assert any("first parameter" in note for note in chosen.notes)
    states = [chosen.moments["step"].of(place).get("optimizer states", 0) for place in (DEVICE, HOST)]
    assert all(states)


@pytest.mark.parametrize("batch", [{"train_batch_size": 16}, {"pipeline": {"micro_batches": 16}}])
def test_chosen_tiers_follow_the_micro_batches_of_a_step(
    batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []

    def traffic(accumulation: int, settings: Any) -> Any:
        found.append(accumulation)
        return step_traffic(accumulation, settings)

    monkeypatch.setattr("windlass.plan.planned_layout.step_traffic", traffic)
    config = load_config({**settings(3, offload="auto"), **batch})
    plan_layout(llama(), config, 1, GPU, memory=TierMemory(1 << 30, 1 << 30))
    assert found == [16]


def test_offload_without_a_limit_names_the_option() -> None:
    for target, option in ((GPU, "--gpu"), (Target(), "--host-memory")):
        with pytest.raises(ConfigError, match=option):
            plan_memory(llama(), load_config(settings(2, offload="auto")), RunShape(1, 16, target))


@pytest.mark.parametrize("name", ["Muon", "Adafactor", "MuAdam", "MuSGD", "Lamb", "OneBitAdam"])
def test_any_optimizer_of_a_configuration_is_planned(name: str, two_layers: nn.Module) -> None:
    found = plan(two_layers, settings(1, optimizer={"type": name, "params": {"lr": 1e-3}}), activations=0)
    assert any(name in note for note in found.notes) == (name in ("Muon", "Adafactor", "Lamb", "OneBitAdam"))
    assert ("per-rank states" in found.moments["step"].host) == (name == "OneBitAdam")
    saved = [found.moments["step"].host.get(kind, 0) for kind in ("optimizer states", "per-rank states")]
    assert found.moments["save"].disk["checkpoint"] >= sum(saved)


@pytest.mark.parametrize(
    ("name", "params"),
    [("DiLoCo", {"overlap_steps": 2}), ("PowerSGD", {"start_step": 1}), ("OneBitLamb", {"freeze_step": 1})],
)
def test_states_that_differ_between_ranks_are_exact(name: str, params: dict[str, Any]) -> None:
    config = settings(optimizer={"type": name, "params": {"lr": 1e-3, **params}})
    layout = plan_layout(Narrow(), load_config(config), 1, Target())
    planned = MemoryPlanner(Narrow(), load_config(config), layout, ActivationTrace()).slot_bytes()
    engine = windlass.initialize(model=Narrow(), config=config)[0]
    for _ in range(2):  # only from the second step on do local gradients have states
        engine.backward(engine(torch.ones(1, 32)).square().sum())
        engine.step()
    real = {slot: nbytes for (slot, _), nbytes in engine.report()["slots"].items()}
    engine.destroy()
    torch.distributed.destroy_process_group()
    assert planned["per-rank states"] == sum(real[key] for key in layout.states.rank_keys)
    assert sum(planned.values()) == sum(real.values())


@pytest.mark.parametrize("stage", [1, 2])
def test_chosen_tiers_leave_room_for_the_states_of_each_rank(stage: int) -> None:
    config = settings(stage, optimizer={"type": "OneBitAdam", "params": {"lr": 1e-3}}, offload="auto")
    layout = plan_layout(Narrow(), load_config(config), 1, Target(), memory=TierMemory(2**30))
    planned = MemoryPlanner(Narrow(), load_config(config), layout, ActivationTrace()).slot_bytes()
    assert layout.choice is not None and layout.choice.used[Tier.DEVICE] >= sum(planned.values())
    needed = layout.choice.used[Tier.DEVICE]
    with pytest.raises(ConfigError, match=f"lacks 1 bytes of offload.host_memory .{needed:,} of {needed - 1:,}"):
        windlass.initialize(model=Narrow(), config={**config, "offload": {"host_memory": needed - 1}})
    torch.distributed.destroy_process_group()
