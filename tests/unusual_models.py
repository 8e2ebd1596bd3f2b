"""Models with unusual but correct user code.

They cover cases that `models` lacks: tables with sparse gradients, full `nn.Transformer`s, user-defined hooks,
containers that torch does not traverse, inner loops with second derivatives, and parameters that modules pass to each
other.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, namedtuple
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.models import VOCABULARY, WIDTH, Block, Regressor, Specimen, cross_entropy, mse, one_loss, rows, tokens


class SparseTables(nn.Module):
    """Model of tables with sparse gradients, one of them used twice. The oracle clips: it needs `sparse=False`."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH, sparse=sparse)
        self.bag = nn.EmbeddingBag(VOCABULARY, WIDTH, mode="sum", sparse=sparse)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids) + self.bag(ids).unsqueeze(1) + self.embed(ids.flip(0))
        for block in self.blocks:
            h = block(h)
        return cross_entropy(self.head(h), ids)


class WholeTransformer(nn.Module):
    """Model with torch's own encoder and decoder: lists within modules within a module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.net = nn.Transformer(WIDTH, 2, 2, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1])
        return cross_entropy(self.head(self.net(h, h, tgt_mask=mask)), ids)


class Gated(nn.Module):
    """Model with a bidirectional GRU of two layers, which has sixteen parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.gru = nn.GRU(WIDTH, 8, 2, bidirectional=True, batch_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        return cross_entropy(self.head(self.gru(self.embed(ids))[0]), ids)


def old_weight_norm() -> nn.Module:
    """Return a model with the hook-based weight norm: a pre-hook computes each weight and sets it on its module."""
    model = Regressor()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deprecated, and still in use
        for block in model.blocks:
            torch.nn.utils.weight_norm(block.up)
    return model


class GeneratorBlock(Block):
    """Block whose input is the sum of an iterable of tensors."""

    def forward(self, parts: Any) -> Tensor:
        return super().forward(sum(parts))


class Generators(nn.Module):
    """Model that passes generators to its blocks. Hooks cannot find the tensors in a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(GeneratorBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(part * 0.5 for part in (x, x))
        return mse(self.head(x), y)


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Bag:
    """Dataclass with a tensor, and optionally a dict with a parameter."""

    h: Tensor
    extra: Any = None


class Output(OrderedDict[str, Tensor]):
    """Output class like transformers' ModelOutput."""


class KeywordBlock(Block):
    """Block that takes keywords only. Returns a named tuple (`kind` 0), a dataclass (1) or a mapping (2)."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *, bag: Any) -> Any:
        h = bag.h if isinstance(bag, Bag) else bag["h"] if isinstance(bag, dict) else bag.a
        out = super().forward(h)
        return (Pair(out, 1), Bag(out), Output(h=out))[self.kind]


class Keywords(nn.Module):
    """Model with blocks that pass every kind of container, the first with a leaf tensor that requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeywordBlock(kind) for kind in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        bag: Any = Bag(x.clone().requires_grad_(), {"x": self.start})
        for block in self.blocks:
            bag = block(bag=bag)
        return mse(self.head(bag["h"] + self.start), y)


class OwnLinear(torch.autograd.Function):
    """Autograd function that stores the weight as an attribute of its context, not by `save_for_backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        return gradient @ ctx.weight, gradient.t() @ x


class FunctionBlock(Block):
    """Block that computes with a user-defined autograd function."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(OwnLinear.apply(self.norm(x), self.up.weight) + self.up.bias))


class Table(nn.Module):
    """Module that returns its parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self) -> Tensor:
        return self.weight


class ReturnsParameter(Regressor):
    """Model that computes with a parameter that a module returned."""

    def __init__(self) -> None:
        super().__init__()
        self.table = Table()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight = self.table()
        return mse(self.head(F.linear(self.hidden(x), weight)) + x @ weight.t(), y)


class WithoutCall(Regressor):
    """Model that calls `block.forward(x)`, which skips all hooks."""

    def hidden(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class InnerLoop(nn.Module):
    """Model with one inner training step by `functional_call`. The outer gradient has second derivatives."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList([Block()])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.blocks[0](x)
        slow = dict(self.net.named_parameters())
        inner = mse(torch.func.functional_call(self.net, slow, (x,)), y)
        result = torch.autograd.grad(inner, list(slow.values()), create_graph=True)
        fast = {name: p - 0.1 * g for (name, p), g in zip(slow.items(), result, strict=True)}
        return mse(torch.func.functional_call(self.net, fast, (x,)), y)


class SharedModules(nn.Module):
    """Model with one block in two lists."""

    def __init__(self) -> None:
        super().__init__()
        block = Block()
        self.one = nn.ModuleList([block, Block()])
        self.two = nn.ModuleList([Block(), block])
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in [*self.one, *self.two]:
            x = block(x)
        return mse(self.head(x), y)


class BorrowingBlock(Block):
    """Block that receives parameters of its parent as arguments."""

    def forward(self, x: Tensor, scale: Tensor, table: dict[str, Tensor]) -> Tensor:
        return super().forward(x) * scale + table["t"][0]


class PassesParameters(nn.Module):
    """Model that passes its own parameters to its blocks, directly and in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(BorrowingBlock() for _ in range(2))
        self.scale, self.t = nn.Parameter(torch.rand(WIDTH) + 0.5), nn.Parameter(torch.randn(2, WIDTH))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, self.scale, table={"t": self.t})
        return mse(self.head(x), y)


def hooked() -> nn.Module:
    """Return a model with user-defined hooks that read weights before and after the forward and in the backward."""
    model = Regressor(3)
    first, second, third = model.blocks
    first.register_forward_hook(lambda module, args, out: out * 1.5 + module.up.weight.sum() * 0.01)
    second.register_forward_pre_hook(lambda module, args: (args[0] * module.norm.weight.mean(),))
    third.register_full_backward_hook(
        lambda module, inward, outward: tuple(g * (1 + module.down.weight.detach().mean()) for g in inward)
    )
    return model


class Target(Regressor):
    """Model that runs its blocks twice: under `no_grad` for a target, and with gradients."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.hidden(x)
        out = self.hidden(x)
        return mse(self.head(out), y) + mse(out, target * 0.5)


class Forces(Regressor):
    """Model that predicts the gradient of its output with respect to the input, like forces from an energy."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        energy = self.head(self.hidden(x)).sum()
        return mse(torch.autograd.grad(energy, x, create_graph=True)[0], y)


class CheckpointedClosure(Regressor):
    """Model that recomputes a closure that reads the head's weight."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint(self.blocks[0], x, use_reentrant=False)
        x = x + checkpoint(lambda t: self.blocks[1](t) @ self.head.weight, x, use_reentrant=False)
        return mse(self.head(x), y)


class Transformed(nn.Module):
    """Model that calls its blocks inside transforms of torch.func."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x, slow = self.blocks[0](x), dict(self.net.named_parameters())

        def loss(weights: dict[str, Tensor], x: Tensor) -> Tensor:
            return mse(torch.func.functional_call(self.net, weights, (x,)), y)

        step = torch.func.grad(loss)(slow, x)
        rows_of_net = torch.func.vmap(lambda row: torch.func.functional_call(self.net, slow, (row,)))(x)
        fast = {name: weight - 0.1 * step[name] for name, weight in slow.items()}
        return loss(fast, self.blocks[1](x)) + mse(rows_of_net, y)


class Ledger:
    """Object that holds the losses of blocks in a slot (`__slots__`), not in `__dict__`."""

    __slots__ = ("losses",)


class HidingBlock(Block):
    """Block that returns a detached tensor, and passes a loss with its graph to a callback."""

    def forward(self, x: Tensor, leave: Any) -> Tensor:
        out = super().forward(x.detach())
        leave(F.linear(out, self.up.weight).square().mean())
        return out.detach()


class HiddenGraphs(nn.Module):
    """Model that collects the losses of its blocks through a callback."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(HidingBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        ledger = Ledger()
        ledger.losses = []
        for block in self.blocks:
            x = block(x, ledger.losses.append)
        return mse(self.head(x), y) + sum(ledger.losses)


class Scripted(Regressor):
    """Model with a module that `torch.jit` compiled, which accepts no hooks."""

    def __init__(self) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and still in use
            self.compiled = torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()))

    def hidden(self, x: Tensor) -> Tensor:
        return self.compiled(super().hidden(x))


