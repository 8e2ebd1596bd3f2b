"""Laws of ZeRO++ at stage 3: lossless codecs change no bit, lossy ones stay within their bounds, bytes are exact."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import product
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import windlass
from tests import oracle
from tests.dist.equivalence_runs import specimen, start, whole_grads, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.quick_rows import in_shares
from tests.dist.test_one_bit_adam import one_thread  # noqa: F401 - a fixture
from tests.dist.zeropp_simulation import LR, ZeroppSimulation, local_gradients
from tests.models import ROWS, Place, cast
from tests.oracle import relative_error
from tests.toy_codecs import HalfCodec
from windlass.base.errors import ConfigError
from windlass.comm.codec import get_codec, register_codec
from windlass.config import load_config
from windlass.engine.rank_state_checkpoint import rank_states

LOSSLESS = {
    "zero_quantized_weights_codec": "identity",
    "zero_quantized_gradients_codec": "identity",
    "zero_quantized_gradients_codec_across": "identity",
}


@dataclass(frozen=True)
class Case:
    """One training run at stage 3."""

    zero: dict[str, Any] = field(default_factory=dict)
    model: str = "mlp"
    bf16: bool = False
    node: int = 1  # number of ranks on a host
    accumulation: int = 2
    optimizer: str = "SGD"
    bad: bool = False  # the last rank's gradient is NaN in the second step
    steps: int = 3
    transport: str = "gloo"

    @property
    def config(self) -> dict[str, Any]:
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.0,
            "optimizer": {"type": self.optimizer, "params": {"lr": LR}},
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **self.zero},
            "bf16": {"enabled": self.bf16},
            "comm": {"transport": self.transport},
        }


def run_case(case: Case) -> dict[str, Any]:
    subject, rank = specimen(case.model), dist.get_rank()
    with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(case.node)}):
        engine = start(subject, case.config)
    traffic = engine._sharded.transport.traffic
    moved: Counter[str] = Counter()
    across: Counter[str] = Counter()
    dtype = torch.bfloat16 if case.bf16 else torch.float32
    losses = []
    for step in range(case.steps):
        for micro in range(case.accumulation):
            bad = case.bad and step == 1 and rank == dist.get_world_size() - 1

            def backward(loss: torch.Tensor, retain_graph: bool = False, bad: bool = bad) -> None:
                engine.backward(loss * float("nan") if bad else loss, retain_graph=retain_graph)

            losses.append(float(subject.train(engine, cast(subject.batch(Place(step, micro, rank)), dtype), backward)))
            if micro == case.accumulation - 1:
                moved, across = moved + traffic.bytes_moved, across + traffic.across_nodes
            engine.step()
    shapes = [(unit.layout.padded, unit.dtype, unit.trainable) for unit in engine._sharded.units]
    found = {"params": whole_params(engine.module), "losses": losses, "moved": moved, "across": across, "units": shapes}
    found["layouts"] = [(list(unit.names), unit.layout) for unit in engine._sharded.units]
    found["owed"] = {one.name: one.values.clone() for one in rank_states(engine._sharded) if one.key == "loco_error"}
    parameter = next(iter(engine.module.parameters()))
    unit = windlass.zero.access.full_values.find(parameter).unit  # type: ignore[attr-defined]
    with engine._sharded.runtime.unsharded([unit]):
        found["gathered"] = unit.parameter_view(unit.full, 0).detach().float().clone()
    with windlass.zero.GatheredParameters([parameter], modifier_rank=0):
        found["exact"] = parameter.detach().float().clone()
    engine.destroy()
    return found


def run_cases(cases: list[Case]) -> list[dict[str, Any]]:
    return [run_case(case) for case in cases]


def all_of(*keys: str, **more: Any) -> dict[str, Any]:
    return {**dict.fromkeys((f"zero_quantized_{key}" for key in keys), True), **more}


SUBSETS = [
    all_of("weights"),
    all_of("gradients"),
    all_of("nontrainable_weights", "gradients"),
    all_of("weights", "gradients", zeropp_loco_param={"err_beta": 0.8, "reset_T": 3}),
]


EXACT = [Case(), *(Case({**zero, **LOSSLESS}) for zero in SUBSETS)]


def test_lossless_codecs_change_no_bit_in_any_subset() -> None:
    require_exact(EXACT, run_ranks(run_cases, 2, EXACT, timeout=120.0))


def require_exact(cases: list[Case], by_rank: list[list[dict[str, Any]]]) -> None:
    """Check that all runs are bitwise equal to that of the first case."""
    for found in by_rank:
        for case, one in zip(cases[1:], found[1:], strict=True):
            assert one["losses"] == found[0]["losses"], case
            assert all(torch.equal(value, found[0]["params"][name]) for name, value in one["params"].items()), case


LOSSY = [
    Case(all_of("weights", "gradients"), node=2),
    Case(all_of("weights", "gradients", zero_quantized_weights_codec="int4"), node=1),
    Case(all_of("nontrainable_weights"), model="frozen"),
]


def test_gathered_weights_are_off_by_half_a_quantization_step_at_most() -> None:
    require_bounds(LOSSY, run_ranks(run_cases, 2, LOSSY, timeout=120.0))


def require_bounds(cases: list[Case], by_rank: list[list[dict[str, Any]]]) -> None:
    """Check gathered weights against the codec's bound."""
    for found in by_rank:
        for case, one in zip(cases, found, strict=True):
            codec = case.zero.get("zero_quantized_weights_codec", "int8")
            rounded = not torch.equal(one["gathered"], one["exact"])
            if case.zero.get("zero_quantized_weights"):
                # half a quantization step at the largest scale of any block
                limit = float(one["exact"].abs().max()) / {"int8": 127, "int4": 7}[codec] * 0.5001
                assert rounded and float((one["gathered"] - one["exact"]).abs().max()) <= limit, case
            else:
                assert not rounded, case


