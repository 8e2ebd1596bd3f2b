"""Models with frozen parameters, alone and beside trainable adapters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import Regressor
from tests.models.specimen import WIDTH


def frozen() -> nn.Module:
    """Return a model with a frozen second block and a frozen matrix in the third. Gradients must pass through both."""
    model = Regressor(blocks=3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    """Return a model that is frozen up to the last block, so that the first blocks have no backward."""
    model = Regressor(blocks=3)
    model.blocks[:2].requires_grad_(False)
    return model


class LoraLinear(nn.Module):
    """Frozen matrix with a trainable low-rank adapter. `base_dtype` may differ from the adapter's fp32."""

    def __init__(self, base_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(base_dtype).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype))
        return base.to(x.dtype) + self.up(self.down(x))


class LoraBlock(nn.Module):
    """Block of two adapted matrices, which form a frozen and a trainable unit."""

    def __init__(self, base_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = LoraLinear(base_dtype)
        self.second = LoraLinear(base_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def lora() -> nn.Module:
    """Return two adapted blocks and a trainable head."""
    return Regressor(block=LoraBlock)


def mixed() -> nn.Module:
    """Return blocks with a frozen bf16 base, fp32 norms and fp32 adapters, which form three kinds of units."""
    return Regressor(block=lambda: LoraBlock(torch.bfloat16))
