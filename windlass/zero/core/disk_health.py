"""Health of the disk that holds a model's offloaded data, agreed over all ranks. See [Note: a disk that fails]."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from windlass.base.errors import StorageError, UpdateError
from windlass.comm.rank_group import RankGroup
from windlass.storage.deferred_failure_tier import DeferredFailureTier
from windlass.storage.extent_transfer import Extent
from windlass.storage.staging_pool import StagingPool

UNTOUCHED = "parameters and optimizer states are as they were, so far as the disk can still be read"
LOST = (
    "some parameters or optimizer states are lost, or of another step than the others, so nothing can go on from them: "
    "load the last checkpoint, with its optimizer states, into this engine; where the disk does not work any more, "
    "destroy() it and load into a new one on another disk"
)

HALF_UPDATED = LOST.partition("; where the disk")[0]


class DiskHealth:
    """Failures of the disk and of updates of one model, over the ranks that train it.

    Args:
        disk: this rank's disk; None if no rank offloads to disk, so that checks are no-ops.
        staging: staging pool, which may have deferred writes in flight.
        data: all ranks that train the model.

    Attributes:
        loss_reason: why training cannot continue from the model's state; empty if it can. Equal on all ranks.
        update_error: error of a partial update on this rank, until all ranks know of it.
        update_changed_nothing: True if the update failed before any part was complete. Training continues if
            this holds on
            all ranks.
        temporary_extents: returns the extents of data that each step writes anew (gradients), whose loss loses
            no state.
    """

    def __init__(
        self, disk: DeferredFailureTier | None, staging: StagingPool | None, data: RankGroup, device: torch.device
    ) -> None:
        self._disk, self._staging, self._data, self._device = disk, staging, data, device
        self.loss_reason = ""
        self.update_error: Exception | None = None
        self.update_changed_nothing = False
        self.temporary_extents: Callable[[], set[Extent]] = set

    def has_local_failure(self) -> float:
        """Return 1 if a transfer or update of this rank failed and not all ranks know of it yet, else 0."""
        if self.update_error is not None and not self.update_changed_nothing:
            return 1.0
        return float(
            self._disk is not None and (self._lost_extent_error() is not None or self._disk.failure is not None)
        )

    def check(self, what: str, *, then: str = UNTOUCHED, loses: bool = False, among: RankGroup | None = None) -> None:
        """Raise on all ranks if a transfer failed on any. Collective if any data is on disk.

        Args:
            what: the operation that fails or failed, for the message.
            then: the consequence for the model, for the message.
            loses: training cannot continue after a failure. This always holds if parameters or states were not
                written, or
                were damaged on the disk.
            among: only these ranks take part (ranks that hold the same experts).

        Raises:
            StorageError: a transfer failed; on all ranks, with the messages of the ranks where it failed.
        """
        if self._disk is None:
            return
        group = among or self._data
        bad = torch.tensor([self.has_local_failure()], device=self._device)
        if group.size > 1:
            dist.all_reduce(bad, group=group.process_group)
        if bad.item() > 0:
            self.raise_failures(what, then=then, loses=loses, among=among)

    def raise_failures(
        self, what: str, *, then: str = UNTOUCHED, loses: bool = False, among: RankGroup | None = None
    ) -> None:
        """Raise the error of `check`, after all ranks know that a transfer failed. Collective.

        Raises:
            UpdateError: no transfer failed, but an update on some rank; on all ranks.
        """
        group = among or self._data
        torn = self._lost_extent_error()
        failed = self._disk.take_failure() if self._disk is not None else None
        broken, self.update_error, self.update_changed_nothing = self.update_error, None, False
        error: Exception | None = torn or failed
        mine = (str(error) if error is not None else "", torn is not None, "")
        if error is None and broken is not None:
            error, mine = broken, ("", False, f"its optimizer raised {type(broken).__name__}: {broken}")
        told = [mine] * group.size
        if group.size > 1:
            dist.all_gather_object(told, mine, group=group.process_group)
        said = "; ".join(f"rank {group.ranks[index]}: {words}" for index, (words, _, _) in enumerate(told) if words)
        updates = "; ".join(f"rank {group.ranks[index]}: {words}" for index, (_, _, words) in enumerate(told) if words)
        if updates:
            self.loss_reason = f"the update of the step before was made in part ({updates})"
            if not said:
                raise UpdateError(f"{what}: {self.loss_reason}. As for the model: {HALF_UPDATED}") from error
        if loses or any(tears for _, tears, _ in told):
            self.loss_reason, then = f"{what} ({said})", LOST
        raise StorageError(f"{what}: {said}. As for the model: {then}") from error

    def check_local(self, what: str, *, loses: bool = False) -> None:
        """Check this rank's disk alone, as `check` does for all ranks."""
        torn = self._lost_extent_error()
        error = self._disk.take_failure() if self._disk is not None else None
        error = torn or error
        if error is not None:
            loses = loses or torn is not None
            self.loss_reason = f"{what} ({error})" if loses else self.loss_reason
            raise StorageError(f"{what}: {error}. As for the model: {LOST if loses else UNTOUCHED}") from error

    def raise_local_failure(self) -> None:
        """Raise StorageError if a transfer of this rank failed and not all ranks know of it. The failure stays
        recorded, so that the next `check` reports it to all ranks.
        """
        if self._disk is not None and self._disk.failure is not None:
            raise StorageError(str(self._disk.failure)) from self._disk.failure

    def clear_update_error(self) -> None:
        """Clear an update error, after an update that failed on every rank and changed nothing."""
        self.update_error, self.update_changed_nothing = None, False

    def clear_failure(self) -> None:
        """Discard a failed read whose data is not needed."""
        if self._disk is not None:
            self._disk.take_failure()

    def require_intact(self, what: str) -> None:
        """Raise StorageError if training cannot continue from the model's state."""
        if self.loss_reason:
            raise StorageError(f"{what} is refused: {self.loss_reason}; {LOST}")

    def mark_reloaded(self) -> None:
        """Mark the model as fully reloaded. Collective if any data is on disk.

        Raises:
            StorageError: some lost data was not reloaded, or could not be written; on all ranks.
        """
        self.loss_reason = ""
        self.check("not all that was lost was loaded", loses=True)

    def _lost_extent_error(self) -> StorageError | None:
        """Return the error of a lost part of the state (not written, or damaged on disk); None if there is none."""
        if self._staging is not None:
            self._staging.has_room(0)  # detects finished writes
        if self._disk is None or not self._disk.damaged_extents:
            return None
        passing = self.temporary_extents()
        return next((error for extent, error in self._disk.damaged_extents.items() if extent not in passing), None)
