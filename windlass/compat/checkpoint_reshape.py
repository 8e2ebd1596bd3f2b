"""Class `model_3d_desc` of `deepspeed.checkpoint`: source ranks of each target rank when a layout shrinks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass
class StageTensorRankMap:
    """Source ranks for each position in a grid of stages and tensor ranks (`meg_2d_parallel_map`).

    Args:
        pp_degree: number of stages.
        tp_degree: number of tensor ranks.
    """

    pp_degree: int
    tp_degree: int
    map: dict[tuple[int, int], list[int]] = field(default_factory=dict)

    def add_data(self, pp_index: int, tp_index: int, data: Sequence[int]) -> None:
        """Append source ranks at a grid position."""
        self._check(pp_index, tp_index)
        self.map.setdefault((pp_index, tp_index), []).extend(data)

    def get_data(self, pp_index: int | None = None, tp_index: int | None = None) -> list[int]:
        """Return the source ranks of a grid position. An index of None selects all stages or all tensor ranks."""
        self._check(pp_index, tp_index)
        stages = range(self.pp_degree) if pp_index is None else [pp_index]
        tensors = range(self.tp_degree) if tp_index is None else [tp_index]
        return [rank for stage in stages for tensor in tensors for rank in self.map[stage, tensor]]

    def _check(self, pp_index: int | None, tp_index: int | None) -> None:
        for name, index, degree in (("pp", pp_index, self.pp_degree), ("tp", tp_index, self.tp_degree)):
            assert index is None or 0 <= index < degree, f"{name}_index {index} of {degree}"


class model_3d_desc:
    """Layout of a checkpoint: sizes of the pipeline, tensor and data axes.

    In rank order, the data axis varies slowest, then the pipeline axis, then the tensor axis.
    """

    def __init__(self, pp_degree: int = 1, tp_degree: int = 1, dp_degree: int = 1) -> None:
        self.pp_degree, self.tp_degree, self.dp_degree = pp_degree, tp_degree, dp_degree

    def world_size(self) -> int:
        """Return the number of ranks."""
        return self.pp_degree * self.tp_degree * self.dp_degree

    def get_desc(self) -> str:
        """Return the layout as a string."""
        return f"PP,TP,DP = ({self.pp_degree}, {self.tp_degree}, {self.dp_degree})"

    def is_valid(self, pp_index: int, tp_index: int, dp_index: int) -> tuple[bool, list[str]]:
        """Return whether the position exists, and a list of the errors."""
        wrong = [
            f"{name} indexing error: index {index} >= degree {degree}"
            for name, index, degree in zip(
                ("PP", "TP", "DP"), (pp_index, tp_index, dp_index), self._sizes(), strict=True
            )
            if index >= degree
        ]
        return not wrong, wrong

    def can_reshape(self, target_3d_desc: model_3d_desc) -> tuple[bool, list[str]]:
        """Return whether no axis grows, and a list of errors for the axes that do."""
        pairs = zip(("PP", "TP", "DP"), self._sizes(), target_3d_desc._sizes(), strict=True)
        wrong = [f"Expansion reshape not supported - {name}: {old} ---> {new}" for name, old, new in pairs if new > old]
        return not wrong, wrong

    def reshape(self, target_3d_desc: model_3d_desc, verbose: bool = False) -> list[StageTensorRankMap]:
        """Return, for each data rank of the target, the source ranks at each of its grid positions.

        Raises:
            AssertionError: an axis grows, or the source ranks do not split into equal parts.
        """
        valid, wrong = self.can_reshape(target_3d_desc)
        assert valid, ", ".join(wrong)
        pp, tp, dp = target_3d_desc._sizes()
        each = self.pp_degree * self.tp_degree
        found = [StageTensorRankMap(pp, tp) for _ in range(dp)]
        for stage in range(pp):
            for tensor in range(tp):
                old = [
                    old_stage * self.tp_degree + old_tensor
                    for old_stage in _equal_parts(range(self.pp_degree), pp)[stage]
                    for old_tensor in _equal_parts(range(self.tp_degree), tp)[tensor]
                ]
                ranks = [rank + data * each for rank in old for data in range(self.dp_degree)]
                for made, part in zip(found, _equal_parts(ranks, dp), strict=True):
                    made.add_data(stage, tensor, part)
        if verbose:
            print(f"{self.get_desc()} to {target_3d_desc.get_desc()}: {[made.map for made in found]}")
        return found

    def _sizes(self) -> tuple[int, int, int]:
        return self.pp_degree, self.tp_degree, self.dp_degree


def _equal_parts(items: Sequence[int], parts: int) -> list[Sequence[int]]:
    """Split a sequence into contiguous parts of equal length."""
    assert len(items) % parts == 0, (
        f"{len(items)} ranks of an axis do not split into {parts} equal parts; choose a divisor"
    )
    size = len(items) // parts
    return [items[at : at + size] for at in range(0, len(items), size)]
