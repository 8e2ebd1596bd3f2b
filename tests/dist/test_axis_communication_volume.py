"""Tests that bytes moved along each axis by models of transformers equal the formulas of `parallel.comm_volumes`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from windlass.comm.mesh import build_mesh
from windlass.comm.mesh_axis import MeshAxis
from windlass.comm.mesh_shape import MeshShape
from windlass.parallel.comm_volumes import (
    CommVolume,
    StepWorkload,
    compute_expert_parallel_volumes,
    compute_sequence_parallel_volumes,
    compute_tensor_parallel_volumes,
)
from windlass.parallel.model_shape import ModelShape, from_transformers

TOKENS, SAMPLES = 24, 2
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "vocab_size": 40, "use_cache": False}


def config_of(**changes: Any) -> Any:
    import transformers as hf

    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return hf.LlamaConfig(**{**SIZES, **heads, **changes})


def moved(axis: MeshAxis, model: Any, tokens: int = TOKENS) -> dict[str, int]:
    """Return the bytes of one forward and backward on full sequences, by operation."""
    ids = torch.randint(0, 40, (SAMPLES, tokens), generator=torch.Generator().manual_seed(1))
    axis.traffic.reset()
    model(input_ids=ids, labels=ids).loss.backward()
    return dict(axis.traffic.bytes_moved)


def along_tp(cut_norms: bool, tied: bool, chunks: int, recompute: bool) -> dict[str, int]:
    import transformers as hf

    from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

    mesh = build_mesh(MeshShape(tp=torch.distributed.get_world_size()))
    model = hf.LlamaForCausalLM(config_of(tie_word_embeddings=tied))
    apply_tensor_parallel(model, mesh.tp, tp_sequence_norms=cut_norms, tp_overlap_chunks=chunks)
    if recompute:
        model.gradient_checkpointing_enable({"use_reentrant": True})
        model.enable_input_require_grads()
        model.train()
    return moved(mesh.tp, model)


def formula_bytes(found: Any) -> dict[str, int]:
    """Return the volumes of the formulas by operation."""
    totals: dict[str, int] = {}
    for volume in found:
        assert isinstance(volume, CommVolume)
        if volume.nbytes:
            totals[volume.operation] = totals.get(volume.operation, 0) + volume.nbytes
    return totals


TENSOR = [(False, False, 1, False), (False, True, 3, False), (True, False, 1, False), (False, False, 1, True)]


@pytest.mark.parametrize(("cut_norms", "tied", "chunks", "recompute"), TENSOR)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_layer_volumes(ranks: int, cut_norms: bool, tied: bool, chunks: int, recompute: bool) -> None:
    tokens = SAMPLES * TOKENS
    work = StepWorkload(tokens, activation_bytes=4, tp_sequence_norms=cut_norms, recompute=recompute)
    expected = formula_bytes(compute_tensor_parallel_volumes(3, tokens * 32 * 4, tokens, ranks, work))
    for actual in run_ranks(along_tp, ranks, cut_norms, tied, chunks, recompute):
        assert actual == expected


def along_tp_of_experts() -> dict[str, int]:
    import transformers as hf

    from windlass.parallel.tensor.apply_tensor_parallel import apply_tensor_parallel

    mesh = build_mesh(MeshShape(tp=torch.distributed.get_world_size()))
    config = hf.MixtralConfig(**SIZES, num_attention_heads=8, num_local_experts=4, num_experts_per_tok=3)
    model = hf.MixtralForCausalLM(config)
    apply_tensor_parallel(model, mesh.tp)
    return moved(mesh.tp, model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_tensor_parallel_experts_reduce_the_gradient_of_their_weights(ranks: int) -> None:
    tokens = SAMPLES * TOKENS
    expected = formula_bytes(
        compute_tensor_parallel_volumes(
            3, tokens * 32 * 4, tokens, ranks, StepWorkload(tokens, activation_bytes=4), top_k=3
        )
    )
    assert expected != formula_bytes(
        compute_tensor_parallel_volumes(3, tokens * 32 * 4, tokens, ranks, StepWorkload(tokens, activation_bytes=4))
    )
    for actual in run_ranks(along_tp_of_experts, ranks):
        assert actual == expected


def along_sp(kind: str, degree: int | None, dtype: torch.dtype, tokens: int = TOKENS) -> dict[str, int]:
    import transformers as hf

    from windlass.parallel.sequence.apply_sequence_parallel import apply_sequence_parallel

    mesh = build_mesh(MeshShape(sp=torch.distributed.get_world_size()))
    model = hf.LlamaForCausalLM(config_of(num_key_value_heads=2)).to(dtype)
    apply_sequence_parallel(model, mesh.sp, sp_mode=kind, ulysses_degree=degree)
    return moved(mesh.sp, model, tokens)


@pytest.mark.parametrize(
    ("ranks", "kind", "degree", "dtype"),
    [
        (2, "ulysses", 2, torch.float32),
        (4, "ulysses", 4, torch.bfloat16),
        (2, "ring", 1, torch.float32),
        (4, "ring", 1, torch.bfloat16),
        (4, "ulysses+ring", 2, torch.bfloat16),
    ],
)
def test_sequence_parallel_attention_volumes(ranks: int, kind: str, degree: int, dtype: torch.dtype) -> None:
    shape = ModelShape(hidden=32, layers=3, heads=8, kv_heads=2, vocabulary=40, intermediate=48)
    work = StepWorkload(SAMPLES * TOKENS, activation_bytes=dtype.itemsize, ulysses_degree=degree)
    expected = formula_bytes(compute_sequence_parallel_volumes(shape, 3, ranks, 1, work))
    for actual in run_ranks(along_sp, ranks, kind, degree if kind == "ulysses+ring" else None, dtype):
        scalars = {name: nbytes for name, nbytes in actual.items() if name not in ("all_to_all", "pass_on")}
        assert all(nbytes < 1000 for nbytes in scalars.values()), scalars  # the loss and counts of tokens
        assert {name: actual[name] for name in actual if name not in scalars} == expected


@pytest.mark.parametrize(("ranks", "kind", "degree"), [(2, "ulysses", 2), (2, "ring", 1), (4, "ulysses+ring", 2)])
def test_each_sequence_is_sharded_by_itself(ranks: int, kind: str, degree: int) -> None:
    """The ranks with the most tokens of a sequence of 7 have the most of each sample."""
    shape = ModelShape(hidden=32, layers=3, heads=8, kv_heads=2, vocabulary=40, intermediate=48)
    work = StepWorkload(SAMPLES * 7, activation_bytes=4, ulysses_degree=degree, samples=SAMPLES)
    expected = formula_bytes(compute_sequence_parallel_volumes(shape, 3, ranks, 1, work))
    moved_by = run_ranks(along_sp, ranks, kind, degree if kind == "ulysses+ring" else None, torch.float32, 7)
    most = {name: max(one.get(name, 0) for one in moved_by) for name in ("all_to_all", "pass_on")}
    assert {name: size for name, size in most.items() if size} == expected, moved_by


def along_ep() -> dict[str, int]:
    import transformers as hf

    from windlass.parallel.experts.apply_expert_parallel import apply_expert_parallel

    mesh = build_mesh(MeshShape(ep=torch.distributed.get_world_size()))
    config = hf.MixtralConfig(**SIZES, num_attention_heads=8, num_local_experts=4, num_experts_per_tok=4)
    model = hf.MixtralForCausalLM(config)
    apply_expert_parallel(model, mesh.ep)
    return moved(mesh.ep, model)


@pytest.mark.parametrize("ranks", [2, 4])
def test_expert_dispatch_volumes(ranks: int) -> None:
    """The volume of expert parallelism equals its formula. Each token chooses every expert, so routing is even."""
    work = StepWorkload(SAMPLES * TOKENS, activation_bytes=4)
    expected = formula_bytes(compute_expert_parallel_volumes(3, SAMPLES * TOKENS * 4, 32, ranks, work))
    counts = 3 * (ranks - 1) * (4 // ranks) * 8  # numbers of rows to receive, which the formula leaves out
    for actual in run_ranks(along_ep, ranks):
        assert actual["all_to_all"] - counts == expected["all_to_all"]


def test_model_shape_matches_the_model() -> None:
    shape = from_transformers(config_of().to_dict())
    assert shape == ModelShape(32, 3, 8, 40, kv_heads=4, head_dim=4, intermediate=48)
