"""Tests of gradients that a script drops between backward and step, and of edits of gradients and weights.

The result equals plain PyTorch, or the edit raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests import oracle
from tests.dist.equivalence_runs import SGD, Setting, ds_config, specimen, whole_params
from tests.dist.harness import run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.dist.test_offload import EMULATED, offload_to
from tests.models import Place, adversarial
from tests.oracle import Recipe, relative_error
from windlass.base.errors import GradientAccessError, ModelError

STEPS, CLIPPING = 3, 0.5
GENTLE = {**dict(SGD), "weight_decay": 0.1}  # with weight decay, a zero gradient differs from none


class OwnZeroing(torch.optim.SGD):
    """Client's optimizer that drops gradients by its own `zero_grad`."""

    def zero_grad(self, set_to_none: bool = False) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    if set_to_none:
                        p.grad = None
                    else:
                        p.grad.detach_()
                        p.grad.zero_()


def one_parameter(model: Any, *_: Any) -> None:
    model.blocks[0].up.weight.grad = None
    del model.embed.weight.grad


DOORS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {  # module, engine, engine's optimizer, user's optimizer
    "optimizer": lambda model, engine, optimizer, own: optimizer.zero_grad(),
    "optimizer, zeros": lambda model, engine, optimizer, own: optimizer.zero_grad(set_to_none=False),
    "own optimizer": lambda model, engine, optimizer, own: own.zero_grad(set_to_none=True),
    "own optimizer, zeros": lambda model, engine, optimizer, own: own.zero_grad(),
    "module": lambda model, engine, optimizer, own: model.zero_grad(),
    "module, zeros": lambda model, engine, optimizer, own: model.zero_grad(set_to_none=False),
    "submodule": lambda model, engine, optimizer, own: model.blocks[1].zero_grad(),
    "engine": lambda model, engine, optimizer, own: engine.zero_grad(),
    "one parameter": one_parameter,
    "nothing": lambda *_: None,
}
# Events of an optimizer step (b: backward, n: backward inside no_sync, d: drop, s: call of `step`), and the number of
# accumulation steps.
EVENTS = {
    "one of two backwards": ("bdbs", 1),
    "a rejected batch": ("bds", 1),
    "in the middle of a step": ("bsdbs", 2),
    "the last micro-batch": ("bsbds", 2),
    "a backward of the middle": ("bsbdbs", 2),
    "a backward inside no_sync": ("bndbs", 1),
}


def rows_of(number: int, doors: list[str] | None = None) -> list[tuple[str, str]]:
    """Combine each way of dropping with one kind of events. Each `number` gives other combinations."""
    names = list(EVENTS)
    return [(door, names[(at + number) % len(names)]) for at, door in enumerate(doors or DOORS)]


def go_through(
    row: tuple[str, str],
    drop: Callable[[], Any],
    backward: Callable[[int, int], None],
    step: Any,
    quiet: Any = nullcontext,
) -> None:
    """Run the script for plain PyTorch or an engine. Nothing is dropped in the second step."""
    events, _ = EVENTS[row[1]]
    for number in range(STEPS):
        micro = 0
        for event in events:
            if event in "bn":
                with quiet() if event == "n" else nullcontext():
                    backward(number, micro)
                micro += 1
            elif event == "s":
                step()
            elif number != 1:
                drop()


def rule_of(row: tuple[str, str]) -> type[torch.optim.SGD]:
    """Return the optimizer class: torch's is stepped on shards, the client's on full parameters."""
    return OwnZeroing if "zeros" in row[0] else torch.optim.SGD


def plain(row: tuple[str, str], ranks: int) -> dict[str, Tensor]:
    subject, accumulation = specimen("tied"), EVENTS[row[1]][1]
    model = oracle.build(subject, 0)
    optimizer = rule_of(row)(model.parameters(), **GENTLE)
    steps = 0

    def backward(number: int, micro: int) -> None:
        for rank in range(ranks):
            subject.train(
                model, subject.batch(Place(number, micro, rank)), lambda x: (x / ranks / accumulation).backward()
            )

    def step() -> None:
        nonlocal steps
        steps += 1
        if steps % accumulation == 0:
            nn.utils.clip_grad_norm_(model.parameters(), CLIPPING)
            optimizer.step()
            model.zero_grad()

    inner = torch.optim.SGD.zero_grad
    go_through(
        row, lambda: DOORS[row[0]](model, model, Door(lambda **how: inner(optimizer, **how)), optimizer), backward, step
    )
    return {name: p.detach() for name, p in model.named_parameters()}


