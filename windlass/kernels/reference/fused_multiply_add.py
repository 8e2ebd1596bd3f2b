"""Fused multiply-add and square root with a single rounding, as in processor instructions, on any machine."""

from __future__ import annotations

import torch


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """Compute `a * b + c` in fp32 with one rounding. A float `b` must be a value of fp32.

    The product of two fp32 numbers is exact in fp64. Its sum with c is rounded to odd; rounding that to fp32 equals
    rounding the exact sum (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved algorithms using
    rounding to odd", IEEE Transactions on Computers 57, 2008).
    """
    product = a.double() * (b.double() if isinstance(b, torch.Tensor) else b)
    addend = c.double()
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)
    even = total.view(torch.int64) & 1 == 0
    towards = torch.copysign(torch.full_like(lost, torch.inf), lost)
    odd = torch.nextafter(total, towards)
    return torch.where(even & (lost != 0) & lost.isfinite(), odd, total).float()


def rounded_sqrt(values: torch.Tensor) -> torch.Tensor:
    """Compute the square root of fp32 `values`, rounded to nearest. `torch.sqrt` may use a library that rounds less
    precisely.

    The fp64 root is precise enough: no root of an fp32 number is closer to the midpoint of two fp32 numbers than the
    error of the fp64 root.
    """
    return values.double().sqrt().float()
