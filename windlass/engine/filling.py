"""Optimizer states come back from a checkpoint, in whatever cut and format this optimizer keeps them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from windlass.base.errors import CheckpointError
from windlass.checkpoint import Drawer, FlatShard, Resting
from windlass.engine.states import Update, of_tenant, strange
from windlass.kernels.piece import scales_of
from windlass.optim import coded
from windlass.optim.cpu_optimizer import Format
from windlass.parallel.joining import select
from windlass.parallel.placement import Placement
from windlass.zero.chunk import Chunk, Tenancy
from windlass.zero.masters import Masters
from windlass.zero.residence import rests
from windlass.zero.sharded import ShardedModel
from windlass.zero.update import ElementwiseUpdate


@dataclass
class _Conversion:
    """A state that was saved in another format, or whose codes may have been cut elsewhere.

    Codes of a whole parameter, of which only a part is here, come whole, since their blocks are those of the whole.

    Attributes:
        came, scales: what was saved of the span, while its chunk is open.
    """

    tenancy: Tenancy
    key: str
    saved_as: Format
    kept_as: Format
    spans: list[tuple[int, int]]
    came: torch.Tensor | None = None
    scales: list[coded.Scales] = field(default_factory=list)

    @property
    def _placement(self) -> Placement:
        return self.tenancy.chunk.unit.placements[self.tenancy.index]

    @property
    def _comes_whole(self) -> bool:
        return self.saved_as.coded and not self._placement.whole

    @property
    def _range(self) -> tuple[int, int]:
        """Which elements are read: of the part that is here, or of the whole parameter."""
        if self._comes_whole:
            return 0, math.prod(self._placement.shape)
        return self.tenancy.start, self.tenancy.stop

    def begin(self) -> None:
        """Make memory for what was saved."""
        start, stop = self._range
        self.came = torch.empty(stop - start, dtype=self.saved_as.dtype, device="cpu")
        self.scales = []
        for first, last in self.spans:
            lowest, highest = coded.blocks_between(first, last, start, stop)
            self.scales.append(
                coded.Scales(first, last, lowest, torch.empty(highest - lowest, dtype=torch.float32, device="cpu"))
            )

    def shards(self, drawer: Drawer) -> Iterator[FlatShard]:
        """What is to be read, of the codes or values and of the scales."""
        where = f"state/{self.tenancy.name}/{self.key}"
        start, stop = self._range
        shape = self._placement.shape if self._comes_whole else self._placement.local_shape
        of = None if self._comes_whole else self._placement
        yield FlatShard(where, shape, start, Resting(stop - start, self.saved_as.dtype, drawer, self._came), of)
        for number, (first, last) in enumerate(self.spans):
            lowest, highest = coded.blocks_between(first, last, start, stop)
            resting = Resting(highest - lowest, torch.float32, drawer, partial(self._scales, number))
            yield FlatShard(f"{where}_scale/{first}", (scales_of(last - first),), lowest, resting)

    def _came(self) -> torch.Tensor:
        assert self.came is not None
        return self.came

    def _scales(self, number: int) -> torch.Tensor:
        return self.scales[number].values

    def finish(self, state: dict[str, Any]) -> None:
        """Put it into the state as this optimizer keeps it."""
        assert self.came is not None
        into, signed = state[self.key].view(-1), self.saved_as.signed
        if self._comes_whole:
            whole = torch.empty(self.came.numel(), dtype=torch.float32)
            coded.read(self.came, 0, self.scales, signed, whole)
            part = select(whole.view(self._placement.shape), self._placement).reshape(-1)
            values = part[self.tenancy.start : self.tenancy.stop]
            if self.kept_as.coded:
                coded.write(values, into, state[f"{self.key}_scale"], self.kept_as.signed)
            else:
                into.copy_(values)
        elif not self.saved_as.coded:
            coded.write(self.came, into, state[f"{self.key}_scale"], self.kept_as.signed)
        elif self.kept_as.coded:
            coded.recode(self.came, self.tenancy.start, self.scales, signed, into, state[f"{self.key}_scale"])
        else:
            coded.read(self.came, self.tenancy.start, self.scales, signed, into)
        self.came, self.scales = None, []


class ChunkToFill:
    """A chunk whose masters, and states if there are to be any, are loaded over.

    Attributes:
        shards: what is read into its states.
        opened: it was, so that it is as it shall be.
    """

    def __init__(self, masters: Masters, chunk: Chunk) -> None:
        self._masters, self._chunk = masters, chunk
        self._likes: dict[Any, dict[str, torch.Tensor]] = {}
        self._loose: dict[Any, dict[str, Any]] = {}  # counts and values, by tenant
        self._conversions: list[_Conversion] = []
        self._with_states = False
        self.shards: list[FlatShard] = []
        self.opened = False

    @property
    def converts(self) -> bool:
        """Whether a state is kept in another format than it was saved in, or may be."""
        return bool(self._conversions)

    def expect(self, tenancy: Tenancy, loose: dict[str, Any]) -> None:
        """A tenant's states shall be those of the checkpoint; `loose` are counts, read before, and plain values."""
        self._with_states = True
        self._likes[tenancy.tenant], self._loose[tenancy.tenant] = {}, loose

    def take(
        self, tenancy: Tenancy, key: str, like: torch.Tensor, shape: tuple[int, ...], of: Placement | None = None
    ) -> None:
        """Read the state `key` straight into a tensor like `like`, which is all or a span of one of `shape`, which is
        the part `of` the whole one."""
        residence = self._masters.residence
        self._likes[tenancy.tenant][key] = like
        resting = Resting(like.numel(), like.dtype, self, partial(of_tenant, residence, tenancy, key))
        self.shards.append(FlatShard(f"state/{tenancy.name}/{key}", shape, tenancy.start, resting, of))

    def convert(self, conversion: _Conversion) -> None:
        """Read a state in the format in which it was saved, to be kept in another."""
        tenancy, kept = conversion.tenancy, conversion.kept_as
        likes = self._likes[tenancy.tenant]
        likes[conversion.key] = torch.empty(tenancy.shape, dtype=kept.dtype, device="meta")
        if kept.coded:
            scales = scales_of(tenancy.stop - tenancy.start)
            likes[f"{conversion.key}_scale"] = torch.empty(scales, dtype=torch.float32, device="meta")
        self._conversions.append(conversion)
        self.shards += conversion.shards(self)

    @property
    def stays(self) -> bool:
        """As `Drawer`."""
        return False

    @contextmanager
    def open(self) -> Iterator[None]:
        """As `Drawer`."""
        self.opened = True
        residence = self._masters.residence
        with self._masters.opened(self._chunk, self._likes if self._with_states else None, changes=True):
            for tenant, loose in self._loose.items():
                _set_loose(residence.states[tenant], loose)
            for conversion in self._conversions:
                conversion.begin()
            yield
            for conversion in self._conversions:
                conversion.finish(residence.states[conversion.tenancy.tenant])


