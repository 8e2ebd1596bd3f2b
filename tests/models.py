"""The zoo: small models that are awkward for an engine that releases, gathers and reduces behind the user's back.

Each `Specimen` says how to build a model, how a micro-batch looks at a given place (step, micro-batch, rank) and how
one micro-batch is trained. Nothing here knows of the engine: the oracle trains the same specimens in plain PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

WIDTH = 16
VOCABULARY = 29
ROWS = 3  # samples in a micro-batch

Batch = dict[str, Any]


@dataclass(frozen=True)
class Place:
    """Which micro-batch: the optimizer step, the micro-batch within it, the rank."""

    step: int
    micro: int
    rank: int

    def generator(self) -> torch.Generator:
        """A generator of its own for every place."""
        seed = 1 + self.step * 10_007 + self.micro * 101 + self.rank * 1_000_003
        return torch.Generator().manual_seed(seed)


def one_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """The usual micro-batch: the model returns its loss."""
    loss = call(**batch)
    backward(loss)
    return loss.detach()


@dataclass(frozen=True)
class Specimen:
    """A model and how it is trained. `train(call, batch, backward)` returns the detached loss of one micro-batch."""

    name: str
    build: Callable[[], nn.Module]
    batch: Callable[[Place], Batch]
    train: Callable[[Callable[..., Any], Batch, Callable[..., None]], Tensor] = one_loss
    traits: frozenset[str] = field(default_factory=frozenset)


def rows(place: Place, count: int = ROWS) -> Batch:
    """A regression micro-batch: x and y [count, WIDTH]."""
    generator = place.generator()
    x = torch.randn(count, WIDTH, generator=generator)
    return {"x": x, "y": torch.tanh(x.roll(1, -1)) + 0.1 * torch.randn(count, WIDTH, generator=generator)}


def many_rows(place: Place) -> Batch:
    """Enough rows for their variance to be well away from zero."""
    return rows(place, 8 * ROWS)


def tokens(place: Place) -> Batch:
    """A language micro-batch: ids [ROWS, 6]."""
    return {"ids": torch.randint(0, VOCABULARY, (ROWS, 6), generator=place.generator())}


def mse(out: Tensor, y: Tensor) -> Tensor:
    """Mean squared error in fp32, whatever the model computes in."""
    return F.mse_loss(out.float(), y.float())


def cross_entropy(logits: Tensor, ids: Tensor) -> Tensor:
    """Next-token loss in fp32."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


class Block(nn.Module):
    """A residual feed-forward block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Regressor(nn.Module):
    """Blocks between nothing and a loss; the base of most specimens."""

    def __init__(self, blocks: int = 2, block: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, WIDTH)

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.head(self.hidden(x)), y)


def mlp() -> nn.Module:
    """Two blocks and a head."""
    return Regressor()


class FourBlocks(nn.Module):
    """Four equal blocks, each above the default persistence threshold, so that stage 3 really shards."""

    def __init__(self, width: int = 192) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))
        self.outward = nn.Linear(width, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.inward(x)
        for block in self.blocks:
            h = block(h)
        return mse(self.outward(h), y)


class Tied(nn.Module):
    """Embedding and head share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.head(h), ids)


