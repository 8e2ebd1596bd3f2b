"""The data file of one rank: written at once, or from a copy of what was in memory, while training goes on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from windlass.base.memory import copy_to_host
from windlass.base.pending import Pending
from windlass.checkpoint.state import AwayDrawer, Drawer
from windlass.checkpoint.tensor_file import Entry, TensorFileWriter, crc32, laid_out
from windlass.storage.space import PAGE, page_up

_HELD = 256 << 20  # bytes sent before any of them is awaited: copies of what is elsewhere would pile up


@dataclass(frozen=True)
class Item:
    """An entry of the file; `get` gives the tensor while its drawer is open."""

    name: str
    entry: Entry
    get: Callable[[], torch.Tensor]
    drawer: Drawer | None = None


class RankFile:
    """What this rank writes.

    [Note: saving while training goes on] A save that does not block copies what is in memory into a part of host memory
    that lies as the file will: from there whole pages go to the disk without another copy. What rests on disk is not
    copied: it is read drawer by drawer, and who is to change a drawer before that waits for its turn, which comes next
    (`AwayDrawer`). So the memory is that of what this rank writes from memory, kept for the next save, and one drawer.

    Args:
        items: in the order of the file, but for the width of their dtypes.

    Attributes:
        seen: called with the name of each entry and the tensor that is written, before that may change.
    """

    def __init__(self, path: Path, items: Sequence[Item]) -> None:
        self.seen: Callable[[str, torch.Tensor], object] = lambda name, tensor: None
        self.path, self._items = path, {item.name: item for item in items}
        self.entries = {item.name: item.entry for item in items}
        self._laid = laid_out(self.entries)
        self._at = self._laid[1]
        self._written: dict[str, int] | None = None
        self._runs: list[tuple[list[str], int, torch.Tensor]] = []  # names, offset in the file, copied bytes

    @property
    def nbytes_in_memory(self) -> int:
        """What `copy` needs at most."""
        return sum(page_up(stop - start) + 2 * PAGE for _, start, stop in self._runs_in_memory())

    def copy(self, memory: torch.Tensor) -> None:
        """Take what is in memory now: `write` will write that, whatever becomes of it.

        Args:
            memory: `[bytes]` uint8 on the CPU, at least `nbytes_in_memory`; not to be touched until `write` is over.
        """
        at, copies = -memory.data_ptr() % PAGE, list[Pending]()
        for names, start, stop in self._runs_in_memory():
            at += start % PAGE  # as it lies in the file
            data = memory[at : at + stop - start]
            at = page_up(at + stop - start)
            self._runs.append((names, start, data))
            wanted = [self._items[name] for name in names]
            for drawer, items in by_drawer(wanted):
                with drawer.open() if drawer is not None else nullcontext():
                    copies += [self._copy(item, data[self._at[item.name] - start :]) for item in items]
                    for copy in copies:  # they are made from what the drawer holds
                        copy.wait()
                    copies.clear()
        for drawer in {id(item.drawer): item.drawer for item in self._items.values()}.values():
            if isinstance(drawer, AwayDrawer):
                drawer.hold()

    def write_ahead(self) -> None:
        """Write now; `write` will say what came of it."""
        self._written = self.write()

    def write(self) -> dict[str, int]:
        """Writes all of it, durably; the crc32 of each entry. Drawers of `AwayDrawer` are over afterwards, however it
        ends."""
        if self._written is not None:
            return self._written
        sums: dict[str, int] = {}
        copied = {name for names, _, _ in self._runs for name in names}
        drawers = by_drawer(item for item in self._items.values() if item.name not in copied)
        try:
            if self._items:
                with TensorFileWriter(self.path, self.entries, self._laid) as file:
                    for names, start, data in self._runs:
                        file.send_bytes(names, start, data)
                    self._write_drawers(file, drawers, sums)
                    for names, start, data in self._runs:
                        sums |= {name: crc32(self._part(name, data, start)) for name in names}
                        for name in names:
                            self.seen(name, self._place(self.entries[name], self._part(name, data, start)))
        finally:
            self._runs = []
            self.let_go()
        return sums

    def let_go(self) -> None:
        """Nobody waits for this any more."""
        for item in self._items.values():
            if isinstance(item.drawer, AwayDrawer):
                item.drawer.over()

    def _write_drawers(
        self, file: TensorFileWriter, drawers: list[tuple[Drawer | None, list[Item]]], sums: dict[str, int]
    ) -> None:
        # An update begins with what comes last in the model.
        left = [one for one in drawers if not isinstance(one[0], AwayDrawer)]
        left += reversed([one for one in drawers if isinstance(one[0], AwayDrawer)])
        held = 0
        while left:
            wanted = [one for one in left if isinstance(one[0], AwayDrawer) and one[0].wanted]
            drawer, items = one = wanted[0] if wanted else left[0]
            left.remove(one)
            stays = drawer is None or drawer.stays
            with drawer.open() if drawer is not None else nullcontext():
                for item in items:
                    tensor = item.get()
                    sums[item.name] = file.send(item.name, tensor)
                    self.seen(item.name, tensor)
                    held += item.entry.nbytes
                    if held > _HELD:
                        file.settle()
                        held = 0
                if not stays:
                    file.settle()
                    held = 0
            if isinstance(drawer, AwayDrawer):
                drawer.over()

    def _copy(self, item: Item, target: torch.Tensor) -> Pending:
        return copy_to_host(self._place(item.entry, target), item.get().detach())

    def _place(self, entry: Entry, data: torch.Tensor) -> torch.Tensor:
        """An entry's tensor, where its bytes begin `data`."""
        if not entry.nbytes:
            return torch.empty(entry.shape, dtype=entry.dtype, device="cpu")
        return data[: entry.nbytes].view(entry.dtype).view(entry.shape)

    def _part(self, name: str, data: torch.Tensor, start: int) -> torch.Tensor:
        first = self._at[name] - start
        return data[first : first + self.entries[name].nbytes]

    def _runs_in_memory(self) -> Iterable[tuple[list[str], int, int]]:
        """Neighbours in the file that are in memory: names, first byte and the one after the last."""
        names = sorted(self._items, key=lambda name: (self._at[name], self.entries[name].nbytes))
        for away, run in groupby(names, key=lambda name: isinstance(self._items[name].drawer, AwayDrawer)):
            found = list(run)
            if not away:
                last = found[-1]
                yield found, self._at[found[0]], self._at[last] + self.entries[last].nbytes


def by_drawer(items: Iterable[Item]) -> list[tuple[Drawer | None, list[Item]]]:
    """Items by the drawer that must be open for them: first those that need none, then as drawers first appear."""
    found: dict[int, tuple[Drawer | None, list[Item]]] = {}
    for item in items:
        found.setdefault(id(item.drawer), (item.drawer, []))[1].append(item)
    return sorted(found.values(), key=lambda one: one[0] is not None)
