"""Training of a specimen under the engine on one rank, and the comparison of all ranks' traces with the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from tests import oracle
from tests.dist.harness import run_ranks
from tests.hf_models import HF_ZOO
from tests.models import DIFFERING, ROWS, ZOO, Place, Specimen, cast
from tests.oracle import Recipe, Trace, relative_error

SGD = (("lr", 0.05), ("momentum", 0.9))
# eps is torch's default, except where many gradients are of the size of their own rounding error. AdamW with a small
# eps turns such gradients into steps of full size and random sign, in plain PyTorch as well. ADAMW_CALM is for the
# specimens with such gradients, and for 16 bits.
ADAMW = (("lr", 1e-3), ("eps", 1e-8), ("weight_decay", 0.01))
ADAMW_CALM = (("lr", 1e-3), ("eps", 1e-4), ("weight_decay", 0.01))

# Bounds on `oracle.relative_error`. fp32: rounding of sums in another order. bf16: every rank computes its gradients
# with 8 bits, so another order of operations shows at 2^-9; the master weights move by lr times that.
FP32_BOUND = 1e-6
BF16_GRAD_BOUND = 2e-2
# Without AVX-512, products of bf16 are rounded differently: 6.1e-4 in the worst row.
BF16_PARAM_BOUND = 5e-4 if torch.backends.cpu.get_cpu_capability().startswith("AVX512") else 1e-3
BF16_STATE_BOUND = 5e-3  # for states of 16-bit parameters: one unit in the last of 8 bits is 2^-8


@dataclass(frozen=True)
class Setting:
    """Engine settings that must not change the result."""

    stage: int = 0
    overlap: bool = True
    plain_backward: bool = False
    persistence: int = 0
    transport: str = "gloo"
    zero: tuple[tuple[str, Any], ...] = ()  # more keys of zero_optimization
    config: tuple[tuple[str, Any], ...] = ()  # more keys of the top level


@dataclass
class RankTrace:
    """Trace of one rank. Only rank 0 returns gradients, by step, and the model's state dict and buffers."""

    losses: list[list[float]] = field(default_factory=list)
    grads: dict[int, dict[str, Tensor | None]] = field(default_factory=dict)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    model: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    payload: int = 0


def specimen(name: str) -> Specimen:
    """Return the specimen of that name from any zoo."""
    return next(zoo[name] for zoo in (ZOO, DIFFERING, HF_ZOO) if name in zoo)


def adamw(subject: Specimen, precision: str = "fp32") -> tuple[tuple[str, Any], ...]:
    """Return AdamW's parameters for this specimen."""
    return ADAMW_CALM if "chaotic" in subject.traits or precision != "fp32" else ADAMW


def ds_config(recipe: Recipe, setting: Setting) -> dict[str, Any]:
    """Return the engine configuration for this recipe and setting."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": recipe.accumulation,
        "optimizer": {"type": recipe.optimizer, "params": dict(recipe.optimizer_params)},
        "gradient_clipping": recipe.clipping,
        "zero_optimization": {
            "stage": setting.stage,
            "overlap_comm": setting.overlap,
            "stage3_param_persistence_threshold": setting.persistence,
            **dict(setting.zero),
        },
    }
    if recipe.precision != "fp32":
        config[recipe.precision] = {"enabled": True}
    return {**config, **dict(setting.config)}


def backward_of(engine: Any, plain: bool) -> Callable[..., None]:
    """Return `engine.backward`, or plain `loss.backward()`."""

    def through_engine(loss: Tensor, retain_graph: bool = False) -> None:
        engine.backward(loss, retain_graph=retain_graph)

    def directly(loss: Tensor, retain_graph: bool = False) -> None:
        loss.backward(retain_graph=retain_graph)

    return directly if plain else through_engine


def whole_grads(module: torch.nn.Module) -> dict[str, Tensor | None]:
    """Return the full gradient of every trainable parameter on every rank."""
    import windlass

    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: _copy(windlass.zero.full_grad(p)) for name, p in named}


def whole_params(module: torch.nn.Module) -> dict[str, Tensor]:
    """Return the full master value of every trainable parameter on every rank."""
    import windlass

    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    return {name: windlass.zero.full_param(p).detach().clone() for name, p in named}


def _copy(value: Tensor | None) -> Tensor | None:
    return None if value is None else value.detach().float().clone()


def start(subject: Specimen, config: dict[str, Any], **more: Any) -> Any:
    """Return an engine around the specimen, built from this rank's own seed."""
    import windlass

    model = oracle.build(subject, torch.distributed.get_rank())
    return windlass.initialize(model=model, config=config, **more)[0]


