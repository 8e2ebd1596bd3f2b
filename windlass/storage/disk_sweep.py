"""Measurement of a disk's rates with several settings of the `aio` section, and choice of the best setting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

from windlass.base.errors import StorageError
from windlass.storage.disk_tier import DiskTier
from windlass.storage.io_rates import IoRates


@dataclass(frozen=True)
class DiskSetting:
    """Keys of the `aio` section that set the size and number of blocks in flight.

    `queue_depth` applies to the engine io_uring, `intra_op_parallelism` (number of threads) to the other engines.
    """

    block_size: int = 1 << 20
    queue_depth: int = 32
    intra_op_parallelism: int = 1

    def as_section(self) -> dict[str, dict[str, int | bool]]:
        """Return the configuration section, including the keys of DeepSpeed to which windlass gives fixed values."""
        return {"aio": {**asdict(self), "single_submit": False, "overlap_events": True}}


@dataclass(frozen=True)
class DiskMeasurement:
    """Rates of one setting in bytes per second; 0 for a direction that was not measured."""

    setting: DiskSetting
    read_rate: float
    write_rate: float
    engine: str

    def score(self, *, read: bool = True, write: bool = True) -> float:
        """Return the bytes per second of moving equal amounts in each selected direction (read, write).

        Returns 0 if one of them was not measured.
        """
        rates = [rate for asked, rate in ((read, self.read_rate), (write, self.write_rate)) if asked]
        return len(rates) / sum(1 / rate for rate in rates) if all(rates) and rates else 0.0


DEFAULT_SETTINGS = tuple(
    DiskSetting(block, depth, threads)
    for block, depth, threads in product((256 << 10, 1 << 20, 8 << 20), (4, 16, 64), (1, 4))
)


def measure_setting(setting: DiskSetting, folders: Sequence[Path], nbytes: int, loops: int = 1) -> DiskMeasurement:
    """Measure one setting on a disk tier over `folders`. The best of `loops` runs counts, in each direction.

    Each run writes and then reads `nbytes`.

    Raises:
        StorageError: a folder is missing, not writable or too full.
    """
    found, engine = measure_runs(setting, folders, nbytes, loops)
    return DiskMeasurement(setting, max(one.read_rate for one in found), max(one.write_rate for one in found), engine)


def measure_runs(
    setting: DiskSetting,
    folders: Sequence[Path],
    nbytes: int,
    loops: int,
    before_timed: Callable[[], None] | None = None,
) -> tuple[list[IoRates], str]:
    """Measure one setting `loops` times. Return the bytes and times of each run, and the description of the tier.

    Args:
        before_timed: function called before the timed writes, and again before the timed reads, of each run.

    Raises:
        StorageError: a folder is missing, not writable or too full.
    """
    for folder in folders:
        if not folder.is_dir():  # the disk tier would create the folder
            raise StorageError(f"{folder} is not a directory; give one on the disk to measure")
    with DiskTier(
        folders,
        queue_depth=setting.queue_depth,
        block_size=setting.block_size,
        threads=setting.intra_op_parallelism,
        label="windlass-bench",
    ) as tier:
        return [tier.measure_rates(nbytes, before_timed=before_timed) for _ in range(loops)], tier.description()


def sweep(
    settings: Iterable[DiskSetting],
    folders: Sequence[Path],
    nbytes: int,
    *,
    loops: int = 1,
    on_measured: Callable[[DiskMeasurement], None] | None = None,
) -> list[DiskMeasurement]:
    """Measure all settings. The order alternates over `loops` passes, so that drift of the disk affects all equally.

    Args:
        on_measured: called in the last pass, after each setting, with its best measurement of all passes.
    """
    chosen, best = list(settings), dict[DiskSetting, DiskMeasurement]()
    for number in range(loops):
        for setting in chosen if number % 2 == 0 else reversed(chosen):
            new, old = measure_setting(setting, folders, nbytes), best.get(setting)
            best[setting] = (
                new
                if old is None
                else DiskMeasurement(
                    setting, max(new.read_rate, old.read_rate), max(new.write_rate, old.write_rate), new.engine
                )
            )
            if number == loops - 1 and on_measured is not None:
                on_measured(best[setting])
    return [best[setting] for setting in chosen]


def best_measurement(found: Sequence[DiskMeasurement], *, read: bool = True, write: bool = True) -> DiskMeasurement:
    """Return the measurement with the fewest bytes in flight of those within 2 % of the highest rate.

    Raises:
        StorageError: there is no measurement.
    """
    if not found:
        raise StorageError("no setting of the disk was measured; name at least one block size and queue depth")
    top = max(one.score(read=read, write=write) for one in found)
    near = [one for one in found if one.score(read=read, write=write) >= 0.98 * top]
    return min(
        near, key=lambda one: (one.setting.block_size * one.setting.queue_depth, one.setting.intra_op_parallelism)
    )
