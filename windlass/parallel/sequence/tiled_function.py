"""Tiled computation: a part of a model runs on a tile of tokens at a time, in the forward and in the backward.

So the intermediate activations of all tokens never exist at once. S. Bekman et al., "Arctic Long Sequence Training",
arXiv 2506.13996, section 3.1. The forward saves only its inputs; the backward recomputes each tile. Gradients of
parameters are summed over the tiles, in fp32 if parameters have 16 bits, and each parameter receives its gradient once.
So a reduction that waits for the gradient starts once.

[Note: parameters of tiled parts] Parameters enter the graph as inputs of one node. In the backward the function uses
the parameters of its module, not tensors saved by the node. ZeRO stage 3 may reshard the parameters in between. It
unshards them again before the node runs, because the node belongs to the graph of their block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch


class ReplayContext:
    """Snapshot of the autocast state and, with `preserve_rng_state`, of the RNG states at its construction."""

    def __init__(self, device: torch.device, *, preserve_rng_state: bool) -> None:
        self._device = device
        self._autocast = torch.is_autocast_enabled(device.type)
        self._dtype = torch.get_autocast_dtype(device.type)
        self._rng_states = _get_rng_states(device) if preserve_rng_state else None

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Restore autocast, with its cache of casts disabled.

        A cast that was cached in a forward without a graph has no graph: the next forward would use the cached tensor,
        and the weight would get no gradient.
        """
        with torch.autocast(self._device.type, enabled=self._autocast, dtype=self._dtype, cache_enabled=False):
            yield

    @contextmanager
    def replay(self) -> Iterator[None]:
        """Restore autocast and the RNG states; at the end, set the RNG states back to those before the block."""
        before = None
        if self._rng_states is not None:
            before = _get_rng_states(self._device)
            _set_rng_states(self._device, self._rng_states)
        try:
            with self.autocast():
                yield
        finally:
            if before is not None:
                _set_rng_states(self._device, before)


def _get_rng_states(device: torch.device) -> tuple[torch.Tensor, torch.Tensor | None]:
    return torch.get_rng_state(), torch.cuda.get_rng_state(device) if device.type == "cuda" else None


def _set_rng_states(device: torch.device, states: tuple[torch.Tensor, torch.Tensor | None]) -> None:
    torch.set_rng_state(states[0])
    if states[1] is not None:
        torch.cuda.set_rng_state(states[1], device)


