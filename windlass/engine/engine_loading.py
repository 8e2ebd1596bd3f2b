"""Loading of an engine's state from a checkpoint of any layout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from windlass.base.errors import CheckpointError
from windlass.base.garbage_collection import suspended_garbage_collection
from windlass.base.log import logger
from windlass.base.text import plural
from windlass.checkpoint import (
    FlatShard,
    LoadedState,
    SavedState,
    load,
    read_checkpoint,
    read_latest,
)
from windlass.checkpoint.checkpoint_directory import LATEST_UNIVERSAL
from windlass.checkpoint.checkpoint_ranks import CheckpointRanks
from windlass.checkpoint.engine_data import require_engine_data
from windlass.checkpoint.foreign_formats import (
    ParameterOrder,
    optimizer_parameter_order,
)
from windlass.checkpoint.stored_checkpoint import StoredCheckpoint
from windlass.checkpoint.stored_objects import unknown_classes
from windlass.engine import average_checkpoint
from windlass.engine.checkpoint_validation import (
    check_counts,
    check_lr_scheduler_state,
    check_rng_state,
    check_saved_groups,
    check_saved_position,
    check_scalar_states,
    find_unfit_states,
)
from windlass.engine.engine_state import EngineState
from windlass.engine.extra_state import set_extra_states
from windlass.engine.frozen_parameters import (
    check_frozen_parameters,
    frozen_parameter_names,
)
from windlass.engine.full_weights import load_with_function, require_unchanged_model
from windlass.engine.metadata_merge import merge_metadata
from windlass.engine.module_buffers import persistent_buffers
from windlass.engine.optimizer_groups import (
    GroupMatch,
    group_metadata,
    load_hyperparameters,
    match_groups,
    require_complete_match,
)
from windlass.engine.optimizer_state_loading import ChunkLoadStorage, plan_state_loading
from windlass.engine.parameter_fragments import parameter_fragments
from windlass.engine.rank_state_checkpoint import RANK_STATE_PREFIX, RankStateLoader
from windlass.engine.rng_and_data_position import (
    check_data_position,
    set_data_position,
    set_rng_state,
)
from windlass.engine.state_fingerprint import compute_fingerprint
from windlass.zero.update.disk_health import HALF_UPDATED
from windlass.zero.update.update_chunk import UpdateChunk

if TYPE_CHECKING:
    from windlass.zero.core.unit import Unit
    from windlass.zero.sharded_model import ShardedModel


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


@dataclass(frozen=True)
class _OpenCheckpoint:
    """Open checkpoint, compared with the engine that loads it.

    Attributes:
        options: parts to load.
        order: order of the optimizer's parameters, for formats that number them; None without optimizer states.
        saved: each tensor of the checkpoint, on the meta device.
        matched: parameter groups of the optimizer and of the checkpoint.
        loads_states: True if optimizer states and hyper-parameters are loaded.
        unfit: reason by parameter, for saved states that are not loaded because they do not fit the optimizer.
        position: data position to resume at; None: the data loader is not changed.
    """

    engine: EngineState
    directory: str
    tag: str
    options: LoadOptions
    stored: StoredCheckpoint
    order: ParameterOrder | None
    saved: dict[str, torch.Tensor]
    matched: GroupMatch
    loads_states: bool
    unfit: dict[str, str]
    position: dict[str, Any] | None

    @property
    def plain(self) -> dict[str, Any]:
        """Plain data of the checkpoint."""
        return self.stored.plain

    @property
    def trainable_only(self) -> bool:
        """True if the checkpoint has no frozen parameters."""
        return bool(self.plain["trainable_only"])

    @property
    def absent(self) -> frozenset[str]:
        """Names of this model's frozen parameters that the checkpoint lacks, since they were frozen in the saved run
        too."""
        frozen = frozen_parameter_names(self.engine.sharded) if self.trainable_only else frozenset()
        return frozenset(name for name in frozen if f"param/{name}" not in self.saved)

    def check(self, shared: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Check the plain data that all ranks share (`shared`) and those of this rank (`own`), before anything is
        loaded.

        Raises:
            CheckpointError: the data do not fit the engine.
        """
        engine = self.engine
        if self.loads_states:
            assert engine.optimizer is not None
            check_saved_groups(engine.optimizer, self.matched, shared["groups"])
            check_scalar_states(shared.get("values", {}))
        if self.options.load_lr_scheduler_states and shared["schedule"] is not None:
            check_lr_scheduler_state(engine.lr_scheduler, shared["schedule"])
        check_saved_position(engine.training_dataloader, self.position)
        if self.options.load_progress and own is not None and own.get("random") is not None:
            check_rng_state(own["random"])


