"""Native optimizer updates on raw addresses; call them through windlass.kernels.kernel_dispatch."""

from collections.abc import Sequence

def instruction_sets() -> list[str]: ...
def update(
    instruction_set: str,
    rule: int,
    flags: int,
    numbers: Sequence[float],
    formats: tuple[int, int, int, int],
    addresses: Sequence[tuple[int, int, int, int, int, int, int, int, int, int]],
    divisor: float,
    seed: int,
    threads: int,
    summed: Sequence[tuple[int, int, int, int, int]] = ...,
) -> None: ...
def compare_pages(address: tuple[int, int, int, int, int]) -> None: ...
def prefer_huge_pages(address: int, bytes: int) -> None: ...
