"""Tests of reading and editing full or local parameters, gradients and optimizer states, at every stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import oracle
from tests.custom_optimizers import Foreign
from tests.dist.equivalence_runs import Setting, ds_config, expected, specimen, start, whole_grads, whole_params
from tests.dist.harness import run_ranks
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error
from windlass.zero.update.master_weights import MasterWeights

RECIPE = Recipe(ranks=3, steps=2, optimizer="AdamW", optimizer_params=(("lr", 1e-2), ("eps", 1e-6)))


def named(engine: Any) -> Iterator[tuple[str, Tensor]]:
    return ((name, p) for name, p in engine.module.named_parameters() if p.requires_grad)


def gathered(setting: Setting, precision: str) -> dict[str, Any]:
    """Return values read inside GatheredParameters, which is given an iterator, one parameter or a list."""
    import windlass

    engine = start(specimen("tied"), ds_config(Recipe(precision=precision), setting))
    module = engine.module
    with windlass.zero.GatheredParameters(module.parameters()):
        values = {name: p.detach().float().clone() for name, p in module.named_parameters()}
        computed = module(**specimen("tied").batch(Place(0, 0, 0))).detach()  # the bare module runs inside the context
        again = {name: p.detach().float().clone() for name, p in module.named_parameters()}
    with windlass.zero.GatheredParameters(module.head.weight):
        tied = torch.equal(module.embed.weight, module.head.weight)
    with windlass.zero.GatheredParameters([module.blocks[0].up.weight, module.blocks[0].up.weight], modifier_rank=None):
        single = module.blocks[0].up.weight.detach().float().clone()
    with windlass.zero.GatheredParameters(list(module.parameters()), enabled=False):
        pass
    outside = ""
    try:
        module.blocks[0].up.weight.sum().item()
    except windlass.WindlassError as error:
        outside = str(error)
    shapes = {name: (tuple(p.shape), p.numel(), p.dtype) for name, p in module.named_parameters()}
    full = whole_params(module)
    engine.destroy()
    return {
        "values": values,
        "again": again,
        "loss": float(computed),
        "tied": tied,
        "single": single,
        "outside": outside,
        "shapes": shapes,
        "full": full,
    }


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_gathered_parameters_have_full_values(precision: str, stage: int, transport: str) -> None:
    model = oracle.build(specimen("tied"), 0)
    masters = {name: p.detach().clone() for name, p in model.named_parameters()}
    model = model.to(Recipe(precision=precision).dtype)
    expected = {name: p.detach().float() for name, p in model.named_parameters()}
    loss = float(model(**specimen("tied").batch(Place(0, 0, 0))).detach())
    actual = run_ranks(gathered, 3, Setting(stage=stage, transport=transport), precision, transport=transport)
    for rank in actual:
        assert relative_error(rank["values"], expected)[0] == 0.0
        assert relative_error(rank["again"], expected)[0] == 0.0, "a forward inside takes nothing away"
        assert rank["loss"] == pytest.approx(loss, rel=1e-6)
        assert rank["tied"]
        assert torch.equal(rank["single"], expected["blocks.0.up.weight"])
        assert {n: (s, c) for n, (s, c, _) in rank["shapes"].items()} == {
            n: (tuple(p.shape), p.numel()) for n, p in model.named_parameters()
        }
        assert ("blocks.0.up.weight" in rank["outside"]) == (stage == 3)
        assert relative_error(rank["full"], masters)[0] == 0.0


def edited(modifier: int | None, setting: Setting, precision: str) -> dict[str, Any]:
    """Write on rank `modifier` (None: rank 0), then train two steps from the written values."""
    import windlass

    subject, rank = specimen("tied"), dist.get_rank()
    recipe = Recipe(ranks=3, precision=precision)
    engine = start(subject, ds_config(recipe, setting))
    weight = engine.module.blocks[1].up.weight
    with windlass.zero.GatheredParameters([weight], modifier_rank=modifier):
        if rank == (modifier or 0):
            with torch.no_grad():
                weight.mul_(0.5)
    after = whole_params(engine.module)["blocks.1.up.weight"]
    losses = []
    for step in range(2):
        batch = cast(subject.batch(Place(step, 0, rank)), recipe.dtype)
        losses.append(float(subject.train(engine, batch, engine.backward)))
        engine.step()
    final = whole_params(engine.module)
    engine.destroy()
    return {"after": after, "losses": losses, "final": final}


@pytest.mark.parametrize(("modifier", "precision"), [(0, "bf16"), (2, "fp32")])
def test_writes_of_the_modifier_rank_reach_all_ranks(modifier: int, precision: str, stage: int, transport: str) -> None:
    recipe = Recipe(ranks=3, steps=2, precision=precision)
    model = oracle.build(specimen("tied"), 0)
    weight = model.blocks[1].up.weight
    written = (weight.detach().to(recipe.dtype) * 0.5).float()
    weight.data.copy_(written)
    expected = oracle.train(specimen("tied"), recipe, model=model)
    bound = 1e-6 if precision == "fp32" else 1e-2
    setting = Setting(stage=stage, transport=transport)
    for rank, actual in enumerate(run_ranks(edited, 3, modifier, setting, precision, transport=transport)):
        assert torch.equal(actual["after"], written)
        assert actual["losses"] == pytest.approx([step[rank][0] for step in expected.losses], rel=bound)
        assert relative_error(actual["final"], expected.params)[0] < bound


def masters_around(setting: Setting) -> list[torch.Tensor]:
    """Return master weights before a context, after one that changes nothing, and after one that changes one row."""
    import windlass

    subject, rank, recipe = specimen("tied"), dist.get_rank(), Recipe(precision="bf16")
    engine = start(subject, ds_config(recipe, setting))
    subject.train(engine, cast(subject.batch(Place(0, 0, rank)), recipe.dtype), engine.backward)
    engine.step()
    weight = engine.module.blocks[1].up.weight
    found = [windlass.zero.full_param(weight).detach()]
    for changes in (False, True):
        with windlass.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
            if changes and rank == 0:
                weight[0].add_(1.0)
            elif changes:
                weight.data[1:].add_(1.0)  # lost
        found.append(windlass.zero.full_param(weight).detach())
    engine.destroy()
    return found


def test_unchanged_elements_of_gathered_parameters_keep_their_precision(stage: int, transport: str) -> None:
    for before, unchanged, changed in run_ranks(masters_around, 2, Setting(stage=stage, transport=transport)):
        assert not torch.equal(before, before.bfloat16().float())
        assert torch.equal(unchanged, before)
        assert torch.equal(changed[1:], before[1:])
        assert torch.equal(changed[0], (before[0].bfloat16() + 1.0).float())


def test_without_a_modifier_rank_changes_are_lost_at_stage_3(transport: str) -> None:
    before = dict(oracle.build(specimen("tied"), 0).named_parameters())["blocks.1.up.weight"].detach()
    for result in run_ranks(edited, 3, None, Setting(stage=3, transport=transport), "fp32", transport=transport):
        assert torch.equal(result["after"], before)


def doubled_in_own_order(setting: Setting) -> dict[str, Tensor]:
    """Double all parameters on rank 1. They are passed in an order that differs between ranks, as in a set."""
    import windlass

    engine, rank = start(specimen("tied"), ds_config(Recipe(), setting)), dist.get_rank()
    parameters = sorted(engine.module.parameters(), key=lambda p: hash((p.shape, rank)))
    with windlass.zero.GatheredParameters(iter(parameters), modifier_rank=1), torch.no_grad():
        for parameter in parameters if rank == 1 else ():
            parameter.mul_(2.0)
    values = whole_params(engine.module)
    engine.destroy()
    return values


@pytest.mark.parametrize("stage", [2, 3])
def test_order_of_gathered_parameters_may_differ_between_ranks(stage: int, transport: str) -> None:
    expected = {name: 2.0 * p.detach() for name, p in oracle.build(specimen("tied"), 0).named_parameters()}
    for actual in run_ranks(doubled_in_own_order, 3, Setting(stage=stage, transport=transport), transport=transport):
        assert relative_error(actual, expected)[0] == 0.0


def rewritten(setting: Setting) -> dict[str, Any]:
    """Write gradients, parameters and a moment with the full setters. Return values read before and after writes."""
    import windlass

    zero, rank = windlass.zero, dist.get_rank()
    subject = specimen("odd_shapes")
    engine = start(subject, ds_config(RECIPE, setting))
    for step in range(2):
        subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)
        if step == 1:
            for _, p in named(engine):
                if zero.full_grad(p) is not None:
                    zero.set_full_grad(p, torch.full(p.shape, 0.25))
            grads = whole_grads(engine.module)
        engine.step()
    norm = float(engine.grad_norm())
    filled = [(name, p) for name, p in named(engine) if p.numel()]
    states = {name: zero.full_state(p, "exp_avg").clone() for name, p in filled}
    for _, p in named(engine):
        zero.set_full_param(p, torch.full(p.shape, 0.5))
        zero.set_full_state(p, "exp_avg", torch.full(p.shape, 2.0))
    params = whole_params(engine.module)
    firsts = {name: zero.full_state(p, "exp_avg").clone() for name, p in filled}
    loss = float(engine(**subject.batch(Place(5, 0, rank))).detach())
    engine.destroy()
    return {"grads": grads, "norm": norm, "states": states, "params": params, "firsts": firsts, "loss": loss}


def test_full_setters_take_effect(stage: int, transport: str) -> None:
    subject = specimen("odd_shapes")
    model = oracle.build(subject, 0)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    first = oracle.train(subject, Recipe(ranks=3, steps=1, optimizer="AdamW", optimizer_params=RECIPE.optimizer_params))
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(0.5)
    elements = sum(shape.numel() for shape in shapes.values())
    setting = Setting(stage=stage, transport=transport)
    for rank, actual in enumerate(run_ranks(rewritten, 3, setting, transport=transport)):
        clip = 1.0 / (0.25 * elements**0.5)
        assert actual["norm"] == pytest.approx(0.25 * elements**0.5, rel=1e-5)
        for name, shape in shapes.items():
            assert torch.equal(actual["grads"][name], torch.full(shape, 0.25)), name
            assert torch.equal(actual["params"][name], torch.full(shape, 0.5)), name
            if not shape.numel():
                continue
            before = first.grads[0][name] * min(1.0, 1.0 / first.norms[0])
            expected = 0.9 * (0.1 * before) + 0.1 * 0.25 * min(1.0, clip)
            assert torch.allclose(actual["states"][name], expected, rtol=1e-4, atol=1e-7), name
            assert torch.equal(actual["firsts"][name], torch.full(shape, 2.0)), name
        loss = float(model(**subject.batch(Place(5, 0, rank))).detach())
        assert actual["loss"] == pytest.approx(loss, rel=1e-6)


def local_parts(setting: Setting) -> dict[str, Any]:
    import windlass

    zero, rank = windlass.zero, dist.get_rank()
    subject = specimen("tied")
    engine = start(subject, ds_config(RECIPE, setting))
    subject.train(engine, subject.batch(Place(0, 0, rank)), engine.backward)
    grads = {name: zero.local_grad(p) for name, p in named(engine)}
    grads = {name: None if g is None else g.detach().clone().reshape(-1) for name, g in grads.items()}
    whole = whole_grads(engine.module)
    one, two = (torch.tensor(value, requires_grad=True) for value in (1.0, 2.0))  # values may have a graph
    for _, p in named(engine):
        if (own := zero.local_grad(p)) is not None:
            zero.set_local_grad(p, own * one)
    engine.step()
    parts = {
        name: [zero.local_param(p), zero.local_state(p, "exp_avg"), zero.local_state(p, "exp_avg_sq")]
        for name, p in named(engine)
    }
    parts = {
        n: [torch.empty(0) if t is None else t.detach().clone().reshape(-1) for t in ts] for n, ts in parts.items()
    }
    full = {
        name: [zero.full_param(p), zero.full_state(p, "exp_avg"), zero.full_state(p, "exp_avg_sq")]
        for name, p in named(engine)
    }
    full = {name: [t.detach().clone().reshape(-1) for t in ts] for name, ts in full.items()}
    for name, p in named(engine):
        zero.set_local_param(p, parts[name][0] * two)
        assert not zero.local_param(p).requires_grad, name
    doubled = whole_params(engine.module)
    engine.destroy()
    return {"grads": grads, "whole": whole, "parts": parts, "full": full, "doubled": doubled}


def test_local_parts_assemble_to_the_full_value(stage: int, transport: str) -> None:
    result = run_ranks(local_parts, 3, Setting(stage=stage, transport=transport), transport=transport)
    for name, full in result[0]["full"].items():
        for kind in range(3):
            parts = [rank["parts"][name][kind] for rank in result]
            together = parts[0] if stage == 0 else torch.cat(parts)
            assert torch.equal(together, full[kind]), (name, kind)
            assert stage == 0 or sum(part.numel() for part in parts) == full[kind].numel()
        assert torch.equal(result[1]["doubled"][name].reshape(-1), 2 * full[0]), name
        if stage >= 2:
            grads = [rank["grads"][name] for rank in result]
            assert torch.equal(torch.cat([g for g in grads if g is not None]), result[0]["whole"][name].reshape(-1))


def norm_of_what_is_read(accumulation: int, setting: Setting) -> list[tuple[float, float]]:
    subject, rank = specimen("lora"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(accumulation=accumulation, clipping=0.01), setting))
    seen = []
    for step in range(3):
        for micro in range(accumulation):
            subject.train(engine, subject.batch(Place(step, micro, rank)), engine.backward)
            if micro == accumulation - 1:
                grads = [g for g in whole_grads(engine.module).values() if g is not None]
                norm = float(torch.stack([g.double().norm() for g in grads]).norm())
            engine.step()
        seen.append((norm, float(engine.grad_norm())))
        assert float(engine.get_global_grad_norm()) == seen[-1][1]
    engine.destroy()
    return seen


@pytest.mark.parametrize("accumulation", [1, 4])
def test_grad_norm_is_that_of_the_full_unclipped_gradient(accumulation: int, stage: int, transport: str) -> None:
    setting = Setting(stage=stage, transport=transport)
    for seen in run_ranks(norm_of_what_is_read, 2, accumulation, setting, transport=transport):
        for plain, sharded in seen:
            assert sharded == pytest.approx(plain, rel=1e-6)


def grads_at_every_micro_batch() -> list[dict[str, Any]]:
    """Return the full gradients before a backward, after the backward, and after the step."""
    subject, rank = specimen("unused_always"), dist.get_rank()
    engine = start(subject, ds_config(Recipe(), Setting(stage=2)))
    before = whole_grads(engine.module)
    subject.train(engine, subject.batch(Place(0, 0, rank)), engine.backward)
    between = whole_grads(engine.module)
    engine.step()
    after = whole_grads(engine.module)
    engine.destroy()
    return [before, between, after]


def test_gradient_exists_only_between_backward_and_step() -> None:
    recipe = Recipe(ranks=2)
    requested = expected("unused_always", recipe).grads[0]
    for before, between, after in run_ranks(grads_at_every_micro_batch, 2):
        assert all(g is None for g in before.values())
        assert relative_error(between, requested)[0] < 1e-6
        assert all(g is None for g in after.values())


def two_layers() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def edit_before_a_slow_peer(stage: int, way: str, delay: float) -> dict[str, torch.Tensor]:
    """Return parameters after edits, in place or with `set_full_param`, that rank 0 makes while rank 1 is late."""
    import windlass

    engine = windlass.initialize(model=two_layers(), config=ds_config(Recipe(clipping=0.0), Setting(stage=stage)))[0]
    late, weight = delay > 0 and dist.get_rank() == 1, engine.module[2].weight
    if late:
        gather = engine._sharded.transport.all_gather
        engine._sharded.transport.all_gather = lambda *args, **more: time.sleep(delay) or gather(*args, **more)
    for step in range(3):
        out = engine(torch.linspace(-1, 1, 8).roll(step).repeat(2, 1))
        if late:
            out.register_hook(lambda gradient: time.sleep(delay))
        engine.backward((out - 1).square().mean())
        if way == "set":
            windlass.zero.set_full_param(weight, torch.full((8, 64), 0.1 * step))
        engine.step()
        if way == "in place":
            with torch.no_grad():
                for p in engine.module.parameters():
                    p.mul_(0.5)
    results = {name: p.detach().clone() for name, p in engine.module.named_parameters()} if way == "in place" else {}
    results |= {f"master of {name}": value for name, value in whole_params(engine.module).items()}
    engine.destroy()
    return results


@pytest.mark.parametrize(("stage", "way"), [(1, "in place"), (2, "in place"), (2, "set"), (3, "set")])
def test_edit_does_not_affect_a_slower_peer(stage: int, way: str) -> None:
    expected = run_ranks(edit_before_a_slow_peer, 2, stage, way, 0.0, transport="gloo")[0]
    for actual in run_ranks(edit_before_a_slow_peer, 2, stage, way, 0.1, transport="shm"):
        assert all(torch.equal(actual[name], expected[name]) for name in expected)


def edit_beside(way: str) -> tuple[Tensor, Tensor]:
    """Return a parameter after an in-place edit, and after another change in its engine and a step."""
    import windlass

    model = two_layers()
    model[0].bias.requires_grad_(False)
    config = {**ds_config(Recipe(), Setting(stage=1)), "bf16": {"enabled": True}}
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.05), config=config)[0]
    weight = model[2].weight
    with torch.no_grad():
        weight.mul_(64.0)
    edited = weight.detach().clone()
    if way == "set":
        windlass.zero.set_full_param(model[0].weight, torch.ones(64, 8))
    else:
        model[0].bias.requires_grad_(True)
        engine.refresh()
    engine.backward(engine(torch.ones(2, 8, dtype=torch.bfloat16)).float().square().mean())
    engine.step()
    result = windlass.zero.full_param(weight).detach().clone()
    engine.destroy()
    return edited.float(), result


@pytest.mark.parametrize("way", ["set", "unfrozen"])
def test_in_place_edit_survives_other_changes(way: str) -> None:
    for edited, result in run_ranks(edit_beside, 2, way):
        assert (result - edited).abs().max() < 0.1 < edited.abs().max()


def resized(stage: int) -> list[str]:
    """Replace a weight by one with another number of rows, as `resize_token_embeddings` of transformers does."""
    import windlass

    engine = windlass.initialize(model=two_layers(), config=ds_config(Recipe(), Setting(stage=stage)))[0]
    last, text = engine.module[2], []
    for rank in (None, 0):
        with pytest.raises(windlass.WindlassError) as refused:
            with windlass.zero.GatheredParameters([last.weight], modifier_rank=rank):
                last.weight.data = torch.zeros(9, 64)
            last.bias.data = torch.zeros(9)
            engine.backward(engine(torch.ones(2, 8)).square().mean())
        text.append(str(refused.value))
    return text


def test_resized_parameter_is_named() -> None:
    for result in run_ranks(resized, 2, 3):
        assert all("'2.weight' had shape (8, 64) at initialize and has (9, 64) now" in text for text in result)
    for result in run_ranks(resized, 2, 1):
        assert all(text.startswith("'2.") and "has (9" in text for text in result)


def resized_on_one_rank(stage: int) -> tuple[str, torch.Size]:
    """Replace a weight by one of another size on the modifier rank alone."""
    import windlass

    engine = windlass.initialize(model=two_layers(), config=ds_config(Recipe(), Setting(stage=stage)))[0]
    first, last = engine.module[0].weight, engine.module[2].weight
    with (
        pytest.raises(windlass.WindlassError) as refused,
        windlass.zero.GatheredParameters([first, last], modifier_rank=0),
        torch.no_grad(),
    ):
        first.fill_(2.0)
        if dist.get_rank() == 0:
            last.data = torch.zeros(9, 64)
    assert (windlass.zero.full_param(first) == 2.0).all()
    return str(refused.value), last.shape


@pytest.mark.parametrize("stage", [1, 3])
def test_size_changed_on_one_rank_raises_on_all(stage: int) -> None:
    for text, shape in run_ranks(resized_on_one_rank, 2, stage):
        assert "'2.weight' had shape (8, 64) at initialize and has (9, 64) now" in text
        assert shape == (8, 64)


SGD = (("lr", 0.1), ("momentum", 0.9))


class TiedHead(nn.Module):
    """Model whose output layer gathers the weight of its embedding, as scripts of DeepSpeed do."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.layer = nn.Embedding(12, 8), nn.Linear(8, 8)

    def forward(self, ids: Tensor) -> Tensor:
        import windlass

        hidden = self.layer(self.embed(ids)).tanh()
        with windlass.zero.GatheredParameters([self.embed.weight]):
            return nn.functional.linear(hidden, self.embed.weight).square().mean()