class Door:
    """Object that has only `zero_grad`."""

    def __init__(self, zero_grad: Callable[..., None]) -> None:
        self.zero_grad = zero_grad


def engines(
    rows: list[tuple[str, str]], setting: Setting, stand_in: bool, skip: bool = False
) -> list[dict[str, Tensor]]:
    """Return the parameters after each row.

    Args:
        skip: leave out the backwards whose gradients would be dropped, instead of dropping them.
    """
    import windlass
    from windlass.compat.deepspeed_initialize import initialize

    subject, rank, result = specimen("tied"), dist.get_rank(), []
    for row in rows:
        recipe = Recipe(accumulation=EVENTS[row[1]][1], clipping=CLIPPING)
        model = oracle.build(subject, rank)
        own = rule_of(row)(model.parameters(), **GENTLE)
        start = initialize if stand_in else windlass.initialize
        engine, optimizer = start(model=model, optimizer=own, config=ds_config(recipe, setting))[:2]

        def backward(number: int, micro: int, engine: Any = engine) -> None:
            if not skip or number == 1 or micro:
                subject.train(engine, subject.batch(Place(number, micro, rank)), engine.backward)

        def drop(row: Any = row, engine: Any = engine, optimizer: Any = optimizer, own: Any = own) -> None:
            if not skip:
                DOORS[row[0]](engine.module, engine, optimizer, own)

        go_through(row, drop, backward, engine.step, engine.no_sync)
        result.append(whole_params(engine.module))
        engine.destroy()
    return result


def hold(rows: list[tuple[str, str]], setting: Setting, ranks: int, stand_in: bool = False, env: Any = None) -> None:
    named = Setting(setting.stage, zero=setting.zero, config=(("comm", {"transport": setting.transport}),))
    everywhere = run_ranks(engines, ranks, rows, named, stand_in, env=env, timeout=180.0)
    expected = [plain(row, ranks) for row in rows]
    for rank, of_rank in enumerate(everywhere):
        for row, result, wanted in zip(rows, of_rank, expected, strict=True):
            error, where = relative_error(result, wanted)
            assert error < 1e-6, f"{row} under {setting}, rank {rank}: {where} off by {error:.1e}"


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@in_shares
def test_gradients_can_be_dropped_by_every_method(stage: int, every: bool) -> None:
    rows = share(rows_of(stage), stage, 2, every)
    hold(rows, Setting(stage=stage, transport="shm" if stage in (0, 3) else "gloo"), 2)


@pytest.mark.parametrize("stage", [0, 3])
def test_dropped_gradients_on_one_rank(stage: int) -> None:
    hold(rows_of(stage + 2), Setting(stage=stage), 1)


@pytest.mark.parametrize(("stage", "state", "param"), [(1, "nvme", "none"), (2, "cpu", "none"), (3, "nvme", "nvme")])
@in_shares
def test_offloaded_gradients_are_dropped(stage: int, state: str, param: str, every: bool, tmp_path: Any) -> None:
    setting = Setting(stage=stage, zero=offload_to(state, param, tmp_path))
    rows = rows_of(stage, ["own optimizer, zeros", "one parameter", "optimizer", "submodule", "module"])
    hold(share(rows, stage, 2, every), setting, 2, env=EMULATED)


@pytest.mark.parametrize("stage", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2)), 3])
def test_dropped_gradients_through_the_stand_in(stage: int) -> None:
    """Dropping works under the compat layer too. Drops in the middle of a step have a separate test below."""
    rows = [(door, "one of two backwards" if at % 2 else "a rejected batch") for at, door in enumerate(DOORS)]
    hold(
        [row for row in rows if row[0] != "submodule"] + [("submodule", "a backward of the middle")],
        Setting(stage=stage),
        2,
        True,
    )


