"""Training over a pipeline under the engine, and in one process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.dist.pipeline_models import freeze, is_row, row, row_batch, text, transformer
from windlass.base.errors import PeerError

STEPS = 2


@dataclass(frozen=True)
class Case:
    """Model and training options of one run."""

    name: str = "tied"
    pp: int = 2
    micros: int = 4
    schedule: str = "1f1b"
    chunks: int = 1
    stage: int = 0
    config: tuple[tuple[str, Any], ...] = ()
    gather: str = "step"
    optimizer: str = "AdamW"
    clipping: float = 0.1
    beside: tuple[str, ...] = ()  # names of further axes, each of two ranks


@dataclass
class Came:
    """Results of one run."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    evaluated: Any = None
    payload: dict[str, int] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    shapes: dict[str, torch.Size] = field(default_factory=dict)


def config_of(case: Case) -> dict[str, Any]:
    """Return the engine configuration of the case."""
    pipeline: dict[str, Any] = {"schedule": case.schedule, "unshard_per": case.gather}
    if case.chunks > 1:
        pipeline["virtual_stages"] = case.chunks
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": case.micros,
        "optimizer": {"type": case.optimizer, "params": _params(case)},
        "gradient_clipping": case.clipping,
        "zero_optimization": {"stage": case.stage, "stage3_param_persistence_threshold": 0},
        "parallel": {"pp": case.pp, **dict.fromkeys(case.beside, 2)},
        "pipeline": pipeline,
        **dict(case.config),
    }


def _params(case: Case) -> dict[str, Any]:
    return {"lr": 0.01, "eps": 1e-4} if case.optimizer == "AdamW" else {"lr": 0.05, "momentum": 0.9}


def micro_batch(case: Case, step: int, micro: int, reader: int) -> Any:
    """Return a micro-batch. Lengths differ between micro-batches, and data between data-loading ranks."""
    number = step * 100 + reader * case.micros + micro
    return row_batch(case.name, number) if is_row(case.name) else text(number)


def model_of(case: Case, **more: Any) -> nn.Module:
    """Return the full model, or this rank's stages of a layer sequence."""
    model = row(case.name, **more) if is_row(case.name) else transformer(case.name)
    freeze(case.name, model)
    return model


def expected_of(case: Case, readers: int) -> Came:
    """Train in one process with plain accumulation over the micro-batches of all data-loading ranks."""
    model = model_of(case)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = getattr(torch.optim, case.optimizer)(trained, **_params(case))
    outcome = Came()
    share = 1 / (case.micros * readers)
    for step in range(STEPS):
        losses = []
        for reader in range(readers):
            for micro in range(case.micros):
                loss = loss_of(case, model, micro_batch(case, step, micro, reader))
                (loss * share).backward()
                losses.append(float(loss.detach()))
        outcome.losses.append(sum(losses) * share)
        outcome.norms.append(float(nn.utils.clip_grad_norm_(trained, case.clipping)))
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        batches = [micro_batch(case, STEPS, micro, reader) for reader in range(readers) for micro in range(case.micros)]
        outcome.evaluated = sum(float(loss_of(case, model, batch)) for batch in batches) * share
    outcome.params = {name: value.detach().clone() for name, value in model.state_dict().items()}
    return outcome


def loss_of(case: Case, model: Any, batch: Any) -> Tensor:
    """Return the loss in one process."""
    if is_row(case.name):
        inputs, labels = batch
        loss: Tensor = model.loss_fn(model(inputs), labels)
        return loss
    return model(**batch).loss


def start(case: Case) -> Any:
    """Return an engine on this rank."""
    import windlass

    parts = {"num_stages": case.pp, "virtual_stages": case.chunks} if is_row(case.name) else {}
    return windlass.initialize(model=model_of(case, **parts), config=config_of(case))[0]


def one_step(engine: Any, case: Case, step: int) -> float:
    """Run one step of an engine with or without stages. Return the mean of this rank's losses."""
    _, reader = engine.data_loading_ranks
    batches = [micro_batch(case, step, micro, reader) for micro in range(case.micros)]
    if hasattr(engine, "train_batch"):
        return float(engine.train_batch(iter(batches)))
    losses = []
    for batch in batches:
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return sum(losses) / len(losses)


