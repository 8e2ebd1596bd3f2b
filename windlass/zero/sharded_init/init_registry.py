"""Registry of the parameters of a model under construction, of which only the most recently used are unsharded.

[Note: unsharded while recent] Initialisers need full values. So a parameter stays unsharded after its construction, and
is unsharded again when it is used, until newer parameters need the memory. Then the oldest parameters are sharded, from
the values of rank 0. Besides the parameters of the running call, about as many bytes stay unsharded as the largest
parameter has, or 1 MiB if that is more.

A parameter whose memory is referenced elsewhere (a view, `.data` in a variable) stays unsharded, because a write
through that reference must not be lost. References differ between ranks, because the garbage collector runs at
different times. So rank 0 decides which parameters are sharded and sends the list to the other ranks. The time of this
decision depends on sizes alone, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from windlass.comm.rank_group import RankGroup
from windlass.zero import parameter_registry
from windlass.zero.core.sharded_parameter import ShardedParameter
from windlass.zero.sharded_init import initial_shard
from windlass.zero.sharded_init.initial_shard import ShardedInit, StoreShard

_FLOOR = 1 << 20  # bytes that may always stay unsharded, so that small models are not sharded again and again
_MESSAGE_ENTRIES = 32  # maximum number of parameters to shard per message
# Counts the references to a storage. torch has no public function for this; if None, references are ignored.
_USES = getattr(torch._C, "_storage_Use_Count", None)


class InitRegistry:
    """Registry that bounds the memory of unsharded parameters, by sharding the oldest ones.

    Args:
        group: Ranks over which parameters are sharded.
        store_shard: Stores a shard on its tier.
        device: Device of the messages that list the parameters to shard.
        provides_stubs: True if `state_dict()` may return stubs for the parameters (see `StateDictStub`).
    """

    def __init__(
        self, group: RankGroup, store_shard: StoreShard, device: torch.device, provides_stubs: bool = False
    ) -> None:
        self.group, self.store_shard, self._device, self._provides_stubs = group, store_shard, device, provides_stubs
        # By id: the parameter and its number in the order of construction.
        self._numbers: dict[int, tuple[ReferenceType[nn.Parameter], int]] = {}
        self._labels: dict[int, str] = {}
        self._whole: dict[int, ReferenceType[nn.Parameter]] = {}  # unsharded parameters by number, oldest first
        self._limit = _FLOOR
        self._kept = self._added = 0  # bytes still unsharded after rank 0's last decision; bytes unsharded since then
        self._alone = _uses(torch.empty(1))

    def register(self, parameter: nn.Parameter, label: str) -> None:
        """Register an unsharded parameter that was constructed, or added to the model from outside. Collective.

        Does nothing if the parameter is registered already, or cannot be sharded.
        """
        if self.is_registered(parameter) or not _can_be_sharded(parameter):
            return
        self._note(parameter, label)
        self._make_room([parameter], 0)

    def assign(self, parameter: nn.Parameter, label: str, shard: torch.Tensor, like: torch.Tensor) -> None:
        """Register a parameter whose shard is known without its full values.

        Args:
            shard: This rank's shard, flat.
            like: Tensor of the parameter's shape, strides, dtype and device.
        """
        number = self._number(parameter, label)
        init_shard = ShardedInit(self._labels[number], like, self.group, self.store_shard, number, self._provides_stubs)
        init_shard.shard = shard
        initial_shard.shard_parameter(parameter, init_shard)

    def is_registered(self, parameter: nn.Parameter) -> bool:
        """Return True if the parameter is registered."""
        entry = self._numbers.get(id(parameter))
        return entry is not None and entry[0]() is parameter

    def unshard(self, parameter: nn.Parameter, init_shard: ShardedInit, together: Sequence[torch.Tensor]) -> bool:
        """Unshard `parameter`, after older ones are sharded to make room, and return True. Collective.

        Args:
            init_shard: The parameter's shard.
            together: Tensors of the running call, which stay unsharded.
        """
        size = init_shard.numel * init_shard.dtype.itemsize
        self._make_room(together, size)
        full = init_shard.full_value()
        initial_shard.finish_parameter(parameter)
        parameter.data = full
        self._note(parameter, init_shard.label)
        return True

    def close(self) -> None:
        """Shard all parameters that are still unsharded. Collective."""
        while self._agree(0, [], force=True):
            pass

    def _number(self, parameter: nn.Parameter, label: str) -> int:
        """Return the parameter's number, equal on all ranks. A new parameter gets the next number."""
        if not self.is_registered(parameter):
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
        """Shard the oldest parameters, selected by rank 0, until at most `limit` bytes are unsharded. Collective.

        Args:
            together: Tensors of the running call, which stay unsharded.
            force: Shard all parameters, also referenced ones.

        Returns:
            True if more parameters may have to be sharded, because the message from rank 0 was full.
        """
        received = torch.zeros(2 + 3 * _MESSAGE_ENTRIES, dtype=torch.int64)
        if self.group.index == 0:
            chosen, kept = self._choose(limit, {id(tensor) for tensor in together}, force=force)
            received[0], received[1] = len(chosen), kept
            for place, (number, parameter) in enumerate(chosen):
                received[2 + 3 * place] = number
                received[3 + 3 * place], received[4 + 3 * place] = parameter.numel(), parameter.element_size()
        received = received.to(self._device)
        self.group.broadcast(received)
        count, self._kept, *numbers = (int(x) for x in received.tolist())
        self._added = 0
        self._shard([(numbers[3 * i], numbers[3 * i + 1], numbers[3 * i + 2]) for i in range(count)])
        return count == _MESSAGE_ENTRIES

    def _choose(self, limit: int, together: set[int], *, force: bool) -> tuple[list[tuple[int, nn.Parameter]], int]:
        alive = [(number, p) for number, reference in self._whole.items() if (p := reference()) is not None]
        kept = sum(p.numel() * p.element_size() for _, p in alive)
        chosen: list[tuple[int, nn.Parameter]] = []
        for number, parameter in alive:
            if not force and (kept <= limit or id(parameter) in together or _uses(parameter) > self._alone):
                continue
            chosen.append((number, parameter))
            kept -= parameter.numel() * parameter.element_size()
            if len(chosen) == _MESSAGE_ENTRIES:
                break
        return chosen, kept

    def _shard(self, entries: list[tuple[int, int, int]]) -> None:
        """Shard the parameters in `entries`: `(number, elements, bytes per element)`. Collective.

        This rank takes part in the scatter of a parameter even if it has freed the parameter already.
        """
        if not entries:
            return
        parameters = [self._whole.pop(number)() for number, _, _ in entries]
        items: list[tuple[torch.Tensor | None, int, torch.dtype]] = []
        for parameter, (_, numel, itemsize) in zip(parameters, entries, strict=True):
            dtype = parameter.dtype if parameter is not None else _DTYPE_OF_SIZE[itemsize]
            items.append((initial_shard.flat_of(parameter) if parameter is not None else None, numel, dtype))
        device = next((p.device for p in parameters if p is not None), self._device)
        shards = initial_shard.scatter(self.group, 0, items, device)
        for parameter, piece, (number, _, _) in zip(parameters, shards, entries, strict=True):
            if parameter is not None:
                init_shard = ShardedInit(
                    self._labels[number], parameter.detach(), self.group, self.store_shard, number, self._provides_stubs
                )
                init_shard.shard = piece
                initial_shard.shard_parameter(parameter, init_shard)


# A rank that has freed a parameter still receives its shard: any dtype of the right size will do.
_DTYPE_OF_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.float32, 8: torch.float64, 16: torch.complex128}


def _can_be_sharded(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, ShardedParameter) or is_lazy(parameter) or parameter.device.type == "meta":
        return False
    return (
        parameter.layout == torch.strided
        and parameter_registry.find(parameter) is None
        and initial_shard.find(parameter) is None
    )


def _uses(tensor: torch.Tensor) -> int:
    """Return the number of references to the tensor's storage, plus a constant; 0 if torch has no such count."""
    return int(_USES(tensor.untyped_storage()._cdata)) if _USES is not None else 0
