"""Record of disk failures and failed updates of a model, combined over all ranks. See [Note: a disk that fails]."""

from __future__ import annotations

from collections.abc import Callable

import torch

from windlass.base.errors import StorageError, UpdateError
from windlass.comm.rank_group import RankGroup
from windlass.storage.deferred_failure_tier import DeferredFailureTier
from windlass.storage.extent_transfer import Extent
from windlass.storage.staging_pool import StagingPool

UNTOUCHED = "parameters and optimizer states are unchanged, if the disk can still be read"
LOST = (
    "some parameters or optimizer states are lost, or belong to another step, so training cannot continue: load the "
    "last checkpoint, with its optimizer states, into this engine; if the disk no longer works, destroy() it and "
    "load into a new one on another disk"
)

HALF_UPDATED = LOST.partition("; if the disk")[0]


class DiskHealth:
    """Failures of the disk and of the updates of one model, combined over the ranks that train it.

    Args:
        disk: Disk tier of this rank. None if no rank keeps data on NVMe; `check` then exchanges nothing.
        staging: Staging pool, which tracks asynchronous writes.
        data: All ranks that train the model.
        device: Device of the flags that `check` exchanges.
        temporary_extents: Returns the extents of per-step data (gradients), whose loss does not damage the state.

    Attributes:
        loss_reason: Reason why training cannot continue from the model's state; empty if it can. Equal on all ranks,
            unless `check_local` or a `check` among some ranks has set it.
        update_error: Exception of a failed update on this rank, until all ranks have received it.
        update_changed_nothing: The update of `update_error` raised before any part of it was complete. Training
            continues if this is so on all ranks.
        frozen_are_intact: With a `loss_reason`: parameters that are not trained have kept their values.
    """

    def __init__(
        self,
        disk: DeferredFailureTier | None,
        staging: StagingPool | None,
        data: RankGroup,
        device: torch.device,
        temporary_extents: Callable[[], set[Extent]],
    ) -> None:
        self._disk, self._staging, self._data, self._device = disk, staging, data, device
        self._temporary_extents = temporary_extents
        self.loss_reason = ""
        self.frozen_are_intact = False
        self.update_error: Exception | None = None
        self.update_changed_nothing = False

    def has_local_failure(self) -> float:
        """Return 1 if this rank has lost data, or has a failed transfer or partial update whose error has not been sent
        to all ranks yet; else 0.
        """
        if self.update_error is not None and not self.update_changed_nothing:
            return 1.0
        return float(
            self._disk is not None and (self._lost_extent_error() is not None or self._disk.failure is not None)
        )

    def check(self, what: str, *, then: str = UNTOUCHED, loses: bool = False, among: RankGroup | None = None) -> None:
        """Raise on all ranks if a transfer or update of any rank failed. Collective if the model keeps data on NVMe.

        Args:
            what: Operation that failed or cannot run, for the message.
            then: Consequence for the model, for the message.
            loses: Count every failure as damage to the state. Otherwise only states or parameters that were not
                written, or were damaged on disk, count as damage.
            among: Exchange only over these ranks, e.g. those of one pipeline stage; None: all ranks.

        Raises:
            StorageError: a transfer failed. Raised on all ranks, with the messages of the ranks where it failed.
            UpdateError: no transfer failed, but the update of a rank did. Raised on all ranks.
        """
        if self._disk is None:
            return
        group = among or self._data
        bad = torch.tensor([self.has_local_failure()], device=self._device)
        if group.all_reduce(bad).item() > 0:
            self.raise_failures(what, then=then, loses=loses, among=among)

    def raise_failures(
        self, what: str, *, then: str = UNTOUCHED, loses: bool = False, among: RankGroup | None = None
    ) -> None:
        """Exchange the failures of all ranks and raise them as one error. Collective.

        `check` calls this once any rank has a failure.

        Raises:
            StorageError: a transfer failed. Raised on all ranks.
            UpdateError: no transfer failed, but the update of a rank did. Raised on all ranks.
        """
        group = among or self._data
        torn = self._lost_extent_error()
        failed = self._disk.take_failure() if self._disk is not None else None
        # Clear the failure now: after this exchange all ranks have received it.
        broken, self.update_error, self.update_changed_nothing = self.update_error, None, False
        error: Exception | None = torn or failed
        local = (str(error) if error is not None else "", torn is not None, "")
        if error is None and broken is not None:
            error, local = broken, ("", False, f"its optimizer raised {type(broken).__name__}: {broken}")
        reports = group.all_gather_object(local)
        failures = "; ".join(
            f"rank {group.ranks[index]}: {words}" for index, (words, _, _) in enumerate(reports) if words
        )
        updates = "; ".join(
            f"rank {group.ranks[index]}: {words}" for index, (_, _, words) in enumerate(reports) if words
        )
        if updates:
            # An update does not change frozen parameters.
            self.frozen_are_intact = self.frozen_are_intact or not self.loss_reason
            self.loss_reason = f"the update of the previous step was applied in part ({updates})"
            if not failures:
                raise UpdateError(f"{what}: {self.loss_reason}. State of the model: {HALF_UPDATED}") from error
        if loses or any(tears for _, tears, _ in reports):
            self.loss_reason, self.frozen_are_intact, then = f"{what} ({failures})", False, LOST
        raise StorageError(f"{what}: {failures}. State of the model: {then}") from error

    def check_local(self, what: str, *, loses: bool = False) -> None:
        """Raise StorageError if a transfer of this rank failed, like `check`, but without communication."""
        torn = self._lost_extent_error()
        error = self._disk.take_failure() if self._disk is not None else None
        error = torn or error
        if error is not None:
            loses = loses or torn is not None
            self.loss_reason = f"{what} ({error})" if loses else self.loss_reason
            raise StorageError(f"{what}: {error}. State of the model: {LOST if loses else UNTOUCHED}") from error

    def raise_local_failure(self) -> None:
        """Raise StorageError if a transfer of this rank failed and its error has not been sent to all ranks yet.

        The failure stays recorded, so that a later `check` sends it to all ranks.
        """
        if self._disk is not None and self._disk.failure is not None:
            raise StorageError(str(self._disk.failure)) from self._disk.failure

    def clear_update_error(self) -> None:
        """Clear the error of an update that changed nothing, or whose changes a load replaces."""
        self.update_error, self.update_changed_nothing = None, False

    def clear_failure(self) -> None:
        """Clear a failed read whose data are not needed any more."""
        if self._disk is not None:
            self._disk.take_failure()

    def require_intact(self, what: str) -> None:
        """Raise StorageError if training cannot continue from the model's state."""
        if self.loss_reason:
            raise StorageError(f"{what} is refused: {self.loss_reason}; {LOST}")

    def mark_partly_loaded(self, reason: str, frozen_are_intact: bool) -> None:
        """Record that a load failed after it began to overwrite the model. Called on all ranks.

        Args:
            frozen_are_intact: The load did not overwrite frozen parameters.
        """
        self.frozen_are_intact = frozen_are_intact and (self.frozen_are_intact or not self.loss_reason)
        self.loss_reason = f"a checkpoint was loaded in part ({reason})"

    def mark_reloaded(self) -> None:
        """Record that the full model was loaded again. Collective if the model keeps data on NVMe.

        Raises:
            StorageError: lost data were not loaded, or could not be written. Raised on all ranks.
        """
        self.loss_reason, self.frozen_are_intact = "", False
        self.check("some of the lost data were not loaded", loses=True)

    def _lost_extent_error(self) -> StorageError | None:
        """Return the error of a lost part of the state: a failed write or damage on the disk. None if all is intact."""
        if self._staging is not None:
            self._staging.has_room(0)  # polls the writes in flight, which records their failures
        if self._disk is None or not self._disk.damaged_extents:
            return None
        passing = self._temporary_extents()
        return next((error for extent, error in self._disk.damaged_extents.items() if extent not in passing), None)
