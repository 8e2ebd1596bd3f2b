"""Data file of one rank, written at once, or during training from a copy of the resident tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from windlass.base.device_memory import copy_to_host
from windlass.base.pending import Pending
from windlass.checkpoint.checkpoint_state import LazyStorage, OffloadedStorage
from windlass.checkpoint.safetensors_file import TensorEntry, TensorFileWriter, lay_out_entries, tensor_crc32
from windlass.storage.extent_allocator import PAGE, page_up

# bytes submitted before a wait: otherwise host copies of device tensors would accumulate
_MAX_UNWAITED_BYTES = 256 << 20


@dataclass(frozen=True)
class RankFileItem:
    """Entry of a rank's data file. `get` returns the tensor while its storage handle is open."""

    name: str
    entry: TensorEntry
    get: Callable[[], torch.Tensor]
    storage: LazyStorage | None = None


class RankFile:
    """Data file that this rank writes.

    [Note: saving while training goes on] An async save copies resident tensors to a host buffer with the layout of the
    file; from there full pages are written to disk without another copy. Offloaded values are not copied but read one
    storage handle at a time, before the copy is written. An update waits before it changes the values of a handle
    that is not yet read, and that handle is read next (`OffloadedStorage`). So a save takes host memory for a copy of
    this rank's resident tensors, which the next save reuses, and for the values of one storage handle.

    Args:
        items: entries of the file, which has them in this order, except that wide dtypes come first.
        on_tensor_written: called with the name of each entry and its tensor, before the tensor may change.
    """

    def __init__(
        self,
        path: Path,
        items: Sequence[RankFileItem],
        on_tensor_written: Callable[[str, torch.Tensor], object] = lambda name, tensor: None,
    ) -> None:
        self._on_tensor_written = on_tensor_written
        self.path, self._items = path, {item.name: item for item in items}
        self.entries = {item.name: item.entry for item in items}
        self._layout = lay_out_entries(self.entries)
        self._offsets = self._layout[1]
        self._early_checksums: dict[str, int] | None = None
        self._copied_runs: list[tuple[list[str], int, torch.Tensor]] = []  # names, offset in the file, copied bytes

    @property
    def copy_nbytes(self) -> int:
        """Upper bound of the buffer size for `copy_resident`."""
        return sum(page_up(stop - start) + 2 * PAGE for _, start, stop in self._resident_runs())

    def copy_resident(self, buffer: torch.Tensor) -> None:
        """Copy the resident tensors. `write` writes the copy, so the tensors may change. Updates of offloaded values
        wait until `write` has copied these values.

        Args:
            buffer: `[bytes]` uint8 on the CPU, at least `copy_nbytes`; not to be modified until `write` is over.
        """
        at, copies = -buffer.data_ptr() % PAGE, list[Pending]()
        for names, start, stop in self._resident_runs():
            at += start % PAGE  # same alignment as in the file
            data = buffer[at : at + stop - start]
            at = page_up(at + stop - start)
            self._copied_runs.append((names, start, data))
            requested = [self._items[name] for name in names]
            for handle, items in group_items_by_storage(requested):
                with handle.open() if handle is not None else nullcontext():
                    copies += [self._copy_item(item, data[self._offsets[item.name] - start :]) for item in items]
                    for copy in copies:  # before the handle closes: they read its memory
                        copy.wait()
                    copies.clear()
        for handle in {id(item.storage): item.storage for item in self._items.values()}.values():
            if isinstance(handle, OffloadedStorage):
                handle.block_writers()

    def write_now(self) -> None:
        """Write the file now. A later `write` only returns the checksums."""
        self._early_checksums = self.write()

    def write(self) -> dict[str, int]:
        """Write the file durably. Return the crc32 of each entry.

        Handles of type `OffloadedStorage` are released afterwards, also after an error.
        """
        if self._early_checksums is not None:
            return self._early_checksums
        sums: dict[str, int] = {}
        copied = {name for names, _, _ in self._copied_runs for name in names}
        handles = group_items_by_storage(item for item in self._items.values() if item.name not in copied)
        try:
            if self._items:
                with TensorFileWriter(self.path, self.entries, self._layout) as file:
                    # Offloaded values first, because updates wait for them, and because closing a handle waits for all
                    # submitted writes, which would include those of the copies.
                    self._write_from_storages(file, handles, sums)
                    for names, start, data in self._copied_runs:
                        file.submit_bytes(names, start, data)
                    for names, start, data in self._copied_runs:
                        sums |= {name: tensor_crc32(self._entry_bytes(name, data, start)) for name in names}
                        for name in names:
                            self._on_tensor_written(
                                name, self._view_entry(self.entries[name], self._entry_bytes(name, data, start))
                            )
        finally:
            self._copied_runs = []
            self.release_storages()
        return sums

    def release_storages(self) -> None:
        """Release all offloaded storage handles, so that updates can change their values."""
        for item in self._items.values():
            if isinstance(item.storage, OffloadedStorage):
                item.storage.release_writers()

    def _write_from_storages(
        self,
        file: TensorFileWriter,
        storages: list[tuple[LazyStorage | None, list[RankFileItem]]],
        checksums: dict[str, int],
    ) -> None:
        # an update begins with the last units of the model, so write those first
        left = [one for one in storages if not isinstance(one[0], OffloadedStorage)]
        left += reversed([one for one in storages if isinstance(one[0], OffloadedStorage)])
        held = 0
        while left:
            requested = [one for one in left if isinstance(one[0], OffloadedStorage) and one[0].has_waiter]
            handle, items = one = requested[0] if requested else left[0]
            left.remove(one)
            stays = handle is None or handle.is_resident
            with handle.open() if handle is not None else nullcontext():
                if isinstance(handle, OffloadedStorage):
                    handle.release_writers()  # `open` has copied the values
                for item in items:
                    tensor = item.get()
                    checksums[item.name] = file.submit(item.name, tensor)
                    self._on_tensor_written(item.name, tensor)
                    held += item.entry.nbytes
                    if held > _MAX_UNWAITED_BYTES:
                        file.wait()
                        held = 0
                if not stays:
                    file.wait()
                    held = 0

    def _copy_item(self, item: RankFileItem, target: torch.Tensor) -> Pending:
        return copy_to_host(self._view_entry(item.entry, target), item.get().detach())

    def _view_entry(self, entry: TensorEntry, data: torch.Tensor) -> torch.Tensor:
        """Return an entry's tensor as a view of `data`, which begins with its bytes."""
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        return data[: entry.nbytes].view(entry.dtype).view(entry.shape)

    def _entry_bytes(self, name: str, data: torch.Tensor, start: int) -> torch.Tensor:
        first = self._offsets[name] - start
        return data[first : first + self.entries[name].nbytes]

    def _resident_runs(self) -> Iterable[tuple[list[str], int, int]]:
        """Yield runs of resident entries that are adjacent in the file: names, first byte, and end."""
        names = sorted(self._items, key=lambda name: (self._offsets[name], self.entries[name].nbytes))
        for is_offloaded, run in groupby(
            names, key=lambda name: isinstance(self._items[name].storage, OffloadedStorage)
        ):
            found = list(run)
            if not is_offloaded:
                last = found[-1]
                yield found, self._offsets[found[0]], self._offsets[last] + self.entries[last].nbytes


def group_items_by_storage(items: Iterable[RankFileItem]) -> list[tuple[LazyStorage | None, list[RankFileItem]]]:
    """Group items by the storage handle that must be open for them.

    Items that need no handle come first, then the handles in order of appearance.
    """
    found: dict[int, tuple[LazyStorage | None, list[RankFileItem]]] = {}
    for item in items:
        found.setdefault(id(item.storage), (item.storage, []))[1].append(item)
    return sorted(found.values(), key=lambda one: one[0] is not None)
