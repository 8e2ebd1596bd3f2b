"""An engine's state as a checkpoint holds it: by parameter name, each rank its own pieces."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import FlatShard, LoadedState, SavedState, load, read_latest, read_plain, save
from windlass.zero.health import HALF_DONE

if TYPE_CHECKING:
    from windlass.engine.train import Engine
    from windlass.zero.sharded import ShardedModel
    from windlass.zero.unit import Unit


def save_engine(
    engine: Engine, directory: str, tag: str | None, client: dict[str, Any], save_latest: bool, trainable_only: bool
) -> bool:
    """See `Engine.save_checkpoint`."""
    model = engine._sharded
    model.finish_update()
    if model.health.lost:
        raise CheckpointError(f"nothing is saved: {model.health.lost}; what was saved before is whole. {HALF_DONE}")
    model.gradients.finish()
    model.take_back()
    with model.masters.at_hand(model.units):
        return _save(engine, directory, tag, client, save_latest, trainable_only)


def _save(
    engine: Engine, directory: str, tag: str | None, client: dict[str, Any], save_latest: bool, trainable_only: bool
) -> bool:
    model = engine._sharded
    name = tag if tag is not None else f"global_step{engine.global_steps}"
    shards = [shard for shard, _ in _parameters(engine, trainable_only)]
    tensors = {} if trainable_only else _buffers(engine)
    kinds: dict[str, dict[str, str]] = {}
    for parameter, key, shape, start, value in _states(engine):
        where = f"state/{parameter}/{key}"
        if value.dim() and value.numel() and shape is not None:
            shards.append(FlatShard(where, shape, start, value.reshape(-1)))
        else:
            tensors[where] = value
        kind = "pieces" if where not in tensors else "whole"
        kinds.setdefault(parameter, {})[key] = f"{kind} {str(value.dtype).removeprefix('torch.')}"
    everywhere: list[dict[str, dict[str, str]]] = [{}] * model.mesh.data.size
    torch.distributed.all_gather_object(everywhere, kinds, group=model.mesh.data.process_group)
    merged: dict[str, dict[str, str]] = {}
    for part in everywhere:
        for parameter, keys in part.items():
            merged.setdefault(parameter, {}).update(keys)
    plain = {
        "engine": engine.progress.state_dict(),
        "layout": {"stage": model.policy.stage, "ranks": model.mesh.data.size},
        "states": merged,
        "groups": _groups(engine),
        "loss_scale": engine._scaler.state_dict(),
        "schedule": _schedule(engine),
        "trainable_only": trainable_only,
        "client": client,
    }
    state = SavedState(shards, tensors, plain, {"random": _random_state(engine.device)})
    save(directory, name, state, process_group=model.mesh.data.process_group, save_latest=save_latest)
    return True


def load_engine(
    engine: Engine, directory: str, tag: str | None, strict: bool, optimizer: bool, schedule: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    model = engine._sharded
    model.health.refuse("load_checkpoint")
    if tag is None and read_latest(directory) is None:
        logger.warning(f"no checkpoint in {directory}: there is no file 'latest'; training starts afresh")
        return None, None
    plain = read_plain(directory, tag)
    groups_too = optimizer and engine.optimizer is not None and bool(plain["groups"])
    optimizer = groups_too and bool(plain["states"])  # SGD without momentum has none
    trainable_only = bool(plain["trainable_only"])
    with model.editing([unit for unit in model.units if unit.trainable or not trainable_only]):
        found = _fill(engine, directory, tag, plain, strict, optimizer)
    engine.progress.load_state_dict(found.plain["engine"])
    engine._scaler.load_state_dict(found.plain["loss_scale"])
    if groups_too:
        _take_groups(engine, found.plain["groups"])
    if schedule and engine.lr_scheduler is not None and found.plain["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(found.plain["schedule"])
    if found.rank_plain is not None and found.saved_world_size == model.mesh.data.size:
        _set_random_state(found.rank_plain["random"], engine.device)
    return str(found.path), dict(found.plain["client"])


def _fill(
    engine: Engine, directory: str, tag: str | None, plain: dict[str, Any], strict: bool, optimizer: bool
) -> LoadedState:
    """Read the checkpoint into the engine's own tensors, which are at hand."""
    trainable_only = bool(plain["trainable_only"])
    model = engine._sharded
    shards, cuts = [], []
    for shard, cut in _parameters(engine, trainable_only):
        shards.append(shard)
        cuts += [cut] if cut is not None else []
    tensors = {} if trainable_only else _buffers(engine)
    if optimizer:
        _make_states(engine, plain["states"])
        for parameter, key, shape, start, value in _states(engine):
            where = f"state/{parameter}/{key}"
            if plain["states"][parameter][key].startswith("pieces") and shape is not None:
                shards.append(FlatShard(where, shape, start, value.reshape(-1)))
            else:
                tensors[where] = value
    found = load(
        directory,
        tag,
        SavedState(shards, tensors),
        process_group=model.mesh.data.process_group,
        strict=strict,
        ignore=() if optimizer else ("state/",),
        cast=True,
    )
    for unit, values in cuts:
        unit.write_cut(values)
    return found