@suspended_garbage_collection()
def load_engine(
    engine: EngineState, directory: str, tag: str | None, options: LoadOptions
) -> tuple[str, dict[str, Any]] | None:
    """Load a checkpoint as `Engine.load_checkpoint` describes. Return its path and plain data, or None if there is no
    checkpoint.
    """
    model = engine.sharded
    require_unchanged_model(model)
    engine.async_save.finish()  # the async save in flight may be the requested checkpoint
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    if tag is None:  # rank 0 reads `latest` for all ranks: another save may change it meanwhile
        tag = ranks.run_on_first("looking for the checkpoint", lambda: _tag_to_load(engine, directory))
    if tag is None:
        logger.warning(f"no checkpoint in {directory}: there is no file 'latest'; training starts from the beginning")
        return None
    opened = _open_checkpoint(engine, directory, tag, options, ranks)
    loaded_state = _load_parameters(opened)
    _load_rest(opened, loaded_state)
    if unknown := sorted(unknown_classes(loaded_state.plain["client"])):
        logger.warning(
            "the client state of %s has objects of classes not registered as safe, which became UnknownObject: %s; "
            "import each class and pass it to torch.serialization.add_safe_globals before load_checkpoint",
            loaded_state.path,
            ", ".join(unknown[:3]),
        )
    return str(loaded_state.path), loaded_state.plain


def _open_checkpoint(
    engine: EngineState, directory: str, tag: str, options: LoadOptions, ranks: CheckpointRanks
) -> _OpenCheckpoint:
    """Open a checkpoint, and compare its optimizer and its data position with those of the engine. Collective.

    Raises:
        CheckpointError: the checkpoint cannot be read, or does not match the engine. Raised on all ranks; nothing was
            changed.
    """
    model = engine.sharded
    stored: list[StoredCheckpoint] = []
    order = (
        optimizer_parameter_order(engine.sharded.model, engine.optimizer)
        if options.load_optimizer_states and engine.optimizer is not None
        else None
    )
    ranks.run_on_all(
        "reading the index of the checkpoint", lambda: stored.append(StoredCheckpoint(directory, tag, order))
    )
    plain, saved = stored[0].plain, stored[0].outline()
    require_engine_data(plain, f"the checkpoint {tag!r} in {directory}", require_all=True)
    _infer_trainable_only(plain, saved, model)
    loads_states = options.load_optimizer_states and engine.optimizer is not None and bool(plain["groups"])
    here = merge_metadata(model.mesh, group_metadata(engine.optimizer, engine.sharded.model))
    matched = match_groups(here, plain["groups"])
    if loads_states and options.load_optimizer_strict:
        require_complete_match(matched, here, plain["groups"])
    unfit: dict[str, str] = {}
    if loads_states:
        ranks.run_on_all(
            "comparing the optimizers", lambda: unfit.update(_unfit_states(engine, matched, plain, options))
        )
    position = plain.get("data") if options.load_data_position else None
    ranks.run_on_all("checking the data position", lambda: check_data_position(engine.training_dataloader, position))
    return _OpenCheckpoint(
        engine, directory, tag, options, stored[0], order, saved, matched, loads_states, unfit, position
    )


