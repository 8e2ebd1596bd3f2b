"""Search space: keys with their choices, and the configurations that combine them."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from windlass.base.errors import ConfigError
from windlass.config import load_config
from windlass.config.axis_sizes import data_loading_size_of
from windlass.config.batch_sizes import ACCUMULATION, KEYS, MICRO, TRAIN
from windlass.config.config_loading import validate_config
from windlass.config.config_overrides import override_keys, value_at_path
from windlass.config.config_problems import ProblemKind
from windlass.config.config_source import ConfigSource

STAGE = "zero_optimization.stage"
STATES_TIER = "zero_optimization.offload_optimizer.device"
STATES_PATH = "zero_optimization.offload_optimizer.nvme_path"
STATES_RATIO = "zero_optimization.offload_optimizer.ratio"
PARAMETERS_TIER = "zero_optimization.offload_param.device"
PARAMETERS_PATH = "zero_optimization.offload_param.nvme_path"
CHECKPOINTING = "activation_checkpointing.enabled"
REDUCE_BUCKET = "zero_optimization.reduce_bucket_size"
GATHER_BUCKET = "zero_optimization.allgather_bucket_size"
PREFETCH = "zero_optimization.stage3_prefetch_bucket_size"
REUSE = "zero_optimization.stage3_max_reuse_distance"
OVERLAP = "zero_optimization.overlap_comm"
COMPILE = "compile.enabled"
PIPELINE_BATCHES = "pipeline.micro_batches"
"""Another spelling of `ACCUMULATION`."""

_SHORT_NAMES = {
    STAGE: "z",
    TRAIN: "tbs",
    MICRO: "mbs",
    ACCUMULATION: "gas",
    CHECKPOINTING: "ckpt",
    STATES_TIER: "states",
    STATES_RATIO: "ratio",
    PARAMETERS_TIER: "params",
    REDUCE_BUCKET: "rbs",
    GATHER_BUCKET: "abs",
    PREFETCH: "pbs",
    REUSE: "reuse",
    OVERLAP: "overlap",
    COMPILE: "compile",
}
_LARGE_BY_DEFAULT = (STATES_RATIO, REDUCE_BUCKET, GATHER_BUCKET, PREFETCH, REUSE, OVERLAP)
ORDERED_KEYS = (MICRO, TRAIN, STATES_RATIO)
"""Keys whose neighbouring values have similar costs."""
_MAX_CANDIDATES = 20_000
_MEMORY_KEYS = (*KEYS, STAGE, CHECKPOINTING, REDUCE_BUCKET, GATHER_BUCKET, PREFETCH, REUSE)
"""Keys whose effect on device memory is known; see `_savings`. That of accumulation steps and global batch is none."""
_LONGEST_NAME = 200  # a file system allows 255 bytes, and files add their extension


@dataclass(frozen=True)
class Dimension:
    """Configuration key that is searched, and its candidate values.

    Attributes:
        key: Dotted key.
        choices: Numbers from small to large; other values in the order in which they are stated.
    """

    key: str
    choices: tuple[Any, ...]


@dataclass(frozen=True)
class Candidate:
    """One configuration of the space.

    Attributes:
        values: Value by key, for the searched keys that have an effect in this configuration, and for the batch sizes
            and folders that follow from them. Several folders are a tuple, so that candidates can be keys of a dict.
    """

    values: tuple[tuple[str, Any], ...]

    @cached_property
    def overrides(self) -> dict[str, Any]:
        """Values by dotted key, for the configuration of a trial."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in self.values}

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a key."""
        return self.overrides.get(key, default)

    @cached_property
    def name(self) -> str:
        """Name in the style of DeepSpeed's tuner: `z2_mbs4_gas8`."""
        parts = []
        for key, value in self.values:
            if key in (STATES_PATH, PARAMETERS_PATH) or value is False or value == "none":
                continue
            if key == TRAIN and MICRO in self.overrides:  # micro-batch and accumulation steps imply the global batch
                continue
            short = _SHORT_NAMES.get(key) or _word_of(key, is_switch=value is True)
            parts.append(short if value is True else f"{short}{_short(value)}")
        if self.get(OVERLAP) is False:
            parts.append("nooverlap")
        name = "_".join(parts) or "plain"
        if len(name) > _LONGEST_NAME:
            digest = hashlib.sha256(repr(self.values).encode()).hexdigest()[:16]
            name = f"{name[: _LONGEST_NAME - 17]}_{digest}"
        return name