def _parameters(engine: Engine, trainable_only: bool) -> Iterator[tuple[FlatShard, tuple[Unit, torch.Tensor] | None]]:
    """This rank's pieces of all parameters, masters where there are some. They alias the engine's memory, or else (the
    cut of an untrained unit on disk) are to be written back with the last of its pieces."""
    model = engine._sharded
    for unit in model.units:
        if trainable_only and not unit.trainable:
            continue
        pieces, cut = _pieces(model, unit)
        for number, (index, start, flat) in enumerate(pieces):
            shard = FlatShard(f"param/{unit.names[index]}", tuple(unit.shapes[index]), start, flat)
            yield shard, (unit, cut) if cut is not None and number == len(pieces) - 1 else None


def _pieces(model: ShardedModel, unit: Unit) -> tuple[list[tuple[int, int, torch.Tensor]], torch.Tensor | None]:
    cut: torch.Tensor | None = None
    if model.masters.of(unit):
        found = [(index, start, flat) for index, start, _, flat in model.masters.pieces(unit)]
        empty = model.masters.of(unit)[0].values()
    else:
        group = model.group
        first, last = unit.layout.cut(group.index, group.size) if unit.released else (0, unit.layout.padded)
        empty = unit.read_cut() if unit.released else unit.full
        cut = empty if unit.released else None
        pieces = unit.layout.pieces(first, last)
        found = [(piece.index, piece.start, empty.narrow(0, piece.offset, piece.numel)) for piece in pieces]
    found += [(index, 0, empty.new_empty(0)) for index, numel in enumerate(unit.layout.numels) if numel == 0]
    return found, cut


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"buffer/{prefix}.{name}" if prefix else f"buffer/{name}"] = buffer
    return found


def _states(engine: Engine) -> Iterator[tuple[str, str, tuple[int, ...] | None, int, torch.Tensor]]:
    """This rank's optimizer states: parameter, key, the parameter's shape if the state has it, start, tensor."""
    update = engine._sharded.update
    for unit, index, start, stop, state in update.entries() if update is not None else ():
        for key, value in state.items():
            tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value)
            elementwise = tensor.numel() == stop - start and (tensor.dim() > 0)
            yield unit.names[index], key, tuple(unit.shapes[index]) if elementwise else None, start, tensor


def _make_states(engine: Engine, saved: dict[str, dict[str, str]]) -> None:
    """Make the states that the checkpoint has and this optimizer has not yet, to be filled."""
    update = engine._sharded.update
    for unit, index, start, stop, state in update.entries() if update is not None else ():
        name = unit.names[index]
        if name not in saved:
            state.clear()
            continue
        whole = stop - start == unit.layout.numels[index] and type(update).__name__ == "WholeUpdate"
        for key in [key for key in state if key not in saved[name]]:
            del state[key]
        for key, what in saved[name].items():
            kind, dtype_text = what.split()
            dtype = getattr(torch, dtype_text)
            if kind == "pieces" and key not in state:
                shape = unit.shapes[index] if whole else (stop - start,)
                state[key] = torch.zeros(shape, dtype=dtype, device=engine._sharded.masters.of(unit)[0].device)
            elif kind == "whole" and not isinstance(state.get(key), torch.Tensor):
                on = engine.device if engine.device.type == "cuda" else torch.device("cpu")
                state[key] = torch.zeros((), dtype=dtype, device=on)


def _groups(engine: Engine) -> list[dict[str, Any]]:
    """Hyper-parameters of each group, with the names of its parameters."""
    if engine.optimizer is None:
        return []
    names = {id(p): name for name, p in engine.module.named_parameters()}
    groups = []
    for group in engine.optimizer.param_groups:
        values = {key: value for key, value in group.items() if key != "params"}
        groups.append({"parameters": [names[id(p)] for p in group["params"]], "values": values})
    return groups


def _take_groups(engine: Engine, saved: list[dict[str, Any]]) -> None:
    assert engine.optimizer is not None
    groups = engine.optimizer.param_groups
    if len(saved) != len(groups):
        raise CheckpointError(
            f"the checkpoint has {len(saved)} optimizer groups, this optimizer has {len(groups)}; build it with the "
            f"same groups "
            "or load with load_optimizer_states=False"
        )
    for group, one in zip(groups, saved, strict=True):
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in one["values"].items()})


def _schedule(engine: Engine) -> dict[str, Any] | None:
    if engine.lr_scheduler is None or not hasattr(engine.lr_scheduler, "state_dict"):
        return None
    state = engine.lr_scheduler.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}


def _random_state(device: torch.device) -> dict[str, Any]:
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": [version, list(numbers), gauss],
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _set_random_state(state: dict[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