class Sibling(nn.Module):
    """The embedding's weight is used by its parent, without calling the embedding a second time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = block(h)
        return cross_entropy(F.linear(h, self.embed.weight), ids)


class SiblingBlock(nn.Module):
    """A block that reads the weight of another block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.reader = nn.ModuleList([BorrowingBlock(self.blocks[0]) for _ in range(2)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in [*self.blocks, *self.reader]:
            x = block(x)
        return mse(x, y)


class BorrowingBlock(nn.Module):
    """Uses the `down` weight of a block that it does not own."""

    def __init__(self, lender: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, 2 * WIDTH)
        self.lender = [lender]  # in a list: not registered as a child

    def forward(self, x: Tensor) -> Tensor:
        return x + F.linear(F.gelu(self.own(x)), self.lender[0].down.weight)


class Siamese(nn.Module):
    """One tower, two inputs, two calls in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.tower(x), self.tower(y).detach()) + mse(self.tower(y), x)


class LayerReuse(nn.Module):
    """One block applied three times in depth, with another in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for index in (0, 1, 0, 0):
            x = self.blocks[index](x)
        return mse(x, y)


def frozen() -> nn.Module:
    """The first block and one matrix of the second are frozen; gradients must pass through both."""
    model = Regressor(blocks=3)
    model.blocks[1].requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return model


def frozen_first() -> nn.Module:
    """Frozen up to the last block, so the first blocks have no backward at all."""
    model = Regressor(blocks=3)
    model.blocks[:2].requires_grad_(False)
    return model


class LoraLinear(nn.Module):
    """A frozen matrix and a trainable low-rank one. `base_dtype` may differ from the adapters' fp32."""

    def __init__(self, base_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).to(base_dtype).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x.to(self.base.weight.dtype))
        return base.to(x.dtype) + self.up(self.down(x))


class LoraBlock(nn.Module):
    """A block of two adapted matrices: two units, frozen and trainable."""

    def __init__(self, base_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.first = LoraLinear(base_dtype)
        self.second = LoraLinear(base_dtype)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.tanh(self.first(self.norm(x))))


def lora() -> nn.Module:
    """Two adapted blocks and a trainable head."""
    return Regressor(block=LoraBlock)


def mixed() -> nn.Module:
    """bf16 frozen base, fp32 norms, fp32 adapters: three kinds of unit in one block."""
    return Regressor(block=lambda: LoraBlock(torch.bfloat16))


class UnusedAlways(nn.Module):
    """A block and a matrix that no forward ever uses."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.forgotten = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.blocks[2](self.blocks[0](x)), y)


class Branches(nn.Module):
    """Takes the left or the right block as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Block()
        self.left = Block()
        self.right = Block()

    def forward(self, x: Tensor, y: Tensor, left: bool) -> Tensor:
        h = self.first(x)
        return mse(self.left(h) if left else self.right(h), y)


def branch_by_step(place: Place) -> Batch:
    """All ranks take the same side; the right side is unused in steps 1, 2 and 4."""
    return {**rows(place), "left": place.step in (1, 2, 4)}


def branch_by_micro(place: Place) -> Batch:
    """Sides change within a step, and in step 3 all take the left one."""
    return {**rows(place), "left": place.step == 3 or place.micro % 2 == 0}


def branch_by_rank(place: Place) -> Batch:
    """Ranks take different sides."""
    return {**rows(place), "left": (place.rank + place.step) % 2 == 0}


class TwoHeads(nn.Module):
    """Returns two losses of one trunk, which may be recomputed in each backward."""

    def __init__(self, recompute: bool = False) -> None:
        super().__init__()
        self.recompute = recompute
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recompute else block(x)
        return mse(self.heads["a"](x), y), mse(self.heads["b"](x), y.flip(-1))


def two_losses(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """One forward, two backwards through a shared trunk."""
    first, second = call(**batch)
    backward(first, retain_graph=True)
    backward(second)
    return (first + second).detach()


def two_forwards(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Forward, forward, backward, backward: both graphs alive at once."""
    first = call(**batch)
    second = call(x=batch["y"], y=batch["x"])
    backward(first)
    backward(second)
    return (first + second).detach()


def alternating(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Forward, backward, forward, backward within one micro-batch."""
    first = call(**batch)
    backward(first)
    second = call(x=batch["y"], y=batch["x"])
    backward(second)
    return (first + second).detach()


def summed_forwards(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Two forwards of the whole model joined in one loss: every module is used twice in one backward."""
    loss = call(**batch) + call(x=batch["y"], y=batch["x"])
    backward(loss)
    return loss.detach()


def retained(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """Two backwards through the very same graph: the gradient counts twice."""
    loss = call(**batch)
    backward(loss, retain_graph=True)
    backward(loss)
    return loss.detach()


def discarded(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """A forward whose graph is dropped, before and after the one that counts."""
    call(x=batch["y"], y=batch["x"])
    loss = call(**batch)
    call(x=batch["y"], y=batch["x"])
    backward(loss)
    return loss.detach()


class Fragile(nn.Module):
    """Raises in the middle of its forward when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(FragileBlock() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, fail: bool = False) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = block(x, fail and index == 1)
        return mse(x, y)


class FragileBlock(nn.Module):
    """A block of `Fragile`."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, x: Tensor, fail: bool) -> Tensor:
        x = self.inner(x)
        if fail:
            raise ArithmeticError("told to fail")
        return x


def interrupted(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """A forward that raises, which the caller survives (out of memory, a bad sample), then one that counts."""
    try:
        call(**batch, fail=True)
    except ArithmeticError:
        pass
    else:
        raise AssertionError("the forward was told to fail")
    return one_loss(call, batch, backward)


def gradient_penalty(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """A penalty on the gradient with respect to the inputs: a backward with a graph inside, then through it."""
    x = batch["x"].clone().requires_grad_()
    loss = call(x=x, y=batch["y"])
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    total = loss + 0.5 * slope.float().square().sum()
    backward(total)
    return total.detach()


class Checkpointed(nn.Module):
    """Every block under activation checkpointing of one kind."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return mse(x, y)


class CheckpointedPairs(nn.Module):
    """A checkpoint around two blocks, and a frozen block inside it."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.blocks[2].requires_grad_(False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for index in (0, 2):
            x = checkpoint(nn.Sequential(*self.blocks[index : index + 2]), x, use_reentrant=self.reentrant)
        return mse(x, y)


@dataclass
class Outputs:
    """An output that is neither a tensor nor a container torch knows."""

    hidden: Tensor
    extra: dict[str, Any]


class Opaque:
    """An output that nothing can look into."""

    def __init__(self, value: Tensor) -> None:
        self._value = value

    def read(self) -> Tensor:
        return self._value


class NestingBlock(nn.Module):
    """Takes and returns nested containers: dict in, tuple of tuples, dataclass, custom object out."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = Block()

    def forward(self, packed: dict[str, Any]) -> Any:
        out = self.inner(packed["deep"][0])
        if self.kind == "dict":
            return {"deep": [out], "note": "text", "none": None}
        if self.kind == "tuples":
            return ((out, 3), (None, (out * 0.5,)))
        if self.kind == "dataclass":
            return Outputs(out, {"again": out * 0.5})
        return Opaque(out)


class Nested(nn.Module):
    """Passes values between blocks, and out of the model, in every sort of container."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NestingBlock(kind) for kind in ("dict", "tuples", "dataclass", "opaque"))

    def forward(self, batch: dict[str, Tensor]) -> Outputs:
        packed = self.blocks[0]({"deep": [batch["x"]]})
        pairs = self.blocks[1](packed)
        record = self.blocks[2]({"deep": [pairs[0][0] + pairs[1][1][0]]})
        opaque = self.blocks[3]({"deep": [record.hidden + record.extra["again"]]})
        return Outputs(opaque.read(), {"loss": (mse(opaque.read(), batch["y"]),)})


def nested_loss(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """The loss hides in a tuple in a dict in a dataclass; the batch is one nested argument."""
    loss = call(batch).extra["loss"][0]
    backward(loss)
    return loss.detach()


class LossOutside(nn.Module):
    """Returns predictions; the loss is computed by the caller."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        return x, states


def loss_outside(call: Callable[..., Any], batch: Batch, backward: Callable[..., None]) -> Tensor:
    """A loss of several outputs of the model."""
    out, states = call(batch["x"])
    loss = mse(out, batch["y"]) + 0.1 * states[0].float().square().mean()
    backward(loss)
    return loss.detach()


class Normalised(nn.Module):
    """BatchNorm: running statistics and an integer counter as buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return mse(self.out(torch.relu(self.norm(self.inward(x)))), y)


class BufferInForward(nn.Module):
    """A buffer that the forward both reads and writes, so ranks that do not share it compute something else."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centre", torch.randn(WIDTH))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        shifted = x - self.centre.clone()
        with torch.no_grad():
            self.centre.mul_(0.5).add_(x.mean(0), alpha=0.5)
            self.steps += 1
        for block in self.blocks:
            shifted = block(shifted)
        return mse(shifted, y)


class OddShapes(nn.Module):
    """0-dimensional, one-element, empty and prime-sized parameters, in a block and on the root."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))
        self.blocks = nn.ModuleList(OddBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x * self.scale, y) + self.empty.float().sum()


class OddBlock(nn.Module):
    """One of the blocks of `OddShapes`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.tensor(0.5))
        self.one = nn.Parameter(torch.ones(1))
        self.odd = nn.Parameter(torch.randn(7, 1) * 0.1)
        self.none = nn.Parameter(torch.empty(3, 0))
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        extra = self.odd.sum() * self.one + self.none.sum()
        return x + self.gate * torch.tanh(self.inner(x) + extra)


class OtherMethod(nn.Module):
    """Blocks are entered through a method other than forward."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(MethodBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks[0].encode(x)
        x = self.blocks[1](x)
        return mse(self.blocks[0].decode(x), y)


class MethodBlock(nn.Module):
    """Has `encode` and `decode` beside `forward`; owns a parameter that all three read directly."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.up = nn.Linear(WIDTH, WIDTH)

    def encode(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(x)) + self.bias

    def decode(self, x: Tensor) -> Tensor:
        return F.linear(x - self.bias, self.up.weight.t())

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x) + self.decode(x)


class InPlace(nn.Module):
    """Blocks whose first act is to change their input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inward = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH), nn.SiLU(inplace=True)) for _ in range(3)
        )

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x)
        x += 1.0
        return mse(x, y)


class CrossBlock(nn.Module):
    """Attends to encoder states that every block of the decoder shares; takes keywords only."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(WIDTH, WIDTH)
        self.value = nn.Linear(WIDTH, WIDTH)
        self.inner = Block()

    def forward(self, *, hidden: Tensor, encoder_states: Tensor) -> Tensor:
        weights = torch.softmax(self.query(hidden) @ encoder_states.transpose(-1, -2) / WIDTH, -1)
        return self.inner(hidden + weights @ self.value(encoder_states))


class CrossAttention(nn.Module):
    """An encoder whose output reaches every decoder block: its gradient arrives late and in parts."""

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
    """nn.LSTM keeps flat weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.lstm = nn.LSTM(WIDTH, WIDTH, num_layers=2, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        out, _ = self.lstm(self.embed(ids))
        return cross_entropy(self.head(out), ids)


class Attention(nn.Module):
    """nn.MultiheadAttention reads its projections' weights without calling them."""

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


class WeightNorm(nn.Module):
    """Parametrized weights: the parameters live on a child module that the block never calls by name."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        doubled = nn.utils.parametrize.register_parametrization(nn.Linear(WIDTH, WIDTH), "weight", Doubled())
        self.own = nn.ModuleList([doubled])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in [*self.blocks, *self.own]:
            x = torch.tanh(block(x))
        return mse(x, y)


class Doubled(nn.Module):
    """A parametrization that owns a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(1))

    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight * self.gain


