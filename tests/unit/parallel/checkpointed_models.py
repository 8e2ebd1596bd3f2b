"""Small models that run with and without activation checkpointing, which must not change their results."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, nn

Through = Callable[..., Any]
"""Type of `through(function, *args, **kwargs)`, which calls the function with or without checkpointing."""

WIDTH, WORDS = 32, 24


def plainly(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call the function without checkpointing."""
    return function(*args, **kwargs)


class Layer(nn.Module):
    """Residual feed-forward layer with dropout, as deep as half a transformer layer."""

    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        h = self.dropout(F.gelu(self.up(self.norm(x))))
        return x + self.down(h if scale is None else h * scale)


class Net(nn.Module):
    """Model of an embedding, layers and a head. Subclasses choose how `through` runs the layers."""

    def __init__(self, through: Through = plainly, layers: int = 3) -> None:
        super().__init__()
        self.through = through
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x

    def forward(self, ids: Tensor) -> Tensor:
        logits = self.head(self.body(self.embed(ids)))
        return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Tied(Net):
    """Model whose head shares the weight of the embedding."""

    def __init__(self, through: Through = plainly) -> None:
        super().__init__(through)
        self.head.weight = self.embed.weight


class Twice(Net):
    """Model that calls every layer twice."""

    def body(self, x: Tensor) -> Tensor:
        for block in [*self.blocks, *self.blocks]:
            x = self.through(block, x)
        return x


class Frozen(Net):
    """Model whose embedding and first layer are frozen, so that the first input needs no gradient."""

    def __init__(self, through: Through = plainly) -> None:
        super().__init__(through)
        self.embed.requires_grad_(False)
        self.blocks[0].requires_grad_(False)
        self.blocks[2].up.requires_grad_(False)


class Nested(Net):
    """Model with checkpoints inside checkpoints."""

    def body(self, x: Tensor) -> Tensor:
        def pair(x: Tensor) -> Tensor:
            for block in self.blocks[:2]:
                x = self.through(block, x)
            return x

        return self.through(self.blocks[2], self.through(pair, x))


class ReentrantInside(Net):
    """Model with torch's reentrant checkpoint inside a windlass checkpoint."""

    def body(self, x: Tensor) -> Tensor:
        def pair(x: Tensor) -> Tensor:
            for block in self.blocks[:2]:
                if self.through is plainly:
                    x = block(x)
                else:
                    x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=True)
            return x

        return self.through(self.blocks[2], self.through(pair, x))


class Parts(NamedTuple):
    """Result of a call: two tensors and a string."""

    x: Tensor
    more: list[Tensor]
    name: str


class Arguments(Net):
    """Model whose layers take keywords, containers, a partial and an input twice, and also return non-tensors."""

    def body(self, x: Tensor) -> Tensor:
        scale = torch.linspace(0.5, 1.5, 64)

        def many(pair: tuple[Tensor, Tensor], index: int, options: dict[str, Any], *, again: Tensor) -> Parts:
            x, y = pair
            assert x is y and again is x
            out = self.blocks[index](x, scale=options["scales"][0])
            return Parts(out, [out * 0.5, x + y], options["name"])

        parts = self.through(many, (x, x), 0, {"scales": [scale], "name": "a"}, again=x)
        assert isinstance(parts, Parts) and parts.name == "a"
        x = parts.x + parts.more[0] + parts.more[1]
        return self.through(partial(self.blocks[1], scale=scale), x)


class Uneven(Net):
    """Model with an unused output and a call whose result is dropped."""

    def body(self, x: Tensor) -> Tensor:
        def two(x: Tensor) -> tuple[Tensor, Tensor]:
            return self.blocks[0](x), self.blocks[1](x)

        used, _ = self.through(two, x)
        self.through(self.blocks[2], used)
        return used


class Shapes(Net):
    """Model with inputs that are sliced, transposed, expanded, and of other dtypes."""

    def body(self, x: Tensor) -> Tensor:
        wide = torch.cat([x, x * 2], dim=-1)
        left, right = wide.chunk(2, dim=-1)
        mask = (torch.arange(x.shape[1]) % 2 == 0).expand(x.shape[0], 4, x.shape[1])

        def mix(left: Tensor, right: Tensor, turned: Tensor, mask: Tensor) -> Tensor:
            x = left + right * turned.transpose(0, 1)
            return self.blocks[0](x.masked_fill(mask[:, 0, :, None], 0.1))

        return self.through(self.blocks[1], self.through(mix, left, right, x.transpose(0, 1), mask))


NETS: dict[str, type[Net]] = {
    kind.__name__: kind for kind in (Net, Tied, Twice, Frozen, Nested, ReentrantInside, Arguments, Uneven, Shapes)
}


def ids(seed: int = 0) -> Tensor:
    """Return token ids of shape `[4, 10]`."""
    return torch.randint(0, WORDS, (4, 10), generator=torch.Generator().manual_seed(seed))


def trained(name: str, through: Through, steps: int = 2, **more: Any) -> dict[str, Tensor]:
    """Return the losses and gradients of every step and the final state of the generator, by name."""
    torch.manual_seed(7)
    model = NETS[name](through)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    results: dict[str, Tensor] = {}
    for step in range(steps):
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=more.get("autocast", False)):
            loss = model(ids(step))
        loss.backward()
        results[f"{step} loss"] = loss.detach()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        results.update({f"{step} {key}": grad.clone() for key, grad in grads.items()})
        optimizer.step()
        optimizer.zero_grad()
    return {**results, "generator": torch.get_rng_state()}


def differences(have: dict[str, Tensor], want: dict[str, Tensor]) -> list[str]:
    """Return the names whose values differ in any bit between two results."""
    assert want
    if have.keys() != want.keys():
        return [f"on one side only: {sorted(have.keys() ^ want.keys())}"]
    return [key for key, value in want.items() if not torch.equal(have[key], value)]
