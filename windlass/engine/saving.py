"""An engine's state as a checkpoint holds it: by parameter name, each rank its own pieces."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.garbage import held_off
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint import (
    Drawer,
    FlatShard,
    LoadedState,
    SavedState,
    load,
    read_checkpoint,
    read_latest,
)
from windlass.checkpoint.agree import Ranks
from windlass.checkpoint.deepspeed_files import Order, names_in_order
from windlass.checkpoint.deepspeed_out import write_deepspeed_files
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.retention import retire
from windlass.checkpoint.save import Begun
from windlass.checkpoint.scripts import write_scripts
from windlass.checkpoint.stored import Stored
from windlass.checkpoint.to_windlass import LATEST_UNIVERSAL
from windlass.comm.grid import AXES
from windlass.engine import averages
from windlass.engine.away import ChunkAway
from windlass.engine.deepspeed_target import target_of
from windlass.engine.everywhere import union
from windlass.engine.extra_state import plain_extra_states, set_extra_states
from windlass.engine.filling import ChunkToFill, incoming
from windlass.engine.fingerprint import Written, fingerprint
from windlass.engine.frozen_base import base_hashes, base_of, check_base, trains_adapters
from windlass.engine.groups import groups_of, match, require_whole, take
from windlass.engine.pieces import ChunkToRead, parameters
from windlass.engine.position import (
    check_data_position,
    data_position,
    random_state,
    set_data_position,
    set_random_state,
)
from windlass.engine.refresh import pending
from windlass.engine.saved_values import (
    check_counts,
    check_groups,
    check_position,
    check_random_state,
    check_schedule,
    check_states,
)
from windlass.engine.states import Outgoing, merged, outgoing
from windlass.engine.tag import one_tag
from windlass.engine.weights import load_by, require_all_known, said_of_weights
from windlass.zero.chunk import Chunk
from windlass.zero.health import LOST

if TYPE_CHECKING:
    from windlass.engine.train import Engine
    from windlass.zero.sharded import ShardedModel
    from windlass.zero.unit import Unit


@held_off()
def save_engine(
    engine: Engine,
    directory: str,
    tag: str | None,
    client: dict[str, Any],
    save_latest: bool,
    trainable_only: bool | None,
    blocking: bool,
) -> bool:
    """See `Engine.save_checkpoint`. Of what rests on disk one chunk is in memory at a time."""
    model = engine._sharded
    if not isinstance(client, Mapping):
        raise CheckpointError(f"client_state is a {type(client).__name__}; give a dict of plain data")
    deepspeed = engine._config.checkpoint.format == "deepspeed"
    if trainable_only is None:  # DeepSpeed's tools look for whole models
        trainable_only = not deepspeed and trains_adapters(model)
    require_all_known(model)
    engine._saves.finish()
    model.finish_update()
    if model.health.lost:
        raise CheckpointError(f"nothing is saved: {model.health.lost}; what was saved before is whole. {LOST}")
    model.gradients.finish()
    if pending(model):
        logger.warning(
            "this checkpoint is saved in the middle of a step: the gradients so far are not in it, and a load begins "
            "with a whole step; save after step() at the accumulation boundary to lose none"
        )
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
    absent = base_of(model) if trainable_only else frozenset()
    taken = fingerprint(model, units, "nothing is saved", absent) if blocking else None
    later: list[Written] = []
    shards = list(parameters(model, units, drawer_of, keep=False, later=not blocking, without=absent))
    states = Outgoing()

    def look() -> dict[str, Any]:
        if model.update is not None:
            outgoing(model.update, drawer_of, states)
        if not blocking:
            later.append(Written(model, units, absent))
        return {**states.about(), "data": data_position(engine), "tag": name}

    name = tag if tag is not None else f"global_step{engine.global_steps}"
    ranks = Ranks.of(model.mesh.world.process_group)
    everywhere = ranks.each("preparing to save", look)
    name = one_tag([one["tag"] for one in everywhere], engine._config.checkpoint.tag_validation)
    places = [one["data"] for one in everywhere]
    if len({repr(place) for place in places}) > 1:
        logger.warning(
            "ranks stand at different places in the data, and a load goes on from that of rank 0: some samples are "
            "seen again, others never: %s",
            "; ".join(f"rank {rank}: {place!s:.80}" for rank, place in enumerate(places)),
        )
    plain = {
        "engine": engine.progress.state_dict(),
        "layout": {
            "stage": model.policy.stage,
            "ranks": model.mesh.dense.data.size,
            "axes": {axis: model.mesh.grid.size(axis) for axis in AXES},
            "accumulation": engine.progress.batch.accumulation,
        },
        "fingerprint": None if taken is None else {"parameters": taken.parameters, "states": taken.states},
        **merged(everywhere),
        "groups": union(model.mesh, groups_of(engine)),
        "loss_scale": engine._scaler.state_dict(),
        "schedule": _schedule(engine),
        "data": places[0],
        "trainable_only": trainable_only,
        **union(model.mesh, said_of_weights(model, absent)),
        "base": base_hashes(model) if trainable_only else {},
        "buffers": True,
        "averages": averages.said_of(model),
        "extra": union(model.mesh, plain_extra_states(engine.module)),
        "client": client,
    }
    require_engine_data(plain, "the state of this engine", whole=True)  # what is saved must load again
    # rank 0's count, and others may have their own until the next forward (engine/buffers)
    tensors = states.tensors | (_buffers(engine) if model.mesh.first_of_stage else {})
    state = SavedState(
        [*shards, *states.shards, *averages.shards_of(model)], tensors, plain, {"random": random_state(engine.device)}
    )
    keep = engine._config.checkpoint.keep_last
    written = engine.saved_tags | {name}

    def afterwards() -> None:
        write_scripts(Path(directory))
        if keep is not None:
            retire(directory, keep, name, written)

    target = target_of(engine) if deepspeed else None

    def beside(place: Path) -> None:
        assert target is not None
        write_deepspeed_files(place, target, ranks.rank)

    try:
        begun = Begun(
            directory,
            name,
            state,
            ranks,
            save_latest,
            afterwards,
            None if blocking else later[0],
            None if target is None else beside,
            engine._config.checkpoint.use_node_local_storage,
        )
        if blocking:
            begun.finish(ranks)
        else:
            engine._saves.start(begun, ranks, pin=model.homes.pin)
    except CheckpointError:  # on all ranks
        model.health.check("nothing is saved, masters and optimizer states could not be read")
        raise
    engine.saved_tags.add(name)
    return True


@dataclass(frozen=True)
class Wanted:
    """What of a checkpoint is to be loaded.

    Attributes:
        module_strict, optimizer_strict: all of it has to match; else what does is taken.
        optimizer: states and hyper-parameters.
        schedule: the learning rate's.
        position: the place in the data.
        progress: counters, loss scale and random states.
        by: takes parameters and buffers over instead, see `Engine.load_checkpoint`.
    """

    module_strict: bool = True
    optimizer: bool = True
    optimizer_strict: bool = True
    schedule: bool = True
    position: bool = True
    progress: bool = True
    by: Callable[..., Any] | None = None

    @property
    def whole(self) -> bool:
        """Whether nothing of parameters and optimizer states is left as it is."""
        return self.module_strict and self.optimizer and self.optimizer_strict and self.by is None


@held_off()
def load_engine(
    engine: Engine, directory: str, tag: str | None, wanted: Wanted
) -> tuple[str | None, dict[str, Any] | None]:
    """See `Engine.load_checkpoint`."""
    model = engine._sharded
    require_all_known(model)
    engine._saves.finish()  # it may be the one that is asked for
    ranks = Ranks.of(model.mesh.world.process_group)
    if tag is None:  # one word for all: another may be saved meanwhile, and not every rank need see it
        tag = ranks.first("looking for the checkpoint", lambda: _named(engine, directory))
    if tag is None:
        logger.warning(f"no checkpoint in {directory}: there is no file 'latest'; training starts afresh")
        return None, None
    opened: list[Stored] = []
    order = (
        names_in_order(engine.module, engine._optimizer) if wanted.optimizer and engine._optimizer is not None else None
    )
    ranks.each("looking at the checkpoint", lambda: opened.append(Stored(directory, tag, order)))
    plain, saved = opened[0].plain, opened[0].outline()
    require_engine_data(plain, f"the checkpoint {tag!r} in {directory}", whole=True)
    _complete(plain, saved, model)
    groups_too = wanted.optimizer and engine._optimizer is not None and bool(plain["groups"])
    here = union(model.mesh, groups_of(engine))
    matched = match(here, plain["groups"])
    if groups_too and wanted.optimizer_strict:
        require_whole(matched, here, plain["groups"])
    position = plain.get("data") if wanted.position else None
    ranks.each("looking at the place in the data", lambda: check_data_position(engine, position))

    def check(shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        if shared is not plain:  # another checkpoint has taken the name meanwhile
            require_engine_data(shared, f"the checkpoint {tag!r} in {directory}", whole=True)
        if groups_too:
            check_groups(engine, matched, shared["groups"])
            check_states(shared.get("values", {}))
        if wanted.schedule and shared["schedule"] is not None:
            check_schedule(engine, shared["schedule"])
        check_position(engine, position)
        if wanted.progress and own is not None and own.get("random") is not None:
            check_random_state(own["random"])

    trainable_only = bool(plain["trainable_only"])
    if trainable_only and wanted.module_strict and wanted.by is None:
        check_base(model, plain.get("base", {}), saved, f"the checkpoint {tag!r} in {directory}")
    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    lost = bool(model.health.lost)
    if lost and not (wanted.whole and not trainable_only and (groups_too or engine._optimizer is None)):
        model.health.refuse("loading only a part of parameters and optimizer states")
    with model.renewing(units):
        if lost:
            model.discard()
        found, alike = _fill(engine, directory, opened[0], saved, groups_too, wanted, order, check)
    _compare(model, units, found, alike, base_of(model) if trainable_only else frozenset())
    if lost:
        model.health.recover()
    if not engine._config.zero_optimization.load_from_fp32_weights:
        model.masters.round_to_parameters(units)
    if wanted.by is not None:
        load_by(model, read_checkpoint(directory, tag).model_state_dict(), wanted.by)
    set_extra_states(engine.module, found.plain.get("extra", {}))
    if groups_too:
        take(engine, matched, plain["groups"])
    elif wanted.optimizer and plain["groups"]:
        logger.info("optimizer states were left alone: this engine has no optimizer")
    if wanted.progress:
        model.forget_gradients()
        engine.progress.load_state_dict(found.plain["engine"], found.plain.get("layout", {}).get("accumulation"))
        engine._scaler.load_state_dict(found.plain["loss_scale"])
    if wanted.schedule and engine.lr_scheduler is not None and found.plain["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(_fitting(found.plain["schedule"], engine.lr_scheduler.state_dict()))
    _go_on(engine, found, position, wanted)
    return str(found.path), dict(found.plain["client"])


def _named(engine: Engine, directory: str) -> str | None:
    """The tag to load where none is given."""
    universal = read_latest(directory, LATEST_UNIVERSAL) if engine._config.checkpoint.load_universal else None
    return universal or read_latest(directory)


def _go_on(engine: Engine, found: LoadedState, position: dict[str, Any] | None, wanted: Wanted) -> None:
    """Random states and place in the data, and what is said of them."""
    told = []
    if wanted.progress:
        told.append(f"step {engine.global_steps}")
        random = (found.rank_plain or {}).get("random")
        if found.saved_world_size == engine.world_size and random is not None:
            set_random_state(random, engine.device)
            told.append("random states as saved")
        else:
            told.append(
                f"random states as they were here (saved were those of {plural(found.saved_world_size, 'rank')})"
            )
    if place := set_data_position(engine, position):
        told.append(f"data at {place}")
    if told:
        logger.info(f"goes on at {'; '.join(told)}")


def _compare(
    model: ShardedModel, units: list[Unit], found: LoadedState, alike: tuple[bool, bool], absent: frozenset[str]
) -> None:
    """What was loaded is what was saved, as far as it was to be (`alike`: of parameters, of states). Collective.

    Raises:
        CheckpointError: it is not.
    """
    saved = found.plain.get("fingerprint")
    if saved is None or not any(alike):
        return
    here = fingerprint(model, units, without=absent)
    pairs = zip(("parameters", "states"), alike, (here.parameters, here.states), strict=True)
    for what, same, taken in pairs:
        if same and saved[what] is not None and taken != saved[what]:
            raise CheckpointError(
                f"{found.path} was loaded, but {what} are not what was saved: their fingerprint is {taken}, "
                f"{saved[what]} was written; load another checkpoint, and report this one"
            )
    logger.info(f"fingerprint {here}" + ("" if all(alike) else f", of which only {_checked(alike)} can be compared"))


def _checked(alike: tuple[bool, bool]) -> str:
    return "parameters" if alike[0] else "states"


def _fill(
    engine: Engine,
    directory: str,
    opened: Stored,
    saved: dict[str, torch.Tensor],
    states_too: bool,
    wanted: Wanted,
    order: Order | None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], None],
) -> tuple[LoadedState, tuple[bool, bool]]:
    """Read the checkpoint into where the engine's tensors rest, chunk by chunk.

    Args:
        saved: every tensor of the checkpoint, without memory.

    Returns:
        What was found, and whether parameters and states are now, bit by bit, those that were saved.
    """
    plain = opened.plain
    trainable_only = bool(plain["trainable_only"])
    model = engine._sharded
    drawers: dict[int, ChunkToFill] = {}

    def drawer_of(chunk: Chunk) -> ChunkToFill:
        return drawers.setdefault(id(chunk), ChunkToFill(model.masters, chunk))

    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    absent = base_of(model) if trainable_only else frozenset()
    shards = list(parameters(model, units, drawer_of, keep=True, without=absent))
    tensors = _buffers(engine) if plain.get("buffers", not trainable_only) else {}
    ranks = Ranks.of(model.mesh.world.process_group)
    counts: dict[str, torch.Tensor] = {}
    if states_too:
        ranks.each("preparing to load", lambda: incoming(model, plain, saved, drawer_of, counts))
    states = [shard for drawer in drawers.values() for shard in drawer.shards]
    apart = averages.Incoming(model, plain.get("averages", {}) if wanted.progress else None, saved)
    optional = () if wanted.module_strict else ("param/", "buffer/")
    left = (averages.PREFIX,) if states_too else (averages.PREFIX, "state/")
    if wanted.by is not None:
        shards, left = [], (*left, "param/", "buffer/")
        tensors = {}
    found = _load(
        model,
        directory,
        opened,
        SavedState([*shards, *states, *apart.shards], tensors | counts),
        counts,
        optional if wanted.optimizer_strict else (*optional, "state/"),
        left,
        order,
        check,
    )
    for drawer in drawers.values():
        if not drawer.opened:  # nothing of it is in the checkpoint, so it has no states either
            with drawer.open():
                pass
    apart.keep()
    model.health.check("what was loaded could not be kept", loses=True)
    kept = states_too and not any(drawer.converts for drawer in drawers.values())
    own = wanted.by is None and _alike(shards, saved), kept and _alike(states, saved)
    everywhere = ranks.each("loading", lambda: own)
    names = (*found.missing, *found.unexpected)
    whole = [not any(name.startswith(prefix) for name in names) for prefix in ("param/", "state/")]
    return found, (
        whole[0] and all(parameters for parameters, _ in everywhere),
        whole[1] and all(states for _, states in everywhere),
    )


def _alike(shards: list[FlatShard], saved: dict[str, torch.Tensor]) -> bool:
    """Whether nothing had to be converted."""
    return all(shard.name in saved and saved[shard.name].dtype == shard.dtype for shard in shards)


_ADVICE = (
    "Where that is meant, load what matches: load_module_strict=False for parameters and buffers, "
    "load_optimizer_strict=False for optimizer states"
)


def _complete(plain: dict[str, Any], saved: dict[str, torch.Tensor], model: ShardedModel) -> None:
    """DeepSpeed's files do not say whether frozen parameters were left out: then none of them is there."""
    if plain["trainable_only"] is None:
        frozen = [name for unit in model.units if not unit.trainable for name in unit.names]
        plain["trainable_only"] = bool(frozen) and not any(f"param/{name}" in saved for name in frozen)


