"""Tests of long sequences under the engine, sharded over ranks and computed in tiles: training equals plain training.

The engines have no mesh with an axis sp: ranks along sp are data-parallel ranks of dense parameters, and here all ranks
are along sp.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import windlass
from tests.dist.harness import run_ranks
from tests.dist.test_sequence_parallel import axis_of_all, batch, build, check_close
from windlass.parallel import activation_checkpoint_api
from windlass.parallel.saved_tensor_offload import SavedTensorOffloader

# every parameter is resharded, no unit is prefetched, and none is kept for a later use
STRICT = {"stage3_prefetch_bucket_size": 0, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def plain_training(name: str, given: list[dict[str, Tensor]]) -> tuple[list[float], dict[str, Tensor]]:
    """Train in one process. Return losses and parameters."""
    model = build(name)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for step in given:
        loss = model(**step).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def config(stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9}},
        "gradient_clipping": 0.0,
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0, **zero},
    }


def trains(
    name: str,
    stage: int,
    zero: dict[str, Any],
    how: dict[str, Any] | None,
    long: dict[str, Any] | None,
    batches: Sequence[tuple[str, int]] = (("packed", 13), ("left", 12), ("answers", 14)),
) -> None:
    """Train under the engine, and compare losses and parameters with plain training."""
    import windlass
    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel
    from windlass.parallel.sequence.long_context import apply_long_context

    given = [batch(kind, length) for kind, length in batches]
    losses, expected = plain_training(name, given)
    model = build(name)
    if how is not None:
        apply_sequence_parallel(model, axis_of_all(), **how)
    if long is not None:
        apply_long_context(model, **long)
    engine = windlass.initialize(model=model, config=config(stage, zero))[0]
    engine.train()
    for step, loss in zip(given, losses, strict=True):
        actual = engine(**step).loss
        check_close(actual, torch.tensor(loss), "loss")
        engine.backward(actual)
        engine.step()
    for parameter_name, parameter in engine.module.named_parameters():
        check_close(windlass.zero.full_param(parameter), expected[parameter_name], parameter_name)


PARTS: dict[str, Any] = {"tiled_mlp": 3, "tiled_loss": 4}
HOST = {"offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("name", "how", "long"),
    [
        ("llama", {"sp_mode": "ulysses"}, PARTS),
        ("llama", {"sp_mode": "ring"}, None),
        ("gpt2", {"sp_mode": "ring"}, {**PARTS, "recompute": False}),
        ("gpt2", {"sp_mode": "ulysses"}, {"tiled_mlp": False, "tiled_loss": True}),
        ("llama", None, PARTS),
        ("gpt2", None, {**PARTS, "recompute": False}),
    ],
)
def test_long_context_trains_at_every_stage(
    stage: int, name: str, how: dict[str, Any] | None, long: dict[str, Any] | None
) -> None:
    run_ranks(trains, 2, name, stage, STRICT, how, long)


@pytest.mark.parametrize("transport", ["gloo", "shm"])
def test_parameters_and_optimizer_in_host_memory(transport: str) -> None:
    run_ranks(trains, 2, "llama", 3, HOST, {"sp_mode": "ring"}, PARTS, transport=transport)


def test_four_ranks() -> None:
    how = {"sp_mode": "ulysses+ring", "ulysses_degree": 2}
    run_ranks(trains, 4, "llama", 3, STRICT, how, PARTS)


def kept_elsewhere(tier: str, folder: str) -> int:
    """Train on longer sequences with offloaded layer inputs. Return the number of offloaded bytes."""
    long: dict[str, Any] = {**PARTS, "activation_tier": tier, **({"nvme_path": folder} if tier == "nvme" else {})}
    moved: list[int] = []
    keep = SavedTensorOffloader._offload

    def counted(self: SavedTensorOffloader, *args: Any) -> Any:
        kept = keep(self, *args)
        moved.append(kept.nbytes)
        return kept

    with patch.object(SavedTensorOffloader, "_offload", counted):
        trains("llama", 3, STRICT, {"sp_mode": "ring"}, long, [("packed", 63), ("plain", 64)])
    return sum(moved)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_offloaded_layer_inputs(tier: str, tmp_path: Path) -> None:
    """Exactly the hidden states before two layers are offloaded: 32 float32 features of each token of two samples.

    Rank 0 has 31 + 32 tokens of the sequences of 63 and 64 tokens, rank 1 has 32 + 32.
    """
    moved = run_ranks(kept_elsewhere, 2, tier, str(tmp_path), env={"WINDLASS_EMULATE_DEVICE": "1GB"})
    assert moved == [2 * 2 * tokens * 32 * 4 for tokens in (31 + 32, 32 + 32)]


@pytest.mark.parametrize("tier", ["device", "cpu"])
def test_recomputation_beside_states_on_disk(tier: str, tmp_path: Path) -> None:
    """The folder of the optimizer states on disk is not used for activations."""
    from windlass.config import load_config
    from windlass.engine.parallelize import apply_memory_savings

    offload = {"device": "nvme", "nvme_path": str(tmp_path)}
    config = load_config(
        {
            "train_batch_size": 1,
            "zero_optimization": {"stage": 2, "offload_optimizer": offload},
            "parallel": {"recompute": True, "activation_tier": tier},
        }
    )
    model = build("llama")
    apply_memory_savings(model, config)
    assert model.model.layers[0].gradient_checkpointing and not list(tmp_path.iterdir())


def checkpointed_by_section(section: dict[str, Any]) -> tuple[list[float], int]:
    """Train three steps. Return the losses, and the bytes of layer inputs that were offloaded."""
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation_checkpointing": section} if section else {}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {"stage": 3},
        **options,
    }
    engine: Any = windlass.initialize(model=build("llama"), config=config)[0]
    ids = torch.randint(0, 24, (2, 64), generator=torch.Generator().manual_seed(1)).to(engine.device)
    losses = []
    for _ in range(3):
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    counters = activation_checkpoint_api.get_offload_counters()
    engine.destroy()
    activation_checkpoint_api.set_options(None)
    return losses, counters.offloaded_bytes if counters is not None else 0


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_layers_checkpointed_by_the_section_store_their_inputs_in_its_tier(tier: str, tmp_path: Path) -> None:
    on_tier = {"enabled": True} | ({"cpu_checkpointing": True} if tier == "cpu" else {"nvme_path": str(tmp_path)})
    device = {"WINDLASS_EMULATE_DEVICE": "1GB"}
    plain, on_device, elsewhere = (
        run_ranks(checkpointed_by_section, 2, section, env=device) for section in ({}, {"enabled": True}, on_tier)
    )
    layers, nbytes = 2, 2 * 64 * 32 * 4  # two samples of 64 tokens with 32 float32 features
    for (losses, none), (same, still_none), (again, moved) in zip(plain, on_device, elsewhere, strict=True):
        assert losses == pytest.approx(same, rel=1e-6) and losses == pytest.approx(again, rel=1e-6)
        assert losses[2] < losses[0] and none == still_none == 0
        assert moved == 3 * layers * nbytes


def test_files_of_layer_inputs_lie_in_the_folder_of_the_checkpointing_section(tmp_path: Path) -> None:
    from windlass.config import load_config
    from windlass.engine.parallelize import apply_memory_savings

    own, other = tmp_path / "own", tmp_path / "other"
    offload = {"device": "nvme", "nvme_path": str(other)}
    config = {
        "train_batch_size": 1,
        "zero_optimization": {"stage": 2, "offload_optimizer": offload},
        "activation_checkpointing": {"nvme_path": str(own)},
        "parallel": {"recompute": True, "activation_tier": "nvme"},
    }
    for folder in (own, other):
        folder.mkdir()
    model = build("llama")
    apply_memory_savings(model, load_config(config))
    ids = torch.randint(0, 24, (2, 64))
    model(input_ids=ids, labels=ids).loss.backward()
    assert load_config(config).activation_paths == [str(own)]
    del config["activation_checkpointing"]
    assert load_config(config).activation_paths == [str(other)]