def train_tied_head() -> dict[str, Tensor]:
    import windlass

    torch.manual_seed(3)
    setting = Setting(stage=3, zero=(("offload_param", {"device": "cpu"}),))
    engine = windlass.initialize(model=TiedHead(), config=ds_config(Recipe(optimizer_params=SGD), setting))[0]
    for step in range(2):
        engine.backward(engine(torch.arange(step, step + 6)))
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_forward_may_gather_a_parameter_of_another_block(ranks: int) -> None:
    torch.manual_seed(3)
    model = TiedHead()
    optimizer = torch.optim.SGD(model.parameters(), **dict(SGD))
    for step in range(2):
        model(torch.arange(step, step + 6)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for result in run_ranks(train_tied_head, ranks):
        assert relative_error(result, expected)[0] < 1e-6


def modify_by(rank: Any) -> str:
    """Return the error of a context with a modifier rank that does not exist."""
    import windlass

    engine = windlass.initialize(model=two_layers(), config=ds_config(Recipe(), Setting(stage=0)))[0]
    with (
        pytest.raises(windlass.WindlassError) as refused,
        windlass.zero.GatheredParameters(engine.module.parameters(), modifier_rank=rank),
    ):
        pass
    engine.destroy()
    return str(refused.value)


@pytest.mark.parametrize("rank", [1, -1, "0"])
def test_modifier_that_is_no_rank_is_refused_by_value(rank: Any) -> None:
    (text,) = run_ranks(modify_by, 1, rank)
    assert f"modifier_rank is {rank!r}" in text and "global ranks (0,)" in text


def cast_by_one_rank(stage: int) -> torch.Tensor:
    """Set float32 values in 16-bit training, as a loader does on the rank that has read the file."""
    import windlass

    config = ds_config(Recipe(precision="bf16"), Setting(stage=stage))
    engine = windlass.initialize(model=two_layers().bfloat16(), config=config)[0]
    weight = engine.module[2].weight
    with windlass.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data = torch.full((8, 64), 1.001)
    result = windlass.zero.full_param(weight).detach()
    engine.destroy()
    return result


@pytest.mark.parametrize("stage", [1, 3])
def test_modifier_may_set_values_in_the_dtype_of_the_master_weights(stage: int) -> None:
    for result in run_ranks(cast_by_one_rank, 2, stage):
        assert (result == 1.001).all()


def replaced(stage: int, precision: str, directory: str) -> dict[str, Tensor]:
    """Give parameters other memory. Return the result of each function divided by the expected value, 1 if equal."""
    import windlass

    dtype, seen = Recipe(precision=precision).dtype, {}
    model = two_layers().to(dtype)
    model[0].weight.requires_grad_(False)
    engine = windlass.initialize(
        model=model, config=ds_config(Recipe(precision=precision, clipping=0.0), Setting(stage=stage))
    )[0]
    frozen, weight = model[0].weight, model[2].weight
    saved, unchanged = windlass.zero.full_param(weight).detach(), weight.detach().clone()

    def replace(value: float) -> None:
        frozen.data, weight.data = torch.full_like(frozen, value), torch.full_like(weight, value)

    engine.save_checkpoint(directory, tag="a")
    replace(2.0)
    state = engine.full_state_dict()
    if dist.get_rank() == 0:
        seen["full_state_dict"] = torch.stack([state["0.weight"].view(-1), state["2.weight"].view(-1)]) / 2.0
    seen["full_param of a frozen parameter"] = windlass.zero.full_param(frozen) / 2.0
    replace(3.0)
    windlass.zero.set_full_param(weight, torch.full((8, 64), 5.0))
    windlass.zero.set_full_param(frozen, torch.full((64, 8), 5.0))
    seen["set_full_param"] = torch.cat([weight.detach().view(-1), frozen.detach().view(-1)]) / 5.0
    seen["set_full_param, masters"] = windlass.zero.full_param(weight).detach() / 5.0
    replace(3.0)
    with windlass.zero.GatheredParameters([weight], modifier_rank=0):
        if dist.get_rank() == 0:
            weight.data.fill_(6.0)
    seen["GatheredParameters"] = weight.detach().clone() / 6.0
    seen["GatheredParameters, masters"] = windlass.zero.full_param(weight).detach() / 6.0
    weight.data = torch.full_like(weight, 7.0)
    seen["local_param"] = windlass.zero.local_param(weight).clone() / 7.0
    replace(4.0)
    engine.load_checkpoint(directory, tag="a")
    seen["load_checkpoint"] = (windlass.zero.full_param(weight).detach() == saved).float()
    seen["load_checkpoint, parameter"] = (weight.detach() == unchanged).float()
    replace(9.0)
    engine.destroy()
    seen["destroy"] = torch.cat([weight.detach().view(-1), frozen.detach().view(-1)]) / 9.0
    return seen


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "bf16"), (2, "fp32")])
def test_values_of_replaced_data_are_used(stage: int, precision: str, tmp_path: Path) -> None:
    for seen in run_ranks(replaced, 2, stage, precision, str(tmp_path)):
        assert [what for what, ratio in seen.items() if not (ratio == 1.0).all()] == []