def run_with_a_users_codec(cases: list[Case]) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the cases with a registered codec. Return their results, and errors of settings that refuse it."""
    register_codec(HalfCodec())
    errors = []
    for bf16, transport in ((True, "gloo"), (False, "shm")):
        config = Case(cases[1].zero, bf16=bf16).config
        with pytest.raises(ConfigError) as caught:
            start(specimen("mlp"), {**config, "comm": {"transport": transport}})
        errors.append(str(caught.value))
    return run_cases(cases), errors


def test_a_registered_codec_carries_weights_and_gradients() -> None:
    name = HalfCodec.name
    weights = Case(all_of("weights", zero_quantized_weights_codec=name))
    hops = dict.fromkeys(("zero_quantized_gradients_codec", "zero_quantized_gradients_codec_across"), name)
    gradients = [Case(all_of("gradients", **hops), node=node) for node in (1, 2)]
    for (exact, *found), errors in run_ranks(run_with_a_users_codec, 2, [Case(), weights, *gradients], timeout=120.0):
        assert torch.equal(found[0]["gathered"], found[0]["exact"].half().float())
        assert exact["moved"]["gather"] == 2 * found[0]["moved"]["gather"] > 0
        for one in found:
            error, where = relative_error(one["params"], exact["params"])
            assert 0 < error < 1e-3, f"{where} is off by {error:.2e}"
        assert 'weights_codec: the codec "toy-half" does not accept torch.bfloat16' in errors[0]
        assert "ranks read memory of each other in place" in errors[1]


def compare_with_simulation(cases: list[Case], ranks: int) -> None:
    """Run the cases, and assert that parameters, losses and errors are bit for bit those of their simulations."""
    by_rank = run_ranks(run_cases, ranks, cases, timeout=600.0)
    for number, case in enumerate(cases):
        assert_equals_simulation(case, [one[number] for one in by_rank])


def assert_equals_simulation(case: Case, by_rank: list[dict[str, Any]]) -> None:
    """Compare the results of `run_case` on all ranks with the simulation."""
    assert case.accumulation == 1
    layouts, node = by_rank[0]["layouts"], case.zero.get("zero_hpz_partition_size", case.node)
    simulation = ZeroppSimulation(specimen(case.model), case.zero, layouts, len(by_rank), node)
    simulation.run(case.steps)
    for rank, found in enumerate(by_rank):
        wrong = [name for name, value in found["params"].items() if not torch.equal(value, simulation.params[name])]
        assert not wrong, f"{case}: rank {rank}: {wrong}"
        assert found["losses"] == [of_step[rank] for of_step in simulation.losses], case
        assert bool(found["owed"]) == ("zeropp_loco_param" in case.zero)
        owed = [
            (found["owed"][name], errors[offset:][: found["owed"][name].numel()])
            for (names, layout), errors in zip(layouts, simulation.hops.errors[rank], strict=True)
            for name, offset in zip(names, layout.offsets, strict=True)
            if name in found["owed"]
        ]
        assert len(owed) == len(found["owed"]) and all(torch.equal(*pair) for pair in owed), case
        # errors of lossless messages are zeros
        lossless = case.zero.get("zero_quantized_gradients_codec") == "identity"
        assert not owed or any(bool(values.any()) for values, _ in owed) != lossless


# Codecs of the two hops, exchanged.
EXCHANGED = {"zero_quantized_gradients_codec": "int4", "zero_quantized_gradients_codec_across": "int8"}
FAST_LOCO = {"zeropp_loco_param": {"err_beta": 0.3, "reset_T": 2}}
# Two ranks use only one of the hops, and four ranks on two nodes use both.
REDUCED = {
    ranks: [Case(all_of("gradients", **more), node=node, accumulation=1, steps=5) for node, more in rows]
    for ranks, rows in {
        2: list(product((1, 2), ({}, {"zeropp_loco_param": {}}, FAST_LOCO))),
        4: list(product((2,), ({}, FAST_LOCO, {**EXCHANGED, **FAST_LOCO}))),
    }.items()
}


@pytest.mark.parametrize("ranks", [2, 4])
def test_quantized_reductions_equal_their_simulation_with_and_without_errors(ranks: int) -> None:
    compare_with_simulation(REDUCED[ranks], ranks)


def any_subset(*codecs: dict[str, Any]) -> list[Case]:
    """Return a case for each valid subset of the five keys of ZeRO++ and for each choice of codecs, on nodes of two."""
    rows = product(
        ({}, all_of("weights")),
        ({}, all_of("nontrainable_weights")),
        ({}, all_of("gradients"), all_of("gradients", **FAST_LOCO)),
        ({}, {"zero_hpz_partition_size": 2}),
        codecs,
    )
    settings = [{name: value for part in row for name, value in part.items()} for row in rows]
    return [Case(zero, model="frozen", node=2, accumulation=1, steps=4) for zero in settings]


@in_shares
def test_any_subset_on_two_nodes_equals_its_simulation(every: bool) -> None:
    """With lossless codecs too, the sums of two hops have an order of their own: of ranks in a node, then of nodes."""
    lossy, lossless = any_subset({}), any_subset(LOSSLESS)
    few = [lossy[-1], lossless[-1], next(case for case in lossy if set(case.zero) == FROZEN_AND_HPZ)]
    compare_with_simulation([*lossy, *lossless] if every else few, 4)


FROZEN_AND_HPZ = {"zero_quantized_nontrainable_weights", "zero_hpz_partition_size"}


def first_gradients(cases: list[Case]) -> list[dict[str, Any]]:
    """Return this rank's own flat gradient of each unit in the first step, and the reduced gradient by name."""
    found = []
    for case in cases:
        subject = specimen(case.model)
        with patch.dict("os.environ", {"LOCAL_WORLD_SIZE": str(case.node)}):
            engine = start(subject, case.config)
        layouts = [(list(unit.names), unit.layout) for unit in engine._sharded.units]
        batch = subject.batch(Place(0, 0, dist.get_rank()))
        subject.train(engine, batch, engine.backward)
        reduced = whole_grads(engine.module)
        engine.destroy()
        model = oracle.build(subject)
        subject.train(model, batch, lambda loss, **_: loss.backward())
        found.append({"layouts": layouts, "reduced": reduced, "own": local_gradients(model, layouts)})
    return found