def _load_parameters(opened: _OpenCheckpoint) -> LoadedState:
    """Load parameters, buffers and optimizer states, and verify their fingerprint. Collective.

    Raises:
        CheckpointError: the tensors do not match the engine's, or could not be read. Raised on all ranks.
    """
    engine, options, model = opened.engine, opened.options, opened.engine.sharded
    trainable_only = opened.trainable_only
    if trainable_only and options.load_module_strict and options.custom_load_fn is None:
        where = f"the checkpoint {opened.tag!r} in {opened.directory}"
        check_frozen_parameters(model, opened.plain.get("base", {}), opened.saved, where)
    absent = opened.absent
    units = [unit for unit in model.units if unit.trainable or not absent.issuperset(unit.names)]
    lost, frozen_are_intact = bool(model.disk_health.loss_reason), model.disk_health.frozen_are_intact
    # Each pipeline stage has its own frozen parameters. `lost` may differ between ranks, so all ranks gather always.
    is_partial = any(model.mesh.gather_from_world(bool(absent)))
    loads_all = options.loads_everything and (not is_partial or frozen_are_intact or not lost)
    if lost and not (loads_all and (opened.loads_states or engine.optimizer is None)):
        model.disk_health.require_intact("loading only a part of parameters and optimizer states")
    overwrites: list[bool] = []

    def begin() -> None:
        overwrites.append(True)
        if loads_all and opened.loads_states:
            model.disk_health.clear_update_error()  # this load replaces all that a failed update changed

    try:
        with model.replacing_parameters(units):
            if lost and not frozen_are_intact:
                model.discard_disk_state()
            loaded_state, is_exact = _load_tensors(opened, units, begin)
        _verify_fingerprint(model, units, loaded_state, is_exact, absent)
    except CheckpointError as error:  # raised on all ranks, so all of them record the partial load
        if not overwrites:
            raise
        # each pipeline stage has its own frozen parameters
        keeps_frozen = all(model.mesh.gather_from_world(trainable_only and absent == frozen_parameter_names(model)))
        model.disk_health.mark_partly_loaded(str(error), keeps_frozen)
        raise CheckpointError(f"{error}. State of the model: {HALF_UPDATED}") from error
    if lost:
        model.disk_health.mark_reloaded()
    if not engine.config.zero_optimization.load_from_fp32_weights:
        model.masters.round_to_parameters(units)
    if options.custom_load_fn is not None:
        state_dict = read_checkpoint(opened.directory, opened.tag).model_state_dict()
        load_with_function(model, state_dict, options.custom_load_fn)
    set_extra_states(model.model, loaded_state.plain.get("extra", {}))
    return loaded_state


def _load_rest(opened: _OpenCheckpoint, loaded_state: LoadedState) -> None:
    """Load hyper-parameters, progress, loss scale, learning rate scheduler, random states and data position."""
    engine, options, model = opened.engine, opened.options, opened.engine.sharded
    plain, loaded = opened.plain, loaded_state.plain
    if opened.loads_states:
        assert engine.optimizer is not None
        done = plain["engine"]
        applied_steps = int(done["global_steps"]) - int(done["skipped_steps"])
        load_hyperparameters(engine.optimizer, opened.matched, plain["groups"], applied_steps)
        model.choose_gradient_mode()
    else:
        model.forget_unsent()
        if options.load_optimizer_states and plain["groups"]:
            logger.info("optimizer states were not loaded: this engine has no optimizer")
    if options.load_progress:
        model.drop_gradients()
        engine.progress.load_state_dict(loaded["engine"], loaded.get("layout", {}).get("accumulation"))
        engine.scaler.load_state_dict(loaded["loss_scale"])
    if opened.loads_states:
        model.quantization_errors.rescale(engine.scaler.scale / loaded["loss_scale"]["scale"])
    if options.load_lr_scheduler_states and engine.lr_scheduler is not None and loaded["schedule"] is not None:
        engine.lr_scheduler.load_state_dict(
            _matching_scheduler_state(loaded["schedule"], engine.lr_scheduler.state_dict())
        )
    _restore_position(engine, loaded_state, opened.position, options)


