"""Models of attention, recurrence and convolution with torch's own layers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.models.plain import Block
from tests.models.specimen import VOCABULARY, WIDTH, cross_entropy, mse


class CrossBlock(nn.Module):
    """Block that attends to encoder states, which all decoder blocks share. It takes keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.inner = Block()

    def forward(self, *, hidden: Tensor, encoder_states: Tensor) -> Tensor:
        weights = torch.softmax(self.query(hidden) @ encoder_states.transpose(-1, -2) / WIDTH, -1)
        return self.inner(hidden + weights @ self.value(encoder_states))


class CrossAttention(nn.Module):
    """Model whose encoder output reaches every decoder block, so that its gradient arrives late and in parts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(CrossBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        states = self.embed(ids)
        for block in self.encoder:
            states = block(states)
        hidden = self.embed(ids.flip(-1))
        for cross in self.decoder:
            hidden = cross(hidden=hidden, encoder_states=states)
        return cross_entropy(self.head(hidden), ids)


class Recurrent(nn.Module):
    """Model with nn.LSTM, which keeps its own flat weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.lstm(self.embed(ids))
        return cross_entropy(self.head(out), ids)


class Attention(nn.Module):
    """Model with nn.MultiheadAttention, which reads the weights of its projections without calling them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.pool = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for layer in self.layers:
            h = layer(h)
        h = h + self.pool(h, h, h, need_weights=False)[0]
        return cross_entropy(self.head(h), ids)


class Convolutions(nn.Module):
    """Model with 4-D convolution weights, a group norm and a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.GroupNorm(2, 8), nn.SiLU(), nn.Conv2d(8, 8, 3, padding=1)) for _ in range(2)
        )
        self.up = nn.ConvTranspose2d(8, 1, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        image = self.stem(x.view(-1, 1, 4, 4))
        for block in self.blocks:
            image = image + block(image)
        return mse(self.up(image).flatten(1), y)
