"""Tests that every optimizer, given by name, instance or callable, updates over ranks as in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

import windlass
from tests import oracle
from tests.custom_optimizers import Foreign
from tests.dist.equivalence_runs import Setting, ds_config, hold_all, specimen, whole_params
from tests.dist.harness import RankError, run_ranks
from tests.dist.quick_rows import in_shares, share
from tests.models import Place, cast
from tests.oracle import Recipe, relative_error

# eps is well above a gradient's rounding, for optimizers that divide by the gradient's size
BY_NAME: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
    "AdamW": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True, "eps": 1e-6},
    "Adagrad": {"lr": 0.05, "lr_decay": 0.1, "eps": 1e-4},
    "Adadelta": {"lr": 1.0, "eps": 1e-4},
    "Adamax": {"lr": 1e-2, "eps": 1e-6},
    "NAdam": {"lr": 1e-2, "eps": 1e-6},
    "RAdam": {"lr": 1e-2, "eps": 1e-6},
    "RMSprop": {"lr": 1e-2, "momentum": 0.9, "centered": True, "eps": 1e-4},
    "ASGD": {"lr": 0.05},
    "Rprop": {"lr": 1e-3},
    "Adafactor": {"lr": 1e-2},
}


def recipe_for(name: str, params: dict[str, Any], **more: Any) -> Recipe:
    return Recipe(ranks=3, steps=4, optimizer=name, optimizer_params=tuple(params.items()), **more)


STAGES = [Setting(stage=stage, transport=transport) for stage, transport in enumerate(("gloo", "shm", "gloo", "shm"))]


@in_shares
@pytest.mark.parametrize("name", BY_NAME)
def test_torch_optimizers_by_name(name: str, every: bool) -> None:
    stages = share(STAGES, list(BY_NAME).index(name), 4, every)
    hold_all("unused_by_step", recipe_for(name, BY_NAME[name]), stages)


OWN: dict[str, dict[str, Any]] = {
    "Lamb": {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-6},
    "Lion": {"lr": 1e-3, "weight_decay": 0.1},
    "Muon": {"lr": 1e-2, "weight_decay": 0.1},
    "Adam": {"lr": 1e-2, "weight_decay": 0.1, "adam_w_mode": False, "eps": 1e-6},
}


@in_shares
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OWN)
def test_windlass_optimizers_equal_one_process(name: str, precision: str, every: bool) -> None:
    """LAMB's norms and Muon's matrices use full parameters, wherever the shard boundaries are."""
    from windlass.optim.optimizer_factory import build_optimizer

    def factory(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        heads = [parameter_name.startswith("head.") for parameter_name, _ in specimen("mlp").build().named_parameters()]
        for master, head in zip(masters, heads, strict=True):
            if name == "Muon" and head:
                master.use_muon = False  # type: ignore[attr-defined]  # the head is not a hidden matrix
        return build_optimizer(name, OWN[name], masters)

    recipe = recipe_for(name, OWN[name], precision=precision)
    stages = share(STAGES, list(OWN).index(name) + 2 * (precision == "bf16"), 4, every)
    hold_all("mlp", recipe, stages, wanted=oracle.train(specimen("mlp"), recipe, factory))


class Stranger(Foreign):
    """Unknown optimizer: steps by the normalized gradient, counts its steps, and keeps a vector as state."""

    def rule(self, p: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any], lr: float) -> None:
        state["count"] = state.get("count", 0) + 1
        rows = gradient.reshape(p.shape[0], -1) if p.dim() else gradient.reshape(1, 1)
        state["rows"] = 0.5 * state.get("rows", torch.zeros(rows.shape[0])) + rows.norm(dim=1)
        size = lr / state["count"] / (1 + float(state["rows"].norm()))
        p.sub_(gradient / (gradient.norm() + 1e-3), alpha=size)


def grouped(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return two groups across all modules: biases and norms have no decay."""
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for _, p in named if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3},
    ]


