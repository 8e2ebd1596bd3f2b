"""Tests that layers which share modules or parameters train as in one process, with dp, pp, tp and sp."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import windlass
from tests.dist.harness import run_ranks
from tests.dist.parallel_runs import build
from windlass.base.errors import ModelError

STEPS, ROWS, LENGTH, RATE = 3, 4, 9, 0.3


def _share_layer(model: Any) -> None:
    model.model.layers[3] = model.model.layers[0]


def _share_neighbour(model: Any) -> None:
    model.model.layers[1] = model.model.layers[0]


def _share_inner(model: Any) -> None:
    model.model.layers[2] = model.model.layers[1]


def _share_mlp(model: Any) -> None:
    model.model.layers[3].mlp = model.model.layers[0].mlp


def _share_weight(model: Any) -> None:
    model.model.layers[3].mlp.up_proj.weight = model.model.layers[0].mlp.up_proj.weight


def _share_norm_and_output(model: Any) -> None:
    layers = model.model.layers
    layers[2].input_layernorm = layers[1].input_layernorm
    layers[0].self_attn.o_proj.weight = layers[3].self_attn.o_proj.weight


def _share_with_tied_head_and_frozen_part(model: Any) -> None:
    layers = model.model.layers
    model.lm_head.weight = model.model.embed_tokens.weight
    layers[3].mlp, layers[2].self_attn.q_proj = layers[0].mlp, layers[1].self_attn.q_proj
    layers[2].mlp.requires_grad_(False)


SHARINGS: dict[str, Callable[[Any], None]] = {
    "layer": _share_layer,
    "neighbour": _share_neighbour,
    "inner": _share_inner,
    "mlp": _share_mlp,
    "weight": _share_weight,
    "norm and output": _share_norm_and_output,
    "tied and frozen": _share_with_tied_head_and_frozen_part,
}


def _model(sharing: str) -> nn.Module:
    model = build("llama", tied=False)
    SHARINGS[sharing](model)
    return model


def _micro_batches(step: int) -> tuple[Tensor, ...]:
    return torch.randint(30, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step)).chunk(2)


def _train_plainly(sharing: str) -> tuple[list[float], dict[str, Tensor]]:
    model = _model(sharing)
    optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=RATE)
    losses = []
    for step in range(STEPS):
        mean = 0.0
        for part in _micro_batches(step):
            loss = model(input_ids=part, labels=part).loss / 2
            loss.backward()
            mean += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean)
    return losses, {name: value.detach() for name, value in model.named_parameters()}


def _train(sharing: str, parallel: dict[str, Any], more: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    config = {
        "train_batch_size": ROWS,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 0.0,
        "optimizer": {"type": "SGD", "params": {"lr": RATE}},
        "parallel": parallel,
        **more,
    }
    engine = windlass.initialize(model=_model(sharing), config=config)[0]
    replicas = dist.get_world_size() // math.prod(size for key, size in parallel.items() if key in ("tp", "pp", "sp"))
    losses = []
    for step in range(STEPS):
        parts = [part.chunk(replicas)[engine.mesh.dense.data.index % replicas] for part in _micro_batches(step)]
        if "pp" in parallel:
            losses.append(float(engine.train_batch(iter([{"input_ids": part, "labels": part} for part in parts]))))
            continue
        total = torch.zeros(())
        for part in parts:
            loss = engine(input_ids=part, labels=part).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / 2
        dist.all_reduce(total)
        losses.append(float(total) / dist.get_world_size())
    state = engine.full_state_dict()
    engine.destroy()
    return losses, state if dist.get_rank() == 0 else {}


INTERLEAVED = {"pipeline": {"schedule": "interleaved", "virtual_stages": 2}}
CHECKPOINTED = {"pipeline": {"activation_checkpoint_interval": 1}}
TIMED = {"pipeline": {"partition": "time"}}


def _stage(stage: int) -> dict[str, Any]:
    return {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}


_QUICK = [
    ("layer", 2, {"pp": 2}, _stage(1)),
    ("neighbour", 2, {"pp": 2}, CHECKPOINTED),
    ("mlp", 2, {"tp": 2}, _stage(0)),
    ("weight", 2, {"tp": 2, "tp_sequence_norms": True}, _stage(3)),
    ("inner", 2, {"tp": 2, "tp_sequence_norms": True}, _stage(2)),
]
_SLOW = [
    (sharing, math.prod(parallel.get(axis, 1) for axis in ("pp", "tp", "sp")) * replicas, parallel, more)
    for sharing in SHARINGS
    for parallel, replicas, more in (
        ({"pp": 2}, 1, INTERLEAVED),
        ({"pp": 2}, 1, TIMED),
        ({"pp": 2}, 2, _stage(3)),
        ({"pp": 2, "tp": 2}, 1, _stage(1)),
        ({"tp": 2}, 1, _stage(3)),
        ({"tp": 2, "tp_overlap_chunks": 2}, 2, _stage(1)),
        ({"sp": 2}, 1, _stage(1)),
    )
]


def _refused(sharing: str) -> str:
    with pytest.raises(ModelError) as raised:
        _train(sharing, {"tp": 2, "tp_sequence_norms": True}, _stage(1))
    return str(raised.value)


@pytest.mark.parametrize("sharing", ["layer", "neighbour"])
def test_a_first_layer_that_runs_again_is_refused_with_sequence_norms(sharing: str) -> None:
    for message in run_ranks(_refused, 2, sharing):
        assert "first layer of model.layers" in message and "leave out tp_sequence_norms" in message


@pytest.mark.parametrize(
    ("sharing", "ranks", "parallel", "more"),
    [*_QUICK, *(pytest.param(*row, marks=pytest.mark.slow) for row in _SLOW)],
    ids=str,
)
def test_layers_that_share_modules_train_as_in_one_process(
    sharing: str, ranks: int, parallel: dict[str, Any], more: dict[str, Any]
) -> None:
    losses, parameters = _train_plainly(sharing)
    found, state = run_ranks(_train, ranks, sharing, parallel, more)[0]
    assert found == pytest.approx(losses, rel=1e-5)
    for name, value in parameters.items():
        torch.testing.assert_close(state[name], value, rtol=1e-4, atol=1e-5, msg=f"{name} differs")
