"""Two models that experiments train: a stack of linear layers, and a small language model of torch modules."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional


def linear_stack(width: int, depth: int) -> nn.Sequential:
    """Create `depth` square linear layers, as in torch's ZeroRedundancyOptimizer tutorial (20 x Linear(2000))."""
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))


class LanguageModel(nn.Module):
    """Pre-norm causal transformer. Its forward returns the mean cross-entropy.

    Args:
        vocabulary: number of tokens.
        hidden: width, a multiple of 64, the size of a head.
        layers: number of blocks.
        length: maximum number of tokens of a sequence.
    """

    def __init__(self, vocabulary: int, hidden: int, layers: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.positions = nn.Embedding(length, hidden)
        self.blocks = nn.ModuleList(_Block(hidden, max(1, hidden // 64)) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of next-token prediction over `tokens` `[batch, length]`, a float32 scalar."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.positions(places)  # [batch, length, hidden]
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))[:, :-1].flatten(0, 1).float()
        loss: torch.Tensor = functional.cross_entropy(logits, tokens[:, 1:].flatten())
        return loss


class _Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).transpose(1, 3).unbind(2)
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True)  # [batch, head, length, size]
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        widened: torch.Tensor = self.mlp(self.before_mlp(x))
        return x + widened