def test_delayed_update_skips_dropped_gradients(tmp_path: Any) -> None:
    """A delayed update after a drop equals a run without the backward."""
    for stage, door in ((1, "optimizer"), (3, "module")):
        rows = [(door, "one of two backwards")]
        setting = Setting(stage=stage, zero=offload_to("cpu", "none", tmp_path, delayed_update=True))
        dropped, never = (run_ranks(engines, 2, rows, setting, False, skip, env=EMULATED) for skip in (False, True))
        for actual, expected in zip(dropped, never, strict=True):
            assert relative_error(actual[0], expected[0])[0] < 1e-6, stage


def every_iteration(where: str, stage: int) -> list[dict[str, Tensor]]:
    """Run a script that calls zero_grad in every iteration during accumulation, and one that does not."""
    from windlass.compat.deepspeed_initialize import initialize

    subject, result = specimen("tied"), []
    for calls in (True, False):
        config = ds_config(Recipe(accumulation=3), Setting(stage=stage))
        engine, optimizer = initialize(model=oracle.build(subject, 0), config=config)[:2]
        for number in range(2):
            for micro in range(3):
                if calls and where == "before the forward":
                    optimizer.zero_grad()
                loss = engine(**subject.batch(Place(number, micro, dist.get_rank())))
                if calls and where == "before the backward":
                    engine.module.zero_grad()
                engine.backward(loss)
                engine.step()
                if calls and where == "after the step":
                    engine.zero_grad()
        result.append(whole_params(engine.module))
        engine.destroy()
    return result


@pytest.mark.parametrize("where", ["before the forward", "before the backward", "after the step"])
def test_stand_in_accumulates_over_zero_grad_in_every_iteration(where: str) -> None:
    for stage in (0, 2):
        for with_calls, without in run_ranks(every_iteration, 2, where, stage):
            assert relative_error(with_calls, without)[0] == 0.0


def adversaries(stages: tuple[int, int], door: str, stand_in: bool) -> tuple[list[list[float]], dict[str, Tensor]]:
    import windlass
    from windlass.compat.deepspeed_initialize import initialize

    models, sides = adversarial.pair(), []
    started = []
    for model, stage in zip(models, stages, strict=True):
        own = adversarial.adam(model)
        config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}}
        start = initialize if stand_in else windlass.initialize
        engine, optimizer = start(model=model, optimizer=own, config=config | {"gradient_clipping": 0.0})[:2]
        started.append(engine)
        zero = {"module": model.zero_grad, "optimizer": optimizer.zero_grad, "own": own.zero_grad}[door]
        call = engine if door == "optimizer" else model  # the usual script calls the module
        sides.append(adversarial.Side(call, zero, engine.backward, engine.step))
    losses = adversarial.train(sides[0], sides[1], [dist.get_rank()], 4)
    results = {f"{n}.{name}": value for n, m in enumerate(models) for name, value in whole_params(m).items()}
    for engine in started:
        engine.destroy()
    return losses, results


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("stand_in", [False, True], ids=["native", "stand-in"])
def test_adversarial_models_train_as_in_plain_pytorch(ranks: int, stand_in: bool) -> None:
    losses, params = adversarial.train_plain(ranks, 4)
    for stages, door in (((0, 0), "module"), ((1, 2), "optimizer"), ((3, 3), "module"), ((2, 0), "own")):
        for rank, (results, result) in enumerate(run_ranks(adversaries, ranks, stages, door, stand_in)):
            assert [item[0] for item in results] == pytest.approx([item[rank] for item in losses], abs=1e-6), (
                stages,
                door,
            )
            assert relative_error(result, params)[0] < 1e-6, (stages, door)


# ---------------------------------------------------------------------------------------------- accesses to gradients

TOUCHES: dict[str, Callable[[nn.Parameter, nn.Module], Any]] = {
    "mul_": lambda p, model: p.grad.mul_(0.5),
    "+=": lambda p, model: p.grad.add_(torch.ones_like(p.grad.detach_())),
    "norm": lambda p, model: p.grad.norm(),
    "clone": lambda p, model: p.grad.clone(),
    "data": lambda p, model: p.grad.data,
    "item": lambda p, model: p.grad.view(-1)[0].item(),
    "numpy": lambda p, model: p.grad.numpy(),
    "clip_grad_norm_": lambda p, model: nn.utils.clip_grad_norm_(model.parameters(), 0.1),
    "clip_grad_value_": lambda p, model: nn.utils.clip_grad_value_(model.parameters(), 0.1),
    "foreach": lambda p, model: torch._foreach_mul_([p.grad], 2.0),
    "swap": lambda p, model: setattr(p, "grad", torch.zeros(p.shape)),
    "scaled": lambda p, model: setattr(p, "grad", p.grad * 2),
    "another's": lambda p, model: setattr(p, "grad", model.embed.weight.grad),
}


