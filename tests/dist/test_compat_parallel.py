"""Tests that DeepSpeed scripts with experts, sequence, tensor and pipeline parallelism train as one process does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import llama
from tests.oracle import relative_error
from windlass.base.errors import ModelError

STEPS, ROWS, WIDTH, LR = 4, 6, 8, 0.1
BOUND = 1e-5
Tensors = dict[str, Tensor]


def ds(name: str) -> Any:
    """Return `deepspeed.<name>`. Importing the module would leave it imported in the processes of all tests."""
    from windlass.compat.stand_in_names import STAND_IN_NAMES

    return STAND_IN_NAMES[f"deepspeed.{name}"].resolve(f"deepspeed.{name}")


def config(stage: int, **more: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "SGD", "params": {"lr": LR, "momentum": 0.9}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **more,
    }


def batch(reader: int, step: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(100 * reader + step)
    return torch.randn(rows, WIDTH, generator=draw), torch.randn(rows, WIDTH, generator=draw)


def plain(model: nn.Module, loss_of: Callable[[nn.Module, int, int], Tensor], readers: int) -> tuple[Any, Tensors]:
    """Train in one process. Return the losses by step and data-loading rank, and the final model."""
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    losses = []
    for step in range(STEPS):
        each = [loss_of(model, reader, step) for reader in range(readers)]
        torch.stack(each).mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        losses.append([loss.item() for loss in each])
    return losses, {name: value.detach().clone() for name, value in model.state_dict().items()}


def check(found: Tensors, wanted: Tensors) -> None:
    assert found.keys() == wanted.keys()
    error, where = relative_error(found, wanted)
    assert error <= BOUND, (where, error)


# ------------------------------------------------------------------------------------------------------------- experts


class Mixed(nn.Module):
    """Model with two expert layers, whose auxiliary losses it adds to its loss, as in DeepSpeed's tutorial."""

    def __init__(self) -> None:
        super().__init__()
        layer = ds("moe.layer.MoE")
        self.first = nn.Linear(WIDTH, WIDTH)
        words: dict[str, Any] = {"num_experts": 4, "ep_size": 2, "drop_tokens": False}
        self.one = layer(hidden_size=WIDTH, expert=nn.Linear(WIDTH, WIDTH), k=1, use_residual=True, **words)
        expert = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.two = layer(WIDTH, expert, k=2, top2_2nd_expert_sampling=False, min_capacity=0, **words)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.first(x)
        hidden, first, _ = self.one(hidden)
        hidden, second, counts = self.two(hidden)
        assert counts.shape == (4,)
        return functional.mse_loss(hidden, y) + 0.01 * (first + second)


def mixed() -> Mixed:
    torch.manual_seed(2)
    return Mixed()


def mixed_loss(model: nn.Module, reader: int, step: int) -> Tensor:
    loss: Tensor = model(*batch(reader, step))
    return loss


def grouped(model: nn.Module) -> list[dict[str, Any]]:
    """Return the optimizer's groups as scripts make them."""
    given = {"params": list(model.parameters()), "name": "parameters"}
    groups: list[dict[str, Any]] = ds("moe.utils.split_params_into_different_moe_groups_for_optimizer")(given)
    return groups