def half_steps(codec: str, shard: torch.Tensor, beyond: torch.Tensor | None = None) -> torch.Tensor:
    """Return the largest rounding error of each element of a message: half of its block's scale.

    Args:
        beyond: bounds by which the values of the message may exceed those of `shard`.
    """
    block, highest = {"int8": (256, 127), "int4": (128, 7)}[codec]
    sizes = shard.abs() if beyond is None else shard.abs() + beyond
    largest = torch.stack([part.amax() for part in sizes.split(block)])
    return (largest / highest / 2).repeat_interleave(block)[: shard.numel()]


def bound_of_mean(parts: list[torch.Tensor], owner: int, case: Case) -> torch.Tensor:
    """Return the bound of codecs on the error of a mean over ranks: the sum of `half_steps` of all its messages.

    Args:
        parts: shard `owner` of each rank's gradient.
    """
    inside = case.zero.get("zero_quantized_gradients_codec", "int8")
    across = case.zero.get("zero_quantized_gradients_codec_across", "int4")
    bound = torch.zeros_like(parts[0])
    for first in range(0, len(parts), case.node):
        collector = first + owner % case.node
        hop = torch.zeros_like(bound)
        for rank in range(first, first + case.node):
            if rank != collector:
                hop += half_steps(inside, parts[rank])
        bound += hop
        if collector != owner:
            bound += half_steps(across, torch.stack(parts[first : first + case.node]).sum(0), hop)
    return bound / len(parts)