def save(case: Case, folder: str) -> None:
    """Train some steps and save."""
    engine = start(case)
    for step in range(STEPS - 1):
        one_step(engine, case, step)
    engine.save_checkpoint(folder)
    engine.destroy()


def resume(case: Case, folder: str) -> dict[str, Tensor]:
    """Train the last step from the checkpoint of `save`, possibly in another layout."""
    engine = start(case)
    engine.load_checkpoint(folder)
    assert engine.global_steps == STEPS - 1
    one_step(engine, case, STEPS - 1)
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return state


def train(case: Case, steps: int = STEPS) -> Came:
    """Train some steps on this rank."""
    engine = start(case)
    model = engine.module
    _, reader = engine.data_loading_ranks
    outcome = Came(names=[name for name, _ in model.named_parameters()])
    held = engine._sharded.units
    outcome.shapes = {name: shape for unit in held for name, shape in zip(unit.names, unit.shapes, strict=True)}
    for step in range(steps):
        batches = iter([micro_batch(case, step, micro, reader) for micro in range(case.micros)])
        outcome.losses.append(float(engine.train_batch(batches)))
        outcome.norms.append(float(engine.grad_norm()))
        outcome.payload = dict(engine._reporter._last_payload)
    batches = iter([micro_batch(case, steps, micro, reader) for micro in range(case.micros)])
    outcome.evaluated = float(engine.eval_batch(batches))
    assert engine.global_steps == steps and engine.micro_steps == steps * case.micros
    state = engine.full_state_dict()
    outcome.params = {name: value.clone() for name, value in state.items()}
    engine.destroy()
    dist.barrier()
    return outcome


FAULTS = ("forward", "first forward", "backward", "loss", "memory", "loader", "ended", "form", "evaluation")
"""Kinds of errors that one rank raises and its script catches, one at a time, between steps that succeed."""


class _Hurt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        raise ValueError("no such gradient")


def _broken(engine: Any, case: Case, fault: str, stage: int, batches: list[Any]) -> Any:
    """Make this rank raise at one micro-batch of the next batch. Return a function that removes the cause."""
    calls = 0

    def forward(module: Any, given: Any, output: Any) -> Any:
        nonlocal calls
        calls += 1
        if fault in ("forward", "evaluation") and calls == 2:
            raise ValueError("no such label")
        if fault == "first forward" and calls == 1:
            raise ValueError("no such label")
        if fault == "memory" and calls == 1:
            raise torch.OutOfMemoryError("out of memory")
        if fault == "backward" and calls == 2:
            return _Hurt.apply(output)
        return None

    if fault == "form" and stage == 0:
        handle = engine.module.register_forward_hook(lambda module, given, output: (output, 1))
        return handle.remove
    if fault in ("loss", "form"):
        before, engine.module.loss_fn = engine.module.loss_fn, lambda out, y: out
        return lambda: setattr(engine.module, "loss_fn", before)
    if fault in ("loader", "ended"):
        if fault == "ended":
            batches.clear()
        else:
            batches[1] = torch.ones(1)
        return lambda: None
    inner = next(module for module in engine.module.modules() if type(module).__name__ == "Block")
    handle = inner.register_forward_hook(forward)
    return handle.remove


def survive(case: Case, faults: tuple[str, ...], faulty: int) -> tuple[list[list[str]], Came]:
    """Train. Before each step run a batch for each fault of rank `faulty`. Every rank catches its exception."""
    engine = start(case)
    _, reader = engine.data_loading_ranks
    outcome, results = Came(), []
    for step in range(STEPS):
        for fault in faults:
            batches = [micro_batch(case, 7, micro, reader) for micro in range(case.micros)]
            undo = _broken(engine, case, fault, engine.stage_id, batches) if dist.get_rank() == faulty else lambda: None
            try:
                engine.eval_batch(iter(batches)) if fault == "evaluation" else engine.train_batch(iter(batches))
                results.append([fault, "nothing", ""])
            except Exception as error:
                out = isinstance(error, torch.OutOfMemoryError)
                kind = "PeerError" if isinstance(error, PeerError) else type(error).__name__
                text = "\n".join([str(error), *getattr(error, "__notes__", [])])
                results.append([fault, f"{kind}{' out of memory' * out}", text])
            undo()
        batches = [micro_batch(case, step, micro, reader) for micro in range(case.micros)]
        outcome.losses.append(float(engine.train_batch(iter(batches))))
        outcome.norms.append(float(engine.grad_norm()))
    batches = [micro_batch(case, STEPS, micro, reader) for micro in range(case.micros)]
    outcome.evaluated = float(engine.eval_batch(iter(batches)))
    assert engine.global_steps == STEPS
    outcome.params = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return results, outcome


