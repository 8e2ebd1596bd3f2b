"""Training program of `bench/tune.py`: three small models with different costs."""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import windlass

LENGTH, VOCABULARY = 96, 1024


class Attention(nn.Module):
    """Layer of a transformer."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down, self.heads = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        mixed = functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Dense(nn.Module):
    """Residual layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + functional.gelu(self.linear(self.norm(x)))


class Model(nn.Module):
    """Embedding, layers and head, with transformers' switch for activation checkpointing."""

    supports_gradient_checkpointing = True

    def __init__(self, layers: list[nn.Module], width: int) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(VOCABULARY, width), nn.ModuleList(layers)
        self.head, self.recomputes = nn.Linear(width, VOCABULARY), False

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: object = None) -> None:
        self.recomputes = True

    def gradient_checkpointing_disable(self) -> None:
        self.recomputes = False

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.recomputes else layer(x)
        return functional.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


MODELS = {
    "transformer": (lambda: Model([Attention(128) for _ in range(4)], 128), LENGTH),
    "wide": (lambda: Model([Dense(1024) for _ in range(5)], 1024), 8),
    "deep": (lambda: Model([Dense(64) for _ in range(30)], 64), 32),
}


def main() -> None:
    """Train until the trial ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--config", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    make, length = MODELS[args.model]
    engine = windlass.initialize(model=make(), config=args.config)[0]
    while True:
        ids = torch.randint(0, VOCABULARY, (engine.train_micro_batch_size_per_gpu(), length))
        engine.backward(engine(ids))
        engine.step()


if __name__ == "__main__":
    main()