BOUNDED = [
    Case(all_of("gradients", **codecs), node=node, accumulation=1) for codecs in ({}, EXCHANGED) for node in (1, 2, 4)
]


def test_gradients_are_within_half_a_scale_for_each_block_and_hop() -> None:
    ranks = 4
    by_rank = run_ranks(first_gradients, ranks, BOUNDED, timeout=120.0)
    for number, case in enumerate(BOUNDED):
        of_case = [one[number] for one in by_rank]
        for unit, (names, layout) in enumerate(of_case[0]["layouts"]):
            own = [one["own"][unit] for one in of_case]
            bound = torch.empty(layout.padded)
            for owner in range(ranks):
                span = slice(*layout.shard_range(owner, ranks))
                bound[span] = bound_of_mean([flat[span] for flat in own], owner, case)
            exact = torch.stack(own).mean(0)
            for name, offset in zip(names, layout.offsets, strict=True):
                reduced = of_case[0]["reduced"][name].view(-1)
                span = slice(offset, offset + reduced.numel())
                error = (reduced - exact[span]).abs()
                # 1e-6: sums of float32 in another order
                assert bool((error <= bound[span] + 1e-6 * exact.abs().max()).all()), (case, name)
                assert bool(error.any()) and float(bound[span].max()) < 0.3 * float(exact.abs().max()), (case, name)


def bytes_of_a_step(settings: list[dict[str, Any]]) -> list[tuple[int, int, int]]:
    """Return for each setting the bytes of a step, those across nodes, and padded elements."""
    found = []
    for zero in settings:
        config = {**Case(zero, bf16=True, accumulation=1).config, "communication_data_type": "bf16"}
        model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, bias=False) for _ in range(2)))
        engine, *_ = windlass.initialize(model=model, config=config)
        engine.backward(engine(torch.ones(2, 256, dtype=torch.bfloat16)).float().square().mean())
        engine.step()
        report, units = engine.report(), engine._sharded.units
        counts = (sum(report[key].values()) for key in ("bytes_moved", "bytes_across_nodes"))
        found.append((*counts, sum(unit.layout.padded for unit in units)))
        engine.destroy()
    return found


def test_quantized_traffic_across_nodes_is_below_a_quarter() -> None:
    """Without quantization, a rank receives three collectives of two peers in the other node: 12 bytes for each element
    of a shard. With it, the same peers send a byte each in the forward, and one of them half a byte for the gradient.
    """
    exact = {"stage3_max_reuse_distance": 0}
    short = {**all_of("weights", "gradients"), "zero_hpz_partition_size": 2, **exact}
    settings = [exact, short]
    for wide, few in run_ranks(bytes_of_a_step, 4, settings, env={"LOCAL_WORLD_SIZE": "2"}, timeout=120.0):
        moved, across, numel = wide
        shard = numel // 4
        assert moved == 3 * 3 * 2 * shard and across == 12 * shard
        codes = Fraction(2, 12) + Fraction(1, 24)
        scales = Fraction(2, 12) * Fraction(4, 256) + Fraction(1, 12) * Fraction(4, 128)  # float32, one for each block
        assert numel == few[2] and Fraction(few[1], across) == codes + scales < Fraction(1, 4)