def touched(stage: int) -> list[str]:
    """Access a gradient in each way. Each access raises and changes nothing; shape and dtype can be read."""
    import windlass

    subject = specimen("tied")
    recipe, rank = Recipe(optimizer_params=SGD), dist.get_rank()
    said, params = [], []
    before = [vars(nn.Parameter).get(name) for name in ("grad", "data")]
    for touches in (True, False):
        config = ds_config(recipe, Setting(stage=stage))
        engine = windlass.initialize(model=oracle.build(subject, rank), config=config)[0]
        weight = engine.module.blocks[0].up.weight
        engine.backward(engine(**subject.batch(Place(0, 0, rank))))
        if touches:
            assert weight.grad is not None and weight.grad.shape == weight.shape and weight.grad.dtype == weight.dtype
            weight.grad = weight.grad  # assigning the same gradient changes nothing
            for name, touch in TOUCHES.items():
                with pytest.raises(ModelError, match="windlass.zero.(set_)?full_grad") as raised:
                    touch(weight, engine.module)
                assert isinstance(raised.value, GradientAccessError) or name in ("swap", "another's")
                said.append(str(raised.value))
        engine.step()
        assert weight.grad is None
        with pytest.raises(ModelError, match="without a backward since the last step"):
            engine.step()
        params.append(whole_params(engine.module))
        engine.destroy()
    assert relative_error(*params)[0] == 0.0
    assert before == [vars(nn.Parameter).get(name) for name in ("grad", "data")], "torch is as it was"
    return said


@pytest.mark.parametrize("stage", [0, 3])
def test_access_to_a_gradient_raises_and_names_the_function(stage: int) -> None:
    for text in run_ranks(touched, 2, stage):
        assert all("up.weight" in item or "embed.weight" in item or "blocks" in item for item in text), text


def as_deepspeed(stage: int) -> None:
    """Read `.grad` under the compat layer after a backward: None at stages 1 and 3, as in DeepSpeed.

    At stage 0, where DeepSpeed returns a value, the access raises.
    """
    from windlass.compat.deepspeed_initialize import initialize

    subject = specimen("tied")
    engine = initialize(model=oracle.build(subject, 0), config=ds_config(Recipe(), Setting(stage=stage)))[0]
    engine.backward(engine(**subject.batch(Place(0, 0, dist.get_rank()))))
    if stage:
        assert all(p.grad is None for p in engine.module.parameters())
    else:
        with pytest.raises(GradientAccessError, match="full_grad"):
            nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)
    engine.step()
    engine.step()  # nothing to step, as in DeepSpeed
    engine.destroy()


def test_gradients_of_the_stand_in_read_as_in_deepspeed() -> None:
    for stage in (0, 1, 3):
        run_ranks(as_deepspeed, 2, stage)


# ------------------------------------------------------------------------------------------------- ranks that differ


