"""The plan of a model: from its own plan, by tracing, and by the user's table, which goes before both."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from windlass.base.errors import ModelError
from windlass.parallel.tensor.chains import Resolver, find_chains
from windlass.parallel.tensor.declared import declared_plan, read_declared
from windlass.parallel.tensor.experts_layout import layout_of
from windlass.parallel.tensor.inner import language_model
from windlass.parallel.tensor.linear_layers import below, linears
from windlass.parallel.tensor.plan import Cut, Plan, Style, refused
from windlass.parallel.tensor.shares import evenly, joined
from windlass.parallel.tensor.table import read_table
from windlass.parallel.tensor.tracing import find_blocks, trace_block, trace_known
from windlass.parallel.tensor.vocabulary import find_vocabulary, hidden_features
from windlass.parallel.tensor.wishes import Wish

_DIRECT = (Style.PARTIAL, Style.IDENTITY)


def build_plan(model: nn.Module, ranks: int, table: Mapping[str, str] | None = None) -> Plan:
    """How a model is cut over `ranks` ranks; nothing of it is changed, and its values are not looked at.

    A model of transformers, by itself or inside of another one, is cut by its own `tp_plan`, but for what that gathers
    only because it knows no fused sections. What such a plan says nothing of is traced as far as it is understood,
    models without a plan altogether (`tracing`). What the table says goes before all that.

    Args:
        model: whole, or on the meta device.
        ranks: of the axis.
        table: see `read_table`.

    Raises:
        ConfigError: the table is wrong.
        ModelError: a module can't be cut; the message names it and shows how to write its line of the table.
    """
    said = read_table(model, table or {})
    plan = declared_plan(model)
    wishes = read_declared(model, plan) if plan else {}
    wishes = _before(wishes, said)
    vocabulary = find_vocabulary(model, wishes)
    ends = {name: wish for name, wish in wishes.items() if wish.style is not Style.VOCABULARY or name in vocabulary}
    wishes = {**ends, **vocabulary}
    told = len(wishes)
    _trace(model, wishes, strict=not plan)
    sources = ["the model's own tp_plan"] if plan else []
    sources += ["the names and sizes of its layers"] if len(wishes) > told else []
    sources += ["the table"] if said else []
    resolver = Resolver(model, wishes, ranks)
    cuts = [cut for chain in find_chains(wishes) for cut in resolver.cuts(chain)]
    known = {cut.name for cut in cuts}
    for name, wish in wishes.items():
        if name not in known:
            cuts += _single(model, wish, ranks)
    if not any(cut.shares for cut in cuts):
        raise ModelError(
            f"tensor parallelism found nothing to cut in this {type(model).__name__}; write parallel.tensor_table, by "
            f"regular expressions of modules' names with column or row, e.g. "
            f'{{"layers\\\\.\\\\d+\\\\.up": "column", "layers\\\\.\\\\d+\\\\.down": "row"}}'
        )
    return Plan(ranks, " and ".join(sources), _ordered(model, cuts), tuple(resolver.heads), _whole(model, cuts))


def _before(wishes: dict[str, Wish], said: Mapping[str, Wish]) -> dict[str, Wish]:
    """The table goes before what the model says; a module that it names is taken with all that lies in it."""
    kept = {name: wish for name, wish in wishes.items() if not any(below(name, one) for one in said)}
    return {**kept, **said}


def _trace(model: nn.Module, wishes: dict[str, Wish], *, strict: bool) -> None:
    """Add what tracing finds: of all blocks, or only attention of which nobody spoke."""
    hidden = hidden_features(model)
    for name, block in find_blocks(model):
        taken = {one for one in wishes if below(one, name) or one == name}
        taken |= {
            layer.name
            for layer in linears(block, name)
            if any(below(layer.name, one) for one in taken if wishes[one].said)
        }
        found = trace_block(name, block, taken, hidden) if strict else trace_known(name, block, taken)
        wishes.update({wish.name: wish for wish in found if wish.name not in wishes})


def _single(model: nn.Module, wish: Wish, ranks: int) -> list[Cut]:
    """The cuts of what belongs to no chain."""
    if wish.style is Style.VOCABULARY:
        weight = model.get_submodule(wish.name).weight
        size = int(weight.shape[0])  # type: ignore[index]
        if size < ranks:
            raise refused(wish.name, f"{size} tokens are too few for {ranks} ranks")
        return [Cut(wish.name, Style.VOCABULARY, size, evenly(size, ranks), f"{size} tokens", wish.name)]
    if wish.style is Style.EXPERTS:
        return _experts(wish.name, model.get_submodule(wish.name), ranks)
    if wish.style is Style.TAIL:
        return [Cut(wish.name, Style.TAIL, _rotary(model, wish.name), what="its rotary features")]
    return [Cut(wish.name, wish.style)] if wish.style in _DIRECT else []


def _rotary(model: nn.Module, name: str) -> int:
    holder = model.get_submodule(name.rpartition(".")[0])
    config: Any = getattr(holder, "config", None) or getattr(language_model(model)[1], "config", None)
    size = getattr(config, "qk_rope_head_dim", None)
    if not isinstance(size, int):
        raise refused(name, "its config does not tell the number of rotary features, qk_rope_head_dim")
    return size


def _experts(name: str, module: nn.Module, ranks: int) -> list[Cut]:
    """Each expert is cut along its intermediate features, in all parameters; in eights where that is possible, since
    grouped matrix products ask for rows of whole 16 bytes."""
    layout = layout_of(module)
    if isinstance(layout, str):
        raise refused(name, layout)
    size, sections = layout.intermediate, layout.sections
    if size < ranks:
        raise refused(name, f"{size} features of an expert are too few for {ranks} ranks")
    grain = next(grain for grain in (8, 4, 2, 1) if size % grain == 0 and (size // grain >= ranks or grain == 1))
    shares = evenly(size, ranks, grain)
    if layout.interleaved:
        first = tuple(tuple((start * sections, stop * sections) for start, stop in ranges) for ranges in shares)
    else:
        first = joined([(size, shares)] * sections)
    what = f"{sections} x {size} features" if sections > 1 else f"{size} features"
    cuts = [
        Cut(name, Style.EXPERTS, chain=name),
        Cut(f"{name}.{layout.first}", Style.PARAMETER, sections * size, first, what, name, layout.first_dim),
        Cut(f"{name}.{layout.second}", Style.PARAMETER, size, shares, f"{size} features", name, layout.second_dim),
    ]
    if layout.first_bias is not None:
        cuts.append(Cut(f"{name}.{layout.first_bias}", Style.PARAMETER, sections * size, first, what, name, 1))
    if layout.second_bias is not None:
        cuts.append(Cut(f"{name}.{layout.second_bias}", Style.PARTIAL, chain=name))
    return cuts


def _ordered(model: nn.Module, cuts: list[Cut]) -> tuple[Cut, ...]:
    """In the order of the model, a module before its parameters."""
    order: dict[str, int] = {}
    for name, module in model.named_modules():
        order.setdefault(name, len(order))
        for parameter, _ in module.named_parameters(prefix=name, recurse=False):
            order.setdefault(parameter, len(order))
    return tuple(sorted(cuts, key=lambda cut: order[cut.name]))


def _whole(model: nn.Module, cuts: list[Cut]) -> tuple[str, ...]:
    cut = {one.name for one in cuts if one.shares}
    kinds = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    return tuple(name for name in (*kinds, *(layer.name for layer in linears(model))) if name not in cut)
