"""Low-rank adapters of peft beside linear layers that are cut.

[Note: adapters of cut layers] An adapter adds B(A(x)) to what its base layer makes of x. Beside a column, whose output
features are cut, B is cut as the base is; A is whole, and since each rank's B sends it back only a part of its
gradient, these parts are added up. Beside a row, whose input features are cut, A is cut as the base is and its products
are added up over ranks, so that B is whole and sees all. Of a base of which a rank uses some rows, it uses the same
rows of B. So an adapter is saved whole, and its gradients are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from windlass.parallel.tensor.cutting import see_a_part
from windlass.parallel.tensor.entrance import Entrance
from windlass.parallel.tensor.linear_cut import cut_row, cut_shared, only_outputs
from windlass.parallel.tensor.linear_layers import Linear, linear
from windlass.parallel.tensor.plan import Cut, Style
from windlass.parallel.tensor.sequence_cut import SequenceCut


def cut_adapters(layer: Linear, cut: Cut, entrance: Entrance, sequence: SequenceCut | None, chunks: int) -> None:
    """Cut the adapters of a layer as the layer itself is; nothing happens where it has none.

    Args:
        entrance: the chain's.
        sequence: that cuts the layer's output, of a row.
        chunks: see `row_product`.
    """
    if layer.outer is None:
        return
    row = cut.style in (Style.ROW, Style.SPLIT)
    for down, up in _pairs(layer.name, layer.outer):
        if row:
            cut_row(down, cut, entrance, sequence, chunks)
            if sequence is not None:  # each rank adds for its own tokens
                _see_parts(up.module, entrance)
            continue
        _see_parts(down.module, entrance)
        if cut.style is Style.SHARED:
            cut_shared(up, cut, entrance, None)
        else:
            only_outputs(up, cut, entrance.axis)
    if entrance.draws is not None and cut.style is not Style.SPLIT:
        for module in layer.outer.lora_dropout.modules():  # type: ignore[union-attr]
            if isinstance(module, nn.modules.dropout._DropoutNd):
                turn = _OwnNumbers(entrance) if row else _CommonNumbers(entrance)
                module.register_forward_pre_hook(turn.before)
                module.register_forward_hook(turn.after)


def _pairs(name: str, outer: nn.Module) -> Iterator[tuple[Linear, Linear]]:
    downs: Any = outer.lora_A
    ups: Any = outer.lora_B
    for key, module in downs.items():
        down, up = linear(f"{name}.lora_A.{key}", module), linear(f"{name}.lora_B.{key}", ups[key])
        assert down is not None and up is not None
        yield down, up


def _see_parts(module: nn.Module, entrance: Entrance) -> None:
    for parameter in module.parameters():
        see_a_part(parameter, entrance.axis.name)


class _CommonNumbers:
    """A dropout of what is whole on every rank, between layers that draw numbers of their own."""

    def __init__(self, entrance: Entrance) -> None:
        assert entrance.draws is not None
        self._draws, self._resumes = entrance.draws, False

    def before(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        self._resumes = self._draws.running
        self._draws.end()

    def after(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        if self._resumes:
            self._draws.begin(output.device)


class _OwnNumbers:
    """A dropout of what is cut, after its chain has ended."""

    def __init__(self, entrance: Entrance) -> None:
        assert entrance.draws is not None
        self._draws = entrance.draws

    def before(self, module: nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if module.training:
            self._draws.begin(args[0].device)

    def after(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        self._draws.end()
