"""Packing of a model's linear layers and embeddings by DeepSpeed's section `weight_quantization`, in place."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from windlass.base.errors import ConfigError, WeightFormatError
from windlass.base.log import logger
from windlass.compress.conv1d_layers import use_linear_class
from windlass.compress.save_refusal import refuse_packed_saves
from windlass.config.compression_section import ModuleQuantization, WeightQuantization
from windlass.kernels.grouped_formats import RangeWeightFormat
from windlass.kernels.packed_linear import PackedEmbedding, PackedLinear, PackedMatrix
from windlass.kernels.weight_format import WeightFormat, get_weight_format, list_weight_formats

SECTION = "weight_quantization"
_KINDS = (nn.Linear, nn.Embedding)

Gather = Callable[[list[nn.Parameter]], AbstractContextManager[Any]]
"""Function that returns a context in which parameters are unsharded."""


def is_requested(section: WeightQuantization) -> bool:
    """Return True if a section requests packing."""
    wanted = section.quantized_initialization.num_bits is not None or bool(section.post_init_quant)
    return section.enabled and wanted


def module_format(options: ModuleQuantization, where: str) -> WeightFormat:
    """Return the weight format for the keys of `options`; `where` is their path in the configuration.

    Raises:
        ConfigError: no weight format has these properties.
    """
    bits, group = options.num_bits, options.group_size
    if bits is None:
        raise ConfigError(f"{where}.num_bits is missing; write 4 or 8")
    if not options.symmetric:
        return RangeWeightFormat(bits, group, options.group_dim)
    name = f"int{bits}_g{group}"
    if options.group_dim != 1 or name not in list_weight_formats():
        raise ConfigError(
            f"{where} is symmetric with num_bits {bits}, group_size {group} and group_dim {options.group_dim}, which "
            "no weight format is; write symmetric false, or 2, 3, 4, 6 or 8 bits in groups of 32, 64 or 128 along 1"
        )
    return get_weight_format(name)


def initial_format(section: WeightQuantization) -> WeightFormat | None:
    """Return the format of `quantized_initialization`; None: the section packs nothing from the start."""
    options = section.quantized_initialization
    if not section.enabled or options.num_bits is None:
        return None
    return module_format(options, f"{SECTION}.quantized_initialization")


def quantize_weights(
    model: nn.Module,
    section: WeightQuantization,
    *,
    gather: Gather | None = None,
    shard: Callable[[PackedMatrix], None] | None = None,
) -> set[int]:
    """Pack the linear layers and embeddings that a section names, in place and one at a time.

    Modules that share a weight and have the same format share the packed weight.

    Args:
        gather: context manager that unshards the weights of one module; None: the weights are not sharded.
        shard: called with each packed module, once for modules that share a weight; None: nothing is sharded.

    Returns:
        Ids of the parameters that are no longer in the model.

    Raises:
        ConfigError: no weight format has a section's properties, a key of `post_init_quant` matches no module, two keys
            with different formats match one module, or a format does not fit a weight.
    """
    if not is_requested(section):
        return set()
    use_linear_class(model)
    rules = {
        key: module_format(one, f"{SECTION}.post_init_quant.{key}") for key, one in section.post_init_quant.items()
    }
    first = initial_format(section)
    chosen: dict[str, WeightFormat] = {}
    found: set[str] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        keys = [key for key in rules if key in name]
        found.update(keys if isinstance(module, (*_KINDS, PackedMatrix)) else ())
        if type(module) not in _KINDS:
            continue
        if len({rules[key].name for key in keys}) > 1:
            raise ConfigError(f"{SECTION}.post_init_quant: {name!r} contains the keys {keys}; write narrower ones")
        if keys:
            chosen[name] = rules[keys[0]]
            if (reason := misfit(chosen[name], module)) is not None:
                raise ConfigError(f"{SECTION}.post_init_quant.{keys[0]}: {name!r} cannot be packed: {reason}")
        elif first is not None and _fits(first, name, module):
            chosen[name] = first
    for key in rules:
        if key not in found:
            raise ConfigError(
                f"{SECTION}.post_init_quant.{key}: no linear layer or embedding of the model has a name with {key!r}; "
                "write a part of one"
            )
    return pack_chosen(model, chosen, gather=gather, shard=shard)


def pack_chosen(
    model: nn.Module,
    chosen: dict[str, WeightFormat],
    *,
    gather: Gather | None = None,
    shard: Callable[[PackedMatrix], None] | None = None,
) -> set[int]:
    """Replace modules of a model by packed ones; see `quantize_weights`.

    Args:
        chosen: format of each module, by its name.
    """
    gone: set[int] = set()
    places: dict[int, tuple[nn.Module, list[str]]] = {}  # a module may have several names
    members: dict[tuple[int, str], list[int]] = {}  # modules with the same weight and format
    for name, form in chosen.items():
        module = model.get_submodule(name)
        if id(module) not in places:
            members.setdefault((id(_weight(module)), form.name), []).append(id(module))
        places.setdefault(id(module), (module, []))[1].append(name)
    for modules in members.values():
        first: PackedMatrix | None = None
        for place in modules:
            module, names = places.pop(place)  # no reference is left here, so that its weight is freed
            form = chosen[names[0]]
            gone.add(id(_weight(module)))
            packed = empty_packed(module, form)
            if first is None:
                with nullcontext() if gather is None else gather([_weight(module)]):
                    tensors = form.pack(_weight(module))
                packed.set_packed(tensors)
                del tensors
            else:
                packed.share(first)
            del module
            for name in names:
                model.set_submodule(name, packed)
            if shard is not None and first is None:
                shard(packed)
            first = first or packed
    refuse_packed_saves()
    return gone - {id(parameter) for parameter in model.parameters()}


def pack_linear_children(module: nn.Module, form: WeightFormat) -> None:
    """Pack the linear layers inside a module that has just been built, if its weights exist.

    [Note: packed from the start] A linear layer is packed when the module that contains it becomes part of another one,
    e.g. when a block joins the list of blocks, so that only about one block is unpacked at a time. Embeddings and the
    children of the outermost module are packed at the end of the construction, because they may share weights until
    then. Values come from the construction, or from a `load_state_dict` of plain weights, which are packed one by one.
    In `from_pretrained` of transformers, whose weights arrive later, `initialize` packs them.
    """
    chosen = {
        name: form
        for name, one in module.named_modules(remove_duplicate=False)
        if name and type(one) is nn.Linear and not one.weight.is_meta and misfit(form, one) is None
    }
    if chosen:
        pack_chosen(module, chosen)


def pack_fitting(model: nn.Module, form: WeightFormat) -> None:
    """Pack all linear layers and embeddings that have values and fit the format."""
    chosen = {
        name: form
        for name, one in model.named_modules(remove_duplicate=False)
        if name and type(one) in _KINDS and not _weight(one).is_meta and _fits(form, name, one)
    }
    pack_chosen(model, chosen)


def _weight(module: nn.Module) -> nn.Parameter:
    return module.get_parameter("weight")


def misfit(form: WeightFormat, module: nn.Module) -> str | None:
    """Return the reason for which a format cannot pack a linear layer or embedding; None: the format can pack it."""
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return "it renormalizes its rows, or has sparse gradients"
    if isinstance(form, RangeWeightFormat):
        try:
            form.check_shape(*_weight(module).shape)
        except WeightFormatError as error:
            return str(error)
    return None


def _fits(form: WeightFormat, name: str, module: nn.Module) -> bool:
    reason = misfit(form, module)
    if reason is not None:
        logger.warning("%s: %r keeps its weights: %s", SECTION, name, reason)
    return reason is None


def empty_packed(module: nn.Module, form: WeightFormat, dtype: torch.dtype | None = None) -> PackedMatrix:
    """Return a packed module without values to replace a linear layer or an embedding. It has the bias of the linear
    layer.

    Args:
        dtype: dtype of an embedding's outputs; None: the dtype of its weight.
    """
    weight = _weight(module)
    device = None if weight.is_meta else weight.device
    if isinstance(module, nn.Embedding):
        rows, columns = module.num_embeddings, module.embedding_dim
        table = PackedEmbedding(rows, columns, weight_format=form, device=device, dtype=dtype or weight.dtype)
        return table.train(module.training)
    assert isinstance(module, nn.Linear)
    packed = PackedLinear(module.in_features, module.out_features, False, weight_format=form, device=device)
    packed.register_parameter("bias", module.bias)
    return packed.train(module.training)