def uneven(settings: list[tuple[int, str]]) -> list[float]:
    """Run different numbers of backwards on ranks 0 and 1 in each step.

    Return each setting's difference from DDP, which reduces gradients in the last backward of each rank.
    """
    import windlass

    subject, rank, result = specimen("tied"), dist.get_rank(), []
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    for stage, transport in settings:
        theirs = DistributedDataParallel(oracle.build(subject, 0))
        optimizer = torch.optim.SGD(theirs.parameters(), **dict(SGD))
        config = ds_config(Recipe(optimizer_params=SGD, clipping=0.0), Setting(stage=stage, transport=transport))
        engine = windlass.initialize(
            model=oracle.build(subject, 0), config=config | {"comm": {"transport": transport}}
        )[0]
        logging.getLogger("windlass").addHandler(handler)
        for step in range(STEPS):
            count = 3 - rank if step != 1 else 1 + 2 * rank
            batches = [subject.batch(Place(step, micro, rank)) for micro in range(count)]
            for batch in batches:
                engine.backward(engine(**batch))
            engine.step()
            with theirs.no_sync():
                for batch in batches[:-1]:
                    subject.train(theirs, batch, lambda loss: loss.backward())
            subject.train(theirs, batches[-1], lambda loss: loss.backward())
            optimizer.step()
            optimizer.zero_grad()
        logging.getLogger("windlass").removeHandler(handler)
        result.append(relative_error(whole_params(engine.module), dict(theirs.module.named_parameters()))[0])
        engine.destroy()
    results = [text for text in records if "different numbers of backwards" in text]
    assert len(results) == (len(settings) if rank == 0 else 0), records
    assert all("rank 0: 3, rank 1: 2" in text for text in results), results
    return result


def test_extra_backwards_of_a_rank_count_as_in_ddp() -> None:
    settings = [(stage, transport) for stage in range(4) for transport in ("gloo", "shm")]
    for result in run_ranks(uneven, 2, settings, timeout=120.0):
        assert max(result) < 1e-6, dict(zip(settings, result, strict=True))


def dropped_on_one_rank(stage: int) -> str:
    """Drop gradients on rank 0 and not on rank 1: all ranks raise, and training continues."""
    import windlass

    subject, rank = specimen("tied"), dist.get_rank()
    params, text = [], ""
    for drops in (True, False):
        config = ds_config(Recipe(optimizer_params=SGD), Setting(stage=stage))
        engine, optimizer = windlass.initialize(model=oracle.build(subject, rank), config=config)[:2]
        if drops:
            engine.backward(engine(**subject.batch(Place(0, 0, rank))))
            if rank == 0:
                optimizer.zero_grad()
            with pytest.raises(ModelError, match="ranks dropped reduced gradients") as raised:
                engine.step()
            text = str(raised.value)
        engine.backward(engine(**subject.batch(Place(1, 0, rank))))
        engine.step()
        params.append(whole_params(engine.module))
        engine.destroy()
    assert relative_error(*params)[0] == 0.0
    return text


def test_gradients_dropped_on_one_rank_raise_on_all() -> None:
    for stage in (0, 2, 3):
        for text in run_ranks(dropped_on_one_rank, 2, stage):
            assert "rank 0 dropped" in text and "rank 1 dropped none" in text and "weight" in text


# ------------------------------------------------------------------------------------------------- edits of weights

EDITS: dict[str, Callable[[nn.Module], Any]] = {
    "p.data.mul_": lambda model: [p.data.mul_(0.5) for p in model.parameters()],
    "p.data.clamp_": lambda model: [p.data.clamp_(-0.125, 0.125) for p in model.parameters()],
    "p.data.copy_": lambda model: [p.data.copy_(p.detach() * 0.25) for p in model.parameters()],
    "p.data =": lambda model: [setattr(p, "data", p.detach() * 0.5) for p in model.parameters()],
    "p.mul_": lambda model: [p.mul_(0.5) for p in model.parameters()],
    "load_state_dict": lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
    "detach": lambda model: [p.detach().mul_(0.5) for p in model.parameters()],
}


def edited(rows: list[tuple[Setting, str]], precision: str) -> list[dict[str, Tensor]]:
    """Return parameters after each edit. Edits happen between backward and step, and after the step."""
    import windlass

    subject, rank, result = specimen("mlp"), dist.get_rank(), []
    for setting, name in rows:
        edit = EDITS[name]
        recipe = Recipe(precision=precision, optimizer_params=SGD, clipping=0.0)
        engine = windlass.initialize(model=oracle.build(subject, 0), config=ds_config(recipe, setting))[0]
        for step in range(2):
            dtype = next(engine.module.parameters()).dtype
            batch = {key: value.to(dtype) for key, value in subject.batch(Place(step, 0, rank)).items()}
            engine.backward(engine(**batch))
            if step == 0:
                with torch.no_grad():
                    edit(engine.module)
            engine.step()
        with torch.no_grad():
            edit(engine.module)
        result.append(whole_params(engine.module))
        engine.destroy()
    return result