def reads_gradients(recipe: Recipe, step: int) -> bool:
    """Return True if full gradients are read at this step.

    Other steps do not read them, since reading makes the engine finish its pending communication.
    """
    return step in (1, recipe.steps - 1)


def train_rank(name: str, recipe: Recipe, setting: Setting) -> RankTrace:
    """Train the specimen under the engine on this rank."""
    subject = specimen(name)
    engine = start(subject, ds_config(recipe, setting))
    rank = torch.distributed.get_rank()
    trace = RankTrace()
    backward = backward_of(engine, setting.plain_backward)
    for step in range(recipe.steps):
        losses = []
        for micro in range(recipe.accumulation):
            batch = cast(subject.batch(Place(step, micro, rank)), recipe.dtype)
            losses.append(float(subject.train(engine, batch, backward)))
            if micro == recipe.accumulation - 1 and reads_gradients(recipe, step):
                grads = whole_grads(engine.module)
                if rank == 0:
                    trace.grads[step] = grads
            engine.step()
        trace.losses.append(losses)
        trace.norms.append(float(engine.grad_norm()))
    return finished(engine, trace)


def finished(engine: Any, trace: RankTrace) -> RankTrace:
    """Add the final state to the trace and destroy the engine."""
    trace.params = whole_params(engine.module)
    state = engine.full_state_dict()
    if torch.distributed.get_rank() == 0:
        trace.model = {key: value.detach().clone() for key, value in state.items()}
        trace.buffers = {key: b.detach().clone() for key, b in engine.module.named_buffers()}
    engine.destroy()
    return trace


def train_ranks(name: str, recipe: Recipe, setting: Setting, timeout: float = 60.0) -> list[RankTrace]:
    """Train on all ranks of the recipe."""
    return run_ranks(train_rank, recipe.ranks, name, recipe, setting, transport=setting.transport, timeout=timeout)


def train_rank_in_turn(name: str, recipe: Recipe, settings: list[Setting]) -> list[RankTrace]:
    """Train the specimen once under each setting. An exception gets a note with the setting."""
    traces = []
    for setting in settings:
        try:
            traces.append(train_rank(name, recipe, setting))
        except Exception as error:
            error.add_note(f"under {setting}")
            raise
    return traces


def train_ranks_in_turn(name: str, recipe: Recipe, settings: list[Setting]) -> list[list[RankTrace]]:
    """Run `train_ranks` for each setting in one world. The configuration names the transport."""
    named = [replace(s, config=(*s.config, ("comm", {"transport": s.transport}))) for s in settings]
    by_rank = run_ranks(train_rank_in_turn, recipe.ranks, name, recipe, named, timeout=60.0 * len(settings))
    return [[traces[number] for traces in by_rank] for number in range(len(settings))]


@cache
def expected(name: str, recipe: Recipe, *, by_rank: bool = False) -> Trace:
    """Return the oracle's trace. Each recipe is trained once per session."""
    return oracle.train(specimen(name), recipe, by_rank=by_rank)