def mixture_script(stage: int, folder: str) -> tuple[list[float], Tensors]:
    groups, initialize = ds("utils.groups"), ds("initialize")
    model = mixed()
    own = grouped(model)
    assert [group.get("moe", False) for group in own] == [False, True]
    if stage == 0:
        optimizer = torch.optim.SGD(own, lr=LR, momentum=0.9)
        engine: Any = initialize(model=model, optimizer=optimizer, config=config(0))[0]
    else:
        engine = initialize(model=model, model_parameters=own, config=config(stage))[0]
    rank, world = dist.get_rank(), dist.get_world_size()
    assert engine.has_moe_layers and engine.num_experts == [4, 4] and len(engine.moe_layers) == 2
    assert [type(gate) for gate in engine.gate_modules] == [ds("moe.sharded_moe.TopKGate")] * 2
    assert all(isinstance(layer.experts, ds("moe.experts.Experts")) for layer in engine.moe_layers)
    assert (engine.dp_world_size, engine.get_data_parallel_rank(), engine.mp_world_size) == (world, rank, 1)
    assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank // 2 * 2, rank // 2 * 2 + 1]
    assert groups._get_expert_parallel_rank("ep_size_2") == rank % 2 == groups._get_expert_parallel_rank("ep_size_2")
    assert groups._get_expert_data_parallel_group_ranks("ep_size_2") == list(range(rank % 2, world, 2))
    assert groups._get_max_expert_size_name() == "ep_size_2" and groups._get_data_parallel_world_size() == world
    assert list(engine.expert_parallel_group) == list(engine.expert_data_parallel_group) == ["ep_size_2"]
    experts = {name for name, p in engine.module.named_parameters() if ds("moe.utils.is_moe_param")(p)}
    assert experts and all(".deepspeed_experts." in name for name in experts)
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(rank, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if step == 1:
            engine.save_checkpoint(folder, tag="middle")
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.load_checkpoint(folder, tag="middle")
    again = [engine.eval_batch(batch(rank, 2)).item(), losses[2]]  # without dropout equal to the training loss
    torch.testing.assert_close(again[0], again[1], rtol=BOUND, atol=0)
    engine.destroy()
    assert groups._get_expert_parallel_group_dict() == {}, "an engine that is gone is not asked"
    return losses, state


@pytest.mark.parametrize(("stage", "ranks"), [(0, 2), pytest.param(1, 2, marks=pytest.mark.slow), (2, 4), (3, 2)])
def test_moe_script_trains_as_one_process(stage: int, ranks: int, tmp_path: Path) -> None:
    seen = run_ranks(mixture_script, ranks, stage, str(tmp_path), timeout=120)
    losses, state = plain(mixed(), mixed_loss, ranks)
    for rank, (result, _) in enumerate(seen):
        torch.testing.assert_close(result, [step[rank] for step in losses], rtol=BOUND, atol=0)
    check(seen[0][1], state)


# ----------------------------------------------------------------------------------------------------------- sequences


def samples(reader: int, step: int) -> dict[str, Tensor]:
    ids = torch.randint(0, 30, (2, 14), generator=torch.Generator().manual_seed(100 * reader + step))
    labels = ids.clone()
    labels[reader % 2, : 5 + step] = -100  # prompt tokens have no label
    return {"input_ids": ids, "labels": labels}


def language_loss(model: nn.Module, reader: int, step: int) -> Tensor:
    loss: Tensor = model(**samples(reader, step)).loss
    return loss


def ulysses_script(stage: int) -> list[float]:
    """Run the tutorial's script: register, load, initialize, adapt the loader, weight the partial losses by tokens."""
    groups, initialize = ds("utils.groups"), ds("initialize")
    ulysses = "runtime.sequence_parallel.ulysses_sp"
    mpu = ds(f"{ulysses}.UlyssesSPAttentionHF").register_with_transformers(
        model_name_or_path="some/model",
        core_attn_implementation="sdpa",
        sequence_parallel_size=2,
        micro_batch_size=2,
        seq_length=None,
        seq_length_is_variable=True,
    )
    torch.manual_seed(1)
    model = llama(tied=False)
    requested = config(stage, train_micro_batch_size_per_gpu=2)
    engine: Any = initialize(config=requested, model=model, model_parameters=model.parameters(), mpu=mpu)[0]
    group, size = groups._get_sequence_parallel_group(), groups._get_sequence_parallel_world_size()
    rank = groups._get_sequence_parallel_rank()
    assert size == 2 == engine.sequence_parallel_size and rank == dist.get_rank() % 2
    assert (engine.dp_world_size, engine.seq_dp_world_size) == (1, 2) and engine.train_batch_size() == 2
    assert engine.seq_parallel_group is not None and engine.mpu is mpu
    read = [samples(dist.get_rank(), step) for step in range(STEPS // 2)]
    loader = ds(f"{ulysses}.UlyssesSPDataLoaderAdapter")(
        read, sp_rank=rank, sp_group=group, sp_world_size=size, device=engine.device
    )
    losses = []
    for part in loader:
        outputs = engine(**part)
        targets = part["shift_labels"]
        assert targets.shape == (2, 7)
        loss = engine.module.loss_function(
            logits=outputs.logits, labels=None, shift_labels=targets, vocab_size=engine.module.config.vocab_size
        )
        of_ranks = torch.distributed.nn.functional.all_gather(loss, group=group)
        tokens = torch.distributed.nn.functional.all_gather((targets != -100).sum(), group=group)
        loss = sum(of_ranks[r] * tokens[r] for r in range(size)) / sum(tokens)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.destroy()
    return losses


@pytest.mark.parametrize("stage", [0, 3])
def test_a_ulysses_script_trains_as_one_process(stage: int) -> None:
    """Batches alternate between ranks: rank 0's and rank 1's batch of step 0, then both batches of step 1."""
    torch.manual_seed(1)
    losses, _ = plain(llama(tied=False), lambda model, _, turn: language_loss(model, turn % 2, turn // 2), 1)
    for result in run_ranks(ulysses_script, 2, stage):
        torch.testing.assert_close(result, [step[0] for step in losses], rtol=BOUND, atol=0)


class Attending(nn.Module):
    """Script's own layer, with attention over the tokens of all ranks of `group`."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.attention = attend if group is None else ds("sequence.layer.DistributedAttention")(attend, group)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        heads = self.qkv(x).view(*x.shape[:2], 2, -1).split(WIDTH // 2, dim=-1)
        mixed = self.attention(*heads)
        return functional.mse_loss(x + self.out(mixed.flatten(2)), y)


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3)


def attending(group: Any = None) -> nn.Module:
    torch.manual_seed(4)
    return Attending(group)


def tokens_of(step: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets `[tokens, samples, features]`."""
    draw = torch.Generator().manual_seed(step)
    return torch.randn(6, 2, WIDTH, generator=draw), torch.randn(6, 2, WIDTH, generator=draw)


def mesh_script(by_config: bool) -> tuple[list[float], Tensors]:
    """Run a script that shards sequences itself, as with DeepSpeed's `mesh_param`."""
    groups, initialize = ds("utils.groups"), ds("initialize")
    ds("init_distributed")()
    ds("runtime.sequence_parallel.parallel_state_sp").initialize_sequence_parallel(2)
    group = ds("runtime.sequence_parallel.parallel_state_sp").get_sequence_parallel_group()
    keys = {"sequence_parallel_size": 2, "data_parallel_size": 1} if by_config else {}
    engine: Any = initialize(
        model=attending(group), config=config(2, **keys), mesh_param=None if by_config else (1, 2)
    )[0]
    rank = dist.get_rank()
    assert engine.mesh_device.mesh_dim_names == ("data_parallel", "sequence_parallel")
    assert groups.mesh_device is engine.mesh_device
    assert groups._get_sequence_parallel_world_size() == 2 and groups._get_data_parallel_world_size() == 1
    losses = []
    for step in range(STEPS):
        loss = engine(*(part.chunk(2)[rank] for part in tokens_of(step)))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("by_config", [False, True])
def test_script_that_shards_sequences_itself_trains_as_one_process(by_config: bool) -> None:
    losses, state = plain(attending(), lambda model, _, step: model(*tokens_of(step)), 1)
    seen = run_ranks(mesh_script, 2, by_config)
    means = [sum(pair) / 2 for pair in zip(seen[0][0], seen[1][0], strict=True)]
    torch.testing.assert_close(means, [step[0] for step in losses], rtol=BOUND, atol=0)
    check(seen[0][1], state)


# ------------------------------------------------------------------------------------------------------------ matrices


def autotp_script(stage: int, by_call: bool, folder: str) -> tuple[list[float], Tensors]:
    groups, initialize = ds("utils.groups"), ds("initialize")
    torch.manual_seed(1)
    model = llama(tied=False)
    keys: dict[str, Any] = {} if by_call else {"tensor_parallel": {"autotp_size": 2}}
    if by_call:
        ds("set_autotp_mode")(training=True)
        model = ds("tp_model_init")(model, tp_size=2, dtype=torch.float32)
    requested = config(stage, train_micro_batch_size_per_gpu=2, **keys)
    engine: Any = initialize(model=model, model_parameters=model.parameters(), config=requested)[0]
    rank, world = dist.get_rank(), dist.get_world_size()
    assert engine.autotp_size() == 2 == engine.mp_world_size and engine.get_tensor_parallel_rank() == rank % 2
    assert engine.train_batch_size() == world and engine.dp_world_size == world // 2
    assert groups.get_tensor_model_parallel_world_size() == 2 == groups.get_model_parallel_world_size()
    assert groups.get_tensor_model_parallel_src_rank() == rank // 2 * 2
    assert dist.get_process_group_ranks(groups.get_data_parallel_group()) == list(range(rank % 2, world, 2))
    losses = []
    for step in range(STEPS):
        loss = engine(**samples(engine.get_data_parallel_rank(), step)).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    local = engine.module_state_dict() if stage < 3 else {}
    state = engine._consolidated_16bit_state_dict()
    assert (state is None) == (rank > 0)
    if local and state:
        name = "model.layers.0.mlp.up_proj.weight"
        assert local.keys() == state.keys() and local[name].shape[0] * 2 == state[name].shape[0]
    engine.save_16bit_model(folder, "whole.bin")
    results = {name: value.clone() for name, value in (state or {}).items()}
    engine.destroy()
    return losses, results


@pytest.mark.parametrize(("stage", "by_call", "ranks"), [(1, False, 2), (3, True, 2), (2, True, 4)])
def test_an_autotp_script_trains_as_one_process(stage: int, by_call: bool, ranks: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    losses, state = plain(llama(tied=False), language_loss, ranks // 2)
    seen = run_ranks(autotp_script, ranks, stage, by_call, str(tmp_path), timeout=120)
    for rank, (result, _) in enumerate(seen):
        torch.testing.assert_close(result, [step[rank // 2] for step in losses], rtol=BOUND, atol=0)
    check(seen[0][1], state)
    check(torch.load(tmp_path / "whole.bin"), state)


class Sum(torch.autograd.Function):
    """Output reduction of a row-parallel layer, as in Megatron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


class Copied(torch.autograd.Function):
    """Input copy of a column-parallel layer, as in Megatron."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Unit:
    """Megatron's model-parallel unit (mpu): neighbouring ranks have the shards of a matrix."""

    def __init__(self, size: int) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        self.size, self.rank = size, rank % size
        model = [list(range(first, first + size)) for first in range(0, world, size)]
        data = [list(range(first, world, size)) for first in range(size)]
        self.groups = {tuple(ranks): dist.new_group(ranks) for ranks in model + data if len(ranks) > 1}
        self.model = self.groups.get(tuple(model[rank // size]))
        self.data = self.groups.get(tuple(data[rank % size])) or dist.new_group([rank], use_local_synchronization=True)
        self.copies, self.copy = world // size, rank // size

    def get_model_parallel_world_size(self) -> int:
        return self.size

    def get_model_parallel_rank(self) -> int:
        return self.rank

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_world_size(self) -> int:
        return self.copies

    def get_data_parallel_rank(self) -> int:
        return self.copy

    def get_data_parallel_group(self) -> Any:
        return self.data


class Whole(nn.Module):
    """Model of two matrices. The first one fuses three matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.fused, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mixture: Any = None

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        a, b, c = self.fused(self.norm(x)).chunk(3, dim=-1)
        hidden = x + self.down(torch.tanh(a) * b + c)
        if self.mixture is not None:
            hidden, extra, _ = self.mixture(hidden)
            return functional.mse_loss(hidden, y) + 0.01 * extra
        return functional.mse_loss(hidden, y)


class Cut(Whole):
    """`Whole` as a Megatron script creates it: parameters are local shards with Megatron's attributes."""

    def __init__(self, unit: Unit) -> None:
        super().__init__()
        self.group, (size, rank) = unit.model, (unit.size, unit.rank)
        for parameter, dim, stride in ((self.fused.weight, 0, 3), (self.fused.bias, 0, 3), (self.down.weight, 1, 1)):
            pieces = parameter.data.chunk(stride * size, dim)
            parameter.data = torch.cat(pieces[rank::size], dim).clone()
            flags: Any = parameter
            flags.tensor_model_parallel, flags.partition_dim, flags.partition_stride = True, dim, stride

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        entered = Copied.apply(self.norm(x), self.group)
        a, b, c = self.fused(entered).chunk(3, dim=-1)
        part = functional.linear(torch.tanh(a) * b + c, self.down.weight)
        hidden = x + Sum.apply(part, self.group) + self.down.bias
        if self.mixture is not None:
            hidden, extra, _ = self.mixture(hidden)
            return functional.mse_loss(hidden, y) + 0.01 * extra
        return functional.mse_loss(hidden, y)


def megatron(make: Callable[[], Whole], experts: bool) -> Whole:
    torch.manual_seed(5)
    model = make()
    if experts:
        torch.manual_seed(6)
        model.mixture = ds("moe.layer.MoE")(WIDTH, nn.Linear(WIDTH, WIDTH), 4, ep_size=2, k=1, drop_tokens=False)
    return model


def megatron_script(stage: int, experts: bool, folder: str) -> tuple[list[float], Tensors]:
    groups, initialize = ds("utils.groups"), ds("initialize")
    unit = Unit(2)
    model = megatron(lambda: Cut(unit), experts)
    parameters: Any = grouped(model) if experts else model.parameters()
    engine: Any = initialize(model=model, model_parameters=parameters, config=config(stage), mpu=unit)[0]
    rank, world = dist.get_rank(), dist.get_world_size()
    assert engine.mpu is unit and engine.mp_world_size == 2 and engine.dp_world_size == world // 2
    assert groups.get_model_parallel_group() is unit.model and groups._get_data_parallel_rank() == rank // 2
    if experts:
        assert groups._get_expert_parallel_group_ranks("ep_size_2") == [rank % 2, rank % 2 + 2]
        assert len(list(model.mixture.deepspeed_moe.experts.deepspeed_experts)) == 2
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(rank // 2, step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    engine.save_checkpoint(folder, tag="end")
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state


def resumed(folder: str, experts: bool) -> Tensors:
    """Load a checkpoint of shards into a full model in one process."""
    model = megatron(Whole, experts)
    for module in model.modules():
        if hasattr(module, "ep_size"):
            module.ep_size = 1
    engine: Any = ds("initialize")(model=model, model_parameters=model.parameters(), config=config(0))[0]
    # the full model has other parameter groups
    engine.load_checkpoint(folder, tag="end", load_optimizer_states=not experts)
    results = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return results


@pytest.mark.parametrize(
    ("stage", "ranks", "experts"),
    [
        (0, 2, False),
        pytest.param(1, 4, False, marks=pytest.mark.slow),
        (3, 2, False),
        pytest.param(2, 4, True, marks=pytest.mark.slow),
        (3, 4, True),
    ],
)
def test_a_megatron_script_trains_and_saves_as_one_process(
    stage: int, ranks: int, experts: bool, tmp_path: Path
) -> None:
    losses, state = plain(megatron(Whole, experts), lambda m, reader, step: m(*batch(reader, step)), ranks // 2)
    seen = run_ranks(megatron_script, ranks, stage, experts, str(tmp_path))
    for rank, (result, _) in enumerate(seen):
        torch.testing.assert_close(result, [step[rank // 2] for step in losses], rtol=BOUND, atol=0)
    check(seen[0][1], state)
    (loaded,) = run_ranks(resumed, 1, str(tmp_path), experts)
    check(loaded, state)


# ----------------------------------------------------------------------------------------------------------- pipelines

MICROS = 3


def layers() -> list[Any]:
    """Return a layer sequence whose first and last layer share one matrix."""
    spec, tied = ds("pipe.LayerSpec"), ds("pipe.TiedLayerSpec")
    return [
        tied("matrix", nn.Linear, WIDTH, WIDTH, bias=False),
        spec(nn.Linear, WIDTH, 12),
        torch.tanh,
        spec(nn.Linear, 12, WIDTH),
        tied("matrix", nn.Linear, WIDTH, WIDTH, bias=False, forward_fn=lambda m, x: functional.linear(x, m.weight.t())),
    ]


def row(**words: Any) -> Any:
    torch.manual_seed(7)
    return ds("pipe.PipelineModule")(layers=layers(), loss_fn=functional.mse_loss, partition_method="uniform", **words)


def micro_batches(reader: int) -> Iterator[tuple[Tensor, Tensor]]:
    return (batch(reader, number) for number in range(100))


def pipeline_script(stage: int, kind: str) -> tuple[list[float], Tensors]:
    initialize = ds("initialize")
    words: dict[str, Any] = {"num_stages": 2}
    if kind == "topology":
        topology = ds("runtime.pipe.topology.PipeDataParallelTopology")
        words = {"topology": topology(num_pp=2, num_dp=dist.get_world_size() // 2)}
    model = row(**words)
    data = [batch(0, number) for number in range(40)] if kind == "data" else None
    requested = config(stage, gradient_accumulation_steps=MICROS, pipeline={"activation_checkpoint_interval": 1})
    engine, _, loader, _ = initialize(
        model=model,
        model_parameters=[p for p in model.parameters() if p.requires_grad],
        config=requested,
        training_data=None if data is None else [(x[i], y[i]) for x, y in data for i in range(ROWS)],
    )
    rank, world = dist.get_rank(), dist.get_world_size()
    assert isinstance(engine, ds("PipelineEngine")) and isinstance(engine, ds("DeepSpeedEngine"))
    assert engine.pipeline_parallelism and engine.num_stages == 2 and engine.stage_id == rank * 2 // world
    assert engine.is_first_stage() == (engine.stage_id == 0) and engine.is_last_stage() == (engine.stage_id == 1)
    assert (engine.grid.get_stage_id(), engine.get_pipeline_parallel_rank()) == (engine.stage_id,) * 2
    assert engine.grid.get_data_parallel_world_size() == world // 2 == engine.dp_world_size
    assert (engine.is_pipe_parallel, engine.is_model_parallel) == (True, False) and engine.mp_world_size == 2
    assert model.mpu() is engine.grid is engine.mpu and model.topology().get_dim("pipe") == 2
    assert (engine.prev_stage, engine.next_stage) == (engine.stage_id - 1, engine.stage_id + 1)
    assert engine.micro_batches == MICROS and engine.gradient_accumulation_steps() == MICROS
    assert engine.get_additional_losses() is None
    micros = None if kind == "data" else micro_batches(engine.get_data_parallel_rank())
    assert (loader is not None) == (kind == "data")
    losses = []
    for _ in range(STEPS):
        loss = engine.train_batch(data_iter=micros)
        assert engine.agg_train_loss is loss
        losses.append(loss.item())
    evaluated = engine.eval_batch(iter([batch(9, 0)]), num_micro_batches=1)
    losses.append(evaluated.item())
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize(
    ("stage", "kind", "ranks"), [(0, "stages", 2), (1, "topology", 4), (2, "data", 2), (3, "topology", 2)]
)
def test_a_pipeline_script_trains_as_one_process(stage: int, kind: str, ranks: int) -> None:
    seen = run_ranks(pipeline_script, ranks, stage, kind, timeout=120)
    model = row()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    expected = []
    for step in range(STEPS):
        each = [
            functional.mse_loss(model(x), y)
            for reader in range(ranks // 2)
            for x, y in [batch(reader, MICROS * step + micro) for micro in range(MICROS)]
        ]
        mean = torch.stack(each).mean()
        mean.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(mean.item())
    x, y = batch(9, 0)
    expected.append(functional.mse_loss(model(x), y).item())
    for actual, _ in seen:
        torch.testing.assert_close(actual, expected, rtol=BOUND, atol=0)
    check(seen[0][1], {name: value.detach() for name, value in model.state_dict().items()})


def own_split(bounds: list[int] | None, late: bool, virtual_stages: int) -> tuple[list[int], float]:
    """Train stages of a subclass that splits the layers itself, at `bounds`; None: by DeepSpeed's functions.

    Args:
        late: the configuration gives the number of stages, not the constructor.
    """
    from windlass.compat.balanced_partition import partition_balanced

    class Split(ds("pipe.PipelineModule")):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            stages, stage = self._topo.get_dim("pipe"), self._topo.get_coord(self.global_rank).pipe
            assert (self.num_stages, method) == (stages, "own")
            if stages == 1 or virtual_stages > 1:
                super()._partition_layers("parameters")
                return
            self.parts = bounds or partition_balanced(self._count_layer_params(), stages)
            assert self._find_layer_type("^linear$") == [0, 1, 3, 4]
            self._set_bounds(start=self.parts[stage], stop=self.parts[stage + 1])

    torch.manual_seed(7)
    number: dict[str, Any] = {} if late else {"num_stages": 2, "virtual_stages": virtual_stages}
    model = Split(layers(), loss_fn=functional.mse_loss, partition_method="own", **number)
    more = {"parallel": {"pp": 2}} if late else {}
    if virtual_stages > 1:
        more["pipeline"] = {"schedule": "interleaved", "virtual_stages": virtual_stages}
    engine = ds("initialize")(model=model, config=config(0, gradient_accumulation_steps=MICROS, **more))[0]
    loss = engine.train_batch(data_iter=micro_batches(0)).item()
    assert model.topology().get_dim("pipe") == 2
    engine.destroy()
    return list(model.parts), loss


@pytest.mark.parametrize(
    ("bounds", "late", "virtual_stages"),
    [([0, 1, 5], False, 1), ([0, 4, 5], True, 1), (None, False, 1), (None, True, 1), (None, False, 2)],
)
def test_a_subclass_splits_the_layers_of_a_pipeline(bounds: list[int] | None, late: bool, virtual_stages: int) -> None:
    """Stages follow the `_partition_layers` of a subclass, as in DeepSpeed."""
    model = row()
    with torch.no_grad():
        losses = [functional.mse_loss(model(x), y).item() for x, y in (batch(0, micro) for micro in range(MICROS))]
    for parts, loss in run_ranks(own_split, 2, bounds, late, virtual_stages):
        assert bounds is None or parts == bounds
        assert len(parts) == 2 * virtual_stages + 1
        assert loss == pytest.approx(sum(losses) / MICROS, rel=BOUND)


def bad_split() -> list[str]:
    class Short(ds("pipe.PipelineModule")):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            self.parts = [0, 3]

    class Own(ds("pipe.PipelineModule")):  # type: ignore[misc]
        def _partition_layers(self, method: str = "uniform") -> None:
            super()._partition_layers("uniform")
            self._set_bounds(*[(0, 1), (1, None)][self.global_rank])

    messages = []
    for kind in (Short, Own):
        with pytest.raises(ModelError) as raised:
            kind(layers(), num_stages=2, loss_fn=functional.mse_loss)
        messages.append(str(raised.value))
    return messages


def test_bounds_that_do_not_fit_the_stages_are_refused() -> None:
    """The error names the subclass, its bounds and the right ones."""
    for rank, (short, own) in enumerate(run_ranks(bad_split, 2)):
        assert "Short._partition_layers left [0, 3]" in short and "3 increasing numbers from 0 to 5" in short
        assert f"Own._partition_layers called _set_bounds{[(0, 1), (1, 5)][rank]} for stage {rank}" in own


class Pair(nn.Module):
    """Two matrices, to a larger width and back: full, or this rank's shards."""

    def __init__(self, unit: Unit | None = None) -> None:
        super().__init__()
        self.up, self.down, self.unit = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH), unit
        for parameter, dim in ((self.up.weight, 0), (self.up.bias, 0), (self.down.weight, 1)) if unit else ():
            assert unit is not None
            parameter.data = parameter.data.chunk(unit.size, dim)[unit.rank].clone()
            flags: Any = parameter
            flags.model_parallel, flags.partition_dim = True, dim

    def forward(self, x: Tensor) -> Tensor:
        entered = x if self.unit is None else Copied.apply(x, self.unit.model)
        part = functional.linear(torch.tanh(self.up(entered)), self.down.weight)
        full = part if self.unit is None else Sum.apply(part, self.unit.model)
        return x + full + self.down.bias


def pairs(unit: Unit | None = None, **words: Any) -> Any:
    torch.manual_seed(8)
    spec = ds("pipe.LayerSpec")
    layers = [spec(Pair, unit), spec(nn.LayerNorm, WIDTH), spec(Pair, unit), spec(nn.Linear, WIDTH, WIDTH)]
    return ds("pipe.PipelineModule")(layers, loss_fn=functional.mse_loss, partition_method="uniform", **words)


def slices_script(stage: int) -> tuple[list[float], Tensors]:
    """Train pipeline stages with matrices that the script has sharded itself, on a topology with three axes."""
    topology = ds("runtime.pipe.topology.PipeModelDataParallelTopology")(num_pp=2, num_mp=2, num_dp=1)
    model = pairs(Unit(2), topology=topology)
    engine: Any = ds("initialize")(model=model, config=config(stage, gradient_accumulation_steps=MICROS))[0]
    rank = dist.get_rank()
    assert engine.grid.get_slice_parallel_rank() == rank % 2 == engine.get_tensor_parallel_rank()
    assert engine.is_model_parallel and (engine.mp_world_size, engine.dp_world_size) == (4, 1)
    losses, micros = [], micro_batches(0)
    for _ in range(STEPS):
        losses.append(engine.train_batch(data_iter=micros).item())
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state


@pytest.mark.parametrize("stage", [0, 1])
def test_stages_with_matrices_sharded_by_the_script_train_as_one_process(stage: int) -> None:
    def loss_of(model: nn.Module, reader: int, step: int) -> Tensor:
        each = [functional.mse_loss(model(x), y) for x, y in (batch(0, MICROS * step + m) for m in range(MICROS))]
        return torch.stack(each).mean()

    losses, state = plain(pairs(), loss_of, 1)
    seen = run_ranks(slices_script, 4, stage)
    for result, _ in seen:
        torch.testing.assert_close(result, [step[0] for step in losses], rtol=BOUND, atol=0)
    check(seen[0][1], state)


def refused(what: str) -> str:
    try:
        if what == "mpu beside a pipeline":
            ds("initialize")(model=row(num_stages=2), config=config(0), mpu=Unit(2))
        elif what == "another order of ranks":
            topology = ds("runtime.pipe.topology.ProcessTopology")(["model", "pipe", "data"], [2, 2, 1])
            ds("initialize")(model=pairs(topology=topology), config=config(0))
        elif what == "group of others":
            apart = [dist.new_group([0, 2]), dist.new_group([1, 3])][dist.get_rank() % 2]
            ds("tp_model_init")(nn.Linear(2, 2), tp_size=2, dtype=torch.float32, tp_group=apart)
        else:
            unit = Unit(2)
            requested = config(0, tensor_parallel={"autotp_size": 4})
            ds("initialize")(model=megatron(lambda: Cut(unit), False), config=requested, mpu=unit)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("mpu beside a pipeline", "mpu must be None with a PipelineModule"),
        ("another order of ranks", "the topology orders ranks differently from the mesh"),
        ("group of others", "tp_group has the ranks"),
        ("two sizes", "tensor_parallel.autotp_size = 4 and mpu (tp) = 2 are two sizes of one axis, tp"),
    ],
)
def test_incompatible_options_are_refused_on_all_ranks(what: str, text: str) -> None:
    for reported in run_ranks(refused, 4, what):
        assert text in reported