class RootParameter(nn.Module):
    """Parameters directly on the root, one used before and one after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
        self.after = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x @ self.before
        for block in self.blocks:
            x = block(x)
        return mse(x + self.after, y)


class Containers(nn.Module):
    """ModuleDict, ParameterList, ParameterDict, Sequential within Sequential."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleDict({name: nn.Sequential(nn.Sequential(Block()), Block()) for name in ("a", "b")})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(WIDTH)) for _ in range(3)])
        self.biases = nn.ParameterDict({name: nn.Parameter(torch.zeros(WIDTH)) for name in ("a", "b")})

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for gain, name in zip(self.gains, ("a", "b", "a"), strict=True):
            x = self.towers[name](x * gain) + self.biases[name]
        return mse(x, y)


class StashingBlock(nn.Module):
    """Leaves an auxiliary loss on itself for the root to collect, as routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.inner = Block()
        self.aux: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        probabilities = torch.softmax(self.router(x), -1)
        self.aux = probabilities.float().mean(0).square().sum()
        return self.inner(x * (1 + probabilities[..., :1]))


class Stashed(nn.Module):
    """Collects auxiliary losses after the blocks that made them are done."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(StashingBlock() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return mse(x, y) + 0.1 * sum(block.aux for block in self.blocks)


class Convolutions(nn.Module):
    """Convolutions with 4-D weights, a group norm and a transposed convolution."""

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