def rearranged(stage: int) -> dict[str, bool]:
    """Swap the memory of two parameters, transpose and slice others. Return a flag for each check."""
    import windlass

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    engine = windlass.initialize(model=model, config=ds_config(Recipe(), Setting(stage=stage)))[0]
    first, second, third = (layer.weight for layer in model)
    one, two, three = (p.detach().clone() for p in (first, second, third))
    first.data, second.data = second.data, first.data
    third.data = third.data.t()
    full = [windlass.zero.full_param(p).detach() for p in (first, second, third)]
    held = [p.detach().clone() for p in (first, second, third)]
    seen = {
        "full_param": all(torch.equal(*pair) for pair in zip(full, (two, one, three.t()), strict=True)),
        "parameters": all(torch.equal(*pair) for pair in zip(held, (two, one, three.t()), strict=True)),
    }
    backup = first.data
    first.data = torch.zeros(4, 4)
    state = engine.full_state_dict()
    seen["average saved"] = dist.get_rank() != 0 or not state["0.weight"].any()
    first.data = backup
    seen["restored after a full save"] = torch.equal(windlass.zero.full_param(first), two)
    first.data = first.data[:2]
    with pytest.raises(windlass.WindlassError, match=r"had shape \(4, 4\) at initialize and has \(2, 4\) now"):
        windlass.zero.full_param(first)
    return seen