def make(kind: str) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a function that makes an optimizer as clients pass it."""
    return {
        "adamw": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-6),
        "sgd": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
        "stranger": lambda params: Stranger(params),
    }[kind]


def with_client(kind: str, way: str, setting: Setting) -> dict[str, Any]:
    subject, rank = specimen("tied"), dist.get_rank()
    model = oracle.build(subject, rank)
    config = ds_config(Recipe(), setting)
    del config["optimizer"]
    factory = make(kind)
    if way == "instance":
        more: dict[str, Any] = {"optimizer": factory(model.parameters())}
    elif way == "groups":
        groups = grouped(model) if kind != "stranger" else [{"params": g["params"]} for g in grouped(model)]
        more = {"optimizer": factory(groups)}
    elif way == "callable":
        more = {"optimizer": factory}
    else:
        config["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-2, "eps": 1e-6}}
        more = {"model_parameters": grouped(model)}
    engine, optimizer, _, _ = windlass.initialize(model=model, config=config, **more)
    assert optimizer is engine.optimizer
    for step in range(4):
        subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)
        engine.step()
    groups_after = [(group["lr"], group.get("weight_decay")) for group in engine.optimizer.param_groups]
    results = {"params": whole_params(engine.module), "groups": groups_after}
    engine.destroy()
    return results


def client_oracle(kind: str, way: str) -> oracle.Trace:
    subject = specimen("tied")
    model = oracle.build(subject, 0)

    def factory(masters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if way in ("instance", "callable"):
            return make(kind)(masters)
        groups = grouped(model)  # in fp32 the masters are the model's own parameters
        if kind == "stranger":
            groups = [{"params": g["params"]} for g in groups]
        return make(kind)(groups)

    return oracle.train(subject, Recipe(ranks=2, steps=4), factory, model)


CLIENTS = [(kind, way) for kind in ("adamw", "sgd", "stranger") for way in ("instance", "callable", "groups")]


@pytest.mark.parametrize(("kind", "way"), [*CLIENTS, ("adamw", "model_parameters")])
def test_optimizer_of_the_caller(kind: str, way: str, stage: int) -> None:
    expected = client_oracle(kind, "groups" if way == "model_parameters" else way)
    for actual in run_ranks(with_client, 2, kind, way, Setting(stage=stage)):
        error, where = relative_error(actual["params"], expected.params)
        assert error < 1e-6, where
        if way in ("groups", "model_parameters"):
            assert len(actual["groups"]) == 2
            assert kind == "stranger" or [g[1] for g in actual["groups"]] == [0.3, 0.0]


def foreign() -> None:
    model = oracle.build(specimen("mlp"))
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    config = ds_config(Recipe(), Setting(stage=2))
    del config["optimizer"]
    windlass.initialize(model=model, optimizer=optimizer, config=config)


def test_optimizer_of_other_parameters_is_refused() -> None:
    with pytest.raises(RankError, match="optimizer") as caught:
        run_ranks(foreign, 2)
    assert "ModelError" in caught.value.kinds


class NeedsClosure(torch.optim.SGD):
    """Optimizer whose step requires a closure, as LBFGS's step does."""

    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return super().step(closure)


