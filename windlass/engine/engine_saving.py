"""Saving of an engine's state: tensors by parameter name, each rank its own fragments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from windlass.base.errors import CheckpointError
from windlass.base.garbage_collection import suspended_garbage_collection
from windlass.base.log import logger
from windlass.checkpoint import (
    LazyStorage,
    SavedState,
)
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.checkpoint_save import CheckpointSave
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.foreign_formats import (
    ExportSource,
    foreign_format,
    foreign_formats,
)
from windlass.checkpoint.retention import remove_old_checkpoints
from windlass.comm.mesh_shape import AXES
from windlass.engine import average_checkpoint
from windlass.engine.checkpoint_tag import agree_on_tag
from windlass.engine.engine_state import EngineState
from windlass.engine.extra_state import collect_plain_extra_states
from windlass.engine.frozen_parameters import (
    frozen_parameter_hashes,
    frozen_parameter_names,
    trains_adapters,
)
from windlass.engine.full_weights import require_unchanged_model, weight_metadata
from windlass.engine.metadata_merge import merge_metadata
from windlass.engine.model_refresh import step_has_gradients
from windlass.engine.module_buffers import modules_with_saved_buffers, persistent_buffers, require_dense_buffers
from windlass.engine.offloaded_storage import OffloadedChunkStorage
from windlass.engine.optimizer_groups import (
    group_metadata,
)
from windlass.engine.optimizer_state_saving import StateFragments, collect_state_fragments, merge_state_metadata
from windlass.engine.parameter_fragments import ChunkSaveStorage, parameter_fragments
from windlass.engine.rank_state_checkpoint import rank_state_shards
from windlass.engine.rng_and_data_position import (
    data_position,
    position_in_step,
    rng_state,
)
from windlass.engine.state_fingerprint import StreamedFingerprint, compute_fingerprint, has_coded_states
from windlass.zero.update.disk_health import LOST
from windlass.zero.update.update_chunk import UpdateChunk

if TYPE_CHECKING:
    from windlass.zero.sharded_model import ShardedModel


@suspended_garbage_collection()
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
    if exclude_frozen_parameters is None:  # tools of other formats expect full models
        exclude_frozen_parameters = engine.config.checkpoint.format == "windlass" and trains_adapters(model)
    in_step = _complete_updates(engine)
    if not blocking:  # the writer thread reads these parameters from NVMe later, so edits must be written there first
        model.masters.copy_all_edits(model.units)
    storage_of = _chunk_storages(model, blocking)
    units = [unit for unit in model.units if unit.trainable or not exclude_frozen_parameters]
    absent = frozen_parameter_names(model) if exclude_frozen_parameters else frozenset()
    # The fingerprint is computed while values are written. That is impossible for quantized states, so a blocking save
    # computes the fingerprint before it writes. An async save must not read all values first, so its fingerprint leaves
    # quantized states out.
    streams = not (blocking and has_coded_states(model))
    taken = None if streams else compute_fingerprint(model, units, "nothing is saved", absent)
    streamed: list[StreamedFingerprint] = []
    shards = list(
        parameter_fragments(model, units, storage_of, write_back=False, deferred=not blocking, excluded=absent)
    )
    states = StateFragments()
    name = tag if tag is not None else f"global_step{engine.progress.global_steps}"

    def describe() -> dict[str, Any]:
        require_dense_buffers(model.model)
        if model.update is not None:
            collect_state_fragments(model.update, storage_of, states)
        if streams:
            streamed.append(StreamedFingerprint(model, units, absent))
        position = data_position(engine.training_dataloader)  # may raise if the loader is another library's
        if in_step:
            position = position_in_step(engine.step_start_position, position)
        return {**states.metadata(), "data": position, "tag": name}

    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    results = ranks.run_on_all("preparing to save", describe)
    name = agree_on_tag([one["tag"] for one in results], engine.config.checkpoint.tag_validation)
    plain = {
        **_plain_data(engine, results, exclude_frozen_parameters, absent),
        "fingerprint": None if taken is None else {"parameters": taken.parameters, "states": taken.states},
        "client": client_state,
        **engine.metadata,
    }
    require_engine_data(plain, "the state of this engine", require_all=True)  # refuse data that no load accepts
    # Each buffer is saved by the first rank that has it (see `modules_with_saved_buffers`); copies on other ranks may
    # differ until the next forward.
    tensors = states.tensors | persistent_buffers(model.model, modules_with_saved_buffers(model.model, model.mesh))
    state = SavedState(
        [*shards, *states.shards, *rank_state_shards(model), *average_checkpoint.average_shards(model)],
        tensors,
        plain,
        {"random": rng_state(engine.sharded.device)},
    )
    _start_write(engine, directory, name, state, ranks, save_latest, streamed[0] if streams else None, blocking)
    return True


def _complete_updates(engine: EngineState) -> bool:
    """Complete the async save, the delayed update and the reductions in flight.

    Return True in the middle of a step, when accumulated gradients are not applied yet.
    """
    model = engine.sharded
    require_unchanged_model(model)
    engine.async_save.finish()
    model.finish_update()
    if model.disk_health.loss_reason:
        raise CheckpointError(
            f"nothing is saved: {model.disk_health.loss_reason}; earlier checkpoints are intact. {LOST}"
        )
    model.reducer.finish()
    if in_step := step_has_gradients(model):
        logger.warning(
            "this checkpoint is saved in the middle of a step: it does not contain the gradients accumulated so "
            "far, and a resumed run repeats the step from its first micro-batch; save after step() at the "
            "accumulation boundary to lose none"
        )
    model.recapture_parameters()
    return in_step


def _chunk_storages(model: ShardedModel, blocking: bool) -> Callable[[UpdateChunk], LazyStorage]:
    """Return a function that returns the lazy storage handle of a chunk. It returns the same handle at every call."""
    storages: dict[int, LazyStorage] = {}

    def storage_of(chunk: UpdateChunk) -> LazyStorage:
        if id(chunk) not in storages:
            record = None if blocking else model.masters.state_offload.record_of(chunk)
            storages[id(chunk)] = (
                ChunkSaveStorage(model.masters, chunk) if record is None else OffloadedChunkStorage(record)
            )
        return storages[id(chunk)]

    return storage_of


def _plain_data(
    engine: EngineState, results: list[dict[str, Any]], trainable_only: bool, absent: frozenset[str]
) -> dict[str, Any]:
    """Return the plain data of the checkpoint, equal on all ranks.

    Args:
        results: description of each rank's states, with its data position under `data`.
        trainable_only: frozen parameters are not saved.
        absent: names of the parameters that are not saved.
    """
    model = engine.sharded
    places = [one["data"] for one in results]
    if len({repr(place) for place in places}) > 1:
        logger.warning(
            "ranks are at different data positions (%s), and a load resumes at that of rank 0, so some samples are "
            "repeated and others skipped; read equally many samples on all ranks before a save",
            "; ".join(f"rank {rank}: {place!s:.80}" for rank, place in enumerate(places)),
        )
    return {
        "engine": engine.progress.state_dict(),
        "layout": {
            "stage": model.policy.stage,
            "ranks": model.mesh.dense.data.size,
            "axes": {axis: model.mesh.grid.size(axis) for axis in AXES},
            "accumulation": engine.progress.batch.accumulation,
        },
        **merge_state_metadata(results),
        "groups": merge_metadata(model.mesh, group_metadata(engine.optimizer, engine.sharded.model)),
        "loss_scale": engine.scaler.state_dict(),
        "schedule": _lr_scheduler_state(engine.lr_scheduler),
        "data": places[0],
        "trainable_only": trainable_only,
        **merge_metadata(model.mesh, weight_metadata(model, absent)),
        "base": frozen_parameter_hashes(model) if trainable_only else {},
        "buffers": True,
        "averages": average_checkpoint.average_metadata(model),
        "extra": merge_metadata(model.mesh, collect_plain_extra_states(engine.sharded.model)),
    }


def _start_write(
    engine: EngineState,
    directory: str,
    name: str,
    state: SavedState,
    ranks: CheckpointRanks,
    save_latest: bool,
    fingerprint: StreamedFingerprint | None,
    blocking: bool,
) -> None:
    """Write `state` under the tag `name`, or start the async save of it.

    Args:
        fingerprint: fingerprint that is computed from the data as they are written.
    """
    model = engine.sharded
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
    if engine.config.checkpoint.format != "windlass":
        optimizer = None if engine.optimizer is None else engine.optimizer.optimizer
        source = ExportSource(model, optimizer, engine.config, engine.raw_config, engine.scaler)
        export = foreign_format(engine.config.checkpoint.format).plan_export(source)

    try:
        begun = CheckpointSave(
            directory,
            name,
            state,
            ranks,
            save_latest,
            afterwards,
            fingerprint,
            None if export is None else lambda place: export(place, ranks.rank),
            engine.config.checkpoint.use_node_local_storage,
        )
        if blocking:
            begun.finish(ranks)
        else:
            engine.async_save.start(begun, ranks, pin=model.tiers.pin)
    except CheckpointError:  # raised on all ranks, so all reach the collective check
        model.disk_health.check("nothing is saved, master weights and optimizer states could not be read")
        raise


def _lr_scheduler_state(schedule: Any) -> dict[str, Any] | None:
    if schedule is None or not hasattr(schedule, "state_dict"):
        return None
    state = schedule.state_dict()
    return {key: value for key, value in state.items() if not callable(value)}