def edited_plainly(edit: Callable[[nn.Module], Any], ranks: int) -> dict[str, Tensor]:
    subject = specimen("mlp")
    model = oracle.build(subject, 0)
    optimizer = torch.optim.SGD(model.parameters(), **dict(SGD))
    for step in range(2):
        for rank in range(ranks):
            subject.train(model, subject.batch(Place(step, 0, rank)), lambda loss: (loss / ranks).backward())
        if step == 0:
            with torch.no_grad():
                edit(model)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        edit(model)
    return {name: p.detach() for name, p in model.named_parameters()}


@in_shares
def test_weight_edits_reach_separate_master_weights(every: bool, tmp_path: Any) -> None:
    """In `make test` each setting runs every second edit, and each edit runs in both precisions."""
    cpu, nvme = (Setting(stage=s, zero=offload_to(t, "none", tmp_path)) for s, t in ((1, "cpu"), (2, "nvme")))
    full, half = [Setting(stage=0), cpu, nvme], [Setting(stage=2), Setting(stage=0)]
    expected = {name: edited_plainly(edit, 2) for name, edit in EDITS.items()}
    for precision, settings, env, bound in (("fp32", full, EMULATED, 1e-6), ("bf16", half, None, 2e-2)):
        rows = [(item, name) for n, item in enumerate(settings) for name in share(list(EDITS), n, 2, every)]
        for of_rank in run_ranks(edited, 2, rows, precision, env=env, timeout=120.0):
            for (setting, name), have in zip(rows, of_rank, strict=True):
                error, where = relative_error(have, expected[name])
                assert error < bound, (name, setting, precision, where, error)


def edited_late(stage: int) -> str:
    """Change a weight through `.data` during an update in flight, which would overwrite the change."""
    import windlass

    subject, rank = specimen("mlp"), dist.get_rank()
    section = {"offload_optimizer": {"device": "cpu", "delayed_update": True}}
    config = ds_config(Recipe(optimizer_params=SGD), Setting(stage=stage, zero=tuple(section.items())))
    engine = windlass.initialize(model=oracle.build(subject, 0), config=config)[0]
    for step in range(2):
        engine.backward(engine(**subject.batch(Place(step, 0, rank))))
        engine.step()
        assert all(p.data.isfinite().all() for p in engine.module.parameters())  # reading is not a change
    first = next(engine.module.parameters())
    first.data.mul_(0.5)
    engine.backward(engine(**subject.batch(Place(2, 0, rank))))
    with pytest.raises(ModelError, match="was changed in place during its update") as raised:
        engine.step()
    return str(raised.value)


def test_edit_lost_by_a_delayed_update_is_an_error() -> None:
    run_ranks(edited_late, 2, 2, env=EMULATED)


class Renormed(nn.Module):
    """Embedding whose rows the forward renormalizes in place, or a head that its forward clamps."""

    def __init__(self, clamps: bool = False) -> None:
        super().__init__()
        self.clamps = clamps
        self.embed = nn.Embedding(8, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, ids: Tensor) -> Tensor:
        assert self.head.weight.data.dim() == 2  # reading is not a change
        if self.clamps:
            self.head.weight.data.clamp_(-0.1, 0.1)
        else:  # as an embedding with max_norm does, which is refused on several ranks
            torch.embedding_renorm_(self.embed.weight.detach(), ids, 0.5, 2.0)
        return self.head(self.embed(ids)).square().mean()


def renormed(stage: int, clamps: bool) -> dict[str, Tensor]:
    import windlass

    torch.manual_seed(0)
    config = ds_config(Recipe(optimizer_params=SGD, clipping=0.0), Setting(stage))
    engine = windlass.initialize(model=Renormed(clamps), config=config)[0]
    for _ in range(3):
        engine.backward(engine(torch.arange(8)))
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


def refused_at_stage_3() -> None:
    for clamps, name in ((False, "embed.weight"), (True, "head.weight")):
        with pytest.raises(ModelError, match=f"'{name}' was changed in place while.* gathered.*GatheredParameters"):
            renormed(3, clamps)