def aligned(nbytes: int) -> int:
    return -(-nbytes // 16) * 16


HPZ: dict[str, Any] = {"zero_hpz_partition_size": 2, "stage3_max_reuse_distance": 0}
TWO_HOPS = [
    Case({**all_of("weights", "gradients"), **HPZ}, bf16=True, accumulation=1),
    Case({**all_of("gradients"), **LOSSLESS, **HPZ}, accumulation=1),
    Case(HPZ, accumulation=1),
    Case({**all_of("weights", "gradients", **EXCHANGED), **HPZ}, bf16=True, accumulation=1),
]


def test_two_hops_over_nodes_and_their_bytes() -> None:
    """Four ranks in two nodes of two: hpZ keeps the backward's gathers inside a node, and each byte is counted."""
    require_bytes(run_ranks(run_cases, 4, TWO_HOPS, timeout=120.0))


def require_bytes(by_rank: list[list[dict[str, Any]]]) -> None:
    """Check parameters and bytes of the cases `TWO_HOPS`."""
    int8, int4 = get_codec("int8"), get_codec("int4")
    for found in by_rank:
        one, lossless, exact, exchanged = found
        error, where = relative_error(lossless["params"], exact["params"])
        assert error <= 1e-6, f"{where} is off by {error:.2e}"  # two hops add in another order
        gathers = reduces = within = again = 0
        for padded, dtype, _ in one["units"]:
            shard = padded // 4
            gathers += 2 * int8.encoded_size(shard, dtype)  # from the two ranks of the other node
            within += int8.encoded_size(shard, dtype)
            again += padded // 2 * dtype.itemsize  # the secondary shard of the other rank, exact
            reduces += aligned(int4.encoded_size(shard, torch.float32))
        assert one["across"]["gather"] == 3 * gathers
        assert one["across"]["reduce"] == 3 * reduces
        inside = 2 * sum(aligned(int8.encoded_size(padded // 4, torch.float32)) for padded, _, _ in one["units"])
        assert one["moved"]["reduce"] == 3 * (reduces + inside)
        # both hops send whole blocks, and each rank receives twice as many elements inside its node as across
        assert exchanged["across"]["reduce"] == 3 * inside // 2
        assert exchanged["moved"]["reduce"] == 3 * (inside // 2 + 2 * reduces)
        assert exchanged["across"]["gather"] == one["across"]["gather"]
        assert one["moved"]["gather"] == 3 * (gathers + within + again)


def test_a_gradient_that_is_not_finite_is_named_through_the_codec() -> None:
    case = Case(all_of("gradients", zeropp_loco_param={}), bad=True)
    with pytest.raises(RankError, match=r"(?s)LossError.*step 1: the gradient norm is nan, first in '"):
        run_ranks(run_case, 2, case)


@pytest.mark.parametrize(
    ("zero", "transport", "text"),
    [
        (all_of("weights", stage=2), "auto", "messages are quantized only at stage 3"),
        ({"zeropp_loco_param": {}}, "auto", "zero_quantized_gradients is false"),
        (all_of("gradients", reduce_scatter=False), "auto", "sends every rank whole sums"),
        (all_of("gradients"), "shm", "ranks read memory of each other in place"),
    ],
)
def test_contradictions_are_refused(zero: dict[str, Any], transport: str, text: str) -> None:
    config = Case(zero).config
    config["comm"]["transport"] = transport
    with pytest.raises(ConfigError, match=text):
        load_config(config)


LOCO = Case(all_of("gradients", zeropp_loco_param={"err_beta": 0.5, "reset_T": 5}), optimizer="AdamW")


def run_from(at: int, folder: str, saves: bool, refreshes: bool = False) -> tuple[dict[str, torch.Tensor], int]:
    """Train four steps and save or refresh after `at` steps, or (not `saves`) load and train the steps after `at`.

    Return parameters with LoCo's states, and the number of these states.
    """
    subject = specimen(LOCO.model)
    engine = start(subject, LOCO.config)
    if not saves:
        engine.load_checkpoint(folder)
    for step in range(0 if saves else at, 4):
        for micro in range(LOCO.accumulation):
            subject.train(engine, subject.batch(Place(step, micro, dist.get_rank())), engine.backward)
            engine.step()
        if saves and step + 1 == at:
            engine.refresh() if refreshes else engine.save_checkpoint(folder)
    states = list(rank_states(engine._sharded))
    found = {f"{one.name}/{one.key}": one.values.clone() for one in states}
    found |= whole_params(engine.module)
    engine.destroy()
    return found, len(states)


def test_error_feedback_of_gradients_is_saved_and_refreshed(tmp_path: Path) -> None:
    at = 2  # after four reductions of each unit; the sixth resets the errors
    straight = run_ranks(run_from, 2, at, str(tmp_path), True)
    resumed = run_ranks(run_from, 2, at, str(tmp_path), False)
    refreshed = run_ranks(run_from, 2, at, str(tmp_path), True, True)
    for (here, states), *others in zip(straight, resumed, refreshed, strict=True):
        for there, _ in others:
            assert states and here.keys() == there.keys()
            assert all(torch.equal(value, there[name]) for name, value in here.items())


class HalfUsed(torch.nn.Module):
    """Model whose second block is used only if `both` is True."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))
        self.both = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks[0](inputs)
        return self.blocks[1](hidden) if self.both else hidden


def load_what_was_saved(folder: str) -> list[dict[str, torch.Tensor]]:
    """Save LoCo's errors before a block is used, and load them into equal and fewer units. Return all errors."""
    found = []
    for threshold in (0, 0, 1000):
        config = Case(all_of("gradients", zeropp_loco_param={}, stage3_param_persistence_threshold=threshold)).config
        engine, *_ = windlass.initialize(model=HalfUsed(), config=config)
        if found:
            engine.load_checkpoint(folder)
        for _ in range(2 if not found else 0):
            engine.backward(engine(torch.randn(4, 8)).square().mean())
            engine.step()
        if not found:
            engine.save_checkpoint(folder)
        found.append({f"{one.name}/{one.key}": one.values.clone() for one in rank_states(engine._sharded)})
        engine.module.both = True
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
        engine.destroy()
    return found


def test_errors_are_loaded_by_units_without_a_reduction_and_by_other_units(tmp_path: Path) -> None:
    for saved, *loaded in run_ranks(load_what_was_saved, 2, str(tmp_path)):
        assert any(value.any() for name, value in saved.items() if name.endswith("/loco_error"))
        for found in loaded:
            assert found.keys() == saved.keys()
            assert all(torch.equal(value, saved[name]) for name, value in found.items())


def errors_at_loss_scales(folder: str) -> list[tuple[float, torch.Tensor]]:
    """Return the loss scale and the errors after a step, after an overflow, and after a load at a static scale."""
    config = Case(all_of("gradients", zeropp_loco_param={}), accumulation=1).config
    scaling = {"initial_scale_power": 6, "hysteresis": 1}
    found: list[tuple[float, torch.Tensor]] = []

    def note(engine: Any) -> None:
        states = [state for state in rank_states(engine._sharded) if state.key == "loco_error"]
        found.append((engine.loss_scale(), torch.cat([state.values for state in states])))

    engine, *_ = windlass.initialize(model=HalfUsed(), config={**config, "fp16": {"enabled": True, **scaling}})
    engine.module.both = True
    for factor in (1.0, float("inf")):  # a message that is not finite adds nothing to the errors
        engine.backward(engine(torch.randn(4, 8).half()).float().square().mean() * factor)
        engine.step()
        note(engine)
    engine.save_checkpoint(folder)
    engine.destroy()
    config["fp16"] = {"enabled": True, "loss_scale": 256.0}
    engine, *_ = windlass.initialize(model=HalfUsed(), config=config)
    engine.load_checkpoint(folder)
    note(engine)
    engine.destroy()
    return found


def test_errors_follow_the_loss_scale(tmp_path: Path) -> None:
    """Stored errors are in units of the scaled gradients to which they are added."""
    for found in run_ranks(errors_at_loss_scales, 2, str(tmp_path)):
        assert [scale for scale, _ in found] == [64.0, 32.0, 256.0] and found[0][1].any()
        for scale, errors in found:
            torch.testing.assert_close(errors / scale, found[0][1] / 64.0, rtol=0.0, atol=0.0)


def states_after_a_load_of_weights(folder: str) -> tuple[int, int]:
    config = Case(all_of("gradients", zeropp_loco_param={}), accumulation=1).config
    engine, *_ = windlass.initialize(model=HalfUsed(), config=config)
    engine.backward(engine(torch.randn(4, 8)).square().mean())
    engine.step()
    before = len(list(rank_states(engine._sharded)))
    engine.save_checkpoint(folder)
    engine.load_checkpoint(folder, load_optimizer_states=False)
    found = before, len(list(rank_states(engine._sharded)))
    engine.destroy()
    return found


def test_errors_of_the_previous_weights_are_dropped(tmp_path: Path) -> None:
    """A load without optimizer states drops LoCo's errors, which belong to gradients of the replaced weights."""
    for before, after in run_ranks(states_after_a_load_of_weights, 2, str(tmp_path)):
        assert before and not after


def inexact_reads(keys: list[str]) -> list[str]:
    """Read a frozen and a trained block in every way, quantized by each key. Return the reads that are not exact."""
    wrong = []
    for key in keys:
        model = HalfUsed()
        model.blocks[0].requires_grad_(False)
        before = {name: value.detach().clone() for name, value in model.named_parameters()}
        engine, *_ = windlass.initialize(model=model, config=Case(all_of(key)).config)
        reads: dict[str, dict[str, torch.Tensor]] = {}
        with windlass.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            reads["GatheredParameters"] = {name: value.detach().clone() for name, value in model.named_parameters()}
        reads["full_param"] = {name: windlass.zero.full_param(value) for name, value in model.named_parameters()}
        reads["full_state_dict"] = engine.full_state_dict() or before  # empty on rank 1
        engine.destroy()
        reads["destroy"] = dict(model.named_parameters())
        assert all(values.keys() == before.keys() for values in reads.values())
        wrong += [
            f"{key}: {name} by {read}"
            for read, values in reads.items()
            for name, value in values.items()
            if not torch.equal(value, before[name])
        ]
    return wrong


def test_reads_outside_of_computation_are_exact() -> None:
    assert run_ranks(inexact_reads, 2, ["weights", "nontrainable_weights"]) == [[], []]


def forward_weights_after_unfreezing() -> list[torch.Tensor]:
    """Unfreeze a block after the first of three steps. Return its weight in a later forward, and its exact value."""
    model, seen = HalfUsed(), []
    model.both = True
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    zero = all_of("nontrainable_weights", zero_hpz_partition_size=2, stage3_max_reuse_distance=0)
    config = {key: value for key, value in Case(zero, accumulation=1).config.items() if key != "optimizer"}
    engine, *_ = windlass.initialize(model=model, optimizer=optimizer, config=config)
    for step in range(3):
        model.blocks[0].requires_grad_(step > 0)
        engine.backward(engine(torch.randn(4, 8)).square().mean())
        engine.step()
    model.blocks[0].register_forward_pre_hook(lambda module, _: seen.append(module.weight.detach().clone()))
    engine(torch.randn(4, 8))
    seen.append(windlass.zero.full_param(model.blocks[0].weight).detach().clone())
    engine.destroy()
    return seen


def test_a_weight_that_is_unfrozen_is_gathered_as_trained_ones() -> None:
    for computed, exact in run_ranks(forward_weights_after_unfreezing, 2):
        torch.testing.assert_close(computed, exact, rtol=0.0, atol=0.0)


def train_beside_padding() -> list[float]:
    """Train with native updates, whose memory for new 16-bit parameters is NaN at first. Return the losses."""
    from windlass.optim import CPUAdam
    from windlass.zero.update import master_weights

    def full_of_nan(numel: int, dtype: torch.dtype, *, pin: bool) -> torch.Tensor:
        return torch.full((numel,), float("nan"), dtype=dtype)

    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 3, bias=False))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, "zero_quantized_weights": True}
    engine, *_ = windlass.initialize(
        model=model,
        optimizer=CPUAdam(model.parameters(), lr=0.01),
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": zero,
            "bf16": {"enabled": True},
            "comm": {"transport": "gloo"},
        },
    )
    losses = []
    with patch.object(master_weights, "empty_host_tensor", full_of_nan):
        for _ in range(3):
            loss = engine(torch.ones(4, 5, dtype=torch.bfloat16)).float().square().mean()
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
    engine.destroy()
    return losses


def test_new_parameters_have_zeros_beside_them() -> None:
    for losses in run_ranks(train_beside_padding, 2, transport="gloo"):
        assert losses[2] < losses[1] < losses[0]