class OneStepSize(torch.optim.Optimizer):
    """Optimizer with one step size for all parameters, from the norm of all gradients, as in Prodigy."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"size": 1e-3, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            given = [p for p in group["params"] if p.grad is not None]
            squares = sum(float(p.grad.square().sum()) for p in given if p.grad is not None)
            group["size"], group["count"] = max(group["size"], 0.01 * squares**0.5), group["count"] + 1
            for p in given:
                p.sub_(group["size"] * p.grad)


def trained_by(make: Callable[[Any], torch.optim.Optimizer], setting: Setting) -> dict[str, Any]:
    """Take two steps with an optimizer that the script made, and return the weights."""
    subject, rank = specimen("mlp"), dist.get_rank()
    model = oracle.build(subject, rank)
    config = ds_config(Recipe(clipping=0.0), setting)
    del config["optimizer"]
    engine = windlass.initialize(model=model, optimizer=make(model.parameters()), config=config)[0]
    for step in range(2):
        subject.train(engine, subject.batch(Place(step, 0, rank)), engine.backward)
        engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


@pytest.mark.parametrize("make", [torch.optim.LBFGS, NeedsClosure])
def test_optimizer_that_needs_a_closure_is_refused(make: Any) -> None:
    with pytest.raises(RankError, match="calls the model again inside its step, through a closure") as caught:
        run_ranks(trained_by, 2, make, Setting(stage=2))
    assert "ModelError" in caught.value.kinds


def test_rule_over_all_parameters_is_that_of_one_process_or_refused() -> None:
    expected = oracle.train(specimen("mlp"), Recipe(ranks=2, steps=2, clipping=0.0), OneStepSize)
    for result in run_ranks(trained_by, 2, OneStepSize, Setting(stage=0)):  # each rank steps all parameters
        assert relative_error(result, expected.params)[0] < 1e-6
    with pytest.raises(RankError, match="OneStepSize set option 'size' of group 0 to .* its rule uses all parameters"):
        run_ranks(trained_by, 2, OneStepSize, Setting(stage=1))


def half_the_model(setting: Setting) -> dict[str, Any]:
    """Train a step in which all parameters have gradients, with an optimizer of the first block. Return parameters."""
    subject, rank = specimen("mlp"), dist.get_rank()
    model = oracle.build(subject, rank)
    config = ds_config(Recipe(), setting)
    del config["optimizer"]
    some = [p for name, p in model.named_parameters() if name.startswith("blocks.0")]
    engine = windlass.initialize(model=model, optimizer=torch.optim.SGD(some, lr=0.1), config=config)[0]
    subject.train(engine, subject.batch(Place(0, 0, rank)), engine.backward)
    engine.step()
    result = whole_params(engine.module)
    engine.destroy()
    return result


def test_parameters_outside_the_optimizer_are_unchanged(stage: int) -> None:
    before = dict(oracle.build(specimen("mlp"), 0).named_parameters())
    for result in run_ranks(half_the_model, 2, Setting(stage=stage)):
        for name, value in result.items():
            assert torch.equal(value, before[name].detach()) == (not name.startswith("blocks.0")), name


WARM: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05, eps=1e-4),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-2, momentum=0.9, eps=1e-4),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.05, t0=1),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2, eps=1e-4, foreach=True),
    "Muon": lambda params: windlass.optim.Muon(params, lr=1e-2),
}


def odd(dtype: torch.dtype) -> torch.nn.Module:
    """Return a model with scalars, vectors of one element, and odd shapes."""
    return oracle.build(specimen("odd_shapes")).to(dtype)


def warmed(name: str, dtype: torch.dtype, steps: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model and its optimizer after steps in plain PyTorch."""
    model = odd(dtype)
    optimizer = WARM[name](list(model.parameters()))
    for step in range(steps):
        model(**cast(specimen("odd_shapes").batch(Place(step, 0, 0)), dtype)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def continue_training(name: str, setting: Setting) -> list[float]:
    """Return the largest differences from plain PyTorch of two engines.

    The first takes over a stepped optimizer, the second loads the first one's state dict.
    """
    expected = dict(warmed(name, torch.float32, 4)[0].named_parameters())
    errors = []
    saved: Any = None
    for start in (1, 2):
        model, optimizer = warmed(name, torch.float32, start)
        if saved is not None:
            optimizer = WARM[name](list(model.parameters()))
        config = ds_config(Recipe(clipping=0.0), setting)
        engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
        if saved is not None:
            engine.optimizer.load_state_dict(saved)
        for step in range(start, 4):
            engine.backward(engine(**specimen("odd_shapes").batch(Place(step, 0, 0))))
            engine.step()
            if step == 1:
                saved = engine.optimizer.state_dict()
        errors.append(relative_error(whole_params(model), {k: p.detach() for k, p in expected.items()})[0])
        engine.destroy()
    return errors


@pytest.mark.parametrize("name", WARM)
def test_scalar_states_are_taken_over_and_loaded(name: str, stage: int) -> None:
    for result in run_ranks(continue_training, 2, name, Setting(stage=stage)):
        assert max(result) < 1e-6, result


def of_a_narrow_model(name: str, setting: Setting) -> list[str]:
    """Return the optimizer states of a bf16 model that `initialize` did not convert to equal values in float32."""
    model, optimizer = warmed(name, torch.bfloat16, 0 if name == "Adagrad" else 2)
    before = {id(p): dict(state) for p, state in optimizer.state.items()}
    names = {id(p): name for name, p in model.named_parameters()}
    engine = windlass.initialize(model=model, optimizer=optimizer, config=ds_config(Recipe(), setting))[0]
    text = []
    for p in (p for p in model.parameters() if p.numel()):
        for key, value in before[id(p)].items():
            result = windlass.zero.full_state(p, key)
            if key != "step" and (result.dtype != torch.float32 or not torch.equal(result, value.float())):
                text.append(f"{key} of {names[id(p)]}: {result}, not {value}")
    engine.backward(engine(**cast(specimen("odd_shapes").batch(Place(2, 0, 0)), torch.bfloat16)))
    engine.step()
    engine.destroy()
    return text


@pytest.mark.parametrize("name", ["Adagrad", "AdamW", "Muon"])
def test_states_of_a_16_bit_model_are_widened_to_the_master_dtype(name: str) -> None:
    for text in run_ranks(of_a_narrow_model, 2, name, Setting(stage=2)):
        assert not text


class Counting(torch.optim.Optimizer):
    """Optimizer that counts its steps in its groups and in an attribute, and uses both in its update."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})
        self.decay = 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.decay *= 0.7
        for group in self.param_groups:
            if not group["params"]:
                continue
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * self.decay / group["count"])


def counted(setting: Setting) -> dict[str, Any]:
    model = oracle.build(specimen("mlp"))
    optimizer = Counting([{"params": list(model.parameters())[start::2]} for start in (0, 1)])
    hooks: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: hooks.append("before"))
    optimizer.register_step_post_hook(lambda given, *_: hooks.append(given is optimizer))
    engine = windlass.initialize(model=model, optimizer=optimizer, config=ds_config(Recipe(), setting))[0]
    for step in range(3):
        engine.backward(engine(**specimen("mlp").batch(Place(step, 0, dist.get_rank()))))
        engine.step()
    results = {"params": whole_params(model), "counts": [g["count"] for g in optimizer.param_groups], "hooks": hooks}
    engine.destroy()
    return results


@pytest.mark.parametrize("sub_group", [1 << 30, 100])
def test_counters_and_hooks_advance_once_per_step(sub_group: int, stage: int) -> None:
    expected = oracle.train(specimen("mlp"), Recipe(steps=3), lambda p: Counting([{"params": p[n::2]} for n in (0, 1)]))
    actual = run_ranks(counted, 2, Setting(stage=stage, zero=(("sub_group_size", sub_group),)))
    for item in actual:
        error, where = relative_error(item["params"], expected.params)
        assert error < 1e-6, where
        assert item["hooks"] == ["before", True] * 3
        assert item["counts"] == [3, 3]


class Diary(torch.optim.Optimizer):
    """Optimizer whose state and update use values that are not tensors."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(kind="plain", seen=[], pair=[torch.ones(2), torch.ones(3)], nothing=None, count=0)
                state["count"] += 1
                state["seen"].append(float(p.grad.abs().max()))
                state["pair"][0].mul_(0.5)
                assert state["kind"] == "plain" and state["nothing"] is None and type(state["count"]) is int
                p.sub_(p.grad, alpha=group["lr"] * sum(state["seen"]) * float(state["pair"][0].sum()) / state["count"])


def diaries(setting: Setting) -> float:
    """Return the difference between a run and one that starts from its state dict."""
    ends: list[dict[str, Any]] = []
    saved: Any = None
    for start in (0, 2):
        model = oracle.build(specimen("mlp"))
        config = ds_config(Recipe(), setting)
        engine = windlass.initialize(model=model, optimizer=Diary(model.parameters()), config=config)[0]
        if start:
            engine.optimizer.load_state_dict(saved[0])
            for name, p in model.named_parameters():
                windlass.zero.set_full_param(p, saved[1][name])
        for step in range(start, 4):
            engine.backward(engine(**specimen("mlp").batch(Place(step, 0, dist.get_rank()))))
            engine.step()
            if step == 1:
                saved = copy.deepcopy(engine.optimizer.state_dict()), whole_params(model)
        ends.append(whole_params(model))
        engine.destroy()
    return relative_error(ends[1], ends[0])[0]


def test_non_tensor_states_are_saved_and_loaded(stage: int) -> None:
    assert run_ranks(diaries, 2, Setting(stage=stage)) == [0.0, 0.0]


def overflowing_norms() -> list[tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]]:
    """Return parameters of plain PyTorch and of engines after a gradient whose squares overflow."""
    found = []
    for stage in (0, 1, 3):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 4)
        plain = copy.deepcopy(model)
        optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
        zero = {"stage": stage}
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 0.1}},
            "zero_optimization": zero,
        }
        engine: Any = windlass.initialize(model=model, config=config)[0]
        for factor in (1.0, 1e25, 1.0):
            (plain(torch.ones(2, 4)).square().mean() * factor).backward()
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).square().mean() * factor)
            engine.step()
        found.append(({n: p.detach() for n, p in plain.named_parameters()}, whole_params(engine.module)))
        engine.destroy()
    return found


