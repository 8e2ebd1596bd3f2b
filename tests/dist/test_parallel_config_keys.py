"""Tests that keys of tensor and sequence parallelism reach the model: DeepSpeed's, and those of `parallel`."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import llama
from windlass.base.errors import ModelError
from windlass.parallel.pipeline.layer_specs import LayerSpec
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.placement import get_placement

STEPS, BOUND = 3, 1e-5
SGD = {"type": "SGD", "params": {"lr": 0.2}}


class Block(nn.Module):
    """Two pairs of matrices, with names that imply no sharding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 14), nn.Linear(14, 6)
        self.third, self.fourth = nn.Linear(6, 10), nn.Linear(10, 6)
        self.norm = nn.LayerNorm(6, elementwise_affine=False)  # its weight is None

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x + self.second(torch.tanh(self.first(x))))
        return x + self.fourth(torch.tanh(self.third(x)))


class Net(nn.Module):
    """Model of user-defined blocks that returns a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return (x - y).square().mean()


def batch(step: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(step)
    return torch.randn(5, 6, generator=draw), torch.randn(5, 6, generator=draw)


def specs(default: bool) -> dict[str, Any]:
    """Return rules that shard only the first pair of each block.

    A rule for `third` comes after one that skips it, and so has no effect.
    """
    layers = [
        {"patterns": [r".*\.first\.weight$"], "partition_type": "column"},
        {"patterns": r"blocks\.\d+\.second", "partition_type": "row"},
        {"patterns": [r".*(third|fourth)"], "partition_type": "skip"},
        {"patterns": [r".*third"], "partition_type": "column"},
    ]
    section = {"autotp_size": 2, "partition_config": {"use_default_specs": default, "layer_specs": layers}}
    return {"tensor_parallel": section}


def own_table() -> dict[str, Any]:
    lines = {r".*\.first": "column", r".*\.second": "row"}
    return {"parallel": {"tp": 2, "tensor_table": lines}}


def trained(more: dict[str, Any]) -> tuple[list[float], dict[str, tuple[int, ...]]]:
    import windlass

    config = {"train_micro_batch_size_per_gpu": 5, "gradient_clipping": 0, "optimizer": SGD, **more}
    engine = windlass.initialize(model=Net(), config=config)[0]
    losses = []
    for step in range(STEPS):
        loss = engine(*batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    shapes = {name: get_placement(p).local_shape for name, p in engine.module.named_parameters()}
    engine.destroy()
    return losses, shapes


def plain() -> list[float]:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    losses = []
    for step in range(STEPS):
        loss = model(*batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("more", [specs(default=False), specs(default=True), own_table()])
def test_user_rules_shard_the_named_layers(more: dict[str, Any]) -> None:
    expected = plain()
    for losses, shapes in run_ranks(trained, 2, more):
        torch.testing.assert_close(losses, expected, rtol=BOUND, atol=0)
        assert (shapes["blocks.1.first.weight"], shapes["blocks.1.second.weight"]) == ((7, 6), (6, 7))
        if "tensor_parallel" in more:
            assert (shapes["blocks.0.third.weight"], shapes["blocks.0.fourth.weight"]) == ((10, 6), (6, 10))


def initialize_stages(more: dict[str, str], *last: Any) -> str:
    """Return the error of `initialize` for two stages and a table with `more` entries; empty if it succeeds.

    Args:
        last: class and arguments of the second stage's layer; a `Block` by default.
    """
    import windlass

    model = PipelineSequential([LayerSpec(Block), LayerSpec(*(last or (Block,)))], num_stages=2)
    table = {r"\d\.first": "column", r"\d\.second": "row", **more}
    parallel = {"pp": 2, "tp": 2, "tensor_table": table}
    try:
        engine = windlass.initialize(
            model=model, config={"train_micro_batch_size_per_gpu": 5, "optimizer": SGD, "parallel": parallel}
        )[0]
    except windlass.WindlassError as error:
        return str(error)
    engine.destroy()
    return ""


def test_a_key_that_applies_to_no_stage_is_refused_on_all_ranks() -> None:
    assert run_ranks(initialize_stages, 4, {r"1\.(third|fourth)": "replicated"}) == [""] * 4
    for text in run_ranks(initialize_stages, 4, {r"2\.third": "replicated"}):
        assert r"the key '2\\.third', which matches no module" in text
    for text in run_ranks(initialize_stages, 4, {r"\d\.norm": "row"}):
        assert "which matches 0.norm, a LayerNorm, not a linear layer" in text


def test_a_stage_that_cannot_be_divided_raises_on_all_ranks() -> None:
    texts = run_ranks(initialize_stages, 4, {"1": "vocabulary"}, nn.Linear, 6, 1, timeout=120)
    assert all("can't shard 1: 1 tokens are too few for 2 ranks" in text for text in texts)
    assert [text.endswith(" (raised on rank 2)") for text in texts] == [True, True, False, False]


def time_layers() -> str:
    """Return the error of `initialize` if layers cannot be timed, on rank 0 alone."""
    import windlass
    from tests.causal_models import build
    from windlass.engine import parallelize

    error = ModelError("no memory")
    config = {"train_micro_batch_size_per_gpu": 1, "parallel": {"pp": 2}, "pipeline": {"partition": "time"}}
    with (
        mock.patch.object(parallelize, "measure_model_layer_times", side_effect=error),
        pytest.raises(ModelError) as raised,
    ):
        windlass.initialize(model=build("llama"), config={**config, "optimizer": {"type": "AdamW"}})
    return str(raised.value)


def test_layers_that_cannot_be_timed_raise_on_all_ranks() -> None:
    assert run_ranks(time_layers, 2, timeout=120) == ["no memory", "no memory (raised on rank 0)"]


def along(parallel: dict[str, Any], axis: str) -> tuple[list[float], dict[str, int]]:
    import windlass

    torch.manual_seed(1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.5,
        "optimizer": SGD,
        "parallel": parallel,
    }
    engine = windlass.initialize(model=llama(tied=False), config=config)[0]
    losses = []
    for step in range(STEPS):
        ids = torch.randint(0, 30, (2, 13), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    moved = dict(engine._sharded.mesh.axes[axis].traffic.bytes_moved)
    engine.destroy()
    return losses, moved


KINDS: list[tuple[dict[str, Any], str, set[str]]] = [
    ({"tp": 2}, "tp", {"all_reduce"}),
    ({"tp": 2, "tp_sequence_norms": True}, "tp", {"all_reduce", "all_gather", "reduce_scatter"}),
    ({"sp": 2}, "sp", {"all_to_all"}),
    ({"sp": 2, "sp_mode": "ring"}, "sp", {"pass_on"}),
    ({"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}, "sp", {"all_to_all", "pass_on"}),
]


@pytest.mark.parametrize(("parallel", "axis", "operations"), KINDS)
def test_each_kind_trains_as_one_process_with_the_expected_traffic(
    parallel: dict[str, Any], axis: str, operations: set[str]
) -> None:
    (item, _), *_ = run_ranks(along, 1, {}, "tp")
    for losses, moved in run_ranks(along, parallel[axis], parallel, axis):
        torch.testing.assert_close(losses, item, rtol=BOUND, atol=0)
        large = {name for name, nbytes in moved.items() if nbytes > 2000}  # without the loss and counts of tokens
        assert large == operations