@pytest.mark.parametrize("clamps", [False, True])
def test_weight_changed_by_its_forward(clamps: bool) -> None:
    torch.manual_seed(0)
    model = Renormed(clamps)
    optimizer = torch.optim.SGD(model.parameters(), **dict(SGD))
    for _ in range(3):
        model(torch.arange(8)).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for stage in (0, 2):
        for actual in run_ranks(renormed, 2, stage, clamps):
            assert relative_error(actual, expected)[0] < 1e-6


def test_change_lost_by_a_reshard_is_an_error(transport: str) -> None:
    run_ranks(refused_at_stage_3, 2, transport=transport)


# ------------------------------------------------------------------------------------------------- experts over ranks


def dropped_of_experts(stage: int, backend: str = "") -> list[float]:
    """Return the difference of parameters, for each way of dropping, from a run without the dropped backwards.

    Args:
        backend: if not empty, the model is compiled, except in the run without dropped backwards.
    """
    import windlass
    from tests.dist.parallel_runs import MODELS, VOCABULARY

    doors = {
        "skip": lambda engine, optimizer: None,
        "optimizer": lambda engine, optimizer: optimizer.zero_grad(),
        "module": lambda engine, optimizer: engine.module.zero_grad(),
        "each": lambda engine, optimizer: [setattr(p, "grad", None) for p in engine.module.parameters()],
    }
    results = []
    for name, drop in doors.items():
        torch.manual_seed(1)
        config = ds_config(Recipe(optimizer_params=SGD), Setting(stage, config=(("parallel", {"ep": 2}),)))
        model = MODELS["mixtral"](tied=False)
        if backend and name != "skip":
            torch._dynamo.reset()
            model.compile(backend=backend)
        engine, optimizer = windlass.initialize(model=model, config=config)[:2]

        def backward(number: int, engine: Any = engine) -> None:
            draw = torch.Generator().manual_seed(2 * number + dist.get_rank())
            ids = torch.randint(VOCABULARY, (2, 8), generator=draw)
            engine.backward(engine(input_ids=ids, labels=ids).loss)

        for step in range(2):
            if name != "skip":
                backward(10 + step)
                drop(engine, optimizer)
            backward(step)
            engine.step()
        results.append({key: value.clone() for key, value in engine.full_state_dict().items()})
        engine.destroy()
    return [relative_error(other, results[0])[0] for other in results[1:]] if results[0] else []


@pytest.mark.slow
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_expert_gradients_can_be_dropped_by_every_method(stage: int) -> None:
    first, other = run_ranks(dropped_of_experts, 2, stage, timeout=240.0)
    assert first == [0.0] * 3 and other == [], "whole models are at the first rank"


@pytest.mark.slow
def test_gradients_of_compiled_experts_can_be_dropped() -> None:
    for stage in (1, 3):
        assert max(run_ranks(dropped_of_experts, 2, stage, "aot_eager", timeout=240.0)[0]) < 1e-5, stage


# ------------------------------------------------------------------------------------------------------ pipelines


def dropped_between_batches(stage: int, backend: str) -> float:
    """Return the difference of parameters between a run that drops gradients between its batches and one that doesn't.

    Args:
        backend: if not empty, the layers of the first run are compiled.
    """
    import windlass
    from tests.dist import pipeline_engine_runs as runs

    case, results = runs.Case(name="tied", stage=stage, micros=2), []
    for drops in (True, False):
        model = runs.model_of(case, num_stages=case.pp, virtual_stages=case.chunks)
        if backend and drops:
            torch._dynamo.reset()
            for module in model.modules():
                if type(module).__name__ == "Block":
                    module.compile(backend=backend)
        engine, optimizer = windlass.initialize(model=model, config=runs.config_of(case))[:2]
        for step in range(3):
            if drops:
                for door in (optimizer.zero_grad, engine.zero_grad, engine.module.zero_grad):
                    door()
                for parameter in engine.module.parameters():
                    parameter.grad = None
            runs.one_step(engine, case, step)
            assert all(parameter.grad is None for parameter in engine.module.parameters())
        results.append({name: value.clone() for name, value in engine.full_state_dict().items()})
        engine.destroy()
    return relative_error(*results)[0] if results[0] else 0.0


def test_a_batch_of_a_pipeline_leaves_no_gradient_to_drop() -> None:
    """`train_batch` runs all backwards and the step, so that no gradient is pending between its calls."""
    for stage in (0, 2):
        assert run_ranks(dropped_between_batches, 2, stage, "") == [0.0, 0.0]


