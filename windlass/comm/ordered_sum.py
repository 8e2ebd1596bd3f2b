"""Sum of the ranks' parts of a gradient in rank order, with bitwise equal results over gloo, MPI and shared memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

CHUNK = 1 << 16  # elements: three float32 chunks fit in a core's cache, and their dot products are accurate to 1e-7
LARGEST = 1 << 30  # maximum chunk on an accelerator, in elements: torch.dot rejects more than 2^31 - 1


def ordered_sum(
    parts: Sequence[torch.Tensor], out: torch.Tensor, *, add: bool, factor: float, measure: bool
) -> torch.Tensor | None:
    """Write `factor * (parts[0] + parts[1] + ...)` to `out`, or add it with `add`. `out` may be one of the parts.

    16-bit parts are added in float32.

    Args:
        parts: `[n]` each, in rank order, of one dtype.
        out: `[n]`.
        add: Add to the content of `out`.
        factor: Factor of the sum.
        measure: Also return the sum of squares of the final `out`.

    Returns:
        The sum of squares as a float64 scalar tensor if `measure`, else None.
    """
    wide = torch.float32 if parts[0].dtype in (torch.float16, torch.bfloat16) else parts[0].dtype
    step = CHUNK if out.device.type == "cpu" else min(max(out.numel(), 1), LARGEST)
    scratch = torch.empty(min(step, out.numel()), dtype=wide, device=out.device)
    squares: list[torch.Tensor] = []
    # With more than two parts, writing to `out` could overwrite a part before it is read.
    direct = not add and out.dtype == wide and len(parts) <= 2
    for start in range(0, out.numel(), step):
        target = out[start : start + step]
        pieces = [part[start : start + step] for part in parts]
        total = target if direct else scratch[: target.numel()]
        if len(pieces) == 1:
            if total.data_ptr() != pieces[0].data_ptr():
                total.copy_(pieces[0])
        elif pieces[0].dtype == wide:
            torch.add(pieces[0], pieces[1], out=total)
        else:
            total.copy_(pieces[0]).add_(pieces[1])
        for piece in pieces[2:]:
            total.add_(piece)
        if factor != 1.0:
            total.mul_(factor)
        if not direct:
            if add:
                target.add_(total)
            else:
                target.copy_(total)
        if measure:
            final = target if target.dtype == wide else target.to(wide)
            squares.append(torch.dot(final, final))
    if not measure:
        return None
    return torch.stack(squares).double().sum() if squares else torch.zeros((), dtype=torch.float64, device=out.device)


def sum_of_squares(flat: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of `flat` `[n]` as a float64 scalar tensor.

    On a CPU the result is bitwise equal to that of `ordered_sum`.
    """
    wide = flat.dtype if flat.dtype in (torch.float32, torch.float64) else torch.float32
    if flat.device.type != "cpu":
        norm: torch.Tensor = torch.linalg.vector_norm(flat, dtype=wide)
        return norm.double().square()
    squares = []
    for part in flat.split(CHUNK) if flat.numel() else ():
        chunk = part.to(wide)  # chunk by chunk: a wide copy of the full tensor may exceed the free memory
        squares.append(torch.dot(chunk, chunk))
    return torch.stack(squares).double().sum() if squares else torch.zeros((), dtype=torch.float64)