def test_a_norm_that_overflows_clips_the_gradient_to_zero_as_in_torch() -> None:
    for by_stage in run_ranks(overflowing_norms, 2):
        for wanted, found in by_stage:
            error, where = relative_error(found, wanted)
            assert error <= 1e-6, f"{where} is off by {error:.2e}"


def reset_and_half_loaded(tier: str, folder: str) -> list[Any]:
    """Load the empty states of a new optimizer after a step, then states of the first parameter only."""
    model = torch.nn.Linear(6, 6)
    zero: dict[str, Any] = {"stage": 2}
    if tier != "device":
        zero["offload_optimizer"] = {"device": tier, "nvme_path": folder}
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": zero, "optimizer": {"type": "AdamW"}}
    engine = windlass.initialize(model=model, config=config)[0]

    def train() -> None:
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()

    first = engine.optimizer.state_dict()
    train()
    later = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict(first)
    states = [engine.optimizer.state_dict()["state"]]
    train()
    states.append({number: float(one["step"]) for number, one in engine.optimizer.state_dict()["state"].items()})
    engine.optimizer.load_state_dict({**later, "state": {0: {**later["state"][0], "step": torch.tensor(7.0).double()}}})
    held = engine.optimizer.state_dict()["state"]
    states.append({number: float(one["step"]) for number, one in held.items()})
    states.append(str(held[0]["step"].dtype))
    engine.destroy()
    return states


