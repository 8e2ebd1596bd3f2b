"""Saving and loading of an engine's state: tensors by parameter name, each rank its own fragments."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from windlass.base.errors import CheckpointError
from windlass.base.garbage_collection import held_off
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint import (
    FlatShard,
    LazyStorage,
    LoadedState,
    SavedState,
    load,
    read_checkpoint,
    read_latest,
)
from windlass.checkpoint.async_save import AsyncSave
from windlass.checkpoint.checkpoint_directory import LATEST_UNIVERSAL
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.foreign_formats import (
    ExportSource,
    ParameterOrder,
    foreign_format,
    foreign_formats,
    optimizer_parameter_order,
)
from windlass.checkpoint.retention import remove_old_checkpoints
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.stored_objects import unknown_classes
from windlass.comm.mesh_shape import AXES
from windlass.config import Config
from windlass.engine import average_checkpoint
from windlass.engine.checkpoint_tag import agree_on_tag
from windlass.engine.checkpoint_validation import (
    check_counts,
    check_lr_scheduler_state,
    check_rng_state,
    check_saved_groups,
    check_saved_position,
    check_scalar_states,
    find_unfit_states,
)
from windlass.engine.error_feedback_states import rescale_error_feedback
from windlass.engine.extra_state import collect_plain_extra_states, set_extra_states
from windlass.engine.frozen_parameters import (
    check_frozen_parameters,
    frozen_parameter_hashes,
    frozen_parameter_names,
    trains_adapters,
)
from windlass.engine.full_weights import load_with_function, require_unchanged_model, weight_metadata
from windlass.engine.metadata_merge import merge_metadata
from windlass.engine.model_refresh import has_pending_gradients
from windlass.engine.module_buffers import modules_with_saved_buffers
from windlass.engine.offloaded_storage import OffloadedChunkStorage
from windlass.engine.optimizer_groups import (
    GroupMatch,
    group_metadata,
    load_hyperparameters,
    match_groups,
    require_complete_match,
)
from windlass.engine.optimizer_state_loading import ChunkLoadStorage, plan_state_loading
from windlass.engine.optimizer_state_saving import StateFragments, collect_state_fragments, merge_state_metadata
from windlass.engine.parameter_fragments import ChunkSaveStorage, parameter_fragments
from windlass.engine.rank_state_checkpoint import RANK_STATE_PREFIX, RankStateLoader, rank_state_shards
from windlass.engine.rng_and_data_position import (
    check_data_position,
    data_position,
    position_in_step,
    rng_state,
    set_data_position,
    set_rng_state,
)
from windlass.engine.sharded_optimizer import ShardedOptimizer
from windlass.engine.state_fingerprint import StreamedFingerprint, compute_fingerprint, has_coded_states
from windlass.engine.training_progress import TrainingProgress
from windlass.optim.loss_scale import LossScale
from windlass.zero.update.disk_health import HALF_UPDATED, LOST
from windlass.zero.update.update_chunk import UpdateChunk

if TYPE_CHECKING:
    from windlass.zero.core.unit import Unit
    from windlass.zero.sharded_model import ShardedModel


@dataclass(frozen=True)
class EngineState:
    """Parts of an engine that a checkpoint saves or loads.

    Attributes:
        raw_config: the configuration as the script gave it.
        step_start_position: data position at the start of the current step.
        metadata: plain data of the engine's class, saved beside the state under keys of its own.
        saved_tags: directories and tags of the checkpoints that the engine wrote; a save adds its own on the rank that
            removes old checkpoints.
    """

    sharded: ShardedModel
    optimizer: ShardedOptimizer | None
    config: Config
    raw_config: Any
    progress: TrainingProgress
    scaler: LossScale
    lr_scheduler: Any
    training_dataloader: Any
    step_start_position: dict[str, Any] | None
    async_save: AsyncSave
    saved_tags: set[tuple[str, str]]
    metadata: dict[str, Any]


@held_off()
def save_engine(
    engine: EngineState,
    directory: str,
    tag: str | None,
    client_state: dict[str, Any],
    save_latest: bool,
    exclude_frozen_parameters: bool | None,
    blocking: bool,
) -> bool:
    """Save a checkpoint as `Engine.save_checkpoint` describes.

    One chunk of the offloaded states is in memory at a time.
    """
    model = engine.sharded
    if not isinstance(client_state, Mapping):
        raise CheckpointError(f"client_state is a {type(client_state).__name__}; give a dict of plain data")
    wanted_format = engine.config.checkpoint.format
    if exclude_frozen_parameters is None:  # tools of other formats expect full models
        exclude_frozen_parameters = wanted_format == "windlass" and trains_adapters(model)
    require_unchanged_model(model)
    engine.async_save.finish()
    model.finish_update()
    if model.disk_health.loss_reason:
        raise CheckpointError(
            f"nothing is saved: {model.disk_health.loss_reason}; earlier checkpoints are intact. {LOST}"
        )
    model.reducer.finish()
    if in_step := has_pending_gradients(model):
        logger.warning(
            "this checkpoint is saved in the middle of a step: it does not contain the gradients accumulated so "
            "far, and a resumed run repeats the step from its first micro-batch; save after step() at the "
            "accumulation boundary to lose none"
        )
    model.recapture_parameters()
    if not blocking:  # the writer thread later reads these parameters from NVMe, so edits must be there
        model.masters.copy_all_edits(model.units)
    handles: dict[int, LazyStorage] = {}

    def handle_of(chunk: UpdateChunk) -> LazyStorage:
        if id(chunk) not in handles:
            record = None if blocking else model.masters.state_offload.record_of(chunk)
            handles[id(chunk)] = (
                ChunkSaveStorage(model.masters, chunk) if record is None else OffloadedChunkStorage(record)
            )
        return handles[id(chunk)]

    units = [unit for unit in model.units if unit.trainable or not exclude_frozen_parameters]
    absent = frozen_parameter_names(model) if exclude_frozen_parameters else frozenset()
    # An async save must not read all values before it returns; a blocking one has the time to dequantize states.
    streams = not (blocking and has_coded_states(model))
    taken = None if streams else compute_fingerprint(model, units, "nothing is saved", absent)
    streamed: list[StreamedFingerprint] = []
    shards = list(
        parameter_fragments(model, units, handle_of, write_back=False, deferred=not blocking, excluded=absent)
    )
    states = StateFragments()

    def look() -> dict[str, Any]:
        if model.update is not None:
            collect_state_fragments(model.update, handle_of, states)
        if streams:
            streamed.append(StreamedFingerprint(model, units, absent))
        position = data_position(engine.training_dataloader)  # may raise: the state of a loader of another library
        if in_step:
            position = position_in_step(engine.step_start_position, position)
        return {**states.metadata(), "data": position, "tag": name}

    name = tag if tag is not None else f"global_step{engine.progress.global_steps}"
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    results = ranks.run_on_all("preparing to save", look)
    name = agree_on_tag([one["tag"] for one in results], engine.config.checkpoint.tag_validation)
    places = [one["data"] for one in results]
    if len({repr(place) for place in places}) > 1:
        logger.warning(
            "ranks are at different data positions, and a load resumes at that of rank 0, so some samples are "
            "repeated and others skipped: %s",
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
        **merge_state_metadata(results),
        "groups": merge_metadata(model.mesh, group_metadata(engine.optimizer, engine.sharded.model)),
        "loss_scale": engine.scaler.state_dict(),
        "schedule": _lr_scheduler_state(engine.lr_scheduler),
        "data": places[0],
        "trainable_only": exclude_frozen_parameters,
        **merge_metadata(model.mesh, weight_metadata(model, absent)),
        "base": frozen_parameter_hashes(model) if exclude_frozen_parameters else {},
        "buffers": True,
        "averages": average_checkpoint.average_metadata(model),
        "extra": merge_metadata(model.mesh, collect_plain_extra_states(engine.sharded.model)),
        "client": client_state,
        **engine.metadata,
    }
    require_engine_data(plain, "the state of this engine", require_all=True)  # refuse to write what could not be loaded
    # first ranks save their buffers; those of other ranks may differ until the next forward (engine/module_buffers)
    tensors = states.tensors | _persistent_buffers(model.model, modules_with_saved_buffers(model.model, model.mesh))
    state = SavedState(
        [*shards, *states.shards, *rank_state_shards(model), *average_checkpoint.average_shards(model)],
        tensors,
        plain,
        {"random": rng_state(engine.sharded.device)},
    )
    keep = engine.config.checkpoint.keep_last
    resolved = os.path.realpath(directory)

    def afterwards() -> None:
        engine.saved_tags.add((resolved, name))
        for one in foreign_formats():
            one.write_tools(Path(directory))
        if keep is not None:
            own = [tag for where, tag in engine.saved_tags if where == resolved]
            remove_old_checkpoints(directory, keep, name, own)

    export: Callable[[Path, int], None] | None = None
    if wanted_format != "windlass":
        optimizer = None if engine.optimizer is None else engine.optimizer.optimizer
        source = ExportSource(model, optimizer, engine.config, engine.raw_config, engine.scaler)
        export = foreign_format(wanted_format).plan_export(source)

    try:
        begun = CheckpointSave(
            directory,
            name,
            state,
            ranks,
            save_latest,
            afterwards,
            streamed[0] if streams else None,
            None if export is None else lambda place: export(place, ranks.rank),
            engine.config.checkpoint.use_node_local_storage,
        )
        if blocking:
            begun.finish(ranks)
        else:
            engine.async_save.start(begun, ranks, pin=model.tiers.pin)
    except CheckpointError:  # raised on all ranks
        model.disk_health.check("nothing is saved, master weights and optimizer states could not be read")
        raise
    return True


@dataclass(frozen=True)
class LoadOptions:
    """Selection of the parts of a checkpoint to load.

    Attributes:
        load_module_strict: all parameters and buffers must match; else those that match are loaded.
        load_optimizer_states: load optimizer states and hyper-parameters.
        load_optimizer_strict: the optimizer's groups and states must match; else those that match are loaded.
        load_lr_scheduler_states: load the learning rate scheduler's state.
        load_data_position: continue the data loader at the saved position.
        load_progress: load counters, loss scale and random states.
        custom_load_fn: loads parameters and buffers in place of the default, see `Engine.load_checkpoint`.
    """

    load_module_strict: bool = True
    load_optimizer_states: bool = True
    load_optimizer_strict: bool = True
    load_lr_scheduler_states: bool = True
    load_data_position: bool = True
    load_progress: bool = True
    custom_load_fn: Callable[..., Any] | None = None

    @property
    def loads_everything(self) -> bool:
        """True if every parameter and optimizer state is replaced."""
        return (
            self.load_module_strict
            and self.load_optimizer_states
            and self.load_optimizer_strict
            and self.custom_load_fn is None
        )


@held_off()
def load_engine(
    engine: EngineState, directory: str, tag: str | None, options: LoadOptions
) -> tuple[str, dict[str, Any]] | None:
    """Load a checkpoint as `Engine.load_checkpoint` describes. Return its path and plain data, or None without one."""
    model = engine.sharded
    require_unchanged_model(model)
    engine.async_save.finish()  # the async save in flight may be the requested checkpoint
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    if tag is None:  # rank 0 reads `latest` for all ranks: another save may change it meanwhile
        tag = ranks.run_on_first("looking for the checkpoint", lambda: _tag_to_load(engine, directory))
    if tag is None:
        logger.warning(f"no checkpoint in {directory}: there is no file 'latest'; training starts from the beginning")
        return None
    opened: list[StoredCheckpoint] = []
    order = (
        optimizer_parameter_order(engine.sharded.model, engine.optimizer)
        if options.load_optimizer_states and engine.optimizer is not None
        else None
    )
    ranks.run_on_all(
        "reading the index of the checkpoint", lambda: opened.append(StoredCheckpoint(directory, tag, order))
    )
    plain, saved = opened[0].plain, opened[0].outline()
    require_engine_data(plain, f"the checkpoint {tag!r} in {directory}", require_all=True)
    _infer_trainable_only(plain, saved, model)
    groups_too = options.load_optimizer_states and engine.optimizer is not None and bool(plain["groups"])
    here = merge_metadata(model.mesh, group_metadata(engine.optimizer, engine.sharded.model))
    matched = match_groups(here, plain["groups"])
    if groups_too and options.load_optimizer_strict:
        require_complete_match(matched, here, plain["groups"])
    unfit: dict[str, str] = {}
    if groups_too:
        ranks.run_on_all(
            "comparing the optimizers", lambda: unfit.update(_unfit_states(engine, matched, plain, options))
        )
    position = plain.get("data") if options.load_data_position else None
    ranks.run_on_all("checking the data position", lambda: check_data_position(engine.training_dataloader, position))

    def check(shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        if groups_too:
            assert engine.optimizer is not None
            check_saved_groups(engine.optimizer, matched, shared["groups"])
            check_scalar_states(shared.get("values", {}))
        if options.load_lr_scheduler_states and shared["schedule"] is not None:
            check_lr_scheduler_state(engine.lr_scheduler, shared["schedule"])
        check_saved_position(engine.training_dataloader, position)
        if options.load_progress and own is not None and own.get("random") is not None:
            check_rng_state(own["random"])

    trainable_only = bool(plain["trainable_only"])
    if trainable_only and options.load_module_strict and options.custom_load_fn is None:
        check_frozen_parameters(model, plain.get("base", {}), saved, f"the checkpoint {tag!r} in {directory}")
    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    lost, frozen_are_intact = bool(model.disk_health.loss_reason), model.disk_health.frozen_are_intact
    loads_all = options.loads_everything and (not trainable_only or frozen_are_intact)
    if lost and not (loads_all and (groups_too or engine.optimizer is None)):
        model.disk_health.require_intact("loading only a part of parameters and optimizer states")
    overwrites: list[bool] = []
    try:
        with model.replacing_parameters(units):
            if lost and not frozen_are_intact:
                model.discard_disk_state()
            loaded_state, is_exact = _load_tensors(
                engine,
                directory,
                opened[0],
                saved,
                groups_too,
                options,
                order,
                check,
                lambda: overwrites.append(True),
                unfit,
            )
        _verify_fingerprint(
            model, units, loaded_state, is_exact, frozen_parameter_names(model) if trainable_only else frozenset()
        )
    except CheckpointError as error:  # raised on all ranks
        if not overwrites:
            raise
        model.disk_health.mark_partly_loaded(str(error), trainable_only)
        raise CheckpointError(f"{error}. State of the model: {HALF_UPDATED}") from error
    if lost:
        model.disk_health.mark_reloaded()
    if not engine.config.zero_optimization.load_from_fp32_weights:
        model.masters.round_to_parameters(units)
    if options.custom_load_fn is not None:
        load_with_function(model, read_checkpoint(directory, tag).model_state_dict(), options.custom_load_fn)
    set_extra_states(engine.sharded.model, loaded_state.plain.get("extra", {}))
    if groups_too:
        assert engine.optimizer is not None
        done = plain["engine"]
        applied_steps = int(done["global_steps"]) - int(done["skipped_steps"])
        load_hyperparameters(engine.optimizer, matched, plain["groups"], applied_steps)
        model.choose_gradient_mode()
    else:
        model.forget_unsent()
        if options.load_optimizer_states and plain["groups"]:
            logger.info("optimizer states were not loaded: this engine has no optimizer")
    if options.load_progress:
        model.drop_gradients()
        engine.progress.load_state_dict(
            loaded_state.plain["engine"], loaded_state.plain.get("layout", {}).get("accumulation")
        )
        engine.scaler.load_state_dict(loaded_state.plain["loss_scale"])
    if groups_too:
        rescale_error_feedback(model, engine.scaler.scale / loaded_state.plain["loss_scale"]["scale"])
    if (
        options.load_lr_scheduler_states
        and engine.lr_scheduler is not None
        and loaded_state.plain["schedule"] is not None
    ):
        engine.lr_scheduler.load_state_dict(
            _matching_scheduler_state(loaded_state.plain["schedule"], engine.lr_scheduler.state_dict())
        )
    _restore_position(engine, loaded_state, position, options)
    if unknown := sorted(unknown_classes(loaded_state.plain["client"])):
        logger.warning(
            "the client state of %s has objects that are not rebuilt (UnknownObject), of %s; import the class and "
            "call torch.serialization.add_safe_globals([it]) before load_checkpoint",
            loaded_state.path,
            ", ".join(unknown[:3]),
        )
    return str(loaded_state.path), loaded_state.plain


def _unfit_states(
    engine: EngineState, matched: GroupMatch, plain: dict[str, Any], options: LoadOptions
) -> dict[str, str]:
    """Return why saved states of parameters do not fit this optimizer, by parameter.

    Raises:
        CheckpointError: there is one, and states must match.
    """
    assert engine.optimizer is not None
    check_saved_groups(engine.optimizer, matched, plain["groups"])
    here = group_metadata(engine.optimizer, engine.sharded.model)
    unfit = find_unfit_states(engine.optimizer.optimizer, matched, here, plain["groups"], plain.get("states", {}))
    if unfit and options.load_optimizer_strict:
        raise CheckpointError(
            f"{next(iter(unfit.values()))}: it was saved by another optimizer. Load it with that optimizer, or begin "
            "with new states: load_optimizer_states=False"
        )
    if unfit:
        begin = f"{plural(len(unfit), 'parameter')} without states, because the saved ones do not fit"
        logger.info(f"{begin}: {next(iter(unfit.values()))}")
    return unfit


def _tag_to_load(engine: EngineState, directory: str) -> str | None:
    """Return the tag to load if the caller gives none."""
    universal = read_latest(directory, LATEST_UNIVERSAL) if engine.config.checkpoint.load_universal else None
    return universal or read_latest(directory)


def _restore_position(
    engine: EngineState, loaded: LoadedState, position: dict[str, Any] | None, options: LoadOptions
) -> None:
    """Restore random states and the data position, and log where training resumes."""
    parts = []
    if options.load_progress:
        parts.append(f"step {engine.progress.global_steps}")
        random = (loaded.rank_plain or {}).get("random")
        saved, here = loaded.plain["layout"].get("axes") or {}, engine.sharded.mesh.grid
        # Ranks along tp must draw the same numbers, and ranks that compute other samples should not.
        moved = [axis for axis in ("pp", "sp", "tp") if axis in saved and saved[axis] != here.size(axis)]
        if loaded.saved_world_size != engine.sharded.mesh.world.size or random is None:
            parts.append(f"random states unchanged (those of {plural(loaded.saved_world_size, 'rank')} were saved)")
        elif moved:
            sizes = ", ".join(f"{axis} {saved[axis]}" for axis in moved)
            parts.append(f"random states unchanged (saved with {sizes})")
        else:
            set_rng_state(random, engine.sharded.device)
            parts.append("random states as saved")
    if place := set_data_position(engine.training_dataloader, position):
        parts.append(f"data at {place}")
    if parts:
        logger.info(f"resumes at {'; '.join(parts)}")


def _verify_fingerprint(
    model: ShardedModel, units: list[Unit], loaded: LoadedState, comparable: tuple[bool, bool], excluded: frozenset[str]
) -> None:
    """Compare the fingerprint of the loaded values with the saved one. Collective.

    Args:
        comparable: True for parameters and for states if they were loaded completely and without conversion.

    Raises:
        CheckpointError: the fingerprints differ.
    """
    saved = loaded.plain.get("fingerprint")
    if saved is None or not any(comparable):
        return
    here = compute_fingerprint(model, units, excluded=excluded)
    pairs = zip(("parameters", "states"), comparable, (here.parameters, here.states), strict=True)
    for what, same, taken in pairs:
        if same and saved[what] is not None and taken != saved[what]:
            raise CheckpointError(
                f"{loaded.path} was loaded, but {what} differ from the saved ones: their fingerprint is {taken}, the "
                f"saved one is {saved[what]}; load another checkpoint, and report this one"
            )
    logger.info(
        f"fingerprint {here}" + ("" if all(comparable) else f" (only {_comparable_part(comparable)} can be compared)")
    )


def _comparable_part(comparable: tuple[bool, bool]) -> str:
    return "parameters" if comparable[0] else "states"


def _load_tensors(
    engine: EngineState,
    directory: str,
    opened: StoredCheckpoint,
    saved: dict[str, torch.Tensor],
    with_states: bool,
    options: LoadOptions,
    parameter_order: ParameterOrder | None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], None],
    on_overwrite: Callable[[], object],
    without_states: Collection[str],
) -> tuple[LoadedState, tuple[bool, bool]]:
    """Read the checkpoint into the engine's tensors on their tiers, chunk by chunk.

    Args:
        saved: every tensor of the checkpoint, on the meta device.
        on_overwrite: called on all ranks before the first of the engine's tensors is filled.
        without_states: parameters whose saved states are not loaded.

    Returns:
        The loaded state, and whether parameters and states are now bit by bit equal to the saved ones.
    """
    plain = opened.plain
    trainable_only = bool(plain["trainable_only"])
    model = engine.sharded
    handles: dict[int, ChunkLoadStorage] = {}

    def handle_of(chunk: UpdateChunk) -> ChunkLoadStorage:
        return handles.setdefault(id(chunk), ChunkLoadStorage(model.masters, chunk))

    units = [unit for unit in model.units if unit.trainable or not trainable_only]
    absent = frozen_parameter_names(model) if trainable_only else frozenset()
    shards = list(parameter_fragments(model, units, handle_of, write_back=True, excluded=absent))
    tensors = (
        _persistent_buffers(model.model, set(model.model.modules())) if plain.get("buffers", not trainable_only) else {}
    )
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    counts: dict[str, torch.Tensor] = {}
    if with_states:
        ranks.run_on_all(
            "preparing to load", lambda: plan_state_loading(model, plain, saved, handle_of, counts, without_states)
        )
    states = [shard for handle in handles.values() for shard in handle.shards]
    rank_states = RankStateLoader(model, saved) if with_states else None
    dropped: tuple[str, ...] = ()
    if rank_states is not None:
        states += rank_states.shards
        dropped = rank_states.dropped
    apart = average_checkpoint.AverageLoader(model, plain.get("averages", {}) if options.load_progress else None, saved)
    optional = () if options.load_module_strict else ("param/", "buffer/")
    of_states = ("state/", RANK_STATE_PREFIX)
    left = (average_checkpoint.AVERAGE_PREFIX, *(dropped if with_states else of_states))
    if options.custom_load_fn is not None:
        shards, left = [], (*left, "param/", "buffer/")
        tensors = {}
    loaded_state = _load_or_mark_lost(
        model,
        directory,
        opened,
        SavedState([*shards, *states, *apart.shards], tensors | counts),
        counts,
        optional if options.load_optimizer_strict else (*optional, *of_states),
        left,
        parameter_order,
        check,
        on_overwrite,
    )
    for handle in handles.values():
        if not handle.was_opened:  # nothing of this chunk is in the checkpoint: opening it clears its optimizer states
            with handle.open():
                pass
    apart.store()
    model.disk_health.check("the loaded state could not be stored", loses=True)
    kept = with_states and not any(handle.converts_states for handle in handles.values())
    kept = kept and not dropped and not (rank_states is not None and rank_states.was_relaid)
    own = options.custom_load_fn is None and _same_dtypes(shards, saved), kept and _same_dtypes(states, saved)
    results = ranks.run_on_all("loading", lambda: own)
    names = (*loaded_state.missing, *loaded_state.unexpected)
    full = [not any(name.startswith(prefix) for name in names) for prefix in (("param/",), of_states)]
    return loaded_state, (
        full[0] and all(parameters for parameters, _ in results),
        full[1] and all(states for _, states in results),
    )


def _same_dtypes(shards: list[FlatShard], saved: dict[str, torch.Tensor]) -> bool:
    """Return True if every shard has its saved dtype, so that nothing was converted."""
    return all(shard.name in saved and saved[shard.name].dtype == shard.dtype for shard in shards)


_ADVICE = (
    "If this is intended, load what matches: load_module_strict=False for parameters and buffers, "
    "load_optimizer_strict=False for optimizer states"
)


def _infer_trainable_only(plain: dict[str, Any], saved: dict[str, torch.Tensor], model: ShardedModel) -> None:
    """Set `trainable_only` for DeepSpeed's files, which do not record it: True if they contain no frozen parameter."""
    if plain["trainable_only"] is None:
        frozen = [name for unit in model.units if not unit.trainable for name in unit.names]
        plain["trainable_only"] = bool(frozen) and not any(f"param/{name}" in saved for name in frozen)