def complaints(
    found: list[RankTrace], wanted: Trace, recipe: Recipe, *, exact: bool = True, reordered: Trace | None = None
) -> list[str]:
    """Return all differences from the oracle as texts, in order of appearance.

    Losses, gradients and norms have one bound, parameters another. `exact=False` selects the 16-bit bounds. `reordered`
    is the trace of an oracle that adds gradients in another order: its difference from `wanted` is allowed too.
    """
    exact = exact and recipe.precision == "fp32"
    grad_bound, param_bound = (FP32_BOUND, FP32_BOUND) if exact else (BF16_GRAD_BOUND, BF16_PARAM_BOUND)
    text = []
    for step in range(recipe.steps):
        for rank, trace in enumerate(found):
            pairs = zip(trace.losses[step], wanted.losses[step][rank], strict=True)
            for micro, (have, want) in enumerate(pairs):
                if not abs(have - want) <= grad_bound * max(1.0, abs(want)):
                    text.append(f"step {step} rank {rank} micro-batch {micro}: loss {have!r}, oracle {want!r}")
        if reads_gradients(recipe, step):
            other = reordered.grads[step] if reordered is not None else None
            error, where = relative_error(found[0].grads[step], wanted.grads[step], other)
            if not error <= grad_bound:
                text.append(f"step {step}: gradient of {where or 'nothing'} off by {error:.2e}")
        for rank, trace in enumerate(found):
            have, want = trace.norms[step], wanted.norms[step]
            if not abs(have - want) <= grad_bound * want:
                text.append(f"step {step} rank {rank}: grad_norm {have!r}, oracle {want!r}")
    for rank, trace in enumerate(found):
        error, where = relative_error(trace.params, wanted.params)
        if not error <= param_bound:
            text.append(f"rank {rank}: parameter {where} off by {error:.2e} after {recipe.steps} steps")
    text.extend(_state_complaints(found[0], wanted, FP32_BOUND if exact else BF16_STATE_BOUND))
    return text


def _state_complaints(first: RankTrace, wanted: Trace, bound: float) -> list[str]:
    """Compare rank 0's full state dict and buffers with the oracle's: names, dtypes and values."""
    text = []
    have = {key: value for key, value in first.model.items() if key in wanted.model}
    if missing := wanted.model.keys() - have.keys():
        text.append(f"full_state_dict lacks {sorted(missing)}")
    else:
        dtypes = [k for k, v in wanted.model.items() if have[k].dtype != v.dtype]
        if dtypes:
            text.append(
                f"full_state_dict: {dtypes[0]} is {have[dtypes[0]].dtype}, oracle {wanted.model[dtypes[0]].dtype}"
            )
        error, where = relative_error(have, wanted.model)
        if not error <= bound:
            text.append(f"full_state_dict: {where} off by {error:.2e}")
    for key, want in wanted.buffers.items():
        close = torch.allclose(first.buffers[key].double(), want.double(), rtol=max(bound, 1e-5), atol=1e-5)
        if not close:
            text.append(f"buffer {key} of rank 0 differs from the oracle's")
    return text


def hold(name: str, recipe: Recipe, setting: Setting) -> None:
    """Assert that training by ranks equals training by the oracle, for one case."""
    exact = "rounds" not in specimen(name).traits
    found = train_ranks(name, recipe, setting)
    text = complaints(found, expected(name, recipe), recipe, exact=exact)
    if text:  # where the terms of a sum cancel, their order alone may change it by more than the bound
        other = expected(name, recipe, by_rank=True)
        text = complaints(found, expected(name, recipe), recipe, exact=exact, reordered=other)
    assert not text, f"{name} {recipe} {setting}:\n  " + "\n  ".join(text[:12])


def hold_all(
    name: str, recipe: Recipe, settings: list[Setting], *, exact: bool = True, wanted: Trace | None = None
) -> None:
    """Assert that training by ranks equals training by the oracle for each setting, in one world of ranks."""
    wanted = expected(name, recipe) if wanted is None else wanted
    for setting, actual in zip(settings, train_ranks_in_turn(name, recipe, settings), strict=True):
        text = complaints(actual, wanted, recipe, exact=exact)
        assert not text, f"{name} {recipe} {setting}:\n  " + "\n  ".join(text[:12])


def bitwise_difference(a: list[RankTrace], b: list[RankTrace]) -> list[str]:
    """Return every difference between two runs in any bit of losses, gradients and parameters."""
    text = []
    for rank, (x, y) in enumerate(zip(a, b, strict=True)):
        if x.losses != y.losses:
            text.append(f"rank {rank}: losses {x.losses} and {y.losses}")
        for step in x.grads:
            for name, gradient in x.grads[step].items():
                if not _same(gradient, y.grads[step][name]):
                    text.append(f"step {step}: gradient of {name}")
        text.extend(f"rank {rank}: parameter {name}" for name in x.params if not _same(x.params[name], y.params[name]))
    return text


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
