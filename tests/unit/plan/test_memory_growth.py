"""Laws of predicted memory over model families, stages, tiers, dtypes and axes: it never falls when the batch or the
length grows, and the states of a higher stage take no more of a rank's memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.causal_models import model_of
from windlass.config import load_config
from windlass.plan.activation_trace import ForwardArguments
from windlass.plan.memory_plan import DEVICE, DISK, HOST, MOMENTS, MemoryPlan
from windlass.plan.plan_run import RunShape, TraceCache, plan_memory
from windlass.plan.planned_layout import Target, plan_layout
from windlass.plan.planned_model import batch_for, build_on_meta

WORLD = 4
TARGETS = {"cpu": Target(), "gloo": Target("cpu", "gloo"), "gpu": Target("cuda", "nccl")}
HOMES = [("none", "none"), ("cpu", "none"), ("cpu", "cpu"), ("nvme", "none"), ("nvme", "nvme")]
STATES = ("parameters", "gradients", "master weights", "optimizer states", "gradients of averaged steps")

_ROTARY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_LLAMA = {**_ROTARY, "vocab_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}


class OwnModel(nn.Module):
    """Module of a script, with tied weights and a recurrent layer, whose forward takes a tuple and returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell = nn.Embedding(96, 32), nn.GRUCell(32, 32)
        self.head = nn.Linear(32, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, pair: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        ids, weights = pair
        hidden, outputs = torch.zeros_like(self.embedding(ids[:, 0])), []
        for token in self.embedding(ids).unbind(1):
            hidden = self.cell(token, hidden)
            outputs.append(hidden)
        return self.head(torch.stack(outputs, 1) * weights[..., None].to(hidden.dtype))


def _own_batch(micro: int, length: int) -> Callable[[], ForwardArguments]:
    return lambda: ForwardArguments(((torch.zeros(micro, length, dtype=torch.long), torch.ones(micro, length)),), {})


FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: model_of("LlamaForCausalLM", **_LLAMA),
    "gpt2": lambda: model_of("GPT2LMHeadModel", n_embd=32, n_layer=2, n_head=4, n_positions=64, vocab_size=96),
    "mixtral": lambda: model_of("MixtralForCausalLM", num_local_experts=4, sliding_window=None, **_LLAMA),
    "t5": lambda: model_of(
        "T5ForConditionalGeneration", d_model=32, d_ff=48, d_kv=8, num_layers=2, num_heads=4, vocab_size=96
    ),
    "bert": lambda: model_of("BertForMaskedLM", "BertConfig", vocab_size=96, max_position_embeddings=64, **_ROTARY),
    "mamba": lambda: model_of("MambaForCausalLM", hidden_size=16, num_hidden_layers=1, state_size=4, vocab_size=96),
    "own": OwnModel,
}
AXES: dict[str, list[dict[str, int]]] = {
    "llama": [{"tp": 2}, {"sp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}],
    "gpt2": [{"tp": 2}, {"pp": 2}],
    "mixtral": [{"ep": 2}, {"tp": 2}],
}


@dataclass(frozen=True)
class Case:
    """Run whose memory is planned.

    Attributes:
        home: Tiers of optimizer states and of parameters, where the stage has them.
        axes: Sizes of axes, as pairs.
    """

    family: str
    stage: int
    target: str
    home: tuple[str, str]
    checkpointing: bool
    dtype: str
    axes: tuple[tuple[str, int], ...]
    accumulation: int
    micro: int = 1
    length: int = 8

    @property
    def config(self) -> dict[str, Any]:
        zero: dict[str, Any] = {"stage": self.stage, "stage3_param_persistence_threshold": 0}
        for key, device, least in (("offload_optimizer", self.home[0], 1), ("offload_param", self.home[1], 3)):
            if device != "none" and self.stage >= least:
                zero[key] = {"device": device, "nvme_path": "/nvme"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro,
            "gradient_accumulation_steps": self.accumulation,
            "zero_optimization": zero,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "parallel": dict(self.axes),
            "activation_checkpointing": {"enabled": self.checkpointing},
        }
        if self.dtype == "bf16":
            config["bf16"] = {"enabled": True}
        elif self.dtype == "autocast":
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16"}
        return config


@cache
def model_named(family: str) -> nn.Module:
    return build_on_meta(FAMILIES[family], family)


_traces: dict[Any, TraceCache] = {}


@cache
def planned(case: Case) -> MemoryPlan:
    model = model_named(case.family)
    make = _own_batch if case.family == "own" else batch_for(model)
    run = RunShape(WORLD, case.length, TARGETS[case.target], make_batch=make)
    # A trace depends on neither stage nor tiers.
    traces = _traces.setdefault((case.family, case.length, case.dtype, case.axes, case.accumulation), {})
    return plan_memory(model, load_config(case.config), run, traces=traces)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    family = draw(st.sampled_from(list(FAMILIES)))
    return Case(
        family=family,
        stage=draw(st.integers(0, 3)),
        target=draw(st.sampled_from(list(TARGETS))),
        home=draw(st.sampled_from(HOMES)),
        checkpointing=family != "own" and draw(st.booleans()),
        dtype=draw(st.sampled_from(["fp32", "bf16", "autocast"])),
        axes=tuple(draw(st.sampled_from([{}, *AXES.get(family, [])])).items()),
        accumulation=draw(st.sampled_from([1, 3])),
    )


def check_growth(case: Case, micros: list[int], lengths: list[int]) -> None:
    small, large = (planned(replace(case, micro=m, length=n)) for m, n in zip(micros, lengths, strict=True))
    own = DEVICE if case.target == "gpu" else HOST
    # The plan of a pipeline is that of the stage that needs most, which may be another one with a larger batch.
    for place in (DEVICE, HOST, DISK) if "pp" not in dict(case.axes) else ():
        for moment in MOMENTS:
            amounts = [one.moments[moment].of(place) for one in (small, large)]
            assert sum(amounts[0].values()) <= sum(amounts[1].values()), (moment, place, amounts)
    if (micros[0], lengths[0]) != (micros[1], lengths[1]):
        assert small.peak(own, MOMENTS[2:]) < large.peak(own, MOMENTS[2:])


def check_stages(case: Case) -> None:
    # Master weights on another tier are separate from fp32 parameters, so all stages have the same tiers.
    case = replace(case, home=(case.home[0], "none"))
    lowest = 0 if case.home[0] == "none" else 1
    plans = [planned(replace(case, stage=stage)) for stage in range(lowest, 4)]
    held = [
        sum(
            nbytes
            for place in (DEVICE, HOST, DISK)
            for kind, nbytes in one.moments["step"].of(place).items()
            if kind in STATES
        )
        for one in plans
    ]
    layout = plan_layout(
        model_named(case.family), load_config(replace(case, stage=3).config), WORLD, TARGETS[case.target]
    )
    padding = 20 * sum(unit.layout.padded - sum(unit.layout.numels) for unit in layout.units)  # bytes of an element
    assert all(above <= below + padding for below, above in pairwise(held)), held


GROWN = (st.tuples(*[st.integers(1, 3)] * 2).map(sorted), st.tuples(*[st.sampled_from([8, 12, 16])] * 2).map(sorted))
OPTIONS: dict[str, Any] = {"deadline": None, "suppress_health_check": list(HealthCheck)}


@given(cases(), *GROWN)
@settings(max_examples=16, derandomize=True, **OPTIONS)
def test_memory_never_falls_when_the_batch_or_its_length_grows(
    case: Case, micros: list[int], lengths: list[int]
) -> None:
    check_growth(case, micros, lengths)


@pytest.mark.slow
@given(cases(), *GROWN)
@settings(max_examples=600, **OPTIONS)
def test_memory_never_falls_over_all_families_and_axes(case: Case, micros: list[int], lengths: list[int]) -> None:
    check_growth(case, micros, lengths)


@given(cases())
@settings(max_examples=10, derandomize=True, **OPTIONS)
def test_a_higher_stage_keeps_no_more_states(case: Case) -> None:
    check_stages(case)


@pytest.mark.slow
@given(cases())
@settings(max_examples=200, **OPTIONS)
def test_a_higher_stage_keeps_no_more_states_over_all_families_and_axes(case: Case) -> None:
    check_stages(case)