def manners(kind: str) -> dict[str, Any]:
    """Return results and errors of the methods of an engine: "windlass", or "deepspeed" for the compat engine."""
    import windlass
    from windlass.compat.deepspeed_initialize import initialize as of_deepspeed
    from windlass.parallel.pipeline import PipelineSequential  # noqa: F401  (scripts import it)

    case = Case(name="row", micros=2)
    model = model_of(case, num_stages=2)
    make = windlass.initialize if kind == "windlass" else of_deepspeed
    config = config_of(case)
    del config["parallel"]  # the module gives the number of stages
    engine = make(model=model, config=config)[0]
    results: dict[str, Any] = {
        "bases": [base.__name__ for base in type(engine).__mro__],
        "first": engine.is_first_stage(),
        "last": engine.is_last_stage(),
        "stages": (engine.stage_id, engine.num_stages, engine.micro_batches),
    }
    x, y = row_batch("row", 1)
    for name, call in {
        "forward": lambda: engine(x),
        "backward": lambda: engine.backward(x.sum()),
        "step": lambda: engine.step(),
        "no_sync": lambda: engine.no_sync(),
        "compile": lambda: engine.compile(backend="eager"),
        "nothing": lambda: engine.train_batch(),
        "few": lambda: engine.train_batch(iter([(x, y)])),
        "no pair": lambda: engine.train_batch(iter([x, x])),
        "reduce": lambda: engine.eval_batch(iter([(x, y)] * 2), reduce_output="sum"),
    }.items():
        try:
            call()
        except Exception as error:
            results[name] = f"{type(error).__name__}: {error}"
    try:
        engine.train_batch(iter([]))
    except StopIteration:
        results["ended"] = True
    results["steps"] = engine.global_steps
    before = {name: p.clone() for name, p in model.named_parameters()}
    loss, outputs = engine.eval_batch(iter([(x, y)] * 2), return_logits=True)
    results["eval"] = float(loss), None if outputs is None else tuple(outputs.shape)
    results["own"] = engine.eval_batch(iter([(x, y)] * 2), bcast_loss=False)
    results["each"] = engine.eval_batch(iter([(x, y)] * 3), reduce_output=None, num_micro_batches=3)
    results["outputs"] = engine.eval_batch(iter([(x, y), row_batch("row", 2)]), compute_loss=False)
    results["unchanged"] = all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    engine.set_batch_fn(lambda batch: (batch["x"], batch["y"]))
    engine.set_dataiterator(iter([{"x": x, "y": y}] * 2))
    results["trained"] = float(engine.train_batch())
    engine.set_batch_fn(None)
    engine.set_dataloader([(x, y)] * 3)
    engine.train_batch()
    results["again"] = float(engine.train_batch())
    results["boundary"] = engine.is_gradient_accumulation_boundary()
    engine.reset_activation_shape()
    engine.train_batch()
    engine.destroy()
    return results


def read_apart() -> None:
    """Feed the stages different micro-batches."""
    case = Case(name="row", micros=2)
    engine = start(case)
    rank = dist.get_rank()
    engine.train_batch(iter([row_batch("row", micro + rank) for micro in range(2)]))


def from_a_loader() -> list[float]:
    """Return the losses on training data passed to `initialize`."""
    import windlass

    data = [tuple(part[0] for part in row_batch("row", 3 * number)) for number in range(8)]
    case = Case(name="row", micros=2)
    config = config_of(case)
    engine, _, loader, _ = windlass.initialize(model=model_of(case, num_stages=2), config=config, training_data=data)
    assert loader is not None
    losses = [float(engine.train_batch()) for _ in range(5)]
    engine.destroy()
    return losses