class Untidy(nn.Module):
    """Some output of a block is dropped, another is detached, and a third returns its input unchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.passing = nn.Identity()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.passing(self.blocks[0](x))
        self.blocks[1](h)  # its output is never used, its parameters get no gradient
        with torch.no_grad():
            target = self.blocks[2](y)
        return mse(self.blocks[3](h), y + 0.1 * target) + mse(self.blocks[2](h.detach()), y)


def _specimen(
    name: str, build: Callable[[], nn.Module], batch: Any = rows, train: Any = one_loss, *traits: str
) -> Specimen:
    return Specimen(name, build, batch, train, frozenset(traits))


# Traits: `moving` - which parameters get a gradient depends on the place; `divergent` - ranks run different modules;
# `chaotic` - gradients no larger than their rounding, which AdamW would blow up to full steps;
# `fp32` - made of its own dtypes, or unstable in 16 bits; `rounds` - computes in 16 bits whatever the precision;
# `once` - the forward depends on buffers that ranks share, which DDP's rule settles only without accumulation.
ZOO: dict[str, Specimen] = {
    specimen.name: specimen
    for specimen in (
        _specimen("mlp", mlp),
        _specimen("four_blocks", FourBlocks, rows, one_loss, "chaotic"),
        _specimen("tied", Tied, tokens),
        _specimen("sibling", Sibling, tokens),
        _specimen("sibling_block", SiblingBlock),
        _specimen("siamese", Siamese),
        _specimen("layer_reuse", LayerReuse),
        _specimen("frozen", frozen),
        _specimen("frozen_first", frozen_first),
        _specimen("lora", lora),
        _specimen("mixed", mixed, rows, one_loss, "fp32", "rounds"),
        _specimen("unused_always", UnusedAlways),
        _specimen("unused_by_step", Branches, branch_by_step, one_loss, "moving"),
        _specimen("unused_by_micro", Branches, branch_by_micro, one_loss, "moving"),
        _specimen("unused_by_rank", Branches, branch_by_rank, one_loss, "moving", "divergent"),
        _specimen("two_losses", TwoHeads, rows, two_losses),
        _specimen("two_forwards", mlp, rows, two_forwards),
        _specimen("alternating", mlp, rows, alternating),
        _specimen("summed_forwards", mlp, rows, summed_forwards),
        _specimen("retain_graph", mlp, rows, retained),
        _specimen("discarded_forward", mlp, rows, discarded),
        _specimen("interrupted_forward", Fragile, rows, interrupted),
        _specimen("gradient_penalty", mlp, rows, gradient_penalty),
        _specimen("checkpoint_two_losses", lambda: TwoHeads(recompute=True), rows, two_losses),
        _specimen("checkpoint_reentrant", lambda: Checkpointed(True)),
        _specimen("checkpoint", lambda: Checkpointed(False)),
        _specimen("checkpoint_pairs_reentrant", lambda: CheckpointedPairs(True)),
        _specimen("checkpoint_pairs", lambda: CheckpointedPairs(False)),
        _specimen(
            "nested", Nested, lambda place: {"batch": rows(place)}, lambda c, b, k: nested_loss(c, b["batch"], k)
        ),
        _specimen("loss_outside", LossOutside, rows, loss_outside),
        _specimen("batch_norm", Normalised, many_rows, one_loss, "chaotic", "fp32"),
        _specimen("buffer_in_forward", BufferInForward, rows, one_loss, "once"),
        _specimen("odd_shapes", OddShapes),
        _specimen("other_method", OtherMethod),
        _specimen("in_place", InPlace),
        _specimen("cross_attention", CrossAttention, tokens, one_loss),
        _specimen("lstm", Recurrent, tokens),
        _specimen("attention", Attention, tokens, one_loss, "chaotic"),
        _specimen("weight_norm", WeightNorm),
        _specimen("root_parameter", RootParameter),
        _specimen("containers", Containers),
        _specimen("stashed", Stashed),
        _specimen("convolutions", Convolutions),
        _specimen("untidy", Untidy),
    )
}


def cast(batch: Any, dtype: torch.dtype) -> Any:
    """The batch with its floating-point tensors in `dtype`."""
    if isinstance(batch, Tensor):
        return batch.to(dtype) if batch.is_floating_point() else batch
    if isinstance(batch, dict):
        return {key: cast(value, dtype) for key, value in batch.items()}
    return batch