class ManySmall(nn.Module):
    """Model with 200 parameters of one to three elements beside its head."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = nn.ParameterList(nn.Parameter(torch.randn(())) for _ in range(150))
        self.few = nn.ParameterList(nn.Parameter(torch.randn(1 + index % 3)) for index in range(50))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        scale = torch.stack(list(self.numbers)).mean()
        return mse(self.head(x) * scale + sum(few.mean() for few in self.few) / 50, y)


HOSTILE: dict[str, Specimen] = {
    name: Specimen(name, build, batch, one_loss, frozenset(traits))
    for name, build, batch, *traits in (
        ("sparse_tables", lambda: SparseTables(torch.distributed.is_initialized()), tokens),
        ("whole_transformer", WholeTransformer, tokens, "chaotic"),
        ("gru", Gated, tokens),
        ("old_weight_norm", old_weight_norm, rows),
        ("generators", Generators, rows),
        ("keywords", Keywords, rows),
        ("own_function", lambda: Regressor(block=FunctionBlock), rows),
        ("returns_parameter", ReturnsParameter, rows),
        ("without_call", WithoutCall, rows),
        ("inner_loop", InnerLoop, rows),
        ("shared_modules", SharedModules, rows),
        ("passes_parameters", PassesParameters, rows),
        ("hooked", hooked, rows),
        ("target", Target, rows),
        ("forces", Forces, rows),
        ("checkpointed_closure", CheckpointedClosure, rows),
        ("scripted", Scripted, rows),
        ("transformed", Transformed, rows),
        ("hidden_graphs", HiddenGraphs, rows),
        ("many_small", ManySmall, rows),
    )
}
