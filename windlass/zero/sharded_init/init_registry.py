"""Registry of the parameters that are unsharded while a model is being built: the most recently created or used
ones.

[Note: whole while recent] Initialisers need full values. So a parameter stays unsharded after its construction,
and is unsharded again when it is used, until newer parameters need the memory. Then the oldest are sharded, from
the values of rank 0. Besides the parameters of the running call, at most about one parameter of the largest size
is kept unsharded. A parameter whose memory is referenced elsewhere (a view, `.data` in a variable) stays
unsharded, because a write through that reference must not be lost. References differ between ranks, because the
garbage collector runs at different times. So rank 0 decides which parameters are sharded and sends the list to
the others; the time of this decision depends on sizes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from windlass.comm.rank_group import RankGroup
from windlass.zero.core import parameter_registry
from windlass.zero.core.sharded_parameter import ShardedParameter
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import Home, ShardedInit

_FLOOR = 1 << 20  # bytes: less than this is always kept whole, or small models would be cut a hundred times
_AT_ONCE = 32  # parameters to shard, per message
_USES = getattr(torch._C, "_storage_Use_Count", None)  # nothing public tells; without it nothing counts as seen


class InitRegistry:
    """Keeps what is whole small.

    Args:
        group: the ranks.
        home: where pieces are kept.
        device: on which the ranks tell each other what is cut.
        lends_names: whether `state_dict()` may give stubs for what is born here.
    """

    def __init__(self, group: RankGroup, home: Home, device: torch.device, lends_names: bool = False) -> None:
        self.group, self.home, self._device, self._lends = group, home, device, lends_names
        self._numbers: dict[int, tuple[ReferenceType[nn.Parameter], int]] = {}  # by id: in the order of their birth
        self._labels: dict[int, str] = {}
        self._whole: dict[int, ReferenceType[nn.Parameter]] = {}  # by number, the oldest first
        self._limit = _FLOOR
        self._kept = self._added = 0  # bytes that were whole when the ranks last agreed, and that became so since
        self._alone = _uses(torch.empty(1))

    def register(self, parameter: nn.Parameter, label: str) -> None:
        """A parameter was made, or came into the model from outside. Collective."""
        if self.knows(parameter) or not _can_be_cut(parameter):
            return
        self._note(parameter, label)
        self._make_room([parameter], 0)

    def assign(self, parameter: nn.Parameter, label: str, cut: torch.Tensor, like: torch.Tensor) -> None:
        """A parameter whose piece is known without its whole values."""
        number = self._number(parameter, label)
        birth = ShardedInit(self._labels[number], like, self.group, self.home, number, self._lends)
        birth.shard = cut
        initial_shard.shard_parameter(parameter, birth)

    def knows(self, parameter: nn.Parameter) -> bool:
        """Return True if the parameter was admitted."""
        entry = self._numbers.get(id(parameter))
        return entry is not None and entry[0]() is parameter

    def bring(self, parameter: nn.Parameter, birth: ShardedInit, together: Sequence[torch.Tensor]) -> bool:
        """Make a parameter that is touched whole again; those in `together` stay as they are. Collective."""
        size = birth.numel * birth.dtype.itemsize
        self._make_room(together, size)
        whole = birth.full_value()
        initial_shard.finish_parameter(parameter)
        parameter.data = whole
        self._note(parameter, birth.label)
        return True

    def close(self) -> None:
        """Cut all that is still whole. Collective."""
        while self._agree(0, [], force=True):
            pass

    def _number(self, parameter: nn.Parameter, label: str) -> int:
        """In the order of their birth, which is one on all ranks."""
        if not self.knows(parameter):
            number = len(self._labels)
            self._numbers[id(parameter)] = ref(parameter), number
            self._labels[number] = label
        return self._numbers[id(parameter)][1]

    def _note(self, parameter: nn.Parameter, label: str) -> None:
        number, size = self._number(parameter, label), parameter.numel() * parameter.element_size()
        self._whole[number] = ref(parameter)
        self._added += size
        self._limit = max(self._limit, size)

    def _make_room(self, together: Sequence[torch.Tensor], needed: int) -> None:
        if self._kept + self._added + needed > self._limit:
            while self._agree(self._limit // 2, together, force=False):
                pass

    def _agree(self, limit: int, together: Sequence[torch.Tensor], *, force: bool) -> bool:
        """Rank 0 says what is cut down to `limit` bytes, and all cut it. Returns whether there is more."""
        told = torch.zeros(2 + 3 * _AT_ONCE, dtype=torch.int64)
        if self.group.index == 0:
            chosen, kept = self._choose(limit, {id(tensor) for tensor in together}, force=force)
            told[0], told[1] = len(chosen), kept
            for place, (number, parameter) in enumerate(chosen):
                told[2 + 3 * place] = number
                told[3 + 3 * place], told[4 + 3 * place] = parameter.numel(), parameter.element_size()
        told = told.to(self._device)
        self.group.broadcast(told)
        count, self._kept, *numbers = (int(x) for x in told.tolist())
        self._added = 0
        self._cut([(numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]) for i in range(count)])
        return count == _AT_ONCE

    def _choose(self, limit: int, together: set[int], *, force: bool) -> tuple[list[tuple[int, nn.Parameter]], int]:
        alive = [(number, p) for number, reference in self._whole.items() if (p := reference()) is not None]
        kept = sum(p.numel() * p.element_size() for _, p in alive)
        chosen: list[tuple[int, nn.Parameter]] = []
        for number, parameter in alive:
            if not force and (kept <= limit or id(parameter) in together or _uses(parameter) > self._alone):
                continue
            chosen.append((number, parameter))
            kept -= parameter.numel() * parameter.element_size()
            if len(chosen) == _AT_ONCE:
                break
        return chosen, kept

    def _cut(self, entries: list[tuple[int, int, int]]) -> None:
        """Cut these: number, elements, bytes of an element. One that is gone here already takes part all the same."""
        if not entries:
            return
        parameters = [self._whole.pop(number)() for number, _, _ in entries]
        items: list[tuple[torch.Tensor | None, int, torch.dtype]] = []
        for parameter, (_, numel, itemsize) in zip(parameters, entries, strict=True):
            dtype = parameter.dtype if parameter is not None else _DTYPE_OF_SIZE[itemsize]
            items.append((initial_shard.flat_of(parameter) if parameter is not None else None, numel, dtype))
        device = next((p.device for p in parameters if p is not None), self._device)
        pieces = initial_shard.scatter(self.group, 0, items, device)
        for parameter, piece, (number, _, _) in zip(parameters, pieces, entries, strict=True):
            if parameter is not None:
                birth = ShardedInit(
                    self._labels[number], parameter.detach(), self.group, self.home, number, self._lends
                )
                birth.shard = piece
                initial_shard.shard_parameter(parameter, birth)


_DTYPE_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}


def _can_be_cut(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, ShardedParameter) or is_lazy(parameter) or parameter.device.type == "meta":
        return False
    return (
        parameter.layout == torch.strided
        and parameter_registry.find(parameter) is None
        and initial_shard.find(parameter) is None
    )


def _uses(tensor: torch.Tensor) -> int:
    """Return the number of tensors that share its memory, plus a constant."""
    return int(_USES(tensor.untyped_storage()._cdata)) if _USES is not None else 0
