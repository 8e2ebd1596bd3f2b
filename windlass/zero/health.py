"""Whether the disk still has what a model keeps there, as all ranks know it. See [Note: a disk that fails]."""

from __future__ import annotations

import torch
import torch.distributed as dist

from windlass.base.errors import StorageError
from windlass.comm.groups import Group
from windlass.storage.patient import PatientTier

UNTOUCHED = "parameters and optimizer states are as they were"
HALF_DONE = (
    "some parameters and optimizer states have their new values and some the old ones, so nothing can go on from them: "
    "destroy() this engine and load the last checkpoint into a new one, on a disk that works"
)


class Health:
    """Of the disk of one model, over the ranks that train it.

    Args:
        disk: of this rank; None where nothing rests on one, on all ranks: nothing is asked then.
        data: all of them.

    Attributes:
        lost: why what the model has is no state to go on from; empty while all is well. The same on all ranks.
    """

    def __init__(self, disk: PatientTier | None, data: Group, device: torch.device) -> None:
        self._disk, self._data, self._device = disk, data, device
        self.lost = ""

    def bad_here(self) -> float:
        """1 if a transfer of this rank failed and not all ranks were told yet, else 0."""
        return float(self._disk is not None and self._disk.failure is not None)

    def check(self, what: str, *, then: str = UNTOUCHED, loses: bool = False) -> None:
        """All ranks ask each other whether a transfer failed. Collective where anything rests on disk.

        Args:
            what: cannot be done, or was not.
            then: what that means for the model.
            loses: nothing can go on after it.

        Raises:
            StorageError: one failed; on all ranks, with the words of those where it did.
        """
        if self._disk is None:
            return
        bad = torch.tensor([self.bad_here()], device=self._device)
        if self._data.size > 1:
            dist.all_reduce(bad, group=self._data.process_group)
        if bad.item() > 0:
            self.tell(what, then=then, loses=loses)

    def tell(self, what: str, *, then: str = UNTOUCHED, loses: bool = False) -> None:
        """Raise what `check` raises, where all ranks know that a transfer failed. Collective."""
        error = self._disk.take_failure() if self._disk is not None else None
        words: list[str] = [""] * self._data.size
        mine = str(error) if error is not None else ""
        if self._data.size > 1:
            dist.all_gather_object(words, mine, group=self._data.process_group)
        else:
            words = [mine]
        said = "; ".join(f"rank {self._data.ranks[index]}: {word}" for index, word in enumerate(words) if word)
        if loses:
            self.lost, then = f"{what} ({said})", HALF_DONE
        raise StorageError(f"{what}: {said}. As for the model: {then}") from error

    def check_alone(self, what: str, *, loses: bool = False) -> None:
        """As `check`, for what ranks do each by itself."""
        error = self._disk.take_failure() if self._disk is not None else None
        if error is not None:
            self.lost = f"{what} ({error})" if loses else self.lost
            raise StorageError(f"{what}: {error}. As for the model: {HALF_DONE if loses else UNTOUCHED}") from error

    def stop_here(self) -> None:
        """Raises StorageError if a transfer of this rank failed and not all ranks were told yet; they are to be told
        after this."""
        if self._disk is not None and self._disk.failure is not None:
            raise StorageError(str(self._disk.failure)) from self._disk.failure

    def forget(self) -> None:
        """A failure that matters to nobody is not told again."""
        if self._disk is not None:
            self._disk.take_failure()

    def refuse(self, what: str) -> None:
        """Raises StorageError if the model has no state to go on from."""
        if self.lost:
            raise StorageError(f"{what} is refused: {self.lost}; {HALF_DONE}")
