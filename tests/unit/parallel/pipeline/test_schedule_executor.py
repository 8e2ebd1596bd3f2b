"""Tests of a schedule on one rank with all stages: messages, gradients, freed memory and errors."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.comm.mesh_axis import single_rank_axis
from windlass.parallel.pipeline.pipeline_schedules import ScheduleName, build_forward_schedule, build_schedule
from windlass.parallel.pipeline.pipeline_sequential import PipelineSequential
from windlass.parallel.pipeline.remote_parameters import drop_remote_parameters
from windlass.parallel.pipeline.schedule_executor import (
    ExecutorCallbacks,
    ScheduleFailed,
    execute_schedule,
    make_shape_key,
)
from windlass.parallel.pipeline.stage_message import pack_message
from windlass.parallel.pipeline.stage_transfers import StageTransfers
from windlass.parallel.pipeline.transfer_order import add_transfers

WIDTH, CPU = 4, torch.device("cpu")


class Pair(NamedTuple):
    """Named tuple of two values."""

    a: Any
    b: Any


class Stranger:
    """Object that holds a tensor in an attribute, which messages do not search."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(2)


def test_values_are_flattened_and_unflattened() -> None:
    x, y = torch.randn(2, 3, requires_grad=True), torch.arange(4)
    value = {"x": (x, [y, None, 3]), "pair": Pair(x, "text"), "none": None, "scalar": torch.tensor(2.0)}
    form, tensors = pack_message(value)
    assert [spec.shape for spec in form.tensor_specs] == [(2, 3), (4,), ()] and len(tensors) == 3  # x is sent once
    assert [spec.requires_grad for spec in form.tensor_specs] == [True, False, False] and len(
        form.differentiable_specs
    ) == 1
    assert [spec.nbytes for spec in form.tensor_specs] == [24, 32, 4]
    again = form.fill([tensor.detach() for tensor in tensors])
    assert isinstance(again["pair"], Pair) and again["pair"].b == "text" and again["x"][1][1:] == [None, 3]
    assert torch.equal(again["x"][0], x) and again["x"][0] is again["pair"].a
    assert form.matches(pack_message(value)[0]) and not form.matches(pack_message({**value, "none": 1})[0])
    assert not form.matches(pack_message({**value, "scalar": torch.tensor([2.0])})[0])


def test_unsupported_values_are_refused() -> None:
    with pytest.raises(
        ModelError, match=r"returned tuple with a tensor of shape \(2,\) in an object of unknown structure"
    ):
        pack_message((1, Stranger()))


def test_batches_are_identified_by_shapes() -> None:
    batch = {"ids": torch.zeros(2, 3), "more": (torch.ones(1, dtype=torch.int64), None)}
    assert make_shape_key(batch) == (((2, 3), torch.float32), ((1,), torch.int64))
    assert make_shape_key(batch) != make_shape_key({"ids": torch.zeros(2, 4), "more": batch["more"]})


def _module(depth: int = 4, **more: Any) -> PipelineSequential:
    torch.manual_seed(0)
    layers: list[Any] = [nn.Linear(WIDTH, WIDTH) for _ in range(depth)]
    return PipelineSequential(layers, loss_fn=F.mse_loss, virtual_stages=depth, **more)


def _run(model: PipelineSequential, name: ScheduleName, batches: list[Any], **around: Any) -> Any:
    made = build_schedule(name, 1, len(batches), model.total_stages)
    return execute_schedule(
        add_transfers(made)[0],
        model,
        StageTransfers(single_rank_axis("pp"), CPU),
        batches,
        ExecutorCallbacks(call_module=model, **around),
    )


def _batches(count: int) -> list[Any]:
    return [tuple(torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(n))) for n in range(count)]


@pytest.mark.parametrize("name", ["gpipe", "interleaved"])
def test_one_rank_with_all_stages_gives_the_gradients_of_a_plain_backward(name: ScheduleName) -> None:
    model, plain, batches = _module(), _module(), _batches(3)
    ended = _run(model, name, batches, loss_factor=lambda: 1 / 3)
    for (x, y), item in zip(batches, ended, strict=True):
        loss = F.mse_loss(plain(x), y)
        (loss / 3).backward()
        assert torch.equal(item.loss, loss.detach()) and item.output is None and not item.loss.requires_grad
    for have, want in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(have.grad, want.grad, atol=1e-7)


