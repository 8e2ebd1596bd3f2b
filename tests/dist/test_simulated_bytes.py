"""Tests that the bytes of a simulated step equal the counters of real ranks, to the byte."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.dist.harness import run_ranks
from windlass.config import load_config
from windlass.parallel.model_shape import ModelShape, from_transformers
from windlass.simulate.cluster_file import known_cluster
from windlass.simulate.predict_step import predict_step

SAMPLES, LENGTH = 2, 16
# No unit's size is a multiple of the ranks' cache lines, so every unit has padding.
SIZES = {
    **{"hidden_size": 40, "intermediate_size": 44, "num_hidden_layers": 4, "vocab_size": 66, "use_cache": False},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "head_dim": 10},
}
# Each token chooses every expert, so that routing is even.
EXPERTS = {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 4, "sliding_window": None}
# No parameter stays unsharded; the default settings keep all parameters of such a small model unsharded.
SHARDED: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
# Norms and key and value matrices always stay unsharded; the last layers stay so between forward and backward.
MIXED: dict[str, Any] = {"stage3_param_persistence_threshold": 1000, "stage3_max_reuse_distance": 9000}

MERGED: dict[str, Any] = {"stage3_param_persistence_threshold": 0, "unit_merge_threshold": 20_000}


@dataclass(frozen=True)
class Case:
    """Configuration of one engine.

    Attributes:
        axes: Section `parallel`; other ranks are data-parallel.
        stage: ZeRO stage.
        zero, pipeline, other: Sections `zero_optimization` and `pipeline`, and further keys.
        micro_batches: Micro-batches of a step.
        steps: Number of steps; the bytes of the last one are compared.
        checkpointing: True if transformers' own checkpointing recomputes the layers.
        model: Values that replace those of the model's configuration.
    """

    axes: dict[str, Any] = field(default_factory=dict)
    stage: int = 0
    zero: dict[str, Any] = field(default_factory=dict)
    pipeline: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)
    micro_batches: int = 2
    steps: int = 3
    checkpointing: bool = False
    model: dict[str, Any] = field(default_factory=dict)

    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": SAMPLES,
            "gradient_accumulation_steps": self.micro_batches,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            "parallel": self.axes,
            "pipeline": self.pipeline,
            "comm": {"transport": "gloo"},
            **self.other,
        }

    def sizes(self) -> dict[str, Any]:
        return {**(EXPERTS if "ep" in self.axes else SIZES), **self.model}

    def shape(self) -> ModelShape:
        return from_transformers({**self.sizes(), "hidden_act": "silu"})


BF16 = {"bf16": {"enabled": True}, "communication_data_type": "bf16"}
QUANTIZED = {"zero_quantized_weights": True, "zero_quantized_gradients": True}
NORMS = {"tp": 2, "tp_sequence_norms": True}
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
OFTEN = {"unshard_per": "micro-batch"}
AGAIN = OFTEN | {"activation_checkpoint_interval": 1}
TIED = {"tie_word_embeddings": True}
BOTH = {"sp": 4, "sp_mode": "ulysses+ring", "ulysses_degree": 2}


def compressed(name: str, stage: int = 0, steps: int = 3, axes: dict[str, Any] | None = None, **params: Any) -> Case:
    """Return the case of an optimizer that reduces gradients itself."""
    optimizer = {"type": name, "params": {"lr": 1e-3, **params}}
    return Case(axes or {}, stage, SHARDED, micro_batches=1, other={"optimizer": optimizer}, steps=steps)


# Steps 1 to 4, 6 and 8 reduce full gradients, 5 and 7 compressed gradients; 9 and 10 synchronize, and 11 is local.
SCHEDULE = {"var_freeze_step": 8, "var_update_scaler": 4, "local_step_scaler": 1, "local_step_clipper": 2}
PARTS = {"inner_steps": 3, "fragments": 2, "codec": "int8"}

QUICK = [
    # The embedding is resharded between its use as the head and its own backward.
    Case(stage=3, zero=MIXED, micro_batches=1, other=BF16, model=TIED),
    Case(stage=3, zero=SHARDED | QUANTIZED),
    Case(NORMS),
    Case({"ep": 2}, 2),
    Case({"pp": 2}, pipeline=INTERLEAVED, model=TIED),
    Case({"sp": 2, "sp_mode": "ring"}, 1, micro_batches=1),
    Case(stage=3, zero=MERGED | {"stage3_max_reuse_distance": 0}),
    compressed("OneBitAdam", 2, freeze_step=2),
    compressed("DiLoCo", **PARTS),
]


def cases_of_two_ranks() -> Iterator[Case]:
    for stage in range(4):
        yield Case(stage=stage)
        yield Case(stage=stage, other=BF16, micro_batches=3)
        yield Case(stage=stage, zero=MERGED, model=TIED)
    for zero in (SHARDED, MIXED, {"stage3_param_persistence_threshold": 1000}, MIXED | {"overlap_comm": False}):
        yield Case(stage=3, zero=zero)
        yield Case(stage=3, zero=zero | {"stage3_prefetch_bucket_size": 12_000}, checkpointing=True)
        yield Case(stage=3, zero=zero, micro_batches=1, other=BF16, model=TIED)
    yield Case(stage=3, zero=MIXED | {"stage3_max_reuse_distance": 30_000}, checkpointing=True)
    yield Case({"recompute": True}, 3, MIXED | {"stage3_max_reuse_distance": 30_000})
    yield Case(stage=3, zero=MIXED | {"zero_quantized_gradients": True})
    yield Case(stage=3, zero=SHARDED | QUANTIZED, other=BF16)
    for axes in ({"tp": 2}, {"sp": 2}, {"sp": 2, "sp_mode": "ring"}, NORMS, {"tp": 2, "tp_overlap_chunks": 2}):
        for stage in (0, 1, 3):
            yield Case(axes, stage, SHARDED)
        yield Case(axes, 0, other=BF16, model=TIED)
        yield Case({**axes, "recompute": True}, 1, micro_batches=1)
    for axes in ({"ep": 2}, {"ep": 2, "recompute": True}):
        for stage in range(4):
            yield Case(axes, stage, MIXED)
        yield Case(axes, 3, SHARDED, other=BF16)
    for pipeline in ({}, {"schedule": "gpipe"}, INTERLEAVED, {"schedule": "zero-bubble"}):
        yield Case({"pp": 2}, pipeline=pipeline)
        yield Case({"pp": 2}, 1, pipeline=pipeline, micro_batches=4, model=TIED)
    yield Case({"pp": 2}, pipeline={"activation_checkpoint_interval": 1}, other=BF16)
    yield Case({"pp": 2}, pipeline={"partition": "uniform"}, model={"vocab_size": 1026})
    yield Case({"pp": 2}, model={"vocab_size": 1026, "num_hidden_layers": 5})


def compressed_cases(ranks: int) -> Iterator[Case]:
    for steps in (1, 2, 3, 4, 5):
        yield compressed("DiLoCo", steps=steps, **PARTS)
        yield compressed("DiLoCo", steps=steps + 3, **{**PARTS, "inner_steps": 5}, overlap_steps=4)
        yield compressed("DiLoCo", steps=steps + 3, **{**PARTS, "fragments": 1}, overlap_steps=1, start_step=1)
    for stage in (0, 1, 2):
        for steps in (2, 3):
            yield compressed("OneBitAdam", stage, steps, freeze_step=2)
            yield compressed("OneBitLamb", stage, steps, freeze_step=2)
        for steps in (4, 5, 6, 7, 9, 10, 11):
            yield compressed("ZeroOneAdam", stage, steps, **SCHEDULE)
    yield compressed("PowerSGD", steps=2, start_step=2, rank=2)
    yield compressed("PowerSGD", start_step=2, rank=2)
    yield compressed("PowerSGD", start_step=2, rank=3, min_compression_rate=1.0)
    for axes in ({"tp": 2}, {"pp": 2}) if ranks > 2 else ():
        yield compressed("OneBitAdam", 0, 3, axes, freeze_step=2)
        yield compressed("OneBitAdam", 1, 3, axes, freeze_step=2)
        yield compressed("PowerSGD", 0, 3, axes, start_step=2)
        yield compressed("OneBitLamb", 0, 2, axes, freeze_step=2)
        yield compressed("OneBitLamb", 1, 2, axes, freeze_step=2)
        yield compressed("Lamb", 0, 2, axes)
        yield compressed("OneBitLamb", 0, 3, axes, freeze_step=2)
        yield compressed("OneBitLamb", 1, 3, axes, freeze_step=2)
        yield compressed("DiLoCo", 0, 3, axes, **PARTS)
    if ranks > 2:  # the first step gathers no states; not with pp, where it sends headers, which are not simulated
        yield compressed("OneBitLamb", 0, 1, {"tp": 2}, freeze_step=2)


def cases_of_four_ranks() -> Iterator[Case]:
    for stage in range(4):
        yield Case({"dp_replicate": 2}, stage, MIXED)
        yield Case({"dp_replicate": 4}, stage)
        yield Case(NORMS, stage, SHARDED)
        yield Case({"ep": 2}, stage, MIXED)
        yield Case({"pp": 2}, stage, MIXED, model=TIED)
        yield Case(BOTH, stage, SHARDED)
    yield Case(stage=3, zero=SHARDED | {"zero_hpz_partition_size": 2})
    yield Case(stage=3, zero=MIXED | {"zero_hpz_partition_size": 2})
    yield Case(stage=3, zero=SHARDED | {"zero_hpz_partition_size": 2}, checkpointing=True)
    yield Case(stage=3, zero=SHARDED | QUANTIZED | {"zero_hpz_partition_size": 2})
    yield Case(stage=3, zero=QUANTIZED, other=BF16)
    yield Case({"dp_replicate": 2}, 3, SHARDED, other=BF16)
    yield Case({"tp": 4}, 0, model={"num_key_value_heads": 4, "vocab_size": 68})
    yield Case({"tp": 4}, 1)  # two ranks share a key head, and parts of the vocabulary differ
    yield Case({"sp": 4}, 1, model={"num_key_value_heads": 4})
    yield Case({"sp": 2, "tp": 2}, 1)
    yield Case({"sp": 2, "tp": 2, "sp_mode": "ring"}, 3, SHARDED, micro_batches=1)
    yield Case({"ep": 2, "tp": 2}, 2)
    for zero in (SHARDED, MIXED, SHARDED | {"stage3_max_reuse_distance": 9000}):
        yield Case({"tp": 2}, 3, zero)
        yield Case({"ep": 2, "tp": 2}, 3, zero)
    for axes in ({"ep": 2, "tp": 2}, {"ep": 2} | NORMS, {"ep": 1} | NORMS):
        yield Case(axes, 1)
        yield Case({**axes, "recompute": True}, 1)
    yield Case({"ep": 2, "sp": 2}, 3, SHARDED)
    yield Case({"ep": 4}, 3, MIXED)
    yield Case({"pp": 2, "tp": 2}, 0)
    yield Case({"pp": 2, "sp": 2}, 1)
    yield Case({"pp": 2, "ep": 2}, 2, SHARDED)
    yield Case({"pp": 4}, 0, pipeline={"schedule": "gpipe"}, model=TIED)
    yield Case({"pp": 2, "dp_replicate": 2}, 1)
    yield Case(
        {"pp": 2}, 3, MIXED | {"stage3_max_reuse_distance": 30_000}, OFTEN | {"activation_checkpoint_interval": 1}
    )
    for pipeline in (OFTEN, INTERLEAVED, OFTEN | INTERLEAVED):
        for zero in (SHARDED, MIXED, {}):
            yield Case({"pp": 2}, 3, zero, pipeline=pipeline)
            yield Case({"pp": 2}, 3, zero, pipeline=pipeline, micro_batches=4, other=BF16)
        yield Case({"pp": 2}, 2, pipeline=pipeline)


# Models that differ from a plain decoder: biases, learned positions, tied embeddings.
OTHERS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 40, "n_layer": 4, "n_head": 4, "n_positions": 32, "vocab_size": 66},
    "qwen2": SIZES,
    "opt": {**SIZES, "ffn_dim": 44, "word_embed_proj_dim": 40, "max_position_embeddings": 32},
    "llama": SIZES,
    "mixtral": EXPERTS,
}


def other_model(name: str, changes: dict[str, Any]) -> Any:
    import transformers as hf

    kinds = {"gpt2": hf.GPT2Config, "qwen2": hf.Qwen2Config, "opt": hf.OPTConfig}
    kinds |= {"llama": hf.LlamaConfig, "mixtral": hf.MixtralConfig}
    config = kinds[name](**{"bos_token_id": 1, "eos_token_id": 1, "pad_token_id": 0, **OTHERS[name], **changes})
    model: Any = hf.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    model.config.use_cache = False
    return model


def moved_by_others(cases: list[tuple[str, Case]], frozen: tuple[str, ...] = ()) -> list[list[str]]:
    """Return a line for each case with simulated bytes that differ from the counted bytes of this rank.

    Args:
        frozen: Parts of the names of parameters that are frozen.
    """
    found = []
    for name, case in cases:
        torch.manual_seed(0)
        first, second = other_model(name, case.model), other_model(name, case.model)
        for key, parameter in [*first.named_parameters(), *second.named_parameters()]:
            parameter.requires_grad_(not any(word in key for word in frozen))
        pipe, _, tp, counted = train_steps(first, case)
        place = known_cluster("dgx-h100").with_devices(2)
        config = load_config(case.config())
        simulated = predict_step(second, config, place, world_size=2, length=LENGTH, tp_rank=tp).moved[pipe]
        if _nonzero(simulated) != counted:
            found.append([f"{name} {case}: simulated {_nonzero(simulated)}, counted {counted}"])
    return found


def test_bytes_of_models_with_biases_and_positions_equal_those_of_ranks() -> None:
    cases = [
        ("gpt2", Case(stage=3, zero=SHARDED, micro_batches=1)),
        ("gpt2", Case(stage=1)),
        ("qwen2", Case(stage=3, zero=MIXED)),
        ("qwen2", Case(stage=0)),
        ("opt", Case(stage=2, other=BF16)),
    ]
    assert run_ranks(moved_by_others, 2, cases) == [[], []]


def test_frozen_blocks_before_the_first_trained_one_have_no_backward() -> None:
    cases = [
        ("qwen2", Case(stage=3, zero=SHARDED)),
        ("qwen2", Case(stage=3, zero=MIXED, micro_batches=3)),
        ("qwen2", Case({"sp": 2}, 3, SHARDED)),
        ("opt", Case(stage=2)),
        ("opt", Case(stage=3, zero=SHARDED)),
    ]
    assert run_ranks(moved_by_others, 2, cases, ("embed",)) == [[], []]


def test_bytes_of_frozen_parameters_equal_those_of_ranks_along_other_axes() -> None:
    for frozen, cases in (
        (("embed", "layers.0.", "layers.1."), [("llama", Case({"pp": 2}, 3, SHARDED, OFTEN))]),
        (("embed", "layers.0.", "layers.1."), [("llama", Case({"pp": 2}, pipeline=INTERLEAVED))]),
        (("embed",), [("llama", Case(NORMS, 1)), ("mixtral", Case({"ep": 2}, 2, other=BF16))]),
        (("embed", "mlp"), [("llama", Case({"tp": 2}, 2))]),
    ):
        assert run_ranks(moved_by_others, 2, cases, frozen) == [[], []]


Moved = tuple[int, int, int, dict[str, dict[str, int]]]


def moved(cases: list[Case]) -> list[Moved]:
    """Return the result of `train_steps` for each case."""
    return [moved_by(case) for case in cases]


def moved_by(case: Case) -> Moved:
    import transformers as hf

    from windlass.parallel.model_checkpointing import enable_checkpointing

    torch.manual_seed(0)
    kind = hf.MixtralConfig if "ep" in case.axes else hf.LlamaConfig
    model: Any = hf.AutoModelForCausalLM.from_config(kind(**case.sizes()), trust_remote_code=False)
    if case.checkpointing:
        enable_checkpointing(model)
    return train_steps(model, case)


def train_steps(model: Any, case: Case) -> Moved:
    """Train, and return the ranks along pp, data and tp, and the bytes received in the last step."""
    import windlass

    engine: Any = windlass.initialize(model=model, config=case.config())[0]
    ids = torch.randint(0, 64, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    # By default the third step is compared; the second gathers as the first, in which no unit stayed unsharded.
    for _ in range(case.steps):
        for axis in engine.mesh.axes.values():
            axis.traffic.reset()
        if engine.mesh.pp.size > 1:
            engine.train_batch(iter([{"input_ids": ids, "labels": ids}] * case.micro_batches))
            continue
        for _ in range(case.micro_batches):
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
    found = {name: dict(axis.traffic.bytes_moved) for name, axis in engine.mesh.axes.items() if axis.size > 1}
    found["data"] = dict(engine.report()["bytes_moved"])
    place = engine.mesh.pp.index, engine.mesh.dense.data.index, engine.mesh.tp.index
    engine.destroy()
    return *place, _nonzero(found)


def _nonzero(moved: dict[str, dict[str, int]]) -> dict[str, dict[str, int]]:
    found = {axis: {name: nbytes for name, nbytes in of.items() if nbytes} for axis, of in moved.items()}
    return {axis: of for axis, of in found.items() if of}


def differences(ranks: int, cases: list[Case]) -> list[str]:
    """Return a line for each operation whose simulated and counted bytes differ."""
    results = run_ranks(moved, ranks, cases, timeout=60.0 + 10 * len(cases))
    lines = []
    for number, case in enumerate(cases):
        place = known_cluster("dgx-h100").with_devices(ranks)
        predicted: dict[tuple[int, int], Any] = {}
        for rank, each in enumerate(results):
            pipe, data, tp, counted = each[number]
            if (data, tp) not in predicted:
                predicted[data, tp] = predict_step(
                    case.shape(), load_config(case.config()), place, world_size=ranks, length=LENGTH,
                    checkpointing="full" if case.checkpointing else "none", step=case.steps, data_rank=data, tp_rank=tp,
                )  # fmt: skip
            found = predicted[data, tp]
            simulated = _nonzero(found.moved[pipe])
            for axis in sorted({*counted, *simulated}):
                one, other = simulated.get(axis, {}), counted.get(axis, {})
                lines += [
                    f"{case}: rank {rank}, {axis} {name}: simulated {one.get(name, 0)}, counted {other.get(name, 0)}"
                    for name in sorted({*one, *other})
                    if one.get(name, 0) != other.get(name, 0)
                ]
    return lines


def test_simulated_bytes_equal_those_of_two_ranks() -> None:
    assert not differences(2, QUICK)


def test_simulated_bytes_of_sequences_that_the_ranks_do_not_divide() -> None:
    assert LENGTH % 3
    cases = [
        Case({"sp": 3, "sp_mode": "ring"}, 3, MIXED, micro_batches=1, other=BF16),
        compressed("PowerSGD", start_step=2, rank=2),  # a third of a message is rounded down
    ]
    assert not differences(3, cases)


@pytest.mark.slow
def test_simulated_bytes_equal_those_of_two_ranks_in_all_cases() -> None:
    assert not differences(2, list(cases_of_two_ranks()))


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_simulated_bytes_of_compressed_steps(ranks: int) -> None:
    assert not differences(ranks, list(compressed_cases(ranks)))


@pytest.mark.slow
def test_simulated_bytes_equal_those_of_four_ranks() -> None:
    assert not differences(4, list(cases_of_four_ranks()))


def cases_of_more_ranks(ranks: int) -> Iterator[Case]:
    yield Case({"tp": 2}, 3, SHARDED)
    yield Case({"ep": 2, "tp": 2} if ranks == 8 else {"ep": 2}, 3, MIXED)  # ranks along tp have other parts of experts
    yield Case({"dp_replicate": 2}, 3, SHARDED)
    yield Case({"pp": 2}, 3, SHARDED, pipeline=OFTEN)
    yield Case(stage=3, zero=SHARDED | QUANTIZED | {"zero_hpz_partition_size": 2})
    yield compressed("PowerSGD", 0, 3, {"tp": 2}, start_step=2, rank=2)
    yield compressed("OneBitAdam", 2, 3, {"tp": 2}, freeze_step=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [6, 8])
def test_simulated_bytes_equal_those_of_more_ranks(ranks: int) -> None:
    assert not differences(ranks, list(cases_of_more_ranks(ranks)))