@dataclass(frozen=True)
class Tiling:
    """Function and tile size of a tiled computation.

    Attributes:
        function: maps a tile of each input to a tile of the output, or to a term of a sum.
        tile_size: size of a tile along `dim` of the inputs.
        dim: dimension of the inputs that is tiled.
        out_dim: dimension of the output along which tiles are concatenated.
        sums_outputs: sum the outputs of the tiles instead of concatenating them.
        preserve_rng_state: True if the function draws random numbers (dropout), and its recomputation has to draw the
            same.
    """

    function: Callable[..., torch.Tensor]
    tile_size: int
    dim: int = 0
    out_dim: int = 0
    sums_outputs: bool = False
    preserve_rng_state: bool = False

    def tile_starts(self, inputs: Sequence[torch.Tensor]) -> range:
        """Return the first indices of the tiles; an empty input has one tile."""
        return range(0, max(inputs[0].shape[self.dim], 1), max(self.tile_size, 1))

    def tile(self, tensor: torch.Tensor, start: int) -> torch.Tensor:
        """Return the tile of an input that begins at `start`."""
        return tensor.narrow(self.dim, start, min(self.tile_size, tensor.shape[self.dim] - start))

    def run(self, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Compute the full output, a tile at a time."""
        total: torch.Tensor | None = None
        done, starts = 0, self.tile_starts(inputs)
        for start in starts:
            output = self.function(*(self.tile(x, start).contiguous() for x in inputs))
            if self.sums_outputs:
                total = output if total is None else total + output
                continue
            if len(starts) == 1:
                return output
            size = output.shape[self.out_dim]
            if total is None:  # preallocate: torch.cat of a list would take the memory twice
                shape = list(output.shape)
                shape[self.out_dim] = inputs[0].shape[self.dim] * size // self.tile_size
                total = output.new_empty(shape)
            if done + size <= total.shape[self.out_dim]:
                total.narrow(self.out_dim, done, size).copy_(output)
            else:  # the last tile is smaller, but its output is not, e.g. if each tile has one number as output
                total = torch.cat([total.narrow(self.out_dim, 0, done), output], self.out_dim)
            done += size
        assert total is not None
        if self.sums_outputs or done == total.shape[self.out_dim]:
            return total
        return total.narrow(self.out_dim, 0, done).clone()


class _TiledFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiling: Tiling, num_inputs: int, *tensors: torch.Tensor) -> torch.Tensor:
        inputs = tensors[:num_inputs]
        ctx.tiling, ctx.parameters = tiling, tensors[num_inputs:]
        ctx.surroundings = ReplayContext(inputs[0].device, preserve_rng_state=tiling.preserve_rng_state)
        ctx.save_for_backward(*inputs)
        with ctx.surroundings.autocast():
            return tiling.run(inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tiling, inputs, parameters = ctx.tiling, ctx.saved_tensors, ctx.parameters
        expected = ctx.needs_input_grad[2:]
        back = [torch.empty_like(x) if want else None for x, want in zip(inputs, expected, strict=False)]
        trained = [i for i in range(len(parameters)) if expected[len(inputs) + i]]
        sums: dict[int, torch.Tensor] = {}
        done = 0
        with ctx.surroundings.replay():
            for start in tiling.tile_starts(inputs):
                pieces = [
                    tiling.tile(x, start).detach().contiguous().requires_grad_(want)
                    for x, want in zip(inputs, expected, strict=False)
                ]
                with torch.enable_grad():
                    output = tiling.function(*pieces)
                size = 0 if tiling.sums_outputs else output.shape[tiling.out_dim]
                arriving = gradient if tiling.sums_outputs else gradient.narrow(tiling.out_dim, done, size)
                done += size
                sources = [(back[i], piece) for i, piece in enumerate(pieces) if piece.requires_grad]
                requested = [*(piece for _, piece in sources), *(parameters[i] for i in trained)]
                found = torch.autograd.grad(output, requested, arriving, allow_unused=True)
                for (into, _), one in zip(sources, found, strict=False):
                    assert into is not None
                    tiling.tile(into, start).copy_(one) if one is not None else tiling.tile(into, start).zero_()
                for i, one in zip(trained, found[len(sources) :], strict=True):
                    _accumulate(sums, i, one)
                del output, found, requested, sources, pieces
        totals = [sums[i].to(one.dtype) if i in sums else None for i, one in enumerate(parameters)]
        return (None, None, *back, *totals)


def run_tiled(tiling: Tiling, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Compute `tiling.function` on tiles of the inputs, and recompute the tiles in the backward.

    Args:
        inputs: tensors of equal size along `tiling.dim`; those with a floating dtype may get gradients.
        parameters: all other tensors that get gradients through the function.

    Returns:
        The output of the function for the full inputs, provided that it treats elements along `tiling.dim`
        independently, or sums over them and `tiling.sums_outputs` is set.
    """
    if not torch.is_grad_enabled():
        return tiling.run(inputs)
    output: torch.Tensor = _TiledFunction.apply(tiling, len(inputs), *inputs, *parameters)
    return output


def _accumulate(sums: dict[int, torch.Tensor], index: int, more: torch.Tensor | None) -> None:
    if more is None:
        return
    if index in sums:
        sums[index].add_(more)
    else:
        sums[index] = more.float() if more.dtype in (torch.float16, torch.bfloat16) else more.clone()
