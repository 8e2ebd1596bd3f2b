"""Tests that the bytes of a simulated step equal the counters of real ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from windlass.config import load_config
from windlass.parallel.model_shape import from_transformers
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.predict_step import predict_step

SAMPLES, LENGTH, MICRO = 2, 16, 2
SIZES = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False},
}
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": None}
# The default settings keep this model unsharded after the first gather of a step.
PLAIN: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}

CASES: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({}, 3, {"stage3_param_persistence_threshold": 100, "stage3_max_reuse_distance": 0}),
    ({"tp": 2, "tp_sequence_norms": True}, 0, {}),
    ({"ep": 2}, 2, {}),
    ({"pp": 2}, 0, {}),
]
MORE: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    *(({}, stage, {}) for stage in range(4)),
    ({}, 3, PLAIN),
    ({"tp": 2}, 0, {}),
    ({"sp": 2}, 0, {}),
    ({"sp": 2, "sp_mode": "ring"}, 1, {}),
]
FOUR: list[tuple[dict[str, Any], int, dict[str, Any]]] = [
    ({"dp_replicate": 2}, 3, PLAIN),
    ({"tp": 2, "pp": 2}, 0, {}),
    ({"pp": 2}, 3, PLAIN),
    ({"ep": 2, "sp": 2}, 2, {}),
    ({"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}, 1, {}),
]


def config_of(axes: dict[str, Any], stage: int, zero: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": SAMPLES,
        "gradient_accumulation_steps": MICRO,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {"stage": stage, **zero},
        "parallel": axes,
        "comm": {"transport": "gloo"},
    }


def moved(cases: list[tuple[dict[str, Any], int, dict[str, Any]]]) -> list[tuple[int, dict[str, dict[str, int]]]]:
    """Return, for each case, the pipeline stage and the bytes that the rank received in the second step."""
    return [moved_by(*case) for case in cases]


def moved_by(axes: dict[str, Any], stage: int, zero: dict[str, Any]) -> tuple[int, dict[str, dict[str, int]]]:
    import transformers as hf

    import windlass

    torch.manual_seed(0)
    model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**SIZES))
    if "ep" in axes:
        model = hf.MixtralForCausalLM(hf.MixtralConfig(**EXPERTS))
    engine: Any = windlass.initialize(model=model, config=config_of(axes, stage, zero))[0]
    ids = torch.randint(0, 64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    for _ in range(2):
        for axis in engine.mesh.axes.values():
            axis.traffic.reset()
        if engine.mesh.pp.size > 1:
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * MICRO))
            continue
        for _ in range(MICRO):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    found = {name: dict(axis.traffic.bytes_moved) for name, axis in engine.mesh.axes.items() if axis.size > 1}
    found["data"] = dict(engine.report()["bytes_moved"])
    if axes.get("dp_replicate", 1) > 1:
        found["data"].pop("replicate")  # with the norm and other scalars
    pipe = engine.mesh.pp.index
    engine.destroy()
    return pipe, {axis: nonzero for axis, of in found.items() if (nonzero := {k: v for k, v in of.items() if v})}


def check(ranks: int, cases: list[tuple[dict[str, Any], int, dict[str, Any]]]) -> None:
    shapes = {experts: from_transformers(EXPERTS if experts else SIZES) for experts in (False, True)}
    results = run_ranks(moved, ranks, cases)
    for number, (axes, stage, zero) in enumerate(cases):
        place = known_cluster("dgx-h100").with_devices(ranks)
        settings = load_config(config_of(axes, stage, zero))
        simulated = predict_step(shapes["ep" in axes], settings, place, world_size=ranks, length=LENGTH).moved
        for rank in results:
            pipe, counted = rank[number]
            if axes.get("dp_replicate", 1) > 1:
                simulated[pipe]["data"].pop("replicate", None)
            expected = {axis: {k: v for k, v in of.items() if v} for axis, of in simulated[pipe].items()}
            assert counted == {axis: of for axis, of in expected.items() if of}, (axes, stage, zero)


def test_simulated_bytes_equal_those_of_two_ranks() -> None:
    check(2, CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, MORE), (4, FOUR)])
def test_simulated_bytes_equal_those_of_more_runs(
    ranks: int, cases: list[tuple[dict[str, Any], int, dict[str, Any]]]
) -> None:
    check(ranks, cases)