@pytest.mark.parametrize("stage", [0, 2])
def test_values_of_swapped_and_transposed_data_are_used(stage: int) -> None:
    for seen in run_ranks(rearranged, 2, stage):
        assert all(seen.values()), seen


def cast_during_a_run(stage: int) -> list[str]:
    """Train with a module in another dtype, which raises, then undo the cast and train. Return the errors."""
    import windlass

    engine = windlass.initialize(model=two_layers(), config=ds_config(Recipe(), Setting(stage=stage)))[0]
    text = []
    for dtype in (torch.float64, torch.float16):
        with pytest.raises(windlass.WindlassError) as refused:
            engine.module.to(dtype)
            engine.backward(engine(torch.ones(2, 8, dtype=dtype)).float().square().mean())
            engine.step()
        text.append(str(refused.value))
        if stage < 3:
            with pytest.raises(windlass.WindlassError, match="must be undone before the next step, save, load"):
                engine.full_state_dict()
        engine.module.float()
    engine.backward(engine(torch.ones(2, 8)).square().mean())
    engine.step()
    engine.destroy()
    return text


def test_cast_parameter_is_named() -> None:
    for stage in (0, 2):
        for result in run_ranks(cast_during_a_run, 2, stage):
            assert all("had dtype torch.float32 at initialize and has torch.float" in text for text in result)
    for result in run_ranks(cast_during_a_run, 2, 3):
        assert all("its values are sharded over ranks (stage 3" in text for text in result)