def own_optimizer(groups: bool) -> dict[str, Tensor]:
    """Train two groups of the full model's parameters: in an optimizer (`groups`), or passed as `model_parameters`."""
    import windlass

    case = Case(name="llama tied", stage=1)
    model = model_of(case)
    kinds = [[p for p in model.parameters() if p.dim() > 1], [p for p in model.parameters() if p.dim() < 2]]
    given = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    config = config_of(case)
    if groups:
        del config["optimizer"]
        optimizer = torch.optim.AdamW(given, lr=0.01, eps=1e-4)
        engine = windlass.initialize(model=model, config=config, optimizer=optimizer)[0]
    else:
        engine = windlass.initialize(model=model, config=config, model_parameters=given)[0]
    for step in range(2):
        one_step(engine, case, step)
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return state


def precise(precision: str) -> list[float]:
    """Return the losses of ten steps on one batch in 16 bits."""
    case = Case(name="gpt2", micros=2, stage=2, schedule="interleaved", chunks=2, clipping=1.0)
    section: dict[str, Any] = {"enabled": True}
    if precision == "fp16":
        section |= {"initial_scale_power": 4}
    engine = start(Case(**{**vars(case), "config": ((precision, section),)}))
    batches = [micro_batch(case, 0, micro, 0) for micro in range(2)]
    losses = [float(engine.train_batch(iter(batches))) for _ in range(10)]
    engine.destroy()
    return losses


def too_small() -> dict[str, Any]:
    """Train with offloaded parameters on an emulated device; then start zero-bubble, which a small device refuses."""
    import windlass

    found: dict[str, Any] = {}
    case = Case(name="llama", stage=3, config=(("zero_optimization", _OFFLOADED),))
    engine = start(case)
    found["held"] = len(engine._unshard_policy.held_units())
    found["loss"] = one_step(engine, case, 0)
    engine.destroy()
    dist.barrier()
    try:
        start(Case(**{**vars(case), "schedule": "zero-bubble"}))
    except windlass.WindlassError as error:
        found["refused"] = str(error)
    return found


_OFFLOADED = {
    "stage": 3,
    "stage3_param_persistence_threshold": 0,
    "offload_param": {"device": "cpu"},
    "offload_optimizer": {"device": "cpu"},
    "stage3_max_live_parameters": 1,
    "stage3_prefetch_bucket_size": 0,
}


def unfreeze(stage: int) -> tuple[list[float], dict[str, Tensor], str]:
    """Train with some layers of the first stage frozen in the first step and unfrozen afterwards."""
    import windlass

    case = Case(name="row", stage=stage, optimizer="SGD")
    model = model_of(case, num_stages=2)
    frozen = [p for name, p in model.named_parameters() if name.split(".")[0] in "01"]
    for parameter in frozen:
        parameter.requires_grad_(False)
    config = config_of(case)
    del config["optimizer"]
    optimizer = torch.optim.SGD(model.parameters(), **_params(case))
    engine = windlass.initialize(model=model, config=config, optimizer=optimizer)[0]
    losses = [one_step(engine, case, 0)]
    for parameter in frozen:
        parameter.requires_grad_(True)
    text = ""
    if frozen:
        try:
            one_step(engine, case, 1)
        except windlass.WindlassError as error:
            text = str(error)
    engine.refresh()
    losses += [one_step(engine, case, step) for step in (1, 2)]
    state = {name: value.clone() for name, value in engine.full_state_dict().items()}
    engine.destroy()
    return losses, state, text


def unfrozen_alone() -> tuple[list[float], dict[str, Tensor]]:
    """Train as `unfreeze` does, in one process."""
    case = Case(name="row", optimizer="SGD")
    model = model_of(case)
    frozen = [p for name, p in model.named_parameters() if name.split(".")[0] in "01"]
    optimizer = torch.optim.SGD(model.parameters(), **_params(case))
    losses = []
    for step in range(3):
        for parameter in frozen:
            parameter.requires_grad_(step > 0)
        total = 0.0
        for micro in range(case.micros):
            loss = loss_of(case, model, micro_batch(case, step, micro, 0)) / case.micros
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        nn.utils.clip_grad_norm_(model.parameters(), case.clipping)
        optimizer.step()
        optimizer.zero_grad()
    return losses, dict(model.state_dict())