def test_callbacks_are_called_in_order() -> None:
    text: list[Any] = []

    @contextmanager
    def hold() -> Iterator[None]:
        text.append("hold")
        yield
        text.append("go")

    def backward(run: Any, last: bool) -> None:
        text.append(last)
        run()

    def moved(batch: Any) -> Any:
        text.append("moved")
        return batch

    _run(_module(2), "gpipe", _batches(2), keep_unsharded=hold, run_backward=backward, to_device=moved)
    assert text == ["hold", "moved", "moved", False, False, False, True, "go"]


def test_stage_output_is_freed_after_it_is_sent() -> None:
    """The storage of a stage's output is freed after it is sent, before the backward, unless autograd saved it."""
    alive: list[int] = []

    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            gc.collect()
            held = [
                o.untyped_storage() for o in gc.get_objects() if isinstance(o, Tensor) and o.layout is torch.strided
            ]
            alive.append(len({item.data_ptr() for item in held if item.nbytes() == 1 << 22}))
            return x + self.weight

    model = PipelineSequential([Counts() for _ in range(4)], loss_fn=lambda out, _: out.sum(), virtual_stages=4)
    _run(model, "gpipe", [(torch.zeros(1 << 20), torch.zeros(()))])
    assert len(alive) == 4 and max(alive) <= 2  # the batch's input, and the last stage output


def test_without_gradients_outputs_can_be_kept() -> None:
    model, batches = _module(), _batches(2)
    program = add_transfers(build_forward_schedule(1, 2, model.total_stages))[0]
    with torch.no_grad():
        kept = execute_schedule(
            program,
            model,
            StageTransfers(single_rank_axis("pp"), CPU),
            batches,
            ExecutorCallbacks(call_module=model),
            keep_outputs=True,
        )
        plain = execute_schedule(
            program,
            model,
            StageTransfers(single_rank_axis("pp"), CPU),
            batches,
            ExecutorCallbacks(call_module=model),
            compute_loss=False,
        )
    assert all(torch.equal(item.output, model(x)) for item, (x, _) in zip(kept, batches, strict=True))
    assert [item.loss for item in plain] == [None, None] and [item.output for item in plain] == [None, None]


def test_loss_must_be_a_scalar() -> None:
    model = PipelineSequential([nn.Linear(WIDTH, WIDTH)], loss_fn=lambda out, _: out)
    with pytest.raises(ScheduleFailed) as halted:
        _run(model, "gpipe", _batches(1))
    assert isinstance(halted.value.error, ModelError) and halted.value.action is not None
    assert "a loss of shape [3, 4]; return a scalar" in str(halted.value.error)
    assert str(halted.value.action) == "F0.0"


def test_parameters_of_other_ranks_are_removed_from_the_optimizer() -> None:
    here, gone = nn.Linear(2, 2), nn.Linear(2, 2)
    ids = {id(p) for p in gone.parameters()}
    optimizer = torch.optim.SGD(
        [{"params": [here.weight, gone.weight], "lr": 1.0}, {"params": [gone.bias], "lr": 2.0}], momentum=0.9
    )
    optimizer.state[gone.weight]["momentum_buffer"] = torch.zeros(2, 2)
    kept, given = drop_remote_parameters(
        optimizer, [gone.weight, here.bias, ("name", gone.bias), ("name", here.weight)], ids
    )
    assert kept is optimizer and [len(group["params"]) for group in optimizer.param_groups] == [1, 0]
    assert optimizer.param_groups[0]["params"][0] is here.weight and not optimizer.state
    assert given is not None and given[0] is here.bias and given[1] == ("name", here.weight) and len(given) == 2
    _, groups = drop_remote_parameters(
        None, [{"params": [gone.weight, here.weight], "lr": 3.0}, {"params": gone.bias}], ids
    )
    assert groups is not None and groups[0]["lr"] == 3.0 and [len(group["params"]) for group in groups] == [1, 0]
    assert drop_remote_parameters(torch.optim.SGD, None, ids) == (torch.optim.SGD, None)
