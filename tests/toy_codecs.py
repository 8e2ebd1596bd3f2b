"""Three lossy codecs for tests, of the kinds that compressed collectives use."""

from __future__ import annotations

import torch

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class BlockInt8Codec:
    """Codec of int8 values with one float32 scale per block of 64."""

    name = "toy-int8"
    exact = False
    block = 64

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 4 * -(-numel // self.block) + numel

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        blocks = -(-tensor.numel() // self.block)
        padded = torch.zeros(blocks * self.block)
        padded[: tensor.numel()] = tensor.float()
        scales = padded.view(blocks, self.block).abs().amax(1) / 127
        rounded = (padded.view(blocks, self.block) / scales.clamp(min=1e-30)[:, None]).round().to(torch.int8)
        encoded[: 4 * blocks].view(torch.float32).copy_(scales)
        encoded[4 * blocks :].view(torch.int8).copy_(rounded.view(-1)[: tensor.numel()])

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        blocks = -(-out.numel() // self.block)
        scales = encoded[: 4 * blocks].view(torch.float32).repeat_interleave(self.block)[: out.numel()]
        out.copy_(encoded[4 * blocks :].view(torch.int8).float() * scales)


class SignCodec:
    """Codec of one bit per element and the mean absolute value, as in 1-bit Adam."""

    name = "toy-sign"
    exact = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in FLOATS

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 4 + -(-numel // 8) if numel else 0

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        encoded[:4].view(torch.float32).copy_(tensor.float().abs().mean().view(1))
        bits = torch.zeros(8 * (encoded.numel() - 4), dtype=torch.uint8)
        bits[: tensor.numel()] = tensor >= 0
        encoded[4:] = (bits.view(-1, 8) << torch.arange(8, dtype=torch.uint8)).sum(1).to(torch.uint8)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        bits = (encoded[4:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        out.copy_((bits.view(-1)[: out.numel()].float() * 2 - 1) * encoded[:4].view(torch.float32))


class HalfCodec:
    """Codec of float16 values."""

    name = "toy-half"
    exact = False

    def accepts(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.float32, torch.float16)

    def encoded_size(self, numel: int, dtype: torch.dtype) -> int:
        return 2 * numel

    def encode(self, tensor: torch.Tensor, encoded: torch.Tensor) -> None:
        encoded.view(torch.float16).copy_(tensor)

    def decode(self, encoded: torch.Tensor, out: torch.Tensor, dtype: torch.dtype) -> None:
        out.copy_(encoded.view(torch.float16))
