"""Hidden states between layers that are cut along the sequence: whose tokens are where, in the forward that runs now.

Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", arXiv:2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from windlass.base.autograd import current_backward
from windlass.comm.axis import Axis
from windlass.parallel.exchanges import show, take
from windlass.parallel.placement import spread
from windlass.parallel.tensor.draws import Draws, common_seed, generator_of
from windlass.parallel.tensor.entrance import Entrance
from windlass.parallel.tensor.owned import owned


class SequenceCut:
    """The cut of one stack of layers.

    [Note: lengths in a recomputation] The first layer knows how long the sequence is, the others only their part of it,
    from which that does not follow. In a forward they take what the first one noted down. What runs again, in a
    backward, may belong to an earlier forward of another length; and where a pipeline is cut the first layer may run on
    other ranks. There the ranks tell each other their lengths, unless all sequences that the first layer saw could be
    cut evenly.
    """

    def __init__(self, axis: Axis) -> None:
        self.axis = axis
        self._sizes: list[int] = []  # tokens of each rank, in the forward that runs now
        self._batch = 0  # samples in it
        self._begins, self._uneven = False, False  # the first layer runs here; it has seen what can't be cut evenly

    def begin(self, hidden: torch.Tensor) -> torch.Tensor:
        """This rank's part of hidden states `[batch, sequence, features]`, which are the same on all ranks."""
        length = hidden.shape[1]
        spans = [spread(length, self.axis.size, rank) for rank in range(self.axis.size)]
        self._sizes = [stop - start for start, stop in spans]
        self._batch, self._begins = hidden.shape[0], True
        self._uneven |= length % self.axis.size > 0
        return self.part(hidden, self._sizes)

    def sizes(self, part: torch.Tensor) -> list[int]:
        """How many rows along dim -2 each rank has of a tensor like this one: `[batch, part of the sequence, ...]`, or
        with both in one dim."""
        own, ranks = part.shape[-2], self.axis.size
        if not self._begins or (self._uneven and current_backward() != -1):
            found: list[int] = self.axis.all_gather(torch.tensor([own], device=part.device)).tolist()
            return found
        if not self._uneven:
            return [own] * ranks
        return self._sizes if part.dim() > 2 else [size * self._batch for size in self._sizes]

    def whole(self, part: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """All ranks' parts `[batch, part of the sequence, ...]`, the same on every rank."""
        return owned(show(part, self.axis, 1, sizes))

    def part(self, whole: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """This rank's part of `[batch, sequence, ...]`, or with both in one dim, which is the same on every rank."""
        if whole.dim() < 3:
            return self.part(whole.unflatten(0, (-1, sum(sizes))), sizes).flatten(0, 1)
        return owned(take(whole, self.axis, 1, sizes))


class LayerInput:
    """Before a layer of the stack: the first one cuts hidden states."""

    def __init__(self, sequence: SequenceCut, first: bool, draws: Draws | None) -> None:
        self._sequence, self._first, self._draws = sequence, first, draws

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = hidden_of(args, kwargs)
        if self._draws is not None and module.training:
            self._draws.begin(hidden.device)
        return with_hidden(args, kwargs, self._sequence.begin(hidden)) if self._first else (args, kwargs)


class LayerOutput:
    """After the last layer of the stack: hidden states are put together."""

    def __init__(self, sequence: SequenceCut) -> None:
        self._sequence = sequence

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        return first_replaced(output, lambda part: self._sequence.whole(part, self._sequence.sizes(part)))


class GatheredInput:
    """Before attention: the hidden states of all ranks, for all columns of its chain."""

    def __init__(self, entrance: Entrance, sequence: SequenceCut) -> None:
        self._entrance, self._sequence = entrance, sequence

    def __call__(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        hidden = hidden_of(args, kwargs)
        return with_hidden(args, kwargs, self._entrance(hidden, self._sequence.sizes(hidden)))


class WholeInside:
    """Before and after a module that is to see whole sequences, and computes the same on all ranks.

    Args:
        salt: another one for each such module, if it may draw numbers; else None.
    """

    def __init__(self, sequence: SequenceCut, salt: int | None) -> None:
        self._sequence, self._salt = sequence, salt
        self._sizes: list[int] = []
        self._state: tuple[torch.Generator, torch.Tensor] | None = None

    def before(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        part = hidden_of(args, kwargs)
        self._sizes = self._sequence.sizes(part)
        self._state = None
        if self._salt is not None and module.training:
            generator = generator_of(part.device)
            self._state = generator, generator.get_state()
            generator.manual_seed(common_seed(self._sequence.axis, part.device, self._salt))
        return with_hidden(args, kwargs, self._sequence.whole(part, self._sizes))

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if self._state is not None:
            self._state[0].set_state(self._state[1])
            self._state = None
        return first_replaced(output, lambda whole: self._sequence.part(whole, self._sizes))


class DrawsEnd:
    """After a module, whatever became of it: numbers are common ones again."""

    def __init__(self, draws: Draws) -> None:
        self._draws = draws

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._draws.end()


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    """The hidden states that a module of transformers is given: `hidden_states`, or its first argument."""
    found: torch.Tensor = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
    return found


def with_hidden(
    args: tuple[Any, ...], kwargs: dict[str, Any], hidden: torch.Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states."""
    if "hidden_states" in kwargs:
        return args, {**kwargs, "hidden_states": hidden}
    return (hidden, *args[1:]), kwargs


def first_replaced(output: Any, replace: Any) -> Any:
    """What a module gives, a tensor or a tuple that begins with one, with another one in its place."""
    if isinstance(output, torch.Tensor):
        return replace(output)
    return type(output)((replace(output[0]), *output[1:]))
