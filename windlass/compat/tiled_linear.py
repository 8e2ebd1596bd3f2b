"""Class `deepspeed.zero.TiledLinear`: a linear layer split into tiles, which stage 3 gathers and frees one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from windlass.base.errors import ModelError
from windlass.compat.balanced_partition import partition_uniform
from windlass.zero import GatheredParameters


class TileError(ModelError, RuntimeError):
    """Error for a number of tiles, or a size of a layer to copy, that does not fit the tiled layer."""


class TiledLinear(nn.Module):
    """Linear layer split into `out_splits` x `in_splits` smaller layers.

    Args:
        in_features: size of the last dimension of the input.
        out_features: size of the last dimension of the output.
        bias: True if the layer has a bias, which the tiles of the last column hold.
        in_splits: number of tiles along the input.
        out_splits: number of tiles along the output.
        input_is_already_split: `forward` takes a sequence of `in_splits` tensors. No effect if `in_splits` is 1.
        combine_out_splits: True if `forward` returns one tensor; False if it returns a list of `out_splits` tensors.
        linear_cls: constructs a tile from its sizes, `bias` and `kwargs`.
        init_linear: layer whose values are copied into the tiles.

    Raises:
        TileError: a number of tiles is not between 1 and the number of features.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        in_splits: int = 1,
        out_splits: int = 1,
        input_is_already_split: bool = False,
        combine_out_splits: bool = True,
        linear_cls: Callable[..., nn.Module] = nn.Linear,
        init_linear: nn.Linear | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__()
        for name, splits, features in (("in", in_splits, in_features), ("out", out_splits, out_features)):
            if not 1 <= splits <= features:
                raise TileError(f"{name}_splits is {splits}; it must be between 1 and {name}_features = {features}")
        self.in_features, self.out_features, self.use_bias = in_features, out_features, bias
        self.in_splits, self.out_splits = in_splits, out_splits
        self.input_is_already_split, self.combine_out_splits = input_is_already_split, combine_out_splits
        self.in_parts = partition_uniform(in_features, in_splits)
        self.out_parts = partition_uniform(out_features, out_splits)
        last = in_splits - 1
        self.linears = nn.ModuleList(
            nn.ModuleList(
                linear_cls(columns, rows, bias=bias and column == last, **kwargs)
                for column, columns in enumerate(_sizes(self.in_parts))
            )
            for rows in _sizes(self.out_parts)
        )
        if init_linear is not None:
            self.copy_params_from(init_linear)

    def forward(self, input_: Any) -> Any:
        """Return the sums of the rows of tiles, concatenated along the last dimension if `combine_out_splits` is set.

        Raises:
            TileError: the input is already split, but not into `in_splits` tensors.
        """
        if self.in_splits == 1:
            inputs: Sequence[Any] = [input_]
        elif self.input_is_already_split:
            inputs = input_
            if len(inputs) != self.in_splits:
                raise TileError(
                    f"forward got {len(inputs)} inputs for in_splits = {self.in_splits}; pass one for each split"
                )
        else:
            inputs = self._split_global_input(input_, _sizes(partition_uniform(input_.shape[-1], self.in_splits)))
        outputs = []
        for row, tiles in enumerate(self.linears):
            total: Any = None
            for column, (tile, part) in enumerate(zip(cast(nn.ModuleList, tiles), inputs, strict=True)):
                total = self._reduce_local_output(column, row, total, tile(part))
            outputs.append(total)
        return self._combine_output_splits(outputs) if self.combine_out_splits else outputs

    def _split_global_input(self, input: Any, split_sizes: list[int]) -> Sequence[Any]:
        """Split an input along its last dimension. Subclasses override this for other inputs."""
        parts: Sequence[Tensor] = input.split(split_sizes, dim=-1)
        return parts

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        """Add a tile's output to the sum of the previous tiles in the row."""
        return new_out.clone() if current_out is None else current_out + new_out

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        """Concatenate the sums of all rows."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def copy_params_from(self, other: nn.Linear) -> None:
        """Copy the values of a full layer into the tiles. Collective at stage 3, where rank 0's values are used.

        Raises:
            TileError: the sizes differ.
        """
        if other.weight.shape != (self.out_features, self.in_features) or (other.bias is not None) != self.use_bias:
            wanted = f"{self.in_features} to {self.out_features} features, bias {self.use_bias}"
            raise TileError(f"copy_params_from got {other}; pass a layer of {wanted}")
        for row, tiles in enumerate(self.linears):
            rows = slice(*self.out_parts[row : row + 2])
            for column, tile in enumerate(cast(nn.ModuleList, tiles)):
                columns = slice(*self.in_parts[column : column + 2])
                pairs: list[tuple[Any, Tensor]] = [(tile.weight, other.weight[rows, columns])]
                if tile.bias is not None:
                    pairs.append((tile.bias, other.bias[rows]))
                # One tile at a time, so that the full layer is never gathered.
                with GatheredParameters([parameter for parameter, _ in pairs], modifier_rank=0):
                    for parameter, value in pairs:
                        parameter.copy_(value)


class TiledLinearReturnBias(TiledLinear):
    """TiledLinear for layers that return `(output, bias)`, as Megatron's do."""

    def _reduce_local_output(self, in_id: int, out_id: int, current_out: Any, new_out: Any) -> Any:
        before, bias_before = (None, None) if current_out is None else current_out
        output, bias = new_out
        total = super()._reduce_local_output(in_id, out_id, before, output)
        return total, bias_before if bias is None else bias

    def _combine_output_splits(self, outputs: Sequence[Any]) -> Any:
        biases = [bias for _, bias in outputs if bias is not None]
        joined = super()._combine_output_splits([output for output, _ in outputs])
        return joined, super()._combine_output_splits(biases) if biases else None


def _sizes(bounds: Sequence[int]) -> list[int]:
    return [stop - start for start, stop in zip(bounds, bounds[1:], strict=False)]
