"""An engine's state as a checkpoint holds it: by parameter name, each rank its own pieces."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.log import logger
from windlass.checkpoint import Drawer, LoadedState, SavedState, load, read_latest, read_outline
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.save import Begun
from windlass.engine.away import ChunkAway
from windlass.engine.filling import ChunkToFill, incoming
from windlass.engine.pieces import ChunkToRead, parameters
from windlass.engine.states import Outgoing, merged, outgoing
from windlass.zero.chunk import Chunk
from windlass.zero.health import HALF_DONE

if TYPE_CHECKING:
    from windlass.engine.train import Engine
    from windlass.zero.sharded import ShardedModel


def save_engine(
    engine: Engine,
    directory: str,
    tag: str | None,
    client: dict[str, Any],
    save_latest: bool,
    trainable_only: bool,
    blocking: bool,
) -> bool:
    """See `Engine.save_checkpoint`. Of what rests on disk one chunk is in memory at a time."""
    model = engine._sharded
    engine._saves.finish()
    model.finish_update()
    if model.health.lost:
        raise CheckpointError(f"nothing is saved: {model.health.lost}; what was saved before is whole. {HALF_DONE}")
    model.gradients.finish()
    model.take_back()
    if not blocking:  # what is read later from disk has to have them
        model.masters.take_all_edits(model.units)
    drawers: dict[int, Drawer] = {}

    def drawer_of(chunk: Chunk) -> Drawer:
        if id(chunk) not in drawers:
            record = None if blocking else model.masters.residence.on_disk(chunk)
            drawers[id(chunk)] = ChunkToRead(model.masters, chunk) if record is None else ChunkAway(record)
        return drawers[id(chunk)]

    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    shards = list(parameters(model, units, drawer_of, keep=False, later=not blocking))
    states = Outgoing()

    def look() -> dict[str, Any]:
        if model.update is not None:
            outgoing(model.update, drawer_of, states)
        return states.about()

    ranks = Ranks.of(model.mesh.data.process_group)
    everywhere = ranks.each("preparing to save", look)
    plain = {
        "engine": engine.progress.state_dict(),
        "layout": {"stage": model.policy.stage, "ranks": model.mesh.data.size},
        **merged(everywhere),
        "groups": _groups(engine),
        "loss_scale": engine._scaler.state_dict(),
        "schedule": _schedule(engine),
        "trainable_only": trainable_only,
        "client": client,
    }
    tensors = states.tensors | ({} if trainable_only else _buffers(engine))
    state = SavedState([*shards, *states.shards], tensors, plain, {"random": _random_state(engine.device)})
    name = tag if tag is not None else f"global_step{engine.global_steps}"
    try:
        begun = Begun(directory, name, state, ranks, save_latest)
        if blocking:
            begun.finish(ranks)
        else:
            engine._saves.start(begun, ranks, pin=model.homes.pin)
    except CheckpointError:  # on all ranks
        model.health.check("nothing is saved, masters and optimizer states could not be read")
        raise
    return True


def load_engine(
    engine: Engine, directory: str, tag: str | None, strict: bool, optimizer: bool, schedule: bool
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    model = engine._sharded
    engine._saves.finish()  # it may be the one that is asked for
    model.health.refuse("load_checkpoint")
    if tag is None and read_latest(directory) is None:
        logger.warning(f"no checkpoint in {directory}: there is no file 'latest'; training starts afresh")
        return None, None
    ranks = Ranks.of(model.mesh.data.process_group)
    outlines: list[tuple[dict[str, Any], dict[str, torch.Tensor]]] = []
    ranks.each("looking at the checkpoint", lambda: outlines.append(read_outline(directory, tag)))
    plain, saved = outlines[0]
    groups_too = optimizer and engine.optimizer is not None and bool(plain["groups"])
    trainable_only = bool(plain["trainable_only"])
    with model.renewing([unit for unit in model.units if unit.trainable or not trainable_only]):
        found = _fill(engine, directory, tag, plain, saved if groups_too else None, strict)
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
    engine: Engine,
    directory: str,
    tag: str | None,
    plain: dict[str, Any],
    saved: dict[str, torch.Tensor] | None,
    strict: bool,
) -> LoadedState:
    """Read the checkpoint into where the engine's tensors rest, chunk by chunk.

    Args:
        saved: every tensor of the checkpoint, without memory; None: leave optimizer states alone.
    """
    trainable_only = bool(plain["trainable_only"])
    model = engine._sharded
    drawers: dict[int, ChunkToFill] = {}

    def drawer_of(chunk: Chunk) -> ChunkToFill:
        return drawers.setdefault(id(chunk), ChunkToFill(model.masters, chunk))

    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    shards = list(parameters(model, units, drawer_of, keep=True))
    tensors = {} if trainable_only else _buffers(engine)
    if saved is not None:
        ranks = Ranks.of(model.mesh.data.process_group)
        ranks.each("preparing to load", lambda: incoming(model, plain, saved, drawer_of, tensors))
    found = _load(
        model,
        directory,
        tag,
        SavedState([*shards, *(shard for drawer in drawers.values() for shard in drawer.shards)], tensors),
        strict,
        () if saved is not None else ("state/",),
    )
    for drawer in drawers.values():
        if not drawer.opened:  # nothing of it is in the checkpoint, so it has no states either
            with drawer.open():
                pass
    model.health.check("what was loaded could not be kept", loses=True)
    return found


def _load(
    model: ShardedModel, directory: str, tag: str | None, into: SavedState, strict: bool, ignore: tuple[str, ...]
) -> LoadedState:
    group = model.mesh.data.process_group
    try:
        return load(directory, tag, into, process_group=group, strict=strict, ignore=ignore, cast=True)
    except CheckpointError:  # on all ranks
        model.health.check("a checkpoint was loaded in part", loses=True)
        raise


def _buffers(engine: Engine) -> dict[str, torch.Tensor]:
    found = {}
    for prefix, module in engine.module.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                found[f"buffer/{prefix}.{name}" if prefix else f"buffer/{name}"] = buffer
    return found


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
        values = {key: value for key, value in one["values"].items() if key != "state_dtype"}  # states were converted
        group.update({key: tuple(v) if isinstance(v, list) else v for key, v in values.items()})


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
