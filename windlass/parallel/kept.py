"""Tensors that a forward saves for its backward, moved to another place in between.

[Note: kept activations] A saved tensor is known by the elements of the storage it shows (`geometry`), not by the Python
object: autograd saves views of views, and the same hidden states again and again. What one storage holds there at one
version moves once, however often and in whichever shape it is saved. Fetches run ahead along the order of saving,
backwards, by as many bytes as were just asked for; what was saved several times is held until it was asked for as
often, as long as that takes no more than twice the largest tensor. Parameters and their views never move, nor does
what is small.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple
from weakref import ReferenceType, WeakValueDictionary, ref

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from windlass.base.autograd import at_end_of_backward, current_backward
from windlass.base.errors import ModelError
from windlass.parallel.copies import Copy
from windlass.parallel.geometry import Geometry, Key, flat_of, geometry_of, key_of
from windlass.parallel.places import Home, Place, Stay

SMALLEST = 4096
"""Bytes below which a tensor stays where it is: moving it costs more than it frees."""


@dataclass
class Counts:
    """What was kept, in bytes: `now` at this moment by home, and since the last `reset` the rest.

    `stayed`: left on the device, being small or of a kind that does not move. `again`: saved once more, at no cost.
    `fetched`: brought back; `ahead`: of those, begun before they were asked for.
    """

    now: Counter[Home] = field(default_factory=Counter)
    moved: int = 0
    stayed: int = 0
    again: int = 0
    fetched: int = 0
    ahead: int = 0

    def reset(self) -> None:
        """Begin to count anew; what is kept now stays counted."""
        self.moved = self.stayed = self.again = self.fetched = self.ahead = 0


class Kept:
    """A flat tensor in its place. The graph holds it; when nothing of the graph needs it any more, it goes."""

    def __init__(self, flat: torch.Tensor, storage: StorageWeakRef, place: Place, counts: Counts) -> None:
        self.nbytes = flat.nbytes
        self.before: ReferenceType[Kept] | None = None  # the one that was kept before this
        self._storage = storage  # its number is ours, so that `key_of` finds nothing else under it
        self._version, self._counts, self._place = flat._version, counts, place
        self._stay: Stay = place.put(flat)
        self._source: torch.Tensor | None = None if place.collective or self._stay.left else flat
        self._spoiled: ModelError | None = None
        self.uses = 0  # how often it was saved
        self._asked = -1, 0  # the backward in which it was asked for last, and how often in that one
        self._coming: Copy | None = None
        self._last: ReferenceType[torch.Tensor] | None = None
        counts.now[place.home] += self.nbytes
        counts.moved += self.nbytes

    def __del__(self) -> None:
        if hasattr(self, "_last"):  # there is nothing to take off where the place had no room
            self._counts.now[self._place.home] -= self.nbytes

    def settle(self, *, wait: bool) -> bool:
        """Whether the way to the place is over; with `wait`, it is."""
        if wait:
            self._stay.wait()
        over = self._stay.poll()
        self._look_at_source()
        return over

    def fetch(self) -> int:
        """Begin to bring it back, if it is away; the bytes that are on their way."""
        if self._place.collective or self._coming is not None or self._asked[0] == current_backward():
            return 0
        if self._here() is not None:
            return 0
        self._coming = self._stay.fetch()
        self._counts.ahead += self.nbytes
        return self.nbytes

    def asked(self) -> int:
        """Note that somebody asked for it; how often that happened in the backward that runs."""
        number, times = self._asked
        self._asked = current_backward(), times + 1 if number == current_backward() else 1
        return self._asked[1]

    def value(self) -> torch.Tensor:
        """The flat tensor, on the device.

        Raises:
            StorageError: it can't be read back.
            ModelError: it was changed in place while it was on its way.
        """
        found = self._here()
        if found is not None:
            return found
        coming, self._coming = self._coming or self._stay.fetch(), None
        coming.wait()
        self._counts.fetched += self.nbytes
        if not self._place.collective:  # whether Python still has an object may differ between ranks
            self._last = ref(coming.value)
        return coming.value

    def _here(self) -> torch.Tensor | None:
        """It, if it is on the device anyway: not yet gone, or back and in use."""
        self._look_at_source()
        if self._spoiled is not None:
            raise self._spoiled
        return self._source if self._source is not None else (self._last() if self._last is not None else None)

    def _look_at_source(self) -> None:
        """Let the source go once it has left. One that was changed before can have left in any state."""
        if self._source is None:
            return
        if self._source._version != self._version:
            self._spoiled = _changed(self._source, self._version)
        if self._stay.left:
            self._source = None


class Moved(NamedTuple):
    """What autograd holds instead of a tensor that moved."""

    kept: Kept
    geometry: Geometry


class Stays(NamedTuple):
    """What autograd holds instead of a tensor that does not move: torch checks versions only where no hooks are."""

    tensor: torch.Tensor
    version: int


class Keeper:
    """The two functions that `torch.autograd.graph.saved_tensors_hooks` takes, for one place.

    Args:
        place: where tensors go.
        smallest: bytes below which they do not.
    """

    def __init__(self, place: Place, smallest: int = SMALLEST) -> None:
        self.place, self.smallest = place, smallest
        self.counts = Counts()
        self._known: WeakValueDictionary[Key, Kept] = WeakValueDictionary()
        self._leaving: deque[ReferenceType[Kept]] = deque()
        self._newest: ReferenceType[Kept] | None = None
        self._held: dict[int, torch.Tensor] = {}  # fetched, and wanted again in this backward; oldest first
        self._largest = 0  # bytes of the largest tensor that was kept
        self._backwards: set[int] = set()

    def pack(self, tensor: torch.Tensor) -> Moved | Stays:
        """Take what autograd is about to save."""
        geometry = geometry_of(tensor) if self.moves(tensor) else None
        if geometry is None or geometry.numel * tensor.element_size() < self.smallest:
            if not _of_parameter(tensor):
                self.counts.stayed += tensor.nbytes
            return Stays(tensor if tensor.is_leaf else tensor.detach(), tensor._version)
        storage = StorageWeakRef(tensor.untyped_storage())
        key = key_of(tensor, geometry, storage)
        kept = self._known.get(key)
        if kept is None:
            kept = self._known[key] = self._keep(flat_of(tensor, geometry), storage)
        else:
            self.counts.again += kept.nbytes
        kept.uses += 1
        return Moved(kept, geometry)

    def unpack(self, packed: Moved | Stays) -> torch.Tensor:
        """Give it back.

        Raises:
            ModelError: it was changed in place in the meantime.
            StorageError: it can't be read back.
        """
        if isinstance(packed, Stays):
            if packed.tensor._version != packed.version:
                raise _changed(packed.tensor, packed.version)
            return packed.tensor
        kept, geometry = packed
        flat = kept.value()
        self._hold(kept, flat)
        self._fetch_ahead(kept)
        return geometry.restored(flat)

    def expect(self, tensors: Iterable[torch.Tensor]) -> None:
        """A checkpointed call is about to save its inputs `tensors`; those without a gradient are shared by many."""
        sizes = {True: 0, False: 0}
        for tensor in tensors:
            geometry = geometry_of(tensor) if self.moves(tensor) else None
            nbytes = 0 if geometry is None else geometry.numel * tensor.element_size()
            sizes[tensor.requires_grad] += nbytes if nbytes >= self.smallest else 0
        self.place.expect(sizes[True], sizes[False])

    def moves(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` is of a kind that goes to the place; its size is not asked."""
        return (
            type(tensor) is torch.Tensor
            and tensor.layout is torch.strided
            and tensor.device.type != "meta"
            and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
            and not _of_parameter(tensor)
            and self.place.takes(tensor)
        )

    def _keep(self, flat: torch.Tensor, storage: StorageWeakRef) -> Kept:
        kept = Kept(flat, storage, self.place, self.counts)
        self._largest = max(self._largest, kept.nbytes)
        kept.before, self._newest = self._newest, ref(kept)
        self._leaving.append(self._newest)
        while self._leaving:
            oldest = self._leaving[0]()
            if oldest is not None and not oldest.settle(wait=len(self._leaving) > self.place.under_way):
                break
            self._leaving.popleft()
        return kept

    def _hold(self, kept: Kept, flat: torch.Tensor) -> None:
        """Keep what was saved several times (a mask that all layers share) until the last of them asked for it."""
        number, times = current_backward(), kept.asked()
        self._held.pop(id(kept), None)
        if times >= kept.uses or self.place.collective or number < 0:
            return
        if number not in self._backwards:
            self._backwards.add(number)
            at_end_of_backward(lambda: self._let_go(number))
        self._held[id(kept)] = flat
        while sum(each.nbytes for each in self._held.values()) > 2 * self._largest:
            self._held.pop(next(iter(self._held)))

    def _let_go(self, number: int) -> None:
        self._backwards.discard(number)
        self._held.clear()

    def _fetch_ahead(self, kept: Kept) -> None:
        budget, before = kept.nbytes, kept.before
        while budget > 0 and before is not None and (other := before()) is not None:
            budget -= other.fetch() or other.nbytes
            before = other.before


def _of_parameter(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


def _changed(tensor: torch.Tensor, version: int) -> ModelError:
    return ModelError(
        f"a tensor of shape {tuple(tensor.shape)} that the backward needs was changed in place: saved at version "
        f"{version}, it is at {tensor._version}; write `x = x + y` instead of `x += y` after its use"
    )
