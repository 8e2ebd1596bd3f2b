"""a b + c and square roots rounded once, as processors' own instructions round them, on any machine."""

from __future__ import annotations

import torch


def fma(a: torch.Tensor, b: torch.Tensor | float, c: torch.Tensor) -> torch.Tensor:
    """fp32 tensors -> fp32. A `b` that is no tensor must be a value of fp32.

    The product of two fp32 numbers is exact in fp64; their sum with c is rounded to odd, after which rounding to fp32
    gives what rounding the exact sum would (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums: proved
    algorithms using rounding to odd", IEEE Transactions on Computers 57, 2008).
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
    """The square root of fp32 `values`, rounded to nearest; torch's own may go through a library that rounds less well.

    That of fp64 is near enough: no root of an fp32 number comes as close to the middle of two as its error.
    """
    return values.double().sqrt().float()