def _set_loose(state: dict[str, Any], loose: dict[str, Any]) -> None:
    """Counts and values as they were saved; a count that is there keeps its dtype and device."""
    for key in [key for key, value in state.items() if key not in loose and not rests(value)]:
        del state[key]
    for key, value in loose.items():
        now = state.get(key)
        if isinstance(value, torch.Tensor) and isinstance(now, torch.Tensor) and now.dim() == 0:
            now.copy_(value)
        else:
            state[key] = value.clone() if isinstance(value, torch.Tensor) else value


def incoming(
    model: ShardedModel,
    about: dict[str, Any],
    saved: dict[str, torch.Tensor],
    drawer_of: Callable[[Chunk], ChunkToFill],
    counts: dict[str, torch.Tensor],
) -> None:
    """Tell each chunk which states it shall read.

    Args:
        about: what the checkpoint says of states.
        saved: every tensor of the checkpoint by name, without memory.
        counts: takes those that are to be read before, by name.

    Raises:
        CheckpointError: a state that this optimizer cannot have.
    """
    update = model.update
    assert update is not None
    formats = update.formats()
    for tenancy in update.tenancies():
        drawer = drawer_of(tenancy.chunk)
        values = about.get("values", {}).get(tenancy.name, {})
        loose = {key: copy.deepcopy(value) for key, value in values.items()}
        drawer.expect(tenancy, loose)
        for key, kind in about.get("states", {}).get(tenancy.name, {}).items():
            where, form = f"state/{tenancy.name}/{key}", kind.split()[0]
            if form == "value":
                continue
            if where not in saved:
                raise CheckpointError(f"the checkpoint says that it holds {where!r}, and does not; load another one")
            if form == "whole" and saved[where].dim() == 0:
                count = torch.empty((), dtype=saved[where].dtype, device=tenancy.chunk.device)
                loose[key] = counts.setdefault(where, count)
                continue
            kept = formats.get(id(tenancy.parameter), {}).get(key)
            _expect(update, drawer, tenancy, key, form, saved[where], kept, about.get("spans", {}))


def _expect(
    update: Update,
    drawer: ChunkToFill,
    tenancy: Tenancy,
    key: str,
    form: str,
    saved: torch.Tensor,
    kept: Format | None,
    spans: dict[str, list[list[int]]],
) -> None:
    """Tell a chunk of one state that rests there."""
    if form == "whole":
        if isinstance(update, ElementwiseUpdate):
            raise CheckpointError(strange(update, tenancy, key, tuple(saved.shape)))
        drawer.take(tenancy, key, saved, tuple(saved.shape))
    elif form in ("signed", "unsigned"):
        placement = tenancy.chunk.unit.placements[tenancy.index]
        start, stop = (tenancy.start, tenancy.stop) if placement.whole else (0, math.prod(placement.shape))
        met = [(a, b) for a, b in spans.get(tenancy.name, ()) if a < stop and start < b]
        coded.require_covered(met, start, stop, f"the state {key!r} of {tenancy.name!r}")
        saved_as = Format(saved.dtype, form == "signed")
        drawer.convert(
            _Conversion(tenancy, key, saved_as, kept or Format(tenancy.chunk.state_dtype, saved_as.signed), met)
        )
    elif kept is not None and kept.coded:
        drawer.convert(_Conversion(tenancy, key, Format(torch.float32, kept.signed), kept, []))
    else:
        now = update.residence.described(tenancy.chunk, tenancy.tenant).get(key)
        like = torch.empty(tenancy.shape, dtype=_dtype(update, tenancy, now, kept, saved), device="meta")
        unit = tenancy.chunk.unit
        drawer.take(tenancy, key, like, tuple(unit.shapes[tenancy.index]), unit.placements[tenancy.index])


def _dtype(update: Update, tenancy: Tenancy, now: Any, kept: Format | None, saved: torch.Tensor) -> torch.dtype:
    """Of a state with one value an element: as the rule keeps it, as it has it now, or as it was saved."""
    if kept is not None:
        return kept.dtype
    if isinstance(now, torch.Tensor):
        return now.dtype
    wide = isinstance(update, ElementwiseUpdate) and saved.is_floating_point()
    return tenancy.chunk.state_dtype if wide else saved.dtype