def _unfit_states(
    engine: EngineState, matched: GroupMatch, plain: dict[str, Any], options: LoadOptions
) -> dict[str, str]:
    """Return the parameters whose saved states do not fit this optimizer, each with the reason.

    Raises:
        CheckpointError: there is such a parameter, and `load_optimizer_strict` is set.
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
        # If the size of one of these axes changed, ranks along tp could load different random states, and ranks with
        # different samples could load equal ones.
        moved = [axis for axis in ("pp", "sp", "tp") if axis in saved and saved[axis] != here.size(axis)]
        if loaded.saved_world_size != engine.sharded.mesh.world.size or random is None:
            parts.append(
                f"random states unchanged (a checkpoint of {plural(loaded.saved_world_size, 'rank')} has none for this "
                "run)"
            )
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
        comparable: two flags, for parameters and for states: True if they were loaded completely, without conversion.

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
    opened: _OpenCheckpoint, units: list[Unit], on_overwrite: Callable[[], object]
) -> tuple[LoadedState, tuple[bool, bool]]:
    """Read the checkpoint into the engine's tensors, wherever they are (device, host memory, NVMe), chunk by chunk.

    Args:
        units: units whose parameters are loaded.
        on_overwrite: called on all ranks before the first of the engine's tensors is filled.

    Returns:
        The loaded state, and two flags, for parameters and for states: True if they equal the saved ones bit by bit.
    """
    options, plain, saved, with_states = opened.options, opened.plain, opened.saved, opened.loads_states
    model = opened.engine.sharded
    handles: dict[int, ChunkLoadStorage] = {}

    def handle_of(chunk: UpdateChunk) -> ChunkLoadStorage:
        return handles.setdefault(id(chunk), ChunkLoadStorage(model.masters, chunk))

    shards = list(parameter_fragments(model, units, handle_of, write_back=True, excluded=opened.absent))
    has_buffers = plain.get("buffers", not opened.trainable_only)
    tensors = persistent_buffers(model.model, set(model.model.modules())) if has_buffers else {}
    ranks = CheckpointRanks.of_group(model.mesh.world.process_group)
    counts: dict[str, torch.Tensor] = {}
    if with_states:
        ranks.run_on_all(
            "preparing to load", lambda: plan_state_loading(model, plain, saved, handle_of, counts, opened.unfit)
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
        opened,
        SavedState([*shards, *states, *apart.shards], tensors | counts),
        counts,
        optional if options.load_optimizer_strict else (*optional, *of_states),
        left,
        on_overwrite,
    )
    for handle in handles.values():
        if not handle.was_opened:  # nothing was loaded to this chunk: open it, which clears its optimizer states
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
    opened: _OpenCheckpoint,
    into: SavedState,
    counts: dict[str, torch.Tensor],
    optional: tuple[str, ...],
    ignore: tuple[str, ...],
    on_overwrite: Callable[[], object],
) -> LoadedState:
    model = opened.engine.sharded
    try:
        return load(
            opened.directory,
            opened.stored.tag,
            into,
            process_group=model.mesh.world.process_group,
            ignore=ignore,
            optional=optional,
            cast=True,
            advice=_ADVICE,
            parameter_order=opened.order,
            check=opened.check,
            opened=opened.stored,
            first=counts.keys(),
            check_first=lambda: check_counts(counts),
            on_overwrite=on_overwrite,
        )
    except CheckpointError:  # raised on all ranks, so all of them call `check`, which is collective
        model.disk_health.check("a checkpoint was loaded in part", loses=True)
        raise


def _matching_scheduler_state(saved: dict[str, Any], current: dict[str, Any]) -> dict[str, Any]:
    """Return the saved scheduler state, adapted to the current number of optimizer groups.

    A list whose saved length differs from the current one keeps its current values.
    """

    def fits(key: str, value: Any) -> bool:
        here = current.get(key)
        return not (isinstance(value, list) and isinstance(here, list) and len(value) != len(here))

    left = [key for key, value in saved.items() if not fits(key, value)]
    if left:
        logger.warning(
            f"{', '.join(left)} of the learning rate scheduler keep their present values: the number of optimizer "
            "groups differs from the saved one; set them if the saved ones are needed"
        )
    return {**saved, **{key: current[key] for key in left}}
