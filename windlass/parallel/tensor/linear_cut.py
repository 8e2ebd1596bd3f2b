"""Linear layers that are cut, in place: hooks before and after a module's own forward, or a forward for this one
module where that has to be computed in parts."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from windlass.comm.axis import Axis
from windlass.parallel.exchanges import enter, scatter, show, take
from windlass.parallel.placement import Ranges
from windlass.parallel.tensor.cutting import cut_parameter, see_a_part
from windlass.parallel.tensor.entrance import Entrance
from windlass.parallel.tensor.linear_layers import Linear
from windlass.parallel.tensor.owned import owned
from windlass.parallel.tensor.plan import Cut, Style
from windlass.parallel.tensor.row_product import row_product
from windlass.parallel.tensor.sequence_cut import SequenceCut
from windlass.parallel.tensor.shares import length, lengths


def cut_column(layer: Linear, cut: Cut, entrance: Entrance, before: ColumnInput | None) -> None:
    """Cut the output features of a layer.

    Args:
        entrance: the chain's.
        before: by which its input enters; None: it has done so.
    """
    axis = entrance.axis
    only_outputs(layer, cut, axis)
    if before is not None:
        layer.called.register_forward_pre_hook(before)
    if cut.style is Style.GATHERED:
        layer.called.register_forward_hook(ColumnGather(axis, lengths(cut.shares)))
    elif entrance.draws is not None:
        layer.called.register_forward_hook(ColumnDraws(entrance))


def only_outputs(layer: Linear, cut: Cut, axis: Axis) -> None:
    """Keep this rank's output features of a layer, and nothing else: its input has entered, its output stays cut."""
    ranges = cut.shares[axis.index]
    cut_parameter(f"{layer.name}.weight", _weight(layer), layer.output_dim, ranges, axis.name)
    bias = layer.module._parameters.get("bias")
    if bias is not None:
        cut_parameter(f"{layer.name}.bias", bias, 0, ranges, axis.name)
    _set_features(layer, outputs=length(ranges))


def cut_shared(layer: Linear, cut: Cut, entrance: Entrance, before: ColumnInput | None) -> None:
    """Leave a layer whole, and compute only the output features that this rank needs."""
    axis = entrance.axis
    for parameter in layer.module.parameters(recurse=False):
        see_a_part(parameter, axis.name)
    rank = axis.index
    if before is not None:
        layer.called.register_forward_pre_hook(before)
    layer.module.forward = SomeRows(layer, cut.shares[rank], cut.picks[rank])
    if entrance.draws is not None:
        layer.called.register_forward_hook(ColumnDraws(entrance))


def cut_row(layer: Linear, cut: Cut, entrance: Entrance, sequence: SequenceCut | None, chunks: int) -> None:
    """Cut the input features of a layer.

    Args:
        entrance: the chain's, which ends here.
        sequence: that cuts the layer's output; None: it is whole.
        chunks: see `row_product`.
    """
    axis = entrance.axis
    cut_parameter(f"{layer.name}.weight", _weight(layer), layer.input_dim, cut.shares[axis.index], axis.name)
    bias = layer.module._parameters.get("bias")
    if bias is not None and sequence is not None:
        see_a_part(bias, axis.name)
    _set_features(layer, inputs=length(cut.shares[axis.index]))
    sizes = lengths(cut.shares) if cut.style is Style.SPLIT else None
    layer.module.forward = Row(layer, entrance, sizes, sequence, chunks)


def cut_tail(layer: Linear, features: int, axis: Axis) -> None:
    """Let gradients of the last features of a whole layer's output in: they go to heads on all ranks."""
    layer.called.register_forward_hook(TailEntrance(axis, features))


class ColumnInput:
    """Before a column: its input enters, once for all columns of the chain."""

    def __init__(self, entrance: Entrance, sequence: SequenceCut | None) -> None:
        self._entrance, self._sequence = entrance, sequence

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = self._sequence.sizes(args[0]) if self._sequence is not None else None
        return self._entrance(args[0], sizes), *args[1:]


class ColumnGather:
    """After a column: all ranks' features, end to end."""

    def __init__(self, axis: Axis, sizes: list[int]) -> None:
        self._axis, self._sizes = axis, sizes

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        return owned(show(output, self._axis, -1, self._sizes))


class ColumnDraws:
    """After the first column of a chain: random numbers are the rank's own, until its row."""

    def __init__(self, entrance: Entrance) -> None:
        self._entrance = entrance

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        draws = self._entrance.draws
        if module.training and draws is not None:
            draws.begin(output.device)


class SomeRows:
    """The forward of a layer of which this rank needs some output features, and some of those several times."""

    def __init__(self, layer: Linear, rows: Ranges, picks: Ranges) -> None:
        self._module, self._dim, self._rows = layer.module, layer.output_dim, rows
        self._picks = _merged(picks)

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        weight, bias = self._module.weight, self._module._parameters.get("bias")
        some = _some(weight, self._dim, self._rows)  # type: ignore[arg-type]
        made = functional.linear(
            inputs, some if self._dim == 0 else some.t(), None if bias is None else _some(bias, 0, self._rows)
        )
        if self._picks == ((0, made.shape[-1]),):
            return made
        return torch.cat([made[..., start:stop] for start, stop in self._picks], -1)


class Row:
    """The forward of a layer whose input features are cut: a part of the sum, the sum, and the bias once."""

    def __init__(
        self, layer: Linear, entrance: Entrance, sizes: list[int] | None, sequence: SequenceCut | None, chunks: int
    ) -> None:
        self._module, self._transposed = layer.module, layer.transposed
        self._entrance, self._sizes, self._sequence, self._chunks = entrance, sizes, sequence, chunks

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        entrance, axis = self._entrance, self._entrance.axis
        gathered = entrance.sizes
        entrance.leave()
        if self._sizes is not None:
            inputs = take(inputs, axis, -1, self._sizes)
        weight: Any = self._module.weight
        weight = weight.t() if self._transposed else weight
        if self._sequence is None:
            out = row_product(inputs, weight, axis, self._chunks)
        else:
            out = owned(scatter(functional.linear(inputs, weight), axis, -2, gathered))
        bias = self._module._parameters.get("bias")
        return out if bias is None else out + bias.to(out.dtype)


class TailEntrance:
    """After a layer that is whole: the last features of its output enter."""

    def __init__(self, axis: Axis, features: int) -> None:
        self._axis, self._features = axis, features

    def __call__(self, module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        head, tail = output.split([output.shape[-1] - self._features, self._features], -1)
        return torch.cat([head, enter(tail, self._axis)], -1)


def _weight(layer: Linear) -> nn.Parameter:
    weight = layer.module._parameters["weight"]
    assert weight is not None
    return weight


def _set_features(layer: Linear, inputs: int | None = None, outputs: int | None = None) -> None:
    """What the module says of its sizes, and `Conv1D` computes with."""
    for names, size in ((("in_features", "nx"), inputs), (("out_features", "nf"), outputs)):
        for name in names:
            if size is not None and hasattr(layer.module, name):
                setattr(layer.module, name, size)


def _some(tensor: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    parts = [tensor.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _merged(picks: Ranges) -> Ranges:
    found: list[tuple[int, int]] = []
    for start, stop in picks:
        if found and found[-1][1] == start:
            found[-1] = (found[-1][0], stop)
        else:
            found.append((start, stop))
    return tuple(found)