@pytest.mark.slow
def test_compiled_layers_of_a_pipeline_train_as_others() -> None:
    for stage in (1, 3):
        assert max(run_ranks(dropped_between_batches, 2, stage, "aot_eager", timeout=240.0)) < 1e-5, stage


def refused_steps(stage: int) -> list[tuple[str, float, float]]:
    """Return each refused step's error, and a parameter's change in the step after it and in the step before it."""
    import windlass

    def start() -> Any:
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(1, 1, bias=False), "b": nn.Linear(1, 1, bias=False)})
        model.forward = lambda x, both: (model["a"](x) + (model["b"](x) if both else 0)).sum()  # type: ignore[method-assign]
        zero = (("ignore_unused_parameters", False),)
        config = ds_config(Recipe(optimizer_params=(("lr", 1.0),)), Setting(stage=stage, zero=zero))
        return windlass.initialize(model=model, config=config)[0]

    def change(engine: Any) -> float:
        before = windlass.zero.full_param(engine.module["a"].weight).item()
        engine.backward(engine(torch.ones(1, 1), True))
        engine.step()
        return before - windlass.zero.full_param(engine.module["a"].weight).item()

    results = []
    for cause in ("unused", "average"):
        engine = start()
        expected = change(engine)
        average = windlass.zero.ExponentialMovingAverage(engine, 0.9)
        average.update()
        engine.backward(engine(torch.ones(1, 1), cause != "unused"))
        text = ""
        try:
            with average.applied() if cause == "average" else nullcontext():
                engine.step()
        except ModelError as error:
            text = str(error)
        results.append((text, change(engine), expected))
        engine.destroy()
    return results


def refused_on_one_rank() -> list[str]:
    """Return the errors of several steps. Only rank 1 refuses the first step."""
    import windlass

    engine = windlass.initialize(model=nn.Linear(2, 2), config=ds_config(Recipe(), Setting(stage=1)))[0]
    errors = []
    for step in range(4 if dist.get_rank() else 3):
        engine.backward(engine(torch.ones(1, 2)).sum())
        fails = dist.get_rank() == 1 and step == 0
        broken = patch("windlass.engine.training_engine.check_no_lost_gradients", side_effect=ModelError("lost"))
        try:
            with broken if fails else nullcontext():
                engine.step()
            errors.append("")
        except ModelError as error:
            errors.append(str(error))
    engine.destroy()
    return errors


def test_a_step_that_raises_on_one_rank_is_named_on_all() -> None:
    first, second = run_ranks(refused_on_one_rank, 2)
    assert second[0] == "lost" and first == second[1:] and first[1:] == ["", ""]
    assert "a step() that raised on some ranks only" in first[0]


@pytest.mark.parametrize("stage", [0, 3])
def test_a_step_that_raises_drops_its_gradients(stage: int) -> None:
    for results in run_ranks(refused_steps, 2, stage):
        for text, after, expected in results:
            assert text and after == pytest.approx(expected), text


def zeroed_together(stage: int) -> tuple[Tensor, list[Tensor]]:
    """Zero gradients of an engine and of a parameter outside it in one call. Return the gradients."""
    import windlass

    subject = specimen("mlp")
    engine = windlass.initialize(model=oracle.build(subject), config=ds_config(Recipe(), Setting(stage=stage)))[0]
    outside = nn.Parameter(torch.ones(3))
    outside.sum().backward()
    subject.train(engine, subject.batch(Place(0, 0, dist.get_rank())), engine.backward)
    parameters = list(engine.module.parameters())
    torch.optim.SGD([parameters[0], outside, *parameters[1:]], foreach=True).zero_grad(set_to_none=False)
    gradients = [windlass.zero.full_grad(parameter) for parameter in parameters]
    engine.destroy()
    assert outside.grad is not None
    return outside.grad, gradients


def test_one_call_zeroes_gradients_of_an_engine_and_of_others(stage: int) -> None:
    for outside, gradients in run_ranks(zeroed_together, 2, stage):
        assert gradients and not any(gradient.any() for gradient in (outside, *gradients))