@pytest.mark.parametrize("tier", ["device", "nvme"])
def test_a_loaded_state_dict_replaces_all_states(tier: str, tmp_path: Any) -> None:
    """A loaded step count has the dtype of torch's fused step. A parameter without saved states begins anew."""
    for states in run_ranks(reset_and_half_loaded, 2, tier, str(tmp_path)):
        assert states[:3] == [{}, {0: 1.0, 1: 1.0}, {0: 7.0}]
        assert tier != "device" or states[3] == "torch.float32"


def kept_choices() -> list[Any]:
    model = torch.nn.Linear(6, 6)
    optimizer = windlass.optim.CPUAdam(model.parameters(), state_dtype="8bit")
    config = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
    engine = windlass.initialize(model=model, optimizer=optimizer, config=config)[0]
    saved = engine.optimizer.state_dict()
    engine.optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "state_dtype": "fp32"}]})
    found = [optimizer.param_groups[0]["state_dtype"]]
    engine.destroy()
    return found


def test_a_loaded_state_dict_keeps_the_dtype_of_states() -> None:
    (kept,) = run_ranks(kept_choices, 1)
    assert kept == [windlass.optim.CPUAdam([torch.ones(1)], state_dtype="8bit").param_groups[0]["state_dtype"]]


def clipped_in_float64(name: str) -> float:
    """Return the largest difference between a float64 model trained with clipping and plain PyTorch."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4, dtype=torch.float64)
    plain = copy.deepcopy(model)
    optimizer = getattr(torch.optim, name)(plain.parameters(), lr=0.1)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.1,
        "optimizer": {"type": name, "params": {"lr": 0.1}},
    }
    engine: Any = windlass.initialize(model=model, config=config)[0]
    for _ in range(3):
        plain(torch.ones(2, 4, dtype=torch.float64)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        engine.backward(engine(torch.ones(2, 4, dtype=torch.float64)).square().mean())
        engine.step()
    found = whole_params(engine.module)
    engine.destroy()
    return max(float((found[n] - p.detach()).abs().max()) for n, p in plain.named_parameters())


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
def test_clipping_keeps_the_precision_of_float64(name: str) -> None:
    assert run_ranks(clipped_in_float64, 1, name) == [pytest.approx(0.0, abs=1e-13)]


def adagrad_of_a_cast_model(own: torch.dtype, precision: str, stage: int) -> list[torch.dtype]:
    """Train a model that the engine casts to another 16-bit dtype; return the dtypes of Adagrad's states, which it
    makes in its constructor.
    """
    model = torch.nn.Linear(4, 4, dtype=own)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "Adagrad", "params": {"lr": 0.1}},
        "zero_optimization": {"stage": stage},
        precision: {"enabled": True},
    }
    engine: Any = windlass.initialize(model=model, config=config)[0]
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 4, dtype=next(engine.parameters()).dtype)).float().square().mean())
        engine.step()
    states = [windlass.zero.full_state(p, "sum") for p in engine.module.parameters()]
    engine.destroy()
    assert all((state > 0).all() for state in states if state is not None)
    return [state.dtype for state in states if state is not None]


@pytest.mark.parametrize("stage", [0, 3])
def test_states_made_before_a_cast_are_widened(stage: int) -> None:
    for own, precision in ((torch.bfloat16, "fp16"), (torch.float16, "bf16"), (torch.bfloat16, "bf16")):
        assert run_ranks(adagrad_of_a_cast_model, 1, own, precision, stage) == [[torch.float32] * 2]
