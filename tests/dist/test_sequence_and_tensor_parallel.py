"""Tests that sequence parallelism on a tensor-parallel model gives the same losses and gradients as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_sequence_parallel import axis_of_all, batch, build, check_close, loss_and_gradients

Case = tuple[str, dict[str, Any], str]


def law(cases: list[Case], kind: str, tp: dict[str, Any], long: dict[str, Any] | None) -> None:
    """Compare two ranks along tp by two along sp with one process."""
    from tests.dist.tensor_parallel_runs import gather_full_tensor
    from windlass.comm.mesh import build_mesh
    from windlass.comm.mesh_shape import MeshShape
    from windlass.parallel.placement import get_placement
    from windlass.parallel.sequence import apply_long_context, apply_sequence_parallel
    from windlass.parallel.tensor import apply_tensor_parallel

    mesh = build_mesh(MeshShape(sp=2, tp=2))
    for name, changes, of in cases:
        given = batch(of, 13)
        plain, model = build(name, **changes), build(name, **changes)
        wanted_loss, expected = loss_and_gradients(plain, dict(given))
        apply_tensor_parallel(model, mesh.tp, **tp)
        apply_sequence_parallel(model, mesh.sp, sp_mode=kind)
        if long is not None:
            apply_long_context(model, **long)
        loss, gradients = loss_and_gradients(model, dict(given))
        check_close(loss, wanted_loss, "loss")
        for parameter_name, parameter in model.named_parameters():
            placement, mean = get_placement(parameter), gradients[parameter_name].clone()
            mesh.sp.all_reduce(mean).div_(2)
            if "tp" in placement.partial_axes:
                mesh.tp.all_reduce(mean)
            check_close(
                gather_full_tensor(mean, placement, mesh.tp), expected[parameter_name], f"{name} {of}: {parameter_name}"
            )
        model.eval()
        plain.eval()
        with torch.no_grad():
            check_close(model(**given).loss, plain(**given).loss, "evaluation")
            check_close(model(given["input_ids"]).logits, plain(given["input_ids"]).logits, "logits")


CASES: list[Case] = [
    ("llama", {}, "packed"),
    ("llama", {"num_key_value_heads": 1}, "left"),
    ("llama", {"tie_word_embeddings": True}, "answers"),
    ("gpt2", {}, "plain"),
]
PARTS = {"tiled_mlp": 3, "tiled_loss": 4}


@in_shares
@pytest.mark.parametrize(
    ("number", "kind", "tp", "long"),
    [
        (0, "ulysses", {}, None),
        (1, "ring", {}, PARTS),
        (2, "ulysses", {"tp_overlap_chunks": 2}, PARTS),
        (3, "ring", {"tp_sequence_norms": True}, {"tiled_mlp": False, "tiled_loss": 4}),
    ],
)
def test_tensor_and_sequence_parallel(
    number: int, kind: str, tp: dict[str, Any], long: dict[str, Any] | None, every: bool
) -> None:
    run_ranks(law, 4, share(CASES, number, 4, every), kind, tp, long)


def refused() -> str:
    from windlass.base.errors import ModelError
    from windlass.parallel.sequence import apply_long_context
    from windlass.parallel.tensor import apply_tensor_parallel

    model = build("llama")
    apply_tensor_parallel(model, axis_of_all("tp"), tp_sequence_norms=True)
    with pytest.raises(ModelError) as results:
        apply_long_context(model)
    apply_long_context(model, tiled_mlp=False)  # the refused call changed nothing
    return str(results.value)


def test_mlps_that_gather_tokens_cannot_be_tiled() -> None:
    """An MLP that gathers tokens is refused: ranks with different numbers of tiles would deadlock."""
    assert all("tiled_mlp=False" in results for results in run_ranks(refused, 2))