class Listing(Foreign):
    """SGD whose states are a dictionary, a text and a number."""

    def rule(self, p: Tensor, gradient: Tensor, state: dict[str, Any], lr: float) -> None:
        state |= {"table": {"a": 1}, "text": "words", "count": 3}
        p.sub_(gradient, alpha=lr)


def loose_states() -> list[str]:
    """Return the errors of reading states that are not tensors, and the value of one that is a number."""
    import windlass

    layer = nn.Linear(3, 3)
    config = ds_config(Recipe(), Setting(stage=2))
    del config["optimizer"]
    engine = windlass.initialize(model=layer, optimizer=Listing(layer.parameters()), config=config)[0]
    engine.backward(engine(torch.ones(2, 3)).sum())
    engine.step()
    errors = []
    for key in ("table", "text"):
        for read in (windlass.zero.full_state, windlass.zero.local_state):
            try:
                found = read(layer.weight, key)
            except windlass.WindlassError as error:
                errors.append(str(error))
            else:  # this rank does not own the parameter
                assert found is None and read is windlass.zero.local_state
    number = windlass.zero.full_state(layer.weight, "count")
    assert number is not None and number.item() == 3
    table = engine.optimizer.state_dict()["state"][0]["table"]
    engine.destroy()
    return [*errors, repr(table)]