def _word_of(key: str, *, is_switch: bool) -> str:
    """Return the word that stands for a key in names of trials: its last part; for a switch, its section as well."""
    section, _, word = key.rpartition(".")
    outer = section.rpartition(".")[2]
    if not is_switch or not outer:
        return word
    return outer if word == "enabled" else f"{outer}.{word}"


def _short(value: Any) -> str:
    if isinstance(value, int) and value >= 1000:
        rounded = f"{value:.3g}"
        return rounded.replace("+", "") if float(rounded) == value else str(value)
    return str(value).replace("/", "-")


@dataclass(frozen=True)
class SearchLimits:
    """Bounds of the space that the user sets.

    Attributes:
        train_min, train_max: Range of the global batch; both None: the configuration's value.
        micro_min, micro_max: Range of the micro-batch.
        micro_count: Maximum number of micro-batch sizes that are searched.
        has_device_memory: The device has memory separate from the host's, which offloading to the host frees.
        nvme_path: Folder for the NVMe tier; None: NVMe is not searched.
        fast: Leave out bucket sizes and the reuse distance, unless the configuration has "auto" or a list there.
        choices: Choices that the user states, by dotted key; searched even if the configuration has a value there.
    """

    train_min: int | None = None
    train_max: int | None = None
    micro_min: int = 1
    micro_max: int = 1024
    micro_count: int = 5
    has_device_memory: bool = False
    nvme_path: str | None = None
    fast: bool = False
    choices: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SearchSpace:
    """Keys and their choices on top of a base configuration.

    Attributes:
        base: The user's configuration, with one value in place of each list of choices.
        dimensions: Searched keys, those with the largest effect first.
        world_size, data_ranks: Number of ranks, and number of data-loading ranks.
        train: Global batch of all candidates, unless it is searched; None: the configuration has none, and each
            micro-batch implies one.
        accumulation: Accumulation steps if `train` is None.
        nvme_path: Folder for the NVMe tier; None: NVMe is not searched.
        given: Values of the user's configuration at searched keys, where they are among the choices.
        first_values: Values that replace those of the user's configuration in all candidates, by dotted key: the first
            value of each list of choices, and accumulation steps in place of `pipeline.micro_batches`.
        refused: Reasons why combinations cannot run, by candidate name.
    """

    base: dict[str, Any]
    dimensions: tuple[Dimension, ...]
    world_size: int
    data_ranks: int
    train: int | None
    accumulation: int = 1
    nvme_path: str | None = None
    given: Mapping[str, Any] = field(default_factory=dict)
    first_values: Mapping[str, Any] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    _data_ranks_by_values: dict[tuple[Any, ...], int] = field(default_factory=dict, init=False, repr=False)

    def complete(self, choice: Mapping[str, Any]) -> Candidate | None:
        """Return the candidate with the values of `choice`, without keys that have no effect.

        Return None if the micro-batch times the number of data-loading ranks does not divide the global batch.
        """
        values = {key: value for key, value in choice.items() if _matters(key, choice, self.base, self.world_size)}
        micro = values.get(MICRO, value_at_path(self.base, MICRO))
        data_ranks = self._data_ranks_with(values)
        if micro is not None and (MICRO in values or TRAIN in values or data_ranks != self.data_ranks):
            # A micro-batch that is not searched implies the global batch on the data ranks of the base configuration.
            stated = data_ranks if MICRO in values else self.data_ranks
            train = values.get(TRAIN, self.train) or micro * self.accumulation * stated
            if train % (micro * data_ranks):
                return None
            values |= {TRAIN: train, ACCUMULATION: train // (micro * data_ranks)}
        for tier, path in ((STATES_TIER, STATES_PATH), (PARAMETERS_TIER, PARAMETERS_PATH)):
            if values.get(tier) == "nvme":
                found = value_at_path(self.base, path) or self.nvme_path
                values[path] = tuple(found) if isinstance(found, list) else found
        order = [STAGE, MICRO, ACCUMULATION, TRAIN, CHECKPOINTING, STATES_TIER, STATES_RATIO, PARAMETERS_TIER]
        place = {key: number for number, key in enumerate(order)}
        return Candidate(tuple(sorted(values.items(), key=lambda item: (place.get(item[0], len(order)), item[0]))))

    def _data_ranks_with(self, values: Mapping[str, Any]) -> int:
        """Return the number of data-loading ranks, which depends on the sizes of mesh axes in `values`."""
        others = {key: value for key, value in values.items() if key not in _SHORT_NAMES}
        if not others:
            return self.data_ranks
        known = tuple(others.items())
        if known not in self._data_ranks_by_values:
            found = self.data_ranks
            # If axis sizes do not divide the number of ranks, `is_valid` refuses the candidate.
            with contextlib.suppress(ConfigError):
                config = validate_config(override_keys(self.base, others)).config
                found = data_loading_size_of(config, self.world_size, "--nproc")
            self._data_ranks_by_values[known] = found
        return self._data_ranks_by_values[known]

    def candidates(self) -> list[Candidate]:
        """Return all candidates whose configuration is valid.

        Raises:
            ConfigError: there are too many, or none.
        """
        count = 1
        for dimension in self.dimensions:
            count *= len(dimension.choices)
        if count > _MAX_CANDIDATES:
            raise ConfigError(
                f"{count:,} configurations are more than a search may have ({_MAX_CANDIDATES:,}); write one value "
                'instead of "auto" or of a list at some keys'
            )
        keys = [dimension.key for dimension in self.dimensions]
        found: dict[Candidate, None] = {}
        for values in itertools.product(*(dimension.choices for dimension in self.dimensions)):
            candidate = self.complete(dict(zip(keys, values, strict=True)))
            if candidate is not None and candidate not in found and self.is_valid(candidate):
                found[candidate] = None
        if not found:
            reasons = "; ".join(dict.fromkeys(self.refused.values())) or (
                "no micro-batch divides the global batch; search other micro-batches"
            )
            raise ConfigError(f"no combination of the searched keys is a valid configuration: {reasons}")
        return list(found)

    def is_valid(self, candidate: Candidate) -> bool:
        """Return True if the candidate's configuration loads and is supported; else store the reason in `refused`."""
        if candidate.name in self.refused:
            return False
        checked = validate_config(override_keys(self.base, candidate.overrides))
        refusals = (refusal for refusal in checked.config.refusals() if refusal.value != "auto")
        reasons = [str(reason) for reason in (*checked.problems, *refusals)]
        if not reasons:
            try:
                checked.config.resolve_batch(self.world_size, "--nproc")
            except ConfigError as error:
                reasons.append(str(error).splitlines()[0])
        if reasons:
            self.refused[candidate.name] = reasons[0]
        return not reasons

    def config_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return the full configuration of a candidate. Keys at "auto" that it has no value for stay at "auto"."""
        return override_keys(self.base, candidate.overrides)

    def overrides_of(self, candidate: Candidate) -> dict[str, Any]:
        """Return the values by dotted key that replace those of the user's configuration.

        Lists of choices are replaced even at keys that the candidate lacks: a program may apply the overrides to the
        user's file, and no run accepts a list.
        """
        return {**self.first_values, **candidate.overrides}

    def usual_choice(self, dimension: Dimension) -> Any:
        """Return the value of a key in the base configuration if that value is a choice. Otherwise return the key's
        last choice if its default is large, else its first choice."""
        value = value_at_path(self.base, dimension.key)
        if value in dimension.choices:
            return value
        return dimension.choices[-1 if dimension.key in _LARGE_BY_DEFAULT else 0]

    def neighbours(self, candidate: Candidate) -> list[Candidate]:
        """Return the candidates that differ in one key: by one step in an ordered key, to any choice in other keys."""
        choice = {one.key: candidate.get(one.key, self.usual_choice(one)) for one in self.dimensions}
        found: dict[Candidate, None] = {}
        for dimension in self.dimensions:
            here = dimension.choices.index(choice[dimension.key])
            for number, value in enumerate(dimension.choices):
                is_near = dimension.key not in ORDERED_KEYS or abs(number - here) == 1
                changed = self.complete({**choice, dimension.key: value}) if is_near else None
                if changed is not None and changed != candidate:
                    found[changed] = None
        return list(found)

    def needs_no_less_memory(self, candidate: Candidate, other: Candidate) -> bool:
        """Return True if `candidate` needs at least the memory of `other`: no key with a known effect saves more memory
        in `candidate`, and all other keys have equal values.

        Tiers and the share of offloaded states have to be equal: offloading saves device memory and takes host memory,
        and `other` may have run out of either kind of memory.
        """
        unknown = (one.key for one in self.dimensions if one.key not in _MEMORY_KEYS)
        # A candidate has no value for a tier that has no effect at the candidate's stage. No value equals "none".
        keys = {key: "none" if key in (STATES_TIER, PARAMETERS_TIER) else None for key in unknown}
        if any(candidate.get(key, absent) != other.get(key, absent) for key, absent in keys.items()):
            return False
        return all(mine <= its for mine, its in zip(self._savings(candidate), self._savings(other), strict=True))

    def _savings(self, candidate: Candidate) -> tuple[float, ...]:
        """Return one number for each key with a known effect on memory; the larger the number, the less memory."""

        def value(key: str, default: float) -> float:
            found = candidate.get(key, value_at_path(self.base, key))
            # A candidate has no value for an "auto" key that has no effect. The default is used there.
            return default if found is None or found == "auto" else float(found)

        stage = value(STAGE, 0)
        # Below stage 3 no unit is resharded, as with an infinite reuse distance.
        reuse, prefetch = (value(REUSE, 1e9), value(PREFETCH, 5e7)) if stage == 3 else (math.inf, math.inf)
        larger_needs_more = value(MICRO, 1), reuse, prefetch, value(REDUCE_BUCKET, 5e8), value(GATHER_BUCKET, 5e8)
        return stage, value(CHECKPOINTING, False), *(-one for one in larger_needs_more)

    def start(self) -> Candidate | None:
        """Return the candidate with the user's values, and with the middle choice of stages and batches that are not
        set. Return None if `complete` returns None for it.
        """

        def value(dimension: Dimension) -> Any:
            if dimension.key in self.given:
                return self.given[dimension.key]
            if dimension.key in (STAGE, MICRO, TRAIN):
                # Of two middle choices take the lower stage, since most models fit below stage 3, and the larger batch,
                # since it is faster.
                number = len(dimension.choices) - (dimension.key == STAGE)
                return dimension.choices[number // 2]
            return self.usual_choice(dimension)

        return self.complete({one.key: value(one) for one in self.dimensions})


def build_space(raw: dict[str, Any], world_size: int, limits: SearchLimits, source: str = "config") -> SearchSpace:
    """Return the space of a configuration: its keys at "auto" and its lists of choices; the usual keys if it has none.

    Args:
        raw: The user's configuration, not modified. A list of values at a searched key states its choices.
        source: Name of the configuration in errors.

    Raises:
        ConfigError: the configuration is invalid, or nothing can be searched.
    """
    base, listed = _take_lists({key: value for key, value in raw.items() if key != "autotuning"})
    first_values = {key: values[0] for key, values in listed.items()}
    stated = {**listed, **limits.choices}
    _require_choices(stated)
    if TRAIN in stated and value_at_path(base, TRAIN) not in stated[TRAIN]:
        base = override_keys(base, {TRAIN: stated[TRAIN][0]})
    if PIPELINE_BATCHES not in stated:
        moved = _accumulation_of_pipeline(base)
        base, first_values = override_keys(base, moved), {**first_values, **moved}
    config = load_config(ConfigSource(base, source))
    autos = {key for key in config.auto_keys if key in (*_SHORT_NAMES, TRAIN)}
    autos |= {MICRO} if autos & set(KEYS) else set()
    for name, tier in (("offload_optimizer", STATES_TIER), ("offload_param", PARAMETERS_TIER)):
        if f"zero_optimization.{name}" in config.auto_keys:
            autos.add(tier)
    has_range = limits.train_min is not None or limits.train_max is not None
    is_free = getattr(config, TRAIN) is None and (getattr(config, MICRO) is None or MICRO in stated)
    if is_free:
        base = override_keys(base, {TRAIN: None, MICRO: 1, ACCUMULATION: config.gradient_accumulation_steps or 1})
    elif autos & set(KEYS):
        base = override_keys(base, {key: None for key in KEYS if key in config.auto_keys})
    if not is_free and {TRAIN, MICRO} & stated.keys() and value_at_path(base, MICRO) and value_at_path(base, TRAIN):
        base = override_keys(base, {ACCUMULATION: None})  # accumulation steps follow from both batch sizes
    batch = load_config(base).resolve_batch(world_size, "--nproc")
    data_ranks = batch.train // (batch.micro * batch.accumulation)
    searched = autos or (set() if stated else _usual_keys(limits, world_size))
    train = batch.train if not is_free or has_range else None
    choices: dict[str, tuple[Any, ...]] = {}
    ascending = {key: _from_small_to_large(values) for key, values in stated.items()}
    for key in _SHORT_NAMES:
        if key in stated:
            choices[key] = ascending[key]
        elif key in searched and key not in KEYS:
            choices[key] = _choices_of(key, base, limits)
    choices |= ascending
    if has_range and TRAIN not in choices:
        choices[TRAIN] = _global_batches(limits, data_ranks, batch.train)
    if MICRO not in choices and (MICRO in searched or has_range):
        if train is None and TRAIN not in choices:
            choices[MICRO] = _powers_of_two(limits.micro_min, limits.micro_max)
        else:
            choices[MICRO] = _micro_batches(choices.get(TRAIN, (batch.train,)), data_ranks, limits)
    order = (STAGE, MICRO, TRAIN, CHECKPOINTING, STATES_TIER, PARAMETERS_TIER, STATES_RATIO, REUSE)
    keys = [key for key in order if key in choices] + [key for key in choices if key not in order]
    dimensions = tuple(Dimension(key, choices[key]) for key in keys)
    if not any(len(dimension.choices) > 1 for dimension in dimensions):
        raise ConfigError(
            'nothing to search: each key has one value; write "auto" at the keys that may change, or a list of values, '
            "or use --search KEY=VALUE,VALUE"
        )
    given = {one.key: value for one in dimensions if (value := value_at_path(raw, one.key)) in one.choices}
    return SearchSpace(
        base, dimensions, world_size, data_ranks, train, batch.accumulation, limits.nvme_path, given, first_values
    )


def _accumulation_of_pipeline(base: dict[str, Any]) -> dict[str, Any]:
    """Return the values by which accumulation steps replace `pipeline.micro_batches`, since candidates set accumulation
    steps, and a configuration may not have both; empty if it has no `pipeline.micro_batches`."""
    steps = value_at_path(base, PIPELINE_BATCHES)
    is_count = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
    if not is_count or value_at_path(base, ACCUMULATION) not in (None, "auto", steps):
        return {}  # nothing to replace, or a value that `load_config` refuses
    return {ACCUMULATION: steps, PIPELINE_BATCHES: None}


def _take_lists(raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]]]:
    """Return the configuration with the first value of each list of choices, and the lists.

    At a key that is not in `_SHORT_NAMES`, a list states choices if the key accepts its first value but not a list.
    """
    stated: dict[str, tuple[Any, ...]] = {}
    wrong = [one.path for one in validate_config(raw).problems if one.kind is ProblemKind.TYPE]
    for key in (*_SHORT_NAMES, *wrong):
        value = value_at_path(raw, key)
        if isinstance(value, list) and value:
            stated[key] = tuple(value)
    base = override_keys(raw, {key: values[0] for key, values in stated.items()})
    still_wrong = {one.path for one in validate_config(base).problems} - _SHORT_NAMES.keys()
    stated = {key: values for key, values in stated.items() if key not in still_wrong}
    return override_keys(raw, {key: values[0] for key, values in stated.items()}), stated


def _require_choices(stated: Mapping[str, tuple[Any, ...]]) -> None:
    """Check the stated choices whose values the search itself reads; other choices are checked when a
    candidate's configuration is loaded.

    Raises:
        ConfigError: a choice cannot be searched.
    """
    if ACCUMULATION in stated:
        raise ConfigError(
            f"{ACCUMULATION} cannot be searched ({_listed(stated[ACCUMULATION])}): accumulation steps follow from the "
            f"global batch and the micro-batch; search {MICRO} or {TRAIN} instead"
        )
    for tier, key in ((STATES_TIER, STATES_PATH), (PARAMETERS_TIER, PARAMETERS_PATH)):
        if key in stated and tier in stated:
            raise ConfigError(
                f"{key} cannot be searched ({_listed(stated[key])}) together with {tier}: all trials on NVMe use the "
                "same folders; write them in the configuration, and compare disks by `windlass bench disk`"
            )
    for key, values in stated.items():
        for value in values:
            if isinstance(value, (list, dict)) or (value is None and key in _SHORT_NAMES):
                raise ConfigError(f"{key}: {value!r} is not a choice; write single values, such as {key}=1,2")
            if key in KEYS and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{key}: {value!r} is not a batch size; write whole numbers >= 1")


def _from_small_to_large(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the choices sorted if all are numbers; otherwise in their order."""
    return tuple(sorted(values) if all(isinstance(value, int | float) for value in values) else values)


def _listed(values: tuple[Any, ...]) -> str:
    return ", ".join(map(str, values))


def _usual_keys(limits: SearchLimits, world_size: int) -> set[str]:
    keys = {STAGE, MICRO, CHECKPOINTING}
    if limits.has_device_memory or limits.nvme_path:
        keys |= {STATES_TIER, PARAMETERS_TIER, STATES_RATIO}
    if world_size > 1 and not limits.fast:
        keys |= {REUSE, REDUCE_BUCKET}
    return keys


def _choices_of(key: str, base: dict[str, Any], limits: SearchLimits) -> tuple[Any, ...]:
    tiers = ["none"]
    if limits.has_device_memory:
        tiers.append("cpu")
    path = STATES_PATH if key == STATES_TIER else PARAMETERS_PATH
    if limits.nvme_path or value_at_path(base, path):
        tiers.append("nvme")
    table: dict[str, tuple[Any, ...]] = {
        STAGE: (0, 1, 2, 3),
        CHECKPOINTING: (False, True),
        STATES_TIER: tuple(tiers),
        PARAMETERS_TIER: tuple(tiers),
        STATES_RATIO: (0.25, 0.5, 0.75, 1.0),
        REDUCE_BUCKET: (5_000_000, 500_000_000),
        GATHER_BUCKET: (5_000_000, 500_000_000),
        PREFETCH: (0, 50_000_000),
        REUSE: (0, 1_000_000_000),
        OVERLAP: (False, True),
        COMPILE: (False, True),
    }
    return table[key]


def _micro_batches(trains: tuple[int, ...], data_ranks: int, limits: SearchLimits) -> tuple[int, ...]:
    """Return micro-batches that divide a rank's share of a global batch, at most `micro_count`, evenly spread."""
    shares = [train // data_ranks for train in trains if train % data_ranks == 0]
    most = min(max(shares, default=0), limits.micro_max)
    found = [
        micro for micro in range(max(1, limits.micro_min), most + 1) if any(share % micro == 0 for share in shares)
    ]
    if not found:
        raise ConfigError(
            f"no micro-batch from {limits.micro_min} to {limits.micro_max} divides the {max(shares, default=0)} "
            f"samples of a rank (global batch {max(trains)} on {data_ranks} data ranks); choose a global batch that is "
            "a multiple of the data ranks, or widen the range (autotuning.max_train_micro_batch_size_per_gpu)"
        )
    powers = [micro for micro in found if micro & (micro - 1) == 0]
    for kept in (found, powers):
        if 0 < len(kept) <= limits.micro_count:
            return tuple(kept)
    pool = powers if len(powers) >= limits.micro_count else found
    if limits.micro_count == 1:
        return (pool[-1],)
    step = (len(pool) - 1) / (limits.micro_count - 1)
    return tuple(sorted({pool[round(number * step)] for number in range(limits.micro_count)}))


def _powers_of_two(low: int, high: int) -> tuple[int, ...]:
    found = tuple(1 << number for number in range(high.bit_length()) if low <= 1 << number <= high)
    return found or (low,)


def _global_batches(limits: SearchLimits, data_ranks: int, train: int) -> tuple[int, ...]:
    """Return global batches in the range: the smallest multiple of the number of data ranks, doubled repeatedly."""
    low = max(limits.train_min or 1, data_ranks)
    first = -(-low // data_ranks) * data_ranks
    high = limits.train_max if limits.train_max is not None else max(train, first)
    found = []
    while first <= high:
        found.append(first)
        first *= 2
    if not found:
        raise ConfigError(
            f"no global batch from {limits.train_min} to {limits.train_max} is a multiple of {data_ranks} data ranks; "
            "widen the range (--batch, or autotuning.max_train_batch_size)"
        )
    return tuple(found)


def _matters(key: str, choice: Mapping[str, Any], base: Mapping[str, Any], world_size: int) -> bool:
    """Return False if the key has no effect together with the other values."""

    def value(other: str, default: Any) -> Any:
        return choice.get(other, value_at_path(base, other, default))

    if key in (PARAMETERS_TIER, PREFETCH, REUSE):
        return bool(value(STAGE, 0) == 3)
    if key == STATES_RATIO:
        return bool(value(STATES_TIER, "none") != "none")
    if key in (REDUCE_BUCKET, GATHER_BUCKET):
        return world_size > 1
    return True