def _load_or_mark_lost(
    model: ShardedModel,
    directory: str,
    opened: StoredCheckpoint,
    into: SavedState,
    counts: dict[str, torch.Tensor],
    optional: tuple[str, ...],
    ignore: tuple[str, ...],
    parameter_order: ParameterOrder | None,
    check: Callable[[dict[str, Any], dict[str, Any] | None], None],
    on_overwrite: Callable[[], object],
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
            parameter_order=parameter_order,
            check=check,
            opened=opened,
            first=counts.keys(),
            check_first=lambda: check_counts(counts),
            on_overwrite=on_overwrite,
        )
    except CheckpointError:  # raised on all ranks
        model.disk_health.check("a checkpoint was loaded in part", loses=True)
        raise


def _persistent_buffers(model: nn.Module, modules: set[nn.Module]) -> dict[str, torch.Tensor]:
    tensors = {}
    for prefix, module in model.named_modules():
        for name, buffer in module._buffers.items() if module in modules else ():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                tensors[f"buffer/{prefix}.{name}" if prefix else f"buffer/{name}"] = buffer
    return tensors


def _lr_scheduler_state(schedule: Any) -> dict[str, Any] | None:
    if schedule is None or not hasattr(schedule, "state_dict"):
        return None
    state = schedule.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}


def _matching_scheduler_state(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return the saved scheduler state, adapted to the current number of optimizer groups.

    Lists with another length than the saved ones keep their current values.
    """

    def fits(key: str, value: Any) -> bool:
        here = current.get(key)
        return not (isinstance(value, list) and isinstance(here, list) and len(value) != len(here))

    left = [key for key, value in saved.items() if not fits(key, value)]
    if left:
        logger.warning(
            f"{', '.join(left)} of the learning rate scheduler are unchanged: the number of groups differs from the "
            "saved one"
        )
    return {**saved, **{key: current[key] for key in left}}