def test_states_that_are_not_tensors_are_named() -> None:
    for *errors, table in run_ranks(loose_states, 2):
        assert len(errors) >= 2 and table == "{'a': 1}"
        for error in errors:
            assert "of 'weight' is a " in error and "engine.optimizer.state_dict()" in error


def set_after_an_evaluation() -> list[float]:
    """Evaluate, double all parameters, on rank 1 late, evaluate again, and return both results."""
    import windlass

    model = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Linear(64, 1, bias=False))
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    optimizer = {"type": "SGD", "params": {"lr": 0.0}}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero, "optimizer": optimizer}
    engine, *_ = windlass.initialize(model=model, config=config)
    for _ in range(2):  # from now on, a forward prepares the backward
        engine.backward(engine(torch.ones(1, 4)).sum())
        engine.step()
    with torch.no_grad():
        for parameter in model.parameters():
            windlass.zero.set_full_param(parameter, torch.ones(parameter.shape))
        before = float(engine(torch.ones(1, 4)))
        pieces = MasterWeights.pieces

        def late(self: MasterWeights, unit: Any) -> Any:
            time.sleep(0.2 * dist.get_rank())
            return pieces(self, unit)

        with patch.object(MasterWeights, "pieces", late):
            for parameter in model.parameters():
                windlass.zero.set_full_param(parameter, torch.full(parameter.shape, 2.0))
    return [before, float(engine(torch.ones(1, 4)))]


@pytest.mark.parametrize("transport", ["shm", "gloo"])
def test_a_forward_after_an_evaluation_sees_values_that_another_rank_sets_late(transport: str) -> None:
    for losses in run_ranks(set_after_an_evaluation, 2, transport=transport):
        assert losses == [256, 1024]