def _load(
    model: ShardedModel,
    directory: str,
    opened: Stored,
    into: SavedState,
    counts: dict[str, torch.Tensor],
    optional: tuple[str, ...],
    ignore: tuple[str, ...],
    order: Order | None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], None],
) -> LoadedState:
    group = model.mesh.world.process_group
    try:
        return load(
            directory,
            opened.tag,
            into,
            process_group=group,
            ignore=ignore,
            optional=optional,
            cast=True,
            advice=_ADVICE,
            order=order,
            check=check,
            opened=opened,
            first=counts.keys(),
            check_first=lambda: check_counts(counts),
        )
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


def _schedule(engine: Engine) -> dict[str, Any] | None:
    if engine.lr_scheduler is None or not hasattr(engine.lr_scheduler, "state_dict"):
        return None
    state = engine.lr_scheduler.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}


def _fitting(saved: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
    """A schedule's state, but what it says of each optimizer group as now, where there are more or fewer of them."""

    def fits(key: str, value: Any) -> bool:
        here = now.get(key)
        return not (isinstance(value, list) and isinstance(here, list) and len(value) != len(here))

    left = [key for key, value in saved.items() if not fits(key, value)]
    if left:
        logger.warning(f"of the schedule {', '.join(left)} stay as they are: there are more or fewer groups than saved")
    return {**saved, **{key: now[key] for key in left}}
